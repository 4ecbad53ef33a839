"""Figures of the deposit: by encoding, by layer, by scale variant, by checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import isfinite

import plotly.graph_objects as go

from toeplens.ground.words import points
from toeplens.lens import LayerDeposit
from toeplens.lens.ablation import PEAK
from toeplens.model import Protocol
from toeplens.papers.deposit import SCALES, Reproduction
from toeplens.papers.deposit.factors import concentrated
from toeplens.papers.deposit.labels import BASES, RUNGS, Label
from toeplens.papers.deposit.labels import TASK as LADDER_TASK
from toeplens.papers.deposit.looks import END, Look, Measure, in_order, look_at
from toeplens.papers.deposit.page.look import Models, beside, by_task, colour, legend, marker, models, name
from toeplens.report.kit.blocks import Block, Ramp
from toeplens.report.kit.canvas import Canvas
from toeplens.report.kit.dots import Series, dots
from toeplens.studies import CellResult
from toeplens.studies.kit.results import estimated

SHARE = Ramp("0%", "100% of the skill", half=True)
Figure = Callable[[LayerDeposit], float]


def by_encoding(state: Reproduction) -> Block:
    """Violins of the largest share of the skill of one head, and of the effective heads of its layer."""
    layers = [layer[1] for cell in state.results.cells if (layer := concentrated(cell))]
    peak = max([1.0, *(layer.peak for layer in layers)]) * 1.05
    heads = max([2.0, *(layer.effective_heads for layer in layers)]) * 1.05

    def shares(protocol: Protocol, task: str) -> go.Figure | None:
        found = models(state, protocol, task, CellResult.deposits)
        return (
            violins(found, lambda layer: layer.peak, "share of the skill", top=peak, percent=True, mark=PEAK)
            if found
            else None
        )

    def spreads(protocol: Protocol, task: str) -> go.Figure | None:
        found = models(state, protocol, task, CellResult.deposits)
        return violins(found, lambda layer: layer.effective_heads, "effective heads", top=heads) if found else None

    kinds = (
        by_task(state, shares, "share of the skill lost by ablating one head"),
        by_task(state, spreads, "effective heads of that layer"),
    )
    caption = (
        "For each model, the layer with the most important head. Points are seeds, the bar is their mean, the violin "
        "their density (unreliable with few seeds). Share: the accuracy drop from ablating that head, as a share of "
        f"the skill. A single-head layer needs at least {PEAK:.0%} (dashed). Effective heads: (sum of the layer’s "
        "drops)² / sum of squared drops."
    )
    views = [view for pair in zip(*kinds, strict=True) for view in pair]
    return Block("deposit-encodings", "Deposit by encoding", caption, views)


def violins(
    found: Models, figure: Figure, title: str, *, top: float, percent: bool = False, mark: float | None = None
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
        canvas.violin(place, values, colour(label), told, jitter=0.6, width=0.85, size=6, opacity=0.85)
        mean = estimated({index: value for index, value in enumerate(values) if isfinite(value)})
        if mean and mean.count > 1:
            look = {"symbol": "line-ew-open", "size": 17, "color": colour(label), "line": {"width": 2.5}}
            canvas.marks([place], [mean.value], look, hoverinfo="skip")
        if len(able) < len(cells):
            none = "no skill" if not able else f"{len(cells) - len(able)} of {len(cells)} without skill"
            canvas.note(none, x=place, y=0.02 * top, textangle=-90, yanchor="bottom", xshift=0 if not able else 13)
    if mark is not None:
        canvas.line_at(mark)
    texts = [name(cells[0].key.protocol, label) for label, cells in found]
    ticks = {"tickvals": list(range(len(texts))), "ticktext": texts, "tickangle": -60, "tickfont": {"size": 11}}
    canvas.x(range=[-0.6, len(texts) - 0.4], automargin=True, showgrid=False, ticklabeloverflow="allow", **ticks)
    canvas.y(title, range=[0, top], **({"tickformat": ".0%"} if percent else {}))
    return canvas.figure()


def _described(cell: CellResult, layer: int, deposit: LayerDeposit) -> str:
    """A layer of a model, as hover text."""
    assert cell.ablation is not None
    return (
        f"<b>{name(cell.key.protocol, cell.key.label)}</b>, seed {cell.key.seed}, layer {layer + 1}<br>"
        f"head {deposit.head + 1}: {deposit.peak:.0%} of the skill, "
        f"{points(float(cell.ablation.drops[layer, deposit.head]))} percentage points<br>"
        f"{deposit.kind}; effective heads {deposit.effective_heads:.1f}"
    )


def by_layer(state: Reproduction) -> Block:
    """Heat maps of encoding by layer, one row per seed."""

    def draw(protocol: Protocol, task: str) -> go.Figure | None:
        found = models(state, protocol, task, CellResult.deposits)
        return peaks_by_layer(found) if found else None

    caption = (
        "Share of the skill lost by ablating the most important head of each layer. Each thin row is a seed: similar "
        "rows of one encoding mean that the deposit is reproducible. Rows without colour: models without skill."
    )
    return Block("deposit-layers", "Layer of the deposit", caption, by_task(state, draw), ramp=SHARE)


def peaks_by_layer(found: Models) -> go.Figure:
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
    texts = [name(cells[0].key.protocol, label) for label, cells in found]
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
_MOMENTS = {
    "able": "accuracy over 90%",
    "plateau": "at the plateau",
    "twice": "2 × the plateau’s steps",
    "four times": "4 × the plateau’s steps",
    END: "8 × the plateau’s steps (end)",
}
_LONG = "an interval that is longer than the panel is cut off"
Line = tuple[str, str, str]  # row title, scale variant, checkpoint


def by_rung(state: Reproduction) -> Block:
    """One factor changed at a time, at the end of training."""
    lines = [("scale unchanged", "", END), *((RUNGS[rung].title, rung, END) for rung in _rungs(state))]
    caption = (
        "Ablation effect of the most important head at the end of training, with one factor changed at a time. Rings "
        f"are seeds, the marker is their mean with its 95% interval ({_LONG}). Models without skill are excluded."
    )
    return _block(state, "ladder-rungs", "When does a deposit occur?", caption, lines)


def by_moment(state: Reproduction) -> Block:
    """The same models at several checkpoints, up to eight times the steps of their plateau."""
    lines = [(text, "longer", moment) for moment, text in _MOMENTS.items()]
    caption = (
        "Ablation effect of the most important head during training: when a model reaches 90% accuracy, when it stops "
        f"improving, and later. Rings are seeds, the marker is their mean with its 95% interval ({_LONG}). Models that "
        "reached 90% only after their plateau have no ring in the first row."
    )
    return _block(state, "ladder-moments", "The deposit changes during training", caption, lines)


def _rungs(state: Reproduction) -> Sequence[str]:
    return [rung for rung in SCALES[state.plan.scale].rungs if rung != "longer"]


def _block(state: Reproduction, place: str, title: str, caption: str, lines: Sequence[Line]) -> Block:
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
            Series(
                base, f"{name(protocol, base)}, ", marker(base), [values[n] for n in kept], [colour(base)] * len(kept)
            )
            for base, values in found.items()
            if any(values)
        ]
        drawn.update(one.key for one in series)
        return dots([lines[line][0] for line in kept], series, what, scale=scale, digits=digits)

    views = [beside(state, partial(draw, shown=shown), shown[0]) for shown in _SHOWN]
    return Block(place, title, caption, views, legend=legend(state, drawn))
