"""Claims about positional and symbolic heads, frequencies and length, judged on a grid study.

Required labels: the tasks index, retrieval, mix; the encodings rope, nope, high, low; the scan turn. The first rules
were written before the recorded study was analysed; one trial per kind of model with another seed (7) had set the task
sizes and the scan's range. Thresholds and parts were rewritten afterwards, when the record of seeds 42 to 44 was known.

Only the abstract of arXiv 2511.11579 was available. Claims with source "ours" are not in it. The same holds for the
claims about the multi-hop tasks (multihop.yaml) and arXiv 2605.31558; their labels are the tasks number and letter, and
the encodings gptj and nope.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite, pi
from pathlib import Path
from typing import Any

import numpy as np

from toeplens import encodings
from toeplens.lens.kit.intervals import spearman
from toeplens.studies.grid import measures as heads
from toeplens.studies.grid.measures import HEAD_PROPERTIES, RankRelation
from toeplens.studies.grid.spec import EncodingColumn
from toeplens.studies.grid.study import ClaimData
from toeplens.studies.kit.claims import MARGIN, Claim, MeanTest, claim_of, excluded_note, read_claims
from toeplens.studies.kit.results import ACCURACY, CellResult, ModelValue
from toeplens.studies.kit.verdicts import (
    LEVEL,
    MIN_SEEDS,
    NO_RUNS,
    Finding,
    above,
    below,
    contrast,
    difference,
    one_sided,
    opposite,
    supporting,
    unknown_finding,
    worst_and_best,
)

INDEX, RETRIEVAL, MIX = "index", "retrieval", "mix"
ROPE, HIGH, LOW, SCAN = "rope", "high", "low", "turn"
_STRONG = 0.5  # a large correlation
_MAX_BOTH = 0.6
_PURE = 0.9
_CHANGE = 0.1
_HALF = 0.5
_SKILL = 0.05
_TWICE = 2.0
_NO_HEAD = "no head with a significant ablation effect"
_NO_PROBE = f"{_NO_HEAD}, or not measured during training"
_NO_INITIAL = "the models were not measured before training"
_COMPLETE_SCAN = "training until all models of the scan have stopped learning"
ScanRow = list[tuple[float, float]]  # frequency and accuracy, seed by seed


def skilled_figure(
    words: str, value_of: Callable[[CellResult], float], reason: str, grain: float = 0.005
) -> ModelValue:
    """A figure for models with enough skill and a finite value."""

    def is_defined(cell: CellResult) -> bool:
        return cell.is_skilled and isfinite(value_of(cell))

    return ModelValue(words, value_of, is_defined, f"no skill, or {reason}", grain)


def _accuracy(data: ClaimData, task: str, **options: Any) -> list[Finding]:
    return MeanTest(replace(ACCURACY, title=f"accuracy on {task}, "), task=task, **options)(data)


def _skill(task: str) -> ModelValue:
    return ModelValue(f"skill on {task}, ", lambda cell: cell.skill, ACCURACY.is_defined, ACCURACY.missing_reason)


def _exclusion(data: ClaimData) -> list[Finding]:
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
    quantity = f"largest over a seed's heads of the smaller sampled score ({count} heads)"
    return [below(quantity, largest, _MAX_BOTH, grain=0.02)]


def _carried_share(task: str, share: str) -> ModelValue:
    words = f"{share} share of the heads that carry the skill on {task}, "
    return skilled_figure(words, lambda cell: heads.weighted_share(cell, share), _NO_HEAD, grain=0.02)


def _pure(data: ClaimData, task: str, share: str) -> list[Finding]:
    """Test of the task's kind: the mean over all unrestricted encodings, with equal weights."""
    figure = _carried_share(task, share)
    labels = [column.label for column in data.spec.columns() if _is_unrestricted(column)]
    values = {label: row for label in labels if (row := figure.by_seed(data.results.cells_of(task, label)))}
    if not values:
        return [unknown_finding(f"{figure.title}mean over encodings", NO_RUNS)]
    mean = contrast(*((1 / len(values), row) for row in values.values()), grain=figure.grain)
    quantity = f"{figure.title}mean over encodings ({', '.join(data.title(label) for label in values)})"
    return [above(quantity, mean, _PURE)]


def _is_unrestricted(column: EncodingColumn) -> bool:
    """Whether an encoding is not restricted to a frequency band and adds no position at the input."""
    kind = encodings.get(column.encoding)
    return not column.scan and column.label not in (HIGH, LOW) and "input" not in (kind.coupling, *kind.also_couples)


