"""Measures of a reproduction: ablation effects of a model, accuracies compared with the paper's, and the factor study.

The factor study measures the effect of each difference between the two protocols on an encoding, switch by switch. A
switch's effect is the paper's setting minus the released code's. It is measured with all other switches as in the
released code (the released end) and as in the paper (the paper end); the two differ if switches interact. Seeds are
paired, as a seed fixes weights, order and data. In the laptop record two models of a switch correlate by 0.35 in
accuracy, so pairing makes intervals 14 % narrower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite, nan
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float

from toeplens.engine.head_probe import EVENTS
from toeplens.lens import Estimate, LayerDeposit
from toeplens.lens.ablation import DepositKind, significant_drops
from toeplens.model import Protocol
from toeplens.papers.deposit.spec import SWITCH_BASES, EncodingLabel, switches_of, title
from toeplens.studies import Verdict
from toeplens.studies.kit.results import MIN_SKILL, CellResult, Results, SeedValues, estimate_mean
from toeplens.training.presets import COUNT, DISTANCE, PROTOCOLS
from toeplens.utils import read_json
from toeplens.utils.records import Record

Measure = Literal["accuracy", "loss"]
END = "end"
CHECKPOINT_MEASURES: tuple[tuple[str, Measure], ...] = (
    (END, "accuracy"),
    (END, "loss"),
    *((moment, measure) for moment in EVENTS for measure in ("accuracy", "loss")),
)


@dataclass(frozen=True)
class HeadCosts:
    """Single-head ablation effects of a model.

    effects  [layers, heads]: by accuracy as a share of the skill, by loss in nats; 0 if not significant
    """

    effects: Float[np.ndarray, "L H"]

    def largest(self, layers: slice = slice(None)) -> float:
        """The largest effect in the given layers (default: all); 0 without layers."""
        return float(self.effects[layers].max(initial=0.0))

    def second_largest(self, layers: slice = slice(None)) -> float:
        """The second largest effect in the given layers (default: all); 0 with one head."""
        effects = np.sort(self.effects[layers], axis=None)
        return float(effects[-2]) if effects.size > 1 else 0.0

    def second_smallest(self, layers: slice) -> float:
        """The second smallest effect in these layers, which need at least two heads."""
        return float(np.sort(self.effects[layers], axis=None)[1])

    @property
    def largest_layer(self) -> float:
        """The layer (from 1) of the largest effect (mean of ties); NaN without effects."""
        layer_max = self.effects.max(axis=1)
        return float(np.mean(np.flatnonzero(layer_max == layer_max.max())) + 1) if self.effects.any() else float("nan")

    @property
    def effective_heads(self) -> float:
        """(sum of effects)^2 / sum of squared effects, over the whole model; NaN without effects."""
        total = float(self.effects.sum())
        return total**2 / float((self.effects**2).sum()) if total > 0 else float("nan")

    @property
    def num_significant(self) -> int:
        """Number of heads with a significant effect."""
        return int((self.effects > 0).sum())

    @property
    def top_share(self) -> float:
        """The largest effect as a share of the sum; NaN without effects."""
        total = float(self.effects.sum())
        return float(self.effects.max()) / total if total > 0 else float("nan")

    @property
    def total(self) -> float:
        """The sum of all effects."""
        return float(self.effects.sum())


def is_in_order(cell: CellResult, checkpoint: str) -> bool:
    """Whether a checkpoint is in order: the one with over 90 % accuracy must come before the plateau.

    All other checkpoints are in order by construction.
    """
    probe, plateau = cell.events.get(checkpoint), cell.events.get("plateau")
    return checkpoint != "able" or (probe is not None and plateau is not None and probe.step < plateau.step)


def head_costs(cell: CellResult, checkpoint: str = END, measure: Measure = "accuracy") -> HeadCosts | None:
    """The ablation effects of a cell's model; None if not measured or with too little skill.

    Arguments
        checkpoint  `END`, or one of `toeplens.engine.head_probe.EVENTS`; if training ended there, the finished model
    """
    if checkpoint == END:
        ablations = cell.ablation, cell.by_loss
    else:
        probe = cell.events.get(checkpoint)
        if probe is None:
            return None
        is_last = probe.ablation is None and probe.step == cell.probe_rows[-1]["step"]
        ablations = (cell.ablation, cell.by_loss) if is_last else (probe.ablation, probe.by_loss)
    by_accuracy, by_loss = ablations
    guess = cell.length_chance
    if by_accuracy is None or (by_accuracy.baseline - guess) / (1 - guess) < MIN_SKILL:
        return None
    if measure == "loss":
        return None if by_loss is None else HeadCosts(significant_drops(by_loss))
    return HeadCosts(significant_drops(by_accuracy) / (by_accuracy.baseline - guess))


SwitchMeasure = Literal["accuracy", "skill", "drop", "peak"]
Values = Mapping[int, float]  # by seed

TASK_BASES: dict[str, tuple[str, ...]] = {DISTANCE: SWITCH_BASES, COUNT: ("nope", "rope", "mla")}
ENDS: dict[str, tuple[Protocol, ...]] = {DISTANCE: ("released", "paper"), COUNT: ("released",)}
# switches without effect at an end
NO_EFFECT: dict[tuple[Protocol, str], str] = {("paper", "padding"): "these sequences have no padding"}


def peak_layer(cell: CellResult) -> tuple[int, LayerDeposit] | None:
    """The layer (from 0) with the largest peak; None for a model without skill or ablation."""
    layers = cell.deposits() if cell.status == "complete" else []
    if all(layer.kind == "no-skill" for layer in layers):
        return None
    return max(enumerate(layers), key=lambda item: item[1].peak)


# accuracy and skill of the intact model; the largest ablation effect, in accuracy and as a share of the skill
MEASURES: dict[SwitchMeasure, Callable[[CellResult], float]] = {
    "accuracy": lambda cell: cell.accuracy,
    "skill": lambda cell: cell.skill,
    "drop": lambda cell: float(cell.ablation.drops.max()) if cell.ablation else nan,
    "peak": lambda cell: peak[1].peak if (peak := peak_layer(cell)) else nan,
}


@dataclass(frozen=True)
class SwitchEffect:
    """The effect of one switch on one encoding and task, at one end.

    end               the protocol of all other switches
    values            by measure and seed: the measure with the paper's setting minus that with the released code's
    before, after     number of models by kind of their most concentrated layer, with the released code's and with the
                      paper's setting
    no_effect_reason  empty if there is an effect
    """

    task: str
    base: str
    switch: str
    end: Protocol
    values: dict[SwitchMeasure, SeedValues]
    before: dict[str, int]
    after: dict[str, int]
    no_effect_reason: str = ""

    def effect(self, measure: SwitchMeasure) -> Estimate | None:
        """Mean over seeds with Student's interval; None if no seed has both models."""
        return estimate_mean(self.values[measure])


