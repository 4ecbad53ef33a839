"""Checks of accuracy and of heads: labels, figures of ablation effects and their thresholds, and tests of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2
from pathlib import Path
from typing import Any

from toeplens.papers.deposit.measures import END, HeadCosts, Measure, head_costs, is_in_order
from toeplens.papers.deposit.spec import EncodingLabel, title
from toeplens.studies.kit import claims
from toeplens.studies.kit.claims import MARGIN, deviation, excluded_note, read_claims
from toeplens.studies.kit.results import ACCURACY, MIN_SKILL, CellResult, ModelValue, Results, skill
from toeplens.studies.kit.verdicts import (
    MIN_SEEDS,
    NO_RUNS,
    Finding,
    Verdict,
    above,
    below,
    combine_agreeing,
    contrast,
    mean_contrast,
    one_sided,
    supporting,
    unknown_finding,
)
from toeplens.training.presets import COUNT, DISTANCE, starting_spec
from toeplens.training.spec import run_spec

DATA = read_claims(Path(__file__).with_name("claims.yaml"))

FULL_ROPE = "full-rope"  # RoPE on all heads, without a sinusoid
_LABELS = {  # in the paper's and the released protocol
    FULL_ROPE: ("rope", "rope-alone"),
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


_LOSS_THRESHOLDS = {0.5: 0.7, 0.25: 0.35}  # thresholds by loss of shares of the skill, where they differ
UNITS: dict[Measure, str] = {"accuracy": " of the skill", "loss": " nats"}
_WANTED = "models with skill and a large enough ablation effect"
_WANTED_LOSS = (  # older records have no ablation by loss
    f"{_WANTED}; if the loss was not measured: toeplens ablate RUN --metric loss, with the study's --examples and "
    "--split"
)

Criterion = tuple[str, Measure]  # checkpoint and measure at which heads are ablated


def effect_threshold(share: float, criterion: Criterion) -> float:
    """A threshold of ablation effects in the measure's unit."""
    return _LOSS_THRESHOLDS.get(share, share) if criterion[1] == "loss" else share


@dataclass(frozen=True)
class AblationMeasure:
    """A number of a model's ablation effects, at any checkpoint and by any measure.

    title      name of the number, before the models' names
    compute    function that returns it
    min_total  None for an effect, in the measure's unit; for a number about the location of effects, the smallest sum
               of effects in a model that counts
    min_heads  minimum number of heads per layer
    """

    title: str
    compute: Callable[[HeadCosts], float]
    min_total: float | None = None
    min_heads: int = 0

    def figure_at(self, criterion: Criterion) -> ModelValue:
        """The number at a checkpoint and by a measure."""

        def value(cell: CellResult) -> float:
            costs = head_costs(cell, *criterion)
            assert costs is not None
            return self.compute(costs)

        def counts(cell: CellResult) -> bool:
            costs = head_costs(cell, *criterion)
            if costs is None or costs.effects.shape[1] < self.min_heads:
                return False
            return self.min_total is None or (costs.total > 0 and costs.total >= self.min_total)

        few = "" if self.min_total is None else ", too small a total ablation effect"
        without = f"too little skill{few}, or not measured"
        without += f", or fewer than {self.min_heads} heads" if self.min_heads else ""
        wanted = _WANTED_LOSS if criterion[1] == "loss" else _WANTED
        return ModelValue(self.title, value, counts, without, 0.002 if self.min_total is None else 0.05, wanted)


FIRST_LAYER, LATER_LAYERS = slice(0, 1), slice(1, None)


