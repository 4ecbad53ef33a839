"""The report's tables; figures and tables of the protocols' switches and of variants of MLA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import plotly.graph_objects as go
from markupsafe import Markup

from toeplens import tasks
from toeplens.ground.words import fixed, percent, points
from toeplens.lens import Estimate
from toeplens.model import Protocol
from toeplens.papers.deposit import SCALES, Reproduction, Row, Scale, title
from toeplens.papers.deposit.measured import (
    BASES,
    ENDS,
    MEASURES,
    PAPER_TABLE_1,
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
from toeplens.papers.deposit.spec import SWITCH_TITLES, SWITCHES, Label
from toeplens.report.kit.blocks import Block, Panel, Sign, View
from toeplens.report.kit.canvas import Series, dots
from toeplens.report.kit.colours import GREY
from toeplens.report.kit.tables import DASH, Cell, Table, code, make_table
from toeplens.studies import CellResult
from toeplens.studies.kit.results import estimated
from toeplens.training import RunSpec
from toeplens.training.presets import COUNT, DISTANCE


def named(protocol: Protocol, label: str) -> Cell:
    return Cell(style.name(protocol, label), sign=style.sign_of(label))


def accuracy_table(state: Reproduction, task: str) -> Table:
    protocols, several = state.plan.protocols, state.plan.seeds > 1
    found = {(row.protocol, row.label): row for row in state.table if row.task == task}
    planned = {(key.protocol, key.label) for key in style.plain_keys(state.plan) if key.task == task}
    lines: list[list[str | Cell]] = []
    for label in style.ordered(label for _, label in planned | set(found)):
        first = Cell(title(label), sign=style.sign_of(label))
        if label == "rope" and "released" in protocols:
            note = '<sup><a href="#note-sinusoid" aria-label="with a sinusoid in the released protocol">a</a></sup>'
            first = replace(first, html=Markup(f"{title(label)}{note}"))
        line: list[str | Cell] = [first, Cell(fixed(PAPER_TABLE_1.get((task, label))), right=True)]
        for protocol in protocols:
            row = found.get((protocol, label))
            if row is None or row.accuracy is None:
                why = "not finished" if (protocol, label) in planned else "not in this study"
                why = why if row is None else f"diverged ({row.diverged} of {row.seeds})"
                line.append(Cell(why, across=3, css="edge missing"))
                continue
            mean, count = percent(row.accuracy, sign=False), row.seeds - row.diverged
            span = f"{percent(row.lowest, sign=False)}–{percent(row.highest, sign=False)}" if count > 1 else ""
            seeds = f"{count} seed{'s' if count > 1 else ''}" + (f", {row.diverged} diverged" if row.diverged else "")
            drop = DASH if row.largest_drop is None else points(row.largest_drop)
            where = (row.where or "").replace("layer ", "L").replace(" head ", "\u00a0H")
            line.append(Cell(mean, right=True, css="edge", html=Markup(f"<b>{mean}</b>")))
            line += [Cell(span, (seeds,)), Cell(drop, (where,))]
        lines.append(line)
    guesses = [_guess([row for (p, _), row in found.items() if p == protocol]) for protocol in protocols]
    for place, text in enumerate(("Chance", "Length only")):
        line = [Cell(text, row_css="guess"), ""]
        for row in guesses:
            score = row and (row.chance, row.length_chance)[place]
            line += [Cell(percent(score, sign=False), right=True, css="edge"), Cell(across=2)]
        lines.append(line)
    titles = [f"{style.PROTOCOL_NAMES[protocol].capitalize()}, ours" for protocol in protocols]
    groups = [Cell("Encoding", down=2), Cell("Paper", down=2, right=True)]
    note = "Test accuracy in per cent; largest drop in percentage points. Small print: number of seeds"
    return make_table(
        f"Accuracy, {style.TASKS[task]}",
        [Cell("Mean", right=True, css="edge"), "Range", "Largest drop"] * len(protocols),
        lines,
        groups=[*groups, *(Cell(text, across=3, css="group") for text in titles)],
        note=f"{note}; each seed’s most important head." if several else f"{note}; the most important head.",
    )


def _guess(rows: Sequence[Row]) -> Row | None:
    """A row with the most common baselines; the released MLA code counts one more label."""
    common = Counter((row.chance, row.length_chance) for row in rows).most_common(1)
    return next((row for row in rows if common and (row.chance, row.length_chance) == common[0][0]), None)


def kinds_cell(kinds: Mapping[str, int]) -> Cell:
    """The kinds of a layer, each with the number of models of that kind."""
    many = sum(kinds.values())
    counts = {kind: f"{count}/{many}" if many > 1 else "" for kind, count in kinds.items()}
    pill = Markup('<span class="kind {0}">{0}</span>')
    few = Markup('<span class="kind {0}">{0} <small>{1}</small></span>')
    shown = Markup(" ").join((few if count else pill).format(kind, count) for kind, count in counts.items())
    text = ", ".join(f"{kind} {count}".rstrip() for kind, count in counts.items())
    return Cell(text, html=shown)


def deposit_tables(state: Reproduction) -> list[tuple[str, Table, Table]]:
    """Per task and protocol: its name, the kind of each layer of each encoding, and the numbers per layer."""
    made = []
    for task, protocol in product(style.TASKS, state.plan.protocols):
        found = style.models(state, protocol, task, lambda cell: cell.status == "complete" and cell.ablation)
        if not found:
            continue
        where = f"{style.TASKS[task]}, {style.PROTOCOL_NAMES[protocol]}"
        depth = max(len(cell.deposits()) for _, cells in found for cell in cells)
        lines: list[list[str | Cell]] = []
        for label, cells in found:
            by_layer = zip(*(cell.deposits() for cell in cells), strict=True)
            counted = [dict(Counter(layer.kind for layer in layers).most_common()) for layers in by_layer]
            lines.append([named(protocol, label), *map(kinds_cell, counted)])
        names = ["Encoding", *(f"Layer {i + 1}" for i in range(depth))]
        note = "Next to a kind: number of models of that kind, out of all."
        kinds = make_table(f"Kinds of layers, {where}", names, lines, note=note, css="kinds")
        names = style.TEXTS["columns"]["deposits"]
        head = [Cell(text, right=place > 2) for place, text in enumerate(names)]
        body = [row for _, cells in found for cell in cells for row in _deposit_rows(cell)]
        made.append((where, kinds, Table(f"Deposit figures, {where}", [head], body, css="numbers small")))
    return made


def _deposit_rows(cell: CellResult) -> list[list[Cell]]:
    layers, rows = cell.deposits(), []
    for place, layer in enumerate(layers, start=1):
        numbers = [str(layer.head + 1), *(f"{each:.2f}" for each in (layer.peak, layer.second, layer.top_share))]
        numbers += [f"{layer.effective_heads:.1f}", f"{layer.gini:.2f}", str(layer.half_at or "never")]
        row = [Cell(str(place)), kinds_cell({layer.kind: 1}), *(Cell(text, right=True) for text in numbers)]
        if place == 1:
            text, seed = style.name(cell.key.protocol, cell.key.label), f"seed {cell.key.seed}"
            row.insert(0, Cell(text, (seed,), down=len(layers), header=True, row_css="first"))
        rows.append(row)
    return rows


_TRAINING = ("weight_decay", "warmup", "schedule", "evaluations", "plateau")


def settings_table(state: Reproduction) -> Table:
    paper, ours = (_settings(scale, state) for scale in (SCALES["paper"], SCALES[state.plan.scale]))
    lines: list[list[str | Cell]] = []
    for text in {**paper, **ours}:
        theirs, mine = (_shown(found.get(text)) for found in (paper, ours))
        differs = theirs != mine
        bold = Markup("<b>{}</b>").format(mine) if differs else None
        lines.append([text, theirs, Cell(mine, right=True, html=bold), "yes" if differs else DASH])
    return make_table("Settings", ["Setting", "Paper", "This study", "Differs"], lines, right=(1, 2))


def _settings(scale: Scale, state: Reproduction) -> dict[str, Any]:
    usual = {field: RunSpec.model_fields[field].default for field in _TRAINING}
    given = {**scale.model, **usual, **scale.optimiser}
    names = style.TEXTS["settings"]
    found = {names.get(field, field): value for field, value in given.items()}
    options = ("length", "num_triggers", "max_count")
    for task, size in scale.tasks.items():
        for protocol in state.plan.protocols:
            sizes = size.paper if protocol == "paper" else size.released
            made = tasks.build(task, form=protocol, vocab_size=scale.model["vocab_size"], **sizes)
            distance = ("length", "max_distance") if protocol == "paper" else ("length", "max_between", "max_side")
            for option in options if task == COUNT else distance:
                found[f"{style.TASKS[task]}, {style.PROTOCOL_NAMES[protocol]}: {names[option]}"] = getattr(made, option)
        for field in ("train_examples", "test_examples", "epochs"):
            found[f"{style.TASKS[task]}: {names[field]}"] = getattr(size, field)
        found[f"{style.TASKS[task]}: encodings"] = len(scale.labels[task])
    return found | {"examples per ablation": scale.ablation_examples}


def _shown(value: Any) -> str:
    """A setting's value, or a dash."""
    if value is None or isinstance(value, str):
        return value or DASH
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


