"""Figures about heads: ablation effects of single heads and of sets, the deposit, gradient seeds, and training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from math import isfinite
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from toeplens.engine.circuit import KEYS, PLACES, Circuit
from toeplens.ground.words import listed, percent, points, whole
from toeplens.lens import HeadAblation, HeadSets, LayerDeposit, SeedStrength
from toeplens.lens.ablation import PEAK
from toeplens.lens.gradients import LEVELS, Level, margins
from toeplens.model import Protocol
from toeplens.papers.deposit import SCALES, Reproduction, title
from toeplens.papers.deposit.measured import END, Look, Measure, Values, concentrated, in_order, look_at
from toeplens.papers.deposit.page import style
from toeplens.papers.deposit.spec import BASES, RUNGS, Label
from toeplens.papers.deposit.spec import TASK as LADDER_TASK
from toeplens.report.kit.blocks import Block, Group, Panel, Ramp, Sign, View
from toeplens.report.kit.canvas import Canvas, Series, dots, plain
from toeplens.report.kit.colours import GUESS, layer_look
from toeplens.studies import CellResult, Key
from toeplens.studies.kit.results import estimated
from toeplens.training.presets import DISTANCE


def ablations_of(cells: Sequence[CellResult]) -> list[HeadAblation]:
    """The ablations of the models, without None."""
    return [cell.ablation for cell in cells if cell.ablation is not None]


def heads(state: Reproduction) -> Block:
    limit = style.drop_limit(state)
    views = []
    for task in style.TASKS:
        for seed in sorted({cell.key.seed for cell in state.results.cells}):
            groups = [
                _models(state, p, task, lambda cells: heatmap(cells[0], limit), seed) for p in state.plan.protocols
            ]
            views.append(View(f"{style.TASKS[task]}, seed {seed}", groups))
    return style.block("heads", views, "small", ramp=style.drop_ramp(limit))


def _models(
    state: Reproduction,
    protocol: Protocol,
    task: str,
    draw: Callable[[list[CellResult]], Panel],
    seed: int | None = None,
) -> Group:
    """A panel per encoding with ablated models, for one seed or all; the note lists missing models."""
    keys = [key for key in style.plain_keys(state.plan) if (key.protocol, key.task) == (protocol, task)]
    wanted = [key for key in keys if seed in (None, key.seed)]
    found = {cell.key: cell for cell in state.results.under(protocol).cells}
    panels = []
    for label in style.ordered(key.label for key in wanted):
        cells = [found[key] for key in wanted if key.label == label and key in found]
        ablated = [cell for cell in cells if cell.ablation is not None]
        if ablated:
            panels.append(draw(ablated))
    unfinished = [key for key in wanted if key not in found]
    diverged = [key for key in wanted if key in found and found[key].status == "diverged"]
    notes = [_missing(keys, why) for keys, why in ((unfinished, "Not finished yet"), (diverged, "Diverged")) if keys]
    return Group(style.protocol_title(protocol), panels, " ".join(notes))


def _missing(keys: Sequence[Key], why: str) -> str:
    """The missing models by name and seed, or their number if there are more than 12."""
    if len(keys) > 12:
        return f"{why}: {len(keys)} models."
    return f"{why}: {listed(f'{style.name(key.protocol, key.label)} (seed {key.seed})' for key in keys)}."


def heatmap(cell: CellResult, limit: float) -> Panel:
    """Ablation effect of each head, layer by head (Figs. 4, 7 and 8); ``limit`` is the end of the colour scale."""
    assert cell.ablation is not None
    drops, few = cell.ablation.drops, cell.ablation.drops.shape[1] <= 8
    layers, heads = drops.shape
    base, ends = cell.ablation.baseline, (drops, cell.ablation.low, cell.ablation.high)

    def told(layer: int, head: int) -> str:
        drop, low, high = (values[layer, head] for values in ends)
        return (
            f"layer {layer + 1}, head {head + 1}<br>"
            f"<b>accuracy drop {points(drop)} percentage points</b> [{points(low)}, {points(high)}]<br>"
            f"accuracy {percent(base)} → {percent(base - drop)}"
        )

    canvas = Canvas(42 + (30 if layers <= 4 else 22) * layers, left=34, right=4, top=2, bottom=34)
    canvas.heat(
        drops.tolist(),
        list(range(1, heads + 1)),
        list(range(1, layers + 1)),
        limit,
        [[told(layer, head) for head in range(heads)] for layer in range(layers)],
        gap=2 if few else 1,
        numbers=[[whole(drop) for drop in row] for row in drops] if few else None,
    )
    canvas.x("head", dtick=1 if few else 5, tick0=1 if few else 0, showgrid=False, ticks="")
    canvas.y("layer", dtick=1, autorange="reversed", showgrid=False, ticks="")
    return style.model_panel(cell, canvas.figure())


def cumulative(state: Reproduction) -> Block:
    def draw(cells: list[CellResult]) -> Panel:
        return style.model_panel(cells[0], silencing_curves(cells, style.accuracy_top(state, cells[0].key.task)))

    signs = style.layer_signs(max((len(ablation.drops) for ablation in ablations_of(state.results.cells)), default=0))
    signs += [Sign("", "half of the skill lost", GUESS, dash="dash"), Sign("", "chance", GUESS, dash="dot")]
    views = [
        View(style.TASKS[task], [_models(state, p, task, draw) for p in state.plan.protocols]) for task in style.TASKS
    ]
    return style.block("cumulative", views, "small", legend=signs)


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


def position(state: Reproduction) -> Block:
    cells = [cell for cell in state.results.cells if _placed(cell)]
    limit = max([0.1, *(float(abs(pair).max()) for cell in cells for pair in _drops(cell))])
    signs = style.legend(state, (cell.key.label for cell in cells))
    views = style.by_task(state, _placed, lambda protocol, found: lost(protocol, found, limit))
    return style.block("position", views, legend=signs)


def _placed(cell: CellResult) -> bool:
    return cell.ablation is not None and cell.measure("position") is not None


def _drops(cell: CellResult) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy drops without each head, and without only its positional information."""
    assert cell.ablation is not None
    return cell.ablation.drops, cell.measure("position").drops


