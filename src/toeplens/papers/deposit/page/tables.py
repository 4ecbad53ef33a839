"""The report's tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from markupsafe import Markup

from toeplens import tasks
from toeplens.ground.words import fixed, percent, points
from toeplens.model import Protocol
from toeplens.papers.deposit import SCALES, Reproduction, Row, Scale, title
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.measured import PAPER_TABLE_1
from toeplens.papers.deposit.page import style
from toeplens.report.kit.tables import DASH, Cell, Table, code, make_table
from toeplens.studies import CellResult
from toeplens.training import RunSpec
from toeplens.training.presets import COUNT


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
        names = [
            "Model",
            "Layer",
            "Kind",
            "Head",
            "Peak",
            "Second",
            "Top share",
            "Effective heads",
            "Gini",
            "Half gone at",
        ]
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
