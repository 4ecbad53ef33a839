"""Colours and markers that all pages share: of encodings, of the layers of a model, and of heat."""

from __future__ import annotations

# label: colour (readable on white and on near-black), plotly marker, the same marker as a character
FAMILIES: dict[str, tuple[str, str, str]] = {
    "rope": ("#2f6fe0", "circle", "●"),
    "rope-alone": ("#0e9bb5", "triangle-down", "▼"),
    "rope-absolute": ("#8456d8", "diamond", "◆"),
    "partial-1": ("#6f8fc4", "circle-open", "○"),
    "partial-2": ("#5d86cc", "circle-open-dot", "◉"),
    "partial-4": ("#4c7ed4", "diamond-open", "◇"),
    "partial-8": ("#3e77da", "square-open", "□"),
    "mla": ("#de7a00", "square", "■"),
    "absolute": ("#c8479f", "triangle-up", "▲"),
    "relative": ("#1d9a5b", "cross", "✚"),
    "alibi": ("#d2453d", "x", "✖"),
    "random": ("#9c7430", "star", "★"),
    "nope": ("#858b95", "star-diamond", "✦"),
}
OTHER = ("#858b95", "circle-open", "○")

_LAYERS = (
    ("#2f6fe0", "solid"),
    ("#de7a00", "dash"),
    ("#1d9a5b", "dot"),
    ("#c8479f", "dashdot"),
    ("#858b95", "longdash"),
    ("#8456d8", "longdashdot"),
)
# a drop of nothing is the page's ground, a loss is warm, a gain is cool
HEAT = {"light": ("#2b6cb0", "#f4f4f1", "#b3311b"), "dark": ("#58a6ff", "#262b33", "#ff7a52")}


def layer_look(layer: int) -> tuple[str, str]:
    """Colour and dash of a layer, counted from 0."""
    return _LAYERS[layer % len(_LAYERS)]
