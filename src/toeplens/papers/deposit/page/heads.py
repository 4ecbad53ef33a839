"""The figures about heads: what each is worth, and what is left when several are silenced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from toeplens.ground.words import listed, percent, points
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.page import figures
from toeplens.papers.deposit.page.look import TASKS, name, ordered, plain_keys
from toeplens.papers.deposit.page.parts import (
    accuracy_top,
    drop_limit,
    drop_ramp,
    heat_panel,
    legend,
    model_panel,
    protocol_title,
)
from toeplens.papers.deposit.page.words import describe_drops
from toeplens.report.kit.blocks import Block, Group, Panel, Sign, View
from toeplens.report.kit.canvas import GUESS
from toeplens.report.kit.colours import layer_look
from toeplens.studies import CellResult, Key


def heads(state: Reproduction) -> Block:
    """Heat maps of what each head is worth (Figs. 4, 7, 8)."""
    limit = drop_limit(state)

    def draw(cells: list[CellResult]) -> Panel:
        return heat_panel(cells[0], limit)

    views = []
    seeds = sorted({cell.key.seed for cell in state.results.cells})
    for task in TASKS:
        for seed in seeds:
            groups = [
                _models(state, p, task, lambda cells: heat_panel(cells[0], limit), seed) for p in state.plan.protocols
            ]
            views.append(View(f"{TASKS[task]}, seed {seed}", groups))
    caption = (
        "Percentage points of accuracy lost when the output of one head is set to zero, everything else left as it "
        "is (the paper’s Figs. 4, 7 and 8). One colour scale for all maps; hover for the 95% bootstrap interval."
    )
    return Block("heads", "What each head is worth", caption, views, "small", ramp=drop_ramp(limit))


def _models(
    state: Reproduction,
    protocol: Protocol,
    task: str,
    draw: Callable[[list[CellResult]], Panel],
    seed: int | None = None,
) -> Group:
    """A panel for each encoding that has ablated models, of one seed or of all; the note says which are missing."""
    keys = [key for key in plain_keys(state.plan) if (key.protocol, key.task) == (protocol, task)]
    wanted = [key for key in keys if seed in (None, key.seed)]
    found = {cell.key: cell for cell in state.results.under(protocol).cells}
    panels = []
    for label in ordered(key.label for key in wanted):
        cells = [found[key] for key in wanted if key.label == label and key in found]
        ablated = [cell for cell in cells if cell.ablation is not None]
        if ablated:
            panels.append(draw(ablated))
    unfinished = [key for key in wanted if key not in found]
    diverged = [key for key in wanted if key in found and found[key].status == "diverged"]
    notes = [_missing(keys, why) for keys, why in ((unfinished, "Not finished yet"), (diverged, "Diverged")) if keys]
    return Group(protocol_title(protocol), panels, " ".join(notes))


def _missing(keys: Sequence[Key], why: str) -> str:
    """Which models are missing: by name and seed, or how many if they are too many to read."""
    if len(keys) > 12:
        return f"{why}: {len(keys)} models."
    return f"{why}: {listed(f'{name(key.protocol, key.label)} (seed {key.seed})' for key in keys)}."


def violins(state: Reproduction) -> Block:
    """The same losses by layer, as the papers draw them."""
    ablations = [cell.ablation for cell in state.results.cells if cell.ablation is not None]
    low = min((float(ablation.drops.min()) for ablation in ablations), default=0.0)
    high = max((float(ablation.drops.max()) for ablation in ablations), default=1.0)
    room = 0.06 * max(high - low, 0.02)

    def draw(cells: list[CellResult]) -> Panel:
        words = " ".join(describe_drops(cell) for cell in cells[:3])
        return model_panel(cells[0], figures.drops_by_layer(cells, low - room, high + room), words)

    views = [View(TASKS[task], [_models(state, p, task, draw) for p in state.plan.protocols]) for task in TASKS]
    caption = (
        "The same losses as a distribution, in the papers’ form: a point is a head, of every seed; the violin is "
        "their density (with few heads, trust the points)."
    )
    return Block("violins", "Losses by layer, all heads of all seeds", caption, views, "small")


def skill(state: Reproduction) -> Block:
    """Whether accuracy and the largest loss go together, whatever the encoding."""
    views = []
    for task in TASKS:
        panels = []
        for protocol in state.plan.protocols:
            cells = [c for c in state.results.under(protocol).cells if c.key.task == task and c.ablation is not None]
            if cells:
                figure = figures.accuracy_and_drop(state.results, protocol, task, accuracy_top(state, task))
                panels.append(Panel(protocol_title(protocol), figure, _skills(protocol, cells)))
        views.append(View(TASKS[task], [Group("", panels)]))
    signs = legend(state, (cell.key.label for cell in state.results.cells if cell.ablation is not None))
    caption = (
        "A marker is a model. On the dotted line silencing one head takes the model down to chance. If only RoPE "
        "put its skill into one head, only RoPE’s markers would lie near it."
    )
    return Block("skill", "Accuracy, and how much of it hangs on one head", caption, views, legend=signs)


def _skills(protocol: Protocol, cells: Sequence[CellResult]) -> str:
    """Accuracy and largest loss, by encoding."""
    parts = []
    for label in ordered(cell.key.label for cell in cells):
        found = [cell.ablation for cell in cells if cell.key.label == label and cell.ablation is not None]
        accuracy, drop = np.mean([(ablation.baseline, ablation.drops.max()) for ablation in found], axis=0).tolist()
        parts.append(f"{name(protocol, label)} {percent(accuracy)} and {points(drop)}")
    return f"Accuracy, and the largest loss by one head in points, mean over seeds: {'; '.join(parts)}."


def cumulative(state: Reproduction) -> Block:
    """What is left as a layer's heads are silenced one after another."""

    def draw(cells: list[CellResult]) -> Panel:
        half = ["never" if layer.half_at is None else str(layer.half_at) for layer in cells[0].deposits()]
        words = f"Accuracy as heads are silenced; heads until half of the skill is gone, by layer: {', '.join(half)}."
        return model_panel(cells[0], figures.cumulative(cells, accuracy_top(state, cells[0].key.task)), words)

    views = [View(TASKS[task], [_models(state, p, task, draw) for p in state.plan.protocols]) for task in TASKS]
    depth = max((len(cell.ablation.drops) for cell in state.results.cells if cell.ablation is not None), default=0)
    looks = [layer_look(index) for index in range(depth)]
    signs = [Sign(f"layer-{i}", f"layer {i}", tint, dash=dash) for i, (tint, dash) in enumerate(looks, start=1)]
    signs += [Sign("", "half of the skill gone", GUESS, dash="dash"), Sign("", "chance", GUESS, dash="dot")]
    caption = (
        "Accuracy with a layer’s heads silenced together, most important first; the mean over seeds. A steep first "
        "step is a single head at work; a slow fall is work spread over many."
    )
    return Block("cumulative", "Silencing one head after another", caption, views, "small", signs)
