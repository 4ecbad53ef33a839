"""Names, colours and markers of the report, its texts, and how its figures are arranged by task and protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import isfinite
from pathlib import Path

import plotly.graph_objects as go

from toeplens.ground.words import points, signed
from toeplens.lens import Estimate
from toeplens.model import Protocol
from toeplens.papers.deposit import PARTS, SCALES, Plan, Reproduction, title
from toeplens.papers.deposit.spec import PARTIAL, SWITCHES, Label
from toeplens.report.kit.blocks import Group, Panel, Ramp, Sign, Texts, View
from toeplens.report.kit.canvas import Series
from toeplens.report.kit.colours import FAMILIES, OTHER, layer_look
from toeplens.studies import Cell, CellResult, Key, Results
from toeplens.training.presets import COUNT, DISTANCE

TASKS: dict[str, str] = {DISTANCE: "Task 1 (distance)", COUNT: "Task 2 (count)"}
PROTOCOL_NAMES: dict[Protocol, str] = {"paper": "paper protocol", "released": "released protocol"}

TEXTS = Texts(Path(__file__).with_name("texts.yaml"))
block = TEXTS.block
_PLAIN = ("core", "others")  # the parts that the general figures show; other parts have their own figures


@lru_cache(maxsize=2)
def planned_cells(plan: Plan) -> tuple[Cell, ...]:
    """The study's grid, cached."""
    return tuple(plan.cells())


def planned(plan: Plan) -> tuple[Key, ...]:
    """The keys of the study's grid."""
    return tuple(cell.key for cell in planned_cells(plan))


@lru_cache(maxsize=2)
def plain_keys(plan: Plan) -> tuple[Key, ...]:
    """The keys of the grid that the general figures and tables show: plain encodings."""
    shown = {
        (protocol, *place)
        for protocol in plan.protocols
        for part in _PLAIN
        if part in plan.parts
        for place in PARTS[part].places(SCALES[plan.scale], protocol)
        if not Label.parse(place[1]).variant
    }
    return tuple(key for key in planned(plan) if (key.protocol, key.task, key.label) in shown)


def plain(state: Reproduction) -> Reproduction:
    """The study without variants of encodings, and without the cells of parts with their own figures."""
    keys = set(plain_keys(state.plan))
    places = {(key.protocol, key.task, key.label) for key in keys}
    return replace(
        state,
        results=Results(cell for cell in state.results.cells if cell.key in keys),
        table=[row for row in state.table if (row.protocol, row.task, row.label) in places],
    )


def colour(label: str) -> str:
    return _look(label)[0]


def marker(label: str) -> str:
    return _look(label)[1]


def glyph(label: str) -> str:
    return _look(label)[2]


def _look(label: str) -> tuple[str, str, str]:
    at = Label.parse(label)
    if at.heads is not None:  # the look of the largest known number of heads that is not larger
        counts = [known for family in FAMILIES if (known := Label.parse(family).heads) is not None]
        at = Label(PARTIAL, max(count for count in counts if count <= max(1, at.heads)))
    return FAMILIES.get(str(Label(at.base, at.heads)), OTHER)


def ordered(labels: Iterable[str]) -> list[str]:
    """Labels in the report's order: the RoPE family, MLA, the others; variants follow their encoding."""
    places = list(FAMILIES)

    def place(label: str) -> tuple[int, int, str, str]:
        at = Label.parse(label)
        base = at.base if at.heads is None else str(Label(PARTIAL, 1))
        return places.index(base) if base in places else len(places), at.heads or 0, base, at.variant

    return sorted(set(labels), key=place)


def name(protocol: Protocol, label: str) -> str:
    """The encoding's display name; the released code's RoPE has a sinusoid that the paper does not mention."""
    at = Label.parse(label)
    kept = at.variant in ("", *SWITCHES, "dropout") and at.variant != "input"
    if protocol == "released" and at.base == "rope" and kept:
        return title(label, protocol).replace("RoPE", "RoPE (with sinusoid)", 1)
    return title(label, protocol)


def interval(estimate: Estimate | None, *, sign: bool = True) -> str:
    """A mean over seeds in percentage points, with its interval, or a dash."""
    if estimate is None:
        return "–"
    value = signed(100 * estimate.value, 1) if sign else points(estimate.value)
    if not isfinite(estimate.low):
        return f"{value} (one seed)"
    return f"{value} [{points(estimate.low)}, {points(estimate.high)}]"


# ---- how figures are arranged ---------------------------------------------------------------------------------------

Models = list[tuple[str, list[CellResult]]]  # labels in the report's order, and their models by seed


