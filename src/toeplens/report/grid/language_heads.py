"""Head types of language models, and the effects of ablating heads or removing their position."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from toeplens.ground.words import fixed, listed, percent, whole
from toeplens.report.grid.look import every, viewed
from toeplens.report.kit.blocks import Block, Panel, Ramp, View
from toeplens.report.kit.canvas import Canvas, Look, heat, untagged
from toeplens.report.kit.colours import PALETTE
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid
from toeplens.studies.grid.language import TOP, position_shares

_SMALL, _LARGE = 6, 11  # diameter in pixels: of any head, and of the `TOP` heads of a model
_KINDS = (  # the attention of a head type, titles, and the share it is plotted against
    ("previous", "attention on the previous token", "attention on the previous token", "positional"),
    ("induction", "attention after an earlier copy (induction)", "attention after an earlier copy", "symbolic"),
)


def kinds(state: Grid) -> Block:
    """Each head's attention of a type against its share; a view per type, a panel per encoding."""
    views: list[View] = []
    layers = 0
    for task, cells in every(state, "patterns", "behaviour"):
        layers = max([layers, *(len(cell.measure("patterns").previous) for each in cells.values() for cell in each)])
        for weight, title, axis, share in _KINDS:
            panels = [_kind_panel(one, found, weight, axis, share) for one, found in cells.items()]
            views.append(View.of([panel for panel in panels if panel], viewed(task, title)))
    caption = (
        "One mark per head and seed. x: attention on the previous token (on test texts), or on the token after an "
        "earlier copy of the query token (on random tokens repeated once). y: share of the variance of the head’s "
        f"logits explained by the position (positional) or content (symbolic) of keys. Large marks: the {TOP} heads of "
        "a model with the most such attention, which the claims are about. A positional head need not be a "
        "previous-token head; if all marks are far left, no head of this type was learned. For encodings that act "
        "only at the input, the positional share comes from position in the token vectors. Click a layer to hide or "
        "show it."
    )
    signs = [_layer_look(layer).sign for layer in range(layers)]
    return Block("kinds", "Head types", caption, views, "medium", legend=signs)


def _layer_look(layer: int) -> Look:
    return Look(f"layer-{layer}", f"Layer {layer + 1}", *PALETTE[layer % len(PALETTE)])


def _kind_panel(one: Look, cells: Sequence[CellResult], weight: str, axis: str, share: str) -> Panel | None:
    points: dict[int, list[tuple[float, float, int, str]]] = {}  # by layer: weight, share, size, where
    for cell in cells:
        weights, shares = getattr(cell.measure("patterns"), weight), getattr(cell.measure("behaviour"), share)
        top = set(np.argsort(-weights, axis=None, kind="stable")[:TOP].tolist())
        for place, at in enumerate(np.ndindex(weights.shape)):
            if np.isfinite(shares[at]):
                where = f"seed {cell.key.seed}, layer {at[0] + 1}, head {at[1] + 1}"
                size = _LARGE if place in top else _SMALL
                point = round(float(weights[at]), 4), round(float(shares[at]), 4), size, where
                points.setdefault(at[0], []).append(point)
    if not points:
        return None
    canvas = Canvas(250, left=48, bottom=40)
    for layer, heads in sorted(points.items()):
        x, y, sizes, where = zip(*heads, strict=True)
        _layer_look(layer).add(
            canvas,
            x,
            y,
            f"%{{customdata}}<br>{axis} %{{x:.2f}}<br>{share} share %{{y:.2f}}",
            marker={"size": list(sizes), "opacity": 0.65, "line": {"width": 0}},
            customdata=list(where),
        )
    canvas.x(axis, range=[-0.04, 1.06], tickvals=[0, 0.25, 0.5, 0.75, 1])
    canvas.y(f"{share} share", range=[-0.06, 1.08], tickvals=[0, 0.25, 0.5, 0.75, 1])
    return Panel(one.title, canvas.figure(), tint=one.tint, glyph=one.glyph)


# ---- effects of each head --------------------------------------------------------------------------------------------

Heads = Float[np.ndarray, "L H"]
_Table = Callable[[CellResult], Heads | None]
_FEW = 8  # up to this many heads per layer, cells show numbers


