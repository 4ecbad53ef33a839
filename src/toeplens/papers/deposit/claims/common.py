"""Shared by the claims: their sources, and checks built from figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import log2

from toeplens.papers.deposit.labels import title
from toeplens.papers.deposit.looks import END, LOOKS, Look, Measure, look_at
from toeplens.papers.deposit.questions import CORE
from toeplens.studies.kit.asking import BETTER as BETTER
from toeplens.studies.kit.asking import MARGIN as MARGIN
from toeplens.studies.kit.asking import STOPPED as STOPPED
from toeplens.studies.kit.asking import WHY_MARGIN as WHY_MARGIN
from toeplens.studies.kit.asking import Test, ask, ask_difference
from toeplens.studies.kit.asking import between as between
from toeplens.studies.kit.asking import left_out as left_out
from toeplens.studies.kit.asking import over as over
from toeplens.studies.kit.asking import under as under
from toeplens.studies.kit.claims import Claim, every
from toeplens.studies.kit.results import ACCURACY, ONLY_SKILLED, SKILLED, CellResult, Figure, Results
from toeplens.studies.kit.verdicts import Finding, unknown
from toeplens.training.presets import DISTANCE

V1 = "arXiv 2505.13027 v1"
FINAL = "ICLR 2026 version (summary)"

Check = Callable[[Results], list[Finding]]
Counts = Callable[[CellResult], bool]
Pairs = Iterable[tuple[str, str]]
Asked = tuple[Figure, Test]  # a number per model, and the test of its mean

core = partial(Claim[Results], part=CORE)
others = partial(Claim[Results], part="others")
partially = partial(Claim[Results], part="partial")
mechanism = partial(Claim[Results], part="mechanism")


# ---- checks ----------------------------------------------------------------------------------------------------------


def there(results: Results, task: str, pairs: Pairs) -> list[tuple[str, str]]:
    """The pairs, without those whose rival is "random" if it was not trained."""
    return [pair for pair in pairs if pair[1] != "random" or results.of(task, pair[1])]


def compare(task: str, pairs: Pairs, figure: Figure = ACCURACY, test: Test | None = None, what: str = "") -> Check:
    """Is a figure of the first label of each pair minus that of the second above `MARGIN`?

    A missing encoding leaves the claim open, except "random" as a rival, which the core of smaller scales omits.

    Arguments
        test  the test of the difference (default: above `MARGIN`)
        what  start of the evidence (default: the figure's words and the two titles)
    """

    def check(results: Results) -> list[Finding]:
        return [
            ask_difference(results, task, first, second, title, figure=figure, test=test, what=what)
            for first, second in there(results, task, pairs)
        ]

    return check


def against(first: str, *rivals: str) -> list[tuple[str, str]]:
    """An encoding and each of its rivals."""
    return [(first, rival) for rival in rivals]


def has(measure: str, *, skill: bool = True) -> Counts:
    """Whether a cell has a measure and, with ``skill``, an ablation and enough skill."""
    return lambda cell: (
        cell.measure(measure) is not None and (not skill or (cell.ablation is not None and cell.skilled))
    )


def models(label: str, *parts: Asked, task: str = DISTANCE) -> Check:
    """A check of the mean of each figure over the models of a label that count."""

    return lambda results: [ask(results, task, label, figure, test, title) for figure, test in parts]


def learned(label: str, check: Check, task: str = DISTANCE) -> Check:
    """A check of an encoding that requires at least one model with skill."""

    def checked(results: Results) -> list[Finding]:
        cells = results.of(task, label)
        if cells and not any(cell.skilled for cell in cells):
            why = f"no model has a skill of at least {SKILLED:g}, so its heads are not judged"
            return [unknown(title(label), why, "a model size at which it learns")]
        return check(results)

    return checked


def on_rope(check: Callable[[str], Check]) -> Check:
    """A check of RoPE on all heads without a sinusoid, whose label depends on the protocol."""
    return lambda results: check(full_rope(results))(results)


def full_rope(results: Results) -> str:
    """Label of RoPE on all heads without a sinusoid; the released "rope" has one.

    It depends on the protocol only, so an unfinished study is not judged on the wrong model.
    """
    return "rope-alone" if is_released(results) else "rope"


def both_positions(results: Results) -> str:
    """Label of RoPE + sinusoid; "rope" in the released protocol."""
    return "rope" if is_released(results) else "rope-absolute"


def is_released(results: Results) -> bool:
    """Whether these are results of the released protocol, even if empty."""
    return results.protocol == "released" or any(cell.key.protocol == "released" for cell in results.cells)


_WITHOUT = "too little skill, or not measured"
_LITTLE = "too little skill, too small a total ablation effect, or not measured"
_MOMENTS = {"end": "at the end", "able": "at 90% accuracy", "plateau": "at the plateau"} | {
    moment: f"at {moment} the plateau's steps" for moment in ("twice", "four times", "eight times")
}


@dataclass(frozen=True)
class Bars:
    """Thresholds of the ablation effect of one head, in a measure's unit."""

    most: float  # most of the skill
    some: float  # pronounced
    little: float  # negligible
    unit: str


BARS: dict[Measure, Bars] = {"accuracy": Bars(0.5, 0.25, 0.1, " of the skill"), "loss": Bars(0.7, 0.35, 0.1, " nats")}
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


@dataclass(frozen=True)
class At:
    """A checkpoint and a measure at which heads are ablated."""

    moment: str
    measure: Measure

    @property
    def bars(self) -> Bars:
        """The thresholds in the measure's unit."""
        return BARS[self.measure]

    def figure(self, words: str, of: Callable[[Look], float]) -> Figure:
        """A number of a model's ablation effects."""
        number, counts = self._number(of), lambda cell: self._look(cell) is not None
        return Figure(words, number, counts, _WITHOUT, 0.002, self._wanted)

    def spread(self, words: str, of: Callable[[Look], float]) -> Figure:
        """A number about the location of the effect, for models with a large enough total effect."""

        def counts(cell: CellResult) -> bool:
            look = self._look(cell)
            return look is not None and look.total >= self.bars.little

        return Figure(words, self._number(of), counts, _LITTLE, 0.05, self._wanted)

    @property
    def _wanted(self) -> str:
        """What to run if no model counts; older records have no ablation by loss."""
        if self.measure == "loss":
            return (
                "models with skill and a large enough ablation effect; if the loss was not measured: toeplens ablate "
                "RUN --metric loss, with the study's --examples and --split"
            )
        return "models with skill and a large enough ablation effect"

    def doublings(self, *, every: bool = False) -> Figure:
        """log2 of the effective heads of the whole model; with ``every``, of every model with any effect."""
        made = self.spread("log2 of the effective heads, ", lambda look: log2(look.effective_heads))
        return (
            replace(made, counts=lambda cell: (look := self._look(cell)) is not None and look.total > 0)
            if every
            else made
        )

    def _look(self, cell: CellResult) -> Look | None:
        return look_at(cell, self.moment, self.measure)

    def _number(self, of: Callable[[Look], float]) -> Callable[[CellResult], float]:
        def number(cell: CellResult) -> float:
            look = self._look(cell)
            assert look is not None
            return of(look)

        return number

    def largest(self, layers: slice = slice(None), where: str = "any layer") -> Figure:
        """The largest ablation effect of a head."""
        return self.figure(f"largest ablation effect of a head in {where}, ", lambda look: look.largest(layers))

    def over(self, bar: float) -> Callable[..., Finding]:
        """Test: above a threshold."""
        return over(bar, self.bars.unit)

    def under(self, bar: float) -> Callable[..., Finding]:
        """Test: below a threshold."""
        return under(bar, self.bars.unit)


Way = Callable[[At], Check]
AS_THE_PAPERS = At(END, "accuracy")
BY_LOSS = At(END, "loss")


def of_rope(*parts: Callable[[At], tuple[Figure, Callable[..., Finding]]]) -> Way:
    """Parts that test RoPE on all heads without a sinusoid."""
    return lambda at: on_rope(lambda rope: models(rope, *(part(at) for part in parts)))


def of_each(labels: Iterable[str], *parts: Callable[[At], tuple[Figure, Callable[..., Finding]]], task: str) -> Way:
    """Parts that test each of these encodings."""
    return lambda at: every(
        *(learned(label, models(label, *(part(at) for part in parts), task=task), task) for label in labels)
    )


def watched_claim(
    make: Callable[..., Claim[Results]],
    name: str,
    source: str,
    statement: str,
    rule: str,
    way: Way,
    first: At = AS_THE_PAPERS,
) -> Claim[Results]:
    """A claim about heads, judged at the ``first`` checkpoint and measure, and for comparison at all others."""
    elsewhere = {
        f"{_MOMENTS[at.moment]}, by {at.measure}": way(at)
        for at in (At(moment, measure) for moment, measure in LOOKS)
        if at != first
    }
    return make(name, source, statement, f"{rule} {_WHY}", way(first), elsewhere=elsewhere)
