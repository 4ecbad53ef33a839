"""What came out, in sentences: every number in them is computed from the study's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from toeplens.ground.words import percent, points
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction, Row
from toeplens.papers.deposit.page.look import PROTOCOL_NAMES, TASKS, name
from toeplens.studies import MIN_SEEDS, CellResult, Verdict

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Tally:
    """How many claims got which verdict under a protocol."""

    protocol: Protocol
    counts: dict[Verdict, int]
    total: int


@dataclass(frozen=True)
class Drop:
    """The largest loss by silencing one head."""

    cell: CellResult
    value: float
    layer: int
    head: int

    def __str__(self) -> str:
        key, ablation = self.cell.key, self.cell.ablation
        assert ablation is not None
        low, high = (float(end[self.layer, self.head]) for end in (ablation.low, ablation.high))
        return (
            f"{points(self.value)} points [{points(low)}, {points(high)}], by silencing head {self.head + 1} of layer "
            f"{self.layer + 1} in {name(key.protocol, key.label)} (seed {key.seed}, {TASKS[key.task]}; intact accuracy "
            f"{percent(ablation.baseline)})"
        )


def tallies(state: Reproduction) -> list[Tally]:
    """The verdicts under each protocol, counted."""
    found = []
    for protocol in state.plan.protocols:
        counted = Counter(entry.verdict for entry in state.entries if entry.protocol == protocol)
        found.append(Tally(protocol, {verdict: counted[verdict] for verdict in VERDICTS}, counted.total()))
    return found


def headline(state: Reproduction) -> str:
    """The answer in one sentence."""
    if not state.finished:
        return "No model is finished yet, so nothing has come out so far."
    parts = [
        f"under the {PROTOCOL_NAMES[tally.protocol]} {_count(tally, 'holds')} and {_count(tally, 'fails')}"
        for tally in tallies(state)
    ]
    total = max(tally.total for tally in tallies(state))
    return f"Of the {total} claims checked, {'; '.join(parts)}. The others hold in part or are undecided."


def _count(tally: Tally, verdict: Verdict) -> str:
    count = tally.counts[verdict]
    return f"{count or 'none'} {verdict if count in (0, 1) else verdict.removesuffix('s')}"


def largest_drop(cells: Sequence[CellResult]) -> Drop | None:
    """The largest drop of any head of any of the models."""
    drops = []
    for cell in cells:
        if cell.ablation is not None and cell.status == "complete":
            layer, head = np.unravel_index(cell.ablation.drops.argmax(), cell.ablation.drops.shape)
            drops.append(Drop(cell, float(cell.ablation.drops[layer, head]), int(layer), int(head)))
    return max(drops, key=lambda drop: drop.value, default=None)


def diverged(state: Reproduction) -> list[str]:
    """The models that diverged, by name."""
    gone = [cell.key for cell in state.results.cells if cell.status == "diverged"]
    return [
        f"{name(key.protocol, key.label)}, {TASKS[key.task]}, {PROTOCOL_NAMES[key.protocol]}, seed {key.seed}"
        for key in gone
    ]


def seeds_note(state: Reproduction) -> str:
    """How far the number of seeds carries."""
    count = state.plan.seeds
    if count < MIN_SEEDS:
        many = "one model" if count == 1 else f"{count} models"
        return f"Each encoding was trained as {many}: small differences may be luck, and are left undecided."
    return f"Each encoding was trained as {count} models with different seeds."


def describe_drops(cell: CellResult) -> str:
    """A heat map, for someone who does not see it."""
    drop = largest_drop([cell])
    return (
        f"No ablation of {name(cell.key.protocol, cell.key.label)}."
        if drop is None
        else f"Heat map of losses, layer by head. Largest: {drop}."
    )


def describe_rows(rows: Sequence[Row]) -> str:
    """Accuracies, for someone who does not see the figure."""
    return "Test accuracy: " + ", ".join(f"{name(row.protocol, row.label)} {_result(row)}" for row in rows) + "."


def _result(row: Row) -> str:
    return "diverged" if row.accuracy is None else percent(row.accuracy)