def position(state: Grid) -> Block:
    """Each head's share of the effects of removing position; a map per encoding."""
    top = _top(state, position_shares)
    views = _views(state, position_shares, top, lambda share: f"{percent(share)} of the total effect", whole)
    caption = (
        "Position is removed from one head at a time (rotation frozen, bias made uniform, content kept). Cells show "
        "each head’s share (%) of the sum of all loss increases; heads without a significant effect count as 0. Rows "
        "are layers. For the mean over seeds, the heads of a layer are first sorted by their share. Heads can replace "
        "each other, so a head with a small share may still matter, and the shares do not show the size of the total "
        "effect. Encodings that act only at the input have no position to remove from heads."
    )
    ramp = Ramp("0%", f"{percent(top)} of the total effect", half=True)
    return Block("position-share", "Effect of removing position from each head", caption, views, "medium", ramp=ramp)


def without(state: Grid) -> Block:
    """The ablation effect of each head on the loss; a map per encoding."""
    top = _top(state, _lost)
    views = _views(
        state,
        _lost,
        top,
        lambda lost: f"{fixed(1000 * lost, 1)} · 10⁻³ nats per token",
        lambda lost: fixed(1000 * lost, 0),
    )
    caption = (
        "Loss increase when one head is zero-ablated, in 10⁻³ nats per token, on the test texts of the study; if it is "
        "negative, the model is better without the head. Rows are layers. For the mean over seeds, the heads of a "
        "layer are first sorted by their effect. All panels share one colour scale. Heads can replace each other, so "
        "the effect of a single head does not show all it contributes."
    )
    ramp = Ramp(f"−{1000 * top:.0f}", f"{1000 * top:.0f} · 10⁻³ nats per token")
    return Block("without", "Ablation effect of each head", caption, views, "medium", ramp=ramp)


def _lost(cell: CellResult) -> Heads | None:
    return None if cell.by_loss is None else cell.by_loss.drops


def _top(state: Grid, table: _Table) -> float:
    """The end of the colour scale."""
    found = [table(cell) for _, cells in every(state) for each in cells.values() for cell in each]
    return max((float(np.nanmax(np.abs(one))) for one in found if one is not None), default=0.0) or 1.0


def _views(
    state: Grid, table: _Table, top: float, told: Callable[[float], str], short: Callable[[float], str]
) -> list[View]:
    """The mean over seeds if there are several, and each seed separately."""
    views: list[View] = []
    for task, cells in every(state):
        tables = {one: {cell.key.seed: table(cell) for cell in found} for one, found in cells.items()}
        seeds = sorted({seed for each in tables.values() for seed in each})
        names = [one.title for one, each in tables.items() if all(found is None for found in each.values())]
        missing = f"Not shown, without any effect: {listed(names)}." if names else ""
        for seed in ([None] if len(seeds) > 1 else []) + seeds:
            panels = [
                _map(one, found, top, told, short, ordered=seed is None)
                for one, each in tables.items()
                if (found := [x for of, x in each.items() if seed in (None, of) and x is not None])
            ]
            name = "mean over seeds" if seed is None else f"seed {seed}" if len(seeds) > 1 else ""
            views.append(View.of(panels, viewed(task, name), missing))
    return views


def _map(
    one: Look,
    found: Sequence[Heads],
    top: float,
    told: Callable[[float], str],
    short: Callable[[float], str],
    *,
    ordered: bool,
) -> Panel:
    values = np.mean([-np.sort(-each, axis=1) if ordered else each for each in found], axis=0)
    layers, heads = values.shape
    columns = [f"rank {head + 1}" if ordered else f"head {head + 1}" for head in range(heads)]
    marked = range(0, heads, 1 if heads <= _FEW else 2)
    figure = heat(
        values,
        [f"L{layer + 1}" for layer in range(layers)],
        columns,
        top,
        ticks=(marked, [str(head + 1) for head in marked]),
        title="head, sorted by effect" if ordered else "head",
        hover=[
            [
                f"{untagged(one.title)}, layer {layer + 1}, {columns[head]}<br>{told(values[layer, head])}"
                for head in range(heads)
            ]
            for layer in range(layers)
        ],
        numbers=[[short(value) for value in row] for row in values] if heads <= _FEW else None,
    )
    return Panel(one.title, figure, tint=one.tint, glyph=one.glyph)
