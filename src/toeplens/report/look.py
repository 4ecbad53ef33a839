"""How the report looks and names things: one colour and one marker an encoding, everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from math import isfinite

from toeplens.lens import Estimate
from toeplens.model import Protocol
from toeplens.studies import Cell, Key, Results
from toeplens.studies.reproduce import COUNT, DISTANCE, PARTS, SCALES, Plan, Reproduction, title
from toeplens.studies.reproduce.labels import SWITCHES, base_of, variant_of

TASKS: dict[str, str] = {DISTANCE: "Task 1 (distance)", COUNT: "Task 2 (count)"}
PROTOCOL_NAMES: dict[Protocol, str] = {"paper": "paper protocol", "released": "released protocol"}

# label: colour (readable on white and on near-black), plotly marker, the same marker as a character
_LOOKS: dict[str, tuple[str, str, str]] = {
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
_OTHER = ("#858b95", "circle-open", "○")
_PARTIAL = "partial-"
_PLAIN = ("core", "others")  # the parts whose encodings the general figures show; other parts have figures of their own

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
        if not variant_of(place[1])
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
    base = base_of(label)
    if base.startswith(_PARTIAL) and base not in _LOOKS:  # that of the next smaller number of heads that has one
        counts = [int(known.removeprefix(_PARTIAL)) for known in _LOOKS if known.startswith(_PARTIAL)]
        base = f"{_PARTIAL}{max(count for count in counts if count <= max(1, rotating(base)))}"
    return _LOOKS.get(base, _OTHER)


def rotating(label: str) -> int:
    """How many heads rotate in a model with RoPE on some heads."""
    return int(base_of(label).removeprefix(_PARTIAL))


def layer_look(layer: int) -> tuple[str, str]:
    """Colour and dash of a layer, counted from 0."""
    return _LAYERS[layer % len(_LAYERS)]


def ordered(labels: Iterable[str]) -> list[str]:
    """Labels in the report's order: the RoPE family, MLA, then the others; variants after their encoding."""
    places = list(_LOOKS)

    def place(label: str) -> tuple[int, int, str, str]:
        base, heads = base_of(label), 0
        if base.startswith(_PARTIAL):
            base, heads = f"{_PARTIAL}1", rotating(base)
        return places.index(base) if base in places else len(places), heads, base, variant_of(label)

    return sorted(set(labels), key=place)


def name(protocol: Protocol, label: str) -> str:
    """What the encoding is called; the released program's RoPE has a sinusoid that the paper does not mention."""
    kept = variant_of(label) in ("", *SWITCHES, "dropout") and variant_of(label) != "input"
    if protocol == "released" and base_of(label) == "rope" and kept:
        return title(label, protocol).replace("RoPE", "RoPE (with sinusoid)", 1)
    return title(label, protocol)


def percent(value: float | None, *, sign: bool = True) -> str:
    """A share as per cent; a dash if there is none."""
    return "–" if value is None or not isfinite(value) else f"{100 * value:.1f}{'%' if sign else ''}"


def points(value: float) -> str:
    """A difference of shares, in percentage points; a true minus sign."""
    rounded = round(100 * value, 1) + 0.0
    return f"{rounded:.1f}".replace("-", "−")


def signed(value: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    text = points(value)
    return text if text.startswith("−") or text == "0.0" else f"+{text}"


def interval(estimate: Estimate | None, *, sign: bool = True) -> str:
    """A mean over seeds in percentage points, with its interval; a dash if there is none."""
    if estimate is None:
        return "–"
    value = signed(estimate.value) if sign else points(estimate.value)
    if not isfinite(estimate.low):
        return f"{value} (one seed)"
    return f"{value} [{points(estimate.low)}, {points(estimate.high)}]"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.1f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def listed(items: Iterable[str]) -> str:
    """Items as a list in a sentence; with semicolons where an item has a comma of its own."""
    items = list(items)
    if any("," in item for item in items):
        return "; ".join(items)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else "none"