@dataclass(frozen=True)
class ProtocolTest(claims.MeanTest):
    """A test on the results of one protocol; thresholds of an `AblationMeasure` are shares of the skill.

    criterion  checkpoint and measure of effects
    learned    whether at least one model, of the encoding that is subtracted if any, must have skill
    """

    figure: Any
    task: str = DISTANCE
    criterion: Criterion = (END, "accuracy")  # as in the papers
    learned: bool = False

    def __call__(self, results: Results) -> list[Finding]:
        test: claims.MeanTest = self
        if isinstance(self.figure, AblationMeasure):
            test = replace(self, figure=self.figure.figure_at(self.criterion))
            if self.figure.min_total is None:
                above, below = (effect_threshold(share, self.criterion) for share in (self.above, self.below))
                test = replace(test, above=above, below=below, unit=UNITS[self.criterion[1]])
        findings = []
        for names in self.label_groups():
            if any(name.endswith("?") and not results.cells_of(self.task, name[:-1]) for name in names):
                continue
            labels = [label_of(results, name.removesuffix("?")) for name in names]
            cells = results.cells_of(self.task, labels[-1])
            if self.learned and cells and not any(cell.is_skilled for cell in cells):
                reason = f"no model has a skill of at least {MIN_SKILL:g}, so its heads are not judged"
                finding = unknown_finding(title(labels[-1]), reason, "a model size at which it learns")
                findings.append(replace(finding, essential=self.essential))
            else:
                findings.append(test.finding(results, title, *labels))
        return findings


_RETRAIN = (
    "newly trained models (same command, another directory): these were trained before accuracy on training examples "
    "was evaluated, or are still learning"
)
_FIT = ModelValue(
    "accuracy on training examples, ",
    lambda cell: cell.fit_accuracy,
    lambda cell: cell.status == "diverged" or (cell.settled and cell.fit_accuracy >= 0),
    "still learning, or not measured",
    needed_runs=_RETRAIN,
)
_GAP = replace(_FIT, title="train − test gap, ", compute=lambda cell: cell.fit_accuracy - cell.accuracy)
_SPEED = ModelValue(
    "log2 of the epochs until half is learned, ",
    lambda cell: cell.half_learned,
    lambda cell: cell.status == "diverged" or cell.has_fit_accuracy,
    "accuracy on training examples not evaluated",
    grain=0.05,
    needed_runs=_RETRAIN,
)
_SETBACKS = ModelValue("sum of test accuracy drops during training, ", lambda cell: cell.setbacks)
_BIAS = ModelValue(
    "log2 of the learned bias's spread",
    lambda cell: cell.measure("bias").log2_spread,
    lambda cell: cell.measure("bias") is not None,
)
_TASKS = {DISTANCE: "Task 1", COUNT: "Task 2"}
_TASK_ACCURACY = {task: replace(ACCURACY, title=f"{text}: accuracy of ") for task, text in _TASKS.items()}
_FASTER_BY = 0.25
_NEAR = 0.1  # at most this is "near"


def _faster(results: Results, fast: str, slow: str) -> list[Finding]:
    """The second needs more examples than the first.

    The number of examples of a model that never learned half is a lower bound. With such a model among the slow ones
    the claim cannot fail; with one among the fast ones it cannot hold.
    """
    cells = (results.cells_of(DISTANCE, label.removesuffix("?")) for label in (fast, slow))
    slow_unlearned, fast_unlearned = (any(not cell.has_learned_half for cell in group) for group in cells)
    return [
        one_sided(finding, holds=not slow_unlearned, fails=not fast_unlearned, cause="models that never learned half")
        for finding in ProtocolTest(_SPEED, slow, fast, above=_FASTER_BY)(results)
    ]


def _near_table_1(results: Results, task: str, of: str, accuracy: float) -> list[Finding]:
    """Is a model's skill near that of an accuracy in the source, whose baseline is that of the source's sizes?"""

    def skill_gap(cell: CellResult) -> float:
        spec = run_spec(**starting_spec("paper", cell.key.protocol, task, "rope", 0))
        return cell.skill - skill(accuracy, spec.guess)

    figure = replace(ACCURACY, title=f"{_TASKS[task]}: skill − skill of Table 1, ", compute=skill_gap)
    return ProtocolTest(figure, of, above=-_NEAR, below=_NEAR, task=task)(results)


