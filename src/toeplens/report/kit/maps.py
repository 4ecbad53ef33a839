"""Maps of numbers by row and column, as pages share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from toeplens.ground.words import whole
from toeplens.report.kit.canvas import Canvas, plain

FEW = 16  # rows and columns up to which cells have numbers and all rows have labels
_TALL = 720  # pixels that rows take at most


def heat(
    shares: Float[np.ndarray, "R C"],
    rows: Sequence[str],
    columns: Sequence[str],
    limit: float,
    *,
    ticks: tuple[Sequence[int], Sequence[str]],
    title: str,
    right: int = 6,
    hover: Sequence[Sequence[str]] | None = None,
    numbers: Sequence[Sequence[str]] | None = None,
) -> go.Figure:
    """Shares by row and column; what is not known is left empty.

    columns  what a cell's column is called when it is pointed at, each another
    limit    the share at the end of the colours
    ticks    which columns have a label below, and the labels
    hover    what is said of each cell; its share unless given
    numbers  what stands in the cells; the shares of a few unless given with ``hover``
    """
    count = len(rows)
    size = 22 if count <= FEW else max(4, min(14, _TALL // count))
    few = count <= FEW and len(columns) <= FEW
    longest = max((len(row) for row in rows), default=0)
    below = 34 + 15 * (1 + max((text.count("<br>") for text in ticks[1]), default=0))
    canvas = Canvas(min(size * count, _TALL) + below, left=14 + 7 * longest, right=right, top=4, bottom=below - 4)
    step = max(1, -(-count * 14 // min(size * count, _TALL)))
    canvas.heat(
        [plain(row, 6 if hover else 3) for row in shares],
        list(columns),
        list(rows),
        limit,
        hover or "%{y}, %{x}: %{z:.1%}<extra></extra>",
        gap=(int(len(columns) <= 2 * FEW), int(count <= 2 * FEW)),  # none where cells are small
        numbers=numbers if hover else [[whole(value) for value in row] for row in shares] if few else None,
        size=10,
    )
    axis: dict[str, Any] = {"showgrid": False, "type": "category", "ticks": "", "tickangle": 0}
    canvas.x(title, tickvals=list(ticks[0]), ticktext=list(ticks[1]), **axis)
    shown = list(range(0, count, step))
    canvas.y("", autorange="reversed", tickvals=shown, ticktext=[rows[i] for i in shown], **axis)
    return canvas.figure()