def lost(protocol: Protocol, found: style.Models, limit: float) -> go.Figure:
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
            {"symbol": style.marker(label), "size": 7, "color": style.colour(label), "opacity": 0.75},
            [
                f"<b>{style.name(protocol, label)}</b>, seed {seed}, layer {place[0] + 1}, head {place[1] + 1}<br>"
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
    def draw(cells: list[CellResult]) -> go.Figure:
        return curves(cells, style.accuracy_top(state, cells[0].key.task))

    signs = [Sign(key, title, GUESS, dash=dash) for key, (title, dash) in style.TEXTS["curves"].items()]
    return style.block("sets", style.by_model(state, _sets, draw), "small", legend=signs)


def sizes(state: Reproduction) -> Block:
    share = " or ".join(f"{value:.0%}" for value in sorted({found.keep for found in _records(state.results.cells)}))

    def draw(protocol: Protocol, found: style.Models) -> go.Figure:
        values = [{c.key.seed: float(len(c.measure("sets").sufficient)) for c in cells} for _, cells in found]
        most = max(len(record.order) for _, cells in found for record in _records(cells))
        lines = [style.name(protocol, label) for label, _ in found]
        series = style.one_series((label for label, _ in found), values)
        return dots(lines, series, f"sufficient heads, of {most}", span=(0, 1.05 * most))

    return style.block("sets-size", style.by_task(state, _sets, draw), words={"share": share})


def curves(cells: Sequence[CellResult], top: float) -> go.Figure:
    canvas = Canvas(170, left=44, right=6, top=4, bottom=34)
    canvas.line_at(_records(cells)[0].chance, dash="dot")
    tint = style.colour(cells[0].key.label)
    for curve, (called, dash) in style.TEXTS["curves"].items():
        count, accuracy = _mean_curve(cells, curve)
        hover = f"%{{x}} heads ablated, {called}: %{{y:.1%}}<extra></extra>"
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
    shown: tuple[tuple[str, Callable[[Circuit], Lines]], ...] = (
        ("paths: loss increase (nats) when the reader does not see the head", _readers),
        ("attention: mean attention weight", _looks),
        ("frequencies: loss increase (nats) when one frequency is frozen", _frequencies),
    )
    used = set[str]()

    def draw(protocol: Protocol, what: str, lines_of: Callable[[Circuit], Lines]) -> go.Figure | None:
        found = style.models(state, protocol, DISTANCE, lambda cell: cell.measure("circuit") is not None)
        by_label = {
            label: {cell.key.seed: lines_of(cell.measure("circuit")) for cell in cells if cell.skilled}
            for label, cells in found
        }
        by_label = {label: seeds for label, seeds in by_label.items() if any(seeds.values())}
        names = list(dict.fromkeys(line for seeds in by_label.values() for told in seeds.values() for line in told))
        if not names:
            return None
        used.update(by_label)
        values = [
            (label, [{seed: told[line] for seed, told in seeds.items() if line in told} for line in names])
            for label, seeds in by_label.items()
        ]
        series = [style.series(protocol, *each) for each in values]
        return dots(names, series, what.partition(": ")[2], digits=2)

    views = [style.beside(state, partial(draw, what=what, lines_of=lines_of), what) for what, lines_of in shown]
    heads = [
        f"{style.name(cell.key.protocol, cell.key.label)}, seed {cell.key.seed}: layer {found.head[0] + 1}, head "
        f"{found.head[1] + 1} ({found.cost:.2f} nats)"
        for cell in state.results.cells
        if cell.skilled and (found := cell.measure("circuit")) is not None
    ]
    return style.block("circuit", views, words={"heads": "; ".join(heads)}, legend=style.legend(state, used))


def _readers(found: Circuit) -> Lines:
    lines = {}
    for layer, reader, value in zip(found.layers, found.readers, found.paths, strict=True):
        later = layer - found.head[0]
        text = f"{reader}, {later} layer{'s' if later > 1 else ''} later" if later else "FFN of the same layer"
        lines["the readout" if reader == "readout" else text] = float(value)
    return lines


def _looks(found: Circuit) -> Lines:
    return {
        f"{query} to {key}": float(value)
        for query, row in zip(PLACES, found.attention, strict=True)
        for key, value in zip(KEYS, row, strict=True)
        if np.isfinite(value) and query != key
    }


def _frequencies(found: Circuit) -> Lines:
    return {f"frequency {place} (1: fastest)": float(value) for place, value in enumerate(found.bands, start=1)}


SHARE = Ramp("0%", "100% of the skill", half=True)
Figure = Callable[[LayerDeposit], float]


def by_encoding(state: Reproduction) -> Block:
    layers = [layer[1] for cell in state.results.cells if (layer := concentrated(cell))]
    peak = max([1.0, *(layer.peak for layer in layers)]) * 1.05
    heads = max([2.0, *(layer.effective_heads for layer in layers)]) * 1.05

    def shares(_: Protocol, found: style.Models) -> go.Figure:
        return violins(found, lambda layer: layer.peak, "share of the skill", top=peak, percent=True, mark=PEAK)

    def spreads(_: Protocol, found: style.Models) -> go.Figure:
        return violins(found, lambda layer: layer.effective_heads, "effective heads", top=heads)

    kinds = (
        style.by_task(state, CellResult.deposits, shares, "share of the skill lost by ablating one head"),
        style.by_task(state, CellResult.deposits, spreads, "effective heads of that layer"),
    )
    views = [view for pair in zip(*kinds, strict=True) for view in pair]
    return style.block("deposit-encodings", views, words={"peak": f"{PEAK:.0%}"})


def violins(
    found: style.Models, figure: Figure, title: str, *, top: float, percent: bool = False, mark: float | None = None
) -> go.Figure:
    """One violin per encoding for the most concentrated layer: points are seeds, the bar is their mean.

    Arguments
        found    models with an ablation, from left to right; those without skill are counted but have no point
        figure   the number of the layer to show
        title    of its axis
        top      upper end of the axis
        percent  whether it is a share
        mark     position of a thin horizontal line (default: none)
    """
    canvas = Canvas(330, left=62, right=8, top=8, bottom=40)
    for place, (label, cells) in enumerate(found):
        able = [(cell, *layer) for cell in cells if (layer := concentrated(cell))]
        values, told = [figure(layer) for *_, layer in able], [_described(*each) for each in able]
        canvas.violin(place, values, style.colour(label), told, jitter=0.6, width=0.85, size=6, opacity=0.85)
        mean = estimated({index: value for index, value in enumerate(values) if isfinite(value)})
        if mean and mean.count > 1:
            look = {"symbol": "line-ew-open", "size": 17, "color": style.colour(label), "line": {"width": 2.5}}
            canvas.marks([place], [mean.value], look, hoverinfo="skip")
        if len(able) < len(cells):
            none = "no skill" if not able else f"{len(cells) - len(able)} of {len(cells)} without skill"
            canvas.note(none, x=place, y=0.02 * top, textangle=-90, yanchor="bottom", xshift=0 if not able else 13)
    if mark is not None:
        canvas.line_at(mark)
    texts = [style.name(cells[0].key.protocol, label) for label, cells in found]
    ticks = {"tickvals": list(range(len(texts))), "ticktext": texts, "tickangle": -60, "tickfont": {"size": 11}}
    canvas.x(range=[-0.6, len(texts) - 0.4], automargin=True, showgrid=False, ticklabeloverflow="allow", **ticks)
    canvas.y(title, range=[0, top], **({"tickformat": ".0%"} if percent else {}))
    return canvas.figure()


def _described(cell: CellResult, layer: int, deposit: LayerDeposit) -> str:
    """A layer of a model, as hover text."""
    assert cell.ablation is not None
    return (
        f"<b>{style.name(cell.key.protocol, cell.key.label)}</b>, seed {cell.key.seed}, layer {layer + 1}<br>"
        f"head {deposit.head + 1}: {deposit.peak:.0%} of the skill, "
        f"{points(float(cell.ablation.drops[layer, deposit.head]))} percentage points<br>"
        f"{deposit.kind}; effective heads {deposit.effective_heads:.1f}"
    )


def by_layer(state: Reproduction) -> Block:
    views = style.by_task(state, CellResult.deposits, lambda _, found: peaks_by_layer(found))
    return style.block("deposit-layers", views, ramp=SHARE)


def peaks_by_layer(found: style.Models) -> go.Figure:
    """Share of the skill lost by ablating each layer's most important head: one row per seed, grouped by encoding."""
    seeds = max(len(cells) for _, cells in found)
    depth = max(len(cell.deposits()) for _, cells in found for cell in cells)
    rows: list[list[float | None]] = []
    words: list[list[str]] = []
    middles: list[float] = []
    for _, cells in found:
        middles.append(len(rows) + (len(cells) - 1) / 2)
        for cell in cells:
            layers = cell.deposits() if concentrated(cell) else []
            blank = depth - len(layers)
            rows.append([layer.peak for layer in layers] + [None] * blank)
            words.append([_described(cell, i, layer) for i, layer in enumerate(layers)] + [""] * blank)
        rows.append([None] * depth)
        words.append([""] * depth)
    canvas = Canvas(round(40 + len(rows[:-1]) * (8 if seeds > 1 else 14)), left=20, right=4, top=2, bottom=40)
    xs, ys = list(range(1, depth + 1)), list(range(len(rows) - 1))
    canvas.heat(rows[:-1], xs, ys, 1, words[:-1], gap=(2, 1))
    texts = [style.name(cells[0].key.protocol, label) for label, cells in found]
    canvas.x("layer", dtick=1, showgrid=False)
    range_ = [len(rows) - 1.5, -0.5]
    canvas.y(tickvals=middles, ticktext=texts, range=range_, automargin=True, showgrid=False, tickfont={"size": 11})
    return canvas.figure()


# ---- the scale sweep -------------------------------------------------------------------------------------------------

_Shown = tuple[str, Measure, Callable[[Look], float], float, int]
_SHOWN: tuple[_Shown, ...] = (
    ("largest ablation effect, % of the skill", "accuracy", lambda look: look.largest(), 100.0, 1),
    ("largest ablation effect, nats", "loss", lambda look: look.largest(), 1.0, 2),
    ("heads with a significant ablation effect", "accuracy", lambda look: look.matter, 1.0, 0),
)
Line = tuple[str, str, str]  # row title, scale variant, checkpoint


def by_rung(state: Reproduction) -> Block:
    rungs = [rung for rung in SCALES[state.plan.scale].rungs if rung != "longer"]
    lines = [("scale unchanged", "", END), *((RUNGS[rung].title, rung, END) for rung in rungs)]
    return _sweep(state, "ladder-rungs", lines)


def by_moment(state: Reproduction) -> Block:
    return _sweep(
        state, "ladder-moments", [(text, "longer", moment) for moment, text in style.TEXTS["moments"].items()]
    )


def _sweep(state: Reproduction, id: str, lines: Sequence[Line]) -> Block:
    drawn = set[str]()

    def draw(protocol: Protocol, shown: _Shown) -> go.Figure | None:
        what, measure, figure, scale, digits = shown
        found: dict[str, list[dict[int, float]]] = {base: [] for base in BASES[protocol]}
        for base, (_, rung, moment) in product(found, lines):
            cells = state.results.under(protocol).of(LADDER_TASK, str(Label(base, None, rung)))
            looks = {cell.key.seed: look_at(cell, moment, measure) for cell in cells if in_order(cell, moment)}
            found[base].append({seed: float(figure(look)) for seed, look in looks.items() if look is not None})
        kept = [line for line in range(len(lines)) if any(values[line] for values in found.values())]
        if not kept:
            return None
        series = [
            style.series(protocol, base, [values[n] for n in kept]) for base, values in found.items() if any(values)
        ]
        drawn.update(one.key for one in series)
        return dots([lines[line][0] for line in kept], series, what, scale=scale, digits=digits)

    views = [style.beside(state, partial(draw, shown=shown), shown[0]) for shown in _SHOWN]
    return style.block(id, views, legend=style.legend(state, drawn))


# ---- gradient seeds, and training ------------------------------------------------------------------------------------


_LEVELS: dict[Level, str] = {
    "parameters": "weight gradient that changes the head’s positional effect",
    "logits": "gradient at the logits, by distance",
}
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
Records = list[tuple[str, dict[int, SeedStrength]]]  # label: record by seed
ByLayer = Callable[[SeedStrength], np.ndarray]


def strength_of(cell: CellResult) -> SeedStrength | None:
    """The seed strength of a cell; None if not measured."""
    found = cell.measure("seed")
    return found and found.strength


def _views(state: Reproduction, draw: Callable[[Protocol, Records, Level], go.Figure], what: str = "") -> list[View]:
    """One view per task and level, one panel per protocol with records of that level."""

    def known(cell: CellResult, level: Level) -> bool:
        record = strength_of(cell)
        return record is not None and level in record.levels

    def drawn(protocol: Protocol, task: str, level: Level) -> go.Figure | None:
        found = style.models(state, protocol, task, partial(known, level=level))
        records = [(label, {c.key.seed: c.measure("seed").strength for c in cells}) for label, cells in found]
        return draw(protocol, records, level) if records else None

    return [
        style.beside(state, partial(drawn, task=task, level=level), f"{named}: {_LEVELS[level]}{what}")
        for task, named in style.TASKS.items()
        for level in LEVELS[::-1]
    ]


def strength(state: Reproduction) -> Block:
    labels = set[str]()

    def draw(protocol: Protocol, found: Records, level: Level) -> go.Figure:
        labels.update(label for label, _ in found)
        return by_size(protocol, found, level)

    views = _views(state, draw)
    return style.block("seed-strength", views, legend=style.legend(state, labels))


def exponent(state: Reproduction) -> Block:
    def draw(protocol: Protocol, found: Records, level: Level) -> go.Figure:
        return _lines(protocol, found, lambda one: one.levels[level].layers.exponent, "exponent", -0.5)

    return style.block("seed-exponent", _views(state, draw), legend=_signs(state))


def lead(state: Reproduction) -> Block:
    views = []
    for what, of, axis in (
        ("ratio of the largest to the second largest head", lambda signal: margins(signal).ratio, "largest / second"),
        ("ratio of a layer divided by the next layer’s", lambda signal: margins(signal).gamma, "ratio / next layer’s"),
    ):

        def draw(protocol: Protocol, found: Records, level: Level, of=of, axis=axis) -> go.Figure:
            return _lines(protocol, found, lambda one: of(one.levels[level].signal), axis, 1.0)

        views += _views(state, draw, f"; {what}")
    return style.block("seed-lead", views, legend=_signs(state))


def by_size(protocol: Protocol, found: Records, level: Level) -> go.Figure:
    canvas, sizes = Canvas(300), list(next(iter(found[0][1].values())).sizes)
    canvas.straight(sizes, [n**-0.5 for n in sizes], width=1.5)
    for label, records in found:
        mean = np.mean([record.levels[level].layers.strength[0] for record in records.values()], axis=0)
        canvas.lines(
            sizes,
            plain(mean, 5),
            style.colour(label),
            f"<b>{style.name(protocol, label)}</b><br>%{{x}} examples: %{{y:.3f}}<extra></extra>",
            marker={"symbol": style.marker(label), "size": 7},
            meta=label,
        )
    canvas.x("examples in the mean", type="log", tickvals=sizes[:: max(1, len(sizes) // 6)])
    canvas.y("signal to noise", type="log", tickvals=_TICKS, ticktext=[f"{tick:g}" for tick in _TICKS])
    return canvas.figure()


def _lines(protocol: Protocol, found: Records, of: ByLayer, axis: str, mark: float) -> go.Figure:
    """Dots: one row per encoding, one series per layer."""
    each = [{seed: of(record) for seed, record in records.items()} for _, records in found]
    lines = [style.name(protocol, label) for label, _ in found]
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
    return style.layer_signs(depth, dots=True)


_FIELD = "exponent"


def training(state: Reproduction) -> Block:
    cells = [cell for cell in state.results.cells if Label.parse(cell.key.label).variant not in RUNGS]
    watched = {cell.key: rows for cell in cells if (rows := moments(cell))}
    seen = [row for rows in watched.values() for row in rows]
    drops_seen = [drop for row in seen for layer in row["drops"] for drop in layer]
    top = max([0.1, *drops_seen, *(row["accuracy"] for row in seen)])
    span = (min([0.0, *drops_seen]) * 1.05 - 0.02, top * 1.05)
    views = []
    for task in style.TASKS:
        for label in style.ordered(key.label for key in watched if key.task == task):

            def draw(protocol: Protocol, task: str = task, label: str = label) -> list[Panel]:
                mine = {key.seed: rows for key, rows in watched.items() if key == Key(protocol, task, label, key.seed)}
                return [
                    Panel(f"seed {seed}", drops(rows, span), tint=style.colour(label), glyph=style.glyph(label))
                    for seed, rows in mine.items()
                ]

            views.append(style.under_headings(state, draw, f"{style.TASKS[task]}, {title(label)}"))
    signs = style.layer_signs(max((len(row["drops"]) for row in seen), default=0), "heads of layer")
    signs.append(Sign("accuracy", "accuracy of the intact model", GUESS, dash="solid"))
    return style.block("training", views, "medium", legend=signs)


def moments(cell: CellResult) -> list[dict[str, Any]]:
    """The checkpoints with ablation effects: step, accuracy, drops [layers][heads]; undefined values are 0."""
    return [
        {
            "step": int(row["step"]),
            "accuracy": float(row["accuracy"] or 0),
            "drops": [[float(drop or 0) for drop in layer] for layer in row["drops"]],
        }
        for row in cell.watched
        if row.get("drops")
    ]


def drops(rows: Sequence[dict[str, Any]], span: tuple[float, float]) -> go.Figure:
    """Each head's accuracy drop, and the accuracy, by training step.

    Arguments
        rows  see `moments`
        span  ends of the vertical axis, shared by panels
    """
    canvas = Canvas(200, left=44, right=8, top=4, bottom=36)
    steps = [row["step"] for row in rows]
    accuracy = [round(row["accuracy"], 4) for row in rows]
    hover = "step %{x}: accuracy %{y:.1%}<extra></extra>"
    canvas.lines(steps, accuracy, GUESS, hover, width=4, opacity=0.55, meta="accuracy")
    for layer in range(len(rows[0]["drops"])):
        tint, dash = layer_look(layer)
        heads = range(len(rows[0]["drops"][layer]))
        # one trace per layer: its heads one after another, separated by gaps
        values = [[*(round(row["drops"][layer][head], 4) for row in rows), None] for head in heads]
        canvas.lines(
            [*steps, None] * len(heads),
            [value for line in values for value in line],
            tint,
            "%{text}<br>step %{x}: accuracy drop %{y:.1%}<extra></extra>",
            width=1.6,
            dash=dash,
            marker={"size": 3},
            text=[f"layer {layer + 1}, head {head + 1}" for head in heads for _ in [*steps, None]],
            meta=f"layer-{layer + 1}",
        )
    canvas.steps()
    canvas.y("", range=list(span), tickformat=".0%")
    return canvas.figure()


def exponents(state: Reproduction) -> Block:
    depth = max((len(row[_FIELD]) for cell in state.results.cells for row in _rows(cell)), default=0)

    views = style.by_model(state, _rows, lambda cells: lines(*watched(cells)))
    return style.block("seed-training", views, "small", legend=style.layer_signs(depth))


def _rows(cell: CellResult) -> list[dict[str, Any]]:
    return [row for row in cell.watched if row.get(_FIELD)]


def watched(cells: Sequence[CellResult]) -> tuple[list[int], Float[np.ndarray, "seeds moments layers"]]:
    """The checkpoint steps that all models share, and each layer's exponent there (mean over heads)."""
    steps = sorted(set.intersection(*({int(row["step"]) for row in _rows(cell)} for cell in cells)))
    found = [
        [np.array(row[_FIELD], dtype=float).mean(axis=1) for row in _rows(cell) if int(row["step"]) in steps]
        for cell in cells
    ]
    return steps, np.array(found)


def lines(steps: Sequence[int], found: Float[np.ndarray, "seeds moments layers"]) -> go.Figure:
    """One line per layer; checkpoints at which a seed has no value are excluded."""
    canvas = Canvas(200, left=38, right=8, top=4, bottom=36)
    canvas.line_at(-0.5)
    for layer in range(found.shape[-1]):
        tint, dash = layer_look(layer)
        values = found[:, :, layer]
        kept = np.isfinite(values).all(0)
        at, key = np.asarray(steps)[kept].tolist(), f"layer-{layer + 1}"
        low, high, mean = (of(values[:, kept], axis=0).round(4).tolist() for of in (np.min, np.max, np.mean))
        if len(values) > 1:
            canvas.band(at, low, high, tint, 0.12, key)
        hover = f"layer {layer + 1}<br>step %{{x}}: %{{y:.2f}}<extra></extra>"
        canvas.lines(at, mean, tint, hover, dash=dash, marker={"size": 4}, meta=key)
    canvas.steps()
    canvas.y("", range=[-0.72, 0.05], tickvals=[-0.5, -0.25, 0])
    return canvas.figure()
