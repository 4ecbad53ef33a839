"""MLA's variants on the page: whether its latent attention or the program around it spreads the heads' work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import plotly.graph_objects as go

from toeplens.ground.words import fixed, percent
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.factors import MEASURES, Values, concentrated, decided, kinds
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.page.look import PROTOCOL_NAMES, accuracy_top, beside, colour, interval, sign_of
from toeplens.papers.deposit.page.tables import kinds_cell
from toeplens.report.kit.blocks import Block
from toeplens.report.kit.dots import Series, dots
from toeplens.report.kit.tables import Cell, Table, make_table
from toeplens.studies import CellResult
from toeplens.studies.kit.results import estimated
from toeplens.training.presets import DISTANCE

# what each protocol's models are, in the order of the table: MLA as it is, less and less of its program, RoPE beside it
_ROWS: dict[Protocol, dict[str, str]] = {
    "released": {
        "mla": "MLA in its program",
        "mla/input": "MLA, no input positions",
        "mla/padding-seen": "MLA, padding attended",
        "mla/no-norm": "MLA, no final norm",
        "mla/bare": "MLA, none of the three",
        "mla/encoding": "MLA as the paper has it, in the program",
        "rope/mla-program": "RoPE in MLA’s program",
        "rope/mla-program-bare": "RoPE in MLA’s program, no input positions",
        "rope": "RoPE in its own program (with sinusoid)",
        "rope-alone": "RoPE in its own program, no sinusoid",
    },
    "paper": {
        "mla": "MLA",
        "mla/input": "MLA, positions added at the input",
        "mla/no-norm": "MLA, no final norm",
        "mla/encoding": "MLA as the program has it",
        "rope": "RoPE",
        "rope-absolute": "RoPE + sinusoid",
    },
}


@dataclass(frozen=True)
class _Shown:
    """A figure of a model: how it is told, and on which axis."""

    title: str
    of: Callable[[CellResult], float]
    scale: float
    axis: str


_SHOWN = (
    _Shown("share of the skill that one head carries", MEASURES["peak"], 100, "share of the skill, per cent"),
    _Shown(
        "effective heads of that layer",
        lambda cell: found[1].effective_heads if (found := concentrated(cell)) else float("nan"),
        1,
        "effective heads",
    ),
    _Shown("test accuracy", MEASURES["accuracy"], 100, "test accuracy, per cent"),
)


def figure(state: Reproduction) -> Block:
    """How concentrated each variant is."""

    def draw(protocol: Protocol, shown: _Shown) -> go.Figure | None:
        found = _models(state, protocol)
        if not found:
            return None
        values = [_values(cells, shown) for _, _, cells in found]
        texts = [text for _, text, _ in found]
        series = [Series("", "", "circle", values, [colour(label) for label, _, _ in found])]
        biggest = max((shown.scale * v for one in values for v in one.values()), default=1.0)
        end = 100 * accuracy_top(state, DISTANCE) if shown.title == "test accuracy" else biggest
        return dots(texts, series, shown.axis, scale=shown.scale, span=(0, 1.05 * end))

    views = [
        beside(state, lambda protocol, shown=shown: draw(protocol, shown), shown.title.capitalize()) for shown in _SHOWN
    ]
    caption = (
        "Task 1. MLA, MLA with parts of its program taken away, and RoPE put into MLA’s program. Rings are seeds, the "
        "bar is the 95% interval of the mean. If MLA’s latent attention spread the work, MLA would be low everywhere; "
        "if its program did, RoPE in that program would be low too. Models without skill have no share."
    )
    return Block("mla", "MLA, and RoPE in MLA’s program", caption, views)


def tables(state: Reproduction) -> list[Table]:
    """Accuracy and deposit of each variant, a table a protocol."""
    found = [(PROTOCOL_NAMES[protocol], _models(state, protocol)) for protocol in state.plan.protocols]
    return [
        make_table(
            f"Variants of MLA, {called}",
            [
                "Model",
                "Test accuracy, %",
                "Share of the skill that one head carries, %",
                "Effective heads of its layer",
                "Kind of that layer",
            ],
            [_row(*model) for model in models],
            note="Beside a kind: models whose layer is of it, of all.",
            css="numbers variants",
        )
        for called, models in found
        if models
    ]


def _row(label: str, text: str, cells: list[CellResult]) -> list[str | Cell]:
    peak, heads, accuracy = (estimated(_values(cells, shown)) for shown in _SHOWN)
    shown = (interval(accuracy, sign=False), interval(peak, sign=False), fixed(heads.value if heads else None, 1))
    return [Cell(text, sign=sign_of(label)), *shown, kinds_cell(kinds(cells))]


def _models(state: Reproduction, protocol: Protocol) -> list[tuple[str, str, list[CellResult]]]:
    """Label, name and models of what is compared; nothing where there is no variant."""
    under = state.results.under(protocol)
    found = [(label, text, under.of(DISTANCE, label)) for label, text in _ROWS[protocol].items()]
    found = [(label, text, cells) for label, text, cells in found if cells]
    return found if any(Label.parse(label).variant for label, _, _ in found) else []


def _values(cells: list[CellResult], shown: _Shown) -> Values:
    values = {cell.key.seed: shown.of(cell) for cell in cells}
    return {seed: value for seed, value in values.items() if value == value}  # NaN is no value


_STEPS: dict[Protocol, tuple[tuple[str, str, str], ...]] = {
    "released": (
        ("rope", "rope/mla-program", "RoPE put into MLA’s program"),
        ("rope/mla-program", "mla", "MLA in RoPE’s place inside that program"),
        ("mla", "mla/bare", "MLA without input positions, padding mask and final norm"),
    ),
    "paper": (("rope", "mla", "MLA in RoPE’s place in the same decoder"),),
}


def steps_table(state: Reproduction) -> Table:
    """Whether the diffuse pattern comes from MLA or from its program: paired differences of one head's share."""
    lines: list[list[str | Cell]] = []
    for protocol in state.plan.protocols:
        under = state.results.under(protocol)
        for first, second, text in _STEPS[protocol]:
            start, end = (_values(under.of(DISTANCE, label), _SHOWN[0]) for label in (first, second))
            change = estimated({seed: end[seed] - start[seed] for seed in start.keys() & end.keys()})
            levels = [estimated(start), estimated(end)]
            if change is not None and None not in levels:
                lines.append(
                    [
                        Cell(text, (PROTOCOL_NAMES[protocol],)),
                        *(percent(level.value if level else None) for level in levels),
                        Cell(interval(change), ("decided" if decided(change) else "not decided",)),
                    ]
                )
    names = ["What is changed", "Before", "After", "Change, points"]
    note = "Share of the skill that one head carries; changes are paired by seed, with their 95% intervals."
    return make_table("MLA or its program", names, lines, note=note)
