"""What class logits go back to, as a figure; forms of decay and ends of spectra, in words beside theirs."""

from __future__ import annotations

import plotly.graph_objects as go

from toeplens.ground.words import percent
from toeplens.report.kit.blocks import Block, Panel, View
from toeplens.report.kit.canvas import Canvas
from toeplens.report.kit.colours import BLUE
from toeplens.studies.decomposition import LayerStructure, Origins, RunStructure

TITLES = {
    "content": ("content", "#e58f24"),
    "position_input": ("position, at the input", BLUE),
    "position_attention": ("position, in attention", "#7d55c9"),
    "biases": ("biases", "#808a99"),
    "softmax": ("left over by the softmax", "#2a9d8f"),
}


def origins(structure: RunStructure) -> Block:
    """A bar for each part of the class logits; no panel where they were not traced back."""
    found = structure.origins
    caption = (
        "The logit of the predicted class, traced back through the model by relevance propagation, mean over the "
        "sequences. What the softmax leaves over belongs to neither: weights sum to 1, whatever the logits are."
    )
    panels = [] if found is None else [Panel("Parts of the mean logit", _bars(found), _words(found))]
    return Block("origins", "What class logits go back to", caption, [View.of(panels)])


def _bars(found: Origins) -> go.Figure:
    canvas = Canvas(230, left=160)
    canvas.add(
        "bar",
        orientation="h",
        x=list(found.parts.values()),
        y=[TITLES[name][0] for name in found.parts],
        marker={"color": [TITLES[name][1] for name in found.parts]},
        hovertemplate="%{y}: %{x:.3g}<extra></extra>",
    )
    canvas.line_at(0, vertical=True, dash="solid")
    canvas.x("logit")
    canvas.y(autorange="reversed", showgrid=False)
    return canvas.figure(bargap=0.35)


def _words(found: Origins) -> str:
    parts = ", ".join(f"{TITLES[name][0]} {value:.3g}" for name, value in found.parts.items())
    return (
        f"Of a mean logit of {found.logit:.3g} over {found.sequences} sequences: {parts}. Position has "
        f"{percent(found.share)} of the parts’ absolute values. They add up to each logit within "
        f"{found.error:.0e} of these."
    )


def decay_words(layer: LayerStructure) -> str:
    """The form that fits each head’s mean logit by distance best, where it says at least half of what there is."""
    told = []
    for head, decay in enumerate(layer.decays, start=1):
        if decay is not None and decay.explains:
            half = "" if decay.half_distance is None else f", half at {decay.half_distance:.3g} tokens"
            told.append(f"head {head} {decay.form} ({percent(decay.r2 or 0.0)} explained{half})")
    return f" Forms of decay that fit: {'; '.join(told)}." if told else ""


def ends_words(layer: LayerStructure) -> str:
    """Between which values the symbol of each position kernel runs, and its matrix’s eigenvalues within."""
    told = [
        f"head {head} {_figure(ends.symbol_low)} to {_figure(ends.symbol_high)}, eigenvalues {_figure(ends.lowest)} to "
        f"{_figure(ends.highest)}"
        for head, ends in enumerate(layer.ends, start=1)
    ]
    if not told:
        return "Symbol of each head."
    size = layer.ends[0].size
    return f"Ends of the symbol without the window, and of the eigenvalues of {size} rows: {'; '.join(told)}."


def _figure(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")
