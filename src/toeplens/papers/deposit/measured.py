"""Measures of a reproduction: ablation effects of a model, accuracies compared with the paper's, and the factor study.

The factor study measures the effect of each difference between the two protocols on an encoding, switch by switch. A
switch's effect is the paper's setting minus the released code's. It is measured with all other switches as in the
released code (the released end) and as in the paper (the paper end); the two differ if switches interact. Seeds are
paired, as a seed fixes weights, order and data. In the laptop record two models of a switch correlate by 0.35 in
accuracy, so pairing makes intervals 14 % narrower.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import isfinite, nan
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float

from toeplens.engine.head_watch import MOMENTS
from toeplens.ground.records import Record
from toeplens.lens import Estimate, LayerDeposit
from toeplens.lens.ablation import Kind, counted_drops
from toeplens.model import Protocol
from toeplens.papers.deposit.spec import FACTOR_BASES, Label, switches_of, title
from toeplens.studies import Verdict
from toeplens.studies.kit.results import SKILLED, BySeed, CellResult, Results, estimated
from toeplens.training.presets import COUNT, DISTANCE, PROTOCOLS

Measure = Literal["accuracy", "loss"]
END = "end"
LOOKS: tuple[tuple[str, Measure], ...] = (
    (END, "accuracy"),
    (END, "loss"),
    *((moment, measure) for moment in MOMENTS for measure in ("accuracy", "loss")),
)


@dataclass(frozen=True)
class Look:
    """Single-head ablation effects of a model.

    costs  [layers, heads] effects: by accuracy as a share of the skill, by loss in nats; 0 if not significant
    """

    costs: Float[np.ndarray, "L H"]

    def largest(self, layers: slice = slice(None)) -> float:
        """The largest effect in the given layers (default: all); 0 without layers."""
        return float(self.costs[layers].max(initial=0.0))

    def second(self, layers: slice = slice(None)) -> float:
        """The second largest effect in the given layers (default: all); 0 with one head."""
        costs = np.sort(self.costs[layers], axis=None)
        return float(costs[-2]) if costs.size > 1 else 0.0

    def second_smallest(self, layers: slice) -> float:
        """The second smallest effect in these layers, which need at least two heads."""
        return float(np.sort(self.costs[layers], axis=None)[1])

    @property
    def layer(self) -> float:
        """The layer (from 1) of the largest effect (mean of ties); NaN without effects."""
        most = self.costs.max(axis=1)
        return float(np.mean(np.flatnonzero(most == most.max())) + 1) if self.costs.any() else float("nan")

    @property
    def effective_heads(self) -> float:
        """(sum of effects)^2 / sum of squared effects, over the whole model; NaN without effects."""
        total = float(self.costs.sum())
        return total**2 / float((self.costs**2).sum()) if total > 0 else float("nan")

    @property
    def matter(self) -> int:
        """Number of heads with a significant effect."""
        return int((self.costs > 0).sum())

    @property
    def top(self) -> float:
        """The largest effect as a share of the sum; NaN without effects."""
        total = float(self.costs.sum())
        return float(self.costs.max()) / total if total > 0 else float("nan")

    @property
    def total(self) -> float:
        """The sum of all effects."""
        return float(self.costs.sum())


def in_order(cell: CellResult, moment: str) -> bool:
    """Whether a checkpoint is in order: the one with over 90 % accuracy must come before the plateau.

    All other checkpoints are in order by construction.
    """
    seen, plateau = cell.events.get(moment), cell.events.get("plateau")
    return moment != "able" or (seen is not None and plateau is not None and seen.step < plateau.step)


def look_at(cell: CellResult, moment: str = END, measure: Measure = "accuracy") -> Look | None:
    """The ablation effects of a cell's model; None if not measured or with too little skill.

    Arguments
        moment  `END`, or one of `toeplens.engine.head_watch.MOMENTS`; if training ended there, the finished model
    """
    if moment == END:
        found = cell.ablation, cell.by_loss
    else:
        seen = cell.events.get(moment)
        if seen is None:
            return None
        ended = seen.ablation is None and seen.step == cell.watched[-1]["step"]
        found = (cell.ablation, cell.by_loss) if ended else (seen.ablation, seen.by_loss)
    by_accuracy, by_loss = found
    guess = cell.length_chance
    if by_accuracy is None or (by_accuracy.baseline - guess) / (1 - guess) < SKILLED:
        return None
    if measure == "loss":
        return None if by_loss is None else Look(counted_drops(by_loss))
    return Look(counted_drops(by_accuracy) / (by_accuracy.baseline - guess))


FactorMeasure = Literal["accuracy", "skill", "drop", "peak"]
Values = Mapping[int, float]  # by seed

BASES: dict[str, tuple[str, ...]] = {DISTANCE: FACTOR_BASES, COUNT: ("nope", "rope", "mla")}
ENDS: dict[str, tuple[Protocol, ...]] = {DISTANCE: ("released", "paper"), COUNT: ("released",)}
# switches without effect at an end
ABSENT: dict[tuple[Protocol, str], str] = {("paper", "padding"): "these sequences have no padding"}


def concentrated(cell: CellResult) -> tuple[int, LayerDeposit] | None:
    """The layer (from 0) with the largest peak; None for a model without skill or ablation."""
    layers = cell.deposits() if cell.status == "complete" else []
    if all(layer.kind == "no-skill" for layer in layers):
        return None
    return max(enumerate(layers), key=lambda found: found[1].peak)


# accuracy and skill of the intact model; the largest ablation effect, in accuracy and as a share of the skill
MEASURES: dict[FactorMeasure, Callable[[CellResult], float]] = {
    "accuracy": lambda cell: cell.accuracy,
    "skill": lambda cell: cell.skill,
    "drop": lambda cell: float(cell.ablation.drops.max()) if cell.ablation else nan,
    "peak": lambda cell: found[1].peak if (found := concentrated(cell)) else nan,
}


@dataclass(frozen=True)
class FactorRow:
    """The effect of one switch on one encoding and task, at one end.

    end            the protocol of all other switches
    values         by measure and seed: the measure with the paper's setting minus that with the released code's
    before, after  number of models by kind of their most concentrated layer, with the released code's and with the
                   paper's setting
    absent         reason why there is no effect; empty otherwise
    """

    task: str
    base: str
    switch: str
    end: Protocol
    values: dict[FactorMeasure, BySeed]
    before: dict[str, int]
    after: dict[str, int]
    absent: str = ""

    def effect(self, measure: FactorMeasure) -> Estimate | None:
        """Mean over seeds with Student's interval; None if no seed has both models."""
        return estimated(self.values[measure])


