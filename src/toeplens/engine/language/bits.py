"""Texts cut from documents; a model's loss on them in bits per byte: by position and on longer texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch.nn import functional as F

from toeplens.lens.kit.intervals import mean_over_clusters
from toeplens.model import Decoder
from toeplens.tasks import Split, baselines
from toeplens.tasks.corpus import Corpus
from toeplens.tasks.language import LanguageTask
from toeplens.training.batches import to_float32
from toeplens.utils import InputError, invalid
from toeplens.utils.formatting import finite_or_none
from toeplens.utils.records import FiniteFloat, NonNegative, NonNegativeInt, PositiveInt, Record, Share

_TOKENS = {"cpu": 2**13, "cuda": 2**18}  # per batch
_LOGITS = {"cpu": 2**22, "cuda": 2**28}  # in memory at once
MIN_DOCUMENTS = 2  # minimum number of documents, for an interval
MIN_LENGTH = 4  # minimum length of a text in tokens


@dataclass(frozen=True)
class Passages:
    """Non-overlapping pieces of documents of equal length.

    tokens     [K, n + 1]: n input tokens and the token after the last
    documents  [K] index of each text's document
    """

    tokens: Int[np.ndarray, "K n1"]
    documents: Int[np.ndarray, "K"]

    def __len__(self) -> int:
        return len(self.tokens)


def cut_passages(corpus: Corpus, split: Split, length: int, limit: int, seed: int) -> Passages:
    """At most ``limit`` texts of ``length`` tokens (plus one), drawn uniformly from all pieces.

    Documents are cut into consecutive pieces, so longer documents have more weight. With a smaller ``limit``, the texts
    are a prefix of those with a larger one. Raises `InputError` if fewer than two documents are long enough.
    """
    if length < MIN_LENGTH:
        raise invalid("length", f"be at least {MIN_LENGTH}", length)
    stream, starts = corpus.stream(split), corpus.splits[split].starts
    sizes = np.diff(starts) - 1  # without the separator
    counts = sizes // (length + 1)
    if int((counts > 0).sum()) < MIN_DOCUMENTS:
        raise invalid(
            "length",
            f"be reached by at least {MIN_DOCUMENTS} documents of the {split} split",
            got=f"{length}, reached by {int((counts > 0).sum())}",
        )
    ends = np.cumsum(counts)
    chosen = np.random.Generator(np.random.Philox(seed)).permutation(int(ends[-1]))[:limit]
    documents = np.searchsorted(ends, chosen, side="right")
    begins = starts[documents] + (chosen - (ends - counts)[documents]) * (length + 1)
    tokens = np.asarray(stream[begins[:, None] + np.arange(length + 1)], dtype=np.int64)
    return Passages(tokens, documents)


def cut_longest(
    corpus: Corpus, split: Split, lengths: Sequence[int], limit: int, seed: int
) -> tuple[Passages, dict[int, str]]:
    """Texts of the largest of these lengths that enough documents have, and by larger length why there are none.

    Raises `InputError` if no length has any.
    """
    reasons: dict[int, str] = {}
    *larger, shortest = sorted(lengths, reverse=True)
    for length in larger:
        try:
            return cut_passages(corpus, split, length, limit, seed), reasons
        except InputError as error:
            reasons[length] = str(error)
    return cut_passages(corpus, split, shortest, limit, seed), reasons


def bpb_scale(corpus: Corpus, split: Split, documents: Int[np.ndarray, "K"]) -> Float[np.ndarray, "K"]:
    """Factor from nats per token to bits per byte for each text: its document's tokens per byte over log 2."""
    tokens = np.diff(corpus.splits[split].starts) - 1  # without the separator
    return tokens[documents] / corpus.splits[split].bytes[documents] / np.log(2)


