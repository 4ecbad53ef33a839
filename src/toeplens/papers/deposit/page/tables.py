"""The report's tables, as rows ready to be printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toeplens import tasks
from toeplens.ground.words import percent, points
from toeplens.lens import LayerDeposit
from toeplens.model import Protocol
from toeplens.papers.deposit import SCALES, Reproduction, Row, Scale, title
from toeplens.papers.deposit.page.look import (
    PROTOCOL_NAMES,
    TASKS,
    colour,
    glyph,
    name,
    ordered,
    plain_keys,
    planned_cells,
)
from toeplens.papers.deposit.tables import PAPER_TABLE_1
from toeplens.studies import Key
from toeplens.training.presets import COUNT


@dataclass(frozen=True)
class Outcome:
    """An encoding's result under one protocol: numbers, or why there are none."""

    mean: str = ""
    spread: str = ""
    seeds: str = ""
    drop: str = ""
    where: str = ""
    missing: str = ""


@dataclass(frozen=True)
class AccuracyRow:
    """An encoding's line in Table 1."""

    label: str
    title: str
    note: str
    glyph: str
    colour: str
    paper: str
    outcomes: list[Outcome]


@dataclass(frozen=True)
class AccuracyTable:
    """Table 1 for one task. ``chance``, ``length``: what a constant guess and one from the length get, by protocol."""

    task: str
    rows: list[AccuracyRow]
    chance: list[str]
    length: list[str]


def accuracy_tables(state: Reproduction) -> list[AccuracyTable]:
    """The papers' Table 1 beside ours, a table a task, in per cent."""
    keys = plain_keys(state.plan)
    return [_accuracy_table(state, keys, task) for task in TASKS]


def _accuracy_table(state: Reproduction, keys: Sequence[Key], task: str) -> AccuracyTable:
    found = {(row.protocol, row.label): row for row in state.table if row.task == task}
    planned = {(key.protocol, key.label) for key in keys if key.task == task}
    rows = []
    for label in ordered(label for _, label in planned | set(found)):
        told = PAPER_TABLE_1.get((task, label))
        outcomes = [_outcome(found.get((p, label)), (p, label) in planned) for p in state.plan.protocols]
        hidden = label == "rope" and "released" in state.plan.protocols
        note = "with a sinusoid in the released protocol" if hidden else ""
        paper = "–" if told is None else f"{told:.2f}"
        rows.append(AccuracyRow(label, title(label), note, glyph(label), colour(label), paper, outcomes))
    some = [next((row for (p, _), row in found.items() if p == protocol), None) for protocol in state.plan.protocols]
    chance = [percent(row.chance if row else None, sign=False) for row in some]
    length = [percent(row.length_chance if row else None, sign=False) for row in some]
    return AccuracyTable(TASKS[task], rows, chance, length)


def _outcome(row: Row | None, planned: bool) -> Outcome:
    if row is None:
        return Outcome(missing="not finished" if planned else "not part of it")
    if row.accuracy is None:
        return Outcome(missing=f"diverged ({row.diverged} of {row.seeds})")
    count = row.seeds - row.diverged
    spread = f"{percent(row.lowest, sign=False)}–{percent(row.highest, sign=False)}" if count > 1 else ""
    seeds = f"{count} seed{'s' if count > 1 else ''}" + (f", {row.diverged} diverged" if row.diverged else "")
    drop = "–" if row.largest_drop is None else points(row.largest_drop)
    where = (row.where or "").replace("layer ", "L").replace(" head ", "\u00a0H")
    return Outcome(percent(row.accuracy, sign=False), spread, seeds, drop, where)


@dataclass(frozen=True)
class DepositRow:
    """One layer of one model."""

    title: str
    seed: int
    layer: int
    deposit: LayerDeposit
    first: bool
    layers: int


@dataclass(frozen=True)
class DepositTable:
    """The deposits of one protocol and task.

    kinds  an encoding's kinds, layer by layer: [(kind, in how many of its seeds), ...]
    rows   the figures behind them
    """

    title: str
    layers: int
    kinds: list[tuple[str, str, str, list[list[tuple[str, str]]]]]
    rows: list[DepositRow]


def deposit_tables(state: Reproduction) -> list[DepositTable]:
    """The deposit of each layer of each model, a table a task and protocol that has any."""
    tables = [_deposit_table(state, protocol, task) for task in TASKS for protocol in state.plan.protocols]
    return [table for table in tables if table.rows]


