"""What goes with length extrapolation, over the models of a grid study (theory, section 8; open in the papers)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import stdtr, stdtrit

from toeplens import encodings
from toeplens.engine import FACTORS
from toeplens.lens.kit.intervals import ranks_of
from toeplens.studies.grid import measured as heads
from toeplens.studies.grid.spec import Column, GridSpec
from toeplens.studies.kit.results import CellResult, Results

_LEAST, _FAMILIES = 4, 4  # encodings for a correlation, families of them for an interval, at least
_NOTHING = 1e-9
_NEARLY = 1 - 1e-9  # a correlation of 1 has no place on Fisher's scale
# name -> what it is in words, and how it is taken from a cell
FIGURES: dict[str, tuple[str, Callable[[CellResult], float]]] = {
    "deposit": ("largest loss by one head, of the skill", lambda cell: cell.peak),
    "positional": ("positional share of what carries the skill", lambda cell: heads.carried(cell, "positional")),
    "symbolic": ("symbolic share of what carries the skill", lambda cell: heads.carried(cell, "symbolic")),
    "interaction": ("interaction share of what carries the skill", lambda cell: heads.carried(cell, "interaction")),
}


@dataclass(frozen=True)
class Point:
    """One model: a figure of its heads, and the share of its skill that is left on longer texts."""

    task: str
    label: str
    seed: int
    figure: float
    kept: float


@dataclass(frozen=True)
class Relation:
    """A rank correlation over models, with an interval over families of encodings.

    Relatives are no witnesses of their own: what RoPE does on longer texts its variants do too. So encodings are of
    one `family` where position enters in the same way, and the interval asks what another family would have changed.

    figure      what of the heads, a key of `FIGURES`
    task        on which task; None for all together, where ranks are taken within each task
    factor      length of the longer texts, times that of training
    value       Spearman's; None with fewer than four encodings, or where nothing varies
    low, high   its 95% interval: Student's, of a jackknife on Fisher's scale that leaves out one family at a time, with
                all its encodings and models; None with fewer than four families
    chance      p-value against its being 0 or below, of the same; None where there is no interval
    encodings   how many there are
    families    in which ways position enters in them
    points      the models
    """

    figure: str
    task: str | None
    factor: float
    value: float | None
    low: float | None
    high: float | None
    chance: float | None
    encodings: int
    families: tuple[str, ...]
    points: tuple[Point, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; of the points, how many there are."""
        return {**asdict(self), "points": len(self.points)}


def family(column: Column) -> str:
    """How position enters a column's encoding, its class fact ``coupling``; turning a part of a head is turning too."""
    coupling = encodings.get(column.encoding).coupling
    return "rotation" if coupling == "concatenation" else coupling


def relations(spec: GridSpec, results: Results) -> list[Relation]:
    """Each figure with extrapolation: on all tasks together for every length, and on each task at `heads.LONGER`.

    Columns of a scan are left out.
    """
    kinds = {column.label: family(column) for column in spec.columns() if not column.scan}
    cells = [cell for cell in results.cells if cell.key.label in kinds and cell.skilled]
    found = []
    for name, (_, figure) in FIGURES.items():
        figures = [figure(cell) for cell in cells]
        for factor in FACTORS[1:]:
            points = [
                Point(cell.key.task, cell.key.label, cell.key.seed, value, heads.kept(cell, factor))
                for cell, value in zip(cells, figures, strict=True)
            ]
            points = [point for point in points if np.isfinite((point.figure, point.kept)).all()]
            found.append(_relation(name, None, factor, points, kinds))
            for task in spec.tasks if factor == heads.LONGER else ():
                here = [point for point in points if point.task == task]
                found.append(_relation(name, task, factor, here, kinds))
    return [relation for relation in found if relation.points]


def _relation(
    name: str, task: str | None, factor: float, points: Sequence[Point], kinds: Mapping[str, str]
) -> Relation:
    labels = sorted({point.label for point in points})
    families = sorted({kinds[label] for label in labels})
    value = low = high = chance = None
    if len(labels) >= _LEAST:
        kept = np.array([[kinds[label] != left_out for label in labels] for left_out in families], dtype=float)
        found = _correlations(points, labels, np.concatenate((np.ones((1, len(labels))), kept)))
        value = float(found[0]) if np.isfinite(found[0]) else None
        if len(families) >= _FAMILIES and np.isfinite(found).all():
            low, high, chance = _jackknife(found[0], found[1:])
    return Relation(name, task, factor, value, low, high, chance, len(labels), tuple(families), tuple(points))


def _jackknife(value: float, without: Float[np.ndarray, "G"]) -> tuple[float, float, float]:
    """Interval of a correlation and p-value against 0 or below, from those without one family each.

    A bootstrap that draws so few families is too sure: of 4 to 12 of them its 95% intervals missed a correlation of 0
    in 9 to 12 of 100 simulated studies, these in 3 to 5.
    """
    count = len(without)
    centre, others = (np.arctanh(np.clip(each, -_NEARLY, _NEARLY)) for each in (value, without))
    error = np.sqrt((count - 1) / count * np.square(others - others.mean()).sum())
    half = stdtrit(count - 1, 0.975) * error
    chance = stdtr(count - 1, -centre / error) if error > 0 else float(centre <= 0)
    return float(np.tanh(centre - half)), float(np.tanh(centre + half)), float(chance)


def _correlations(
    points: Sequence[Point], labels: Sequence[str], times: Float[np.ndarray, "R E"]
) -> Float[np.ndarray, "R"]:
    """Correlation of the ranks within tasks, about each task's mean, with each encoding so many times there.

    Ranks are those of all models; NaN where a side does not vary.
    """
    tasks = np.array([point.task for point in points])
    x, y = (_ranks(np.array([getattr(point, field) for point in points]), tasks) for field in ("figure", "kept"))
    products = np.stack((np.ones_like(x), x, y, x * x, y * y, x * y))
    encodings = np.array([point.label for point in points])
    sums = np.array(
        [[products[:, (encodings == label) & (tasks == task)].sum(1) for label in labels] for task in np.unique(tasks)]
    )
    count, to_x, to_y, xx, yy, xy = np.einsum("re,tep->ptr", times, sums)
    each = np.maximum(count, 1)
    terms = ((xx, to_x, to_x), (yy, to_y, to_y), (xy, to_x, to_y))
    total_x, total_y, both = ((of - a * b / each).sum(0) for of, a, b in terms)
    size = np.sqrt(np.clip(total_x * total_y, 0, None))
    return np.clip(np.divide(both, size, out=np.full_like(both, np.nan), where=size > _NOTHING), -1, 1)


def _ranks(values: Float[np.ndarray, "n"], tasks: np.ndarray) -> Float[np.ndarray, "n"]:
    """Ranks within each task, over how many there are, so that each task's models weigh alike."""
    ranks = np.zeros(len(values))
    for task in np.unique(tasks):
        here = tasks == task
        ranks[here] = ranks_of(values[here]) / here.sum()
    return ranks
