"""The figures of sets of heads: what is left as heads of the whole model go, and how few carry the skill."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import plotly.graph_objects as go

from toeplens.lens.ablation.head_sets import HeadSets
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.page.look import TASKS, colour, name, ordered
from toeplens.papers.deposit.page.parts import accuracy_top, model_panel, protocol_title
from toeplens.report.kit.blocks import Block, Group, Panel, Sign, View
from toeplens.report.kit.canvas import GUESS, Canvas
from toeplens.report.kit.dots import Series, dots
from toeplens.studies import CellResult
from toeplens.studies.kit.results import estimated

MEASURE = "sets"
# curve of a record: how its legend calls it, and its dash
_CURVES: dict[str, tuple[str, str]] = {
    "greedy": ("the most harmful next", "solid"),
    "importance": ("by what each is worth alone", "dash"),
    "random": ("in random orders", "dot"),
}
Models = list[tuple[str, list[CellResult]]]


def sets_of(cell: CellResult) -> HeadSets | None:
    """The sets of a cell; None where they were not looked for."""
    record = cell.measures.get(MEASURE)
    return HeadSets.from_dict(record) if record else None


def removed(state: Reproduction) -> Block:
    """Accuracy against the number of heads that are silenced in the whole model."""

    def draw(protocol: Protocol, task: str, models: Models) -> list[Panel]:
        return [
            model_panel(cells[0], curves(cells, accuracy_top(state, task)), f"Accuracy as heads go. {_half(cells)}")
            for _, cells in models
        ]

    signs = [Sign(key, title, GUESS, dash=dash) for key, (title, dash) in _CURVES.items()]
    caption = (
        "Test accuracy as heads of all layers are silenced one after another, the mean over seeds: the most harmful "
        "next, by what each is worth alone, and in random orders. A steep first step is one head that all depends on; "
        "the dotted grey line is chance."
    )
    title = "Silencing heads of the whole model"
    return Block("sets", title, caption, _views(state, draw, title=False), "small", signs)


def sizes(state: Reproduction) -> Block:
    """How many heads are enough, by encoding."""
    keep = {found.keep for cell in state.results.cells if (found := sets_of(cell))}
    share = " or ".join(f"{value:.0%}" for value in sorted(keep))

    def draw(protocol: Protocol, task: str, models: Models) -> list[Panel]:
        records = [{c.key.seed: found for c in cells if (found := sets_of(c))} for _, cells in models]
        values = [{seed: float(len(found.sufficient)) for seed, found in seeds.items()} for seeds in records]
        most = max(len(found.order) for seeds in records for found in seeds.values())
        lines = [name(protocol, label) for label, _ in models]
        series = [Series("", "", "circle", values, [colour(label) for label, _ in models])]
        drawn = dots(lines, series, f"heads that are enough, of {most}", span=(0, 1.05 * most))
        means = zip(lines, map(estimated, values), strict=True)
        told = "; ".join(f"{line} {mean.value:.1f}" for line, mean in means if mean)
        return [Panel(protocol_title(protocol), drawn, f"Heads that are enough, of {most}, mean over seeds: {told}.")]

    caption = (
        f"The size of a set of heads that keeps {share} of the skill when all other heads of the model are silenced, "
        "and from which no head can go: the smallest such set may be smaller still. Rings are seeds, the bar is the "
        "95% interval of the mean."
    )
    return Block("sets-size", "How many heads are enough", caption, _views(state, draw, title=True))


def _views(state: Reproduction, draw: Callable[[Protocol, str, Models], list[Panel]], *, title: bool) -> list[View]:
    """A view a task; protocols as headings, or as titles of panels that stand side by side."""
    views = []
    for task in TASKS:
        groups = []
        for protocol in state.plan.protocols:
            models = _models(state, protocol, task)
            groups.append(Group(protocol_title(protocol), draw(protocol, task, models) if models else []))
        if title:
            groups = [Group("", [panel for group in groups for panel in group.panels])]
        views.append(View(TASKS[task], groups))
    return views


def _models(state: Reproduction, protocol: Protocol, task: str) -> Models:
    under = state.results.under(protocol)
    found = [(label, [c for c in under.of(task, label) if c.measures.get(MEASURE)]) for label in under.labels(task)]
    places = ordered(label for label, cells in found if cells)
    return sorted(((label, cells) for label, cells in found if cells), key=lambda model: places.index(model[0]))


def curves(cells: Sequence[CellResult], top: float) -> go.Figure:
    """The mean curves over the seeds; points that were not run are bridged."""
    records = [found for cell in cells if (found := sets_of(cell))]
    canvas = Canvas(170, left=44, right=6, top=4, bottom=34)
    canvas.line_at(records[0].chance, dash="dot")
    tint = colour(cells[0].key.label)
    for curve, (title, dash) in _CURVES.items():
        count, accuracy = mean_curve(records, curve)
        canvas.add(
            "scatter",
            x=count,
            y=accuracy,
            mode="lines",
            line={"color": GUESS if curve == "random" else tint, "width": 2, "dash": dash},
            meta=curve,
            hovertemplate=f"%{{x}} heads silenced, {title}: %{{y:.1%}}<extra></extra>",
        )
    canvas.x("heads silenced", nticks=6)
    canvas.percent(top)
    return canvas.figure()


def mean_curve(records: Sequence[HeadSets], curve: str) -> tuple[list[int], list[float]]:
    """How many heads are silenced, and the mean accuracy over seeds (and orders), at the points that all have."""
    rows = np.concatenate([np.atleast_2d(getattr(record, curve)) for record in records])
    run = np.flatnonzero(np.isfinite(rows).all(0))
    return run.tolist(), [round(float(value), 4) for value in rows[:, run].mean(0)]


def _half(cells: Sequence[CellResult]) -> str:
    """After how many heads half of the skill is gone."""
    records = [found for cell in cells if (found := sets_of(cell))]
    middle = float(np.mean([(record.baseline + record.chance) / 2 for record in records]))
    parts = []
    for curve, (title, _) in _CURVES.items():
        pairs = zip(*mean_curve(records, curve), strict=True)
        gone = next((str(count) for count, accuracy in pairs if accuracy <= middle), "none")
        parts.append(f"{title} {gone}")
    return f"Heads silenced when half of the skill is gone: {', '.join(parts)}."
