"""Scatter plots of positional and symbolic shares: every head of a grid study's models, and every model."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from toeplens.report.grid.look import Spread, encoding_looks, finished
from toeplens.report.kit.blocks import Block, Panel, View
from toeplens.report.kit.canvas import Canvas, Look, triangle, untagged
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid
from toeplens.studies.grid import measured as heads
from toeplens.studies.kit.results import SKILLED

_SHARES = ("positional", "symbolic")
_HALF = 0.5


def without_shares(state: Grid) -> list[tuple[str, str]]:
    """Titles of the encodings without marks in `plane`, and the reasons."""
    missing = []
    for label, one in encoding_looks(state.spec).items():
        cells = [cell for cell in state.results.cells if cell.key.label == label and cell.status == "complete"]
        skilled = [cell for cell in cells if cell.skilled]
        if any(_points(cell, "") for cell in skilled):
            continue
        reasons = list(dict.fromkeys(why for cell in cells if (why := cell.reason("behaviour"))))
        if not cells:
            why = "no model is finished"
        elif reasons:
            why = " ".join(reasons)
        elif "behaviour" not in state.spec.measures:
            why = "the study does not include the measure behaviour"
        elif not skilled:
            why = f"no model has at least {SKILLED:.0%} skill"
        else:
            why = "not measured, or the logits do not vary"
        missing.append((one.title, why.rstrip(".")))
    return missing


def plane(state: Grid) -> Block:
    """All heads of models with skill, and means weighted by ablation effect; a view for all tasks and for each."""
    looks = encoding_looks(state.spec)
    models = {
        (task, label): [cell for cell in finished(state, task, label) if cell.skilled]
        for task in state.spec.tasks
        for label in looks
    }
    shown = [task for task in state.spec.tasks if any(models[task, label] for label in looks)]
    views = []
    for some in ([shown] if len(shown) > 1 else []) + [[task] for task in shown]:
        mine = {pair: found for pair, found in models.items() if pair[0] in some}
        drawn = {
            "Each head": _heads(state, looks, mine),
            "Mean over heads, weighted by ablation effect": _models(state, looks, mine),
        }
        panels = [Panel(title, canvas.figure()) for title, canvas in drawn.items() if len(canvas.traces) > 1]
        views.append(View.of(panels, "all tasks" if len(some) > 1 else state.spec.title_of(some[0])))
    used = {label for (_, label), found in models.items() if any(_points(cell, "") for cell in found)}
    caption = (
        "Shares of the variance of a head’s logits that are explained by the position of keys (positional), by their "
        "content (symbolic), and only by both together (interaction). The three add up to 1; the distance from the "
        "slanted side is the interaction. Left: one mark per head; larger marks have a larger accuracy drop when "
        "ablated. Right: one mark per encoding and task, the mean over heads weighted by ablation effect on the loss, "
        "and over seeds (rings: single seeds, if one task is shown). The shares describe logits, not function: heads "
        f"without an ablation effect often look symbolic. Models with less than {SKILLED:.0%} skill and scans are not "
        "shown. Click an encoding to hide or show it."
    )
    signs = [one.sign for label, one in looks.items() if label in used]
    return Block("plane", "Positional and symbolic shares", caption, views, legend=signs)


def _heads(state: Grid, looks: dict[str, Look], models: dict[tuple[str, str], list[CellResult]]) -> Canvas:
    canvas = triangle()
    for label, one in looks.items():
        points = [
            point
            for (task, of), found in models.items()
            if of == label
            for cell in found
            for point in _points(cell, untagged(state.spec.title_of(task)))
        ]
        if not points:
            continue
        x, y, between, lost, where = zip(*points, strict=True)
        one.add(
            canvas,
            x,
            y,
            "%{customdata[0]}<br>positional %{x:.2f}, symbolic %{y:.2f}, "
            "interaction %{customdata[1]:.2f}<br>%{customdata[2]:.1f} points accuracy drop when ablated",
            marker=one.heads(lost),
            customdata=list(zip(where, between, [round(100 * drop, 1) for drop in lost], strict=True)),
        )
    return canvas


Point = tuple[float, float, float, float, str]  # positional, symbolic, interaction, lost, where


def _points(cell: CellResult, task: str) -> list[Point]:
    """The heads of a model whose logits vary."""
    shares, lost = cell.measure("behaviour"), heads.drops(cell)
    if shares is None or lost is None:
        return []
    return [
        (
            round(float(shares.positional[at]), 4),
            round(float(shares.symbolic[at]), 4),
            round(float(shares.interaction[at]), 4),
            float(lost[at]),
            f"{task}, seed {cell.key.seed}, layer {at[0] + 1}, head {at[1] + 1}",
        )
        for at in np.ndindex(lost.shape)
        if np.isfinite(shares.positional[at])
    ]


def _models(state: Grid, looks: dict[str, Look], models: dict[tuple[str, str], list[CellResult]]) -> Canvas:
    canvas = triangle()
    one_task = len({task for task, _ in models}) == 1
    for label, one in looks.items():
        rows = []
        for (task, of), found in models.items():
            if of == label:
                each = [tuple(heads.carried(cell, share) for share in _SHARES) for cell in found]
                if each := [pair for pair in each if np.isfinite(pair).all()]:
                    rows.append((state.spec.title_of(task), each))
        if not rows:
            continue
        means = [np.mean(each, axis=0) for _, each in rows]
        if one_task and len(rows[0][1]) > 1:
            x, y = zip(*rows[0][1], strict=True)
            canvas.marks(
                _rounded(x),
                _rounded(y),
                {"color": one.tint, "symbol": "circle-open", "size": 6},
                hoverinfo="skip",
                meta=one.key,
            )
        one.add(
            canvas,
            _rounded(mean[0] for mean in means),
            _rounded(mean[1] for mean in means),
            "%{customdata[0]}<br>positional %{customdata[1]}<br>symbolic %{customdata[2]}",
            marker={"size": 10, "opacity": 0.85},
            customdata=[
                [untagged(title), *(Spread.of(values).told() for values in zip(*each, strict=True))]
                for title, each in rows
            ],
        )
    return canvas


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), 4) for value in values]
