"""What a language model takes from its context: a planted key's value, a repeated span; and what its heads see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.engine.language.bits import TEST, Interval
from toeplens.engine.language.texts import cut, read
from toeplens.ground import InputError, invalid
from toeplens.ground.reading import Count, Positive, Share
from toeplens.ground.records import AtLeast1, Each, NearlyShare, Record
from toeplens.lens import AttentionTrace
from toeplens.lens.kit.intervals import over_clusters, wilson
from toeplens.model import Decoder
from toeplens.sources import DecoderSource
from toeplens.tasks.language import Corpus, LanguageTask

LENGTHS = (0.5, 1, 2, 4, 8)  # times the training length, of texts with a needle
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DISTANCES = (0.25, 0.5, 0.9, 2, 4, 8)  # times the training length, of repeated spans
KEY, VALUE = 6, 4  # tokens of a needle
SPAN, GIVEN = 32, 8  # tokens of a repeated span, and how many of the second are given before answers count
_ALPHABET = 26  # frequent tokens of which needles are made


@dataclass(frozen=True)
class Needle(Record):
    """Needles at one depth of texts of one length: a random key and its value, and the key again at the end.

    length, factor  tokens of a text, and over the training length
    depth           0: the needle begins the text; 1: it ends where the question begins
    needles         how many; 0 where there is no such text, or the model reads none
    accuracy        share of the value's tokens that are the likeliest, those before them given
    bits            bits a token of the value
    why             why there are none; empty otherwise
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
    """The map of depths by lengths; ``guess`` is the accuracy of a guess among the tokens that needles are made of."""

    guess: Share
    rows: tuple[Needle, ...]


@dataclass(frozen=True)
class Copied(Record):
    """Spans of real text that stand twice in another text, at one distance.

    distance, factor  tokens from the one's beginning to the other's, and over the training length
    spans             how many; 0 where there are none
    accuracy, bits    of the second span's tokens after its first `GIVEN`, and bits a token of these
    gain              bits a token that the first span saves: without it, less with it, on the same tokens
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
    """Plant a key and its value in texts of the test split, and ask for the value at the end.

    The needle is a separator, a key of `KEY` and a value of `VALUE` random frequent tokens, and a separator (at the
    byte level letters between ends of lines); the text ends in a separator and the key again. Nothing of it is in the
    training text, so that the value can come from the context alone.

    Arguments
        trials  needles at each depth and length, each in a text of its own
        seed    of texts and needles
    """
    corpus, rows = task.corpus(), []
    letters = letters_of(corpus)
    for factor in LENGTHS:
        length = round(factor * task.length)

        def planted(text: np.ndarray, rng: np.random.Generator, depth: float) -> np.ndarray:
            key, value = rng.choice(letters, KEY), rng.choice(letters, VALUE)
            ends = np.array([ord("\n") if corpus.raw else corpus.separator])  # the end of a line, or of a document
            needle, question = np.concatenate((ends, key, value, ends)), np.concatenate((ends, key, value))
            room = len(text) - len(needle) - len(question)
            at = round(depth * room)
            return np.concatenate((text[:at], needle, text[at:room], question))

        for depth in DEPTHS:
            told: dict[str, Any] = {"length": length, "factor": float(factor), "depth": depth}

            def make(text: np.ndarray, rng: np.random.Generator, depth: float = depth) -> np.ndarray:
                return planted(text, rng, depth)

            found = _asked(model, corpus, length, VALUE, trials, seed, make, least=2 * KEY + 2 * VALUE + 3)
            rows.append(Needle(**told, why=found) if isinstance(found, str) else Needle(**told, **found))
    return Needles(1 / len(letters), tuple(rows))


def copying(model: Decoder, task: LanguageTask, *, trials: int = 32, seed: int = 0) -> Copying:
    """Repeat a span of one test document in the text of another, at some distance.

    What the model makes of the second span is compared with what it makes of it where another span stands in the
    first one's place. The first span begins the text, so the farther it is the longer the text.

    Arguments
        trials  spans at each distance, each in a text of its own
        seed    of the choice of texts
    """
    corpus = task.corpus()
    return Copying(tuple(_copied(model, corpus, factor, task.length, trials, seed) for factor in DISTANCES))


def _copied(model: Decoder, corpus: Corpus, factor: float, trained: int, trials: int, seed: int) -> Copied:
    distance = round(factor * trained)
    length = distance + SPAN - 1
    if distance < SPAN:
        why = f"distance: two spans of {SPAN} tokens do not stand {distance} tokens apart."
        return Copied(distance, float(factor), why=why)
    try:
        texts = cut(corpus, TEST, length, trials, seed)
        body = texts.tokens[:, : distance - SPAN]
        span, other = (texts.tokens[rows, -SPAN:] for rows in _donors(texts.documents, seed))
        losses, hits = read(model, np.concatenate((span, body, span), axis=1), length - (SPAN - GIVEN))
        without, _ = read(model, np.concatenate((other, body, span), axis=1), length - (SPAN - GIVEN))
    except InputError as error:
        return Copied(distance, float(factor), why=str(error))
    gain = over_clusters((without - losses).mean(1) / np.log(2), texts.documents)
    told = _told(losses, hits, texts.documents)
    return Copied(distance, float(factor), len(texts), **told, gain=Interval.of(gain))


def _donors(documents: Int[np.ndarray, "K"], seed: int) -> tuple[Int[np.ndarray, "K"], Int[np.ndarray, "K"]]:
    """For each text two others, of other documents than its own."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, 1))))
    found = []
    for own in documents:
        there = np.flatnonzero(documents != own)
        if len(there) < 2:
            raise InputError("spans: fewer than two other documents are long enough.")
        found.append(rng.choice(there, 2, replace=False))
    first, second = np.array(found).T
    return first, second


