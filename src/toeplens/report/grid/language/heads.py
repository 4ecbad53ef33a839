"""What kinds of heads language models have, and whether those follow position or symbols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toeplens.engine.language import HeadPatterns
from toeplens.lens import Behaviour
from toeplens.report.grid.language.cells import every, looks_of, record, viewed
from toeplens.report.kit.blocks import Block, Panel, View
from toeplens.report.kit.canvas import Canvas
from toeplens.report.kit.colours import PALETTE
from toeplens.report.kit.plane import Look
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid
from toeplens.studies.grid.language import TOP

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
        found = {label: [cell for cell in each if _both(cell)] for label, each in cells.items()}
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


def _both(cell: CellResult) -> bool:
    return record(cell, "patterns", HeadPatterns) is not None and record(cell, "behaviour", Behaviour) is not None


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