def _exceeds(data: ClaimData, task: str) -> list[Finding]:
    """No encoding reaches a skill of 0.5; models that are still learning give a lower bound."""
    labels = data.results.labels(task)
    if not labels:
        return [unknown_finding(f"skill on {task}", NO_RUNS)]
    findings = []
    skill = replace(_skill(task), is_defined=lambda cell: cell.status == "complete")
    for label in labels:
        stopped = all(cell.settled for cell in data.results.cells_of(task, label))
        finding, settled = (MeanTest(each, label, below=_HALF, task=task)(data)[0] for each in (skill, _skill(task)))
        finding = one_sided(finding, holds=stopped, fails=True, cause="models that are still learning")
        findings.append(replace(finding, extremes=settled.extremes))
    return findings


def _purities(cell: CellResult) -> list[float]:
    """At each checkpoint, the larger share of each head, averaged with the trained model's ablation effects."""
    rows = [row for row in cell.probe_rows if row.get("positional") is not None]
    larger = [np.fmax(heads.array(row["positional"]), heads.array(row["symbolic"])) for row in rows]
    return [heads.effect_weighted_mean(cell, values) for values in larger]


def _purity_gain(cell: CellResult) -> float:
    purities = _purities(cell)
    return purities[-1] - purities[0] if len(purities) > 1 else float("nan")


def _purity_follows(cell: CellResult) -> float:
    """Rank correlation of purity and accuracy over checkpoints."""
    accuracies = [row["accuracy"] for row in cell.probe_rows if row.get("positional") is not None]
    pairs = np.array([_purities(cell), accuracies], dtype=float)
    return float(spearman(pairs)) if pairs.shape[1] > 2 and np.isfinite(pairs).all() else float("nan")


def _test_skilled(
    words: str, value_of: Callable[[CellResult], float], reason: str, data: ClaimData, task: str, **options: Any
) -> list[Finding]:
    figure = skilled_figure(words.format(task), value_of, reason, grain=0.02)
    return MeanTest(figure, task=task, **options)(data)


def _effect_of(data: ClaimData, share: str, task: str, **options: Any) -> list[Finding]:
    words = f"effect of {share} heads / effect of all on {{}}, "
    return _test_skilled(words, lambda cell: heads.share_of_effects(cell, share), _NO_HEAD, data, task, **options)


def _emerges(data: ClaimData, task: str, share: str) -> list[Finding]:
    """Test of the heads of the trained model, weighted by their ablation effect."""

    def share_at(cell: CellResult, index: int) -> float:
        rows = [row for row in cell.probe_rows if row.get(share) is not None]
        return heads.effect_weighted_mean(cell, heads.array(rows[index][share])) if len(rows) > 1 else float("nan")

    quantity = f"{share} share of the heads that carry the skill on {task}"
    end = skilled_figure(f"{quantity}, at the end, ", lambda cell: share_at(cell, -1), _NO_PROBE, grain=0.02)
    increase = lambda cell: share_at(cell, -1) - share_at(cell, 0)  # noqa: E731
    gain = skilled_figure(f"{quantity}, end − beginning, ", increase, _NO_PROBE, grain=0.02)
    tests = MeanTest(end, ROPE, above=_PURE, task=task), MeanTest(gain, ROPE, above=_CHANGE, task=task)
    return [finding for test in tests for finding in test(data)]


def _correspondence(data: ClaimData) -> list[Finding]:
    quantity = "rank correlation over heads of the frequencies' centre with positional − symbolic share"
    after, before = (_correlations(data, *measures) for measures in (("frequency", "behaviour"), ("beginning",) * 2))
    gains = {seed: after[seed] - before[seed] for seed in after if seed in before}
    gain = "that correlation − its value before training"
    learned = above(gain, gains, 0.0, grain=0.02) if gains or not after else unknown_finding(gain, _NO_INITIAL)
    return [above(quantity, after, _STRONG, grain=0.02), supporting(learned)]


def _correlations(data: ClaimData, frequency_measure: str, share_measure: str) -> dict[int, float]:
    """Correlation of two measures by seed, over the heads of all tasks' models with enough skill."""
    by_seed: dict[int, list[tuple[float, float]]] = {}
    for task in data.spec.tasks:
        for cell in data.skilled_cells(task, ROPE):
            frequency, shares = cell.measure(frequency_measure), cell.measure(share_measure)
            if frequency is not None and shares is not None:
                pairs = zip(frequency.centre.ravel(), (shares.positional - shares.symbolic).ravel(), strict=True)
                by_seed.setdefault(cell.key.seed, []).extend(pair for pair in pairs if np.isfinite(pair).all())
    return {seed: float(spearman(np.array(pairs).T)) for seed, pairs in sorted(by_seed.items()) if len(pairs) > 2}


