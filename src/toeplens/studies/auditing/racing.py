"""Effects of the heads that matter most: each head only as long as it may be one of them.

Sequences are gone through some at a time. After each time a head is left out whose interval lies below those of as many
others as are wanted, until the sequences end or no more heads are left than are wanted. Most heads need few tokens.

Before it, an estimate of all heads from a few backward passes leaves most of them out: four times as many as are wanted
go on. An estimate need not be what a head is worth, so that leaving the others out is a guess. Some of them, drawn, go
on as well: how many of these come out among the first is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import stdtrit
from torch import Tensor

from toeplens.sources.huggingface import HeadEffects
from toeplens.sources.huggingface.effects.outcome import Effect
from toeplens.studies.auditing.kept import Kept

_ROUNDS = 8  # at most
_LEVEL = 0.95
_FEWEST = 4  # parts that an interval is taken over
_PIECES = 16  # of a sequence, at most
_GO_ON, _DRAWN = 4, 8  # times as many heads as are wanted that go on by an estimate, and others
_AT_ONCE = 2048  # tokens that an estimate is made over, at most: it holds what every layer gave for them
_READ = ("input_ids", "decoder_input_ids")  # of which these tokens are
Estimate = Callable[[Mapping[str, Any]], Float[np.ndarray, "n"] | None]
Run = Callable[[Mapping[str, Any], Sequence[Sequence[int]]], HeadEffects]


@dataclass(frozen=True)
class Race:
    """What a race found.

    parts     of each call, [R, 1, H], what each part of the sequences says of each head; NaN from where it was left out
    baseline  the intact loss of each sequence that was read; None for states
    outcome   ``loss`` or ``states``
    guess     None without one
    """

    parts: list[Float[np.ndarray, "R 1 _H"]]
    baseline: Float[np.ndarray, "B"] | None
    outcome: Effect
    guess: Guess | None = None


@dataclass(frozen=True)
class Guess:
    """Which heads were left out by an estimate.

    left    how many
    drawn   how many more it would have left out, and were drawn to be run all the same
    missed  of these, how many came out among the first
    """

    left: int
    drawn: int
    missed: int


def race(
    run: Run,
    inputs: Mapping[str, Any],
    counts: Sequence[int],
    first: int,
    kept: Kept,
    report: Callable[[int, int], None],
    estimate: Estimate = lambda inputs: None,
    seed: int = 0,
) -> Race:
    """Effects of all heads, the more exact the nearer they are to being among the ``first``.

    A round's intervals are Student's over its parts and those before, and of the rounds together 95 %.

    Arguments
        run       effects of chosen heads of each call on some sequences (`head_effects`)
        counts    heads of each call
        kept      rounds that are there are not run again
        report    is told how many heads are done, as if all had to be done in every round
        estimate  what each head of all calls may be worth on some sequences; None where there is no telling
        seed      of the heads that are drawn beside those of the estimate
    """
    sequences, ends = len(inputs["input_ids"]), np.cumsum(counts)[:-1]
    rounds = np.array_split(np.arange(sequences), min(sequences, _ROUNDS))
    level = 1 - (1 - _LEVEL) / len(rounds)
    racing: Bool[np.ndarray, "n"] = np.ones(sum(counts), dtype=bool)
    rows: Float[np.ndarray, "R n"] = np.empty((0, len(racing)))
    pieces = _PIECES
    made: dict[str, Any] = {}
    baselines: list[float] = []
    report(0, len(rounds) * len(racing))
    guess: Guess | None = None
    drawn: Int[np.ndarray, "d"] = np.empty(0, dtype=int)
    if len(racing) > _GO_ON * first + _DRAWN:
        made = kept.get("estimates") or {"estimates": _estimates(estimate, _cut(inputs, rounds[0]))}
        kept.put("estimates", made)
        if made["estimates"] is not None:
            racing, drawn, left = _go_on(np.asarray(made["estimates"], dtype=float), first, seed)
            guess = Guess(left, len(drawn), 0) if len(drawn) else None
    for number, some in enumerate(rounds):
        made = kept.get(f"heads-{number}") or _round(run, _cut(inputs, some), racing, ends, pieces)
        kept.put(f"heads-{number}", made)
        rows = np.concatenate((rows, np.asarray(made["parts"], dtype=float)))
        pieces = len(rows) // len(some) if number == 0 else pieces  # later rounds have fewer sequences, of more blocks
        baselines += made["baseline"] or []
        racing = _may_be(rows, racing, first, level)
        report((number + 1) * len(racing), len(rounds) * len(racing))
        if racing.sum() <= first < np.isfinite(rows[: len(made["parts"])]).all(0).sum():
            break
    report(len(rounds) * len(racing), len(rounds) * len(racing))
    split = [each[:, None] for each in np.split(rows, ends, axis=1)]
    if guess is not None:
        known = np.isfinite(rows).sum(0)
        means = np.where(known > 0, np.nansum(rows, 0) / np.maximum(known, 1), -np.inf)
        guess = replace(guess, missed=len(np.intersect1d(drawn, np.argsort(-means)[:first])))
    return Race(split, np.array(baselines) if baselines else None, made["outcome"], guess)


def _estimates(estimate: Estimate, inputs: Mapping[str, Any]) -> list[float] | None:
    """What each head may be worth over as many of the sequences, or of the first one's tokens, as an estimate is made
    over at once; None where there is no telling."""
    tokens = inputs["input_ids"]
    read = sum(inputs[name].shape[1] for name in _READ if inputs.get(name) is not None)
    few = _cut(inputs, np.arange(max(1, min(len(tokens), _AT_ONCE // read))))
    if read > _AT_ONCE:
        if any(isinstance(x, Tensor) and x.shape != few["input_ids"].shape for x in few.values()):
            return None
        first = _AT_ONCE * tokens.shape[1] // read
        few = {name: x[:, :first] if isinstance(x, Tensor) else x for name, x in few.items()}
    found = estimate(few)
    return None if found is None else found.tolist()


def _go_on(
    estimates: Float[np.ndarray, "n"], first: int, seed: int
) -> tuple[Bool[np.ndarray, "n"], Int[np.ndarray, "d"], int]:
    """Which heads go on by an estimate; which of these were drawn and not chosen; and how many do not go on. Heads
    without an estimate do not, and are not counted."""
    order = np.argsort(-np.nan_to_num(estimates, nan=-np.inf), kind="stable")
    order = order[np.isfinite(estimates[order])]
    best, others = np.split(order, [_GO_ON * first])
    drawn = np.random.Generator(np.random.Philox(seed)).choice(others, min(_DRAWN, len(others)), replace=False)
    goes = np.zeros(len(estimates), dtype=bool)
    goes[np.concatenate((best, drawn))] = True
    return goes, drawn, len(others) - len(drawn)


def _round(
    run: Run,
    inputs: Mapping[str, Any],
    racing: Bool[np.ndarray, "n"],
    ends: Int[np.ndarray, "c"],
    pieces: int | None,
) -> dict[str, Any]:
    """Parts of all heads, NaN for those that are not in the race; the intact losses; what effects are of.

    Each sequence has as many parts, so that it counts as much as those of rounds with more sequences.
    """
    found = run(inputs, [np.flatnonzero(each).tolist() for each in np.split(racing, ends)])
    parts = np.concatenate([_pooled(each, pieces) for each in found.parts], axis=1)
    baseline = None if found.baseline is None else found.baseline.tolist()
    return {"parts": parts.tolist(), "baseline": baseline, "outcome": found.outcome}


def _pooled(parts: Float[np.ndarray, "B K H"], pieces: int | None) -> Float[np.ndarray, "R H"]:
    """Neighbouring blocks of each sequence together, so many a sequence at most (None: all of them); same mean.

    With m the mean over a sequence's K blocks and m_g that over the n_g of one of G pieces, that piece's part is
    m + G n_g (m_g - m) / K: pieces need not have equally many.
    """
    count = parts.shape[1]
    cut = np.array_split(np.arange(count), min(pieces or count, count))
    mean = parts.mean(1)
    made = [mean + len(cut) * len(some) / count * (parts[:, some].mean(1) - mean) for some in cut]
    return np.stack(made, axis=1).reshape(-1, parts.shape[-1])


def _may_be(
    rows: Float[np.ndarray, "R n"], racing: Bool[np.ndarray, "n"], first: int, level: float
) -> Bool[np.ndarray, "n"]:
    """Which heads may be among the first, by the intervals of those that are still in the race."""
    known = racing & np.isfinite(rows).all(0)
    count = len(rows)
    if count < _FEWEST or known.sum() <= first:
        return known
    own = rows[:, known]
    mean = own.mean(0)
    reach = stdtrit(count - 1, (1 + level) / 2) * own.std(0, ddof=1) / np.sqrt(count)
    bar = np.sort(mean - reach)[-first]
    stays = known.copy()
    stays[known] = mean + reach >= bar
    return stays


def _cut(inputs: Mapping[str, Any], some: Int[np.ndarray, "b"]) -> dict[str, Any]:
    """The inputs of some sequences."""
    count = len(inputs["input_ids"])
    return {name: x[some] if isinstance(x, Tensor) and x.ndim and len(x) == count else x for name, x in inputs.items()}
