"""MLA's variants on the page: does its latent attention or its released code distribute the skill over heads?"""

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

# models of each protocol in table order: MLA, MLA with less of its released code, RoPE for comparison
_ROWS: dict[Protocol, dict[str, str]] = {
    "released": {
        "mla": "MLA in its released code",
        "mla/input": "MLA, no input positions",
        "mla/padding-seen": "MLA, padding attended",
        "mla/no-norm": "MLA, no final norm",
        "mla/bare": "MLA, none of the three",
        "mla/encoding": "MLA as in the paper, in the released code",
        "rope/mla-program": "RoPE in MLA’s code",
        "rope/mla-program-bare": "RoPE in MLA’s code, no input positions",
        "rope": "RoPE in its own code (with sinusoid)",
        "rope-alone": "RoPE in its own code, no sinusoid",
    },
    "paper": {
        "mla": "MLA",
        "mla/input": "MLA, positions added at the input",
        "mla/no-norm": "MLA, no final norm",
        "mla/encoding": "MLA as in the released code",
        "rope": "RoPE",
        "rope-absolute": "RoPE + sinusoid",
    },
}


@dataclass(frozen=True)
class _Shown:
    """A number of a model, with its title and axis."""

    title: str
    of: Callable[[CellResult], float]
    scale: float
    axis: str


_SHOWN = (
    _Shown("share of the skill lost by ablating one head", MEASURES["peak"], 100, "share of the skill, per cent"),
    _Shown(
        "effective heads of that layer",
        lambda cell: found[1].effective_heads if (found := concentrated(cell)) else float("nan"),
        1,
        "effective heads",
    ),
    _Shown("test accuracy", MEASURES["accuracy"], 100, "test accuracy, per cent"),
)


def figure(state: Reproduction) -> Block:
    """How concentrated each variant's skill is."""

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
        "Task 1. MLA, MLA without parts of its released code, and RoPE in MLA’s code. Rings are seeds; the error bar "
        "is the 95% interval of the mean. If latent attention distributes the skill, MLA is low in every variant. If "
        "the released code does, RoPE in MLA’s code is low too. Models without skill have no share."
    )
    return Block("mla", "MLA, and RoPE in MLA’s code", caption, views)


def tables(state: Reproduction) -> list[Table]:
    """Accuracy and deposit of each variant, one table per protocol."""
    found = [(PROTOCOL_NAMES[protocol], _models(state, protocol)) for protocol in state.plan.protocols]
    return [
        make_table(
            f"Variants of MLA, {called}",
            [
                "Model",
                "Test accuracy, %",
                "Share of the skill lost by ablating one head, %",
                "Effective heads of its layer",
                "Kind of that layer",
            ],
            [_row(*model) for model in models],
            note="Next to a kind: number of models of that kind, out of all.",
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
    """Label, name and models of each row; empty if there is no variant."""
    under = state.results.under(protocol)
    found = [(label, text, under.of(DISTANCE, label)) for label, text in _ROWS[protocol].items()]
    found = [(label, text, cells) for label, text, cells in found if cells]
    return found if any(Label.parse(label).variant for label, _, _ in found) else []


def _values(cells: list[CellResult], shown: _Shown) -> Values:
    values = {cell.key.seed: shown.of(cell) for cell in cells}
    return {seed: value for seed, value in values.items() if value == value}  # NaN is no value


_STEPS: dict[Protocol, tuple[tuple[str, str, str], ...]] = {
    "released": (
        ("rope", "rope/mla-program", "RoPE moved into MLA’s code"),
        ("rope/mla-program", "mla", "RoPE replaced by MLA in that code"),
        ("mla", "mla/bare", "MLA without input positions, padding mask and final norm"),
    ),
    "paper": (("rope", "mla", "RoPE replaced by MLA in the same decoder"),),
}


def steps_table(state: Reproduction) -> Table:
    """Paired differences of one head's share: is the diffuse pattern due to MLA or to its released code?"""
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
                        Cell(interval(change), ("interval excludes 0" if decided(change) else "interval includes 0",)),
                    ]
                )
    names = ["Change", "Before", "After", "Difference, percentage points"]
    note = "Share of the skill lost by ablating one head. Differences are paired by seed, with 95% intervals."
    return make_table("MLA or its released code", names, lines, note=note)
