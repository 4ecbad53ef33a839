"""Effects of the N most important heads by successive elimination.

Sequences are processed in rounds. After each round, heads are dropped whose interval lies below those of N other heads,
until the sequences end or only N heads are left. Most heads need few tokens.

Before the first round, a gradient-based estimate of all heads drops most of them: only 4 N continue. An estimate can be
wrong, so a few of the dropped heads, drawn at random, continue as well, and are counted if they end up among the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import stdtrit
from torch import Tensor

from toeplens.sources.huggingface import HeadEffects
from toeplens.sources.huggingface.outcome import Effect
from toeplens.studies.auditing.kept import Kept

_ROUNDS = 8  # maximum number of rounds
_LEVEL = 0.95
_FEWEST = 4  # minimum number of parts for an interval
_PIECES = 16  # maximum number of pieces per sequence
_GO_ON, _DRAWN = 4, 8  # heads that continue after the estimate, in multiples of N; randomly drawn heads
_AT_ONCE = 2048  # maximum tokens of an estimate, which holds the outputs of every layer
Estimate = Callable[[Mapping[str, Any]], Float[np.ndarray, "n"] | None]
Run = Callable[[Mapping[str, Any], Sequence[Sequence[int]]], HeadEffects]


@dataclass(frozen=True)
class Elimination:
    """The effects of the heads that were not dropped."""

    parts: list[Float[np.ndarray, "R 1 _H"]]  # per call, in each part of the sequences; NaN after a head was dropped
    baseline: Float[np.ndarray, "B"] | None  # loss of the intact model per processed sequence; None for states
    outcome: Effect
    left: int = 0  # heads dropped by the estimate without measuring them
    drawn: int = 0  # heads with low estimates that were measured anyway; 0 without an estimate
    missed: int = 0  # of the drawn heads, those that ended up among the first


def eliminate(
    run: Run,
    inputs: Mapping[str, Any],
    counts: Sequence[int],
    first: int,
    kept: Kept,
    report: Callable[[int, int], None],
    estimate: Estimate = lambda inputs: None,
    seed: int = 0,
) -> Elimination:
    """Effects of all heads, more precise for heads that may be among the ``first``.

    Intervals are Student's t intervals over all parts so far, at 95 % jointly over the rounds. Every sequence has the
    same number of parts, so that sequences of all rounds have equal weight.

    Arguments
        run       effects of chosen heads of each call on some sequences (`head_effects`)
        counts    number of heads of each call
        kept      saved rounds are not run again
        report    called with the number of finished heads, as if every round measured all heads
        estimate  estimated effect of each head of all calls on some sequences; None if not available
        seed      seed of the randomly drawn heads
    """
    sequences, ends = len(inputs["input_ids"]), np.cumsum(counts)[:-1]
    rounds = np.array_split(np.arange(sequences), min(sequences, _ROUNDS))
    level = 1 - (1 - _LEVEL) / len(rounds)
    racing: Bool[np.ndarray, "n"] = np.ones(sum(counts), dtype=bool)
    rows: Float[np.ndarray, "R n"] = np.empty((0, len(racing)))
    pieces, left = _PIECES, 0
    made: dict[str, Any] = {}
    baselines: list[float] = []
    drawn: Int[np.ndarray, "d"] = np.empty(0, dtype=int)
    report(0, len(rounds) * len(racing))
    if len(racing) > _GO_ON * first + _DRAWN:
        made = kept.get("estimates") or {"estimates": _estimates(estimate, _cut(inputs, rounds[0]))}
        kept.put("estimates", made)
        if made["estimates"] is not None:
            racing, drawn, left = _go_on(np.asarray(made["estimates"], dtype=float), first, seed)
    for number, some in enumerate(rounds):
        made = kept.get(f"heads-{number}")
        if made is None:
            found = run(_cut(inputs, some), [np.flatnonzero(each).tolist() for each in np.split(racing, ends)])
            parts = np.concatenate([_pooled(each, pieces) for each in found.parts], axis=1).tolist()
            baseline = None if found.baseline is None else found.baseline.tolist()
            made = {"parts": parts, "baseline": baseline, "outcome": found.outcome}
        kept.put(f"heads-{number}", made)
        rows = np.concatenate((rows, np.asarray(made["parts"], dtype=float)))
        pieces = len(rows) // len(some) if number == 0 else pieces  # later rounds have fewer sequences, of more blocks
        baselines += made["baseline"] or []
        racing = _may_be(rows, racing, first, level)
        report((number + 1) * len(racing), len(rounds) * len(racing))
        if racing.sum() <= first < np.isfinite(rows[: len(made["parts"])]).all(0).sum():
            break
    report(len(rounds) * len(racing), len(rounds) * len(racing))
    known = np.isfinite(rows).sum(0)
    means = np.where(known > 0, np.nansum(rows, 0) / np.maximum(known, 1), -np.inf)
    missed = len(np.intersect1d(drawn, np.argsort(-means)[:first]))
    split = [each[:, None] for each in np.split(rows, ends, axis=1)]
    baseline = np.array(baselines) if baselines else None
    return Elimination(split, baseline, made["outcome"], left, len(drawn), missed)


def _estimates(estimate: Estimate, inputs: Mapping[str, Any]) -> list[float] | None:
    """Estimated effect of each head over as many sequences, or tokens of the first one, as fit into one estimate; None
    if not available."""
    tokens = inputs["input_ids"]
    read = sum(inputs[name].shape[1] for name in ("input_ids", "decoder_input_ids") if inputs.get(name) is not None)
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
    """Heads that continue after the estimate; those of them that were drawn at random; and the number of dropped heads.
    Heads without an estimate are dropped and not counted."""
    order = np.argsort(-np.nan_to_num(estimates, nan=-np.inf), kind="stable")
    order = order[np.isfinite(estimates[order])]
    best, others = np.split(order, [_GO_ON * first])
    drawn = np.random.Generator(np.random.Philox(seed)).choice(others, min(_DRAWN, len(others)), replace=False)
    goes = np.zeros(len(estimates), dtype=bool)
    goes[np.concatenate((best, drawn))] = True
    return goes, drawn, len(others) - len(drawn)


def _pooled(parts: Float[np.ndarray, "B K H"], pieces: int) -> Float[np.ndarray, "R H"]:
    """Merge neighbouring blocks into at most ``pieces`` per sequence; the mean stays the same.

    With m the mean over a sequence's K blocks and m_g the mean over the n_g blocks of one of G pieces, the part of the
    piece is m + G n_g (m_g - m) / K, as pieces may have different sizes.
    """
    count = parts.shape[1]
    cut = np.array_split(np.arange(count), min(pieces, count))
    mean = parts.mean(1)
    made = [mean + len(cut) * len(some) / count * (parts[:, some].mean(1) - mean) for some in cut]
    return np.stack(made, axis=1).reshape(-1, parts.shape[-1])


def _may_be(
    rows: Float[np.ndarray, "R n"], racing: Bool[np.ndarray, "n"], first: int, level: float
) -> Bool[np.ndarray, "n"]:
    """Heads that may still be among the first, by their intervals."""
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