def _halves(cell: CellResult) -> float:
    """Loss increase without the faster half of the frequencies minus that without the slower; NaN without effects."""
    bands = cell.measure("bands")
    if bands is None:
        return float("nan")
    significant = np.isnan(bands.low) | (bands.low > 0)
    increase = np.nansum(np.where(significant, np.clip(bands.drops, 0, None), 0.0), axis=(0, 1))
    half = len(increase) // 2
    return float(increase[:half].sum() - increase[half:].sum()) if increase.any() else float("nan")


def _with_high_alone(data: ClaimData) -> list[Finding]:
    """Test only if each frequency of the high band makes at least one full rotation within a sequence."""
    quantity = "accuracy on mix with only the highest frequencies"
    keep = next((column.options.get("keep") for column in data.spec.columns() if column.label == HIGH), None)
    for cell in data.results.cells_of(MIX, HIGH):
        frequency, lengths = cell.measure("frequency"), cell.measure("extrapolation")
        if frequency is None or lengths is None:
            continue
        band = frequency.frequencies[0, 0] if keep is None else frequency.frequencies[0, 0][list(keep)]
        slowest, minimum = float(band.min()), 2 * pi / lengths.trained_length
        if slowest < minimum:
            reason = f"the band's {slowest:.2g} radians per token make less than one full rotation within a sequence"
            wanted = f"a study whose high band ends above {minimum:.2g} radians per token"
            return [unknown_finding(quantity, reason, wanted)]
        return _accuracy(data, MIX, of=ROPE, minus=HIGH, above=MARGIN)
    return [unknown_finding(quantity, NO_RUNS)]


def _scan(data: ClaimData, task: str, sign: int) -> list[Finding]:
    """Is an inner frequency better (sign 1) or worse (-1) than both ends of the scan?"""
    columns = sorted((c for c in data.spec.columns() if c.scan == SCAN), key=lambda column: column.value or 0.0)
    if len(columns) < 3:
        reason = "no scan with at least three frequencies"
        return [unknown_finding(f"accuracy on {task} by frequency", reason, "a scan called turn")]
    cells = {column.value or 0.0: data.results.cells_of(task, column.label) for column in columns}
    note = excluded_note(data.results, ACCURACY, task, *(column.label for column in columns))
    findings = _inner_findings(task, sign, {value: ACCURACY.by_seed(each) for value, each in cells.items()}, note)
    if all(ACCURACY.is_defined(cell) for each in cells.values() for cell in each):
        return findings
    ranges = {value: ACCURACY.ranges_by_seed(each) for value, each in cells.items()}

    def extreme(best: bool) -> list[Finding]:
        """The findings if the models that are still learning support the claim as much, or as little, as they may."""
        rows = {}
        for value, row in ranges.items():
            is_end = value in (columns[0].value, columns[-1].value)
            rows[value] = {seed: pair[(best == (sign > 0)) != is_end] for seed, pair in row.items()}
        return _inner_findings(task, sign, rows)

    extremes = list(zip(extreme(False), extreme(True), strict=True))
    if findings[0].has_data:
        return [replace(finding, extremes=pair) for finding, pair in zip(findings, extremes, strict=True)]
    worst, best = (worst_and_best(case)[0] for case in zip(*extremes, strict=True))
    return [replace(findings[0], extremes=(worst, best))]


def _inner_findings(task: str, sign: int, rows: Mapping[float, Mapping[int, float]], note: str = "") -> list[Finding]:
    """An inner frequency against each end of the scan; accuracies by frequency and seed."""
    seeds = sorted(set.intersection(*(set(row) for row in rows.values())))
    if not seeds:
        return [
            unknown_finding(f"accuracy on {task} by frequency{note}", "no seed has a complete scan", _COMPLETE_SCAN)
        ]
    low, *inner, high = ([(value, row[seed]) for seed in seeds] for value, row in rows.items())
    return [_gap(task, sign, _select_inner(inner, sign), end) for end in (low, high)]


def _gap(task: str, sign: int, inner: ScanRow, end: ScanRow) -> Finding:
    """An inner frequency minus an end of the scan, or the reverse (sign -1), over seeds."""
    chosen = ", ".join(f"{value:g}" for value in sorted({value for value, _ in inner}))
    names = [f"the {'best' if sign > 0 else 'worst'} inner frequency ({chosen})", f"{end[0][0]:g}"][::sign]
    first, second = ([accuracy for _, accuracy in row] for row in (inner, end)[::sign])
    return above(f"accuracy on {task} at {names[0]} − at {names[1]}", difference(first, second), MARGIN)