def switch_effects(results: Results, protocols: Sequence[Protocol]) -> list[SwitchEffect]:
    """Every switch's effect, by task, encoding, end and switch; empty for unfinished models."""
    by_protocol = {end: results.for_protocol(end) for end in protocols}
    return [
        _switch_effect(by_protocol[end], task, base, switch, end)
        for task, bases in TASK_BASES.items()
        for base in bases
        for end in ENDS[task]
        if end in protocols
        for switch in switches_of(base)
    ]


def end_values(results: Results, task: str, base: str) -> dict[Protocol, dict[SwitchMeasure, SeedValues]]:
    """An encoding's values under both unchanged protocols; empty where it was not run."""
    return {protocol: values_by_seed(results.for_protocol(protocol).cells_of(task, base)) for protocol in PROTOCOLS}


def sum_and_remainder(
    whole: SeedValues, rows: Iterable[SwitchEffect], measure: SwitchMeasure
) -> tuple[SeedValues, SeedValues]:
    """The sum of the single effects of one end, and the remainder of the whole difference, by seed.

    Arguments
        whole  an encoding's values under the paper's protocol minus those under the released one
        rows   the effects of its switches at one end; only seeds with all of them have a sum
    """
    effects = [row.values[measure] for row in rows if not row.no_effect_reason]
    shared = set.intersection(*(set(effect) for effect in effects)) if effects else set()
    total = SeedValues({seed: float(sum(effect[seed] for effect in effects)) for seed in sorted(shared)})
    return total, whole - total


def strongest_switch(rows: Iterable[SwitchEffect], measure: SwitchMeasure) -> SwitchEffect | None:
    """The row with the largest absolute mean effect; None if no row has an effect."""
    known = [(abs(effect.value), row) for row in rows if (effect := row.effect(measure))]
    return max(known, key=lambda item: item[0])[1] if known else None


def excludes_zero(estimate: Estimate) -> bool:
    """Whether the interval excludes 0."""
    return estimate.low > 0 or estimate.high < 0


def _switch_effect(results: Results, task: str, base: str, switch: str, end: Protocol) -> SwitchEffect:
    unchanged, switched = results.cells_of(task, base), results.cells_of(task, f"{base}/{switch}")
    # from the released end the switch goes to the paper's setting; at the paper end it comes from the released code's
    before, after = (unchanged, switched) if end == "released" else (switched, unchanged)
    finished = ({cell.key.seed for cell in cells if cell.status == "complete"} for cells in (before, after))
    seeds = set.intersection(*finished)
    before, after = ([cell for cell in cells if cell.key.seed in seeds] for cells in (before, after))
    low, high = values_by_seed(before), values_by_seed(after)
    values: dict[SwitchMeasure, SeedValues] = {measure: high[measure] - low[measure] for measure in MEASURES}
    return SwitchEffect(
        task, base, switch, end, values, count_kinds(before), count_kinds(after), NO_EFFECT.get((end, switch), "")
    )


