"""The figures of gradient seeds: does a positional gradient survive the mean over a batch, and in which head?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import plotly.graph_objects as go

from toeplens.lens.ablation.margins import margins
from toeplens.lens.gradients.signal import LEVELS, Level, SeedStrength
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.factors import Values
from toeplens.papers.deposit.page.look import TASKS, colour, marker, name, ordered
from toeplens.papers.deposit.page.parts import legend, protocol_title
from toeplens.report.kit.blocks import Block, Group, Panel, Sign, View
from toeplens.report.kit.canvas import GUESS, Canvas
from toeplens.report.kit.colours import layer_look
from toeplens.report.kit.dots import Series, dots
from toeplens.studies import CellResult
from toeplens.studies.kit.results import estimated

MEASURE = "seed"
_LEVELS: dict[Level, str] = {
    "parameters": "gradient of the head’s weights that moves its positional effect",
    "logits": "gradient at the logits, by distance",
}
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
Models = list[tuple[str, list[tuple[int, SeedStrength]]]]  # label: seed and record
ByLayer = Callable[[SeedStrength], np.ndarray]


def strength_of(cell: CellResult) -> SeedStrength | None:
    """The seed strength of a cell; None where it was not measured."""
    record = cell.measures.get(MEASURE)
    return SeedStrength.from_dict(record["strength"]) if record else None


def strength(state: Reproduction) -> Block:
    """Signal to noise of the positional gradient by batch size, in the first layer."""
    labels = set[str]()

    def draw(protocol: Protocol, models: Models, level: Level) -> Panel:
        labels.update(label for label, _ in models)
        told = [f"{name(protocol, label)} {_mean_curve(records, level)[-1]:.3f}" for label, records in models]
        largest = models[0][1][0][1].sizes[-1]
        words = f"Signal to noise by batch size; at a batch of {largest}, mean over seeds: {'; '.join(told)}."
        return Panel(protocol_title(protocol), by_size(protocol, models, level), words)

    views = _views(state, draw)
    caption = (
        "Size of the mean of n examples’ positional gradients, against the size of one example’s (both axes "
        "logarithmic), in the first layer, all heads together, the mean over seeds. Along the dotted line (slope −1/2) "
        "the gradients cancel as noise does; a curve that levels off has a part that no batch averages away: a seed. "
        "An encoding without a curve has nothing in the first layer’s weights that moves position."
    )
    title = "Does a positional gradient survive the batch?"
    return Block("seed-strength", title, caption, views, legend=legend(state, labels))


def exponent(state: Reproduction) -> Block:
    """The slopes of those curves, by encoding and layer."""

    def draw(protocol: Protocol, models: Models, level: Level) -> Panel:
        figure, words = _lines(
            protocol, models, lambda record: record.levels[level].layers.exponent, "exponent", (-0.5,)
        )
        return Panel(protocol_title(protocol), figure, f"Exponents, mean over seeds. {words}")

    caption = (
        "The slope of signal to noise against batch size on logarithmic axes: −1/2 (dashed) is pure cancellation, 0 a "
        "gradient that is the same in every example. Small rings are seeds, the marker their mean, the bar its 95% "
        "interval."
    )
    views, signs = _views(state, draw), _layer_signs(state)
    return Block("seed-exponent", "Exponents by encoding and layer", caption, views, legend=signs)


def lead(state: Reproduction) -> Block:
    """How far the first head's signal is ahead of the second's, layer by layer."""
    views = []
    for what, of, axis in (
        ("lead of the first head over the second", lambda signal: margins(signal).ratio, "first over second"),
        ("lead of a layer over that of the next", lambda signal: margins(signal).gamma, "lead over next layer’s lead"),
    ):

        def draw(protocol: Protocol, models: Models, level: Level, of=of, axis=axis) -> Panel:
            figure, words = _lines(protocol, models, lambda record: of(record.levels[level].signal), axis, (1.0,))
            return Panel(protocol_title(protocol), figure, f"{axis.capitalize()}, mean over seeds. {words}")

        views += [View(f"{view.title}; {what}", view.groups) for view in _views(state, draw)]
    caption = (
        "In each layer the size of the mean positional gradient of the head that has the largest, over that of the "
        "second; and that lead over the lead in the next layer, which the papers say is above 1 (dashed)."
    )
    return Block("seed-lead", "Which head is ahead, and by how much", caption, views, legend=_layer_signs(state))


def _views(state: Reproduction, draw: Callable[[Protocol, Models, Level], Panel]) -> list[View]:
    views = []
    for task, what in TASKS.items():
        for level in LEVELS[::-1]:
            panels = []
            for protocol in state.plan.protocols:
                models = _models(state, protocol, task, level)
                if models:
                    panels.append(draw(protocol, models, level))
            views.append(View(f"{what}: {_LEVELS[level]}", [Group("", panels)]))
    return views


def _models(state: Reproduction, protocol: Protocol, task: str, level: Level) -> Models:
    under, found = state.results.under(protocol), []
    for label in ordered(under.labels(task)):
        records = [(cell.key.seed, record) for cell in under.of(task, label) if (record := strength_of(cell))]
        records = [(seed, record) for seed, record in records if level in record.levels]
        if records:
            found.append((label, records))
    return found


def by_size(protocol: Protocol, models: Models, level: Level) -> go.Figure:
    """Signal to noise by batch size, a line an encoding; undefined curves are left out."""
    canvas = Canvas(300)
    sizes = list(models[0][1][0][1].sizes)
    line = {"color": GUESS, "width": 1.5, "dash": "dot"}
    canvas.add("scatter", x=sizes, y=[n**-0.5 for n in sizes], mode="lines", line=line, hoverinfo="skip")
    for label, records in models:
        mean, text = _mean_curve(records, level), name(protocol, label)
        canvas.add(
            "scatter",
            x=sizes,
            y=[round(float(value), 5) if np.isfinite(value) else None for value in mean],
            mode="lines+markers",
            line={"color": colour(label), "width": 2},
            marker={"symbol": marker(label), "size": 7},
            meta=label,
            hovertemplate=f"<b>{text}</b><br>%{{x}} examples: %{{y:.3f}}<extra></extra>",
        )
    canvas.x("examples in the mean", type="log", tickvals=sizes[:: max(1, len(sizes) // 6)])
    canvas.y("signal to noise", type="log", tickvals=_TICKS, ticktext=[f"{tick:g}" for tick in _TICKS])
    return canvas.figure()


def _mean_curve(records: Sequence[tuple[int, SeedStrength]], level: Level) -> np.ndarray:
    return np.mean([record.levels[level].layers.strength[0] for _, record in records], axis=0)


def _lines(protocol: Protocol, models: Models, of: ByLayer, axis: str, marks: Sequence[float]) -> tuple[go.Figure, str]:
    """Dots, a line an encoding and a series a layer, and the same in words."""
    found = {label: {seed: of(record) for seed, record in records} for label, records in models}
    depth = max(len(layers) for seeds in found.values() for layers in seeds.values())
    series, told = [], []
    for layer in range(depth):
        values: list[Values] = [
            {seed: float(layers[layer]) for seed, layers in seeds.items() if np.isfinite(layers[layer])}
            for seeds in found.values()
        ]
        tint = layer_look(layer)[0]
        series.append(Series(f"layer-{layer + 1}", f"layer {layer + 1}<br>", "circle", values, [tint] * len(values)))
        means = zip(found, map(estimated, values), strict=True)
        told.append(
            f"Layer {layer + 1}: {'; '.join(f'{name(protocol, label)} {m.value:.2f}' for label, m in means if m)}."
        )
    lines = [name(protocol, label) for label in found]
    return dots(lines, series, axis, digits=2, marks=marks), " ".join(told)


def _layer_signs(state: Reproduction) -> list[Sign]:
    depths = [
        len(level.signal)
        for cell in state.results.cells
        if (record := strength_of(cell))
        for level in record.levels.values()
    ]
    looks = [layer_look(index)[0] for index in range(max(depths, default=0))]
    return [Sign(f"layer-{i}", f"layer {i}", tint, "●") for i, tint in enumerate(looks, start=1)]
