"""What the claims have in common: where they stand in the papers, and the checks that are put together from figures."""

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
Asked = tuple[Figure, Test]  # of each model; how all together are judged

core = partial(Claim[Results], part=CORE)
others = partial(Claim[Results], part="others")
partially = partial(Claim[Results], part="partial")
mechanism = partial(Claim[Results], part="mechanism")


# ---- checks ----------------------------------------------------------------------------------------------------------


def there(results: Results, task: str, pairs: Pairs) -> list[tuple[str, str]]:
    """The pairs without those whose rival is "random" where nobody trained it."""
    return [pair for pair in pairs if pair[1] != "random" or results.of(task, pair[1])]


def compare(task: str, pairs: Pairs, figure: Figure = ACCURACY, test: Test | None = None, what: str = "") -> Check:
    """Is a figure of the first label of each pair, less that of the second, over `MARGIN`?

    Every encoding of a claim is waited for, but for "random" as a rival: the core of the smaller scales leaves it out.

    Arguments
        test  what else it is to be
        what  begins the evidence in place of the figure's words and the two titles
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
    """Whether a cell has a measure, and unless ``skill`` is False an ablation and a quarter of what can be learned."""
    return lambda cell: (
        cell.measure(measure) is not None and (not skill or (cell.ablation is not None and cell.skilled))
    )


def models(label: str, *parts: Asked, task: str = DISTANCE) -> Check:
    """Of the models of a label that count, part by part: the figure, and how its mean is judged."""

    return lambda results: [ask(results, task, label, figure, test, title) for figure, test in parts]


def learned(label: str, check: Check, task: str = DISTANCE) -> Check:
    """A check of an encoding that only means something if its models have learned anything."""

    def checked(results: Results) -> list[Finding]:
        cells = results.of(task, label)
        if cells and not any(cell.skilled for cell in cells):
            why = f"no model has a skill of {SKILLED:g}, so its heads say nothing"
            return [unknown(title(label), why, "a size at which it learns")]
        return check(results)

    return checked


def on_rope(check: Callable[[str], Check]) -> Check:
    """A check of RoPE alone, on all heads, whatever its label is here."""
    return lambda results: check(full_rope(results))(results)


def full_rope(results: Results) -> str:
    """RoPE on all heads without a sinusoid: the released program's "rope" has one, that for partial RoPE none.

    By the protocol, not by what is there: else a study that has not finished would be judged on the other of the two.
    """
    return "rope-alone" if is_released(results) else "rope"


def both_positions(results: Results) -> str:
    """RoPE + sinusoid: in the released protocol the program's "rope" is that."""
    return "rope" if is_released(results) else "rope-absolute"


def is_released(results: Results) -> bool:
    """Whether these are models of the released protocol, or would be if there were any."""
    return results.protocol == "released" or any(cell.key.protocol == "released" for cell in results.cells)


_WITHOUT = "too little skill, or not looked at"
_LITTLE = "too little skill, heads that cost too little together, or not looked at"
_MOMENTS = {"end": "at the end", "able": "when over 90% right", "plateau": "at the plateau"} | {
    moment: f"at {moment} the plateau's steps" for moment in ("twice", "four times", "eight times")
}


@dataclass(frozen=True)
class Bars:
    """How much one head costs, in a measure's own unit."""

    most: float  # the bulk of it
    some: float  # pronounced
    little: float  # does not affect the whole
    unit: str


BARS: dict[Measure, Bars] = {"accuracy": Bars(0.5, 0.25, 0.1, " of the skill"), "loss": Bars(0.7, 0.35, 0.1, " nats")}
_WHY = (
    "Bars: half of the skill (0.7 nats: the answer's probability halves) is the bulk of it, since the source has 60 of "
    "93 points; a quarter (0.35 nats) is what it calls pronounced; under a tenth (0.1 nats) does not affect the whole. "
    f"A head counts if its interval leaves 0. {ONLY_SKILLED}"
)
# of rules that ask where the cost lies
WHERE = (
    "Where the cost lies is asked of models whose heads, one silenced at a time, cost 0.1 nats (by accuracy a tenth of "
    "the skill) together: else there is nothing to lie anywhere."
)
HALF_A_DOUBLING = 0.5  # of the effective heads
# of those that ask nothing else
SPREAD = (
    "Half a doubling is 1.4 times as many: less could not be seen in the sources' pictures of heads. Looked at by "
    f"loss: of models that get all right hardly a head's cost in accuracy is told from none. {WHERE}"
)


@dataclass(frozen=True)
class At:
    """How one looks: at which moment, and by which measure."""

    moment: str
    measure: Measure

    @property
    def bars(self) -> Bars:
        """In the measure's unit."""
        return BARS[self.measure]

    def figure(self, words: str, of: Callable[[Look], float]) -> Figure:
        """A number of what is seen."""
        number, counts = self._number(of), lambda cell: self._look(cell) is not None
        return Figure(words, number, counts, _WITHOUT, 0.002, self._wanted)

    def spread(self, words: str, of: Callable[[Look], float]) -> Figure:
        """A number of where the cost lies, which a model has if its heads cost something together."""

        def counts(cell: CellResult) -> bool:
            look = self._look(cell)
            return look is not None and look.total >= self.bars.little

        return Figure(words, self._number(of), counts, _LITTLE, 0.05, self._wanted)

    @property
    def _wanted(self) -> str:
        """Of records from before heads were looked at by loss, which their weights can still be."""
        more = "models with skill, whose heads cost something"
        again = "toeplens ablate RUN --metric loss, with the study's --examples and --split"
        return f"{more}; where loss was not looked at, {again}" if self.measure == "loss" else more

    def doublings(self, *, every: bool = False) -> Figure:
        """The effective heads of the whole model, in doublings; of ``every`` model with a head that costs anything."""
        made = self.spread("doublings of the effective heads, ", lambda look: log2(look.effective_heads))
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
        """The largest cost of a head."""
        return self.figure(f"largest cost of a head of {where}, ", lambda look: look.largest(layers))

    def over(self, bar: float) -> Callable[..., Finding]:
        """Is it above a bar?"""
        return over(bar, self.bars.unit)

    def under(self, bar: float) -> Callable[..., Finding]:
        """Is it below a bar?"""
        return under(bar, self.bars.unit)


Way = Callable[[At], Check]
AS_THE_PAPERS = At(END, "accuracy")
BY_LOSS = At(END, "loss")


def of_rope(*parts: Callable[[At], tuple[Figure, Callable[..., Finding]]]) -> Way:
    """Parts that are asked of RoPE alone, on all heads."""
    return lambda at: on_rope(lambda rope: models(rope, *(part(at) for part in parts)))


def of_each(labels: Iterable[str], *parts: Callable[[At], tuple[Figure, Callable[..., Finding]]], task: str) -> Way:
    """Parts that are asked of each of these encodings."""
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
    """A claim about heads, judged in the ``first`` way of looking, and beside that in all others."""
    elsewhere = {
        f"{_MOMENTS[at.moment]}, by {at.measure}": way(at)
        for at in (At(moment, measure) for moment, measure in LOOKS)
        if at != first
    }
    return make(name, source, statement, f"{rule} {_WHY}", way(first), elsewhere=elsewhere)
