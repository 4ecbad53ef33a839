"""Figures about heads: ablation effects of single heads and of sets of heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import plotly.graph_objects as go

from toeplens.engine.circuit import KEYS, PLACES, Circuit
from toeplens.ground.words import listed, percent, points, whole
from toeplens.lens import HeadAblation, HeadSets
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.page.look import (
    TASKS,
    Models,
    accuracy_top,
    beside,
    by_task,
    colour,
    drop_limit,
    drop_ramp,
    layer_signs,
    legend,
    marker,
    model_panel,
    models,
    name,
    ordered,
    plain_keys,
    protocol_title,
    under_headings,
)
from toeplens.report.kit.blocks import Block, Group, Panel, Sign, View
from toeplens.report.kit.canvas import Canvas, plain
from toeplens.report.kit.colours import GUESS, layer_look
from toeplens.report.kit.dots import Series, dots
from toeplens.studies import CellResult, Key
from toeplens.training.presets import DISTANCE


def ablations_of(cells: Sequence[CellResult]) -> list[HeadAblation]:
    """The ablations of the models, without None."""
    return [cell.ablation for cell in cells if cell.ablation is not None]


def heads(state: Reproduction) -> Block:
    """Heat maps of the ablation effect of each head (Figs. 4, 7, 8)."""
    limit = drop_limit(state)
    views = []
    for task in TASKS:
        for seed in sorted({cell.key.seed for cell in state.results.cells}):
            groups = [
                _models(state, p, task, lambda cells: heat_panel(cells[0], limit), seed) for p in state.plan.protocols
            ]
            views.append(View(f"{TASKS[task]}, seed {seed}", groups))
    caption = (
        "Accuracy drop in percentage points when the output of one head is set to zero (the paper’s Figs. 4, 7 and 8). "
        "All maps share one colour scale; hover for the 95% bootstrap interval."
    )
    return Block("heads", "Ablation effect of each head", caption, views, "small", ramp=drop_ramp(limit))


def _models(
    state: Reproduction,
    protocol: Protocol,
    task: str,
    draw: Callable[[list[CellResult]], Panel],
    seed: int | None = None,
) -> Group:
    """A panel per encoding with ablated models, for one seed or all; the note lists missing models."""
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
    """The missing models by name and seed, or their number if there are more than 12."""
    if len(keys) > 12:
        return f"{why}: {len(keys)} models."
    return f"{why}: {listed(f'{name(key.protocol, key.label)} (seed {key.seed})' for key in keys)}."


def heat_panel(cell: CellResult, limit: float) -> Panel:
    """A model's heat map."""
    return model_panel(cell, heatmap(cell, limit))


def heatmap(cell: CellResult, limit: float) -> go.Figure:
    """Ablation effect of each head, layer by head (Figs. 4, 7 and 8); ``limit`` is the end of the colour scale."""
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
        f"layer {layer + 1}, head {head + 1}<br>"
        f"<b>accuracy drop {points(drop)} percentage points</b> [{points(low)}, {points(high)}]<br>"
        f"accuracy {percent(ablation.baseline)} → {percent(ablation.baseline - drop)}"
    )


def cumulative(state: Reproduction) -> Block:
    """Accuracy as a layer's heads are ablated one after another."""

    def draw(cells: list[CellResult]) -> Panel:
        return model_panel(cells[0], silencing_curves(cells, accuracy_top(state, cells[0].key.task)))

    signs = layer_signs(max((len(ablation.drops) for ablation in ablations_of(state.results.cells)), default=0))
    signs += [Sign("", "half of the skill lost", GUESS, dash="dash"), Sign("", "chance", GUESS, dash="dot")]
    caption = (
        "Accuracy as the heads of a layer are ablated cumulatively, most important first; mean over seeds. A steep "
        "first step: one head carries the skill. A slow decline: the skill is distributed over many heads."
    )
    views = [View(TASKS[task], [_models(state, p, task, draw) for p in state.plan.protocols]) for task in TASKS]
    return Block("cumulative", "Cumulative ablation within a layer", caption, views, "small", signs)