@dataclass(frozen=True)
class FactorWhole:
    """An encoding under both unchanged protocols, to compare with the sum of the single effects.

    ends  by protocol, measure and seed
    """

    task: str
    base: str
    ends: dict[Protocol, dict[FactorMeasure, BySeed]]

    def difference(self, measure: FactorMeasure) -> BySeed:
        """Paper minus released, by seed; empty if either protocol was not run."""
        paper, released = (self.ends.get(protocol, {}).get(measure, BySeed()) for protocol in PROTOCOLS)
        return paper - released


def factor_table(results: Results, protocols: Sequence[Protocol]) -> list[FactorRow]:
    """Every switch's effect, by task, encoding, end and switch; empty for unfinished models."""
    under = {end: results.under(end) for end in protocols}
    return [
        _row(under[end], task, base, switch, end)
        for task, bases in BASES.items()
        for base in bases
        for end in ENDS[task]
        if end in protocols
        for switch in switches_of(base)
    ]


def factor_wholes(results: Results, protocols: Sequence[Protocol]) -> list[FactorWhole]:
    """The encodings of the factor study under each of ``protocols``."""
    under: dict[Protocol, Results] = {protocol: results.under(protocol) for protocol in protocols}
    return [
        FactorWhole(task, base, {protocol: measured(one.of(task, base)) for protocol, one in under.items()})
        for task, bases in BASES.items()
        for base in bases
    ]


def left_over(whole: FactorWhole, rows: Iterable[FactorRow], measure: FactorMeasure) -> tuple[BySeed, BySeed]:
    """The sum of the single effects of one end, and the remainder of the whole difference, by seed.

    Arguments
        rows  the effects of the whole's task and encoding at one end; only seeds with all of them have a sum
    """
    parts = [row.values[measure] for row in rows if not row.absent]
    shared = set.intersection(*(set(part) for part in parts)) if parts else set()
    total = BySeed({seed: float(sum(part[seed] for part in parts)) for seed in sorted(shared)})
    return total, whole.difference(measure) - total


