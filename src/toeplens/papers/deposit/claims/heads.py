"""Checks of heads: is the skill in one head, in which layer, when, and under which encodings?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log2
from typing import Any

from toeplens.papers.deposit.claims.common import (
    FIRST_LAYER,
    FULL,
    LATER_LAYERS,
    UNITS,
    At,
    Effect,
    Test,
    label_of,
    threshold,
)
from toeplens.papers.deposit.labels import Label, title
from toeplens.papers.deposit.measured import Look, Measure, in_order
from toeplens.studies.kit.claims import deviation, left_out
from toeplens.studies.kit.results import Results
from toeplens.studies.kit.verdicts import (
    ENOUGH,
    NONE_COUNTS,
    Finding,
    Verdict,
    above,
    agreed,
    contrast,
    of_one,
    supporting,
    unknown,
)
from toeplens.training.presets import COUNT, DISTANCE

# thresholds of the ablation effect of one head: pronounced, negligible
SOME, LITTLE = 0.25, 0.1
_HALF_A_DOUBLING = 0.5  # of the effective heads
_MAYBE = 0.25  # of the models
_TOKENS = ("/tokens-24", "/tokens-32", "", "/tokens-48", "/tokens-64", "/tokens-96")

_LARGEST = Effect("largest ablation effect of a head in any layer, ", lambda look: look.largest())
_FIRST = Effect("largest ablation effect of a head in the first layer, ", lambda look: look.largest(FIRST_LAYER))
_DOUBLINGS = Effect("log2 of the effective heads, ", lambda look: log2(look.effective_heads), least=LITTLE)


def _shallow(look: Look) -> float:
    """The largest ablation effect of a head in the first third of the layers."""
    return look.largest(slice(0, -(-len(look.costs) // 3)))


def _shallow_lead(look: Look) -> float:
    return _shallow(look) - look.largest(slice(-(-len(look.costs) // 3), None))


def _in_second_or_third(look: Look) -> float:
    """1 if the largest effect lies in layer 2 or 3 and exceeds every effect of layer 1, otherwise 0."""
    return float(look.largest(FIRST_LAYER) < look.largest(slice(1, 3)) == look.largest())


def _task_apart(results: Results, at: At) -> list[Finding]:
    """Is RoPE's largest effect larger on Task 1 than on Task 2?"""
    figure = _LARGEST.at(at)
    on_distance, on_counting = (figure.by_seed(results.of(task, "rope")) for task in (DISTANCE, COUNT))
    seen = contrast((1, on_distance), (-1, on_counting), grain=figure.grain)
    what = "largest ablation effect of a head of RoPE, Task 1 − Task 2"
    return [above(what, seen, LITTLE, unit=UNITS[at[1]])]


def _average(results: Results, at: At) -> list[Finding]:
    """The models whose effects are large enough and all models with any effect have to agree."""
    figures = _DOUBLINGS, replace(_DOUBLINGS, least=0.0)
    first, second = (Test(figure, "mla", FULL, above=_HALF_A_DOUBLING, at=at)(results)[0] for figure in figures)
    return [agreed(first, second, "for all models")]


def _dropped(results: Results, at: At) -> list[Finding]:
    with_it, without = (results.of(DISTANCE, label) for label in ("rope/dropout", "rope"))
    if {cell.run for cell in with_it} & {cell.run for cell in without}:
        return [unknown("RoPE with dropout", "every model of this scale has dropout", "RoPE without dropout")]
    alone, compared = (
        Test(_LARGEST, "rope/dropout", above=SOME, at=at),
        Test(_LARGEST, "rope/dropout", "rope", above=-LITTLE, at=at),
    )
    return [*alone(results), *compared(results)]


def _some(what: str, models: Sequence[Mapping[int, float]]) -> Finding:
    """Is it true of any model? "In some cases" fails only if none of enough models shows it."""
    told = [value for values in models for value in values.values()]
    if not told:
        return unknown(what, NONE_COUNTS)
    count, enough = int(sum(told)), min(map(len, models)) >= ENOUGH
    verdict: Verdict = ("holds" if count else "fails") if enough else "leans to hold" if count else "leans to fail"
    return Finding(verdict, f"{what}: {count} of {len(told)} models", wanting="" if enough else f"{ENOUGH} seeds")


