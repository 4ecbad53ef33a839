"""Effects of the protocols' switches, and variants of MLA: which of its parts distributes the skill over heads?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import plotly.graph_objects as go
from markupsafe import Markup

from toeplens.ground.words import fixed, percent
from toeplens.lens import Estimate
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction, title
from toeplens.papers.deposit.labels import SWITCH_TITLES, SWITCHES, Label
from toeplens.papers.deposit.measured import (
    BASES,
    ENDS,
    MEASURES,
    FactorMeasure,
    FactorRow,
    FactorWhole,
    Values,
    concentrated,
    decided,
    factor_table,
    factor_wholes,
    kinds,
    left_over,
    strongest,
)
from toeplens.papers.deposit.page import style
from toeplens.papers.deposit.page.tables import kinds_cell
from toeplens.report.kit.blocks import Block, Panel, Sign, View
from toeplens.report.kit.colours import GREY
from toeplens.report.kit.dots import Series, dots
from toeplens.report.kit.tables import DASH, Cell, Table, make_table
from toeplens.studies import CellResult
from toeplens.studies.kit.results import estimated
from toeplens.training.presets import DISTANCE

MEASURED: dict[FactorMeasure, str] = style.TEXTS["measures"]
_DRAWN: tuple[FactorMeasure, ...] = ("accuracy", "drop")
_MARKS: dict[Protocol, tuple[str, str, str]] = style.TEXTS["ends"]
_SMALL = 0.1  # the colour scale and axis cover at least this effect


def switches(state: Reproduction) -> Block:
    rows = _found(state)
    views = []
    for task in BASES:
        for measure in _DRAWN:
            here = [row for row in rows if row.task == task]
            span = 105 * _reach(here, measure)
            panels = []
            for base in BASES[task]:
                mine = [row for row in here if row.base == base]
                if any(row.values[measure] for row in mine):
                    panels.append(_panel(mine, measure, span))
            views.append(View.of(panels, f"{style.TASKS[task]}: {MEASURED[measure]}"))
    shown: list[Protocol] = [end for end in ENDS[DISTANCE] if any(row.end == end for row in rows)]
    signs = [Sign(end, _MARKS[end][2], GREY, _MARKS[end][1]) for end in shown]
    both = " If the two marks of a switch differ, it interacts with other switches." if len(shown) > 1 else ""
    return style.block("factors", views, words={"both": both}, legend=signs)


def _reach(rows: Sequence[FactorRow], measure: FactorMeasure) -> float:
    """Half-width of the axis: covers seeds and intervals; at least 10 percentage points, at most 100."""
    seeds = [abs(value) for row in rows for value in row.values[measure].values()]
    effects = [effect for row in rows if (effect := row.effect(measure)) and effect.count > 1]
    ends = [max(-effect.low, effect.high) for effect in effects]
    return min(max(_SMALL, *seeds, *ends, 0.0), max(1.0, *seeds, 0.0))


def _panel(rows: Sequence[FactorRow], measure: FactorMeasure, span: float) -> Panel:
    base = rows[0].base
    switches = list(dict.fromkeys(row.switch for row in rows))
    ends: list[Protocol] = [end for end in ENDS[rows[0].task] if any(row.end == end for row in rows)]
    series = []
    for end in ends:
        values = [next(r.values[measure] for r in rows if (r.switch, r.end) == (switch, end)) for switch in switches]
        what = f"{_MARKS[end][2]}<br>" if len(ends) > 1 else ""
        series.append(Series(end, what, _MARKS[end][0], values, [style.colour(base)] * len(switches)))
    lines = [SWITCH_TITLES[switch][0] for switch in switches]
    drawn = dots(lines, series, "change, points", scale=100, span=(-span, span), marks=(0,))
    return Panel(title(base), drawn, tint=style.colour(base), glyph=style.glyph(base))


def switch_tables(state: Reproduction) -> list[Table]:
    """The effects on each measure, one table per task and starting protocol, with the unexplained remainder."""
    rows, wholes = _found(state), factor_wholes(state.results, state.plan.protocols)
    found = []
    for task in BASES:
        for measure in MEASURED:
            for end in ENDS[task]:
                here = [row for row in rows if (row.task, row.end) == (task, end)]
                if any(row.values[measure] for row in here):
                    found.append(_table(here, [w for w in wholes if w.task == task], measure))
    return found


def _table(rows: Sequence[FactorRow], wholes: Sequence[FactorWhole], measure: FactorMeasure) -> Table:
    task, end = rows[0].task, rows[0].end
    bases = list(dict.fromkeys(row.base for row in rows))
    effects = [effect for row in rows if (effect := row.effect(measure))]
    largest = max(_SMALL, *(abs(effect.value) for effect in effects), 0.0)
    lines: list[list[str | Cell]] = []
    for switch in SWITCHES:
        mine = {row.base: row for row in rows if row.switch == switch}
        if mine:
            to, instead = SWITCH_TITLES[switch]
            lines.append([Cell(to, (f"instead of {instead}",)), *(_cell(mine.get(b), measure, largest) for b in bases)])
    of = {whole.base: whole for whole in wholes}
    sums = [left_over(of[base], [row for row in rows if row.base == base], measure) for base in bases]
    for place, (end_protocol, text) in enumerate(style.TEXTS["unchanged"].items()):
        values = [estimated(of[b].ends[end_protocol][measure]) if end_protocol in of[b].ends else None for b in bases]
        first = Cell(text, row_css="guess" if place else "guess first")
        lines.append([first, *(style.interval(value, sign=False) for value in values)])
    changes = {
        "all switches together": [of[base].difference(measure) for base in bases],
        "sum of the single effects": [total for total, _ in sums],
        "remainder: interactions of switches": [rest for _, rest in sums],
    }
    for text, values in changes.items():
        lines.append([Cell(text, row_css="guess"), *(_effect(estimated(value)) for value in values)])
    note = (
        "Percentage points, mean over seeds with 95% interval. Small print: the released code’s setting; number of "
        "models with a single-head layer before and after."
    )
    return make_table(
        f"Effects, {style.TASKS[task]}, {MEASURED[measure]}, {_MARKS[end][2]}",
        ["The paper’s setting", *(Cell(title(base), sign=style.sign_of(base)) for base in bases)],
        lines,
        note=note,
        css="numbers effects",
    )


def _effect(effect: Estimate | None) -> Cell:
    """An effect in percentage points, bold if its interval excludes 0."""
    text = style.interval(effect)
    return Cell(text, html=Markup("<b>{}</b>").format(text) if effect and decided(effect) else None)


def _cell(row: FactorRow | None, measure: FactorMeasure, largest: float) -> Cell:
    if row is None:
        return Cell(small=("no difference",))
    if row.absent:
        return Cell(DASH, (row.absent,))
    effect = row.effect(measure)
    if effect is None:
        return Cell(DASH, ("not finished" if not row.before else "no skill",))
    tint = effect.value / largest
    css, style = (f"tint {'more' if tint > 0 else 'less'}", f"--size:{round(38 * abs(tint))}%") if tint else ("", "")
    before, after = (counts.get("single-head", 0) for counts in (row.before, row.after))
    told = f"single-head: {before} → {after} of {sum(row.after.values())}"
    below = (told,) if measure in ("drop", "peak") else ()
    return replace(_effect(effect), small=below, css=css, style=style)


def strongest_table(state: Reproduction) -> Table:
    """The finished switch with the largest effect on each encoding's test accuracy, by task and starting protocol."""
    rows, lines = _found(state), []
    for task, bases in BASES.items():
        for base, end in product(bases, ENDS[task]):
            here = [row for row in rows if (row.task, row.base, row.end) == (task, base, end)]
            row = strongest(here, "accuracy")
            effect = row and row.effect("accuracy")
            if row is not None and effect is not None:
                to, instead = SWITCH_TITLES[row.switch]
                known = sum(bool(each.values["accuracy"]) or bool(each.absent) for each in here)
                first = [
                    Cell(title(base), sign=style.sign_of(base)),
                    style.TASKS[task],
                    f"in the {style.PROTOCOL_NAMES[end]}",
                ]
                lines.append([*first, Cell(to, (f"instead of {instead}",)), _effect(effect), f"{known} of {len(here)}"])
    names = ["Encoding", "Task", "All other switches", "Strongest switch", "Effect", "Switches finished"]
    note = "Effect on the test accuracy, percentage points with 95% interval."
    return make_table("Strongest switch of each encoding", names, lines, note=note)


