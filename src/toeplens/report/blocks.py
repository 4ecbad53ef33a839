"""The report's numbered figures: which panels they have, in which order, and what they say to someone who can't see them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

import plotly.graph_objects as go

from toeplens.model import Protocol
from toeplens.report import figures
from toeplens.report.look import PROTOCOL_NAMES, TASKS, colour, glyph, listed, name, ordered, percent
from toeplens.report.words import describe_drops, describe_rows
from toeplens.studies import CellResult
from toeplens.studies.reproduce import COUNT, DISTANCE, SCALES, Reproduction, title


@dataclass(frozen=True)
class Panel:
    """One plot: its heading, its figure, and the same in words."""

    title: str
    figure: go.Figure
    words: str
    tint: str = ""
    glyph: str = ""


@dataclass(frozen=True)
class Group:
    """Panels that stand together under a heading; ``note`` says what is missing."""

    title: str
    panels: list[Panel]
    note: str = ""


@dataclass(frozen=True)
class View:
    """One of the choices of a figure's menu."""

    title: str
    groups: list[Group]


@dataclass(frozen=True)
class Sign:
    """An entry of a legend. ``key`` is what traces carry as their meta; empty if nothing can be switched."""

    key: str
    title: str
    tint: str
    glyph: str


@dataclass(frozen=True)
class Block:
    """A numbered figure.

    width   ``wide`` or ``small`` panels
    legend  shown above; entries with a key switch their traces off and on
    heat    end of the colour scale, for heat maps
    """

    id: str
    number: int
    title: str
    caption: str
    views: list[View]
    width: str = "wide"
    legend: list[Sign] = field(default_factory=list)
    heat: float | None = None


def blocks(state: Reproduction) -> dict[str, Block]:
    """All figures that have anything to show, by id, in the page's order."""
    makers = (_accuracy, _convergence_distance, _convergence_count, _heads, _violins, _skill, _cumulative, _partial, _sinusoid)
    found: dict[str, Block] = {}
    for make in makers:
        block = make(state, len(found) + 1)
        views = [view for view in block.views if any(group.panels for group in view.groups)]
        if views:
            found[block.id] = Block(**{**vars(block), "views": views})
    return found


def _top(state: Reproduction, task: str | None = None, split: str = "test") -> float:
    """Upper end of the accuracy axes of a task's panels."""
    cells = [cell for cell in state.results.cells if task in (None, cell.key.task)]
    values = [row.get(f"{split}_accuracy") for cell in cells for row in cell.epochs]
    values += [cell.accuracy for cell in cells]
    largest = max((value for value in values if value is not None and math.isfinite(value)), default=1.0)
    return 1.0 if largest > 0.75 else min(1.0, math.ceil(largest * 10) / 10)


def _accuracy(state: Reproduction, number: int) -> Block:
    groups = []
    for task in TASKS:
        panels = []
        for protocol in state.plan.protocols:
            rows = [row for row in state.table if (row.protocol, row.task) == (protocol, task)]
            if rows:
                figure = figures.accuracies(rows, state.results, _top(state, task))
                panels.append(Panel(PROTOCOL_NAMES[protocol].capitalize(), figure, describe_rows(rows)))
        groups.append(Group(TASKS[task], panels))
    caption = (
        "Final test accuracy, best on top: the mean, and with several seeds each seed as a small circle. The upright bar is "
        "the paper's Table 1, from much larger models. Lines: what a constant guess scores (chance), and what a guess "
        "scores that knows only the text's length."
    )
    return Block("accuracy", number, "Test accuracy by encoding", caption, [View("", groups)])


def _convergence(state: Reproduction, number: int, task: str, paper: int) -> Block:
    groups = []
    for protocol in state.plan.protocols:
        cells = [cell for cell in state.results.under(protocol).cells if cell.key.task == task and cell.epochs]
        panels = []
        for split in get_args(figures.Split):
            if cells:
                top = max(_top(state, task, each) for each in get_args(figures.Split))
                figure = figures.convergence(state.results, protocol, task, split, top)
                panels.append(Panel(f"{split.capitalize()} accuracy", figure, _last_epochs(cells, split)))
        groups.append(Group(PROTOCOL_NAMES[protocol].capitalize(), panels))
    labels = ordered(c.key.label for c in state.results.cells if c.key.task == task and not c.key.label.startswith("partial-"))
    legend = [Sign(label, _legend_title(state, label), colour(label), glyph(label)) for label in labels]
    caption = (
        f"Accuracy after each epoch (the paper's Fig. {paper}); with several seeds the mean, and the range as a band. Train accuracy "
        "is counted during the epoch, so it trails. Press an encoding to hide or show its lines."
    )
    return Block(f"convergence-{task}", number, f"How fast each encoding learns {TASKS[task]}", caption, [View("", groups)], legend=legend)