def _select_inner(inner: Sequence[ScanRow], sign: int) -> ScanRow:
    """For each seed, the best (or worst) frequency on the other seeds, and the seed's accuracy there.

    This avoids selection bias. A single seed chooses for itself.
    """
    table = sign * np.array([[accuracy for _, accuracy in row] for row in inner])
    count = table.shape[1]
    means = table if count == 1 else (table.sum(1, keepdims=True) - table) / (count - 1)
    return [inner[best][seed] for seed, best in enumerate(means.argmax(0))]


def _extrapolates(data: ClaimData, of: str, symbolic: str, positional: str) -> list[Finding]:
    """Test of the skill kept on longer sequences: on a symbolic task more than on a positional one."""
    findings = []
    for factor in (heads.LONGER_FACTOR, _TWICE):
        figure = skilled_figure(
            "", lambda cell, factor=factor: heads.skill_retained(cell, factor), "no such sequences", grain=0.02
        )
        first, second = (figure.by_seed(data.results.cells_of(task, of)) for task in (symbolic, positional))
        label = f"{data.title(of)}, {symbolic} − {positional}"
        quantity = f"share of the skill kept at {factor:g} times the length, {label}"
        finding = above(quantity, difference(first, second, figure.grain), _SKILL)
        findings.append(finding if factor == heads.LONGER_FACTOR else supporting(finding))
    return findings


def _falls(data: ClaimData, figure: str) -> list[Finding]:
    """Test: is a figure of the heads negatively correlated with the skill kept on longer sequences?"""
    relations = [relation for relation in data.relations if (relation.figure, relation.task) == (figure, None)]
    relations.sort(key=lambda relation: relation.factor != heads.LONGER_FACTOR)
    if not relations or relations[0].factor != heads.LONGER_FACTOR:
        return [unknown_finding(f"{HEAD_PROPERTIES[figure][0]}, against longer sequences", NO_RUNS)]
    first, *others = (opposite(_positive_correlation(relation)) for relation in relations)
    return [first, *(supporting(finding) for finding in others)]


def _positive_correlation(relation: RankRelation) -> Finding:
    """Test: is a rank correlation above 0?"""
    quantity = f"rank correlation of {relation.figure} with skill kept at {relation.factor:g} times the length"
    families, seeds = len(relation.families), len({point.seed for point in relation.points})
    wanted = f"{MIN_SEEDS} families of encodings and {MIN_SEEDS} seeds (now {families} and {seeds})"
    if relation.value is None:
        return unknown_finding(quantity, "too few encodings, or no variation", wanted)
    counts = f"{len(relation.points)} models, {relation.encodings} encodings of {families} families"
    text = f"{quantity} ({counts}: {', '.join(relation.families)}): {relation.value:.3f}"
    if relation.low is None or relation.high is None or relation.chance is None:
        reason = "no interval, as there are too few families or no variation without one of them"
        return Finding("undecided", f"{text}, threshold 0; {reason}", missing="more families in which it varies")
    text = f"{text} [{relation.low:.3f}, {relation.high:.3f}], threshold 0"
    if min(families, seeds) < MIN_SEEDS:
        return Finding("leans to hold" if relation.value > 0 else "leans to fail", text, missing=wanted)
    finding = Finding("undecided", text, relation.chance, 1 - relation.chance, missing="more families of encodings")
    return replace(finding, verdict=finding.verdict_at(LEVEL))


_TESTS_BY_NAME: dict[str, Any] = {
    "exclusion": _exclusion,
    "carried": lambda data, task, share, **options: MeanTest(_carried_share(task, share), task=task, **options)(data),
    "pure": _pure,
    "accuracy": _accuracy,
    "skill": lambda data, task, **options: MeanTest(_skill(task), task=task, **options)(data),
    "exceeds": _exceeds,
    "emerges": _emerges,
    "correspondence": _correspondence,
    "with-high-alone": _with_high_alone,
    "scan": _scan,
    "faster-half": skilled_figure(
        "loss on index without the faster half − without the slower half, ", _halves, "not measured"
    ),
    "extrapolates": _extrapolates,
    "falls": _falls,
    "purity-gain": partial(_test_skilled, "purity of heads on {}, end − beginning, ", _purity_gain, _NO_PROBE),
    "purity-follows": partial(_test_skilled, "correlation of purity and accuracy on {}, ", _purity_follows, _NO_PROBE),
    "effect-of": _effect_of,
}


def _claims_in(name: str) -> tuple[Claim[ClaimData], ...]:
    content = read_claims(Path(__file__).with_name(name))
    return tuple(claim_of(entry, _TESTS_BY_NAME, content["words"]) for entry in content["claims"])


CLAIMS, MULTIHOP = _claims_in("claims.yaml"), _claims_in("multihop.yaml")

__all__ = ["CLAIMS", "MULTIHOP", "ClaimData"]
