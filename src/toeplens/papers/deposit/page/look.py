"""How the report looks and names things: one colour and one marker an encoding, everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from math import isfinite

from toeplens.ground.words import points, signed
from toeplens.lens import Estimate
from toeplens.model import Protocol
from toeplens.papers.deposit import PARTS, SCALES, Plan, Reproduction, title
from toeplens.papers.deposit.labels import PARTIAL, SWITCHES, Label
from toeplens.report.kit.colours import FAMILIES, OTHER
from toeplens.studies import Cell, Key, Results
from toeplens.training.presets import COUNT, DISTANCE

TASKS: dict[str, str] = {DISTANCE: "Task 1 (distance)", COUNT: "Task 2 (count)"}
PROTOCOL_NAMES: dict[Protocol, str] = {"paper": "paper protocol", "released": "released protocol"}

_PLAIN = ("core", "others")  # the parts whose encodings the general figures show; other parts have figures of their own


@lru_cache(maxsize=2)
def planned_cells(plan: Plan) -> tuple[Cell, ...]:
    """The study's grid; making it takes a moment, and many parts of the page ask for it."""
    return tuple(plan.cells())


def planned(plan: Plan) -> tuple[Key, ...]:
    """The places of the study's grid."""
    return tuple(cell.key for cell in planned_cells(plan))


@lru_cache(maxsize=2)
def plain_keys(plan: Plan) -> tuple[Key, ...]:
    """The places of the grid that the general figures and tables show: encodings as their protocol has them."""
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
    """The study without variants of encodings and without the cells of parts that have figures of their own."""
    keys = set(plain_keys(state.plan))
    places = {(key.protocol, key.task, key.label) for key in keys}
    return replace(
        state,
        results=Results(cell for cell in state.results.cells if cell.key in keys),
        table=[row for row in state.table if (row.protocol, row.task, row.label) in places],
    )


def colour(label: str) -> str:
    """The encoding's colour; a variant has that of its encoding."""
    return _look(label)[0]


def marker(label: str) -> str:
    """The encoding's marker, by plotly's name."""
    return _look(label)[1]


def glyph(label: str) -> str:
    """The encoding's marker, as a character."""
    return _look(label)[2]


def _look(label: str) -> tuple[str, str, str]:
    at = Label.parse(label)
    if at.heads is not None:  # that of the next smaller number of heads that has one
        counts = [known for family in FAMILIES if (known := Label.parse(family).heads) is not None]
        at = Label(PARTIAL, max(count for count in counts if count <= max(1, at.heads)))
    return FAMILIES.get(str(Label(at.base, at.heads)), OTHER)


def ordered(labels: Iterable[str]) -> list[str]:
    """Labels in the report's order: the RoPE family, MLA, then the others; variants after their encoding."""
    places = list(FAMILIES)

    def place(label: str) -> tuple[int, int, str, str]:
        at = Label.parse(label)
        base = at.base if at.heads is None else str(Label(PARTIAL, 1))
        return places.index(base) if base in places else len(places), at.heads or 0, base, at.variant

    return sorted(set(labels), key=place)


def name(protocol: Protocol, label: str) -> str:
    """What the encoding is called; the released program's RoPE has a sinusoid that the paper does not mention."""
    at = Label.parse(label)
    kept = at.variant in ("", *SWITCHES, "dropout") and at.variant != "input"
    if protocol == "released" and at.base == "rope" and kept:
        return title(label, protocol).replace("RoPE", "RoPE (with sinusoid)", 1)
    return title(label, protocol)


def interval(estimate: Estimate | None, *, sign: bool = True) -> str:
    """A mean over seeds in percentage points, with its interval; a dash if there is none."""
    if estimate is None:
        return "–"
    value = signed(estimate.value) if sign else points(estimate.value)
    if not isfinite(estimate.low):
        return f"{value} (one seed)"
    return f"{value} [{points(estimate.low)}, {points(estimate.high)}]"
