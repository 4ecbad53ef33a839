"""Shared by the claims: labels, figures of ablation effects and their thresholds, and tests under either protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from toeplens.papers.deposit.labels import title
from toeplens.papers.deposit.measured import END, Look, Measure, look_at
from toeplens.studies.kit import claims
from toeplens.studies.kit.results import SKILLED, CellResult, Figure, Results
from toeplens.studies.kit.verdicts import Finding, unknown
from toeplens.training.presets import DISTANCE

# ---- labels ----------------------------------------------------------------------------------------------------------

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


# ---- figures of ablation effects -------------------------------------------------------------------------------------

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


# ---- tests -----------------------------------------------------------------------------------------------------------


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
