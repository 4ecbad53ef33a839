"""The factor study: what each difference between the two protocols does to an encoding, switch by switch.

A switch's effect is what setting it as the paper has it does, against how the released program has it. It is measured
where all other switches are the program's (the released end) and where all others are the paper's (the paper end): the
two differ where switches work together. Seeds are paired, as a seed fixes weights, order and data: here that pays (in
the laptop record two models of a switch correlate by 0.35 in accuracy, and intervals are 14 % narrower for it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Literal, get_args

from toeplens.lens import Estimate, LayerDeposit
from toeplens.lens.ablation.deposit import Kind
from toeplens.model import Protocol
from toeplens.papers.deposit.labels import switches_of
from toeplens.papers.deposit.questions import FACTOR_BASES
from toeplens.studies.kit.results import BySeed, CellResult, Results, estimated
from toeplens.training.presets import COUNT, DISTANCE, PROTOCOLS

FactorMeasure = Literal["accuracy", "skill", "drop", "peak"]
Values = Mapping[int, float]  # by seed

BASES: dict[str, tuple[str, ...]] = {DISTANCE: FACTOR_BASES, COUNT: ("nope", "rope", "mla")}
ENDS: dict[str, tuple[Protocol, ...]] = {DISTANCE: ("released", "paper"), COUNT: ("released",)}
# what cannot be switched at an end: to do it there would change nothing
ABSENT: dict[tuple[Protocol, str], str] = {("paper", "padding"): "these texts have no padding"}


def concentrated(cell: CellResult) -> tuple[int, LayerDeposit] | None:
    """The layer (from 0) whose first head carries most of the skill; None for a model without skill or ablation."""
    layers = cell.deposits() if cell.status == "complete" else []
    if all(layer.kind == "no-skill" for layer in layers):
        return None
    return max(enumerate(layers), key=lambda found: found[1].peak)


def _drop(cell: CellResult) -> float:
    return float(cell.ablation.drops.max()) if cell.ablation else nan


def _peak(cell: CellResult) -> float:
    found = concentrated(cell)
    return found[1].peak if found else nan


# accuracy and skill of the intact model; the largest loss by one head, in accuracy and as a share of the skill
MEASURES: dict[FactorMeasure, Callable[[CellResult], float]] = {
    "accuracy": lambda cell: cell.accuracy,
    "skill": lambda cell: cell.skill,
    "drop": _drop,
    "peak": _peak,
}


@dataclass(frozen=True)
class FactorRow:
    """What one switch does to one encoding on one task, at one end.

    end            the protocol that all other switches follow
    values         by measure and seed: the measure with the paper's setting less that with the program's
    before, after  kinds of the most concentrated layers with the program's and with the paper's setting, and how many
                   models have each
    absent         why there is nothing to be measured; empty otherwise
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
    """An encoding under both protocols as they are: what the single effects have to add up to.

    ends  by protocol, measure and seed
    """

    task: str
    base: str
    ends: dict[Protocol, dict[FactorMeasure, BySeed]]

    def difference(self, measure: FactorMeasure) -> BySeed:
        """Paper less released, by seed; empty if either protocol was not run."""
        paper, released = (self.ends.get(protocol, {}).get(measure, BySeed()) for protocol in PROTOCOLS)
        return paper - released


def factor_table(results: Results, protocols: Sequence[Protocol]) -> list[FactorRow]:
    """Every switch's effect, by task, encoding, end and switch; effects whose models are not finished are empty."""
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
    """The sum of the single effects of one end, and what it leaves of the whole difference, by seed.

    Arguments
        rows  the effects of the whole's task and encoding at one end; a seed that lacks one of them has no sum
    """
    parts = [row.values[measure] for row in rows if not row.absent]
    shared = set.intersection(*(set(part) for part in parts)) if parts else set()
    total = BySeed({seed: float(sum(part[seed] for part in parts)) for seed in sorted(shared)})
    return total, whole.difference(measure) - total


def strongest(rows: Iterable[FactorRow], measure: FactorMeasure) -> FactorRow | None:
    """The row whose mean effect is largest in size; None if no row has an effect."""
    known = [(abs(effect.value), row) for row in rows if (effect := row.effect(measure))]
    return max(known, key=lambda found: found[0])[1] if known else None


def decided(estimate: Estimate) -> bool:
    """Whether the interval leaves 0 out."""
    return estimate.low > 0 or estimate.high < 0


def _row(under: Results, task: str, base: str, switch: str, end: Protocol) -> FactorRow:
    kept, switched = under.of(task, base), under.of(task, f"{base}/{switch}")
    # from the released end the switch goes to the paper's setting; at the paper end it comes from the program's
    before, after = (kept, switched) if end == "released" else (switched, kept)
    finished = ({cell.key.seed for cell in cells if cell.status == "complete"} for cells in (before, after))
    seeds = set.intersection(*finished)
    before, after = ([cell for cell in cells if cell.key.seed in seeds] for cells in (before, after))
    low, high = measured(before), measured(after)
    values: dict[FactorMeasure, BySeed] = {measure: high[measure] - low[measure] for measure in MEASURES}
    return FactorRow(task, base, switch, end, values, kinds(before), kinds(after), ABSENT.get((end, switch), ""))


def kinds(cells: Iterable[CellResult]) -> dict[str, int]:
    """Kinds of the most concentrated layer of each model that has an ablation, and how many models have each."""
    ablated = [cell for cell in cells if cell.ablation and cell.status == "complete"]
    counted = Counter(found[1].kind if (found := concentrated(cell)) else "no-skill" for cell in ablated)
    return {kind: counted[kind] for kind in get_args(Kind) if counted[kind]}


def measured(cells: Sequence[CellResult]) -> dict[FactorMeasure, BySeed]:
    """By measure and seed, without what is undefined."""
    return {
        measure: BySeed({cell.key.seed: value for cell in cells if isfinite(value := value_of(cell))})
        for measure, value_of in MEASURES.items()
    }
