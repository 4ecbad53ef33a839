"""Colours and markers of all pages, readable in light and dark mode: encodings, heads, layers, heat maps."""

from __future__ import annotations

from pathlib import Path

from toeplens.ground.files import read_yaml

_DATA = read_yaml(Path(__file__).with_name("colours.yaml"))
TINTS: dict[str, str] = _DATA["tints"]
BLUE, ORANGE, GREEN, PINK, RED, PURPLE, CYAN, BROWN, GREY = TINTS.values()
GUESS = "rgba(128, 136, 150, 0.95)"  # reference lines


def tint_of(name: str) -> str:
    """The colour of a name in `TINTS`; other colours unchanged."""
    return TINTS.get(name, name)


Look = tuple[str, str, str]  # colour, plotly marker, the same marker as a character

FAMILIES: dict[str, Look] = {label: (tint_of(tint), *sign) for label, (tint, *sign) in _DATA["families"].items()}
ENCODINGS: dict[str, str] = _DATA["encodings"]  # family by label or name of an encoding in a grid study
OTHER: Look = (GREY, "circle-open", "○")
# for labels without an own colour, in this order
PALETTE: tuple[Look, ...] = tuple((tint_of(tint), *sign) for tint, *sign in _DATA["palette"])
_SPECTRUM = (BLUE, CYAN, GREEN, BROWN, ORANGE, RED, PINK, PURPLE)
DEPTHS = (BLUE, PINK, ORANGE)  # a scale from the first to the last layer
# 0 is the page's background, accuracy drops are warm, gains are cool
HEAT = {"light": ("#2b6cb0", "#f4f4f1", "#b3311b"), "dark": ("#58a6ff", "#262b33", "#ff7a52")}


def layer_look(layer: int) -> tuple[str, str]:
    """Colour and dash of a layer, counted from 0."""
    tint, dash = _DATA["layers"][layer % len(_DATA["layers"])]
    return TINTS[tint], dash


def head_look(head: int) -> Look:
    """Colour and marker of a head, counted from 0; unique for 16 heads."""
    heads = _DATA["heads"]
    tint, marker, full, empty = heads[head % len(heads)]
    return (TINTS[tint], f"{marker}-open", empty) if head // len(heads) % 2 else (TINTS[tint], marker, full)


def spectrum(count: int) -> list[str]:
    """``count`` colours of a sequential scale, blue first."""
    return [_SPECTRUM[round(i * (len(_SPECTRUM) - 1) / max(1, count - 1))] for i in range(count)]


def faded(hexadecimal: str, alpha: float) -> str:
    """A colour with transparency."""
    red, green, blue = (int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {alpha:g})"
