"""A heat map of an audit's page: rows by columns of shares, with numbers in its cells where there is room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from toeplens.ground.words import or_none
from toeplens.report.kit.canvas import Canvas

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
) -> go.Figure:
    """Shares by row and column; what is not known is left empty.

    columns  what a cell's column is called when it is pointed at, each another
    limit    the share at the end of the colours
    ticks    which columns have a label below, and the labels
    """
    count = len(rows)
    size = 22 if count <= FEW else max(4, min(14, _TALL // count))
    few = count <= FEW and len(columns) <= FEW
    longest = max((len(row) for row in rows), default=0)
    below = 34 + 15 * (1 + max((text.count("<br>") for text in ticks[1]), default=0))
    canvas = Canvas(min(size * count, _TALL) + below, left=14 + 7 * longest, right=right, top=4, bottom=below - 4)
    step = max(1, -(-count * 14 // min(size * count, _TALL)))
    text = [["" if np.isnan(v) else f"{100 * v:.0f}".replace("-", "−") for v in row] for row in shares] if few else []
    canvas.add(
        "heatmap",
        z=[plain(row, 3) for row in shares],
        x=list(columns),
        y=list(rows),
        coloraxis="coloraxis",
        hoverongaps=False,
        hovertemplate="%{y}, %{x}: %{z:.1%}<extra></extra>",
        **(gaps(count, len(columns)) | ({"text": text, "texttemplate": "%{text}"} if few else {})),
        textfont={"size": 10},
    )
    axis: dict[str, Any] = {"showgrid": False, "type": "category", "ticks": "", "tickangle": 0}
    canvas.x(title, tickvals=list(ticks[0]), ticktext=list(ticks[1]), **axis)
    shown = list(range(0, count, step))
    canvas.y("", autorange="reversed", tickvals=shown, ticktext=[rows[i] for i in shown], **axis)
    return canvas.figure(coloraxis={"cmin": -limit, "cmax": limit, "showscale": False})


def gaps(rows: int, columns: int) -> dict[str, int]:
    """The space between cells, in pixels: none where they are small."""
    return {"xgap": int(columns <= 2 * FEW), "ygap": int(rows <= 2 * FEW)}


def limit_of(tables: Sequence[Float[np.ndarray, "R C"]]) -> float:
    """The end of the colours of several tables: the largest share, rounded up to five hundredths."""
    top = max((float(np.nanmax(np.abs(table), initial=0.0)) for table in tables), default=0.0)
    return max(0.05, float(np.ceil(round(20 * top, 9)) / 20))


def plain(values: Float[np.ndarray, "n"], digits: int = 4) -> list[float | None]:
    """Numbers as JSON can hold them, with a few digits; None for what is not known."""
    return [or_none(float(f"{value:.{digits}g}")) for value in np.asarray(values, dtype=float).tolist()]
