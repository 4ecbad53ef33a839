"""The figures about heads: what each is worth, and what is left when several of a layer are silenced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import plotly.graph_objects as go

from toeplens.ground.words import listed, percent, points, whole
from toeplens.lens import HeadAblation
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.page.look import (
    TASKS,
    accuracy_top,
    drop_limit,
    drop_ramp,
    layer_signs,
    model_panel,
    name,
    ordered,
    plain_keys,
    protocol_title,
)
from toeplens.report.kit.blocks import Block, Group, Panel, Sign, View
from toeplens.report.kit.canvas import Canvas, plain
from toeplens.report.kit.colours import GUESS, layer_look
from toeplens.studies import CellResult, Key


def ablations_of(cells: Sequence[CellResult]) -> list[HeadAblation]:
    """The ablations of the models that have one."""
    return [cell.ablation for cell in cells if cell.ablation is not None]


def heads(state: Reproduction) -> Block:
    """Heat maps of what each head is worth (Figs. 4, 7, 8)."""
    limit = drop_limit(state)
    views = []
    for task in TASKS:
        for seed in sorted({cell.key.seed for cell in state.results.cells}):
            groups = [
                _models(state, p, task, lambda cells: heat_panel(cells[0], limit), seed) for p in state.plan.protocols
            ]
            views.append(View(f"{TASKS[task]}, seed {seed}", groups))
    caption = (
        "Percentage points of accuracy lost when the output of one head is set to zero, everything else left as it "
        "is (the paper’s Figs. 4, 7 and 8). One colour scale for all maps; hover for the 95% bootstrap interval."
    )
    return Block("heads", "What each head is worth", caption, views, "small", ramp=drop_ramp(limit))


def _each_task(state: Reproduction, draw: Callable[[list[CellResult]], Panel]) -> list[View]:
    return [View(TASKS[task], [_models(state, p, task, draw) for p in state.plan.protocols]) for task in TASKS]


def _models(
    state: Reproduction,
    protocol: Protocol,
    task: str,
    draw: Callable[[list[CellResult]], Panel],
    seed: int | None = None,
) -> Group:
    """A panel for each encoding that has ablated models, of one seed or of all; the note says which are missing."""
    keys = [key for key in plain_keys(state.plan) if (key.protocol, key.task) == (protocol, task)]
    wanted = [key for key in keys if seed in (None, key.seed)]
    found = {cell.key: cell for cell in state.results.under(protocol).cells}
    panels = []
    for label in ordered(key.label for key in wanted):
        cells = [found[key] for key in wanted if key.label == label and key in found]
        ablated = [cell for cell in cells if cell.ablation is not None]
        if ablated:
            panels.append(draw(ablated))
    unfinished = [key for key in wanted if key not in found]
    diverged = [key for key in wanted if key in found and found[key].status == "diverged"]
    notes = [_missing(keys, why) for keys, why in ((unfinished, "Not finished yet"), (diverged, "Diverged")) if keys]
    return Group(protocol_title(protocol), panels, " ".join(notes))


def _missing(keys: Sequence[Key], why: str) -> str:
    """Which models are missing: by name and seed, or how many if they are too many to read."""
    if len(keys) > 12:
        return f"{why}: {len(keys)} models."
    return f"{why}: {listed(f'{name(key.protocol, key.label)} (seed {key.seed})' for key in keys)}."


def heat_panel(cell: CellResult, limit: float) -> Panel:
    """A model's heat map."""
    return model_panel(cell, heatmap(cell, limit))


def heatmap(cell: CellResult, limit: float) -> go.Figure:
    """What silencing each head of a model costs, layer by head (Figs. 4, 7 and 8); ``limit`` ends the colour scale."""
    if cell.ablation is None:
        return Canvas(100).figure()
    drops, few = cell.ablation.drops, cell.ablation.drops.shape[1] <= 8
    layers, heads = drops.shape
    canvas = Canvas(42 + (30 if layers <= 4 else 22) * layers, left=34, right=4, top=2, bottom=34)
    canvas.heat(
        drops.tolist(),
        list(range(1, heads + 1)),
        list(range(1, layers + 1)),
        limit,
        [[_drop_words(cell.ablation, layer, head) for head in range(heads)] for layer in range(layers)],
        gap=2 if few else 1,
        numbers=[[whole(drop) for drop in row] for row in drops] if few else None,
    )
    canvas.x("head", dtick=1 if few else 5, tick0=1 if few else 0, showgrid=False, ticks="")
    canvas.y("layer", dtick=1, autorange="reversed", showgrid=False, ticks="")
    return canvas.figure()


def _drop_words(ablation: HeadAblation, layer: int, head: int) -> str:
    drop, low, high = (values[layer, head] for values in (ablation.drops, ablation.low, ablation.high))
    return (
        f"layer {layer + 1}, head {head + 1}<br><b>{points(drop)} points lost</b> [{points(low)}, {points(high)}]<br>"
        f"accuracy {percent(ablation.baseline)} → {percent(ablation.baseline - drop)}"
    )


def cumulative(state: Reproduction) -> Block:
    """What is left as a layer's heads are silenced one after another."""

    def draw(cells: list[CellResult]) -> Panel:
        return model_panel(cells[0], silencing_curves(cells, accuracy_top(state, cells[0].key.task)))

    signs = layer_signs(max((len(ablation.drops) for ablation in ablations_of(state.results.cells)), default=0))
    signs += [Sign("", "half of the skill gone", GUESS, dash="dash"), Sign("", "chance", GUESS, dash="dot")]
    caption = (
        "Accuracy with a layer’s heads silenced together, most important first; the mean over seeds. A steep first "
        "step is a single head at work; a slow fall is work spread over many."
    )
    views = _each_task(state, draw)
    return Block("cumulative", "Silencing one head after another", caption, views, "small", signs)


def silencing_curves(cells: Sequence[CellResult], top: float = 1.0) -> go.Figure:
    """Accuracy with a layer's heads silenced one by one, most important first: a line a layer, the mean over seeds.

    The dashed line is where half of the skill is gone, the dotted one chance.
    """
    canvas = Canvas(170, left=44, right=6, top=4, bottom=34)
    ablations = ablations_of(cells)
    if not ablations:
        return canvas.figure()
    curves = np.mean([ablation.cumulative for ablation in ablations], axis=0)
    baseline, chance = float(np.mean([ablation.baseline for ablation in ablations])), ablations[0].chance
    if baseline > chance:
        canvas.line_at((baseline + chance) / 2)
    canvas.line_at(chance, dash="dot")
    for layer, curve in enumerate(curves):
        tint, dash = layer_look(layer)
        canvas.lines(
            range(len(curve)),
            plain(curve, 17),
            tint,
            f"layer {layer + 1}, %{{x}} heads silenced: %{{y:.1%}}<extra></extra>",
            dash=dash,
            mode="lines+markers" if len(curve) <= 9 else "lines",
            marker={"size": 5},
            meta=f"layer-{layer + 1}",
        )
    canvas.x("heads silenced", dtick=1 if curves.shape[1] <= 9 else 4)
    canvas.percent(top)
    return canvas.figure()
