"""Colours and markers of all pages, readable in light and dark mode: encodings, heads, layers, heat maps."""

from __future__ import annotations

BLUE, ORANGE, GREEN, PINK, RED = "#2f6fe0", "#de7a00", "#1d9a5b", "#c8479f", "#d2453d"
PURPLE, CYAN, BROWN, GREY = "#8456d8", "#0e9bb5", "#9c7430", "#858b95"
GUESS = "rgba(128, 136, 150, 0.95)"  # reference lines

Look = tuple[str, str, str]  # colour, plotly marker, the same marker as a character

# by label of the encoding
FAMILIES: dict[str, Look] = {
    "rope": (BLUE, "circle", "●"),
    "rope-alone": (CYAN, "triangle-down", "▼"),
    "rope-absolute": (PURPLE, "diamond", "◆"),
    "partial-1": ("#6f8fc4", "circle-open", "○"),
    "partial-2": ("#5d86cc", "circle-open-dot", "◉"),
    "partial-4": ("#4c7ed4", "diamond-open", "◇"),
    "partial-8": ("#3e77da", "square-open", "□"),
    "mla": (ORANGE, "square", "■"),
    "absolute": (PINK, "triangle-up", "▲"),
    "relative": (GREEN, "cross", "✚"),
    "alibi": (RED, "x", "✖"),
    "random": (BROWN, "star", "★"),
    "nope": (GREY, "star-diamond", "✦"),
}
OTHER: Look = (GREY, "circle-open", "○")
# for labels without an own colour, in this order
PALETTE: tuple[Look, ...] = (
    (BLUE, "circle", "●"),
    (ORANGE, "square", "■"),
    (GREEN, "diamond", "◆"),
    (PINK, "triangle-up", "▲"),
    (PURPLE, "triangle-down", "▼"),
    (RED, "x", "✖"),
    (CYAN, "cross", "✚"),
    (BROWN, "star", "★"),
    ("#6a9a1d", "pentagon", "⬟"),
    (GREY, "star-diamond", "✦"),
    ("#b9770e", "triangle-right", "▶"),
    ("#5d7fb8", "triangle-left", "◀"),
    ("#b05c7d", "hexagon", "⬢"),
    ("#4c8f8a", "hourglass", "⧗"),
)
_HEADS = (
    (BLUE, "circle", "●", "○"),
    (ORANGE, "square", "■", "□"),
    (GREEN, "triangle-up", "▲", "△"),
    (PINK, "diamond", "◆", "◇"),
    (CYAN, "triangle-down", "▼", "▽"),
    (BROWN, "cross", "✚", "✛"),
    (PURPLE, "x", "✖", "✕"),
    (RED, "star", "★", "☆"),
)
_SPECTRUM = (BLUE, CYAN, GREEN, BROWN, ORANGE, RED, PINK, PURPLE)
_LAYERS = (
    (BLUE, "solid"),
    (ORANGE, "dash"),
    (GREEN, "dot"),
    (PINK, "dashdot"),
    (GREY, "longdash"),
    (PURPLE, "longdashdot"),
)
DEPTHS = (BLUE, PINK, ORANGE)  # a scale from the first to the last layer
# 0 is the page's background, accuracy drops are warm, gains are cool
HEAT = {"light": ("#2b6cb0", "#f4f4f1", "#b3311b"), "dark": ("#58a6ff", "#262b33", "#ff7a52")}


def layer_look(layer: int) -> tuple[str, str]:
    """Colour and dash of a layer, counted from 0."""
    return _LAYERS[layer % len(_LAYERS)]


def head_look(head: int) -> Look:
    """Colour and marker of a head, counted from 0; unique for 16 heads."""
    tint, marker, full, empty = _HEADS[head % len(_HEADS)]
    return (tint, f"{marker}-open", empty) if head // len(_HEADS) % 2 else (tint, marker, full)


def spectrum(count: int) -> list[str]:
    """``count`` colours of a sequential scale, blue first."""
    return [_SPECTRUM[round(i * (len(_SPECTRUM) - 1) / max(1, count - 1))] for i in range(count)]


def faded(hexadecimal: str, alpha: float) -> str:
    """A colour with transparency."""
    red, green, blue = (int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {alpha:g})"
