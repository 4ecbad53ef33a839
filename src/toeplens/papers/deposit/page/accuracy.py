"""The figures about accuracy: final accuracies, learning curves, RoPE with a sinusoid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from toeplens.ground.words import percent
from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.page import figures
from toeplens.papers.deposit.page.look import TASKS, name, ordered
from toeplens.papers.deposit.page.parts import accuracy_top, drop_limit, drop_ramp, heat_panel, legend, protocol_title
from toeplens.papers.deposit.page.words import describe_rows
from toeplens.report.kit.blocks import Block, Group, Panel, View
from toeplens.report.kit.canvas import number
from toeplens.studies import CellResult
from toeplens.training.presets import COUNT, DISTANCE


def accuracy(state: Reproduction) -> Block:
    """Final accuracies, beside the paper's Table 1."""
    groups = []
    for task in TASKS:
        panels = []
        for protocol in state.plan.protocols:
            rows = [row for row in state.table if (row.protocol, row.task) == (protocol, task)]
            if rows:
                figure = figures.accuracies(rows, state.results, accuracy_top(state, task))
                panels.append(Panel(protocol_title(protocol), figure, describe_rows(rows)))
        groups.append(Group(TASKS[task], panels))
    size = "" if state.plan.scale == "paper" else ", from much larger models"
    caption = (
        "Final test accuracy, best on top, in per cent at the right: the mean, and with several seeds each seed as "
        f"a small circle. The upright grey bar is the paper’s Table 1{size}. Lines: what a constant guess scores "
        "(chance), and what a guess scores that knows only the text’s length."
    )
    return Block("accuracy", "Test accuracy by encoding", caption, [View("", groups)])


def _convergence(state: Reproduction, task: str, paper: int) -> Block:
    groups = []
    for protocol in state.plan.protocols:
        whole = [cell for cell in state.results.under(protocol).cells if Label.parse(cell.key.label).heads is None]
        cells = [cell for cell in whole if cell.key.task == task and cell.epochs]
        panels = []
        for split in get_args(figures.Split):
            if cells:
                figure = figures.convergence(state.results, protocol, task, split, accuracy_top(state, task))
                panels.append(Panel(f"{split.capitalize()} accuracy", figure, _last_epochs(cells, split)))
        groups.append(Group(protocol_title(protocol), panels))
    labels = {cell.key.label for cell in state.results.cells if cell.key.task == task}
    signs = legend(state, (label for label in labels if Label.parse(label).heads is None))
    caption = (
        f"Accuracy after each epoch (the paper’s Fig. {paper}); with several seeds the mean, and the range as a "
        "band. Train accuracy is counted during the epoch, so it trails. Press an encoding to hide or show its "
        "lines."
    )
    return Block(
        f"convergence-{task}",
        f"How fast each encoding learns {TASKS[task]}",
        caption,
        [View("", groups)],
        legend=signs,
    )


def convergence_distance(state: Reproduction) -> Block:
    """Learning curves of Task 1 (Fig. 2)."""
    return _convergence(state, DISTANCE, 2)


def convergence_count(state: Reproduction) -> Block:
    """Learning curves of Task 2 (Fig. 3)."""
    return _convergence(state, COUNT, 3)


def _last_epochs(cells: Sequence[CellResult], split: str) -> str:
    last = []
    for label in ordered(cell.key.label for cell in cells):
        ends = [number(c.epochs[-1].get(f"{split}_accuracy")) for c in cells if c.key.label == label and c.epochs]
        last.append(f"{name(cells[0].key.protocol, label)} {percent(float(np.mean(ends)))}")
    seeds = "" if len(last) == len(cells) else ", mean over seeds"
    return f"Curves of {split} accuracy by epoch; after the last epoch{seeds}: {', '.join(last)}."


def sinusoid(state: Reproduction) -> Block:
    """RoPE with an absolute encoding (Fig. 6)."""
    limit = drop_limit(state)
    groups = []
    for protocol in state.plan.protocols:
        pair = ("rope-alone", "rope") if protocol == "released" else ("rope", "rope-absolute")
        under = state.results.under(protocol)
        rows = [
            r for r in state.table if (r.protocol, r.task) == (protocol, DISTANCE) and r.label in (*pair, "absolute")
        ]
        maps = [
            heat_panel(cell, limit)
            for label in pair
            for cell in under.of(DISTANCE, label)[:1]
            if cell.ablation is not None
        ]
        if maps and rows:
            figure = figures.accuracies(rows, state.results, accuracy_top(state, DISTANCE))
            panels = [Panel("Test accuracy", figure, describe_rows(rows)), *maps]
            groups.append(Group(protocol_title(protocol), panels))
    caption = (
        "Task 1 with RoPE alone, and with a sinusoid added to the input as well (the paper’s Fig. 6): its "
        "accuracy, and where its heads matter (first seed; the colours of the other heat maps)."
    )
    return Block(
        "sinusoid",
        "RoPE together with an absolute encoding",
        caption,
        [View("", groups)],
        "medium",
        ramp=drop_ramp(limit),
    )