def _stablest(results: Results) -> list[Finding]:
    """Every rival's test accuracy drops by more than RoPE's; undecided if too few models of both have drops."""
    findings = []
    for rival in RIVALS:
        label = rival.removesuffix("?")
        groups = [results.cells_of(DISTANCE, name) for name in (label, "rope")]
        cells, enough = [*groups[0], *groups[1]], min(MIN_SEEDS, *map(len, groups))
        num_drops = sum(cell.setbacks > 0 for cell in cells if cell.status == "complete")
        reason = f"only {num_drops} of {len(cells)} models have accuracy drops, too few to estimate their frequency"
        findings += [
            finding
            if num_drops >= enough or not finding.has_data
            else unknown_finding(f"{title(label)} and {title('rope')}", reason, "less stable training")
            for finding in ProtocolTest(_SETBACKS, rival, "rope", above=MARGIN)(results)
        ]
    return findings


def _near_best(results: Results) -> list[Finding]:
    findings: list[Finding] = []
    for task, figure in _TASK_ACCURACY.items():
        plain = {label for label in results.labels(task) if EncodingLabel.parse(label).is_plain} | {"rope", "nope"}
        findings += ProtocolTest(figure, "mla", sorted(plain - {"mla"}), above=-_NEAR, task=task)(results)
    return findings


def _bias_attenuates(results: Results) -> list[Finding]:
    counting, distance = (_BIAS.by_seed(results.cells_of(task, "relative")) for task in (COUNT, DISTANCE))
    quantity = "log2 of the learned bias's spread over offsets, Task 2 − Task 1"
    return [below(quantity, contrast((1, counting), (-1, distance), grain=0.05), -1.0)]


_ACCURACY_CHECKS: dict[str, Any] = {
    "accuracy": ACCURACY,
    "task-1": _TASK_ACCURACY[DISTANCE],
    "task-2": _TASK_ACCURACY[COUNT],
    "skill": replace(ACCURACY, title="skill of ", compute=lambda cell: cell.skill),
    "fit": _FIT,
    "gap": _GAP,
    "learned-gap": replace(
        _GAP,
        is_defined=lambda cell: (
            _FIT.is_defined(cell)
            and (cell.status == "diverged" or skill(cell.fit_accuracy, cell.length_chance) >= MIN_SKILL)
        ),
        missing_reason="still learning, not measured, or too little learned",
    ),
    "table-1": _near_table_1,
    "faster": _faster,
    "stablest": _stablest,
    "near-best": _near_best,
    "bias-attenuates": _bias_attenuates,
}


# thresholds of the ablation effect of one head: pronounced, negligible
PRONOUNCED, NEGLIGIBLE = 0.25, 0.1
_HALF_A_DOUBLING = 0.5  # of the effective heads
_SOME_MODELS = 0.25  # of the models
_TOKENS = ("/tokens-24", "/tokens-32", "", "/tokens-48", "/tokens-64", "/tokens-96")

_LARGEST = AblationMeasure("largest ablation effect of a head in any layer, ", lambda costs: costs.largest())
_FIRST = AblationMeasure("largest ablation effect of a head in the first layer, ", lambda x: x.largest(FIRST_LAYER))
_DOUBLINGS = AblationMeasure("log2 of the effective heads, ", lambda x: log2(x.effective_heads), min_total=NEGLIGIBLE)