@torch.no_grad()
def compute_losses(
    model: Decoder, tokens: Int[np.ndarray, "K n1"], first: int = 0
) -> tuple[Float[np.ndarray, "K m"], Bool[np.ndarray, "K m"]]:
    """The loss in nats of each predicted token from index ``first`` on, and whether it is the most likely one.

    Every text is read in one forward pass. Losses are in float64.
    """
    device = model.readout.weight.device
    model.eval()
    losses, hits = [], []
    for texts in torch.from_numpy(tokens).split(max(1, _TOKENS[device.type] // (tokens.shape[1] - 1))):
        batch = texts.to(device)
        x, context = model.start_pass(batch[:, :-1])
        for layer in range(model.config.num_layers):
            x = model.block(layer).finish(*model.layer_heads(layer, x, context))
        loss, hit = [], []
        size = max(1, _LOGITS[device.type] // (len(batch) * model.config.num_classes))
        for start in range(first, x.shape[1], size):
            logits = to_float32(model.compute_logits(x[:, start : start + size], context))
            labels = batch[:, 1 + start : 1 + start + size]
            loss.append(F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"))
            hit.append(logits.argmax(-1) == labels)
        losses.append(torch.cat(loss, dim=1).double().cpu().numpy())
        hits.append(torch.cat(hit, dim=1).cpu().numpy())
    return np.concatenate(losses), np.concatenate(hits)


def sliding_losses(
    tokens: Int[np.ndarray, "K n1"], window: int, reader: Callable[[np.ndarray, int], np.ndarray]
) -> Float[np.ndarray, "K n"]:
    """Losses of texts read in windows that overlap by half, so that each token has at least half a window of context.

    The first window gives the losses of all its tokens, each later one those of its second half. ``reader`` returns
    losses from an index on, like `compute_losses`.
    """
    length, half = tokens.shape[1] - 1, window // 2
    if length <= window:
        return reader(tokens, 0)
    losses = [reader(tokens[:, : window + 1], 0)]
    for end in range(window + half, length + half, half):
        stop = min(end, length)
        num_done = sum(chunk.shape[1] for chunk in losses)
        begin = stop - window
        losses.append(reader(tokens[:, begin : stop + 1], num_done - begin))
    return np.concatenate(losses, axis=1)


FACTORS = (1, 2, 4, 8, 16)  # times the training length
TEST = "test"


@dataclass(frozen=True)
class Interval(Record):
    """A mean over texts with its 95% interval over documents; no interval for a single document."""

    value: FiniteFloat
    low: FiniteFloat | None
    high: FiniteFloat | None

    @classmethod
    def over(cls, values: Float[np.ndarray, "K"], documents: Int[np.ndarray, "K"]) -> Interval:
        """The mean of values of texts."""
        interval = mean_over_clusters(values, documents)
        return cls(interval.value, finite_or_none(interval.low), finite_or_none(interval.high))


@dataclass(frozen=True)
class LengthBits(Record):
    """A model on texts of one length, in bits per byte. Texts of all lengths end in the same tokens.

    length, factor    tokens per text, and relative to the training length
    texts, documents  number of texts and documents; 0 if there are none, or the model cannot read them
    whole    all tokens of the texts, each text in one forward pass
    sliding  the same texts in windows of the training length that overlap by half; at the training length equal to
             ``whole``
    end      last half training length of each text, with the text in one forward pass
    gain     increase of ``end`` compared with a context of one training length; negative if the longer context helps
    why      why there are no values; otherwise empty
    """

    length: PositiveInt
    factor: NonNegative
    texts: NonNegativeInt = 0
    documents: NonNegativeInt = 0
    whole: Interval | None = None
    sliding: Interval | None = None
    end: Interval | None = None
    gain: Interval | None = None
    reason: str = ""

    def verify(self) -> None:
        if any((value is None) != (self.texts == 0) for value in (self.whole, self.sliding, self.end, self.gain)):
            raise ValueError(f"texts must match the results, got {self.texts}.")


@dataclass(frozen=True)
class BitsPerByte(Record):
    """A language model on the test split.

    bits         bits per byte on texts of the training length, each within one document
    accuracy     next-token accuracy
    texts, documents  number of texts and documents
    edges        first positions of the bins 0, 1, 2-3, 4-7, ... in the longest texts that the model can read, and the
                 position after the last
    positions    bits per token in each bin
    lengths      results by length
    ngrams       bits per byte of n-gram models fitted on the training split, on the same texts; by number of context
                 tokens
    """

    bits: Interval
    accuracy: Share
    texts: PositiveInt
    documents: PositiveInt
    edges: Int[np.ndarray, "P1"]
    positions: list[Interval]
    lengths: tuple[LengthBits, ...]
    ngrams: dict[str, float] = field(default_factory=dict)

    def at_factor(self, factor: float) -> LengthBits | None:
        """The result at that multiple of the training length; None if there is none."""
        return next((row for row in self.lengths if row.factor == factor and row.texts), None)


def bits_per_byte(model: Decoder, task: LanguageTask, *, texts: int = 1024, seed: int = 0) -> BitsPerByte:
    """Test a language model on held-out documents.

    Arguments
        texts  number of texts of the training length; a sixteenth as many of 16 times the length, whose ends are used
               for the lengths in between
        seed   seed for drawing texts

    A length that fewer than two documents have, or that the model does not support (such as a table of positions),
    gives a row with the reason.
    """
    corpus = task.corpus()
    short = cut_passages(corpus, TEST, task.length, texts, seed)
    losses, hits = compute_losses(model, short.tokens)
    scale = bpb_scale(corpus, TEST, short.documents)
    rows, documents, by_position = _length_rows(model, corpus, task.length, max(2, texts // FACTORS[-1]), seed)
    length = by_position.shape[1]
    edges = [0, *(2**power for power in range(length.bit_length()) if 2**power < length), length]
    return BitsPerByte(
        bits=Interval.over(scale * losses.mean(1), short.documents),
        accuracy=float(hits.mean()),
        texts=len(short),
        documents=len(np.unique(short.documents)),
        edges=np.array(edges),
        positions=[
            Interval.over(by_position[:, first:last].mean(1) / np.log(2), documents) for first, last in pairwise(edges)
        ],
        lengths=rows,
        ngrams={str(order): float(value) for order, value in ngram_bits(corpus, short).items()},
    )


def ngram_bits(corpus: Corpus, texts: Passages) -> dict[int, float]:
    """Bits per byte of n-gram models on these texts, with the texts' mean number of tokens per byte."""
    scale = float(bpb_scale(corpus, TEST, texts.documents).mean() * np.log(2))
    return {
        order: float(value) * scale
        for order, value in baselines.ngram_bits(corpus.stream("train"), texts.tokens, corpus.vocab_size).items()
    }


def _length_rows(
    model: Decoder, corpus: Corpus, train_length: int, limit: int, seed: int
) -> tuple[tuple[LengthBits, ...], Int[np.ndarray, "K"], Float[np.ndarray, "K n"]]:
    """One row per length; and the losses on the longest texts that the model can read, with their documents."""
    texts, reasons = cut_longest(corpus, TEST, [train_length * factor for factor in FACTORS], limit, seed)
    scale, half = bpb_scale(corpus, TEST, texts.documents), max(1, train_length // 2)

    def reader(tokens: np.ndarray, first: int) -> np.ndarray:
        return compute_losses(model, tokens, first)[0]

    def mean(losses: np.ndarray) -> Interval:
        return Interval.over(scale * losses.mean(1), texts.documents)

    rows, by_length = [], list[np.ndarray]()
    for factor in FACTORS:
        length = train_length * factor
        window = texts.tokens[:, -length - 1 :]  # texts of all lengths are ends of the longest ones
        try:
            if length in reasons:
                raise InputError(reasons[length])
            losses = reader(window, 0)
        except InputError as error:
            rows.append(LengthBits(length, float(factor), reason=str(error)))
            continue
        by_length.append(losses)
        end, short = losses[:, -half:], by_length[0][:, -half:]
        counts = len(texts), len(np.unique(texts.documents))
        values = mean(losses), mean(sliding_losses(window, train_length, reader)), mean(end), mean(end - short)
        rows.append(LengthBits(length, float(factor), *counts, *values))
    return tuple(rows), texts.documents, by_length[-1]
