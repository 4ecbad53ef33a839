"""What kinds of heads language models have, and what is lost without each head, and without its position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from toeplens.engine.language import HeadPatterns
from toeplens.ground.words import fixed, listed, percent, whole
from toeplens.lens import Behaviour
from toeplens.report.grid.language.cells import every, looks_of, record, viewed
from toeplens.report.kit.blocks import Block, Panel, Ramp, View
from toeplens.report.kit.canvas import Canvas, Look, heat, untagged
from toeplens.report.kit.colours import PALETTE
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid
from toeplens.studies.grid.language import TOP, position_shares

_SMALL, _LARGE = 6, 11  # pixels across: of any head, and of the `TOP` of a model


@dataclass(frozen=True)
class _Kind:
    """A kind of head: the field of its weight, what that is, and the share that it is drawn against."""

    weight: str
    title: str
    axis: str
    share: str


_KINDS = (
    _Kind("previous", "weight on the token before", "weight on the token before", "positional"),
    _Kind("induction", "weight after an earlier copy (induction)", "weight after an earlier copy", "symbolic"),
)


def kinds(state: Grid) -> Block:
    """Each head's weight of a kind against its share; a view a kind, a panel an encoding."""
    views: list[View] = []
    layers = 0
    for task, cells in every(state):
        found = {
            label: [
                cell for cell in each if record(cell, "patterns", HeadPatterns) and record(cell, "behaviour", Behaviour)
            ]
            for label, each in cells.items()
        }
        found = {label: each for label, each in found.items() if each}
        layers = max([layers, *(len(_patterns(cell).previous) for each in found.values() for cell in each)])
        for kind in _KINDS:
            panels = [_panel(one, found[one.key], kind) for one in looks_of(state, found)]
            views.append(View.of([panel for panel in panels if panel], viewed(task, kind.title)))
    caption = (
        "Each head of each seed’s model. Across, how much of its attention a query gives to the token before it, in "
        "texts of the test split, or to the token that followed an earlier copy of its own, in random tokens that are "
        "repeated once. Up, how much of the variance of the head’s logits goes with the place of the keys "
        f"(positional) or with what they are (symbolic). Large: the {TOP} heads of a model with the most such weight, "
        "of which the claims are. A head is no previous-token head for being positional, and none need be "
        "there: where all stand far left, no head of the kind has been learned. Of an encoding that no head turns or "
        "biases, the positional share is what is left of position in the tokens’ vectors. Press a layer to hide or "
        "show it."
    )
    return Block("kinds", "Kinds of heads", caption, views, "medium", legend=[one.sign for one in layer_looks(layers)])


def layer_looks(count: int) -> list[Look]:
    """The layers of a model, each with a colour and a marker."""
    return [Look(f"layer-{layer}", f"Layer {layer + 1}", *PALETTE[layer % len(PALETTE)]) for layer in range(count)]


def _patterns(cell: CellResult) -> HeadPatterns:
    found = record(cell, "patterns", HeadPatterns)
    assert found is not None
    return found


_Point = tuple[float, float, int, str]  # weight, share, size, where


def _points(cells: Sequence[CellResult], kind: _Kind) -> dict[int, list[_Point]]:
    """The heads of models whose logits vary, by layer."""
    made: dict[int, list[_Point]] = {}
    for cell in cells:
        follows = record(cell, "behaviour", Behaviour)
        weights, shares = getattr(_patterns(cell), kind.weight), getattr(follows, kind.share)
        top = set(np.argsort(-weights, axis=None, kind="stable")[:TOP].tolist())
        for place, at in enumerate(np.ndindex(weights.shape)):
            if np.isfinite(shares[at]):
                where = f"seed {cell.key.seed}, layer {at[0] + 1}, head {at[1] + 1}"
                size = _LARGE if place in top else _SMALL
                made.setdefault(at[0], []).append(
                    (round(float(weights[at]), 4), round(float(shares[at]), 4), size, where)
                )
    return made


def _panel(one: Look, cells: Sequence[CellResult], kind: _Kind) -> Panel | None:
    points = _points(cells, kind)
    if not points:
        return None
    canvas = Canvas(250, left=48, bottom=40)
    looks = layer_looks(max(points) + 1)
    for layer, heads in sorted(points.items()):
        x, y, sizes, where = zip(*heads, strict=True)
        looks[layer].add(
            canvas,
            x,
            y,
            f"%{{customdata}}<br>{kind.axis} %{{x:.2f}}<br>{kind.share} share %{{y:.2f}}",
            marker={"size": list(sizes), "opacity": 0.65, "line": {"width": 0}},
            customdata=list(where),
        )
    canvas.x(kind.axis, range=[-0.04, 1.06], tickvals=[0, 0.25, 0.5, 0.75, 1])
    canvas.y(f"{kind.share} share", range=[-0.06, 1.08], tickvals=[0, 0.25, 0.5, 0.75, 1])
    return Panel(one.title, canvas.figure(), tint=one.tint, glyph=one.glyph)


