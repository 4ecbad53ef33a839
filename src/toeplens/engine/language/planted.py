"""Use of context by a language model: needles, repeated spans, and attention patterns of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.engine.language.bits import TEST, Interval, cut, read
from toeplens.ground import InputError, invalid
from toeplens.ground.records import AtLeast1, Count, Each, NearlyShare, Positive, Record, Share
from toeplens.lens import AttentionTrace
from toeplens.lens.kit.intervals import wilson
from toeplens.model import Decoder
from toeplens.sources import DecoderSource
from toeplens.tasks.corpus import Corpus
from toeplens.tasks.language import LanguageTask

LENGTHS = (0.5, 1, 2, 4, 8)  # lengths of needle texts, in training lengths
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DISTANCES = (0.25, 0.5, 0.9, 2, 4, 8)  # distances of repeated spans, in training lengths
KEY, VALUE = 6, 4  # tokens of key and value of a needle
SPAN, GIVEN = 32, 8  # tokens of a repeated span, and of its beginning that is not scored
_ALPHABET = 26  # number of frequent tokens to draw needles from


@dataclass(frozen=True)
class Needle(Record):
    """Needles at one depth in texts of one length: a random key and its value, and the key again at the end.

    length, factor  tokens per text, and relative to the training length
    depth           0: at the beginning of the text; 1: just before the question
    needles         number of needles; 0 if there are no such texts, or the model cannot read them
    accuracy        accuracy on the value's tokens, given those before them
    bits            bits per token of the value
    why             why there are none; otherwise empty
    """

    length: AtLeast1
    factor: Positive
    depth: Share
    needles: Count = 0
    accuracy: Interval | None = None
    bits: Interval | None = None
    why: str = ""


@dataclass(frozen=True)
class Needles(Record):
    """Needles by depth and length; ``guess`` is chance level among the tokens that needles are drawn from."""

    guess: Share
    rows: tuple[Needle, ...]


@dataclass(frozen=True)
class Copied(Record):
    """Spans of real text that occur twice in another text, at one distance.

    distance, factor  tokens between their beginnings, and relative to the training length
    spans             number of spans; 0 if there are none
    accuracy, bits    accuracy and bits per token on the second span after its first `GIVEN` tokens
    gain              bits per token saved by the first span: loss without minus loss with it
    """

    distance: AtLeast1
    factor: Positive
    spans: Count = 0
    accuracy: Interval | None = None
    bits: Interval | None = None
    gain: Interval | None = None
    why: str = ""


@dataclass(frozen=True)
class Copying(Record):
    """Copying by distance."""

    rows: tuple[Copied, ...]


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
            found = _needles(model, corpus, letters, length, depth, trials, seed)
            rows.append(Needle(length, float(factor), depth, **found))
    return Needles(1 / len(letters), tuple(rows))


def _needles(
    model: Decoder, corpus: Corpus, letters: Int[np.ndarray, "m"], length: int, depth: float, trials: int, seed: int
) -> dict[str, Any]:
    """Accuracy and loss on the values of needles, or why they cannot be measured."""
    least = 2 * KEY + 2 * VALUE + 3
    if length < least:
        return {"why": f"length must be at least {least}, got {length}."}
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, length))))
    ends = np.array([ord("\n") if corpus.raw else corpus.separator])  # newline, or document separator

    def planted(text: np.ndarray) -> np.ndarray:
        key, value = rng.choice(letters, KEY), rng.choice(letters, VALUE)
        needle, question = np.concatenate((ends, key, value, ends)), np.concatenate((ends, key, value))
        room = len(text) - len(needle) - len(question)
        at = round(depth * room)
        return np.concatenate((text[:at], needle, text[at:room], question))

    try:
        texts = cut(corpus, TEST, length, trials, seed)
        losses, hits = read(model, np.stack([planted(text) for text in texts.tokens]), length - VALUE)
    except InputError as error:
        return {"why": str(error)}
    return {"needles": len(texts), **_told(losses, hits, texts.documents)}


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
        rows.append(Copied(distance, float(factor), **_copied(model, task.corpus(), distance, trials, seed)))
    return Copying(tuple(rows))


def _copied(model: Decoder, corpus: Corpus, distance: int, trials: int, seed: int) -> dict[str, Any]:
    """The results at one distance, or why there are none."""
    length = distance + SPAN - 1
    if distance < SPAN:
        return {"why": f"distance: two spans of {SPAN} tokens cannot be {distance} tokens apart."}
    try:
        texts = cut(corpus, TEST, length, trials, seed)
        body = texts.tokens[:, : distance - SPAN]
        span, other = (texts.tokens[rows, -SPAN:] for rows in _donors(texts.documents, seed))
        losses, hits = read(model, np.concatenate((span, body, span), axis=1), length - (SPAN - GIVEN))
        without, _ = read(model, np.concatenate((other, body, span), axis=1), length - (SPAN - GIVEN))
    except InputError as error:
        return {"why": str(error)}
    gain = Interval.over((without - losses).mean(1) / np.log(2), texts.documents)
    return {"spans": len(texts), **_told(losses, hits, texts.documents), "gain": gain}


def _donors(documents: Int[np.ndarray, "K"], seed: int) -> tuple[Int[np.ndarray, "K"], Int[np.ndarray, "K"]]:
    """For each text, two texts from other documents."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, 1))))
    found = []
    for own in documents:
        there = np.flatnonzero(documents != own)
        if len(there) < 2:
            raise InputError("spans: fewer than two other documents are long enough.")
        found.append(rng.choice(there, 2, replace=False))
    first, second = np.array(found).T
    return first, second


