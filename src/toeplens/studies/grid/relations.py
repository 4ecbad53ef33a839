"""Correlates of length extrapolation over the models of a grid study (theory, section 8; open in the papers)."""

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

_LEAST, _FAMILIES = 4, 4  # minimum number of encodings for a correlation, and of families for an interval
_NOTHING = 1e-9
_NEARLY = 1 - 1e-9  # a correlation of 1 is infinite on Fisher's scale
# name -> title, and function of a cell
FIGURES: dict[str, tuple[str, Callable[[CellResult], float]]] = {
    "deposit": ("largest accuracy drop by one head, relative to skill", lambda cell: cell.peak),
    "positional": ("positional share, weighted by ablation effect", lambda cell: heads.carried(cell, "positional")),
    "symbolic": ("symbolic share, weighted by ablation effect", lambda cell: heads.carried(cell, "symbolic")),
    "interaction": ("interaction share, weighted by ablation effect", lambda cell: heads.carried(cell, "interaction")),
}


@dataclass(frozen=True)
class Point:
    """One model: a property of its heads, and the share of its skill that remains on longer sequences."""

    task: str
    label: str
    seed: int
    figure: float
    kept: float


@dataclass(frozen=True)
class Relation:
    """A rank correlation over models, with an interval over families of encodings.

    Related encodings are not independent: variants of RoPE behave like RoPE on longer sequences. Encodings in which
    position enters in the same way therefore form one `family`, and the interval is taken over families.

    The 95 % interval, from ``low`` to ``high``, is Student's t of a jackknife on Fisher's scale that leaves out one
    family at a time, with all its encodings and models; None with fewer than four families.
    """

    figure: str  # property of the heads, a key of `FIGURES`
    task: str | None  # None for all together, with ranks within each task
    factor: float  # length of the longer sequences, relative to training
    value: float | None  # Spearman's correlation; None with fewer than four encodings, or without variation
    low: float | None
    high: float | None
    chance: float | None  # p-value against a correlation of 0 or below; None without an interval
    encodings: int  # their number
    families: tuple[str, ...]
    points: tuple[Point, ...]  # the models

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the number of points."""
        return {**asdict(self), "points": len(self.points)}


def family(column: Column) -> str:
    """How position enters a column's encoding (its ``coupling``); partial rotations count as rotations."""
    coupling = encodings.get(column.encoding).coupling
    return "rotation" if coupling == "concatenation" else coupling


def relations(spec: GridSpec, results: Results) -> list[Relation]:
    """Correlations of each property with extrapolation: over all tasks for every length, per task at `heads.LONGER`.

    Scans are left out.
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
    """Interval of a correlation and p-value against 0 or below, from the correlations without one family each.

    A bootstrap over so few families is too narrow: with 4 to 12 families, its 95% intervals missed a correlation of 0
    in 9 to 12 of 100 simulated studies, these intervals in 3 to 5.
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
    """Correlation of the ranks within tasks, centred per task, with each encoding weighted by ``times``.

    Ranks are taken over all models; NaN if one side does not vary.
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
    """Ranks within each task, divided by the number of models of the task."""
    ranks = np.zeros(len(values))
    for here in (tasks == task for task in np.unique(tasks)):
        ranks[here] = ranks_of(values[here]) / here.sum()
    return ranks
