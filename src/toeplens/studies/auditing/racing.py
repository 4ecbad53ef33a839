"""Effects of the heads that matter most: each head only as long as it may be one of them.

Sequences are gone through some at a time. After each time a head is left out whose interval lies below those of as many
others as are wanted, until the sequences end or no more heads are left than are wanted. Most heads need few tokens.

Long sequences that are read from left to right have a heat before: their first quarter, which costs a quarter. Three
times as many heads as are wanted go on by what they are worth in it, its own first quarter left out, where queries have
little before them; and twice as many by a first-order estimate over all tokens, which costs two passes. Neither need be
what a head is worth, so that leaving the others out is a guess. Some of them, drawn, go on as well: how many of these
come out among the first is told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
_LONG, _PART = 512, 4  # tokens from which on there is a heat, over one part of so many of them
_BY_HEAT, _BY_ESTIMATE, _DRAWN = 3, 2, 8  # times as many heads as are wanted that go on from it, and others
_AT_ONCE = 2048  # tokens that an estimate is made over, at most: it holds what every layer gave for them
Estimate = Callable[[Mapping[str, Any]], Float[np.ndarray, "n"] | None]
Run = Callable[[Mapping[str, Any], Sequence[Sequence[int]], Collection[int]], HeadEffects]


@dataclass(frozen=True)
class Race:
    """What a race found.

    parts     of each call, [R, 1, H], what each part of the sequences says of each head; NaN from where it was left out
    baseline  the intact loss of each sequence that was read; None for states
    outcome   ``loss`` or ``states``
    heat      None without one
    """

    parts: list[Float[np.ndarray, "R 1 _H"]]
    baseline: Float[np.ndarray, "B"] | None
    outcome: Effect
    heat: Heat | None = None


@dataclass(frozen=True)
class Heat:
    """What a heat left out.

    left    heads
    drawn   of those, how many were drawn to be run all the same
    missed  of these, how many came out among the first
    over    what all this goes by, in words
    """

    left: int
    drawn: int
    missed: int
    over: str


def race(
    run: Run,
    inputs: Mapping[str, Any],
    counts: Sequence[int],
    first: int,
    kept: Kept,
    report: Callable[[int, int], None],
    heat: bool = False,
    estimate: Estimate = lambda inputs: None,
    seed: int = 0,
) -> Race:
    """Effects of all heads, the more exact the nearer they are to being among the ``first``.

    A round's intervals are Student's over its parts and those before, and of the rounds together 95 %.

    Arguments
        run       effects of chosen heads of each call on some sequences, calls being known (`head_effects`)
        counts    heads of each call
        kept      rounds that are there are not run again
        report    is told how many heads are done, as if all had to be done in every round
        heat      whether what a query does depends on the tokens before it alone, so that there may be a heat
        estimate  what each head of all calls may be worth on some sequences; None where there is no telling
        seed      of the heads that are drawn after a heat
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
    drawn: Int[np.ndarray, "d"] = np.empty(0, dtype=int)
    told: Heat | None = None
    shown: Sequence[int] = ()
    begin = _cut(inputs, rounds[0])
    enough = (_BY_HEAT + _BY_ESTIMATE) * first + _DRAWN
    if heat and len(racing) > enough and (quarter := _quarter(begin)) is not None:
        made = kept.get("heat") or {
            **_round(run, quarter, racing, ends, None, shown),
            "estimates": _estimates(estimate, begin),
        }
        kept.put("heat", made)
        shown = made["shown"]
        parts = np.asarray(made["parts"], dtype=float).reshape(len(rounds[0]), -1, len(racing))
        means = parts[:, parts.shape[1] // _PART :].mean((0, 1))
        racing, drawn = _go_on(means, made["estimates"], first, seed)
        also = "" if made["estimates"] is None else ", and from a first-order estimate over all of them"
        left = int(np.isfinite(means).sum() - racing.sum()) + len(drawn)
        told = Heat(left, len(drawn), 0, f"a quarter of the tokens{also}")
        report(len(racing) // _PART, len(rounds) * len(racing))
    for number, some in enumerate(rounds):
        made = kept.get(f"round-{number}") or _round(run, _cut(inputs, some), racing, ends, pieces, shown)
        kept.put(f"round-{number}", made)
        rows = np.concatenate((rows, np.asarray(made["parts"], dtype=float)))
        pieces = len(rows) // len(some) if number == 0 else pieces  # later rounds have fewer sequences, of more blocks
        baselines += made["baseline"] or []
        racing = _may_be(rows, racing, first, level)
        report((number + 1) * len(racing), len(rounds) * len(racing))
        if racing.sum() <= first < np.isfinite(rows[: len(made["parts"])]).all(0).sum():
            break
    report(len(rounds) * len(racing), len(rounds) * len(racing))
    split = [each[:, None] for each in np.split(rows, ends, axis=1)]
    if told is not None:
        known = np.isfinite(rows).sum(0)
        means = np.where(known > 0, np.nansum(rows, 0) / np.maximum(known, 1), -np.inf)
        told = replace(told, missed=len(np.intersect1d(drawn, np.argsort(-means)[:first])))
    return Race(split, np.array(baselines) if baselines else None, made["outcome"], told)


def _quarter(inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The first tokens of long sequences; None where they are short, or the inputs hold more than tokens, or padding is
    among the first."""
    tokens = inputs["input_ids"]
    if tokens.shape[1] < _LONG or any(isinstance(x, Tensor) and x.shape != tokens.shape for x in inputs.values()):
        return None
    made = {name: x[:, : x.shape[1] // _PART] if isinstance(x, Tensor) else x for name, x in inputs.items()}
    there = made.get("attention_mask")
    return None if isinstance(there, Tensor) and not there.all() else made


def _estimates(estimate: Estimate, inputs: Mapping[str, Any]) -> list[float] | None:
    """What each head may be worth by a first-order estimate; None where sequences are too long for one."""
    found = estimate(inputs) if inputs["input_ids"].numel() <= _AT_ONCE else None
    return None if found is None else found.tolist()


def _go_on(
    means: Float[np.ndarray, "n"], estimates: Sequence[float] | None, first: int, seed: int
) -> tuple[Bool[np.ndarray, "n"], Int[np.ndarray, "d"]]:
    """Which heads go on from a heat, and which of these were drawn and not chosen. Unknown ones do not."""
    by_heat = _order(means)
    if estimates is None:
        best = by_heat[: (_BY_HEAT + _BY_ESTIMATE) * first]
    else:
        best = np.union1d(by_heat[: _BY_HEAT * first], _order(np.asarray(estimates))[: _BY_ESTIMATE * first])
    others = by_heat[~np.isin(by_heat, best)]
    random = np.random.Generator(np.random.Philox(seed))
    drawn = random.choice(others, min(_DRAWN, len(others)), replace=False)
    goes = np.zeros(len(means), dtype=bool)
    goes[np.concatenate((best, drawn))] = True
    return goes & np.isfinite(means), drawn


def _order(worth: Float[np.ndarray, "n"]) -> Int[np.ndarray, "m"]:
    """The heads of which something is known, the best first."""
    order = np.argsort(-np.nan_to_num(worth, nan=-np.inf), kind="stable")
    return order[np.isfinite(worth[order])]


def _round(
    run: Run,
    inputs: Mapping[str, Any],
    racing: Bool[np.ndarray, "n"],
    ends: Int[np.ndarray, "c"],
    pieces: int | None,
    known: Collection[int],
) -> dict[str, Any]:
    """Parts of all heads, NaN for those that are not in the race; the intact losses; what effects are of; calls that
    are known then.

    Each sequence has as many parts, so that it counts as much as those of rounds with more sequences.
    """
    found = run(inputs, [np.flatnonzero(each).tolist() for each in np.split(racing, ends)], known)
    parts = np.concatenate([_pooled(each, pieces) for each in found.parts], axis=1)
    baseline = None if found.baseline is None else found.baseline.tolist()
    return {"parts": parts.tolist(), "baseline": baseline, "outcome": found.outcome, "shown": sorted(found.shown)}


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
