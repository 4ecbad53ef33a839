"""What the report's numbered figures are made of, and what several of them need."""

from __future__ import annotations

import math
from collections.abc import Iterable

import plotly.graph_objects as go

from toeplens.ground.words import points
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction, title
from toeplens.papers.deposit.page import figures
from toeplens.papers.deposit.page.look import PROTOCOL_NAMES, colour, glyph, name, ordered
from toeplens.papers.deposit.page.words import describe_drops
from toeplens.report.kit.blocks import Panel, Ramp, Sign
from toeplens.studies import CellResult


def model_panel(cell: CellResult, figure: go.Figure, words: str) -> Panel:
    """A panel that shows one model, or one encoding's models."""
    label = cell.key.label
    return Panel(name(cell.key.protocol, label), figure, words, colour(label), glyph(label))


def heat_panel(cell: CellResult, limit: float) -> Panel:
    """A model's heat map."""
    return model_panel(cell, figures.heatmap(cell, limit), describe_drops(cell))


def drop_ramp(limit: float) -> Ramp:
    """The legend of heat maps of points lost."""
    end = points(limit).replace(".0", "")
    return Ramp(f"gains {end}", f"loses {end} points")


def legend(state: Reproduction, labels: Iterable[str]) -> list[Sign]:
    """A legend of encodings."""
    return [Sign(label, _legend_title(state, label), colour(label), glyph(label)) for label in ordered(labels)]


def _legend_title(state: Reproduction, label: str) -> str:
    hidden = label == "rope" and "released" in state.plan.protocols
    return "RoPE (released: with sinusoid)" if hidden else title(label)


def protocol_title(protocol: Protocol) -> str:
    """A protocol's name, as a heading."""
    return PROTOCOL_NAMES[protocol].capitalize()


def accuracy_top(state: Reproduction, task: str) -> float:
    """Upper end of the accuracy axes of a task's panels: 1, unless every accuracy (and guess) is low."""
    cells = [cell for cell in state.results.cells if cell.key.task == task]
    values = [row.get(f"{split}_accuracy") for cell in cells for row in cell.epochs for split in ("train", "test")]
    values += [value for cell in cells for value in (cell.accuracy, cell.length_chance)]
    largest = max((value for value in values if value is not None and math.isfinite(value)), default=1.0)
    return 1.0 if largest > 0.75 else max(0.1, math.ceil(largest * 10) / 10)


def drop_limit(state: Reproduction) -> float:
    """End of the colour scale of all heat maps: the largest loss or gain in the study, rounded up to 5 points."""
    drops = [float(abs(cell.ablation.drops).max()) for cell in state.results.cells if cell.ablation is not None]
    return max(0.05, math.ceil(max(drops, default=0.05) * 20 - 1e-9) / 20)
