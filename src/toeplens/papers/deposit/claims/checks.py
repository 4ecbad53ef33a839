"""Checks of accuracy and of heads: labels, figures of ablation effects and their thresholds, and tests of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2
from pathlib import Path
from typing import Any

from toeplens.papers.deposit.measured import END, Look, Measure, in_order, look_at
from toeplens.papers.deposit.spec import Label, title
from toeplens.studies.kit import claims
from toeplens.studies.kit.claims import MARGIN, deviation, left_out, read_claims
from toeplens.studies.kit.results import ACCURACY, SKILLED, CellResult, Figure, Results, skill
from toeplens.studies.kit.verdicts import (
    ENOUGH,
    NONE_COUNTS,
    Finding,
    Verdict,
    above,
    agreed,
    below,
    contrast,
    of_one,
    one_sided,
    supporting,
    unknown,
)
from toeplens.training.presets import COUNT, DISTANCE, starting_spec
from toeplens.training.spec import run_spec

DATA = read_claims(Path(__file__).with_name("claims.yaml"))
WORDS: dict[str, str] = DATA["figures"]


FULL = "full-rope"  # RoPE on all heads, without a sinusoid
_LABELS = {  # in the paper's and the released protocol
    FULL: ("rope", "rope-alone"),
    "rope-sinusoid": ("rope-absolute", "rope"),
}
RIVALS = ("absolute", "relative", "alibi", "nope", "random?")  # "?": only if it was trained


def label_of(results: Results, name: str) -> str:
    """The label in the results' protocol, with or without a variant.

    It depends on the protocol only, so an unfinished study is not judged on the wrong model.
    """
    base, slash, variant = name.partition("/")
    return (_LABELS[base][is_released(results)] if base in _LABELS else base) + slash + variant


def is_released(results: Results) -> bool:
    """Whether these are results of the released protocol, even if empty."""
    return results.protocol == "released" or any(cell.key.protocol == "released" for cell in results.cells)


_NATS = {0.5: 0.7, 0.25: 0.35}  # thresholds by loss of shares of the skill, where they differ
UNITS: dict[Measure, str] = {"accuracy": " of the skill", "loss": " nats"}
_WANTED = "models with skill and a large enough ablation effect"
_WANTED_LOSS = (  # older records have no ablation by loss
    f"{_WANTED}; if the loss was not measured: toeplens ablate RUN --metric loss, with the study's --examples and "
    "--split"
)

At = tuple[str, Measure]  # checkpoint and measure at which heads are ablated


def threshold(bar: float, at: At) -> float:
    """A threshold of ablation effects in the measure's unit."""
    return _NATS.get(bar, bar) if at[1] == "loss" else bar


@dataclass(frozen=True)
class Effect:
    """A number of a model's ablation effects, at any checkpoint and by any measure.

    words   name of the number, before the models' names
    of      function that returns it
    least   None for an effect, in the measure's unit; for a number about the location of effects, the smallest sum of
            effects in a model that counts
    heads   minimum number of heads per layer
    """

    words: str
    of: Callable[[Look], float]
    least: float | None = None
    heads: int = 0

    def at(self, at: At) -> Figure:
        """The number at a checkpoint and by a measure."""

        def number(cell: CellResult) -> float:
            look = look_at(cell, *at)
            assert look is not None
            return self.of(look)

        def counts(cell: CellResult) -> bool:
            look = look_at(cell, *at)
            if look is None or look.costs.shape[1] < self.heads:
                return False
            return self.least is None or (look.total > 0 and look.total >= self.least)

        few = "" if self.least is None else ", too small a total ablation effect"
        without = f"too little skill{few}, or not measured" + f", or fewer than {self.heads} heads" * bool(self.heads)
        wanted = _WANTED_LOSS if at[1] == "loss" else _WANTED
        return Figure(self.words, number, counts, without, 0.002 if self.least is None else 0.05, wanted)


FIRST_LAYER, LATER_LAYERS = slice(0, 1), slice(1, None)


@dataclass(frozen=True)
class Test(claims.Test):
    """A test on the results of one protocol; its figure may be an `Effect`, with thresholds as shares of the skill.

    at       checkpoint and measure of effects
    learned  whether at least one model, of the encoding that is subtracted if any, must have skill
    """

    figure: Any
    task: str = DISTANCE
    at: At = (END, "accuracy")  # as in the papers
    learned: bool = False

    def __call__(self, results: Results) -> list[Finding]:
        test: claims.Test = self
        if isinstance(self.figure, Effect):
            test = replace(self, figure=self.figure.at(self.at))
            if self.figure.least is None:
                above, below = (threshold(bar, self.at) for bar in (self.above, self.below))
                test = replace(test, above=above, below=below, unit=UNITS[self.at[1]])
        found = []
        for names in self.places():
            if any(name.endswith("?") and not results.of(self.task, name[:-1]) for name in names):
                continue
            labels = [label_of(results, name.removesuffix("?")) for name in names]
            cells = results.of(self.task, labels[-1])
            if self.learned and cells and not any(cell.skilled for cell in cells):
                why = f"no model has a skill of at least {SKILLED:g}, so its heads are not judged"
                none = unknown(title(labels[-1]), why, "a model size at which it learns")
                found.append(replace(none, essential=self.essential))
            else:
                found.append(test.finding(results, title, *labels))
        return found