def models_table(state: Reproduction) -> Table:
    found, lines = {cell.key: cell for cell in state.results.cells}, []
    for place in style.planned_cells(state.plan):
        key, cell = place.key, found.get(place.key)
        there = cell is not None and cell.status != "diverged"
        scores = [cell.result.get(f"{split}_accuracy") if cell and there else None for split in ("train", "test")]
        lines.append(
            [
                style.name(key.protocol, key.label),
                style.TASKS[key.task],
                key.protocol,
                str(key.seed),
                cell.status if cell else "not finished",
                _shown(cell.parameters if cell else None),
                *(percent(score, sign=False) for score in scores),
                fixed(cell.result.get("seconds") if cell else None, 0),
                code(f"runs/{place.job.spec.name}"),
            ]
        )
    names = ["Model", "Task", "Protocol", "Seed", "Status", "Parameters", "Train, %", "Test, %", "Seconds", "Run"]
    return make_table("Models", names, lines, right=(3, 5, 6, 7, 8), css="numbers small")


def encodings_table(state: Reproduction) -> Table:
    """The encodings of the study's grid, and how each protocol defines them; RoPE on some heads is one entry."""
    keys, protocols, meanings = style.planned(state.plan), state.plan.protocols, style.TEXTS["encodings"]
    places = {(key.protocol, Label.parse(key.label).base) for key in keys}
    labels = {Label.parse(label).base: label for label in reversed(style.ordered(key.label for key in keys))}
    lines: list[list[str | Cell]] = []
    for family in dict.fromkeys(Label.parse(label).base for label in style.ordered(key.label for key in keys)):
        if family not in meanings:
            continue
        meant, swapped = meanings[family], family in ("rope-alone", "rope-absolute")
        there = [meant[p] if (p, family) in places or swapped else "not in this study" for p in protocols]
        called = "RoPE on some heads" if family == "partial" else title(family)
        lines.append([Cell(called, sign=style.sign_of(labels[family])), meant["does"], *there])
    names = ["Encoding", "What it does", *(f"In the {style.PROTOCOL_NAMES[protocol]}" for protocol in protocols)]
    return make_table("The encodings", names, lines, css="glossary")


# ---- effects of the protocols' switches, and variants of MLA ---------------------------------------------------------


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
            style.TEXTS["columns"]["variants"],
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
