"""The factor study: the effect of each difference between the two protocols on an encoding, switch by switch.

A switch's effect is the paper's setting minus the released code's. It is measured with all other switches as in the
released code (the released end) and as in the paper (the paper end); the two differ if switches interact. Seeds are
paired, as a seed fixes weights, order and data. In the laptop record two models of a switch correlate by 0.35 in
accuracy, so pairing makes intervals 14 % narrower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Literal, get_args

from toeplens.lens import Estimate, LayerDeposit
from toeplens.lens.ablation import Kind
from toeplens.model import Protocol
from toeplens.papers.deposit.labels import switches_of
from toeplens.papers.deposit.questions import FACTOR_BASES
from toeplens.studies.kit.results import BySeed, CellResult, Results, estimated
from toeplens.training.presets import COUNT, DISTANCE, PROTOCOLS

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


def _drop(cell: CellResult) -> float:
    return float(cell.ablation.drops.max()) if cell.ablation else nan


def _peak(cell: CellResult) -> float:
    found = concentrated(cell)
    return found[1].peak if found else nan


# accuracy and skill of the intact model; the largest ablation effect, in accuracy and as a share of the skill
MEASURES: dict[FactorMeasure, Callable[[CellResult], float]] = {
    "accuracy": lambda cell: cell.accuracy,
    "skill": lambda cell: cell.skill,
    "drop": _drop,
    "peak": _peak,
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