def count_kinds(cells: Iterable[CellResult]) -> dict[str, int]:
    """Number of models by kind of their most concentrated layer."""
    ablated = [cell for cell in cells if cell.ablation and cell.status == "complete"]
    counts = Counter(peak[1].kind if (peak := peak_layer(cell)) else "no-skill" for cell in ablated)
    return {kind: counts[kind] for kind in get_args(DepositKind) if counts[kind]}


def values_by_seed(cells: Sequence[CellResult]) -> dict[SwitchMeasure, SeedValues]:
    """Values by measure and seed, without undefined ones."""
    return {
        measure: SeedValues({cell.key.seed: value for cell in cells if isfinite(value := value_of(cell))})
        for measure, value_of in MEASURES.items()
    }


# ---- the paper's numbers compared with ours --------------------------------------------------------------------------


# arXiv 2505.13027 v1, Table 1: test accuracy, per cent
PAPER_TABLE_1 = {(DISTANCE, "mla"): 88.34, (DISTANCE, "rope"): 92.64, (DISTANCE, "nope"): 3.51} | {
    (COUNT, "mla"): 97.41,
    (COUNT, "rope"): 69.43,
    (COUNT, "nope"): 77.69,
}

# summary of the ICLR 2026 version, key design 2: accuracy lost on Task 1 without one first-layer head of RoPE, about
PAPER_DROP = 0.6


@dataclass(frozen=True)
class AccuracyRow(Record):
    """One encoding's row: test accuracy (mean and range over seeds), the paper's accuracy, and its heads."""

    protocol: Protocol
    task: str
    label: str
    title: str
    paper: float | None
    accuracy: float | None
    lowest: float | None
    highest: float | None
    seeds: int
    diverged: int
    chance: float
    length_chance: float
    parameters: int
    largest_drop: float | None
    where: str | None
    kinds: list[str]


def accuracy_table(results: Results, protocols: Sequence[Protocol]) -> list[AccuracyRow]:
    """Every plain encoding's accuracy and deposit, by protocol and task, best first."""
    rows = []
    for protocol in protocols:
        subset = results.for_protocol(protocol)
        for task in (DISTANCE, COUNT):
            lines = [
                _accuracy_row(subset, protocol, task, label)
                for label in subset.labels(task)
                if not EncodingLabel.parse(label).variant
            ]
            rows += sorted(lines, key=lambda row: 1.0 if row.accuracy is None else -row.accuracy)
    return rows


def _accuracy_row(results: Results, protocol: Protocol, task: str, label: str) -> AccuracyRow:
    cells = results.cells_of(task, label)
    finished = [cell for cell in cells if cell.status == "complete"]
    accuracies = [cell.accuracy for cell in finished]
    drops = [cell.ablation.drops for cell in finished if cell.ablation]
    peaks = [np.unravel_index(matrix.argmax(), matrix.shape) for matrix in drops]
    where = ", ".join(f"layer {layer + 1} head {head + 1}" for layer, head in peaks[:3])
    kinds = [layer.kind for layer in finished[0].deposits()] if finished else []
    return AccuracyRow(
        protocol=protocol,
        task=task,
        label=label,
        title=title(label),
        paper=PAPER_TABLE_1.get((task, label)),
        accuracy=float(np.mean(accuracies)) if accuracies else None,
        lowest=min(accuracies, default=None),
        highest=max(accuracies, default=None),
        seeds=len(cells),
        diverged=sum(cell.status == "diverged" for cell in cells),
        chance=cells[0].chance,
        length_chance=cells[0].length_chance,
        parameters=cells[0].parameters,
        largest_drop=float(np.mean([matrix.max() for matrix in drops])) if drops else None,
        where=(where + " …" * (len(peaks) > 3)) if drops else None,
        kinds=kinds,
    )


RecordedVerdict = tuple[str, str, Verdict]  # the record's scale, its seeds in words, its verdict


@cache
def recorded_verdicts() -> dict[tuple[str, str], tuple[RecordedVerdict, ...]]:
    """Verdicts of the published records by claim and protocol, the largest record first."""
    verdicts: dict[tuple[str, str], tuple[RecordedVerdict, ...]] = {}
    for scale, record in read_json(Path(__file__).with_name("recorded.json")).items():
        for protocol, by_claim in record["verdicts"].items():
            for claim, verdict in by_claim.items():
                verdicts[claim, protocol] = (*verdicts.get((claim, protocol), ()), (scale, record["seeds"], verdict))
    return verdicts
