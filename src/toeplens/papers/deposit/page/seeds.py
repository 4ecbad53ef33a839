"""The figures of gradient seeds: does a positional gradient survive the mean over a batch, and in which head?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go

from toeplens.lens import SeedStrength
from toeplens.lens.gradients.signal import LEVELS, Level, margins
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.factors import Values
from toeplens.papers.deposit.page.look import (
    TASKS,
    beside,
    colour,
    layer_signs,
    legend,
    marker,
    models,
    name,
)
from toeplens.report.kit.blocks import Block, Sign, View
from toeplens.report.kit.canvas import Canvas, plain
from toeplens.report.kit.colours import layer_look
from toeplens.report.kit.dots import Series, dots
from toeplens.studies import CellResult

_LEVELS: dict[Level, str] = {
    "parameters": "gradient of the head’s weights that moves its positional effect",
    "logits": "gradient at the logits, by distance",
}
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
Records = list[tuple[str, dict[int, SeedStrength]]]  # label: record by seed
ByLayer = Callable[[SeedStrength], np.ndarray]


def strength_of(cell: CellResult) -> SeedStrength | None:
    """The seed strength of a cell; None where it was not measured."""
    found = cell.measure("seed")
    return found and found.strength


def _views(state: Reproduction, draw: Callable[[Protocol, Records, Level], go.Figure], what: str = "") -> list[View]:
    """A view a task and level, a panel a protocol that has the level's records."""
    views = []
    for task, title in TASKS.items():
        for level in LEVELS[::-1]:

            def one(protocol: Protocol, task: str = task, level: Level = level) -> go.Figure | None:
                def known(cell: CellResult) -> bool:
                    record = strength_of(cell)
                    return record is not None and level in record.levels

                found = models(state, protocol, task, known)
                records = [(label, {c.key.seed: c.measure("seed").strength for c in cells}) for label, cells in found]
                return draw(protocol, records, level) if records else None

            views.append(beside(state, one, f"{title}: {_LEVELS[level]}{what}"))
    return views


def strength(state: Reproduction) -> Block:
    """Signal to noise of the positional gradient by batch size, in the first layer."""
    labels = set[str]()

    def draw(protocol: Protocol, found: Records, level: Level) -> go.Figure:
        labels.update(label for label, _ in found)
        return by_size(protocol, found, level)

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

    def draw(protocol: Protocol, found: Records, level: Level) -> go.Figure:
        return _lines(protocol, found, lambda one: one.levels[level].layers.exponent, "exponent", -0.5)

    caption = (
        "The slope of signal to noise against batch size on logarithmic axes: −1/2 (dashed) is pure cancellation, 0 a "
        "gradient that is the same in every example. Small rings are seeds, the marker their mean, the bar its 95% "
        "interval."
    )
    title = "Exponents by encoding and layer"
    return Block("seed-exponent", title, caption, _views(state, draw), legend=_signs(state))


def lead(state: Reproduction) -> Block:
    """How far the first head's signal is ahead of the second's, layer by layer."""
    views = []
    for what, of, axis in (
        ("lead of the first head over the second", lambda signal: margins(signal).ratio, "first over second"),
        ("lead of a layer over that of the next", lambda signal: margins(signal).gamma, "lead over next layer’s lead"),
    ):

        def draw(protocol: Protocol, found: Records, level: Level, of=of, axis=axis) -> go.Figure:
            return _lines(protocol, found, lambda one: of(one.levels[level].signal), axis, 1.0)

        views += _views(state, draw, f"; {what}")
    caption = (
        "In each layer the size of the mean positional gradient of the head that has the largest, over that of the "
        "second; and that lead over the lead in the next layer, which the papers say is above 1 (dashed)."
    )
    return Block("seed-lead", "Which head is ahead, and by how much", caption, views, legend=_signs(state))


def _sizes(found: Records) -> list[int]:
    return list(next(iter(found[0][1].values())).sizes)


def by_size(protocol: Protocol, found: Records, level: Level) -> go.Figure:
    """Signal to noise by batch size, a line an encoding; undefined curves are left out."""
    canvas, sizes = Canvas(300), _sizes(found)
    canvas.straight(sizes, [n**-0.5 for n in sizes], width=1.5)
    for label, records in found:
        canvas.lines(
            sizes,
            plain(_mean_curve(records, level), 5),
            colour(label),
            f"<b>{name(protocol, label)}</b><br>%{{x}} examples: %{{y:.3f}}<extra></extra>",
            marker={"symbol": marker(label), "size": 7},
            meta=label,
        )
    canvas.x("examples in the mean", type="log", tickvals=sizes[:: max(1, len(sizes) // 6)])
    canvas.y("signal to noise", type="log", tickvals=_TICKS, ticktext=[f"{tick:g}" for tick in _TICKS])
    return canvas.figure()


def _mean_curve(records: dict[int, SeedStrength], level: Level) -> np.ndarray:
    return np.mean([record.levels[level].layers.strength[0] for record in records.values()], axis=0)


def _lines(protocol: Protocol, found: Records, of: ByLayer, axis: str, mark: float) -> go.Figure:
    """Dots, a line an encoding and a series a layer."""
    each = [{seed: of(record) for seed, record in records.items()} for _, records in found]
    lines = [name(protocol, label) for label, _ in found]
    series = []
    for layer in range(max(len(layers) for seeds in each for layers in seeds.values())):
        values: list[Values] = [
            {seed: float(layers[layer]) for seed, layers in seeds.items() if np.isfinite(layers[layer])}
            for seeds in each
        ]
        tints = [layer_look(layer)[0]] * len(values)
        series.append(Series(f"layer-{layer + 1}", f"layer {layer + 1}<br>", "circle", values, tints))
    return dots(lines, series, axis, digits=2, marks=(mark,))


def _signs(state: Reproduction) -> list[Sign]:
    records = [record for cell in state.results.cells if (record := strength_of(cell))]
    depth = max((len(level.signal) for record in records for level in record.levels.values()), default=0)
    return layer_signs(depth, dots=True)