def _asked(
    model: Decoder,
    corpus: Corpus,
    length: int,
    answers: int,
    trials: int,
    seed: int,
    make: Callable[[Int[np.ndarray, "n1"], np.random.Generator], Int[np.ndarray, "n1"]],
    *,
    least: int,
) -> dict[str, Any] | str:
    """How well the last ``answers`` tokens of changed texts are foretold; or why that cannot be asked."""
    if length < least:
        return f"length must be at least {least}, got {length}."
    try:
        texts = cut(corpus, TEST, length, trials, seed)
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, length))))
        changed = np.stack([make(text, rng) for text in texts.tokens])
        losses, hits = read(model, changed, length - answers)
    except InputError as error:
        return str(error)
    return {"needles": len(texts), **_told(losses, hits, texts.documents)}


def _told(
    losses: Float[np.ndarray, "K m"], hits: Bool[np.ndarray, "K m"], documents: Int[np.ndarray, "K"]
) -> dict[str, Any]:
    share, many = float(hits.mean()), len(np.unique(documents))
    low, high = wilson(round(share * many), many)  # as if a document were one answer
    return {
        "accuracy": Interval(share, min(share, low), max(share, high)),
        "bits": Interval.of(over_clusters(losses.mean(1) / np.log(2), documents)),
    }


def letters_of(corpus: Corpus, most: int = _ALPHABET) -> Int[np.ndarray, "m"]:
    """Frequent tokens, of which random ones are drawn; an `InputError` where there are not two."""
    found = np.asarray(corpus.frequent(most), dtype=np.int64)
    if len(found) < 2:
        raise invalid("text", "have at least 2 different tokens", len(found))
    return found


_Shares = Annotated[Float[np.ndarray, "L H"], Each(NearlyShare)]
_REPEATED = 64  # frequent tokens of which repeated texts are made
_WEIGHTS = 2**24  # attention weights that are formed at once


@dataclass(frozen=True)
class HeadPatterns(Record):
    """Mean weights of each head, over the queries that have such a key.

    previous   on the token before the query's, in texts of the test split
    first      on the text's first token, there
    induction  on the token that followed the earlier copy of the query's, in random tokens that are repeated once
               (prefix matching, Olsson et al. 2022)
    texts      of either kind
    """

    previous: _Shares
    first: _Shares
    induction: _Shares
    texts: AtLeast1


@torch.no_grad()
def head_patterns(model: Decoder, task: LanguageTask, *, texts: int = 64, seed: int = 0) -> HeadPatterns:
    """What each head attends to, on texts of the training length.

    Arguments
        texts  how many of the test split, and how many of repeated random tokens
        seed   of both
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
    """Each head's mean weight at some pairs of query and key, over texts and pairs."""
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
