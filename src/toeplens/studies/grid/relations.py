"""What goes with length extrapolation, over the models of a grid study (theory, section 8; open in the papers)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.stats import rankdata

from toeplens.engine import FACTORS
from toeplens.studies.grid import measured as heads
from toeplens.studies.grid.spec import GridSpec
from toeplens.studies.kit.results import CellResult, Results

_RESAMPLES, _LEAST = 2000, 4  # encodings at least: an interval over fewer says nothing
_NOTHING = 1e-9
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
    """A rank correlation over models, with an interval over encodings.

    figure      what of the heads, a key of `FIGURES`
    task        on which task; None for all together, where ranks are taken within each task
    factor      length of the longer texts, times that of training
    value       Spearman's; None with fewer than four encodings, or where nothing varies
    low, high   95% interval of a bootstrap that draws encodings, with all their models: seeds of one encoding are no
                models of their own
    encodings   how many there are
    points      the models
    """

    figure: str
    task: str | None
    factor: float
    value: float | None
    low: float | None
    high: float | None
    encodings: int
    points: tuple[Point, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; of the points, how many there are."""
        return {**asdict(self), "points": len(self.points)}


def relations(spec: GridSpec, results: Results) -> list[Relation]:
    """Each figure with extrapolation: on all tasks together for every length, and on each task at `heads.LONGER`.

    Columns of a scan are left out.
    """
    columns = {column.label for column in spec.columns() if not column.scan}
    cells = [cell for cell in results.cells if cell.key.label in columns and cell.skilled]
    found = []
    for name, (_, figure) in FIGURES.items():
        figures = [figure(cell) for cell in cells]
        for factor in FACTORS[1:]:
            points = [
                Point(cell.key.task, cell.key.label, cell.key.seed, value, heads.kept(cell, factor))
                for cell, value in zip(cells, figures, strict=True)
            ]
            points = [point for point in points if np.isfinite((point.figure, point.kept)).all()]
            found.append(_relation(name, None, factor, points))
            for task in spec.tasks if factor == heads.LONGER else ():
                found.append(_relation(name, task, factor, [point for point in points if point.task == task]))
    return [relation for relation in found if relation.points]


def _relation(name: str, task: str | None, factor: float, points: Sequence[Point]) -> Relation:
    labels = sorted({point.label for point in points})
    value = low = high = None
    if len(labels) >= _LEAST:
        rng = np.random.Generator(np.random.Philox(0))
        drawn = rng.multinomial(len(labels), [1 / len(labels)] * len(labels), size=_RESAMPLES)
        once = np.ones((1, len(labels)))
        found = _correlations(points, labels, np.concatenate((once, drawn)))
        if np.isfinite(found[0]):
            value, low, high = map(float, (found[0], *np.nanquantile(found[1:], (0.025, 0.975))))
    return Relation(name, task, factor, value, low, high, len(labels), tuple(points))


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
        ranks[here] = rankdata(values[here]) / here.sum()
    return ranks