def _deposit_table(state: Reproduction, protocol: Protocol, task: str) -> DepositTable:
    under = state.results.under(protocol)
    kinds, rows, most = [], [], 0
    for label in ordered(under.labels(task)):
        cells = [
            (cell, cell.deposits()) for cell in under.of(task, label) if cell.status == "complete" and cell.ablation
        ]
        if not cells:
            continue
        count = len(cells[0][1])
        most = max(most, count)
        by_layer = [Counter(str(layers[index].kind) for _, layers in cells).most_common() for index in range(count)]
        counted = [[(kind, f"{n}/{len(cells)}" if len(cells) > 1 else "") for kind, n in layer] for layer in by_layer]
        kinds.append((name(protocol, label), glyph(label), colour(label), counted))
        for cell, layers in cells:
            for index, layer in enumerate(layers):
                rows.append(DepositRow(name(protocol, label), cell.key.seed, index + 1, layer, index == 0, len(layers)))
    return DepositTable(f"{TASKS[task]}, {PROTOCOL_NAMES[protocol]}", most, kinds, rows)


@dataclass(frozen=True)
class Setting:
    """A setting, in the paper's experiments and here."""

    title: str
    paper: str
    ours: str

    @property
    def differs(self) -> bool:
        """Whether this study has another value."""
        return self.paper != self.ours


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
    "length": "tokens of a text, padding included",
    "max_distance": "greatest distance",
    "max_between": "most words between the triggers",
    "max_side": "most words on either side",
    "num_triggers": "trigger words",
    "max_count": "greatest count",
    "train_examples": "training examples",
    "test_examples": "test examples",
    "epochs": "epochs",
}


def settings(state: Reproduction) -> list[Setting]:
    """Every size and setting of the study's scale beside the paper's."""
    paper, ours = (_settings(scale, state) for scale in (SCALES["paper"], SCALES[state.plan.scale]))
    return [Setting(text, _shown(paper.get(text)), _shown(ours.get(text))) for text in {**paper, **ours}]


def _settings(scale: Scale, state: Reproduction) -> dict[str, Any]:
    found = {_SETTING_NAMES.get(field, field): value for field, value in {**scale.model, **scale.optimiser}.items()}
    spec = planned_cells(state.plan)[0].job.spec  # what no scale changes
    found |= {"weight decay": spec.weight_decay, "share of steps that warm up": spec.warmup}
    options = ("length", "num_triggers", "max_count")
    for task, size in scale.tasks.items():
        for protocol in state.plan.protocols:
            given = size.paper if protocol == "paper" else size.released
            made = tasks.build(task, form=protocol, vocab_size=scale.model["vocab_size"], **given)
            distance = ("length", "max_distance") if protocol == "paper" else ("length", "max_between", "max_side")
            for option in options if task == COUNT else distance:
                found[f"{TASKS[task]}, {PROTOCOL_NAMES[protocol]}: {_SETTING_NAMES[option]}"] = getattr(made, option)
        for field in ("train_examples", "test_examples", "epochs"):
            found[f"{TASKS[task]}: {_SETTING_NAMES[field]}"] = getattr(size, field)
        found[f"{TASKS[task]}: encodings"] = len(scale.labels[task])
    return found | {"examples that each ablation counts": scale.ablation_examples}


def _shown(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "–" if value is None else ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


@dataclass(frozen=True)
class ModelRow:
    """A cell of the grid: a model that is to be trained."""

    key: Key
    title: str
    run: str
    status: str
    parameters: str
    train: str
    test: str
    seconds: str


def model_rows(state: Reproduction) -> list[ModelRow]:
    """Every cell of the grid, finished or not."""
    found = {cell.key: cell for cell in state.results.cells}
    rows = []
    for place in planned_cells(state.plan):
        cell = found.get(place.key)
        text = name(place.key.protocol, place.key.label)
        if cell is None:
            rows.append(ModelRow(place.key, text, place.job.spec.name, "not finished", "–", "–", "–", "–"))
            continue
        train, test = (percent(cell.result.get(f"{split}_accuracy"), sign=False) for split in ("train", "test"))
        if cell.status == "diverged":
            train = test = "–"
        seconds = cell.result.get("seconds")
        took = "–" if seconds is None else f"{seconds:.0f}"
        rows.append(ModelRow(place.key, text, cell.run, cell.status, _shown(cell.parameters), train, test, took))
    return rows