def models(state: Reproduction, protocol: Protocol, task: str, has: Callable[[CellResult], object]) -> Models:
    """The encodings of a task with models that satisfy ``has``, and these models."""
    under = state.results.under(protocol)
    found = [(label, [cell for cell in under.of(task, label) if has(cell)]) for label in ordered(under.labels(task))]
    return [(label, cells) for label, cells in found if cells]


def beside(state: Reproduction, draw: Callable[[Protocol], go.Figure | None], title: str = "") -> View:
    """A view with one panel per protocol, side by side; ``draw`` returns None if there is nothing to show."""
    drawn = [(protocol_title(protocol), draw(protocol)) for protocol in state.plan.protocols]
    return View.of([Panel(name_, found) for name_, found in drawn if found is not None], title)


def by_task(
    state: Reproduction,
    has: Callable[[CellResult], object],
    draw: Callable[[Protocol, Models], go.Figure | None],
    what: str = "",
) -> list[View]:
    """One view per task with one panel per protocol that has such `models`; ``what`` is part of the view's name."""

    def drawn(protocol: Protocol, task: str) -> go.Figure | None:
        found = models(state, protocol, task, has)
        return draw(protocol, found) if found else None

    return [
        beside(state, partial(drawn, task=task), f"{text}: {what}" if what else text) for task, text in TASKS.items()
    ]


def by_model(
    state: Reproduction, has: Callable[[CellResult], object], draw: Callable[[list[CellResult]], go.Figure]
) -> list[View]:
    """One view per task with one panel per encoding that has such `models`, under the protocol's name."""

    def drawn(protocol: Protocol, task: str) -> list[Panel]:
        return [model_panel(cells[0], draw(cells)) for _, cells in models(state, protocol, task, has)]

    return [under_headings(state, partial(drawn, task=task), title) for task, title in TASKS.items()]


def one_series(labels: Iterable[str], values: Sequence[Mapping[int, float]]) -> list[Series]:
    """A row of dots per model in its colour: values by seed."""
    return [Series("", "", "circle", values, [colour(label) for label in labels])]


def series(protocol: Protocol, label: str, values: Sequence[Mapping[int, float]]) -> Series:
    """Dots of one encoding in every row."""
    return Series(label, f"{name(protocol, label)}, ", marker(label), values, [colour(label)] * len(values))


def under_headings(state: Reproduction, panels: Callable[[Protocol], list[Panel]], title: str = "") -> View:
    """A view with several panels per protocol, under the protocol's name."""
    return View(title, [Group(protocol_title(protocol), panels(protocol)) for protocol in state.plan.protocols])


def layer_signs(depth: int, what: str = "layer", *, dots: bool = False) -> list[Sign]:
    looks = enumerate(map(layer_look, range(depth)), start=1)
    return [Sign(f"layer-{i}", f"{what} {i}", tint, *(("●",) if dots else ("", dash))) for i, (tint, dash) in looks]


def model_panel(cell: CellResult, figure: go.Figure) -> Panel:
    """A panel with the name and look of a model's encoding."""
    label = cell.key.label
    return Panel(name(cell.key.protocol, label), figure, tint=colour(label), glyph=glyph(label))


def drop_ramp(limit: float) -> Ramp:
    end = points(limit).removesuffix(".0")
    return Ramp(f"accuracy +{end}", f"accuracy −{end} percentage points")


def sign_of(label: str) -> Sign:
    """The encoding's marker and name, for a legend or a table."""
    return Sign(label, title(label), colour(label), glyph(label))


def legend(state: Reproduction, labels: Iterable[str]) -> list[Sign]:
    signs = map(sign_of, ordered(labels))
    if "released" in state.plan.protocols:
        return [replace(s, title="RoPE (released: with sinusoid)") if s.key == "rope" else s for s in signs]
    return list(signs)


def protocol_title(protocol: Protocol) -> str:
    return PROTOCOL_NAMES[protocol].capitalize()


def accuracy_top(state: Reproduction, task: str) -> float:
    """Upper end of the accuracy axes of a task's panels: 1, or less if every accuracy and baseline is low."""
    cells = [cell for cell in state.results.cells if cell.key.task == task]
    values = [row.get(f"{split}_accuracy") for cell in cells for row in cell.epochs for split in ("train", "test")]
    values += [value for cell in cells for value in (cell.accuracy, cell.length_chance)]
    largest = max((value for value in values if value is not None and math.isfinite(value)), default=1.0)
    return 1.0 if largest > 0.75 else max(0.1, math.ceil(largest * 10) / 10)


def drop_limit(state: Reproduction) -> float:
    """End of the colour scale of all heat maps: the largest ablation effect, rounded up to 5 percentage points."""
    drops = [float(abs(cell.ablation.drops).max()) for cell in state.results.cells if cell.ablation is not None]
    return max(0.05, math.ceil(max(drops, default=0.05) * 20 - 1e-9) / 20)
