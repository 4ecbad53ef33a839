"""Claims about RoPE's frequencies: what heads use them for, and what can be learned with some of them alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import pi
from typing import Any

import numpy as np

from toeplens.lens.kit.intervals import spearman
from toeplens.papers.positional_symbolic.claims.common import (
    HIGH,
    INDEX,
    LOW,
    MIX,
    OURS,
    RETRIEVAL,
    ROPE,
    SCAN,
    SISTER,
    STRONG,
    WHY_STRONG,
    Check,
    better,
    model,
    of_skilled,
)
from toeplens.studies.grid.study import Evidence
from toeplens.studies.kit.asking import BETTER, MARGIN, STOPPED, WHY_MARGIN, left_out, over
from toeplens.studies.kit.claims import Claim, as_support, every
from toeplens.studies.kit.contrasts import difference
from toeplens.studies.kit.results import ACCURACY, ONLY_SKILLED, CellResult, Figure
from toeplens.studies.kit.verdicts import Finding, above, supporting, unknown

_CONTROL = 0.25
_NATS = 0.1
_NO_BEGINNING = "what the models were before training was not measured"
_WHOLE = "training until all models of the scan have stopped learning"
Row = list[tuple[float, float]]  # frequency and accuracy, seed by seed


# ---- what heads use --------------------------------------------------------------------------------------------------


def _correspondence(data: Evidence) -> list[Finding]:
    what = "rank correlation over heads of the frequencies' centre with positional less symbolic share"
    after, before = (_correlations(data, *measures) for measures in (("frequency", "behaviour"), ("beginning",) * 2))
    more = {seed: after[seed] - before[seed] for seed in after if seed in before}
    gain = "that correlation less what it is before training"
    taught = above(gain, more, 0.0, grain=0.02) if more or not after else unknown(gain, _NO_BEGINNING)
    return [above(what, after, STRONG, grain=0.02), supporting(taught)]


def _correlations(data: Evidence, use: str, follows: str) -> dict[int, float]:
    """By the measures of these names, seed by seed over the heads of all tasks' models that learned enough."""
    by_seed: dict[int, list[tuple[float, float]]] = {}
    for task in data.spec.tasks:
        for cell in data.skilled(task, ROPE):
            by_seed.setdefault(cell.key.seed, []).extend(
                _frequency_and_behaviour(cell.measure(use), cell.measure(follows))
            )
    return {seed: float(spearman(np.array(pairs).T)) for seed, pairs in sorted(by_seed.items()) if len(pairs) > 2}


def _frequency_and_behaviour(use: Any, follows: Any) -> Iterator[tuple[float, float]]:
    if use is not None and follows is not None:
        for pair in zip(use.centre.ravel(), (follows.positional - follows.symbolic).ravel(), strict=True):
            if np.isfinite(pair).all():
                yield pair


def _halves(cell: CellResult) -> float:
    """Nats lost without the faster half of the frequencies less those without the slower; NaN where none matters."""
    bands = cell.measure("bands")
    if bands is None:
        return float("nan")
    sure = np.isnan(bands.low) | (bands.low > 0)
    lost = np.nansum(np.where(sure, np.clip(bands.drops, 0, None), 0.0), axis=(0, 1))
    half = len(lost) // 2
    return float(lost[:half].sum() - lost[half:].sum()) if lost.any() else float("nan")


_TURNING = of_skilled("loss on index without the faster half less that without the slower, ", _halves, "not measured")


# ---- what is learned with bands --------------------------------------------------------------------------------------


def _needs(task: str, right: str, wrong: str) -> Check:
    """Is a task learned better with one band alone than with the other; and does that decide whether it is learned?"""
    skill = Figure(f"skill on {task}, ", lambda cell: cell.skill, ACCURACY.counts, ACCURACY.without)
    return every(better(task, right, wrong), as_support(better(task, right, wrong, skill, over(_CONTROL))))


def _needed(kind: str, task: str, right: str, wrong: str, words: tuple[str, str]) -> Claim[Evidence]:
    return Claim(
        f"{task}-needs-{right}-frequencies",
        SISTER,
        f"A {kind} task is learned better with {right} frequencies alone than with {wrong} ones: which frequencies "
        "heads may use controls performance.",
        f"On {task}, the three {words[0]} frequencies alone against the three {words[1]}: {BETTER}. Supporting, that "
        f"this controls performance: skill higher by more than {_CONTROL:g}, since a quarter of what can be learned "
        f"is what counts as having learned something. {STOPPED}",
        _needs(task, right, wrong),
    )


def _with_high_alone(data: Evidence) -> list[Finding]:
    """Only asked where the high band is one: each of its frequencies goes round at least once in a text."""
    what = "accuracy on mix with the highest frequencies alone"
    keep = next((column.options.get("keep") for column in data.spec.columns() if column.label == HIGH), None)
    for cell in data.results.of(MIX, HIGH):
        use, longer = cell.measure("frequency"), cell.measure("extrapolation")
        if use is None or longer is None:
            continue
        band = use.frequencies[0, 0] if keep is None else use.frequencies[0, 0][list(keep)]
        slowest, bar = float(band.min()), 2 * pi / longer.trained_length
        if slowest < bar:
            why = f"the band goes down to {slowest:.2g} radians a token, which does not go round in a text"
            return [unknown(what, why, f"a study whose high band ends above {bar:.2g} radians a token")]
        return better(MIX, ROPE, HIGH)(data)
    return [unknown(what, "no finished run that counts")]


