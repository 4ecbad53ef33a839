"""A grid study's figures of heads: positional and symbolic shares of all heads and models, and during training."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from toeplens.report.grid.look import Spread, encoding_looks, finished, line, signs, spreads
from toeplens.report.kit.blocks import Block, Panel, View
from toeplens.report.kit.canvas import Canvas, Look, triangle, untagged
from toeplens.report.kit.colours import GREY, PALETTE
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid
from toeplens.studies.grid import measured as heads
from toeplens.studies.kit.results import SKILLED

Models = dict[tuple[str, Look], list[CellResult]]  # by task and encoding


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
    models: Models = {
        (task, one): [cell for cell in finished(state, task, label) if cell.skilled]
        for task in state.spec.tasks
        for label, one in looks.items()
    }
    shown = [task for task in state.spec.tasks if any(models[task, one] for one in looks.values())]
    views = []
    for some in ([shown] if len(shown) > 1 else []) + [[task] for task in shown]:
        mine = {pair: found for pair, found in models.items() if pair[0] in some}
        drawn = {
            "Each head": _heads(state, looks.values(), mine),
            "Mean over heads, weighted by ablation effect": _models(state, looks.values(), mine),
        }
        panels = [Panel(title, canvas.figure()) for title, canvas in drawn.items() if len(canvas.traces) > 1]
        views.append(View.of(panels, "all tasks" if len(some) > 1 else state.spec.title_of(some[0])))
    caption = (
        "Shares of the variance of a head’s logits that are explained by the position of keys (positional), by their "
        "content (symbolic), and only by both together (interaction). The three add up to 1; the distance from the "
        "slanted side is the interaction. Left: one mark per head; larger marks have a larger accuracy drop when "
        "ablated. Right: one mark per encoding and task, the mean over heads weighted by ablation effect on the loss, "
        "and over seeds (rings: single seeds, if one task is shown). The shares describe logits, not function: heads "
        f"without an ablation effect often look symbolic. Models with less than {SKILLED:.0%} skill and scans are not "
        "shown. Click an encoding to hide or show it."
    )
    return Block("plane", "Positional and symbolic shares", caption, views, legend=signs(state, views))


def _heads(state: Grid, looks: Iterable[Look], models: Models) -> Canvas:
    canvas = triangle()
    for one in looks:
        points = [
            point
            for (task, of), found in models.items()
            if of == one
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


def _models(state: Grid, looks: Iterable[Look], models: Models) -> Canvas:
    canvas = triangle()
    one_task = len({task for task, _ in models}) == 1
    for one in looks:
        rows = []
        for (task, of), found in models.items():
            if of == one:
                each = [tuple(heads.carried(cell, share) for share in ("positional", "symbolic")) for cell in found]
                if each := [pair for pair in each if np.isfinite(pair).all()]:
                    rows.append((state.spec.title_of(task), each))
        if not rows:
            continue
        means = [np.mean(each, axis=0) for _, each in rows]
        if one_task and len(rows[0][1]) > 1:
            x, y = zip(*rows[0][1], strict=True)
            ring = {"color": one.tint, "symbol": "circle-open", "size": 6}
            canvas.marks(_rounded(x), _rounded(y), ring, hoverinfo="skip", meta=one.key)
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


# ---- during training -------------------------------------------------------------------------------------------------

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
        panels = []
        for task in state.spec.tasks:
            cells = [cell for cell in finished(state, task, label) if followed(cell, "accuracy")]
            if not cells:
                continue
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
    legend = [one.sign for one in _LINES.values()]
    return Block("training", "The most important head during training", caption, views, "medium", legend)


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
