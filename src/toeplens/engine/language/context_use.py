"""Use of context by a language model: needles, repeated spans, and attention patterns of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.backends import DecoderSource
from toeplens.engine.language.bits import TEST, Interval, compute_losses, cut_passages
from toeplens.lens import AttentionTrace
from toeplens.lens.kit.intervals import wilson_interval
from toeplens.model import Decoder
from toeplens.tasks.corpus import Corpus
from toeplens.tasks.language import LanguageTask
from toeplens.utils import InputError, invalid
from toeplens.utils.records import ApproxShare, ItemType, NonNegative, NonNegativeInt, PositiveInt, Record, Share

LENGTHS = (0.5, 1, 2, 4, 8)  # lengths of needle texts, in training lengths
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DISTANCES = (0.25, 0.5, 0.9, 2, 4, 8)  # distances of repeated spans, in training lengths
KEY, VALUE = 6, 4  # tokens of key and value of a needle
SPAN, UNSCORED = 32, 8  # tokens of a repeated span, and of its beginning that is not scored
_ALPHABET = 26  # number of frequent tokens to draw needles from


@dataclass(frozen=True)
class NeedleRow(Record):
    """Needles at one depth in texts of one length: a random key and its value, and the key again at the end.

    length, factor  tokens per text, and relative to the training length
    depth           0: at the beginning of the text; 1: just before the question
    needles         number of needles; 0 if there are no such texts, or the model cannot read them
    accuracy        accuracy on the value's tokens, given those before them
    bits            bits per token of the value
    why             why there are none; otherwise empty
    """

    length: PositiveInt
    factor: NonNegative
    depth: Share
    needles: NonNegativeInt = 0
    accuracy: Interval | None = None
    bits: Interval | None = None
    reason: str = ""


@dataclass(frozen=True)
class Needles(Record):
    """Needles by depth and length; ``guess`` is chance level among the tokens that needles are drawn from."""

    guess: Share
    rows: tuple[NeedleRow, ...]


@dataclass(frozen=True)
class CopyingRow(Record):
    """Spans of real text that occur twice in another text, at one distance.

    distance, factor  tokens between their beginnings, and relative to the training length
    spans             number of spans; 0 if there are none
    accuracy, bits    accuracy and bits per token on the second span after its first `UNSCORED` tokens
    gain              bits per token saved by the first span: loss without minus loss with it
    """

    distance: PositiveInt
    factor: NonNegative
    spans: NonNegativeInt = 0
    accuracy: Interval | None = None
    bits: Interval | None = None
    gain: Interval | None = None
    reason: str = ""


@dataclass(frozen=True)
class Copying(Record):
    """Copying by distance."""

    rows: tuple[CopyingRow, ...]


def needles(model: Decoder, task: LanguageTask, *, trials: int = 32, seed: int = 0) -> Needles:
    """Insert a key and its value into texts of the test split, and predict the value after the key at the end.

    The needle is a separator, a key of `KEY` and a value of `VALUE` random frequent tokens, and a separator (at byte
    level: letters between newlines). The text ends with a separator and the key. Needles are not in the training text,
    so the value can only come from the context.

    Arguments
        trials  needles per depth and length, each in a different text
        seed    seed of texts and needles
    """
    corpus, rows = task.corpus(), []
    letters = letters_of(corpus)
    for factor in LENGTHS:
        for depth in DEPTHS:
            length = round(factor * task.length)
            result = _needle_result(model, corpus, letters, length, depth, trials, seed)
            rows.append(NeedleRow(length, float(factor), depth, **result))
    return Needles(1 / len(letters), tuple(rows))


def _needle_result(
    model: Decoder, corpus: Corpus, letters: Int[np.ndarray, "m"], length: int, depth: float, trials: int, seed: int
) -> dict[str, Any]:
    """Accuracy and loss on the values of needles, or why they cannot be measured."""
    min_length = 2 * KEY + 2 * VALUE + 3
    if length < min_length:
        return {"reason": f"length must be at least {min_length}, got {length}."}
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, length))))
    ends = np.array([ord("\n") if corpus.is_bytes else corpus.separator])  # newline, or document separator

    def insert_needle(text: np.ndarray) -> np.ndarray:
        key, value = rng.choice(letters, KEY), rng.choice(letters, VALUE)
        needle, question = np.concatenate((ends, key, value, ends)), np.concatenate((ends, key, value))
        room = len(text) - len(needle) - len(question)
        position = round(depth * room)
        return np.concatenate((text[:position], needle, text[position:room], question))

    try:
        texts = cut_passages(corpus, TEST, length, trials, seed)
        losses, hits = compute_losses(model, np.stack([insert_needle(text) for text in texts.tokens]), length - VALUE)
    except InputError as error:
        return {"reason": str(error)}
    return {"needles": len(texts), **_accuracy_and_bits(losses, hits, texts.documents)}


def copying(model: Decoder, task: LanguageTask, *, trials: int = 32, seed: int = 0) -> Copying:
    """Insert a span of one test document twice into the text of another, at several distances.

    The loss on the second span is compared with the loss when the first span is replaced by a different one. The first
    span is at the beginning of the text, so a larger distance means a longer text.

    Arguments
        trials  spans per distance, each in a different text
        seed    seed for drawing texts
    """
    rows = []
    for factor in DISTANCES:
        distance = round(factor * task.length)
        rows.append(CopyingRow(distance, float(factor), **_copy_result(model, task.corpus(), distance, trials, seed)))
    return Copying(tuple(rows))


def _copy_result(model: Decoder, corpus: Corpus, distance: int, trials: int, seed: int) -> dict[str, Any]:
    """The results at one distance, or why there are none."""
    length = distance + SPAN - 1
    if distance < SPAN:
        return {"reason": f"distance: two spans of {SPAN} tokens cannot be {distance} tokens apart."}
    try:
        texts = cut_passages(corpus, TEST, length, trials, seed)
        body = texts.tokens[:, : distance - SPAN]
        span, other = (texts.tokens[rows, -SPAN:] for rows in _donors(texts.documents, seed))
        losses, hits = compute_losses(model, np.concatenate((span, body, span), axis=1), length - (SPAN - UNSCORED))
        control, _ = compute_losses(model, np.concatenate((other, body, span), axis=1), length - (SPAN - UNSCORED))
    except InputError as error:
        return {"reason": str(error)}
    gain = Interval.over((control - losses).mean(1) / np.log(2), texts.documents)
    return {"spans": len(texts), **_accuracy_and_bits(losses, hits, texts.documents), "gain": gain}


def _donors(documents: Int[np.ndarray, "K"], seed: int) -> tuple[Int[np.ndarray, "K"], Int[np.ndarray, "K"]]:
    """For each text, two texts from other documents."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, 1))))
    donors = []
    for document in documents:
        others = np.flatnonzero(documents != document)
        if len(others) < 2:
            raise InputError("spans: fewer than two other documents are long enough.")
        donors.append(rng.choice(others, 2, replace=False))
    first, second = np.array(donors).T
    return first, second


