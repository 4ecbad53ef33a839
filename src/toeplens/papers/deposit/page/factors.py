"""The factor study on the page: its figure, its tables, its sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toeplens.ground.words import percent
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction, title
from toeplens.papers.deposit.factors import (
    BASES,
    ENDS,
    FactorMeasure,
    FactorRow,
    FactorWhole,
    decided,
    factor_table,
    factor_wholes,
    left_over,
    strongest,
)
from toeplens.papers.deposit.labels import SWITCH_TITLES, SWITCHES
from toeplens.papers.deposit.page.look import PROTOCOL_NAMES, TASKS, colour, glyph, interval
from toeplens.report.kit.blocks import Block, Panel, Sign, View
from toeplens.report.kit.colours import GREY
from toeplens.report.kit.dots import Series, dots
from toeplens.studies.kit.results import estimated
from toeplens.training.presets import DISTANCE

MEASURED: dict[FactorMeasure, str] = {
    "accuracy": "test accuracy",
    "skill": "skill",
    "drop": "largest loss by one head",
    "peak": "share of the skill that one head carries",
}
_DRAWN: tuple[FactorMeasure, ...] = ("accuracy", "drop")
_MARKS: dict[Protocol, tuple[str, str, str]] = {
    "released": ("circle", "●", "all other switches as in the program"),
    "paper": ("diamond-open", "◇", "all other switches as in the paper"),
}
_SMALL = 0.1  # effects up to here are drawn and tinted as small, however small all others are
_AS_IT_IS: dict[Protocol, str] = {"released": "the program as it is", "paper": "the paper’s protocol as it is"}


@dataclass(frozen=True)
class EffectCell:
    """A cell of the table: the effect in points, how strongly it is tinted (-1 to 1), and what stands below it."""

    text: str
    tint: float = 0.0
    decided: bool = False
    below: str = ""


@dataclass(frozen=True)
class EffectLine:
    """A line of the table: a switch, or a sum.

    instead  the setting it is set from
    sums     whether it is one of the lines below the switches
    """

    title: str
    instead: str
    cells: list[EffectCell]
    sums: bool = False


@dataclass(frozen=True)
class EffectTable:
    """Effects on one measure at one end of one task: a line a switch, a column an encoding."""

    title: str
    columns: list[tuple[str, str]]
    lines: list[EffectLine]


def figure(state: Reproduction) -> Block:
    """Each switch's effect, with its interval, from either end."""
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
            views.append(View.of(panels, f"{TASKS[task]}: {MEASURED[measure]}"))
    shown: list[Protocol] = [end for end in ENDS[DISTANCE] if any(row.end == end for row in rows)]
    signs = [Sign(end, _MARKS[end][2], GREY, _MARKS[end][1]) for end in shown]
    settings = ", and once ".join(_MARKS[end][2] for end in shown)
    caption = (
        "What setting one switch as the paper has it changes, in percentage points, against how the released program "
        f"has it: {'once ' if len(shown) > 1 else ''}with {settings}. Small rings are seeds (paired), the marker their "
        "mean, the bar its 95% interval."
        + (" Where the two marks differ, the switch works together with others." if len(shown) > 1 else "")
    )
    return Block("factors", "What each switch does", caption, views, legend=signs)


def _reach(rows: Sequence[FactorRow], measure: FactorMeasure) -> float:
    """How far seeds and intervals go to either side; at least 10 points, and no further than there are."""
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
        series.append(Series(end, what, _MARKS[end][0], values, [colour(base)] * len(switches)))
    lines = [SWITCH_TITLES[switch][0] for switch in switches]
    drawn = dots(lines, series, "change, points", scale=100, span=(-span, span), marks=(0,))
    told = " ".join(_told(rows, measure, end) for end in ends)
    return Panel(title(base), drawn, told, colour(base), glyph(base))


def _told(rows: Sequence[FactorRow], measure: FactorMeasure, end: Protocol) -> str:
    parts = [
        f"{SWITCH_TITLES[row.switch][0]} {interval(effect)}"
        for row in rows
        if row.end == end and (effect := row.effect(measure))
    ]
    return f"Effects with {_MARKS[end][2]}: {'; '.join(parts) or 'none yet'}."


def tables(state: Reproduction) -> list[EffectTable]:
    """Every measure's effects, a table a task and an end, with the two ends themselves and what is left over."""
    rows, wholes = _found(state), factor_wholes(state.results, state.plan.protocols)
    found = []
    for task in BASES:
        for measure in MEASURED:
            for end in ENDS[task]:
                here = [row for row in rows if (row.task, row.end) == (task, end)]
                if any(row.values[measure] for row in here):
                    found.append(_table(here, [w for w in wholes if w.task == task], measure))
    return found


