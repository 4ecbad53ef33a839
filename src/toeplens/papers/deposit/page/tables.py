"""The report's tables: what stands in their rows."""

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
from toeplens.papers.deposit.page.look import (
    PROTOCOL_NAMES,
    TASKS,
    models,
    name,
    ordered,
    plain_keys,
    planned,
    planned_cells,
    sign_of,
)
from toeplens.papers.deposit.tables import PAPER_TABLE_1
from toeplens.report.kit.tables import DASH, Cell, Table, code, make_table
from toeplens.studies import CellResult
from toeplens.training import RunSpec
from toeplens.training.presets import COUNT


def named(protocol: Protocol, label: str) -> Cell:
    """An encoding's name with its marker."""
    return Cell(name(protocol, label), sign=sign_of(label))


def accuracy_table(state: Reproduction, task: str) -> Table:
    """The papers' Table 1 beside ours."""
    protocols, several = state.plan.protocols, state.plan.seeds > 1
    found = {(row.protocol, row.label): row for row in state.table if row.task == task}
    planned = {(key.protocol, key.label) for key in plain_keys(state.plan) if key.task == task}
    lines: list[list[str | Cell]] = []
    for label in ordered(label for _, label in planned | set(found)):
        first = Cell(title(label), sign=sign_of(label))
        if label == "rope" and "released" in protocols:
            note = '<sup><a href="#note-sinusoid" aria-label="with a sinusoid in the released protocol">a</a></sup>'
            first = replace(first, html=Markup(f"{title(label)}{note}"))
        line: list[str | Cell] = [first, Cell(fixed(PAPER_TABLE_1.get((task, label))), right=True)]
        for protocol in protocols:
            row = found.get((protocol, label))
            if row is None or row.accuracy is None:
                why = "not finished" if (protocol, label) in planned else "not part of it"
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
    titles = [f"{PROTOCOL_NAMES[protocol].capitalize()}, ours" for protocol in protocols]
    groups = [Cell("Encoding", down=2), Cell("Paper says", down=2, right=True)]
    note = "Test accuracy in per cent; largest drop in percentage points. Small print: how many seeds"
    return make_table(
        f"Accuracy, {TASKS[task]}",
        [Cell("Mean", right=True, css="edge"), "Range", "Largest drop"] * len(protocols),
        lines,
        groups=[*groups, *(Cell(text, across=3, css="group") for text in titles)],
        note=f"{note}; each seed’s costliest head." if several else f"{note}; the costliest head.",
    )


def _guess(rows: Sequence[Row]) -> Row | None:
    """A row of the guesses that most rows have: of MLA's program one more label counts."""
    common = Counter((row.chance, row.length_chance) for row in rows).most_common(1)
    return next((row for row in rows if common and (row.chance, row.length_chance) == common[0][0]), None)


def kinds_cell(kinds: Mapping[str, int]) -> Cell:
    """Kinds of a layer, each with how many of several seeds' models have it."""
    many = sum(kinds.values())
    counts = {kind: f"{count}/{many}" if many > 1 else "" for kind, count in kinds.items()}
    pill = Markup('<span class="kind {0}">{0}</span>')
    few = Markup('<span class="kind {0}">{0} <small>{1}</small></span>')
    shown = Markup(" ").join((few if count else pill).format(kind, count) for kind, count in counts.items())
    text = ", ".join(f"{kind} {count}".rstrip() for kind, count in counts.items())
    return Cell(text, html=shown)


def deposit_tables(state: Reproduction) -> list[tuple[str, Table, Table]]:
    """The kind of each layer of each encoding, and the figures behind them, for each task and protocol that has any."""
    made = []
    for task, protocol in product(TASKS, state.plan.protocols):
        found = models(state, protocol, task, lambda cell: cell.status == "complete" and cell.ablation)
        if not found:
            continue
        where = f"{TASKS[task]}, {PROTOCOL_NAMES[protocol]}"
        depth = max(len(cell.deposits()) for _, cells in found for cell in cells)
        lines: list[list[str | Cell]] = []
        for label, cells in found:
            by_layer = zip(*(cell.deposits() for cell in cells), strict=True)
            counted = [dict(Counter(layer.kind for layer in layers).most_common()) for layers in by_layer]
            lines.append([named(protocol, label), *map(kinds_cell, counted)])
        names = ["Encoding", *(f"Layer {i + 1}" for i in range(depth))]
        note = "Beside a kind: models whose layer is of it, of all."
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
            text, seed = name(cell.key.protocol, cell.key.label), f"seed {cell.key.seed}"
            row.insert(0, Cell(text, (seed,), down=len(layers), header=True, row_css="first"))
        rows.append(row)
    return rows


_SETTING_NAMES = {
    "vocab_size": "words in the vocabulary",
    "d_model": "width of the model (d_model)",
    "d_ff": "width of the feed-forward part (d_ff)",
    "num_layers": "layers",
    "num_heads": "heads a layer",
    "max_len": "longest text the model takes",
    "lr": "learning rate (lr)",
    "batch_size": "examples a step (batch size)",
    "betas": "AdamW's betas",
    "weight_decay": "weight decay",
    "warmup": "share of steps that warm up",
    "schedule": "learning rate after the warm-up",
    "evaluations": "evaluations an epoch",
    "plateau": "training ends at the plateau",
    "length": "tokens of a text, padding included",
    "max_distance": "greatest distance",
    "max_between": "most words between the triggers",
    "max_side": "most words on either side",
    "num_triggers": "trigger words",
    "max_count": "greatest count",
    "train_examples": "training examples",
    "test_examples": "test examples",
    "epochs": "epochs, at the most",
}


