"""The figures of the ladder: how much hangs on single heads, rung by rung, and moment by moment of long training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toeplens.model import Protocol
from toeplens.papers.deposit import SCALES, Reproduction
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.page.look import Drawn, beside, colour, legend, marker, name
from toeplens.papers.deposit.rungs import BASES, RUNGS, TASK
from toeplens.report.kit.blocks import Block
from toeplens.report.kit.dots import Series, dots, told_means
from toeplens.studies import CellResult
from toeplens.studies.kit.looks import END, Look, Measure, look_at

_SHOWN: tuple[tuple[str, Measure, Callable[[Look], float], float, int], ...] = (
    ("largest cost of a head, % of the skill", "accuracy", lambda look: look.largest(), 100.0, 1),
    ("largest cost of a head, nats", "loss", lambda look: look.largest(), 1.0, 2),
    ("heads whose cost is told from none", "accuracy", lambda look: look.matter, 1.0, 0),
)
_MOMENTS = {
    "able": "over 90% right",
    "plateau": "plateau",
    "twice": "2 plateaus",
    "four times": "4 plateaus",
    END: "8 plateaus, the end",
}
Line = tuple[str, str, str]  # what stands at the left, the rung, the moment


def by_rung(state: Reproduction) -> Block:
    """One thing changed at a time, at the end of training."""
    lines = [("as the scale has it", "", END), *((RUNGS[rung].title, rung, END) for rung in _rungs(state))]
    caption = (
        "What silencing the costliest head costs, at the end of training, with one thing changed at a time. A ring "
        "is a seed, the marker their mean with its interval; models without skill are left out."
    )
    return _block(state, "ladder-rungs", "What a deposit comes with", caption, lines)


def by_moment(state: Reproduction) -> Block:
    """The same models at moments of training, up to eight times the steps of their plateau."""
    lines = [(text, "longer", moment) for moment, text in _MOMENTS.items()]
    caption = (
        "The same along training: when a model has just learned the task, when it has stopped learning, and long "
        "after. A ring is a seed, the marker their mean with its interval."
    )
    return _block(state, "ladder-moments", "A deposit depends on the moment", caption, lines)


def _rungs(state: Reproduction) -> Sequence[str]:
    return [rung for rung in SCALES[state.plan.scale].rungs if rung != "longer"]


def _block(state: Reproduction, place: str, title: str, caption: str, lines: Sequence[Line]) -> Block:
    views = []
    for what, measure, figure, scale, digits in _SHOWN:

        def draw(
            protocol: Protocol,
            what: str = what,
            measure: Measure = measure,
            figure: Callable[[Look], float] = figure,
            scale: float = scale,
            digits: int = digits,
        ) -> Drawn | None:
            series = [
                Series(
                    base,
                    f"{name(protocol, base)}, ",
                    marker(base),
                    [_values(state, protocol, base, rung, moment, measure, figure) for _, rung, moment in lines],
                    [colour(base)] * len(lines),
                )
                for base in BASES[protocol]
            ]
            if not any(values for one in series for values in one.values):
                return None
            texts = [text for text, _, _ in lines]
            told = [
                f"{name(protocol, one.key)}: {told_means(texts, one.values, scale, digits)}"
                for one in series
                if any(one.values)
            ]
            return dots(texts, series, what, scale=scale, digits=digits), f"{what}: {'. '.join(told)}."

        views.append(beside(state, draw, what))
    signs = legend(state, {base for protocol in state.plan.protocols for base in BASES[protocol]})
    return Block(place, title, caption, views, legend=signs)


def _values(
    state: Reproduction,
    protocol: Protocol,
    base: str,
    rung: str,
    moment: str,
    measure: Measure,
    figure: Callable[[Look], float],
) -> dict[int, float]:
    cells: list[CellResult] = state.results.under(protocol).of(TASK, str(Label(base, None, rung)))
    looks = {cell.key.seed: look_at(cell, moment, measure) for cell in cells}
    return {seed: float(figure(look)) for seed, look in looks.items() if look is not None}