def _accuracy_and_bits(
    losses: Float[np.ndarray, "K m"], hits: Bool[np.ndarray, "K m"], documents: Int[np.ndarray, "K"]
) -> dict[str, Any]:
    accuracy, num_documents = float(hits.mean()), len(np.unique(documents))
    low, high = wilson_interval(round(accuracy * num_documents), num_documents)  # counts each document as one answer
    return {
        "accuracy": Interval(accuracy, min(accuracy, low), max(accuracy, high)),
        "bits": Interval.over(losses.mean(1) / np.log(2), documents),
    }


def letters_of(corpus: Corpus, count: int = _ALPHABET) -> Int[np.ndarray, "m"]:
    """Frequent tokens to draw from. Raises `InputError` if there are fewer than two."""
    letters = np.asarray(corpus.frequent_tokens(count), dtype=np.int64)
    if len(letters) < 2:
        raise invalid("text", "have at least 2 different tokens", len(letters))
    return letters


_HeadShares = Annotated[Float[np.ndarray, "L H"], ItemType(ApproxShare)]
_REPEAT_TOKENS = 64  # number of frequent tokens to draw repeated texts from
_MAX_WEIGHTS = 2**24  # attention weights in memory at once


@dataclass(frozen=True)
class HeadPatterns(Record):
    """Mean attention of each head, over the queries that have such a key.

    previous   on the previous token, in texts of the test split
    first      on the first token, in texts of the test split
    induction  on the token after the earlier copy of the query token, in random tokens repeated once (prefix matching,
               Olsson et al. 2022)
    texts      number of texts of either kind
    """

    previous: _HeadShares
    first: _HeadShares
    induction: _HeadShares
    texts: PositiveInt


@torch.no_grad()
def head_patterns(model: Decoder, task: LanguageTask, *, texts: int = 64, seed: int = 0) -> HeadPatterns:
    """Attention patterns of each head on texts of the training length.

    Arguments
        texts  maximum number of texts of the test split; as many of repeated random tokens
        seed   seed of both
    """
    corpus, half = task.corpus(), task.length // 2
    real = cut_passages(corpus, TEST, task.length, texts, seed).tokens[:, :-1]
    rng = np.random.Generator(np.random.Philox(seed))
    tokens = rng.choice(letters_of(corpus, _REPEAT_TOKENS), (len(real), half))
    queries = torch.arange(1, task.length)
    attention = _mean_weights(model, real, [(queries, queries - 1), (queries, torch.zeros_like(queries))])
    repeats = torch.arange(half, 2 * half - 1)
    (induction,) = _mean_weights(model, np.concatenate((tokens, tokens), axis=1), [(repeats, repeats - half + 1)])
    return HeadPatterns(attention[0], attention[1], induction, len(real))


def _mean_weights(
    model: Decoder, tokens: Int[np.ndarray, "K n"], pairs: list[tuple[Tensor, Tensor]]
) -> list[Float[np.ndarray, "L H"]]:
    """Each head's mean attention at pairs of query and key, over texts and pairs."""
    device = model.readout.weight.device
    inputs = torch.from_numpy(tokens).to(device)
    size = max(1, _MAX_WEIGHTS // (model.config.num_heads * tokens.shape[1] ** 2))
    means: list[list[Tensor]] = [[] for _ in pairs]
    for layer in AttentionTrace(DecoderSource(model), inputs):
        layer_sums = [torch.zeros(model.config.num_heads, dtype=torch.float64) for _ in pairs]
        for start in range(0, len(tokens), size):
            weights = layer.weights(sequences=slice(start, start + size))
            for total, (queries, keys) in zip(layer_sums, pairs, strict=True):
                total += weights[:, :, queries, keys].double().mean(-1).sum(0).cpu()
        for pair_means, total in zip(means, layer_sums, strict=True):
            pair_means.append(total / len(tokens))
    return [torch.stack(pair_means).numpy() for pair_means in means]