_ANEW = (
    "newly trained models (same command, another directory): these were trained before accuracy on training examples "
    "was evaluated, or are still learning"
)
_FIT = Figure(
    "accuracy on training examples, ",
    lambda cell: cell.fit,
    lambda cell: cell.status == "diverged" or (cell.settled and cell.fit >= 0),
    "still learning, or not measured",
    wanted=_ANEW,
)
_GAP = replace(_FIT, words="train − test gap, ", of=lambda cell: cell.fit - cell.accuracy)
_SPEED = Figure(
    "log2 of the epochs until half is learned, ",
    lambda cell: cell.half_learned,
    lambda cell: cell.status == "diverged" or cell.looked_back,
    "accuracy on training examples not evaluated",
    grain=0.05,
    wanted=_ANEW,
)
_SETBACKS = Figure("sum of test accuracy drops during training, ", lambda cell: cell.setbacks)
_BIAS = Figure(
    "log2 of the learned bias's spread",
    lambda cell: cell.measure("bias").doublings,
    lambda cell: cell.measure("bias") is not None,
)
_TASKS = {DISTANCE: "Task 1", COUNT: "Task 2"}
_LEVEL = {task: replace(ACCURACY, words=f"{text}: accuracy of ") for task, text in _TASKS.items()}
_FASTER = 0.25
_SOME = 0.1  # at most this is "near"


def _faster(results: Results, fast: str, slow: str) -> list[Finding]:
    """The second needs more examples than the first.

    The number of examples of a model that never learned half is a lower bound. With such a model among the slow ones
    the claim cannot fail; with one among the fast ones it cannot hold.
    """
    cells = (results.of(DISTANCE, label.removesuffix("?")) for label in (fast, slow))
    lost, won = (any(not cell.learned_half for cell in each) for each in cells)
    return [
        one_sided(finding, holds=not lost, fails=not won, why="models that never learned half")
        for finding in Test(_SPEED, slow, fast, above=_FASTER)(results)
    ]


def _beside(results: Results, task: str, of: str, accuracy: float) -> list[Finding]:
    """Is a model's skill near that of an accuracy in the source, whose baseline is that of the source's sizes?"""

    def lead(cell: CellResult) -> float:
        spec = run_spec(**starting_spec("paper", cell.key.protocol, task, "rope", 0))
        return cell.skill - skill(accuracy, spec.guess)

    figure = replace(ACCURACY, words=f"{_TASKS[task]}: skill − skill of Table 1, ", of=lead)
    return Test(figure, of, above=-_SOME, below=_SOME, task=task)(results)


def _stablest(results: Results) -> list[Finding]:
    """Every rival's test accuracy drops by more than RoPE's; undecided if too few models of both have drops."""
    findings = []
    for rival in RIVALS:
        label = rival.removesuffix("?")
        both = [results.of(DISTANCE, each) for each in (label, "rope")]
        cells, enough = [*both[0], *both[1]], min(ENOUGH, *map(len, both))
        falls = sum(cell.setbacks > 0 for cell in cells if cell.status == "complete")
        few = f"only {falls} of {len(cells)} models have accuracy drops, too few to estimate their frequency"
        findings += [
            finding
            if falls >= enough or not finding.known
            else unknown(f"{title(label)} and {title('rope')}", few, "less stable training")
            for finding in Test(_SETBACKS, rival, "rope", above=MARGIN)(results)
        ]
    return findings


def _near_best(results: Results) -> list[Finding]:
    found: list[Finding] = []
    for task, figure in _LEVEL.items():
        plain = {label for label in results.labels(task) if Label.parse(label).plain} | {"rope", "nope"}
        found += Test(figure, "mla", sorted(plain - {"mla"}), above=-_SOME, task=task)(results)
    return found


def _bias_attenuates(results: Results) -> list[Finding]:
    counting, distance = (_BIAS.by_seed(results.of(task, "relative")) for task in (COUNT, DISTANCE))
    what = "log2 of the learned bias's spread over offsets, Task 2 − Task 1"
    return [below(what, contrast((1, counting), (-1, distance), grain=0.05), -1.0)]


_OF_ACCURACY: dict[str, Any] = {
    "accuracy": ACCURACY,
    "task-1": _LEVEL[DISTANCE],
    "task-2": _LEVEL[COUNT],
    "skill": replace(ACCURACY, words="skill of ", of=lambda cell: cell.skill),
    "fit": _FIT,
    "gap": _GAP,
    "learned-gap": replace(
        _GAP,
        counts=lambda cell: (
            _FIT.counts(cell) and (cell.status == "diverged" or skill(cell.fit, cell.length_chance) >= SKILLED)
        ),
        without="still learning, not measured, or too little learned",
    ),
    "table-1": _beside,
    "faster": _faster,
    "stablest": _stablest,
    "near-best": _near_best,
    "bias-attenuates": _bias_attenuates,
}


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


KNOWN: dict[str, Any] = _OF_ACCURACY | {
    "largest": _LARGEST,
    "first": _FIRST,
    "later": Effect(WORDS["later"], lambda look: look.largest(LATER_LAYERS)),
    "second": Effect(WORDS["second"], lambda look: look.second()),
    "shallow": Effect(WORDS["shallow"], _shallow),
    "shallow-lead": Effect(
        WORDS["shallow-lead"], lambda look: _shallow(look) - look.largest(slice(-(-len(look.costs) // 3), None))
    ),
    # two heads with a large and two with a small effect need four heads
    "second-of-first": Effect(WORDS["second-of-first"], lambda look: look.second(FIRST_LAYER), heads=4),
    "second-smallest-of-first": Effect(
        WORDS["second-smallest-of-first"], lambda look: look.second_smallest(FIRST_LAYER), heads=4
    ),
    "top-share": Effect(WORDS["top-share"], lambda look: look.top, least=LITTLE),
    "effective-heads": Effect(WORDS["effective-heads"], lambda look: look.effective_heads, least=LITTLE),
    "doublings": _DOUBLINGS,
    "larger-on-task-1": _task_apart,
    "average": _average,
    "kept-with-dropout": _dropped,
    "moved": _partial_moves,
    "over-lengths": _of_encoding,
    "unfinished": _unfinished,
}
