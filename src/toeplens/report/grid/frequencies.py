"""A grid study's figures by frequency: scans of an option, frequency use of heads, and effects of frequencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log10

import numpy as np

from toeplens.report.grid.look import encoding_looks, finished, line, spreads, task_looks
from toeplens.report.kit.blocks import Block, Group, Panel, View
from toeplens.report.kit.canvas import Canvas, Look, legend, untagged
from toeplens.studies import CellResult
from toeplens.studies.grid import Column, Grid
from toeplens.studies.grid import measured as heads
from toeplens.studies.kit.results import SKILLED

_UNITS = {"frequencies": "rad per position"}  # of scanned options
_DECADES = 2  # wider scans have a logarithmic axis


def scans(state: Grid) -> Block:
    """Accuracy and weighted shares of the heads against each scanned option."""
    by_scan: dict[str, list[Column]] = {}
    for column in state.spec.columns():
        if column.scan:
            by_scan.setdefault(column.scan, []).append(column)
    looks = task_looks(state.spec)
    groups = []
    for label, columns in by_scan.items():
        tasks, part = [looks[task] for task in columns[0].tasks], state.spec.encodings[label]
        panels = [_scan(state, columns, tasks, title, lines) for title, lines in _SCANS.items()]
        groups.append(Group(f"{part.title or label}, by {next(iter(part.scan))}", [p for p in panels if p]))
    caption = (
        "Models that differ only in one option; one line per task, mean over seeds, bands show the range. Left: test "
        "accuracy. Right: positional (solid) and symbolic share (dashed) of the heads, weighted by ablation effect, of "
        f"models with at least {SKILLED:.0%} skill. Click a task to hide or show it."
    )
    views = [View("", [group for group in groups if group.panels])]
    return Block("scan", "Scans of one option", caption, views, legend=legend(looks.values(), views))


def _rests(share: str) -> Callable[[CellResult], float]:
    return lambda cell: heads.carried(cell, share) if cell.skilled else float("nan")


Line = tuple[Callable[[CellResult], float], str, str]  # a value of a model, the dash of the line, its name
_SCANS: dict[str, list[Line]] = {
    "Test accuracy": [(lambda cell: cell.accuracy, "solid", "")],
    "Shares of the heads, weighted by ablation effect": [
        (_rests("positional"), "solid", "positional "),
        (_rests("symbolic"), "dash", "symbolic "),
    ],
}


def _scan(
    state: Grid, columns: Sequence[Column], tasks: Sequence[Look], title: str, lines: Sequence[Line]
) -> Panel | None:
    canvas = Canvas(300, left=50)
    values = sorted((float(column.value or 0), column.label) for column in columns)
    for one in tasks:
        for figure, dash, name in lines:
            found = spreads((at, figure(cell)) for at, label in values for cell in finished(state, one.key, label))
            if found:
                line(canvas, one, found, dash=dash, name=name)
    if not canvas.traces:
        return None
    low, high = values[0][0], values[-1][0]
    if low > 0 and log10(high / low) > _DECADES:
        low, high = log10(low), log10(high)
        canvas.x(type="log", dtick=1)
    room = 0.04 * (high - low) or 1.0
    option = next(iter(state.spec.encodings[columns[0].scan].scan))
    canvas.x(f"{option}, {_UNITS[option]}" if option in _UNITS else option, range=[low - room, high + room])
    canvas.y("", range=[-0.02, 1.04], tickformat=".0%")
    return Panel(title, canvas.figure())


def centres(state: Grid) -> Block:
    """Each head of a rotary encoding: centre of its frequency use against its positional share."""
    looks = task_looks(state.spec)
    scanned = {column.label for column in state.spec.columns() if column.scan}
    sides = (("Encodings with several frequencies", False), ("Scans, one value per model", True))
    panels = []
    for title, scan in sides:
        canvas = Canvas(320, left=50)
        for one in looks.values():
            models = [
                cell
                for cell in state.results.cells
                if cell.key.task == one.key and cell.skilled and (cell.key.label in scanned) == scan
            ]
            points = [point for cell in models for point in _centred(state, cell)]
            if not points:
                continue
            x, y, lost, where = zip(*points, strict=True)
            one.add(
                canvas,
                x,
                y,
                "%{customdata[0]}<br>centre %{x:.2f} octaves, positional %{y:.2f}<br>"
                "%{customdata[1]:.1f} points accuracy drop when ablated",
                marker=one.heads(lost),
                customdata=list(zip(where, [round(100 * drop, 1) for drop in lost], strict=True)),
            )
        canvas.x("centre of frequency use (octaves)")
        canvas.y("positional share", range=[-0.04, 1.04])
        if canvas.traces:
            panels.append(Panel(title, canvas.figure()))
    caption = (
        "Heads with rotation, of models with skill: mean log₂ frequency, weighted by the share of the logits’ variance "
        "in each frequency, against the positional share. 0 octaves are 1 rad per position, −1 octave is half of that. "
        "Larger marks have a larger accuracy drop when ablated. Click a task to hide or show it."
    )
    views = [View.of(panels)]
    signs = legend(looks.values(), views)
    return Block("centre", "Frequency use and positional share", caption, views, legend=signs)


def _centred(state: Grid, cell: CellResult) -> list[tuple[float, float, float, str]]:
    """Centre, positional share, accuracy drop and name of each head with known values."""
    use, shares, lost = cell.measure("frequency"), cell.measure("behaviour"), heads.drops(cell)
    if use is None or shares is None or lost is None:
        return []
    title = next(column.title for column in state.spec.columns() if column.label == cell.key.label)
    return [
        (
            round(float(use.centre[head]), 3),
            round(float(shares.positional[head]), 4),
            float(lost[head]),
            f"{untagged(title)}, seed {cell.key.seed}, layer {head[0] + 1}, head {head[1] + 1}",
        )
        for head in np.ndindex(lost.shape)
        if np.isfinite(use.centre[head]) and np.isfinite(shares.positional[head])
    ]


def bands(state: Grid) -> Block:
    """The effect of freezing each frequency, a panel per encoding."""
    tasks, panels = task_looks(state.spec), []
    for label, encoding in encoding_looks(state.spec).items():
        canvas = Canvas(230, left=62, bottom=40)
        for one in tasks.values():
            skilled = [cell for cell in finished(state, one.key, label) if cell.skilled]
            if found := spreads(pair for cell in skilled for pair in worth(cell).items()):
                line(canvas, one, found)
        if canvas.traces:
            canvas.x("rad per position", type="log", dtick=1)
            canvas.y("nats", rangemode="tozero")
            panels.append(Panel(encoding.title, canvas.figure(), tint=encoding.tint, glyph=encoding.glyph))
    caption = (
        "Increase of the cross-entropy when one frequency of one head is frozen, summed over heads and layers. One "
        "line per task, mean over models with skill, bands show the range over seeds. Frequencies of 0 are not shown. "
        "Each panel has its own scale. Click a task to hide or show it; the axis adapts to the others."
    )
    views = [View.of(panels)]
    return Block("bands", "Effect of freezing each frequency", caption, views, "medium", legend(tasks.values(), views))


def worth(cell: CellResult) -> dict[float, float]:
    """Loss increase in nats per frequency above 0, summed over the heads that have it; empty if not measured."""
    lost, use = cell.measure("bands"), cell.measure("frequency")
    total: dict[float, float] = {}
    if lost is None or use is None:
        return total
    for drops, frequencies in zip(lost.drops, use.frequencies, strict=True):
        for head, turning in zip(drops, frequencies, strict=True):
            for drop, frequency in zip(head, turning, strict=True):
                if frequency > 0 and np.isfinite(drop):
                    total[frequency] = total.get(frequency, 0.0) + drop
    return total
