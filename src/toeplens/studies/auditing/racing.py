"""Effects of the heads that matter most: each head only as long as it may be one of them.

Sequences are gone through some at a time. After each time a head is left out whose interval lies below those of as many
others as are wanted, until the sequences end or no more heads are left than are wanted. Most heads need few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import stats
from torch import Tensor

from toeplens.sources.huggingface import HeadEffects
from toeplens.sources.huggingface.effects.outcome import ENOUGH, Effect
from toeplens.studies.auditing.kept import Kept

_ROUNDS = 8  # at most
_LEVEL = 0.95
_FEWEST = 4  # parts that an interval is taken over
_PIECES = 16  # of a sequence, at most
Run = Callable[[Mapping[str, Any], Sequence[Sequence[int]]], HeadEffects]


@dataclass(frozen=True)
class Race:
    """What a race found.

    parts     of each call, [R, 1, H], what each part of the sequences says of each head; NaN from where it was left out
    baseline  the intact loss of each sequence that was read; None for states
    outcome   ``loss`` or ``states``
    """

    parts: list[Float[np.ndarray, "R 1 _H"]]
    baseline: Float[np.ndarray, "B"] | None
    outcome: Effect


def race(
    run: Run,
    inputs: Mapping[str, Any],
    counts: Sequence[int],
    first: int,
    kept: Kept,
    report: Callable[[int, int], None],
) -> Race:
    """Effects of all heads, the more exact the nearer they are to being among the ``first``.

    A round's intervals are Student's over its parts and those before, and of the rounds together 95 %.

    Arguments
        run     effects of chosen heads of each call on some sequences
        counts  heads of each call
        kept    rounds that are there are not run again
        report  is told how many heads are done, as if all had to be done in every round
    """
    sequences, ends = len(inputs["input_ids"]), np.cumsum(counts)[:-1]
    rounds = np.array_split(np.arange(sequences), min(sequences, _ROUNDS))
    level = 1 - (1 - _LEVEL) / len(rounds)
    racing: Bool[np.ndarray, "n"] = np.ones(sum(counts), dtype=bool)
    rows: Float[np.ndarray, "R n"] = np.empty((0, len(racing)))
    pieces = _PIECES if max(map(len, rounds)) < ENOUGH else 1
    made: dict[str, Any] = {}
    baselines: list[float] = []
    report(0, len(rounds) * len(racing))
    for number, some in enumerate(rounds):
        made = kept.get(f"round-{number}") or _round(run, _cut(inputs, some), racing, ends, pieces)
        kept.put(f"round-{number}", made)
        rows = np.concatenate((rows, np.asarray(made["parts"], dtype=float)))
        baselines += made["baseline"] or []
        racing = _may_be(rows, racing, first, level)
        report((number + 1) * len(racing), len(rounds) * len(racing))
        if racing.sum() <= first < np.isfinite(rows[: len(made["parts"])]).all(0).sum():
            break
    report(len(rounds) * len(racing), len(rounds) * len(racing))
    split = [each[:, None] for each in np.split(rows, ends, axis=1)]
    return Race(split, np.array(baselines) if baselines else None, made["outcome"])


def _round(
    run: Run, inputs: Mapping[str, Any], racing: Bool[np.ndarray, "n"], ends: Int[np.ndarray, "c"], pieces: int
) -> dict[str, Any]:
    """Parts of all heads, NaN for those that are not in the race; the intact losses; what effects are of.

    Each sequence has as many parts, so that it counts as much as those of rounds with more sequences.
    """
    found = run(inputs, [np.flatnonzero(each).tolist() for each in np.split(racing, ends)])
    parts = np.concatenate([_pooled(each, pieces) for each in found.parts], axis=1)
    baseline = None if found.baseline is None else found.baseline.tolist()
    return {"parts": parts.tolist(), "baseline": baseline, "outcome": found.outcome}


def _pooled(parts: Float[np.ndarray, "B K H"], pieces: int) -> Float[np.ndarray, "R H"]:
    """Neighbouring blocks of each sequence together, so many a sequence at most."""
    cut = np.array_split(np.arange(parts.shape[1]), min(pieces, parts.shape[1]))
    return np.stack([parts[:, some].mean(1) for some in cut], axis=1).reshape(-1, parts.shape[-1])


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
    reach = stats.t.ppf((1 + level) / 2, count - 1) * own.std(0, ddof=1) / np.sqrt(count)
    bar = np.sort(mean - reach)[-first]
    stays = known.copy()
    stays[known] = mean + reach >= bar
    return stays


def _cut(inputs: Mapping[str, Any], some: Int[np.ndarray, "b"]) -> dict[str, Any]:
    """The inputs of some sequences."""
    count = len(inputs["input_ids"])
    return {name: x[some] if isinstance(x, Tensor) and x.ndim and len(x) == count else x for name, x in inputs.items()}
