"""What all figures share: an empty panel, its axes, and the lines at what a guess would score."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from toeplens.studies import Results

GUESS = "rgba(128, 136, 150, 0.95)"
_GRID = "rgba(128, 136, 150, 0.22)"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_LABEL = 12  # pixels that a label needs for itself


class Canvas:
    """A panel in the making: no ground of its own, no title, nothing to drag (so that a finger scrolls the page).

    Traces and layout are collected as plain dictionaries and handed to plotly once, which is much faster than changing
    a figure step by step.
    """

    def __init__(self, height: int, *, left: int = 56, right: int = 10, top: int = 8, bottom: int = 42) -> None:
        self.traces: list[dict[str, Any]] = []
        self.height, self.margin = height, {"l": left, "r": right, "t": top, "b": bottom}
        axis = {"gridcolor": _GRID, "zeroline": False, "fixedrange": True, "linecolor": _GRID}
        self._axes = {"xaxis": dict(axis), "yaxis": dict(axis)}
        self._shapes: list[dict[str, Any]] = []
        self._notes: list[dict[str, Any]] = []

    def add(self, kind: str, **trace: Any) -> None:
        """Add a trace of plotly's type ``kind``."""
        self.traces.append({"type": kind, **trace})

    def x(self, title: str = "", **options: Any) -> None:
        """Set options of the horizontal axis."""
        self._axes["xaxis"] |= {"title": {"text": title, "standoff": 5}, **options}

    def y(self, title: str = "", **options: Any) -> None:
        """Set options of the vertical axis."""
        self._axes["yaxis"] |= {"title": {"text": title, "standoff": 5}, **options}

    def percent(self, top: float, title: str = "") -> None:
        """Make the vertical axis one of accuracies, from 0 to a little over ``top``."""
        self.y(title, range=[0, top * 1.05], tickformat=".0%")

    def line_at(self, at: float, *, vertical: bool = False, dash: str = "dash") -> None:
        """A thin line across the panel."""
        along, across = ("y", "x") if vertical else ("x", "y")
        ends = {f"{along}ref": "paper", f"{along}0": 0, f"{along}1": 1, f"{across}0": at, f"{across}1": at}
        self._shapes.append(
            {"type": "line", "line": {"color": GUESS, "width": 1, "dash": dash}, "layer": "below", **ends}
        )

    def note(self, text: str, **place: Any) -> None:
        """A word in or beside the panel."""
        self._notes.append({"text": text, "showarrow": False, "font": {"size": 10}, **place})

    def figure(self, **layout: Any) -> go.Figure:
        """The finished figure."""
        return go.Figure(
            data=self.traces,
            layout={
                "template": go.layout.Template(),
                "height": self.height,
                "margin": self.margin,
                "paper_bgcolor": "rgba(0,0,0,0)",
                "plot_bgcolor": "rgba(0,0,0,0)",
                "font": {"family": _FONT, "size": 12, "color": "#4a525e"},
                "showlegend": False,
                "hovermode": "closest",
                "dragmode": False,
                "shapes": self._shapes,
                "annotations": self._notes,
                **self._axes,
                **layout,
            },
        )


def guess_levels(results: Results, task: str) -> dict[str, float]:
    """What guesses score on a task: ``chance``, and ``length only`` where knowing the text's length helps."""
    cell = next((cell for cell in results.cells if cell.key.task == task), None)
    if cell is None:
        return {}
    helps = cell.length_chance > cell.chance * 1.02
    return {"chance": cell.chance, **({"length<br>only": cell.length_chance} if helps else {})}


def guesses_across(canvas: Canvas, levels: dict[str, float], top: float) -> None:
    """Horizontal lines at the guesses' scores, named in the right margin without running into each other."""
    pixels = (canvas.height - canvas.margin["t"] - canvas.margin["b"]) / (top * 1.05)
    lowest_free = 0.0
    for text, at in levels.items():
        canvas.line_at(at, dash="dot" if text == "chance" else "dash")
        half = _LABEL / 2 * (1 + text.count("<br>"))
        middle = max(at * pixels, lowest_free + half)
        lowest_free = middle + half
        canvas.note(text, xref="paper", x=1, y=at, xanchor="left", align="left", xshift=3, yshift=middle - at * pixels)
    canvas.margin["r"] = max(canvas.margin["r"], 46)


def guesses_down(canvas: Canvas, levels: dict[str, float]) -> None:
    """Vertical lines at the guesses' scores, named above the panel, a row each (the top margin must hold them)."""
    for row, (text, at) in enumerate(levels.items()):
        canvas.line_at(at, vertical=True, dash="dot" if text == "chance" else "dash")
        words = text.replace("<br>", " ")
        canvas.note(words, x=at, yref="paper", y=1, xanchor="left", yanchor="bottom", xshift=-3, yshift=_LABEL * row)


def faded(hexadecimal: str, alpha: float) -> str:
    """A colour, see-through."""
    red, green, blue = (int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {alpha:g})"


def number(value: Any) -> float:
    """A recorded figure; NaN where none could be recorded."""
    return float("nan") if value is None else float(value)
