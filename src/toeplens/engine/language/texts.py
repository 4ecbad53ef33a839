"""Texts cut from documents, and the loss of a language model on their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch.nn import functional as F

from toeplens.ground import InputError, invalid
from toeplens.model import Decoder
from toeplens.tasks import Split
from toeplens.tasks.corpus import Corpus
from toeplens.training.batches import precise

_TOKENS = {"cpu": 2**13, "cuda": 2**18}  # per batch
_LOGITS = {"cpu": 2**22, "cuda": 2**28}  # in memory at once
FEWEST = 2  # minimum number of documents, for an interval
SHORTEST = 4  # minimum length of a text in tokens


@dataclass(frozen=True)
class Texts:
    """Non-overlapping pieces of documents of equal length.

    tokens     [K, n + 1]: n input tokens and the token after the last
    documents  [K] index of each text's document
    """

    tokens: Int[np.ndarray, "K n1"]
    documents: Int[np.ndarray, "K"]

    def __len__(self) -> int:
        return len(self.tokens)


def cut(corpus: Corpus, split: Split, length: int, most: int, seed: int) -> Texts:
    """At most ``most`` texts of ``length`` tokens (plus one), drawn uniformly from all pieces.

    Documents are cut into consecutive pieces, so longer documents have more weight. With a smaller ``most``, the texts
    are a prefix of those with a larger one. Raises `InputError` if fewer than two documents are long enough.
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


def longest(corpus: Corpus, split: Split, lengths: Sequence[int], most: int, seed: int) -> tuple[Texts, dict[int, str]]:
    """Texts of the largest of these lengths that enough documents have, and by larger length why there are none.

    Raises `InputError` if no length has any.
    """
    why: dict[int, str] = {}
    *larger, least = sorted(lengths, reverse=True)
    for length in larger:
        try:
            return cut(corpus, split, length, most, seed), why
        except InputError as error:
            why[length] = str(error)
    return cut(corpus, split, least, most, seed), why


def bits_a_byte(corpus: Corpus, split: Split, documents: Int[np.ndarray, "K"]) -> Float[np.ndarray, "K"]:
    """Factor from nats per token to bits per byte for each text: its document's tokens per byte over log 2."""
    tokens = np.diff(corpus.starts(split)) - 1  # without the separator
    return tokens[documents] / corpus.bytes_of(split)[documents] / np.log(2)


@torch.no_grad()
def read(
    model: Decoder, tokens: Int[np.ndarray, "K n1"], first: int = 0
) -> tuple[Float[np.ndarray, "K m"], Bool[np.ndarray, "K m"]]:
    """The loss in nats of each predicted token from index ``first`` on, and whether it is the most likely one.

    Every text is read in one forward pass. Losses are in float64.
    """
    device = model.readout.weight.device
    model.eval()
    losses, hits = [], []
    for texts in torch.from_numpy(tokens).split(max(1, _TOKENS[device.type] // (tokens.shape[1] - 1))):
        part = texts.to(device)
        x, context = model.begin(part[:, :-1])
        for layer in range(model.config.num_layers):
            x = model.block(layer).finish(*model.layer_heads(layer, x, context))
        loss, hit = [], []
        size = max(1, _LOGITS[device.type] // (len(part) * model.config.num_classes))
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
    """Losses of texts read in windows that overlap by half, so that each token has at least half a window of context.

    The first window gives the losses of all its tokens, each later one those of its second half. ``reader`` returns
    losses from an index on, like `read`.
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
