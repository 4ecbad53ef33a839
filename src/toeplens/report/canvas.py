"""What all figures share: an empty panel, its axes, and the lines at what a guess would score."""

from __future__ import annotations

from math import isfinite
from typing import Any

import plotly.graph_objects as go

from toeplens.studies import Results

GUESS = "rgba(128, 136, 150, 0.95)"
_GRID = "rgba(128, 136, 150, 0.22)"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def blank(height: int) -> go.Figure:
    """An empty panel: no ground of its own, no title, nothing to drag (so that a finger scrolls the page)."""
    figure = go.Figure(layout={"template": go.layout.Template()})
    figure.update_layout(
        height=height,
        margin={"l": 56, "r": 10, "t": 8, "b": 42},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": _FONT, "size": 12, "color": "#4a525e"},
        showlegend=False,
        hovermode="closest",
        dragmode=False,
    )
    axis = {"gridcolor": _GRID, "zeroline": False, "fixedrange": True, "linecolor": _GRID, "title_standoff": 6}
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    return figure


def percent_axis(figure: go.Figure, top: float, text: str) -> None:
    """A vertical axis of accuracies from 0 to a little over ``top``."""
    figure.update_yaxes(title_text=text, range=[0, top * 1.05], tickformat=".0%")


def guesses(figure: go.Figure, results: Results, task: str, *, vertical: bool = False) -> None:
    """Lines at what a constant guess and a guess from the length alone would score."""
    cell = next((cell for cell in results.cells if cell.key.task == task), None)
    if cell is None:
        return
    same = cell.length_chance <= cell.chance * 1.02
    level(figure, cell.chance, "chance", vertical=vertical)
    if not same:
        level(figure, cell.length_chance, "length only", vertical=vertical)


def level(figure: go.Figure, at: float, text: str, *, vertical: bool = False) -> None:
    """A thin line at the accuracy ``at``, with its name: dotted for chance, dashed else."""
    line = {"color": GUESS, "width": 1, "dash": "dot" if text == "chance" else "dash"}
    note: dict[str, Any] = {"text": text, "showarrow": False, "font": {"size": 10}, "opacity": 0.9}
    if vertical:
        figure.add_vline(at, line=line)
        figure.add_annotation(**note, x=at, yref="paper", y=1, xanchor="left", yanchor="middle", xshift=2)
    else:
        figure.add_hline(at, line=line)
        figure.add_annotation(**note, xref="paper", x=1, y=at, xanchor="right", yanchor="bottom", yshift=-1)


def faded(hexadecimal: str, alpha: float) -> str:
    """A colour, see-through."""
    red, green, blue = (int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {alpha:g})"


def number(value: Any) -> float:
    """A recorded figure; NaN where none could be recorded."""
    return float("nan") if value is None else float(value)


def or_none(value: float) -> float | None:
    """A figure as JSON can hold it."""
    return value if isfinite(value) else None