def _found(state: Reproduction) -> list[FactorRow]:
    """The effects of the parts that are in the plan."""
    part: dict[Protocol, str] = {"released": "factors", "paper": "factors-back"}
    return [row for row in factor_table(state.results, state.plan.protocols) if part[row.end] in state.plan.parts]


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


def variants(state: Reproduction) -> Block:
    def draw(protocol: Protocol, shown: _Shown) -> go.Figure | None:
        found = _models(state, protocol)
        if not found:
            return None
        values = [_values(cells, shown) for _, _, cells in found]
        texts = [text for _, text, _ in found]
        series = style.one_series((label for label, _, _ in found), values)
        biggest = max((shown.scale * v for one in values for v in one.values()), default=1.0)
        end = 100 * style.accuracy_top(state, DISTANCE) if shown.title == "test accuracy" else biggest
        return dots(texts, series, shown.axis, scale=shown.scale, span=(0, 1.05 * end))

    views = [
        style.beside(state, lambda protocol, shown=shown: draw(protocol, shown), shown.title.capitalize())
        for shown in _SHOWN
    ]
    return style.block("mla", views)


def variant_tables(state: Reproduction) -> list[Table]:
    found = [(style.PROTOCOL_NAMES[protocol], _models(state, protocol)) for protocol in state.plan.protocols]
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
    shown = (
        style.interval(accuracy, sign=False),
        style.interval(peak, sign=False),
        fixed(heads.value if heads else None, 1),
    )
    return [Cell(text, sign=style.sign_of(label)), *shown, kinds_cell(kinds(cells))]