def _told(
    losses: Float[np.ndarray, "K m"], hits: Bool[np.ndarray, "K m"], documents: Int[np.ndarray, "K"]
) -> dict[str, Any]:
    share, many = float(hits.mean()), len(np.unique(documents))
    low, high = wilson(round(share * many), many)  # counts each document as one answer
    return {
        "accuracy": Interval(share, min(share, low), max(share, high)),
        "bits": Interval.over(losses.mean(1) / np.log(2), documents),
    }


def letters_of(corpus: Corpus, most: int = _ALPHABET) -> Int[np.ndarray, "m"]:
    """Frequent tokens to draw from. Raises `InputError` if there are fewer than two."""
    found = np.asarray(corpus.frequent(most), dtype=np.int64)
    if len(found) < 2:
        raise invalid("text", "have at least 2 different tokens", len(found))
    return found


_Shares = Annotated[Float[np.ndarray, "L H"], Each(NearlyShare)]
_REPEATED = 64  # number of frequent tokens to draw repeated texts from
_WEIGHTS = 2**24  # attention weights in memory at once


@dataclass(frozen=True)
class HeadPatterns(Record):
    """Mean attention of each head, over the queries that have such a key.

    previous   on the previous token, in texts of the test split
    first      on the first token, in texts of the test split
    induction  on the token after the earlier copy of the query token, in random tokens repeated once (prefix matching,
               Olsson et al. 2022)
    texts      number of texts of either kind
    """

    previous: _Shares
    first: _Shares
    induction: _Shares
    texts: AtLeast1


@torch.no_grad()
def head_patterns(model: Decoder, task: LanguageTask, *, texts: int = 64, seed: int = 0) -> HeadPatterns:
    """Attention patterns of each head on texts of the training length.

    Arguments
        texts  number of texts of the test split, and of repeated random tokens
        seed   seed of both
    """
    corpus, half = task.corpus(), task.length // 2
    real = cut(corpus, TEST, task.length, texts, seed).tokens[:, :-1]
    rng = np.random.Generator(np.random.Philox(seed))
    once = rng.choice(letters_of(corpus, _REPEATED), (texts, half))
    rows = torch.arange(1, task.length)
    looked = _mean_weights(model, real, [(rows, rows - 1), (rows, torch.zeros_like(rows))])
    again = torch.arange(half, 2 * half - 1)
    (copied,) = _mean_weights(model, np.concatenate((once, once), axis=1), [(again, again - half + 1)])
    return HeadPatterns(looked[0], looked[1], copied, len(real))


def _mean_weights(
    model: Decoder, tokens: Int[np.ndarray, "K n"], pairs: list[tuple[Tensor, Tensor]]
) -> list[Float[np.ndarray, "L H"]]:
    """Each head's mean attention at pairs of query and key, over texts and pairs."""
    device = model.readout.weight.device
    given = torch.from_numpy(tokens).to(device)
    size = max(1, _WEIGHTS // (model.config.num_heads * tokens.shape[1] ** 2))
    sums: list[list[Tensor]] = [[] for _ in pairs]
    for layer in AttentionTrace(DecoderSource(model), given):
        found = [torch.zeros(model.config.num_heads, dtype=torch.float64) for _ in pairs]
        for start in range(0, len(tokens), size):
            weights = layer.weights(sequences=slice(start, start + size))
            for total, (queries, keys) in zip(found, pairs, strict=True):
                total += weights[:, :, queries, keys].double().mean(-1).sum(0).cpu()
        for every, total in zip(sums, found, strict=True):
            every.append(total / len(tokens))
    return [torch.stack(every).numpy() for every in sums]
