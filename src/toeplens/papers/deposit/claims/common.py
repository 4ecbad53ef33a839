"""Shared by the claims: sources, figures of ablation effects and their thresholds, and tests under either protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log2
from typing import Any

from toeplens.papers.deposit.labels import title
from toeplens.papers.deposit.looks import END, LOOKS, Look, Measure, look_at
from toeplens.papers.deposit.questions import CORE
from toeplens.studies.kit import claims
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.results import ONLY_SKILLED, SKILLED, CellResult, Figure, Results
from toeplens.studies.kit.verdicts import Finding, unknown
from toeplens.training.presets import COUNT, DISTANCE

V1 = "arXiv 2505.13027 v1"
FINAL = "ICLR 2026 version (summary)"

core = partial(Claim[Results], part=CORE)
others = partial(Claim[Results], part="others")
partially = partial(Claim[Results], part="partial")
mechanism = partial(Claim[Results], part="mechanism")

# ---- labels ----------------------------------------------------------------------------------------------------------

FULL, BOTH = "full-rope", "rope-sinusoid"  # RoPE on all heads, without a sinusoid and with one
_LABELS = {FULL: ("rope", "rope-alone"), BOTH: ("rope-absolute", "rope")}  # in the paper's and the released protocol
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

# thresholds of the ablation effect of one head: most of the skill, pronounced, negligible
MOST, SOME, LITTLE = 0.5, 0.25, 0.1
_NATS = {MOST: 0.7, SOME: 0.35}  # the same by loss, where they differ
UNITS: dict[Measure, str] = {"accuracy": " of the skill", "loss": " nats"}
_WHY = (
    "Thresholds: 0.5 of the skill (0.7 nats: the label's probability halves) is most of it, as the source reports 60 "
    "of 93 percentage points; 0.25 (0.35 nats) is what the source calls pronounced; below 0.1 (0.1 nats) is "
    f"negligible. Only heads whose effect's interval excludes 0 count. {ONLY_SKILLED}"
)
# for rules about the location of the effect
WHERE = (
    "Only models whose single-head ablation effects sum to at least 0.1 nats (by accuracy: 0.1 of the skill) count: "
    "otherwise there is no effect to locate."
)
HALF_A_DOUBLING = 0.5  # of the effective heads
# for rules about the location only
SPREAD = (
    "Half a doubling is a factor of 1.4; less is not visible in the sources' heat maps. Measured by loss, as accuracy "
    f"hardly changes in models that solve the task. {WHERE}"
)
_WANTED = "models with skill and a large enough ablation effect"
_WANTED_LOSS = (  # older records have no ablation by loss
    f"{_WANTED}; if the loss was not measured: toeplens ablate RUN --metric loss, with the study's --examples and "
    "--split"
)

At = tuple[str, Measure]  # checkpoint and measure at which heads are ablated
BY_ACCURACY: At = (END, "accuracy")  # as the papers
BY_LOSS: At = (END, "loss")


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
LARGEST = Effect("largest ablation effect of a head in any layer, ", lambda look: look.largest())
FIRST = Effect("largest ablation effect of a head in the first layer, ", lambda look: look.largest(FIRST_LAYER))
LATER = Effect("largest ablation effect of a head in a later layer, ", lambda look: look.largest(LATER_LAYERS))
DOUBLINGS = Effect("log2 of the effective heads, ", lambda look: log2(look.effective_heads), least=LITTLE)


# ---- tests -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Test(claims.Test):
    """A test on the results of one protocol; its figure may be an `Effect`, with thresholds as shares of the skill.

    at       checkpoint and measure of effects
    learned  whether at least one model, of the encoding that is subtracted if any, must have skill
    """

    figure: Any
    task: str = DISTANCE
    at: At = BY_ACCURACY
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


count = partial(Test, task=COUNT)

_MOMENTS = {"end": "at the end", "able": "at 90% accuracy", "plateau": "at the plateau"} | {
    moment: f"at {moment} the plateau's steps" for moment in ("twice", "four times", "eight times")
}


def of_heads(
    id: str, source: str, statement: str, rule: str, check: Sequence[Any], at: At = BY_ACCURACY, part: str = CORE
) -> Claim[Results]:
    """A claim judged at one checkpoint by one measure, and for comparison at all others.

    Its check is a list of `Test` and of functions of the results and ``at``.
    """

    def judged(at: At) -> list[Callable[[Results], list[Finding]]]:
        return [replace(test, at=at) if isinstance(test, Test) else partial(test, at=at) for test in check]

    elsewhere = {f"{_MOMENTS[each[0]]}, by {each[1]}": judged(each) for each in LOOKS if each != at}
    return Claim(id, source, statement, f"{rule} {_WHY}", judged(at), part, elsewhere)
