"""Claims about positional and symbolic heads, frequencies and length, judged on a grid study.

Required labels: the tasks index, retrieval, mix; the encodings rope, nope, high, low; the scan turn. The first rules
were written before the recorded study was analysed; one trial per kind of model with another seed (7) had set the task
sizes and the scan's range. Thresholds and parts were rewritten afterwards, when the record of seeds 42 to 44 was known.

Only the abstract of arXiv 2511.11579 was available. Claims with source "ours" are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite, pi
from pathlib import Path
from typing import Any

import numpy as np

from toeplens import encodings
from toeplens.lens.kit.intervals import spearman
from toeplens.studies.grid import measured as heads
from toeplens.studies.grid.measured import FIGURES, Relation
from toeplens.studies.grid.spec import Column
from toeplens.studies.grid.study import Evidence
from toeplens.studies.kit.claims import MARGIN, Claim, Test, claim_of, left_out, read_claims
from toeplens.studies.kit.results import ACCURACY, CellResult, Figure
from toeplens.studies.kit.verdicts import (
    ENOUGH,
    LEVEL,
    NONE_COUNTS,
    Finding,
    above,
    below,
    contrast,
    difference,
    one_sided,
    opposite,
    supporting,
    unknown,
)

INDEX, RETRIEVAL, MIX = "index", "retrieval", "mix"
ROPE, HIGH, LOW, SCAN = "rope", "high", "low", "turn"
_STRONG = 0.5  # a large correlation
_BOTH = 0.6
_PURE = 0.9
_CHANGE = 0.1
_HALF = 0.5
_SKILL = 0.05
_TWICE = 2.0
_NO_HEAD = "no head with a significant ablation effect"
_NO_BEGINNING = "the models were not measured before training"
_WHOLE = "training until all models of the scan have stopped learning"
Row = list[tuple[float, float]]  # frequency and accuracy, seed by seed


def of_skilled(words: str, of: Callable[[CellResult], float], without: str, grain: float = 0.005) -> Figure:
    """A figure for models with enough skill and a finite value."""
    return Figure(words, of, lambda cell: cell.skilled and isfinite(of(cell)), f"no skill, or {without}", grain)


def _accuracy(data: Evidence, task: str, **options: Any) -> list[Finding]:
    return Test(replace(ACCURACY, words=f"accuracy on {task}, "), task=task, **options)(data)


def _skill(task: str) -> Figure:
    return Figure(f"skill on {task}, ", lambda cell: cell.skill, ACCURACY.counts, ACCURACY.without)


def _exclusion(data: Evidence) -> list[Finding]:
    """Per seed, the largest over heads of the smaller of the two scores."""
    largest: dict[int, float] = {}
    count = 0
    for cell in data.results.cells:
        scores = cell.measure("permutations")
        if scores is not None:
            smaller = np.fmin(scores.logits.positional, scores.logits.symbolic)
            smaller = smaller[np.isfinite(smaller)]
            count += smaller.size
            if smaller.size:
                largest[cell.key.seed] = max(largest.get(cell.key.seed, -1.0), float(smaller.max()))
    what = f"largest over a seed's heads of the smaller sampled score ({count} heads)"
    return [below(what, largest, _BOTH, grain=0.02)]


def _carried(task: str, share: str) -> Figure:
    words = f"{share} share of the heads that carry the skill on {task}, "
    return of_skilled(words, lambda cell: heads.carried(cell, share), _NO_HEAD, grain=0.02)


def _pure(data: Evidence, task: str, share: str) -> list[Finding]:
    """Test of the task's kind: the mean over all unrestricted encodings, with equal weights."""
    figure = _carried(task, share)
    labels = [column.label for column in data.spec.columns() if _free(column)]
    values = {label: row for label in labels if (row := figure.by_seed(data.results.of(task, label)))}
    if not values:
        return [unknown(f"{figure.words}mean over encodings", NONE_COUNTS)]
    mean = contrast(*((1 / len(values), row) for row in values.values()), grain=figure.grain)
    what = f"{figure.words}mean over encodings ({', '.join(data.title(label) for label in values)})"
    return [above(what, mean, _PURE)]


def _free(column: Column) -> bool:
    """Whether an encoding is not restricted to a frequency band and adds no position at the input."""
    kind = encodings.get(column.encoding)
    return not column.scan and column.label not in (HIGH, LOW) and "input" not in (kind.coupling, *kind.also_couples)


def _exceeds(data: Evidence, task: str) -> list[Finding]:
    """No encoding reaches a skill of 0.5; models that are still learning give a lower bound."""
    labels = data.results.labels(task)
    if not labels:
        return [unknown(f"skill on {task}", NONE_COUNTS)]
    findings = []
    skill = replace(_skill(task), counts=lambda cell: cell.status == "complete")
    for label in labels:
        stopped = all(cell.settled for cell in data.results.of(task, label))
        [finding] = Test(skill, label, below=_HALF, task=task)(data)
        findings.append(one_sided(finding, holds=stopped, fails=True, why="models that are still learning"))
    return findings