def _convergence_distance(state: Reproduction, number: int) -> Block:
    return _convergence(state, number, DISTANCE, 2)


def _convergence_count(state: Reproduction, number: int) -> Block:
    return _convergence(state, number, COUNT, 3)


def _legend_title(state: Reproduction, label: str) -> str:
    hidden = label == "rope" and "released" in state.plan.protocols
    return "RoPE (released: with sinusoid)" if hidden else title(label)


def _last_epochs(cells: Sequence[CellResult], split: str) -> str:
    last = [f"{name(c.key.protocol, c.key.label)} {percent(c.epochs[-1].get(f'{split}_accuracy'))}" for c in cells if c.epochs]
    return f"Curves of {split} accuracy by epoch; after the last epoch: {', '.join(last)}."


def _heads(state: Reproduction, number: int) -> Block:
    limit = _limit(state)
    views = []
    seeds = sorted({cell.key.seed for cell in state.results.cells})
    for task in TASKS:
        for seed in seeds:
            groups = [_models(state, p, task, lambda cells: _heat(cells[0], limit), seed) for p in state.plan.protocols]
            views.append(View(f"{TASKS[task]}, seed {seed}", groups))
    caption = (
        "Percentage points of accuracy lost when the output of one head is set to zero, everything else left as it is "
        "(the paper's Figs. 4, 7 and 8). One colour scale for all maps; hover for the 95 % bootstrap interval."
    )
    return Block("heads", number, "What each head is worth", caption, views, "small", heat=limit)


def _heat(cell: CellResult, limit: float) -> Panel:
    text = name(cell.key.protocol, cell.key.label)
    return Panel(text, figures.heatmap(cell, limit), describe_drops(cell), colour(cell.key.label), glyph(cell.key.label))


def _limit(state: Reproduction) -> float:
    """End of the colour scale: the largest loss or gain in the study, rounded up to 5 points."""
    drops = [float(abs(cell.ablation.drops).max()) for cell in state.results.cells if cell.ablation is not None]
    return max(0.05, math.ceil(max(drops, default=0.05) * 20 - 1e-9) / 20)


def _models(
    state: Reproduction,
    protocol: Protocol,
    task: str,
    draw: Callable[[list[CellResult]], Panel],
    seed: int | None = None,
) -> Group:
    """A panel for each encoding that has ablated models; the note names those that have none."""
    under, panels = state.results.under(protocol), []
    planned = [cell.key for cell in state.plan.cells() if cell.key.protocol == protocol and cell.key.task == task]
    wanted = [key for key in planned if seed in (None, key.seed)]
    for label in ordered(key.label for key in wanted):
        cells = [cell for cell in under.of(task, label) if cell.ablation is not None and seed in (None, cell.key.seed)]
        if cells:
            panels.append(draw(cells))
    here = [cell for cell in under.cells if cell.key.task == task and seed in (None, cell.key.seed)]
    diverged = {cell.key for cell in here if cell.status == "diverged"}
    open_ = set(wanted) - {cell.key for cell in here}
    notes = [_missing(protocol, keys, why) for keys, why in ((open_, "Not finished yet"), (diverged, "Diverged")) if keys]
    return Group(PROTOCOL_NAMES[protocol].capitalize(), panels, " ".join(notes))


def _missing(protocol: Protocol, keys: Iterable, why: str) -> str:
    return f"{why}: {listed(name(protocol, label) for label in ordered(key.label for key in keys))}."


def _violins(state: Reproduction, number: int) -> Block:
    drops = [float(value) for cell in state.results.cells if cell.ablation is not None for value in cell.ablation.drops.ravel()]
    low, high = min(drops, default=0.0), max(drops, default=1.0)
    room = 0.06 * max(high - low, 0.02)

    def draw(cells: list[CellResult]) -> Panel:
        text, label = name(cells[0].key.protocol, cells[0].key.label), cells[0].key.label
        words = " ".join(describe_drops(cell) for cell in cells[:3])
        return Panel(text, figures.drops_by_layer(cells, low - room, high + room), words, colour(label), glyph(label))

    views = [View(TASKS[task], [_models(state, p, task, draw) for p in state.plan.protocols]) for task in TASKS]
    caption = (
        "The same losses as a distribution, in the papers' form: a point is a head, of every seed; the violin is their density "
        "(with few heads, trust the points)."
    )
    return Block("violins", number, "Losses by layer, all heads of all seeds", caption, views, "small")


