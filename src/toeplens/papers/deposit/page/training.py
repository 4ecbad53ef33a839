"""The figure of what is seen during training: when each head becomes worth something."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go

from toeplens.ground.words import percent, points
from toeplens.papers.deposit import Reproduction, title
from toeplens.papers.deposit.page.look import TASKS, colour, glyph, ordered
from toeplens.papers.deposit.page.parts import protocol_title
from toeplens.report.kit.blocks import Block, Group, Panel, Sign, View
from toeplens.report.kit.canvas import GUESS, Canvas
from toeplens.report.kit.colours import layer_look
from toeplens.studies import CellResult


def training(state: Reproduction) -> Block:
    """Each head's drop against the training step, a panel a seed."""
    cells = [cell for cell in state.results.cells if moments(cell)]
    reach = [max(max(layer) for layer in row["drops"]) for cell in cells for row in moments(cell)]
    accuracies = [row["accuracy"] for cell in cells for row in moments(cell)]
    top = max([0.1, *reach, *accuracies])
    low = min([0.0, *(min(min(layer) for layer in row["drops"]) for cell in cells for row in moments(cell))])
    views = []
    for task in TASKS:
        for label in ordered(cell.key.label for cell in cells if cell.key.task == task):
            groups = []
            for protocol in state.plan.protocols:
                mine = [c for c in cells if (c.key.protocol, c.key.task, c.key.label) == (protocol, task, label)]
                panels = [_panel(cell, (low * 1.05 - 0.02, top * 1.05)) for cell in mine]
                groups.append(Group(protocol_title(protocol), panels))
            views.append(View(f"{TASKS[task]}, {title(label)}", groups))
    depth = max((len(row["drops"]) for cell in cells for row in moments(cell)), default=0)
    looks = [layer_look(index) for index in range(depth)]
    signs = [
        Sign(f"layer-{i}", f"heads of layer {i}", tint, dash=dash) for i, (tint, dash) in enumerate(looks, start=1)
    ]
    signs.append(Sign("accuracy", "accuracy of the intact model", GUESS, dash="solid"))
    caption = (
        "Accuracy lost when one head is silenced at that moment of training, a line a head, a panel a seed; the thick "
        "grey line is the intact model’s accuracy. Where one line leaves the others, the deposit forms."
    )
    return Block("training", "When the deposit forms", caption, views, "medium", signs)


def moments(cell: CellResult) -> list[dict[str, Any]]:
    """The rows of what was watched that have drops: step, accuracy, drops [layers][heads]; what is undefined is 0."""
    return [
        {
            "step": int(row["step"]),
            "accuracy": float(row["accuracy"] or 0),
            "drops": [[float(drop or 0) for drop in layer] for layer in row["drops"]],
        }
        for row in cell.watched
        if row.get("drops")
    ]


def _panel(cell: CellResult, span: tuple[float, float]) -> Panel:
    rows = moments(cell)
    return Panel(
        f"seed {cell.key.seed}", drops(rows, span), _words(rows), colour(cell.key.label), glyph(cell.key.label)
    )


def drops(rows: Sequence[dict[str, Any]], span: tuple[float, float]) -> go.Figure:
    """Each head's drop, and the accuracy, by training step.

    Arguments
        rows  see `moments`
        span  ends of the vertical axis, so that panels share it
    """
    canvas = Canvas(200, left=44, right=8, top=4, bottom=36)
    steps = [row["step"] for row in rows]
    canvas.add(
        "scatter",
        x=steps,
        y=_rounded(row["accuracy"] for row in rows),
        mode="lines",
        line={"color": GUESS, "width": 4},
        opacity=0.55,
        meta="accuracy",
        hovertemplate="step %{x}: accuracy %{y:.1%}<extra></extra>",
    )
    for layer in range(len(rows[0]["drops"])):
        tint, dash = layer_look(layer)
        heads = range(len(rows[0]["drops"][layer]))
        # one trace a layer: its heads follow one another, with a gap between
        values = [[*_rounded(row["drops"][layer][head] for row in rows), None] for head in heads]
        canvas.add(
            "scatter",
            x=[*steps, None] * len(heads),
            y=[value for line in values for value in line],
            text=[f"layer {layer + 1}, head {head + 1}" for head in heads for _ in [*steps, None]],
            mode="lines+markers",
            line={"color": tint, "width": 1.6, "dash": dash},
            marker={"size": 3},
            meta=f"layer-{layer + 1}",
            hovertemplate="%{text}<br>step %{x}: %{y:.1%} lost<extra></extra>",
        )
    canvas.x("training step", rangemode="tozero", nticks=5)
    canvas.y("", range=list(span), tickformat=".0%")
    return canvas.figure()


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 4) for value in values]


def _words(rows: Sequence[dict[str, Any]]) -> str:
    """When the head that is worth most in the end first has half of that."""
    last = rows[-1]["drops"]
    drop, layer, head = max((value, i, h) for i, heads in enumerate(last) for h, value in enumerate(heads))
    half = next((row["step"] for row in rows if row["drops"][layer][head] >= drop / 2), rows[-1]["step"])
    return (
        f"Accuracy ends at {percent(rows[-1]['accuracy'])}. Head {head + 1} of layer {layer + 1} is worth most in the "
        f"end, {points(drop)} points; it first has half of that at step {half} of {rows[-1]['step']}."
    )