def _emerges(data: Evidence, task: str, share: str) -> list[Finding]:
    """Test of the heads of the trained model, weighted by their ablation effect."""

    def at(cell: CellResult, place: int) -> float:
        rows = [row for row in cell.watched if row.get(share) is not None]
        return heads.weighed(cell, heads.array(rows[place][share])) if len(rows) > 1 else float("nan")

    what = f"{share} share of the heads that carry the skill on {task}"
    without = f"{_NO_HEAD}, or not measured during training"
    end = of_skilled(f"{what}, at the end, ", lambda cell: at(cell, -1), without, grain=0.02)
    gain = of_skilled(f"{what}, end − beginning, ", lambda cell: at(cell, -1) - at(cell, 0), without, grain=0.02)
    return [
        *Test(end, ROPE, above=_PURE, task=task)(data),
        *Test(gain, ROPE, above=_CHANGE, task=task)(data),
    ]


def _correspondence(data: Evidence) -> list[Finding]:
    what = "rank correlation over heads of the frequencies' centre with positional − symbolic share"
    after, before = (_correlations(data, *measures) for measures in (("frequency", "behaviour"), ("beginning",) * 2))
    more = {seed: after[seed] - before[seed] for seed in after if seed in before}
    gain = "that correlation − its value before training"
    taught = above(gain, more, 0.0, grain=0.02) if more or not after else unknown(gain, _NO_BEGINNING)
    return [above(what, after, _STRONG, grain=0.02), supporting(taught)]


def _correlations(data: Evidence, use: str, follows: str) -> dict[int, float]:
    """Correlation of two measures by seed, over the heads of all tasks' models with enough skill."""
    by_seed: dict[int, list[tuple[float, float]]] = {}
    for task in data.spec.tasks:
        for cell in data.skilled(task, ROPE):
            used, found = cell.measure(use), cell.measure(follows)
            if used is not None and found is not None:
                pairs = zip(used.centre.ravel(), (found.positional - found.symbolic).ravel(), strict=True)
                by_seed.setdefault(cell.key.seed, []).extend(pair for pair in pairs if np.isfinite(pair).all())
    return {seed: float(spearman(np.array(pairs).T)) for seed, pairs in sorted(by_seed.items()) if len(pairs) > 2}


def _halves(cell: CellResult) -> float:
    """Loss increase without the faster half of the frequencies minus that without the slower; NaN without effects."""
    bands = cell.measure("bands")
    if bands is None:
        return float("nan")
    sure = np.isnan(bands.low) | (bands.low > 0)
    lost = np.nansum(np.where(sure, np.clip(bands.drops, 0, None), 0.0), axis=(0, 1))
    half = len(lost) // 2
    return float(lost[:half].sum() - lost[half:].sum()) if lost.any() else float("nan")


def _with_high_alone(data: Evidence) -> list[Finding]:
    """Test only if each frequency of the high band makes at least one full rotation within a sequence."""
    what = "accuracy on mix with only the highest frequencies"
    keep = next((column.options.get("keep") for column in data.spec.columns() if column.label == HIGH), None)
    for cell in data.results.of(MIX, HIGH):
        use, longer = cell.measure("frequency"), cell.measure("extrapolation")
        if use is None or longer is None:
            continue
        band = use.frequencies[0, 0] if keep is None else use.frequencies[0, 0][list(keep)]
        slowest, bar = float(band.min()), 2 * pi / longer.trained_length
        if slowest < bar:
            why = f"the band's {slowest:.2g} radians per token make less than one full rotation within a sequence"
            return [unknown(what, why, f"a study whose high band ends above {bar:.2g} radians per token")]
        return _accuracy(data, MIX, of=ROPE, minus=HIGH, above=MARGIN)
    return [unknown(what, NONE_COUNTS)]


def _scan(data: Evidence, task: str, sign: int) -> list[Finding]:
    """Is an inner frequency better (sign 1) or worse (-1) than both ends of the scan?"""
    columns = sorted((c for c in data.spec.columns() if c.scan == SCAN), key=lambda column: column.value or 0.0)
    if len(columns) < 3:
        why = "no scan with at least three frequencies"
        return [unknown(f"accuracy on {task} by frequency", why, "a scan called turn")]
    rows = {column.value or 0.0: ACCURACY.by_seed(data.results.of(task, column.label)) for column in columns}
    whole = sorted(set.intersection(*(set(row) for row in rows.values())))
    if not whole:
        missing = left_out(data.results, ACCURACY, task, *(column.label for column in columns))
        return [unknown(f"accuracy on {task} by frequency{missing}", "no seed has a complete scan", _WHOLE)]
    low, *inner, high = ([(value, row[seed]) for seed in whole] for value, row in rows.items())
    return [_gap(task, sign, _chosen(inner, sign), end) for end in (low, high)]