# ---- what is lost without each ---------------------------------------------------------------------------------------

Heads = Float[np.ndarray, "L H"]
_Table = Callable[[CellResult], Heads | None]
_FEW = 8  # heads of a layer up to which cells have numbers


def position(state: Grid) -> Block:
    """Each head's share of what is lost when position is taken from it alone; a map an encoding."""
    top = _top(state, position_shares)
    views = _views(state, position_shares, top, lambda share: f"{percent(share)} of what is lost", whole)
    caption = (
        "Position is taken from one head at a time (its rotation stopped, its bias made even, its content kept): "
        "each head’s share, in per cent, of the loss that all heads together gain so; a head whose loss is not told "
        "from none counts as none. Rows are layers from the first; seeds have heads of their own, so that over seeds"
        " a layer’s heads are put in order of their share, the largest first, before the mean is taken. Shares are "
        "of what single heads cost, and heads may stand in for each other: a head with a small share is not proved "
        "needless, and the shares say nothing of how much is lost in all. An encoding that acts at the input, or not"
        " at all, has no head from which position could be taken."
    )
    ramp = Ramp("0%", f"{percent(top)} of what is lost", half=True)
    return Block("position-share", "Where position sits", caption, views, "medium", ramp=ramp)


def without(state: Grid) -> Block:
    """The loss that a model gains without each head; a map an encoding."""
    top = _top(state, _lost)
    views = _views(
        state,
        _lost,
        top,
        lambda lost: f"{fixed(1000 * lost, 1)} thousandths of a nat",
        lambda lost: fixed(1000 * lost, 0),
    )
    caption = (
        "The loss that a model gains a token when one head’s output is set to nothing, in thousandths of a nat, on the "
        "test texts that the study looks at; below zero the model is better without the head. Rows are layers from the "
        "first; over seeds a layer’s heads are put in order, the costliest first, before the mean is taken. All panels "
        "have the same colours. What a head costs alone is not what it adds beside others that can stand in for it."
    )
    ramp = Ramp(f"−{1000 * top:.0f}", f"{1000 * top:.0f} thousandths of a nat")
    return Block("without", "Loss without each head", caption, views, "medium", ramp=ramp)


def _lost(cell: CellResult) -> Heads | None:
    return None if cell.by_loss is None else cell.by_loss.drops


def _top(state: Grid, table: _Table) -> float:
    """The end of the colours."""
    found = [table(cell) for _, cells in every(state) for each in cells.values() for cell in each]
    return max((float(np.nanmax(np.abs(one))) for one in found if one is not None), default=0.0) or 1.0


def _views(
    state: Grid, table: _Table, top: float, told: Callable[[float], str], short: Callable[[float], str]
) -> list[View]:
    """All seeds together where there are several, and each seed by itself."""
    views: list[View] = []
    for task, cells in every(state):
        looks = looks_of(state, cells)
        seeds = sorted({cell.key.seed for each in cells.values() for cell in each})
        tables = {one.key: [(cell.key.seed, table(cell)) for cell in cells[one.key]] for one in looks}
        names = [one.title for one in looks if all(found is None for _, found in tables[one.key])]
        missing = f"No map: {listed(names)}, where nothing is lost so." if names else ""
        for seed in ([None] if len(seeds) > 1 else []) + seeds:
            panels = [
                _map(one, found, top, told, short, ordered=seed is None)
                for one in looks
                if (found := [x for of, x in tables[one.key] if seed in (None, of) and x is not None])
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
    columns = [f"number {head + 1} by size" if ordered else f"head {head + 1}" for head in range(heads)]
    columns = ["the largest", *columns[1:]] if ordered else columns
    marked = range(0, heads, 1 if heads <= _FEW else 2)
    figure = heat(
        values,
        [f"L{layer + 1}" for layer in range(layers)],
        columns,
        top,
        ticks=(marked, [str(head + 1) for head in marked]),
        title="heads of a layer, the largest first" if ordered else "head",
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
