"""Figures about accuracy: final accuracies compared with the paper's, and learning curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any, Literal, get_args

import numpy as np
import plotly.graph_objects as go

from toeplens.ground.words import percent
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction, Row
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.page.look import (
    TASKS,
    accuracy_top,
    colour,
    legend,
    marker,
    name,
    ordered,
    protocol_title,
    under_headings,
)
from toeplens.report.kit.blocks import Block, Group, Panel, View
from toeplens.report.kit.canvas import Canvas, guess_levels, guesses_across, guesses_down
from toeplens.report.kit.colours import GUESS
from toeplens.studies import Results

Split = Literal["train", "test"]


def accuracy(state: Reproduction) -> Block:
    """Final accuracies, compared with the paper's Table 1."""
    groups = [
        Group(title, [panel for p in state.plan.protocols if (panel := accuracy_panel(state, p, task))])
        for task, title in TASKS.items()
    ]
    size = "" if state.plan.scale == "paper" else " (larger models)"
    caption = (
        "Final test accuracy, best on top: the mean (in per cent at the right), and each seed as a small circle. "
        f"Vertical grey bar: the paper’s Table 1{size}. Lines: chance (the most frequent label) and the length-only "
        "baseline."
    )
    return Block("accuracy", "Test accuracy by encoding", caption, [View("", groups)])


def accuracy_panel(
    state: Reproduction, protocol: Protocol, task: str, labels: Iterable[str] | None = None, title: str = ""
) -> Panel | None:
    """Accuracies of encodings (default: all); None if no model is finished."""
    wanted = None if labels is None else set(labels)
    rows = [row for row in state.table if (row.protocol, row.task) == (protocol, task)]
    rows = [row for row in rows if wanted is None or row.label in wanted]
    if not rows:
        return None
    figure = accuracies(rows, state.results, accuracy_top(state, task))
    return Panel(title or protocol_title(protocol), figure)


def learning(state: Reproduction, task: str, paper: int) -> Block:
    """Learning curves of a task; ``paper`` is the number of the paper's figure."""

    def draw(protocol: Protocol) -> list[Panel]:
        whole = [cell for cell in state.results.under(protocol).cells if Label.parse(cell.key.label).heads is None]
        cells = [cell for cell in whole if cell.key.task == task and cell.epochs]
        top = accuracy_top(state, task)
        return [
            Panel(f"{split.capitalize()} accuracy", convergence(state.results, protocol, task, split, top))
            for split in get_args(Split)
            if cells
        ]

    labels = {cell.key.label for cell in state.results.cells if cell.key.task == task}
    signs = legend(state, (label for label in labels if Label.parse(label).heads is None))
    caption = (
        f"Accuracy by epoch (the paper’s Fig. {paper}): mean over seeds, with the range as a band. A model that "
        "stopped early keeps its last value. Train accuracy is averaged during the epoch, so it lags. Click an "
        "encoding to hide or show its lines."
    )
    title = f"How fast each encoding learns {TASKS[task]}"
    return Block(f"convergence-{task}", title, caption, [under_headings(state, draw)], legend=signs)


def convergence(results: Results, protocol: Protocol, task: str, split: Split, top: float = 1.0) -> go.Figure:
    """Accuracy by epoch, one line per encoding: mean over seeds, with the range as a band (Figs. 2 and 3).

    Diverged runs are shown, up to where they diverged, only if all runs of an encoding diverged.

    Arguments
        results                the study's finished cells
        protocol, task, split  what the panel shows
        top                    upper end of the accuracy axis, shared by panels
    """
    under = results.under(protocol)
    canvas = Canvas(290)
    longest = 1
    for label in ordered(under.labels(task)):
        if Label.parse(label).heads is not None:
            continue
        cells = under.of(task, label)
        whole = [cell for cell in cells if cell.status == "complete"]
        text = name(protocol, label) if whole else f"{name(protocol, label)} (diverged)"
        curves: list[list[float]] = [
            np.array([row.get(f"{split}_accuracy") for row in cell.epochs], dtype=float).tolist()
            for cell in whole or cells
        ]
        epochs = max(([round(row["epoch"], 2) for row in cell.epochs] for cell in whole or cells), key=len, default=[])
        if whole:
            curves = [curve + curve[-1:] * (len(epochs) - len(curve)) for curve in curves]
        _add_curve(canvas, epochs, curves, label, text)
        longest = max([longest, *epochs])
    guesses_across(canvas, guess_levels(under, task), top)
    room = max(0.25, 0.02 * longest)
    canvas.x(
        "epoch",
        tickformat="d",
        range=[min(1, longest / 20) - room, longest + room],
        **({"dtick": 1} if longest <= 12 else {}),
    )
    canvas.percent(top, f"{split} accuracy")
    return canvas.figure()