def _partial_moves(results: Results, at: At) -> list[Finding]:
    """Over the models of each number of rotated heads, compared with RoPE on all heads."""

    def spared(look: Look) -> float:
        """1 if a later head has a pronounced effect and no head of the first layer has, otherwise 0."""
        return float(look.largest(FIRST_LAYER) < threshold(SOME, at) <= look.largest(LATER_LAYERS))

    effects = (
        _FIRST,
        Effect("", spared),
        Effect("", lambda look: look.layer, LITTLE),
        Effect("", _in_second_or_third, LITTLE),
    )
    first, spare, layer, later = (effect.at(at) for effect in effects)
    labels = [label for label in results.labels(DISTANCE) if (at_ := Label.parse(label)).heads and not at_.variant]
    some = [results.of(DISTANCE, label) for label in labels]
    if not some:
        return [unknown("RoPE on some heads", NONE_COUNTS)]
    whole = results.of(DISTANCE, rope := label_of(results, FULL))
    weight = 1 / len(some)
    share = contrast(*((weight, later.by_seed(cells)) for cells in some), grain=deviation(_MAYBE))
    moved = contrast(*((weight, layer.by_seed(cells)) for cells in some), (-1, layer.by_seed(whole)), grain=0.05)
    left = contrast(*((-weight, first.by_seed(cells)) for cells in some), (1, first.by_seed(whole)))
    without = [left_out(results, figure, DISTANCE, *labels) for figure in (later, spare)]
    beside = [left_out(results, figure, DISTANCE, *labels, rope) for figure in (layer, first)]
    on_some, difference = "RoPE on some heads", "mean of RoPE on some heads − RoPE on all"
    away = f"a deposit in a later layer but not in the first, {on_some}{without[1]}"
    reduced = f"largest ablation effect in the first layer, RoPE on all − mean of RoPE on some heads{beside[1]}"
    support = [
        _some(away, list(map(spare.by_seed, some))),
        above(f"layer of the most important head, {difference}{beside[0]}", moved, 0.5),
        above(reduced, left, LITTLE),
    ]
    what = f"share of models with the most important head in the second or third layer, {on_some}{without[0]}"
    return [above(what, share, _MAYBE), *map(supporting, support)]


# ---- the scale sweep -------------------------------------------------------------------------------------------------


def _of_encoding(results: Results, at: At) -> list[Finding]:
    """RoPE minus absolute, and minus NoPE, averaged over all lengths."""
    rope, figure = label_of(results, FULL), _LARGEST.at(at)
    findings = []
    for rival in ("absolute", "nope") if rope == "rope" else ("rope",):
        signed = [(sign, base + tokens) for tokens in _TOKENS for sign, base in ((1.0, rope), (-1.0, rival))]
        terms = [(sign / len(_TOKENS), figure.by_seed(results.of(DISTANCE, label))) for sign, label in signed]
        away = left_out(results, figure, DISTANCE, *(label for _, label in signed))
        what = f"{figure.words}{title(rope)} − {title(rival)}, mean over lengths{away}"
        findings.append(above(what, contrast(*terms, grain=figure.grain), LITTLE, unit=UNITS[at[1]]))
    return findings


def _unfinished(results: Results, measure: Measure) -> list[Finding]:
    """The first checkpoint with over 90 % accuracy minus the one at eight plateaus, in models that have both.

    Models that reached 90 % only after their plateau are excluded.
    """
    early, late = (_LARGEST.at((moment, measure)) for moment in ("able", "eight times"))
    learning = "90% accuracy only after the plateau, too little skill, or not measured"
    both = replace(
        early, counts=lambda cell: early.counts(cell) and late.counts(cell) and in_order(cell, "able"), without=learning
    )
    label = label_of(results, f"{FULL}/longer")
    cells = [cell for cell in results.of(DISTANCE, label) if both.counts(cell)]
    lost = early.by_seed(cells) - late.by_seed(cells)
    away = left_out(results, both, DISTANCE, label)
    what = f"largest ablation effect of a head, at 90% accuracy − at 8 times the plateau{away}"
    return [above(what, of_one(lost, early.grain), LITTLE, unit=UNITS[measure])]


KNOWN: dict[str, Any] = {
    "largest": _LARGEST,
    "first": _FIRST,
    "later": Effect("largest ablation effect of a head in a later layer, ", lambda look: look.largest(LATER_LAYERS)),
    "second": Effect("second largest ablation effect of any head, ", lambda look: look.second()),
    "shallow": Effect("largest ablation effect in the first third of the layers, ", _shallow),
    "shallow-lead": Effect("that effect − the largest after it, ", _shallow_lead),
    # two heads with a large and two with a small effect need four heads
    "second-of-first": Effect(
        "second largest ablation effect in the first layer, ", lambda look: look.second(FIRST_LAYER), heads=4
    ),
    "second-smallest-of-first": Effect(
        "second smallest ablation effect in the first layer, ", lambda look: look.second_smallest(FIRST_LAYER), heads=4
    ),
    "top-share": Effect("largest effect as a share of the sum over all heads, ", lambda look: look.top, least=LITTLE),
    "effective-heads": Effect("effective heads, ", lambda look: look.effective_heads, least=LITTLE),
    "doublings": _DOUBLINGS,
    "larger-on-task-1": _task_apart,
    "average": _average,
    "kept-with-dropout": _dropped,
    "moved": _partial_moves,
    "over-lengths": _of_encoding,
    "unfinished": _unfinished,
}