def _table(rows: Sequence[FactorRow], wholes: Sequence[FactorWhole], measure: FactorMeasure) -> EffectTable:
    task, end = rows[0].task, rows[0].end
    bases = list(dict.fromkeys(row.base for row in rows))
    effects = [effect for row in rows if (effect := row.effect(measure))]
    largest = max(_SMALL, *(abs(effect.value) for effect in effects), 0.0)
    lines = []
    for switch in SWITCHES:
        mine = {row.base: row for row in rows if row.switch == switch}
        if mine:
            to, instead = SWITCH_TITLES[switch]
            cells = [_cell(mine.get(base), measure, largest) for base in bases]
            lines.append(EffectLine(to, instead, cells))
    of = {whole.base: whole for whole in wholes}
    sums = {base: left_over(of[base], [row for row in rows if row.base == base], measure) for base in bases}
    for end_protocol, text in _AS_IT_IS.items():
        values = [
            estimated(of[base].ends[end_protocol][measure]) if end_protocol in of[base].ends else None for base in bases
        ]
        lines.append(EffectLine(text, "", [EffectCell(interval(value, sign=False)) for value in values], sums=True))
    changes = [
        ("all switches together", [estimated(of[base].difference(measure)) for base in bases]),
        ("sum of the single effects", [estimated(sums[base][0]) for base in bases]),
        ("left over: what switches do together", [estimated(sums[base][1]) for base in bases]),
    ]
    for text, values in changes:
        shown = [EffectCell(interval(value), decided=bool(value and decided(value))) for value in values]
        lines.append(EffectLine(text, "", shown, sums=True))
    where = f"all other switches as in the {'program' if end == 'released' else 'paper'}"
    return EffectTable(f"{TASKS[task]}, {MEASURED[measure]}, {where}", [(b, title(b)) for b in bases], lines)


def _cell(row: FactorRow | None, measure: FactorMeasure, largest: float) -> EffectCell:
    if row is None:
        return EffectCell("", below="no difference")
    if row.absent:
        return EffectCell("–", below=row.absent)
    effect = row.effect(measure)
    if effect is None:
        return EffectCell("–", below="not finished" if not row.before else "no skill")
    below = _kinds(row) if measure in ("drop", "peak") else ""
    return EffectCell(interval(effect), effect.value / largest, decided(effect), below)


def _kinds(row: FactorRow) -> str:
    before, after = (counts.get("single-head", 0) for counts in (row.before, row.after))
    return f"single-head: {before} → {after} of {sum(row.after.values())}"


def sentences(state: Reproduction) -> list[str]:
    """Which switch moves each encoding most, by task and end."""
    rows = _found(state)
    found = []
    for task, bases in BASES.items():
        for base in bases:
            ends = [_most(rows, task, base, end) for end in ENDS[task]]
            said = [text for text in ends if text]
            if said:
                found.append(f"{title(base)}, {TASKS[task]}: {'; '.join(said)}.")
    return found


def _most(rows: Sequence[FactorRow], task: str, base: str, end: Protocol) -> str:
    here = [row for row in rows if (row.task, row.base, row.end) == (task, base, end)]
    row = strongest(here, "accuracy")
    effect = row and row.effect("accuracy")
    if row is None or effect is None:
        return ""
    to, instead = SWITCH_TITLES[row.switch]
    certain = "its interval leaves 0 out" if decided(effect) else "not decided: its interval includes 0"
    known = sum(bool(row.values["accuracy"]) or bool(row.absent) for row in here)
    so_far = "" if known == len(here) else f" of the {known} of {len(here)} switches that are finished"
    return (
        f"in the {PROTOCOL_NAMES[end]} “{to}” instead of “{instead}” moves the test accuracy most{so_far}, by "
        f"{interval(effect)} points ({certain})"
    )


def for_nope(state: Reproduction) -> list[str]:
    """What matters most for NoPE on Task 1, and how far that goes towards the other protocol."""
    rows, whole = _found(state), _whole(state, "nope")
    difference = estimated(whole.difference("accuracy"))
    found = []
    for end in ENDS[DISTANCE]:
        text = _most(rows, DISTANCE, "nope", end)
        if text:
            found.append(f"{text[0].upper()}{text[1:]}.")
    if found and difference:
        ends = (estimated(whole.ends[protocol]["accuracy"]) for protocol in ENDS[DISTANCE])
        low, high = (percent(end.value if end else None) for end in ends)
        found.append(f"All switches together: {low} to {high}, {interval(difference)} points.")
    return found


def why(state: Reproduction, base: str) -> str:
    """Which switch moves an encoding's accuracy on Task 1 most towards the other protocol's, and what is left over."""
    whole = _whole(state, base)
    change = estimated(whole.difference("accuracy"))
    here = [row for row in _found(state) if (row.task, row.base) == (DISTANCE, base)]
    end = next((row.end for row in here if row.values["accuracy"]), None)
    if change is None or end is None:
        return ""
    rows = [row for row in here if row.end == end]
    row = strongest((row for row in rows if (e := row.effect("accuracy")) and e.value * change.value > 0), "accuracy")
    together = estimated(left_over(whole, rows, "accuracy")[1])
    rest = f"; what switches do only together is {interval(together)}" if together else ""
    if row is None:
        return f"No single switch moves it that way{rest}."
    to, instead = SWITCH_TITLES[row.switch]
    return (
        f"Of the single switches “{to}” instead of “{instead}” moves it most that way, by "
        f"{interval(row.effect('accuracy'))}{rest}."
    )


def _whole(state: Reproduction, base: str) -> FactorWhole:
    wholes = factor_wholes(state.results, state.plan.protocols)
    return next(whole for whole in wholes if (whole.task, whole.base) == (DISTANCE, base))


def _found(state: Reproduction) -> list[FactorRow]:
    """The effects at the ends that this study asks for."""
    part: dict[Protocol, str] = {"released": "factors", "paper": "factors-back"}
    return [row for row in factor_table(state.results, state.plan.protocols) if part[row.end] in state.plan.parts]