def _gap(task: str, sign: int, inner: Row, end: Row) -> Finding:
    """An inner frequency minus an end of the scan, or the reverse (sign -1), over seeds."""
    chosen = ", ".join(f"{value:g}" for value in sorted({value for value, _ in inner}))
    names = [f"the {'best' if sign > 0 else 'worst'} inner frequency ({chosen})", f"{end[0][0]:g}"][::sign]
    first, second = ([accuracy for _, accuracy in row] for row in (inner, end)[::sign])
    return above(f"accuracy on {task} at {names[0]} − at {names[1]}", difference(first, second), MARGIN)


def _chosen(inner: Sequence[Row], sign: int) -> Row:
    """For each seed, the best (or worst) frequency on the other seeds, and the seed's accuracy there.

    This avoids selection bias. A single seed chooses for itself.
    """
    table = sign * np.array([[accuracy for _, accuracy in row] for row in inner])
    count = table.shape[1]
    means = table if count == 1 else (table.sum(1, keepdims=True) - table) / (count - 1)
    return [inner[best][seed] for seed, best in enumerate(means.argmax(0))]


def _extrapolates(data: Evidence) -> list[Finding]:
    findings = []
    for factor in (heads.LONGER, _TWICE):
        figure = of_skilled("", lambda cell, factor=factor: heads.kept(cell, factor), "no such sequences", grain=0.02)
        retrieval, index = (figure.by_seed(data.results.of(task, ROPE)) for task in (RETRIEVAL, INDEX))
        what = f"share of the skill kept at {factor:g} times the length, RoPE, retrieval − index"
        finding = above(what, difference(retrieval, index, figure.grain), _SKILL)
        findings.append(finding if factor == heads.LONGER else supporting(finding))
    return findings


def _falls(data: Evidence, figure: str) -> list[Finding]:
    """Test: is a figure of the heads negatively correlated with the skill kept on longer sequences?"""
    found = [each for each in data.relations if (each.figure, each.task) == (figure, None)]
    found.sort(key=lambda each: each.factor != heads.LONGER)
    if not found or found[0].factor != heads.LONGER:
        return [unknown(f"{FIGURES[figure][0]}, against longer sequences", NONE_COUNTS)]
    first, *rest = (opposite(_rises(each)) for each in found)
    return [first, *(supporting(finding) for finding in rest)]


def _rises(relation: Relation) -> Finding:
    """Test: is a rank correlation above 0?"""
    what = f"rank correlation of {relation.figure} with skill kept at {relation.factor:g} times the length"
    families, seeds = len(relation.families), len({point.seed for point in relation.points})
    wanted = f"{ENOUGH} families of encodings and {ENOUGH} seeds (now {families} and {seeds})"
    if relation.value is None:
        return unknown(what, "too few encodings, or no variation", wanted)
    counted = f"{len(relation.points)} models, {relation.encodings} encodings of {families} families"
    text = f"{what} ({counted}: {', '.join(relation.families)}): {relation.value:.3f}"
    if relation.low is None or relation.high is None or relation.chance is None:
        why = "no interval, as there are too few families or no variation without one of them"
        return Finding("undecided", f"{text}, threshold 0; {why}", wanting="more families in which it varies")
    text = f"{text} [{relation.low:.3f}, {relation.high:.3f}], threshold 0"
    if min(families, seeds) < ENOUGH:
        return Finding("leans to hold" if relation.value > 0 else "leans to fail", text, wanting=wanted)
    decided = Finding("undecided", text, relation.chance, 1 - relation.chance, wanting="more families of encodings")
    return replace(decided, verdict=decided.at(LEVEL))


_CHECKS: dict[str, Any] = {
    "exclusion": _exclusion,
    "carried": lambda data, task, share, **options: Test(_carried(task, share), task=task, **options)(data),
    "pure": _pure,
    "accuracy": _accuracy,
    "skill": lambda data, task, **options: Test(_skill(task), task=task, **options)(data),
    "exceeds": _exceeds,
    "emerges": _emerges,
    "correspondence": _correspondence,
    "with-high-alone": _with_high_alone,
    "scan": _scan,
    "faster-half": of_skilled(
        "loss on index without the faster half − without the slower half, ", _halves, "not measured"
    ),
    "extrapolates": _extrapolates,
    "falls": _falls,
}
_DATA = read_claims(Path(__file__).with_name("claims.yaml"))
CLAIMS: tuple[Claim[Evidence], ...] = tuple(claim_of(entry, _CHECKS, _DATA["words"]) for entry in _DATA["claims"])

__all__ = ["CLAIMS", "Evidence"]
