"""The report's tables: what stands in their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from toeplens import tasks
from toeplens.model import Protocol
from toeplens.papers.deposit import SCALES, Reproduction, Row, Scale, title
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.page.look import PROTOCOL_NAMES, TASKS, models, ordered, plain_keys, planned, planned_cells
from toeplens.papers.deposit.tables import PAPER_TABLE_1
from toeplens.studies import Cell, CellResult, Key
from toeplens.training import RunSpec
from toeplens.training.presets import COUNT


@dataclass(frozen=True)
class AccuracyTable:
    """Table 1 for one task.

    rows     an encoding's label, the papers' number if they have one, and by protocol its result or why there is none
    guesses  by protocol a result that says what guesses score for most encodings, if there is any
    """

    task: str
    rows: list[tuple[str, float | None, list[Row | str]]]
    guesses: list[Row | None]


def accuracy_tables(state: Reproduction) -> list[AccuracyTable]:
    """The papers' Table 1 beside ours, a table a task."""
    keys = plain_keys(state.plan)
    return [_accuracy_table(state, keys, task) for task in TASKS]


def _accuracy_table(state: Reproduction, keys: Sequence[Key], task: str) -> AccuracyTable:
    found = {(row.protocol, row.label): row for row in state.table if row.task == task}
    planned = {(key.protocol, key.label) for key in keys if key.task == task}

    def outcome(place: tuple[Protocol, str]) -> Row | str:
        row = found.get(place)
        if row is None:
            return "not finished" if place in planned else "not part of it"
        return row if row.accuracy is not None else f"diverged ({row.diverged} of {row.seeds})"

    protocols = state.plan.protocols
    labels = ordered(label for _, label in planned | set(found))
    rows = [(label, PAPER_TABLE_1.get((task, label)), [outcome((p, label)) for p in protocols]) for label in labels]
    guesses = [_guess([row for (p, _), row in found.items() if p == protocol]) for protocol in protocols]
    return AccuracyTable(TASKS[task], rows, guesses)


def _guess(rows: Sequence[Row]) -> Row | None:
    """A row of the guesses that most rows have: of MLA's program one more label counts."""
    common = Counter((row.chance, row.length_chance) for row in rows).most_common(1)
    return next((row for row in rows if common and (row.chance, row.length_chance) == common[0][0]), None)


@dataclass(frozen=True)
class DepositTable:
    """The deposits of one protocol and task.

    layers  of the deepest model
    kinds   an encoding's label and its kinds, layer by layer: [(kind, in how many of its seeds), ...]
    cells   the models behind them
    """

    title: str
    protocol: Protocol
    layers: int
    kinds: list[tuple[str, list[list[tuple[str, str]]]]]
    cells: list[CellResult]


def deposit_tables(state: Reproduction) -> list[DepositTable]:
    """The deposit of each layer of each model, a table a task and protocol that has any."""
    tables = [_deposit_table(state, protocol, task) for task in TASKS for protocol in state.plan.protocols]
    return [table for table in tables if table.cells]


def _deposit_table(state: Reproduction, protocol: Protocol, task: str) -> DepositTable:
    found = models(state, protocol, task, lambda cell: cell.status == "complete" and cell.ablation)
    kinds = []
    for label, cells in found:
        by_layer = zip(*(cell.deposits() for cell in cells), strict=True)
        kinds.append((label, [counted([layer.kind for layer in layers]) for layers in by_layer]))
    every = [cell for _, cells in found for cell in cells]
    most = max((len(cell.deposits()) for cell in every), default=0)
    return DepositTable(f"{TASKS[task]}, {PROTOCOL_NAMES[protocol]}", protocol, most, kinds, every)


def counted(kinds: Sequence[str]) -> list[tuple[str, str]]:
    """Each kind of a layer, the most frequent first, and in how many seeds; nothing for one seed alone."""
    return [(kind, f"{n}/{len(kinds)}" if len(kinds) > 1 else "") for kind, n in Counter(kinds).most_common()]


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


def settings(state: Reproduction) -> list[tuple[str, str, str]]:
    """Every size and setting: what it is, in the paper's experiments, and in this study."""
    paper, ours = (_settings(scale, state) for scale in (SCALES["paper"], SCALES[state.plan.scale]))
    return [(text, shown(paper.get(text)), shown(ours.get(text))) for text in {**paper, **ours}]


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


def shown(value: Any) -> str:
    """A setting's value; a dash where there is none."""
    if value is None or isinstance(value, str):
        return value or "–"
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(each)}" for name, each in value.items())
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


def model_rows(state: Reproduction) -> list[tuple[Cell, CellResult | None]]:
    """Every cell of the grid, and its result if it is finished."""
    found = {cell.key: cell for cell in state.results.cells}
    return [(place, found.get(place.key)) for place in planned_cells(state.plan)]


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


@dataclass(frozen=True)
class Term:
    """An encoding's line: what it does, and what it is under each of the study's protocols."""

    label: str
    title: str
    what: str
    meant: list[str]


def terms(state: Reproduction) -> list[Term]:
    """The encodings of the study's grid; RoPE on some heads is one entry."""
    places = {(key.protocol, _family(key.label)) for key in planned(state.plan)}
    labels = ordered(key.label for key in planned(state.plan))
    families = dict.fromkeys(_family(label) for label in labels)
    return [_term(family, labels, places, state.plan.protocols) for family in families if family in _MEANT]


def _family(label: str) -> str:
    return Label.parse(label).base


def _term(
    family: str, labels: list[str], places: Container[tuple[Protocol, str]], protocols: tuple[Protocol, ...]
) -> Term:
    what, paper, released = _MEANT[family]
    label = next(label for label in labels if _family(label) == family)
    swapped = ("rope-alone", "rope-absolute")
    meant = [
        {"paper": paper, "released": released}[p] if (p, family) in places or family in swapped else _ABSENT
        for p in protocols
    ]
    return Term(label, "RoPE on some heads" if family == "partial" else title(family), what, meant)
