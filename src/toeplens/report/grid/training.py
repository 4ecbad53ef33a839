"""A grid study's figure of heads during training."""

from __future__ import annotations

import numpy as np

from toeplens.report.grid.look import encoding_looks, finished, line, spreads
from toeplens.report.kit.blocks import Block, Panel, View
from toeplens.report.kit.canvas import Canvas, Look
from toeplens.report.kit.colours import GREY, PALETTE
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid
from toeplens.studies.grid import measured as heads

_LINES = {  # lines of the figure, by their key in a row of training probes
    "accuracy": Look("accuracy", "accuracy", GREY, "circle", "●"),
    "positional": Look("positional", "positional share", *PALETTE[0]),
    "symbolic": Look("symbolic", "symbolic share", *PALETTE[1]),
    "interaction": Look("interaction", "interaction share", *PALETTE[2]),
}


def training(state: Grid) -> Block:
    """The finally most important head at each checkpoint; a view per encoding, a panel per task."""
    views = []
    for label, encoding in encoding_looks(state.spec).items():
        each = [(task, finished(state, task, label)) for task in state.spec.tasks]
        found = [(task, [cell for cell in cells if followed(cell, "accuracy")]) for task, cells in each]
        panels = []
        for task, cells in ((task, cells) for task, cells in found if cells):
            canvas = Canvas(220, left=46, bottom=38)
            canvas.line_at(0, dash="dot")
            for name, one in _LINES.items():
                if drawn := spreads(pair for cell in cells for pair in followed(cell, name)):
                    line(canvas, one, drawn, name=f"{one.title} ")
            canvas.steps()
            canvas.y("", range=[-0.02, 1.04], tickformat=".0%")
            panels.append(Panel(state.spec.title_of(task), canvas.figure()))
        views.append(View.of(panels, encoding.title))
    caption = (
        "Shares of the head whose ablation increases the loss most after training, at every checkpoint, together with "
        "the accuracy of the model (on the few examples used for probing during training). Mean over seeds, each with "
        "its own head; bands show the range. For models without skill only the accuracy is shown."
    )
    signs = [one.sign for one in _LINES.values()]
    return Block("training", "The most important head during training", caption, views, "medium", signs)


def followed(cell: CellResult, name: str) -> list[tuple[int, float]]:
    """Step and value of the accuracy, or of a share of the head with the largest ablation effect after training.

    Shares are empty for a model without skill or without significant heads, and if the encoding has no such shares.
    """
    rows = [row for row in cell.watched if row.get("accuracy") is not None]
    if name == "accuracy":
        return [(int(row["step"]), float(row["accuracy"])) for row in rows]
    lost = heads.costs(cell)
    if lost is None or not cell.skilled or not lost.any():
        return []
    at = np.unravel_index(int(lost.argmax()), lost.shape)
    return [(int(row["step"]), float(heads.array(row[name])[at])) for row in rows if row.get(name) is not None]