def silencing_curves(cells: Sequence[CellResult], top: float = 1.0) -> go.Figure:
    """Accuracy under cumulative ablation, most important head first: one line per layer, mean over seeds.

    Dashed: half of the skill is lost. Dotted: chance.
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
            f"layer {layer + 1}, %{{x}} heads ablated: %{{y:.1%}}<extra></extra>",
            dash=dash,
            mode="lines+markers" if len(curve) <= 9 else "lines",
            marker={"size": 5},
            meta=f"layer-{layer + 1}",
        )
    canvas.x("heads ablated", dtick=1 if curves.shape[1] <= 9 else 4)
    canvas.percent(top)
    return canvas.figure()


# curve of a record: its legend and dash
_CURVES: dict[str, tuple[str, str]] = {
    "greedy": ("greedy order (largest drop next)", "solid"),
    "importance": ("by single-head ablation effect", "dash"),
    "random": ("random orders", "dot"),
}


def position(state: Reproduction) -> Block:
    """Ablation effect of each head, compared with removing only its positional information."""
    cells = [cell for cell in state.results.cells if _placed(cell)]
    limit = max([0.1, *(float(abs(pair).max()) for cell in cells for pair in _drops(cell))])

    def draw(protocol: Protocol, task: str) -> go.Figure | None:
        found = models(state, protocol, task, _placed)
        return lost(protocol, found, limit) if found else None

    caption = (
        "Each marker is a head of one seed. Horizontal: accuracy drop if the head is ablated. Vertical: accuracy drop "
        "when the head loses only its rotation or bias and keeps its content. On the dotted line both are equal; at "
        "the bottom the head matters for something other than position. Encodings that act only at the input are "
        "missing, as they cannot be removed from a single head."
    )
    signs = legend(state, (cell.key.label for cell in cells))
    title = "Does a head matter for its position or its content?"
    return Block("position", title, caption, by_task(state, draw), legend=signs)


def _placed(cell: CellResult) -> bool:
    return cell.ablation is not None and cell.measure("position") is not None


def _drops(cell: CellResult) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy drops without each head, and without only its positional information."""
    assert cell.ablation is not None
    return cell.ablation.drops, cell.measure("position").drops


def lost(protocol: Protocol, found: Models, limit: float) -> go.Figure:
    """Accuracy drop without a head's position against the drop without the head; one trace per encoding."""
    canvas = Canvas(330)
    ends = [-100 * limit, 100 * limit]
    canvas.straight(ends, ends)
    for label, cells in found:
        heads = [
            (100 * float(whole[place]), 100 * float(alone[place]), cell.key.seed, place)
            for cell in cells
            for whole, alone in [_drops(cell)]
            for place in np.ndindex(whole.shape)
        ]
        canvas.marks(
            [round(head[0], 2) for head in heads],
            [round(head[1], 2) for head in heads],
            {"symbol": marker(label), "size": 7, "color": colour(label), "opacity": 0.75},
            [
                f"<b>{name(protocol, label)}</b>, seed {seed}, layer {place[0] + 1}, head {place[1] + 1}<br>"
                f"head ablated: {points(x / 100)} percentage points<br>"
                f"position removed: {points(y / 100)} percentage points"
                for x, y, seed, place in heads
            ],
            meta=label,
        )
    span = {"range": [-12 * limit, 104 * limit]}
    canvas.x("accuracy drop, head ablated (percentage points)", **span)
    canvas.y("accuracy drop, position removed", **span)
    return canvas.figure()


def _sets(cell: CellResult) -> HeadSets | None:
    return cell.measure("sets")


def _records(cells: Sequence[CellResult]) -> list[HeadSets]:
    return [found for cell in cells if (found := _sets(cell))]


def removed(state: Reproduction) -> Block:
    """Accuracy against the number of ablated heads in the whole model."""
    views = [
        under_headings(
            state,
            lambda protocol, task=task: [
                model_panel(cells[0], curves(cells, accuracy_top(state, task)))
                for _, cells in models(state, protocol, task, _sets)
            ],
            title,
        )
        for task, title in TASKS.items()
    ]
    signs = [Sign(key, title, GUESS, dash=dash) for key, (title, dash) in _CURVES.items()]
    caption = (
        "Test accuracy as heads of all layers are ablated cumulatively, mean over seeds. A steep first step: the model "
        "depends on one head. Dotted grey line: chance."
    )
    return Block("sets", "Cumulative ablation over the whole model", caption, views, "small", signs)


def sizes(state: Reproduction) -> Block:
    """Size of a sufficient set of heads, by encoding."""
    share = " or ".join(f"{value:.0%}" for value in sorted({found.keep for found in _records(state.results.cells)}))

    def draw(protocol: Protocol, task: str) -> go.Figure | None:
        found = models(state, protocol, task, _sets)
        if not found:
            return None
        values = [{c.key.seed: float(len(c.measure("sets").sufficient)) for c in cells} for _, cells in found]
        most = max(len(record.order) for _, cells in found for record in _records(cells))
        lines = [name(protocol, label) for label, _ in found]
        series = [Series("", "", "circle", values, [colour(label) for label, _ in found])]
        return dots(lines, series, f"sufficient heads, of {most}", span=(0, 1.05 * most))

    caption = (
        f"Size of a set of heads that keeps {share} of the skill when all other heads are ablated. No head can be "
        "removed from the set, but a smaller set may exist. Rings are seeds; the error bar is the 95% interval of the "
        "mean."
    )
    return Block("sets-size", "How many heads are sufficient?", caption, by_task(state, draw))


