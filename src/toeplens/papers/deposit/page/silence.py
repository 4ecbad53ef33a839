"""The figures of what silencing takes: position or the whole head, and how many heads a model can do without."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from toeplens.ground.words import points
from toeplens.lens import HeadAblation
from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.page.look import TASKS, colour, marker, name, ordered
from toeplens.papers.deposit.page.parts import legend, protocol_title
from toeplens.report.kit.blocks import Block, Group, Panel, View
from toeplens.report.kit.canvas import GUESS, Canvas
from toeplens.studies import CellResult

POSITION = "position"


def position(state: Reproduction) -> Block:
    """What each head is worth, against what its position is worth."""
    cells = [cell for cell in state.results.cells if cell.ablation is not None and taken(cell) is not None]
    limit = max([0.1, *(float(abs(pair).max()) for cell in cells for pair in _drops(cell))])
    views = []
    for task in TASKS:
        panels = []
        for protocol in state.plan.protocols:
            mine = [cell for cell in cells if (cell.key.protocol, cell.key.task) == (protocol, task)]
            if mine:
                panels.append(Panel(protocol_title(protocol), lost(mine, limit), _words(mine)))
        views.append(View(TASKS[task], [Group("", panels)]))
    caption = (
        "A marker is a head, of every seed. To the right: points lost when the head is silenced. Upwards: points lost "
        "when it keeps its content and loses its position alone (its rotation or its bias). On the dotted line the "
        "head is worth what its position is worth; at the bottom it matters for something else. Encodings that give "
        "position at the input alone have nothing to take from a single head."
    )
    signs = legend(state, (cell.key.label for cell in cells))
    return Block("position", "Was the head lost, or its position?", caption, views, legend=signs)


def taken(cell: CellResult) -> HeadAblation | None:
    """What is lost when position is taken from each head; None where it was not measured."""
    record = cell.measures.get(POSITION)
    return HeadAblation.from_dict(record) if record else None


def _drops(cell: CellResult) -> tuple[np.ndarray, np.ndarray]:
    found = taken(cell)
    assert cell.ablation is not None
    assert found is not None
    return cell.ablation.drops, found.drops


def lost(cells: Sequence[CellResult], limit: float) -> go.Figure:
    """Points lost without a head's position against points lost without the head; a trace an encoding."""
    canvas = Canvas(330)
    ends = [-100 * limit, 100 * limit]
    line = {"color": GUESS, "width": 1, "dash": "dot"}
    canvas.add("scatter", x=ends, y=ends, mode="lines", line=line, hoverinfo="skip")
    for label in ordered(cell.key.label for cell in cells):
        heads = [
            (100 * float(whole[place]), 100 * float(alone[place]), cell.key.seed, place)
            for cell in cells
            if cell.key.label == label
            for whole, alone in [_drops(cell)]
            for place in np.ndindex(whole.shape)
        ]
        text = name(cells[0].key.protocol, label)
        canvas.add(
            "scatter",
            x=[round(head[0], 2) for head in heads],
            y=[round(head[1], 2) for head in heads],
            mode="markers",
            marker={"symbol": marker(label), "size": 7, "color": colour(label), "opacity": 0.75},
            text=[
                f"<b>{text}</b>, seed {seed}, layer {place[0] + 1}, head {place[1] + 1}<br>"
                f"head silenced: {points(x / 100)} points<br>position taken: {points(y / 100)} points"
                for x, y, seed, place in heads
            ],
            hovertemplate="%{text}<extra></extra>",
            meta=label,
        )
    span = {"range": [-12 * limit, 104 * limit]}
    canvas.x("head silenced: points lost", **span)
    canvas.y("position taken: points lost", **span)
    return canvas.figure()


def _words(cells: Sequence[CellResult]) -> str:
    parts = []
    for label in ordered(cell.key.label for cell in cells):
        pairs = [_drops(cell) for cell in cells if cell.key.label == label]
        whole, alone = (float(np.mean([pair[side].max() for pair in pairs])) for side in (0, 1))
        parts.append(f"{name(cells[0].key.protocol, label)} {points(whole)} and {points(alone)}")
    return (
        f"Largest loss by silencing a head, and by taking its position, in points, mean over seeds: {'; '.join(parts)}."
    )
