"""What the page's summary says: counts of verdicts, what was measured, and what came out, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

import numpy as np

from toeplens.ground.words import percent, points
from toeplens.model import Protocol
from toeplens.papers.deposit import SCALES, Reproduction
from toeplens.papers.deposit.page.look import PROTOCOL_NAMES, TASKS, name, plain, protocol_title
from toeplens.report.kit.page import ledger
from toeplens.report.kit.tables import DASH, Cell, Table, make_table
from toeplens.studies import ENOUGH, CellResult, Entry, Verdict
from toeplens.studies.kit.verdicts import SIDES
from toeplens.training.presets import DISTANCE

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
# what the papers are known for, in the order in which they tell it
_CENTRAL = (
    "task1-rope-best",
    "task1-nope-relative-fail",
    "deposit-first-layer",
    "deposit-only-rope",
    "mla-removes-deposit",
)


def tallies(state: Reproduction) -> dict[Protocol, Counter[Verdict]]:
    """The verdicts under each protocol, counted."""
    found: dict[Protocol, Counter[Verdict]] = {}
    for protocol in state.plan.protocols:
        found[protocol] = Counter(dict.fromkeys(VERDICTS, 0))
        found[protocol].update(entry.verdict for entry in state.entries if entry.protocol == protocol)
    return found


def headline(state: Reproduction) -> str:
    """How many claims hold and fail under each protocol."""
    counted = tallies(state)
    total = max(counts.total() for counts in counted.values())
    if not state.begun or not total:
        return "No claim is judged yet." if total else "No claim is asked of what was trained here."
    held, failed = ("leans to hold", "leans to fail") if state.plan.seeds < ENOUGH else ("holds", "fails")
    verb = "lean to " if state.plan.seeds < ENOUGH else ""
    parts = [
        f"under the {PROTOCOL_NAMES[protocol]} {counts[held]} {verb}hold, {counts[failed]} {verb}fail"
        for protocol, counts in counted.items()
    ]
    return f"Of {total} claims, {'; '.join(parts)}."


def central(state: Reproduction) -> list[list[Entry]]:
    """What the papers are known for: the entries of these claims, one a protocol."""
    found = {entries[0].claim.id: entries for entries in ledger(state.entries)}
    return [found[each] for each in _CENTRAL if each in found]


def opposite(state: Reproduction) -> list[list[Entry]]:
    """The claims that come out on opposite sides under the two protocols."""
    return [each for each in ledger(state.entries) if {-1, 1} <= {SIDES.get(entry.verdict, 0) for entry in each}]


def measured(state: Reproduction) -> list[str]:
    """At which scale: sizes beside the papers', and how many models."""
    scale, counts = SCALES[state.plan.scale], (len(state.models), len(state.results.cells), state.finished)
    models, there, finished = counts
    sizes = [
        f"{each.model['num_layers']} layers of {each.model['num_heads']} heads, {each.model['d_model']} wide, on texts "
        f"of {each.tasks[DISTANCE].paper['length']} tokens"
        for each in ((scale,) if state.plan.scale == "paper" else (scale, SCALES["paper"]))
    ]
    counted = f"{there:,} of {state.total:,} models"
    if models < there:  # one run may stand in two
        counted = f"{models:,} models in {there:,} of {state.total:,} places of the study"
    if finished < there:
        counted += f" ({there - finished:,} of them not measured in full)"
    return [
        f"{' (the papers’: '.join(sizes)}{')' if len(sizes) > 1 else ', the papers’ own sizes'}.",
        f"{counted}, {scale.told(state.plan.seeds)} of each; then every head silenced in turn.",
    ]


def largest_drop(cells: Sequence[CellResult]) -> tuple[CellResult, float, int, int] | None:
    """The largest loss by silencing one head of any of the models: the model, what it loses, layer and head."""
    drops = []
    for cell in cells:
        if cell.ablation is not None and cell.status == "complete":
            layer, head = np.unravel_index(cell.ablation.drops.argmax(), cell.ablation.drops.shape)
            drops.append((cell, float(cell.ablation.drops[layer, head]), int(layer), int(head)))
    return max(drops, key=lambda drop: drop[1], default=None)


def diverged(state: Reproduction) -> list[str]:
    """The models that diverged, by name."""
    gone = [cell.key for cell in state.results.cells if cell.status == "diverged"]
    return [
        f"{name(key.protocol, key.label)}, {TASKS[key.task]}, {PROTOCOL_NAMES[key.protocol]}, seed {key.seed}"
        for key in gone
    ]


def results_table(state: Reproduction) -> Table:
    """What came out, a row a question and a column a protocol."""
    encodings = plain(state)
    protocols = state.plan.protocols
    lines: list[list[str | Cell]] = [
        *([f"Best on {TASKS[task]}", *(_best(encodings, task, protocol) for protocol in protocols)] for task in TASKS),
        ["Largest loss by silencing one head", *(_largest(encodings, protocol) for protocol in protocols)],
        [
            f"Models with a layer carried by one head, {TASKS[DISTANCE]}",
            *(_single(encodings, protocol) for protocol in protocols),
        ],
    ]
    lines = [line for line in lines if any(cell != Cell(DASH) for cell in line[1:])]
    return make_table("Main results", ["Question", *map(protocol_title, protocols)], lines)


def _best(state: Reproduction, task: str, protocol: Protocol) -> Cell:
    rows = [row for row in state.table if (row.protocol, row.task) == (protocol, task) and row.accuracy is not None]
    if not rows:
        return Cell(DASH)
    first, *rest = [f"{name(protocol, row.label)} ({percent(row.accuracy)})" for row in rows[:3]]
    guess = f"length only: {percent(rows[0].length_chance)}"
    return Cell(first, (f"then {', '.join(rest)}" if rest else "", guess))


def _largest(state: Reproduction, protocol: Protocol) -> Cell:
    found = largest_drop(state.results.under(protocol).cells)
    if found is None:
        return Cell(DASH)
    cell, value, layer, head = found
    place = f"{TASKS[cell.key.task]}, layer {layer + 1}, head {head + 1}, seed {cell.key.seed}"
    return Cell(f"{points(value)} points, {name(protocol, cell.key.label)}", (place,))


def _single(state: Reproduction, protocol: Protocol) -> Cell:
    cells = [c for c in state.results.under(protocol).cells if c.key.task == DISTANCE and c.deposits()]
    kinds = [{layer.kind for layer in cell.deposits()} for cell in cells]
    able = [found for found in kinds if found != {"no-skill"}]
    single = sum("single-head" in found for found in able)
    return Cell(f"{single} of {len(able)} with skill") if cells else Cell(DASH)