def _add_curve(canvas: Canvas, epochs: list[float], curves: list[list[float]], label: str, text: str) -> None:
    """Add the mean curve over seeds, and their range."""
    length = len(epochs)
    columns = [[c[i] for c in curves if i < len(c) and isfinite(c[i])] for i in range(length)]
    if len(curves) > 1:
        low, high = ([end(column, default=None) for column in columns] for end in (min, max))
        canvas.band(epochs, low, high, colour(label), 0.1, label)
    canvas.lines(
        epochs,
        [sum(column) / len(column) if column else None for column in columns],
        colour(label),
        f"<b>{text}</b><br>epoch %{{x}}: %{{y:.1%}}<br>%{{customdata}}<extra></extra>",
        mode="lines+markers" if length <= 30 else "lines",
        marker={"symbol": marker(label), "size": 7},
        meta=label,
        customdata=[
            f"{percent(min(c))} to {percent(max(c))}, {len(c)} seeds" if len(c) > 1 else "one seed" for c in columns
        ],
        name=text,
    )


def accuracies(rows: Sequence[Row], results: Results, top: float = 1.0) -> go.Figure:
    """Final test accuracies of one protocol and task, best on top: large markers are means, small ones seeds."""
    canvas = Canvas(66 + 28 * max(1, len(rows)), right=60, top=32, bottom=26, left=20)
    names = [name(row.protocol, row.label) for row in rows]
    for row, text in zip(rows, names, strict=True):
        _add_accuracy(canvas, row, text, results)
    told = [(row.paper / 100, text) for row, text in zip(rows, names, strict=True) if row.paper is not None]
    canvas.marks(
        [value for value, _ in told],
        [text for _, text in told],
        {"symbol": "line-ns-open", "size": 15, "color": GUESS, "line": {"width": 2.5}},
        "<b>%{y}</b><br>the paper's Table 1: %{x:.2%}<extra></extra>",
        cliponaxis=False,
    )
    if rows:
        guesses_down(canvas, guess_levels(results.under(rows[0].protocol), rows[0].task))
    end = max([top, *(math.ceil(10 * value) / 10 for value, _ in told)])
    order = {"categoryorder": "array", "categoryarray": names[::-1], "range": [-0.6, len(rows) - 0.4]}
    canvas.y(**order, automargin=True, showgrid=False)
    ticks = [end * quarter / 4 for quarter in range(5)]
    texts = [f"{100 * tick:.0f}%" if quarter % 2 == 0 else "" for quarter, tick in enumerate(ticks)]
    canvas.x(range=[-0.015 * end, 1.03 * end], tickvals=ticks, ticktext=texts, tickangle=0)
    return canvas.figure()


def _add_accuracy(canvas: Canvas, row: Row, text: str, results: Results) -> None:
    cells = [cell for cell in results.under(row.protocol).of(row.task, row.label) if cell.status == "complete"]
    beside: dict[str, Any] = {"xref": "paper", "x": 1, "y": text, "xanchor": "left", "xshift": 4, "font": {"size": 12}}
    if row.accuracy is None:
        canvas.add("scatter", x=[None], y=[text], mode="markers", hoverinfo="skip")
        canvas.note("diverged", **beside)
        return
    canvas.note(percent(row.accuracy, sign=False), **beside)
    seeds = f"{percent(row.lowest)} to {percent(row.highest)} over {len(cells)} seeds" if len(cells) > 1 else "one seed"
    if len(cells) > 1:
        canvas.marks(
            [cell.accuracy for cell in cells],
            [text] * len(cells),
            {"symbol": "circle-open", "size": 6, "color": colour(row.label)},
            f"<b>{text}</b><br>seed %{{customdata}}: %{{x:.1%}}<extra></extra>",
            customdata=[cell.key.seed for cell in cells],
        )
    canvas.marks(
        [row.accuracy],
        [text],
        {"symbol": marker(row.label), "size": 11, "color": colour(row.label)},
        f"<b>{text}</b><br>%{{x:.1%}}, {seeds}<extra></extra>",
        cliponaxis=False,
    )
