"""The plane of positional and symbolic shares: every head of a grid study's models, and every model."""

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
    """The encodings of which no head has a mark in `plane`, by their titles, and why."""
    missing = []
    for label, one in encoding_looks(state.spec).items():
        cells = [cell for cell in state.results.cells if cell.key.label == label and cell.status == "complete"]
        skilled = [cell for cell in cells if cell.skilled]
        if any(_points(cell, "") for cell in skilled):
            continue
        reasons = list(dict.fromkeys(why for cell in cells if (why := cell.reason("behaviour"))))
        if not cells:
            why = "no finished model"
        elif reasons:
            why = " ".join(reasons)
        elif "behaviour" not in state.spec.measures:
            why = "the study does not ask for the measure behaviour"
        elif not skilled:
            why = f"no model with {SKILLED:.0%} or more of the skill"
        else:
            why = "not measured, or logits that do not vary"
        missing.append((one.title, why.rstrip(".")))
    return missing


def plane(state: Grid) -> Block:
    """All heads of models with skill, and what the skill of each model rests on; a view for all tasks and for each."""
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
        drawn = {"Each head": _heads(state, looks, mine), "What the skill rests on": _models(state, looks, mine)}
        panels = [Panel(title, canvas.figure()) for title, canvas in drawn.items() if len(canvas.traces) > 1]
        views.append(View.of(panels, "all tasks" if len(some) > 1 else state.spec.title_of(some[0])))
    used = {label for (_, label), found in models.items() if any(_points(cell, "") for cell in found)}
    caption = (
        "How much of the variance of a head’s logits is a matter of where the keys are (positional), of what they are "
        "(symbolic), and of the two working together (interaction); the three add up to 1, so that a head "
        "lies in the triangle, and its distance from the slanted side is its interaction. Left: each head, the larger "
        "the more accuracy is lost without it. Right: a mark is an encoding on a task, the mean over its heads, each "
        "weighed by what the loss rises by without it, and over seeds (rings, where one task is shown). Models whose "
        f"skill is under {SKILLED:.0%}, and scans, are left out. Press an encoding to hide or show it."
    )
    signs = [one.sign for label, one in looks.items() if label in used]
    return Block("plane", "Positional, symbolic, or both at once", caption, views, legend=signs)


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
            "interaction %{customdata[1]:.2f}<br>%{customdata[2]:.1f} points lost without it",
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
