"""What came out, in sentences: every number in them is computed from the study's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from toeplens.model import Protocol
from toeplens.report.look import PROTOCOL_NAMES, TASKS, listed, name, ordered, percent, points
from toeplens.studies import MIN_SEEDS, CellResult, Verdict
from toeplens.studies.reproduce import DISTANCE, Reproduction, Row

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Tally:
    """How many claims got which verdict under a protocol."""

    protocol: Protocol
    counts: dict[Verdict, int]
    total: int


@dataclass(frozen=True)
class Answer:
    """A thing that was asked, and what came out, a sentence a protocol."""

    question: str
    findings: list[str]


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


def answers(state: Reproduction) -> list[Answer]:
    """What came out on each task, and where a single head carries the skill."""
    if not state.finished:
        return []
    found = [Answer(f"Which encoding came first on {TASKS[task]}?", _winners(state, task)) for task in TASKS]
    found.append(Answer("Where was the largest loss by silencing one head?", _losses(state)))
    found.append(Answer(f"Which models of {TASKS[DISTANCE]} have a layer carried by a single head?", _deposits(state)))
    return [answer for answer in found if answer.findings]


def _winners(state: Reproduction, task: str) -> list[str]:
    sentences = []
    for protocol in state.plan.protocols:
        rows = [row for row in state.table if (row.protocol, row.task) == (protocol, task) and row.accuracy is not None]
        if rows:
            first, *rest = [f"{name(protocol, row.label)} ({percent(row.accuracy)})" for row in rows]
            then = f", then {' and '.join(rest[:2])}" if rest else ", the only one finished"
            sentences.append(f"{_under(protocol)}: {first}{then}; {_guess(rows[0])}.")
    return sentences


def _guess(row: Row) -> str:
    known = (
        f", {percent(row.length_chance)} if it knows the text’s length" if row.length_chance > row.chance * 1.02 else ""
    )
    return f"a constant guess gets {percent(row.chance)}{known}"


def _losses(state: Reproduction) -> list[str]:
    sentences = []
    for protocol in state.plan.protocols:
        drop = largest_drop(state.results.under(protocol).cells)
        if drop:
            sentences.append(f"{_under(protocol)}: {drop}.")
    return sentences


def largest_drop(cells: Sequence[CellResult]) -> Drop | None:
    """The largest drop of any head of any of the models."""
    drops = []
    for cell in cells:
        if cell.ablation is not None and cell.status == "complete":
            layer, head = np.unravel_index(cell.ablation.drops.argmax(), cell.ablation.drops.shape)
            drops.append(Drop(cell, float(cell.ablation.drops[layer, head]), int(layer), int(head)))
    return max(drops, key=lambda drop: drop.value, default=None)


def _deposits(state: Reproduction) -> list[str]:
    sentences = []
    for protocol in state.plan.protocols:
        cells = [c for c in state.results.under(protocol).cells if c.key.task == DISTANCE and c.deposits()]
        able = [cell for cell in cells if any(layer.kind != "no-skill" for layer in cell.deposits())]
        single = [cell for cell in able if any(layer.kind == "single-head" for layer in cell.deposits())]
        if cells:
            names = listed(name(protocol, label) for label in ordered(cell.key.label for cell in single))
            rope = "rope" in {cell.key.label for cell in able} - {cell.key.label for cell in single}
            without = f" {name(protocol, 'rope')} is not among them." if rope else ""
            sentences.append(
                f"{_under(protocol)}: {names}. That is {len(single)} of the {len(able)} models with any skill.{without}"
            )
    return sentences


def _under(protocol: Protocol) -> str:
    return PROTOCOL_NAMES[protocol].capitalize()


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
