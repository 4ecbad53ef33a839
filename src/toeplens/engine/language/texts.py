"""Texts cut from documents, and what a model that answers at each token makes of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch.nn import functional as F

from toeplens.ground import invalid
from toeplens.model import Decoder
from toeplens.tasks import Split
from toeplens.tasks.language import Corpus
from toeplens.training.batches import precise

_TOKENS = {"cpu": 2**13, "cuda": 2**18}  # of a pass
_LOGITS = {"cpu": 2**22, "cuda": 2**28}  # that are there at once
FEWEST = 2  # documents that texts must come from, for an interval
SHORTEST = 4  # tokens of a text of which there are halves and heads that look back


@dataclass(frozen=True)
class Texts:
    """Pieces of documents that share no token, equally long.

    tokens     [K, n + 1]: n that are read, each with the one that follows it
    documents  [K] the document that each comes from
    """

    tokens: Int[np.ndarray, "K n1"]
    documents: Int[np.ndarray, "K"]

    def __len__(self) -> int:
        return len(self.tokens)


def cut(corpus: Corpus, split: Split, length: int, most: int, seed: int) -> Texts:
    """At most so many texts of ``length`` tokens (and one more), drawn from all there are, each as likely.

    Documents are cut into pieces from their beginnings on, so that a long one has as much weight as it has text. Fewer
    texts are the first of more. Raises `InputError` where fewer than two documents are long enough.
    """
    if length < SHORTEST:
        raise invalid("length", f"be at least {SHORTEST}", length)
    stream, starts = corpus.stream(split), corpus.starts(split)
    sizes = np.diff(starts) - 1  # without the separator
    pieces = sizes // (length + 1)
    if int((pieces > 0).sum()) < FEWEST:
        raise invalid(
            "length",
            f"be reached by at least {FEWEST} documents of the {split} split",
            got=f"{length}, reached by {int((pieces > 0).sum())}",
        )
    ends = np.cumsum(pieces)
    chosen = np.random.Generator(np.random.Philox(seed)).permutation(int(ends[-1]))[:most]
    documents = np.searchsorted(ends, chosen, side="right")
    begins = starts[documents] + (chosen - (ends - pieces)[documents]) * (length + 1)
    tokens = np.asarray(stream[begins[:, None] + np.arange(length + 1)], dtype=np.int64)
    return Texts(tokens, documents)


def bits_a_byte(corpus: Corpus, split: Split, documents: Int[np.ndarray, "K"]) -> Float[np.ndarray, "K"]:
    """What each text's nats a token are multiplied by: its document's tokens a byte, over the logarithm of 2."""
    tokens = np.diff(corpus.starts(split)) - 1  # without the separator
    return tokens[documents] / corpus.bytes_of(split)[documents] / np.log(2)


def at_once(length: int, device: torch.device) -> int:
    """How many texts of a length are read in one pass."""
    return max(1, _TOKENS.get(device.type, _TOKENS["cpu"]) // length)


@torch.no_grad()
def read(
    model: Decoder, tokens: Int[np.ndarray, "K n1"], first: int = 0
) -> tuple[Float[np.ndarray, "K m"], Bool[np.ndarray, "K m"]]:
    """The loss in nats of each token after the first, from number ``first`` on, and whether it is the likeliest.

    All tokens are read, in one pass a text; ``first`` says of which the answers are wanted. Losses are in float64.
    """
    device = model.readout.weight.device
    model.eval()
    losses, hits = [], []
    for texts in torch.from_numpy(tokens).split(at_once(tokens.shape[1] - 1, device)):
        part = texts.to(device)
        x, context = model.begin(part[:, :-1])
        for layer in range(model.config.num_layers):
            x = model.block(layer).finish(*model.layer_heads(layer, x, context))
        loss, hit = [], []
        size = max(1, _LOGITS.get(device.type, _LOGITS["cpu"]) // (len(part) * model.config.num_classes))
        for start in range(first, x.shape[1], size):
            logits = precise(model.end(x[:, start : start + size], context))
            labels = part[:, 1 + start : 1 + start + size]
            loss.append(F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"))
            hit.append(logits.argmax(-1) == labels)
        losses.append(torch.cat(loss, dim=1).double().cpu().numpy())
        hits.append(torch.cat(hit, dim=1).cpu().numpy())
    return np.concatenate(losses), np.concatenate(hits)


def sliding(
    tokens: Int[np.ndarray, "K n1"], window: int, reader: Callable[[np.ndarray, int], np.ndarray]
) -> Float[np.ndarray, "K n"]:
    """Losses of a text read in windows that overlap by half: each token has at least half a window before it.

    The first window answers for all its tokens, each later one for its second half. ``reader`` gives the losses of
    texts, from a number on, as `read` does.
    """
    length, half = tokens.shape[1] - 1, window // 2
    if length <= window:
        return reader(tokens, 0)
    found = [reader(tokens[:, : window + 1], 0)]
    for end in range(window + half, length + half, half):
        stop = min(end, length)
        done = sum(part.shape[1] for part in found)
        begin = stop - window
        found.append(reader(tokens[:, begin : stop + 1], done - begin))
    return np.concatenate(found, axis=1)