# ---- what is learned with one frequency ------------------------------------------------------------------------------


def _scan(task: str, sign: int) -> Check:
    """Is an inner frequency better (sign 1) or worse (-1) than both ends of the scan?"""

    def check(data: Evidence) -> list[Finding]:
        columns = sorted((c for c in data.spec.columns() if c.scan == SCAN), key=lambda column: column.value or 0.0)
        if len(columns) < 3:
            return [unknown(f"accuracy on {task} by frequency", "no scan of three or more", "a scan called turn")]
        rows = {column.value or 0.0: ACCURACY.by_seed(data.results.of(task, column.label)) for column in columns}
        whole = sorted(set.intersection(*(set(row) for row in rows.values())))
        if not whole:
            missing = left_out(data.results, ACCURACY, task, *(column.label for column in columns))
            return [unknown(f"accuracy on {task} by frequency{missing}", "no seed has its whole scan", _WHOLE)]
        low, *inner, high = ([(value, row[seed]) for seed in whole] for value, row in rows.items())
        return [_gap(task, sign, _chosen(inner, sign), end) for end in (low, high)]

    return check


def _gap(task: str, sign: int, inner: Row, end: Row) -> Finding:
    """An inner frequency less an end, or the end less it (sign -1), over seeds."""
    chosen = ", ".join(f"{value:g}" for value in sorted({value for value, _ in inner}))
    names = [f"the {'best' if sign > 0 else 'worst'} inner frequency ({chosen})", f"{end[0][0]:g}"][::sign]
    first, second = ([accuracy for _, accuracy in row] for row in (inner, end)[::sign])
    return above(f"accuracy on {task} at {names[0]} less that at {names[1]}", difference(first, second), MARGIN)


def _chosen(inner: Sequence[Row], sign: int) -> Row:
    """For each seed, the frequency that is best, or worst, on the other seeds, and the seed's accuracy there.

    So the best of many by chance does not count as best. An only seed has to choose for itself.
    """
    table = sign * np.array([[accuracy for _, accuracy in row] for row in inner])
    count = table.shape[1]
    means = table if count == 1 else (table.sum(1, keepdims=True) - table) / (count - 1)
    return [inner[best][seed] for seed, best in enumerate(means.argmax(0))]


def _scanned(name: str, task: str, kind: str, sign: int) -> Claim[Evidence]:
    side, shape = ("highest", "better") if sign > 0 else ("lowest", "worse")
    return Claim(
        name,
        OURS,
        f"With one frequency for all pairs, accuracy on the {kind} task is {side} in between.",
        f"The inner frequency that is {'best' if sign > 0 else 'worst'} on the other seeds is {shape} than either end "
        f"of the scan by more than {100 * MARGIN:g} points of mean final test accuracy ({WHY_MARGIN}). {STOPPED} "
        "A seed counts if all models of its scan do: else those that learn longest could not be best.",
        _scan(task, sign),
    )


CLAIMS: tuple[Claim[Evidence], ...] = (
    Claim(
        "behaviour-and-frequency",
        f"{SISTER} (there of language models)",
        "How positional a head is corresponds strongly to the frequencies it uses: high ones positional, low symbolic.",
        "Spearman's correlation, over all heads of a seed's RoPE models of all tasks, of the frequencies' centre "
        f"(octaves, by variance) with the positional less the symbolic share: above {STRONG:g} ({WHY_STRONG}). "
        "Supporting, that training brings it about: above what it is over the same heads before training, where "
        f"weights are random and the correlation is that of the two measures. {ONLY_SKILLED}",
        _correspondence,
    ),
    _needed("positional", INDEX, HIGH, LOW, ("highest", "lowest")),
    _needed("symbolic", RETRIEVAL, LOW, HIGH, ("lowest", "highest")),
    Claim(
        "mix-needs-both",
        OURS,
        "A task that is both needs both kinds of frequencies.",
        f"On mix, all frequencies against the three lowest alone, and against the three highest alone, each: {BETTER}. "
        "The second is only asked where each of the highest goes round at least once in a text: in between there are "
        f"frequencies that do both. {STOPPED}",
        every(better(MIX, ROPE, LOW), _with_high_alone),
    ),
    _scanned("index-inverted-u", INDEX, "positional", 1),
    _scanned("retrieval-u", RETRIEVAL, "symbolic", -1),
    _scanned("mix-inverted-u", MIX, "mixed", 1),
    Claim(
        "faster-half-at-inference",
        SISTER,
        "In a trained model it is the high frequencies that the positional task hangs on.",
        "Loss gained on index when single frequencies of single heads stop turning, summed over heads: over the faster "
        f"half of RoPE's frequencies more than over the slower half, by over {_NATS:g} nats (a tenth of the answer's "
        f"probability; less does not affect the whole). A frequency counts if the interval of its loss leaves 0. "
        f"{ONLY_SKILLED}",
        model(INDEX, ROPE, _TURNING, over(_NATS, " nats")),
    ),
)
