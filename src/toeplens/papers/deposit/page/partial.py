"""The figures about RoPE on some of the heads, and in one layer alone."""

from __future__ import annotations

from toeplens.ground.words import percent
from toeplens.model import Protocol
from toeplens.papers.deposit import SCALES, Reproduction, title
from toeplens.papers.deposit.factors import concentrated
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.page import partial_figures as figures
from toeplens.papers.deposit.page.deposits import SHARE
from toeplens.papers.deposit.page.look import TASKS, colour, ordered
from toeplens.papers.deposit.page.parts import accuracy_top, protocol_title
from toeplens.report.kit.blocks import Block, Group, Panel, Sign, View
from toeplens.report.kit.dots import Series, dots
from toeplens.studies import CellResult
from toeplens.studies.kit.results import estimated
from toeplens.training.presets import DISTANCE

_NAME = "partial"


def accuracy(state: Reproduction) -> Block:
    """Accuracy by how many heads rotate (Fig. 5)."""
    heads = SCALES[state.plan.scale].model["num_heads"]
    panels, drawn_too = [], False
    for task, what in TASKS.items():
        for protocol in state.plan.protocols:
            found = figures.rotated_heads(state.results, protocol, task, heads)
            drawn = figures.rotated_heads(state.results, protocol, task, heads, drawn=True)
            if any(Label.parse(label).heads is not None for _, label in found):
                drawn_too |= bool(drawn)
                figure = figures.partial_rope(state.results, protocol, task, heads, accuracy_top(state, task))
                panels.append(
                    Panel(
                        f"{what}, {protocol_title(protocol).lower()}",
                        figure,
                        _accuracies(state, protocol, task, [*found, *drawn]),
                    )
                )
    caption = (
        "Test accuracy when only some heads of every layer rotate (the paper’s Fig. 5). No rotating head is NoPE; "
        "all heads is RoPE, in the released protocol without its sinusoid, as the program for this experiment has "
        "none. A point is a seed; the line joins the means."
    )
    signs = []
    if drawn_too:
        caption += " Crosses: as many heads of each layer, drawn at random from the seed."
        signs = [
            Sign("first", "the first heads", colour("rope"), "○"),
            Sign("random", "heads drawn at random", figures.DRAWN, "✕"),
        ]
    return Block(_NAME, "RoPE on some of the heads", caption, [View("", [Group("", panels)])], legend=signs)


def _accuracies(state: Reproduction, protocol: Protocol, task: str, places: list[tuple[int, str]]) -> str:
    under, parts = state.results.under(protocol), []
    for count, label in places:
        mean = estimated({c.key.seed: c.accuracy for c in under.of(task, label) if c.status == "complete"})
        if mean:
            which = f"{count} drawn at random" if label.endswith("/random") else str(count)
            parts.append(f"{which} {percent(mean.value)}")
    return f"Test accuracy by number of rotating heads, mean over seeds: {', '.join(parts)}."


def layers(state: Reproduction) -> Block:
    """Accuracy with RoPE in one layer alone."""
    panels = []
    top = accuracy_top(state, DISTANCE)
    for protocol in state.plan.protocols:
        lines = _by_layer(state, protocol)
        if any(Label.parse(label).layer for label, _ in lines):
            values = [{c.key.seed: c.accuracy for c in cells if c.status == "complete"} for _, cells in lines]
            series = [Series("", "", "circle", values, [colour(label) for label, _ in lines])]
            texts = [title(label) for label, _ in lines]
            drawn = dots(texts, series, "test accuracy, per cent", scale=100, span=(0, 104 * top))
            means = [estimated(value) for value in values]
            told = [f"{text} {percent(mean.value)}" for text, mean in zip(texts, means, strict=True) if mean]
            panels.append(Panel(protocol_title(protocol), drawn, f"Test accuracy, mean over seeds: {', '.join(told)}."))
    caption = (
        "Test accuracy on Task 1 with RoPE on all heads of one layer and no encoding elsewhere, between NoPE and RoPE "
        "in every layer (without a sinusoid). Rings are seeds; the bar is the 95% interval of the mean."
    )
    return Block("partial-layers", "RoPE in one layer alone", caption, [View("", [Group("", panels)])])


def peaks(state: Reproduction) -> Block:
    """Where the deposit is as more heads rotate."""
    heads = SCALES[state.plan.scale].model["num_heads"]
    panels = []
    for protocol in state.plan.protocols:
        under = state.results.under(protocol)
        found = figures.rotated_heads(state.results, protocol, DISTANCE, heads)
        drawn = figures.rotated_heads(state.results, protocol, DISTANCE, heads, drawn=True)
        places = sorted(
            [(count, label, _rotate(count, heads)) for count, label in found]
            + [(count, label, f"{count} at random") for count, label in drawn]
        )
        rows = [(text, under.of(DISTANCE, label)) for _, label, text in places]
        rows += [
            (f"layer {at.layer} alone", cells)
            for label, cells in _by_layer(state, protocol)
            if (at := Label.parse(label)).layer
        ]
        rows = [(text, cells) for text, cells in rows if any(map(concentrated, cells))]
        if len(rows) > 2:
            panels.append(Panel(protocol_title(protocol), figures.peaks(rows), _where(rows)))
    caption = (
        "Task 1. The share of the skill that the first head of each layer carries, in per cent, the mean over seeds, "
        "as more heads of every layer rotate, and with RoPE in one layer alone: does the deposit move with the "
        "rotation (v1’s Figs. 9 to 14)? Models without skill are left out."
    )
    return Block(
        "partial-peaks",
        "Where the deposit is as more heads rotate",
        caption,
        [View("", [Group("", panels)])],
        ramp=SHARE,
    )


def _rotate(count: int, heads: int) -> str:
    ends = {0: "0 heads (NoPE)", heads: f"{heads} heads (RoPE)"}
    return ends.get(count, f"{count} head{'s' if count != 1 else ''}")


def _where(rows: list[tuple[str, list[CellResult]]]) -> str:
    told = []
    for text, cells in rows:
        shares = figures.mean_peaks(cells)
        layer = max(range(len(shares)), key=shares.__getitem__)
        told.append(f"{text}: layer {layer + 1}, {shares[layer]:.0%}")
    return f"Heat map of shares by layer. Most concentrated layer: {'; '.join(told)}."


def _by_layer(state: Reproduction, protocol: Protocol) -> list[tuple[str, list[CellResult]]]:
    """NoPE, RoPE in each layer alone, RoPE in all."""
    under = state.results.under(protocol)
    alone = [label for label in ordered(under.labels(DISTANCE)) if Label.parse(label).layer]
    found = [(label, under.of(DISTANCE, label)) for label in ("nope", *alone, figures.whole_rope(protocol))]
    return [(label, cells) for label, cells in found if cells]