def _shallow(costs: HeadCosts) -> float:
    """The largest ablation effect of a head in the first third of the layers."""
    return costs.largest(slice(0, -(-len(costs.effects) // 3)))


def _in_second_or_third(costs: HeadCosts) -> float:
    """1 if the largest effect lies in layer 2 or 3 and exceeds every effect of layer 1, otherwise 0."""
    return float(costs.largest(FIRST_LAYER) < costs.largest(slice(1, 3)) == costs.largest())


def _larger_on_task_1(results: Results, criterion: Criterion) -> list[Finding]:
    """Is RoPE's largest effect larger on Task 1 than on Task 2?"""
    figure = _LARGEST.figure_at(criterion)
    on_distance, on_counting = (figure.by_seed(results.cells_of(task, "rope")) for task in (DISTANCE, COUNT))
    gap = contrast((1, on_distance), (-1, on_counting), grain=figure.grain)
    quantity = "largest ablation effect of a head of RoPE, Task 1 − Task 2"
    return [above(quantity, gap, NEGLIGIBLE, unit=UNITS[criterion[1]])]


def _effective_heads_agree(results: Results, criterion: Criterion) -> list[Finding]:
    """The models whose effects are large enough and all models with any effect have to agree."""
    figures = _DOUBLINGS, replace(_DOUBLINGS, min_total=0.0)
    options: Any = {"above": _HALF_A_DOUBLING, "criterion": criterion}
    first, second = (ProtocolTest(figure, "mla", FULL_ROPE, **options)(results)[0] for figure in figures)
    return [combine_agreeing(first, second, "for all models")]


def _kept_with_dropout(results: Results, criterion: Criterion) -> list[Finding]:
    with_dropout, without = (results.cells_of(DISTANCE, label) for label in ("rope/dropout", "rope"))
    if {cell.run for cell in with_dropout} & {cell.run for cell in without}:
        return [unknown_finding("RoPE with dropout", "every model of this scale has dropout", "RoPE without dropout")]
    alone, compared = (
        ProtocolTest(_LARGEST, "rope/dropout", above=PRONOUNCED, criterion=criterion),
        ProtocolTest(_LARGEST, "rope/dropout", "rope", above=-NEGLIGIBLE, criterion=criterion),
    )
    return [*alone(results), *compared(results)]


def _any_model(quantity: str, models: Sequence[Mapping[int, float]]) -> Finding:
    """Is it true of any model? "In some cases" fails only if none of enough models shows it."""
    outcomes = [value for values in models for value in values.values()]
    if not outcomes:
        return unknown_finding(quantity, NO_RUNS)
    count, enough = int(sum(outcomes)), min(map(len, models)) >= MIN_SEEDS
    verdict: Verdict = ("holds" if count else "fails") if enough else "leans to hold" if count else "leans to fail"
    text = f"{quantity}: {count} of {len(outcomes)} models"
    return Finding(verdict, text, missing="" if enough else f"{MIN_SEEDS} seeds")


def _partial_moves(results: Results, criterion: Criterion) -> list[Finding]:
    """Over the models of each number of rotated heads, compared with RoPE on all heads."""

    def is_later_only(costs: HeadCosts) -> float:
        """1 if a later head has a pronounced effect and no head of the first layer has, otherwise 0."""
        threshold = effect_threshold(PRONOUNCED, criterion)
        return float(costs.largest(FIRST_LAYER) < threshold <= costs.largest(LATER_LAYERS))

    effects = (
        _FIRST,
        AblationMeasure("", is_later_only),
        AblationMeasure("", lambda costs: costs.largest_layer, NEGLIGIBLE),
        AblationMeasure("", _in_second_or_third, NEGLIGIBLE),
    )
    first, later_only, layer, later = (effect.figure_at(criterion) for effect in effects)
    parsed = ((label, EncodingLabel.parse(label)) for label in results.labels(DISTANCE))
    labels = [label for label, parts in parsed if parts.heads and not parts.variant]
    partial_cells = [results.cells_of(DISTANCE, label) for label in labels]
    if not partial_cells:
        return [unknown_finding("RoPE on some heads", NO_RUNS)]
    full_cells = results.cells_of(DISTANCE, rope := label_of(results, FULL_ROPE))
    weight = 1 / len(partial_cells)
    share = contrast(*((weight, later.by_seed(cells)) for cells in partial_cells), grain=deviation(_SOME_MODELS))
    moves = ((weight, layer.by_seed(cells)) for cells in partial_cells)
    moved = contrast(*moves, (-1, layer.by_seed(full_cells)), grain=0.05)
    reduction = contrast(*((-weight, first.by_seed(cells)) for cells in partial_cells), (1, first.by_seed(full_cells)))
    exclusions = [excluded_note(results, figure, DISTANCE, *labels) for figure in (later, later_only)]
    full_exclusions = [excluded_note(results, figure, DISTANCE, *labels, rope) for figure in (layer, first)]
    on_some, difference = "RoPE on some heads", "mean of RoPE on some heads − RoPE on all"
    later_only_text = f"a deposit in a later layer but not in the first, {on_some}{exclusions[1]}"
    reduction_text = "largest ablation effect in the first layer, RoPE on all − mean of RoPE on some heads"
    support = [
        _any_model(later_only_text, list(map(later_only.by_seed, partial_cells))),
        above(f"layer of the most important head, {difference}{full_exclusions[0]}", moved, 0.5),
        above(f"{reduction_text}{full_exclusions[1]}", reduction, NEGLIGIBLE),
    ]
    quantity = f"share of models with the most important head in the second or third layer, {on_some}{exclusions[0]}"
    return [above(quantity, share, _SOME_MODELS), *map(supporting, support)]


def _over_lengths(results: Results, criterion: Criterion) -> list[Finding]:
    """RoPE minus absolute, and minus NoPE, averaged over all lengths."""
    rope, figure = label_of(results, FULL_ROPE), _LARGEST.figure_at(criterion)
    findings = []
    for rival in ("absolute", "nope") if rope == "rope" else ("rope",):
        signed = [(sign, base + tokens) for tokens in _TOKENS for sign, base in ((1.0, rope), (-1.0, rival))]
        terms = [(sign / len(_TOKENS), figure.by_seed(results.cells_of(DISTANCE, label))) for sign, label in signed]
        exclusions = excluded_note(results, figure, DISTANCE, *(label for _, label in signed))
        quantity = f"{figure.title}{title(rope)} − {title(rival)}, mean over lengths{exclusions}"
        findings.append(above(quantity, contrast(*terms, grain=figure.grain), NEGLIGIBLE, unit=UNITS[criterion[1]]))
    return findings


def _early_minus_late(results: Results, measure: Measure) -> list[Finding]:
    """The first checkpoint with over 90 % accuracy minus the one at eight plateaus, in models that have both.

    Models that reached 90 % only after their plateau are excluded.
    """
    early, late = (_LARGEST.figure_at((checkpoint, measure)) for checkpoint in ("able", "eight times"))
    reason = "90% accuracy only after the plateau, too little skill, or not measured"
    figure = replace(
        early,
        is_defined=lambda cell: early.is_defined(cell) and late.is_defined(cell) and is_in_order(cell, "able"),
        missing_reason=reason,
    )
    label = label_of(results, f"{FULL_ROPE}/longer")
    cells = [cell for cell in results.cells_of(DISTANCE, label) if figure.is_defined(cell)]
    decrease = early.by_seed(cells) - late.by_seed(cells)
    exclusions = excluded_note(results, figure, DISTANCE, label)
    quantity = f"largest ablation effect of a head, at 90% accuracy − at 8 times the plateau{exclusions}"
    return [above(quantity, mean_contrast(decrease, early.grain), NEGLIGIBLE, unit=UNITS[measure])]


CHECKS: dict[str, Any] = _ACCURACY_CHECKS | {
    "largest": _LARGEST,
    "first": _FIRST,
    "later": AblationMeasure("largest ablation effect of a head in a later layer, ", lambda x: x.largest(LATER_LAYERS)),
    "second": AblationMeasure("second largest ablation effect of any head, ", lambda x: x.second_largest()),
    "shallow": AblationMeasure("largest ablation effect in the first third of the layers, ", _shallow),
    "shallow-lead": AblationMeasure(
        "that effect − the largest after it, ", lambda x: _shallow(x) - x.largest(slice(-(-len(x.effects) // 3), None))
    ),
    # two heads with a large and two with a small effect need four heads
    "second-of-first": AblationMeasure(
        "second largest ablation effect in the first layer, ", lambda x: x.second_largest(FIRST_LAYER), min_heads=4
    ),
    "second-smallest-of-first": AblationMeasure(
        "second smallest ablation effect in the first layer, ", lambda x: x.second_smallest(FIRST_LAYER), min_heads=4
    ),
    "top-share": AblationMeasure(
        "largest effect as a share of the sum over all heads, ", lambda x: x.top_share, min_total=NEGLIGIBLE
    ),
    "effective-heads": AblationMeasure("effective heads, ", lambda x: x.effective_heads, min_total=NEGLIGIBLE),
    "doublings": _DOUBLINGS,
    "larger-on-task-1": _larger_on_task_1,
    "average": _effective_heads_agree,
    "kept-with-dropout": _kept_with_dropout,
    "moved": _partial_moves,
    "over-lengths": _over_lengths,
    "unfinished": _early_minus_late,
}
