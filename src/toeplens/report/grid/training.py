"""A grid study's figure of what heads become during training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from toeplens.report.grid.frequencies import line
from toeplens.report.grid.look import Spread, encoding_looks, finished
from toeplens.report.kit.blocks import Block, Group, Panel, View
from toeplens.report.kit.canvas import Canvas
from toeplens.report.kit.plane import Look
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid
from toeplens.studies.grid import measured as heads

_LINES = {  # what is drawn: its key in a watched row
    "accuracy": Look("accuracy", "accuracy", "#858b95", "circle", "●"),
    "positional": Look("positional", "positional share", "#2f6fe0", "circle", "●"),
    "symbolic": Look("symbolic", "symbolic share", "#de7a00", "square", "■"),
    "interaction": Look("interaction", "interaction share", "#1d9a5b", "diamond", "◆"),
}


def training(state: Grid) -> Block:
    """What the head that ends up mattering most is like at each moment; a view an encoding, a panel a task."""
    views = []
    for label, encoding in encoding_looks(state.spec).items():
        panels = []
        for task in state.spec.tasks:
            cells = [cell for cell in finished(state, task, label) if any(_has(row) for row in cell.watched)]
            if cells:
                panels.append(_panel(state.spec.title_of(task), cells))
        if panels:
            views.append(View(encoding.title, [Group("", panels)]))
    caption = (
        "The head without which most accuracy is lost after training, followed from the start: its shares, beside the "
        "whole model’s accuracy (on the few examples that are looked at during training). Means over seeds, each with "
        "a head of its own; the bands are the range. For models without skill only the accuracy is drawn."
    )
    return Block("training", "When heads take sides", caption, views, "medium", [one.sign for one in _LINES.values()])


def _has(row: dict[str, Any]) -> bool:
    return row.get("accuracy") is not None


def _panel(title: str, cells: Sequence[CellResult]) -> Panel:
    canvas, told = Canvas(220, left=46, bottom=38), []
    canvas.line_at(0, dash="dot")
    for name, one in _LINES.items():
        found: dict[int, list[float]] = {}
        for cell in cells:
            for step, value in followed(cell, name):
                found.setdefault(step, []).append(value)
        spreads = [(step, Spread.of(found[step])) for step in sorted(found)]
        spreads = [(step, spread) for step, spread in spreads if spread.count]
        if spreads:
            line(canvas, one, spreads, name=f"{one.title} ")
            (start, first), (end, last) = spreads[0], spreads[-1]
            told.append(f"{one.title} {first.mean:.0%} at step {start}, {last.mean:.0%} at step {end}")
    canvas.x("training step", rangemode="tozero", nticks=5)
    canvas.y("", range=[-0.02, 1.04], tickformat=".0%")
    return Panel(title, canvas.figure(), f"{'; '.join(told)}. {len(cells)} seed{'s' if len(cells) > 1 else ''}.")


def followed(cell: CellResult, name: str) -> list[tuple[int, float]]:
    """Step and value: the accuracy, or a share of the head without which most is lost in the end.

    Empty for a share of a model without skill, or where the encoding has no such shares.
    """
    rows = [row for row in cell.watched if _has(row)]
    if name == "accuracy":
        return [(int(row["step"]), float(row["accuracy"])) for row in rows]
    lost = heads.drops(cell)
    if lost is None or not cell.skilled:
        return []
    at = np.unravel_index(int(lost.argmax()), lost.shape)
    return [(int(row["step"]), float(heads.array(row[name])[at])) for row in rows if row.get(name) is not None]
