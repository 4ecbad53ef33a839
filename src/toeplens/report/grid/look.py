"""How a grid study's page tells encodings and tasks apart: a colour, a marker and a glyph each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

import numpy as np

from toeplens.report.kit.colours import FAMILIES
from toeplens.report.kit.plane import Look
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid, GridSpec

# by what the study calls an encoding, or else by its name: whose look of the other pages it has
_FAMILIES = {
    "rope": "rope",
    "p-rope": "rope-alone",
    "rope-absolute": "rope-absolute",
    "mla": "mla",
    "sinusoidal": "absolute",
    "absolute": "absolute",
    "t5": "relative",
    "alibi": "alibi",
    "random-fixed": "random",
    "nope": "nope",
}
_PALETTE = (  # colours readable on white and on near-black
    ("#2f6fe0", "circle", "●"),
    ("#de7a00", "square", "■"),
    ("#1d9a5b", "diamond", "◆"),
    ("#c8479f", "triangle-up", "▲"),
    ("#8456d8", "triangle-down", "▼"),
    ("#d2453d", "x", "✖"),
    ("#0e9bb5", "cross", "✚"),
    ("#9c7430", "star", "★"),
    ("#6a9a1d", "pentagon", "⬟"),
    ("#858b95", "star-diamond", "✦"),
    ("#b9770e", "triangle-right", "▶"),
    ("#5d7fb8", "triangle-left", "◀"),
    ("#b05c7d", "hexagon", "⬢"),
    ("#4c8f8a", "hourglass", "⧗"),
)


def encoding_looks(spec: GridSpec) -> dict[str, Look]:
    """The encodings by label: those that the other pages know in their order, then the others; without scans."""
    columns = [column for column in spec.columns() if not column.scan]
    families = {column.label: _FAMILIES.get(column.label) for column in columns}
    for column in columns:
        family = _FAMILIES.get(column.encoding)
        if families[column.label] is None and not column.options and family not in families.values():
            families[column.label] = family
    order = list(FAMILIES)
    known = {
        label: FAMILIES[family]
        for label, family in sorted(families.items(), key=lambda pair: order.index(pair[1]) if pair[1] else len(order))
        if family is not None
    }
    taken = {tint for tint, _, _ in known.values()}
    spare = [one for one in _PALETTE if one[0] not in taken] or list(_PALETTE)
    others = [column.label for column in columns if column.label not in known]
    known |= {label: spare[i % len(spare)] for i, label in enumerate(others)}
    titles = {column.label: column.title for column in columns}
    return {label: Look(label, titles[label], *one) for label, one in known.items()}


def task_looks(spec: GridSpec) -> dict[str, Look]:
    """The tasks in the study's order, by label."""
    return {
        label: Look(label, spec.title_of(label), *_PALETTE[i % len(_PALETTE)]) for i, label in enumerate(spec.tasks)
    }


def finished(state: Grid, task: str, label: str) -> list[CellResult]:
    """The models of a cell of the matrix, by seed, without those that diverged."""
    return [cell for cell in state.results.of(task, label) if cell.status == "complete"]


def plain(text: str) -> str:
    """A text as plotly shows it: nothing in it is a tag."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


@dataclass(frozen=True)
class Spread:
    """Values of several seeds: mean and range of those that are numbers; NaN and a count of 0 where none is."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        """Of one value a seed, NaN or None where it has none."""
        found = [float(value) for value in values if value is not None and isfinite(value)]
        if not found:
            return cls(float("nan"), float("nan"), float("nan"), 0)
        return cls(float(np.mean(found)), min(found), max(found), len(found))

    def told(self, digits: int = 2, *, percent: bool = False) -> str:
        """In words, with the range where there are several seeds; a dash where there are none."""
        if not self.count:
            return "–"
        mean, low, high = (
            f"{100 * value:.{digits}f}" if percent else f"{value:.{digits}f}"
            for value in (self.mean, self.low, self.high)
        )
        unit = "%" if percent else ""
        return (f"{mean}{unit} ({low} to {high})" if self.count > 1 else f"{mean}{unit}").replace("-", "−")
