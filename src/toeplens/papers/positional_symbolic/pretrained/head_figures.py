"""What a pretrained model's heads do: their map, the plane of their shares, the frequencies that they use."""

from __future__ import annotations

from math import tau

import numpy as np
from plotly.colors import sample_colorscale

from toeplens.ground.words import fixed
from toeplens.papers.positional_symbolic.pretrained.heads import Heads, effects_of
from toeplens.papers.positional_symbolic.pretrained.state import Pretrained
from toeplens.report.kit.blocks import Block, Panel, Ramp, View
from toeplens.report.kit.canvas import Canvas, heat, plain
from toeplens.report.kit.colours import DEPTHS

_KINDS = {"text": "The model", "random": "Random weights", "shuffled": "Tokens in random order"}
_MAPPED = {
    "positional": "positional share",
    "symbolic": "symbolic share",
    "previous": "attention on the token before",
    "first": "attention on the first token",
    "induction": "induction",
}
_NULL = 1e-9


def maps(study: Pretrained) -> Block:
    """Layers by heads: what each head does, mean over texts; what it, and its position, are worth."""
    heads, views = study.heads("text"), []
    caption = "A cell is a head; layers go down, heads across. Shares and attention are means over the sequences."
    if heads is not None:
        views += [_map(title, heads, heads.mean(name), 1.0) for name, title in _MAPPED.items()]
        intact = study.probes.get("intact")
        if intact is not None and intact.heads:
            scores = {(each.layer, each.head): each.score for each in intact.heads}
            values = np.array([scores.get(place, np.nan) for place in zip(heads.layer, heads.head, strict=True)])
            views.append(_map("retrieval score", heads, values, 1.0))
        for name, title in (
            ("silenced", "nats added without the head"),
            ("position", "nats added without its position"),
        ):
            audit = study.audits.get(name)
            if audit is not None:
                effects = effects_of(audit)
                views.append(_map(title, heads, effects, max(_NULL, float(np.nanmax(np.abs(effects), initial=0.0)))))
    views = [view for view in views if view.groups]
    return Block("maps", "The map of heads", caption, views, "full", ramp=Ramp("nothing", "most", half=True))


def _map(title: str, heads: Heads, values: np.ndarray, limit: float) -> View:
    if not np.isfinite(values).any():
        return View(title, [])
    layers, across = sorted(set(heads.layer.tolist())), int(heads.head.max()) + 1
    table = np.full((len(layers), across), np.nan)
    row = {layer: at for at, layer in enumerate(layers)}
    for layer, head, value in zip(heads.layer, heads.head, values, strict=True):
        table[row[int(layer)], int(head)] = value
    local = {int(layer) for layer in heads.layer[heads.local]}
    mixed = len(heads.parts) > 1
    rows = [f"L{layer + 1}{' window' if mixed and layer in local else ''}" for layer in layers]
    columns = [f"H{head + 1}" for head in range(across)]
    said = [
        [f"{row}, {column}: {fixed(value, 4)}" for column, value in zip(columns, line, strict=True)]
        for row, line in zip(rows, table, strict=True)
    ]
    figure = heat(table, rows, columns, limit, ticks=(range(across), columns), title="", hover=said)
    return View.of([Panel(title.capitalize(), figure)], title)


def plane(study: Pretrained) -> Block:
    """Positional and symbolic share of each head, of the model and of what knows nothing."""
    caption = (
        "A mark is a head, by the shares of its logits’ variance that come from where keys stand (across) and from "
        "what they hold (up), mean over sequences. Colours go from the first layer (blue) to the last (orange)."
    )
    panels = []
    for kind, title in _KINDS.items():
        heads = study.heads(kind)
        if heads is None:
            continue
        x, y = heads.mean("positional"), heads.mean("symbolic")
        canvas = Canvas(300)
        canvas.straight([0, 1], [1, 0])
        _marks(canvas, heads, x, y)
        canvas.x("positional share", range=[-0.05, 1.05])
        canvas.y("symbolic share", range=[-0.05, 1.05])
        over = [int((values > 0.5).sum()) for values in (x, y)]
        panels.append(
            Panel(title, canvas.figure(), f"Of {len(x)} heads {over[0]} are over half positional, {over[1]} symbolic.")
        )
    return Block("plane", "Positional or symbolic", caption, [View.of(panels)] if panels else [], "medium")


def frequencies(study: Pretrained) -> Block:
    """The positional share of each head against the frequency that it uses."""
    caption = (
        "A mark is a head: across how many tokens a turn takes of the frequency that it uses (the centre of gravity of "
        "what the pairs do for its logits’ variance), up its positional share, mean over sequences. Squares: layers "
        "that see a window."
    )
    panels = []
    known = {kind: heads for kind in _KINDS if (heads := study.heads(kind)) is not None}
    turns = {kind: _turns(heads) for kind, heads in known.items() if np.isfinite(heads.columns["centre"]).any()}
    ends = [each for turn in turns.values() for each in np.log10(turn[np.isfinite(turn)]).tolist()]
    for kind, turn in turns.items():
        heads, title, canvas = known[kind], _KINDS[kind], Canvas(300)
        _marks(canvas, heads, turn, heads.mean("positional"))
        span = {"range": [max(ends) + 0.1, min(ends) - 0.1], "dtick": 1, "exponentformat": "power"}
        canvas.x("tokens a turn", type="log", **span)
        canvas.y("positional share", range=[-0.05, 1.05])
        told = "; ".join(
            f"{part}: {fixed(float(np.mean(heads.correlations('positional', 'centre', which))))}"
            for part, which in heads.parts.items()
        )
        panels.append(
            Panel(title, canvas.figure(), f"Rank correlation with the frequency, mean over sequences, {told}.")
        )
    return Block("frequencies", "Frequencies against behaviour", caption, [View.of(panels)] if panels else [], "medium")


def _turns(heads: Heads) -> np.ndarray:
    """Tokens that a turn takes of the frequency that each head uses."""
    with np.errstate(over="ignore"):
        return tau / 2.0 ** heads.mean("centre")


def _marks(canvas: Canvas, heads: Heads, x: np.ndarray, y: np.ndarray) -> None:
    depth = heads.layer / max(1, heads.layer.max())
    known = np.isfinite(x) & np.isfinite(y)
    names = [f"L{layer + 1} H{head + 1}" for layer, head in zip(heads.layer[known], heads.head[known], strict=True)]
    colours = [str(each) for each in sample_colorscale(list(DEPTHS), depth[known].tolist())] if known.any() else []
    mixed = len(heads.parts) > 1
    shapes = ["square" if mixed and local else "circle" for local in heads.local[known]]
    marker = {"color": colours, "size": 7, "opacity": 0.75, "symbol": shapes}
    canvas.marks(
        plain(x[known]), plain(y[known]), marker, "%{customdata}: %{x:.3g}, %{y:.3f}<extra></extra>", customdata=names
    )