def _skill(state: Reproduction, number: int) -> Block:
    panels = []
    for protocol in state.plan.protocols:
        cells = [cell for cell in state.results.under(protocol).cells if cell.ablation is not None]
        if cells:
            words = "Accuracy against the largest loss by one head. " + " ".join(describe_drops(cell) for cell in cells[:4])
            panels.append(Panel(PROTOCOL_NAMES[protocol].capitalize(), figures.skill_and_drop(state.results, protocol), words))
    labels = ordered(cell.key.label for cell in state.results.cells if cell.ablation is not None)
    legend = [Sign(label, _legend_title(state, label), colour(label), glyph(label)) for label in labels]
    caption = (
        "If only RoPE put its skill into one head, only RoPE's markers would lie near the dotted line, where one head carries all. "
        "Filled markers: Task 1; open ones: Task 2."
    )
    return Block("skill", number, "Accuracy, and how much of it hangs on one head", caption, [View("", [Group("", panels)])], legend=legend)


def _cumulative(state: Reproduction, number: int) -> Block:
    def draw(cells: list[CellResult]) -> Panel:
        text, label = name(cells[0].key.protocol, cells[0].key.label), cells[0].key.label
        half = [str(layer.half_at) if layer.half_at is not None else "never" for layer in cells[0].deposits()]
        words = f"Accuracy as the heads of a layer are silenced one by one. Heads until half of the skill is gone, by layer: {', '.join(half)}."
        return Panel(text, figures.cumulative(cells, _top(state, cells[0].key.task)), words, colour(label), glyph(label))

    views = [View(TASKS[task], [_models(state, p, task, draw) for p in state.plan.protocols]) for task in TASKS]
    depth = max((len(cell.ablation.drops) for cell in state.results.cells if cell.ablation is not None), default=0)
    legend = [Sign(f"layer-{i + 1}", f"layer {i + 1}", figures.layer_look(i)[0], "━" if i == 0 else "╍") for i in range(depth)]
    caption = (
        "Accuracy with a layer's heads silenced together, most important first; the mean over seeds. A steep first step is a single "
        "head at work; a slow fall is work spread over many. Lines across: chance, and where half of the skill is gone."
    )
    return Block("cumulative", number, "Silencing one head after another", caption, views, "small", legend)


def _partial(state: Reproduction, number: int) -> Block:
    heads = SCALES[state.plan.scale].model["num_heads"]
    panels = []
    for protocol in state.plan.protocols:
        for task in TASKS:
            found = figures.rotated_heads(state.results, protocol, task, heads)
            if any(label.startswith("partial-") for _, label in found):
                rows = [row for row in state.table if (row.protocol, row.task) == (protocol, task) and row.label in dict(found).values()]
                figure = figures.partial_rope(state.results, protocol, task, heads, _top(state, task))
                panels.append(Panel(f"{PROTOCOL_NAMES[protocol].capitalize()}, {TASKS[task]}", figure, describe_rows(rows)))
    caption = (
        "Test accuracy when only some heads of every layer rotate (the paper's Fig. 5). No rotating head is NoPE; all heads is RoPE, in the "
        "released protocol without its sinusoid, as the program for this experiment has none."
    )
    return Block("partial", number, "RoPE on some of the heads", caption, [View("", [Group("", panels)])])


def _sinusoid(state: Reproduction, number: int) -> Block:
    limit = _limit(state)
    groups = []
    for protocol in state.plan.protocols:
        pair = ("rope-alone", "rope") if protocol == "released" else ("rope", "rope-absolute")
        under = state.results.under(protocol)
        rows = [r for r in state.table if (r.protocol, r.task) == (protocol, DISTANCE) and r.label in (*pair, "absolute")]
        maps = [_heat(cell, limit) for label in pair for cell in under.of(DISTANCE, label)[:1] if cell.ablation is not None]
        if maps and rows:
            accuracy = Panel("Test accuracy", figures.accuracies(rows, state.results, _top(state, DISTANCE)), describe_rows(rows))
            groups.append(Group(PROTOCOL_NAMES[protocol].capitalize(), [accuracy, *maps]))
    caption = (
        "Task 1 with RoPE alone, and with a sinusoid added to the input as well (the paper's Fig. 6): its accuracy, and where its "
        "heads matter (first seed; the colours of the other heat maps)."
    )
    return Block("sinusoid", number, "RoPE together with an absolute encoding", caption, [View("", groups)], "medium", heat=limit)