_TRAINING = ("weight_decay", "warmup", "schedule", "evaluations", "plateau")


def settings_table(state: Reproduction) -> Table:
    """Every size and setting: what it is, in the paper's experiments, and in this study."""
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
    found = {_SETTING_NAMES.get(field, field): value for field, value in given.items()}
    options = ("length", "num_triggers", "max_count")
    for task, size in scale.tasks.items():
        for protocol in state.plan.protocols:
            sizes = size.paper if protocol == "paper" else size.released
            made = tasks.build(task, form=protocol, vocab_size=scale.model["vocab_size"], **sizes)
            distance = ("length", "max_distance") if protocol == "paper" else ("length", "max_between", "max_side")
            for option in options if task == COUNT else distance:
                found[f"{TASKS[task]}, {PROTOCOL_NAMES[protocol]}: {_SETTING_NAMES[option]}"] = getattr(made, option)
        for field in ("train_examples", "test_examples", "epochs"):
            found[f"{TASKS[task]}: {_SETTING_NAMES[field]}"] = getattr(size, field)
        found[f"{TASKS[task]}: encodings"] = len(scale.labels[task])
    return found | {"examples that each ablation counts": scale.ablation_examples}


def _shown(value: Any) -> str:
    """A setting's value; a dash where there is none."""
    if value is None or isinstance(value, str):
        return value or DASH
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


def models_table(state: Reproduction) -> Table:
    """Every cell of the grid, and its result if it is finished."""
    found, lines = {cell.key: cell for cell in state.results.cells}, []
    for place in planned_cells(state.plan):
        key, cell = place.key, found.get(place.key)
        there = cell is not None and cell.status != "diverged"
        scores = [cell.result.get(f"{split}_accuracy") if cell and there else None for split in ("train", "test")]
        lines.append(
            [
                name(key.protocol, key.label),
                TASKS[key.task],
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


# ---- what each encoding does, and what each protocol means by its name -----------------------------------------------

_SAME = "as described"
_ABSENT = "not part of it"

# label: what it does, what the paper protocol means by it, what the released one does
_MEANT: dict[str, tuple[str, str, str]] = {
    "rope": (
        "turns queries and keys by an angle that grows with position, so that their product depends on the distance",
        _SAME,
        "the same, and a sinusoid added to the input that the paper does not mention",
    ),
    "rope-alone": (
        "RoPE without the hidden sinusoid",
        "there it is simply RoPE",
        "the program’s model, less the sinusoid",
    ),
    "rope-absolute": ("RoPE, and a sinusoid added to the input", _SAME, "there it is what the program calls RoPE"),
    "partial": (
        "RoPE on some heads of every layer, nothing on the others",
        _SAME,
        "the same; the program for it adds no sinusoid",
    ),
    "mla": (
        "multi-head latent attention: compressed keys and values, and a small part of each key that is rotated",
        "in the same decoder as the others",
        "a program of its own: learned positions at the input, padding hidden, GELU, keys and values from the layer",
    ),
    "absolute": ("adds a fixed pattern of sines and cosines to the input", _SAME, _SAME),
    "relative": (
        "adds a learned number to each attention score, by distance",
        "T5’s: distances share buckets",
        "one number for every signed distance and head, no buckets",
    ),
    "alibi": (
        "subtracts from each attention score an amount that grows with distance, a fixed slope a head",
        "slopes are powers of two",
        "slopes e^(−h/H), over the distance to either side",
    ),
    "random": ("adds a random vector a position to the input", "fixed", "trained along"),
    "nope": (
        "nothing: only a causal mask can tell positions apart",
        _SAME,
        "the same, but without a causal mask, so that the model cannot see order at all",
    ),
}


def encodings_table(state: Reproduction) -> Table:
    """The encodings of the study's grid, and what each protocol means by them; RoPE on some heads is one entry."""
    keys, protocols = planned(state.plan), state.plan.protocols
    places = {(key.protocol, Label.parse(key.label).base) for key in keys}
    labels = {Label.parse(label).base: label for label in reversed(ordered(key.label for key in keys))}
    lines: list[list[str | Cell]] = []
    for family in dict.fromkeys(Label.parse(label).base for label in ordered(key.label for key in keys)):
        if family not in _MEANT:
            continue
        what, *meant = _MEANT[family]
        swapped = family in ("rope-alone", "rope-absolute")
        there = [
            meant[("paper", "released").index(p)] if (p, family) in places or swapped else _ABSENT for p in protocols
        ]
        called = "RoPE on some heads" if family == "partial" else title(family)
        lines.append([Cell(called, sign=sign_of(labels[family])), what, *there])
    names = ["Encoding", "What it does", *(f"In the {PROTOCOL_NAMES[protocol]}" for protocol in protocols)]
    return make_table("The encodings", names, lines, css="glossary")