def _models(state: Reproduction, protocol: Protocol) -> list[tuple[str, str, list[CellResult]]]:
    """Label, name and models of each row; empty if there is no variant."""
    under = state.results.under(protocol)
    found = [(label, text, under.of(DISTANCE, label)) for label, text in style.TEXTS["variants"][protocol].items()]
    found = [(label, text, cells) for label, text, cells in found if cells]
    return found if any(Label.parse(label).variant for label, _, _ in found) else []


def _values(cells: list[CellResult], shown: _Shown) -> Values:
    values = {cell.key.seed: shown.of(cell) for cell in cells}
    return {seed: value for seed, value in values.items() if value == value}  # NaN is no value


def steps_table(state: Reproduction) -> Table:
    """Paired differences of one head's share: is the diffuse pattern due to MLA or to its released code?"""
    lines: list[list[str | Cell]] = []
    for protocol in state.plan.protocols:
        under = state.results.under(protocol)
        for step in style.TEXTS["steps"][protocol]:
            start, end = (_values(under.of(DISTANCE, step[label]), _SHOWN[0]) for label in ("from", "to"))
            change = estimated({seed: end[seed] - start[seed] for seed in start.keys() & end.keys()})
            levels = [estimated(start), estimated(end)]
            if change is not None and None not in levels:
                lines.append(
                    [
                        Cell(step["text"], (style.PROTOCOL_NAMES[protocol],)),
                        *(percent(level.value if level else None) for level in levels),
                        Cell(
                            style.interval(change),
                            ("interval excludes 0" if decided(change) else "interval includes 0",),
                        ),
                    ]
                )
    names = ["Change", "Before", "After", "Difference, percentage points"]
    note = "Share of the skill lost by ablating one head. Differences are paired by seed, with 95% intervals."
    return make_table("MLA or its released code", names, lines, note=note)