def curves(cells: Sequence[CellResult], top: float) -> go.Figure:
    """The mean curves over seeds; missing points are interpolated."""
    canvas = Canvas(170, left=44, right=6, top=4, bottom=34)
    canvas.line_at(_records(cells)[0].chance, dash="dot")
    tint = colour(cells[0].key.label)
    for curve, (title, dash) in _CURVES.items():
        count, accuracy = _mean_curve(cells, curve)
        hover = f"%{{x}} heads ablated, {title}: %{{y:.1%}}<extra></extra>"
        canvas.lines(count, accuracy, GUESS if curve == "random" else tint, hover, dash=dash, meta=curve)
    canvas.x("heads ablated", nticks=6)
    canvas.percent(top)
    return canvas.figure()


def _mean_curve(cells: Sequence[CellResult], curve: str) -> tuple[list[int], list[float]]:
    """Numbers of ablated heads and mean accuracies over seeds (and orders), at the points that all records have."""
    rows = np.concatenate([np.atleast_2d(getattr(record, curve)) for record in _records(cells)])
    run = np.flatnonzero(np.isfinite(rows).all(0))
    return run.tolist(), [round(float(value), 4) for value in rows[:, run].mean(0)]


# ---- the circuit of the most important head --------------------------------------------------------------------------

Lines = Mapping[str, float]  # row title and its number


def circuit(state: Reproduction) -> Block:
    """Paths, attention and frequencies of each model's most important head."""
    shown: tuple[tuple[str, Callable[[Circuit], Lines]], ...] = (
        ("paths: loss increase (nats) when the reader does not see the head", _readers),
        ("attention: mean attention weight", _looks),
        ("frequencies: loss increase (nats) when one frequency is frozen", _frequencies),
    )
    used = set[str]()

    def draw(protocol: Protocol, what: str, lines_of: Callable[[Circuit], Lines]) -> go.Figure | None:
        found = models(state, protocol, DISTANCE, lambda cell: cell.measure("circuit") is not None)
        by_label = {
            label: {cell.key.seed: lines_of(cell.measure("circuit")) for cell in cells if cell.skilled}
            for label, cells in found
        }
        by_label = {label: seeds for label, seeds in by_label.items() if any(seeds.values())}
        names = list(dict.fromkeys(line for seeds in by_label.values() for told in seeds.values() for line in told))
        if not names:
            return None
        used.update(by_label)
        series = [
            Series(
                label,
                f"{name(protocol, label)}, ",
                marker(label),
                [{seed: told[line] for seed, told in seeds.items() if line in told} for line in names],
                [colour(label)] * len(names),
            )
            for label, seeds in by_label.items()
        ]
        return dots(names, series, what.partition(": ")[2], digits=2)

    views = [beside(state, partial(draw, what=what, lines_of=lines_of), what) for what, lines_of in shown]
    heads = [
        f"{name(cell.key.protocol, cell.key.label)}, seed {cell.key.seed}: layer {found.head[0] + 1}, head "
        f"{found.head[1] + 1} ({found.cost:.2f} nats)"
        for cell in state.results.cells
        if cell.skilled and (found := cell.measure("circuit")) is not None
    ]
    caption = (
        "The head with the largest ablation effect on the loss of each model. A path is cut by removing the head’s "
        "output from the residual stream for one reader only. Path effects do not add up, as paths can be redundant. "
        f"Heads: {'; '.join(heads)}."
    )
    return Block("circuit", "What the most important head does", caption, views, legend=legend(state, used))


def _readers(found: Circuit) -> Lines:
    return {
        _reader(layer - found.head[0], reader): float(value)
        for layer, reader, value in zip(found.layers, found.readers, found.paths, strict=True)
    }


def _reader(later: int, reader: str) -> str:
    if reader == "readout":
        return "the readout"
    return "FFN of the same layer" if later == 0 else f"{reader}, {later} layer{'s' if later > 1 else ''} later"


def _looks(found: Circuit) -> Lines:
    return {
        f"{query} to {key}": float(value)
        for query, row in zip(PLACES, found.attention, strict=True)
        for key, value in zip(KEYS, row, strict=True)
        if np.isfinite(value) and query != key
    }


def _frequencies(found: Circuit) -> Lines:
    return {f"frequency {place} (1: fastest)": float(value) for place, value in enumerate(found.bands, start=1)}