def strongest(rows: Iterable[FactorRow], measure: FactorMeasure) -> FactorRow | None:
    """The row with the largest absolute mean effect; None if no row has an effect."""
    known = [(abs(effect.value), row) for row in rows if (effect := row.effect(measure))]
    return max(known, key=lambda found: found[0])[1] if known else None


def decided(estimate: Estimate) -> bool:
    """Whether the interval excludes 0."""
    return estimate.low > 0 or estimate.high < 0


def _row(under: Results, task: str, base: str, switch: str, end: Protocol) -> FactorRow:
    kept, switched = under.of(task, base), under.of(task, f"{base}/{switch}")
    # from the released end the switch goes to the paper's setting; at the paper end it comes from the released code's
    before, after = (kept, switched) if end == "released" else (switched, kept)
    finished = ({cell.key.seed for cell in cells if cell.status == "complete"} for cells in (before, after))
    seeds = set.intersection(*finished)
    before, after = ([cell for cell in cells if cell.key.seed in seeds] for cells in (before, after))
    low, high = measured(before), measured(after)
    values: dict[FactorMeasure, BySeed] = {measure: high[measure] - low[measure] for measure in MEASURES}
    return FactorRow(task, base, switch, end, values, kinds(before), kinds(after), ABSENT.get((end, switch), ""))


def kinds(cells: Iterable[CellResult]) -> dict[str, int]:
    """Number of models by kind of their most concentrated layer."""
    ablated = [cell for cell in cells if cell.ablation and cell.status == "complete"]
    counted = Counter(found[1].kind if (found := concentrated(cell)) else "no-skill" for cell in ablated)
    return {kind: counted[kind] for kind in get_args(Kind) if counted[kind]}


def measured(cells: Sequence[CellResult]) -> dict[FactorMeasure, BySeed]:
    """Values by measure and seed, without undefined ones."""
    return {
        measure: BySeed({cell.key.seed: value for cell in cells if isfinite(value := value_of(cell))})
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
class Row(Record):
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


def accuracy_table(results: Results, protocols: Sequence[Protocol]) -> list[Row]:
    """Every plain encoding's accuracy and deposit, by protocol and task, best first."""
    rows = []
    for protocol in protocols:
        under = results.under(protocol)
        for task in (DISTANCE, COUNT):
            lines = [
                _accuracy_row(under, protocol, task, label)
                for label in under.labels(task)
                if not Label.parse(label).variant
            ]
            rows += sorted(lines, key=lambda row: 1.0 if row.accuracy is None else -row.accuracy)
    return rows


def _accuracy_row(results: Results, protocol: Protocol, task: str, label: str) -> Row:
    cells = results.of(task, label)
    finished = [cell for cell in cells if cell.status == "complete"]
    accuracies = [cell.accuracy for cell in finished]
    drops = [cell.ablation.drops for cell in finished if cell.ablation]
    places = [np.unravel_index(each.argmax(), each.shape) for each in drops]
    where = ", ".join(f"layer {layer + 1} head {head + 1}" for layer, head in places[:3])
    kinds = [layer.kind for layer in finished[0].deposits()] if finished else []
    return Row(
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
        largest_drop=float(np.mean([each.max() for each in drops])) if drops else None,
        where=(where + " …" * (len(places) > 3)) if drops else None,
        kinds=kinds,
    )


Found = tuple[str, str, Verdict]  # the record's scale, its seeds in words, its verdict


@cache
def recorded() -> dict[tuple[str, str], tuple[Found, ...]]:
    """Verdicts of the published records by claim and protocol, the largest record first."""
    text = resources.files("toeplens.papers.deposit").joinpath("recorded.json").read_text(encoding="utf-8")
    found: dict[tuple[str, str], tuple[Found, ...]] = {}
    for scale, record in json.loads(text).items():
        for claim, protocol, verdict in record["verdicts"]:
            found[claim, protocol] = (*found.get((claim, protocol), ()), (scale, record["seeds"], verdict))
    return found
