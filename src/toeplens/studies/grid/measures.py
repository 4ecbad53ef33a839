"""Measures of a grid study's cells, the table of all cells, and correlates of length extrapolation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import stdtr, stdtrit

from toeplens import encodings
from toeplens.engine import FACTORS, LengthResult
from toeplens.lens.ablation import significant_drops
from toeplens.lens.kit.intervals import ranks_of
from toeplens.studies.grid.spec import EncodingColumn, GridSpec
from toeplens.studies.kit.results import CellResult, Results, mean_of
from toeplens.utils.records import Record

LONGER_FACTOR = 1.5  # length for comparing extrapolation, in training lengths
_FACTOR_TOLERANCE = 0.1  # tolerance of a factor, as lengths are whole numbers of tokens

Heads = Float[np.ndarray, "L H"]  # one value per head


def array(values: Any) -> np.ndarray:
    """Nested lists as an array, NaN for None."""
    return np.array(values, dtype=float)


def accuracy_drops(cell: CellResult) -> Heads | None:
    """Accuracy drop of each head, 0 if not significant; None without an ablation."""
    return None if cell.ablation is None else significant_drops(cell.ablation)


def loss_effects(cell: CellResult) -> Heads | None:
    """Ablation effect of each head on the loss in nats, 0 if not significant; None without an ablation.

    In a model with an accuracy near 100%, hardly any accuracy drop is significant.
    """
    return None if cell.by_loss is None else significant_drops(cell.by_loss)


def weighted_share(cell: CellResult, share: str) -> float:
    """Mean of a share over the heads, weighted by ablation effect (`effect_weighted_mean`): how positional (symbolic)
    the heads are that the model's skill depends on."""
    behaviour = cell.measure("behaviour")
    return float("nan") if behaviour is None else effect_weighted_mean(cell, getattr(behaviour, share))


def effect_weighted_mean(cell: CellResult, values: Heads) -> float:
    """Mean of values of the heads, weighted by ablation effect on the loss (`loss_effects`).

    Heads with NaN are skipped; NaN if no head has an effect.
    """
    effects = loss_effects(cell)
    if effects is None:
        return float("nan")
    weights = np.where(np.isnan(values), 0, effects)
    return float((weights * np.nan_to_num(values)).sum() / weights.sum()) if weights.sum() > 0 else float("nan")


def share_of_effects(cell: CellResult, share: str) -> float:
    """How much of the summed ablation effects the heads have of which this share is above a half."""
    behaviour, effects = cell.measure("behaviour"), loss_effects(cell)
    if behaviour is None or effects is None or not effects.any():
        return float("nan")
    return float(effects[getattr(behaviour, share) > 0.5].sum() / effects.sum())


def mean_toeplitz_share(cell: CellResult) -> float:
    """The mean Toeplitz share of a cell's heads; NaN if not measured."""
    profile = cell.measure("toeplitz")
    return float("nan") if profile is None or np.isnan(profile.share).all() else float(np.nanmean(profile.share))


def result_at(cell: CellResult, factor: float) -> LengthResult | None:
    """The result at that multiple of the training length; None if there is none."""
    extrapolation = cell.measure("extrapolation")
    rows = [] if extrapolation is None else extrapolation.rows
    near = [row for row in rows if row.accuracy is not None and abs(row.factor - factor) < _FACTOR_TOLERANCE]
    return min(near, key=lambda row: abs(row.factor - factor), default=None)


def skill_at(cell: CellResult, factor: float) -> float:
    """Skill at that length: accuracy above the length-only baseline, relative to the maximum possible gain."""
    row = result_at(cell, factor)
    if row is None or row.accuracy is None:
        return float("nan")
    guess = max(row.chance or 0.0, row.length_chance or 0.0)
    return (row.accuracy - guess) / (1 - guess)


def skill_retained(cell: CellResult, factor: float = LONGER_FACTOR) -> float:
    """Skill on longer sequences relative to the training length; NaN for a model without skill."""
    return skill_at(cell, factor) / skill_at(cell, 1.0) if cell.is_skilled else float("nan")


@dataclass(frozen=True)
class GridRow(Record):
    """An encoding on a task. Values are means over the seeds that have one; None if none has."""

    task: str
    label: str
    title: str
    accuracy: float | None  # on the test set
    lowest: float | None  # of the seeds
    highest: float | None
    skill: float | None  # accuracy above the length-only baseline, relative to the maximum possible gain
    kept: float | None  # share of the skill that remains at `LONGER_FACTOR` times the training length
    positional: float | None  # share of the heads, weighted by ablation effect
    symbolic: float | None
    toeplitz: float | None  # mean Toeplitz share of the heads' logits
    peak: float | None  # largest accuracy drop by one head, relative to skill
    chance: float
    length_chance: float
    rule: str | None  # the best simple rule without a model
    rule_accuracy: float | None
    seeds: int  # finished models
    diverged: int  # how many of them diverged
    learning: int  # how many were still learning when training ended
    parameters: int  # of one model
    train_seconds: float | None


def matrix(spec: GridSpec, results: Results) -> list[GridRow]:
    """Every encoding on every task with finished models, in the order of the spec."""
    groups = ((task, column, results.cells_of(task, column.label)) for task in spec.tasks for column in spec.columns())
    return [_row(task, column, cells) for task, column, cells in groups if cells]


def _row(task: str, column: EncodingColumn, cells: Sequence[CellResult]) -> GridRow:
    finished = [cell for cell in cells if cell.status == "complete"]
    mean = partial(mean_of, finished)
    accuracies = [cell.accuracy for cell in finished]
    tables = [row.baselines for cell in finished if (row := result_at(cell, 1.0)) is not None]
    scores = {name: float(np.mean([table[name] for table in tables])) for name in tables[0]} if tables else {}
    rule = max(scores, key=lambda name: scores[name], default=None)  # on average over the seeds
    return GridRow(
        *(task, column.label, column.title),
        accuracy=mean(lambda cell: cell.accuracy),
        lowest=min(accuracies, default=None),
        highest=max(accuracies, default=None),
        skill=mean(lambda cell: cell.skill),
        kept=mean(skill_retained),
        positional=mean(lambda cell: weighted_share(cell, "positional")),
        symbolic=mean(lambda cell: weighted_share(cell, "symbolic")),
        toeplitz=mean(mean_toeplitz_share),
        peak=mean(lambda cell: cell.peak),
        chance=cells[0].chance,
        length_chance=cells[0].length_chance,
        rule=rule,
        rule_accuracy=scores.get(rule or ""),
        seeds=len(cells),
        diverged=len(cells) - len(finished),
        learning=sum(not cell.settled for cell in finished),
        parameters=cells[0].parameters,
        train_seconds=mean(lambda cell: cell.result["seconds"]),
    )


# ---- correlates of length extrapolation ------------------------------------------------------------------------------


_MIN_ENCODINGS, _MIN_FAMILIES = 4, 4  # minimum number of encodings for a correlation, and of families for an interval
_TINY = 1e-9
_MAX_CORRELATION = 1 - 1e-9  # a correlation of 1 is infinite on Fisher's scale
# name -> title, and function of a cell
HEAD_PROPERTIES: dict[str, tuple[str, Callable[[CellResult], float]]] = {
    "deposit": ("largest accuracy drop by one head, relative to skill", lambda cell: cell.peak),
    "positional": ("positional share, weighted by ablation effect", lambda cell: weighted_share(cell, "positional")),
    "symbolic": ("symbolic share, weighted by ablation effect", lambda cell: weighted_share(cell, "symbolic")),
    "interaction": ("interaction share, weighted by ablation effect", lambda cell: weighted_share(cell, "interaction")),
}


@dataclass(frozen=True)
class ModelPoint:
    """One model: a property of its heads, and the share of its skill that remains on longer sequences."""

    task: str
    label: str
    seed: int
    figure: float
    retained: float


@dataclass(frozen=True)
class RankRelation:
    """A rank correlation over models, with an interval over families of encodings.

    Related encodings are not independent: variants of RoPE behave like RoPE on longer sequences. Encodings in which
    position enters in the same way therefore form one `family`, and the interval is taken over families.

    The 95 % interval, from ``low`` to ``high``, is Student's t of a jackknife on Fisher's scale that leaves out one
    family at a time, with all its encodings and models; None with fewer than four families.
    """

    figure: str  # property of the heads, a key of `HEAD_PROPERTIES`
    task: str | None  # None for all together, with ranks within each task
    factor: float  # length of the longer sequences, relative to training
    value: float | None  # Spearman's correlation; None with fewer than four encodings, or without variation
    low: float | None
    high: float | None
    chance: float | None  # p-value against a correlation of 0 or below; None without an interval
    encodings: int  # their number
    families: tuple[str, ...]
    points: tuple[ModelPoint, ...]  # the models

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the number of points."""
        return {**asdict(self), "points": len(self.points)}


def family(column: EncodingColumn) -> str:
    """How position enters a column's encoding (its ``coupling``); partial rotations count as rotations."""
    coupling = encodings.get(column.encoding).coupling
    return "rotation" if coupling == "concatenation" else coupling


def relations(spec: GridSpec, results: Results) -> list[RankRelation]:
    """Correlations of each property with extrapolation: over all tasks for every length, per task at `LONGER_FACTOR`.

    Scans are left out.
    """
    family_of = {column.label: family(column) for column in spec.columns() if not column.scan}
    cells = [cell for cell in results.cells if cell.key.label in family_of and cell.is_skilled]
    result = []
    for name, (_, compute) in HEAD_PROPERTIES.items():
        values = [compute(cell) for cell in cells]
        for factor in FACTORS[1:]:
            points = [
                ModelPoint(cell.key.task, cell.key.label, cell.key.seed, value, skill_retained(cell, factor))
                for cell, value in zip(cells, values, strict=True)
            ]
            points = [point for point in points if np.isfinite((point.figure, point.retained)).all()]
            result.append(_relation(name, None, factor, points, family_of))
            for task in spec.tasks if factor == LONGER_FACTOR else ():
                of_task = [point for point in points if point.task == task]
                result.append(_relation(name, task, factor, of_task, family_of))
    return [relation for relation in result if relation.points]


def _relation(
    name: str, task: str | None, factor: float, points: Sequence[ModelPoint], family_of: Mapping[str, str]
) -> RankRelation:
    labels = sorted({point.label for point in points})
    families = sorted({family_of[label] for label in labels})
    value = low = high = chance = None
    if len(labels) >= _MIN_ENCODINGS:
        weights = np.array([[family_of[label] != omitted for label in labels] for omitted in families], dtype=float)
        correlations = _correlations(points, labels, np.concatenate((np.ones((1, len(labels))), weights)))
        value = float(correlations[0]) if np.isfinite(correlations[0]) else None
        if len(families) >= _MIN_FAMILIES and np.isfinite(correlations).all():
            low, high, chance = _jackknife(correlations[0], correlations[1:])
    return RankRelation(name, task, factor, value, low, high, chance, len(labels), tuple(families), tuple(points))


def _jackknife(value: float, without: Float[np.ndarray, "G"]) -> tuple[float, float, float]:
    """Interval of a correlation and p-value against 0 or below, from the correlations without one family each.

    A bootstrap over so few families is too narrow: with 4 to 12 families, its 95% intervals missed a correlation of 0
    in 9 to 12 of 100 simulated studies, these intervals in 3 to 5.
    """
    count = len(without)
    centre, others = (np.arctanh(np.clip(x, -_MAX_CORRELATION, _MAX_CORRELATION)) for x in (value, without))
    error = np.sqrt((count - 1) / count * np.square(others - others.mean()).sum())
    half = stdtrit(count - 1, 0.975) * error
    chance = stdtr(count - 1, -centre / error) if error > 0 else float(centre <= 0)
    return float(np.tanh(centre - half)), float(np.tanh(centre + half)), float(chance)


def _correlations(
    points: Sequence[ModelPoint], labels: Sequence[str], weights: Float[np.ndarray, "R E"]
) -> Float[np.ndarray, "R"]:
    """Correlation of the ranks within tasks, centred per task, with each encoding weighted by ``weights``.

    Ranks are taken over all models; NaN if one side does not vary.
    """
    tasks = np.array([point.task for point in points])
    x, y = (_ranks(np.array([getattr(point, field) for point in points]), tasks) for field in ("figure", "retained"))
    products = np.stack((np.ones_like(x), x, y, x * x, y * y, x * y))
    encodings = np.array([point.label for point in points])
    sums = np.array(
        [[products[:, (encodings == label) & (tasks == task)].sum(1) for label in labels] for task in np.unique(tasks)]
    )
    count, to_x, to_y, xx, yy, xy = np.einsum("re,tep->ptr", weights, sums)
    divisor = np.maximum(count, 1)
    terms = ((xx, to_x, to_x), (yy, to_y, to_y), (xy, to_x, to_y))
    total_x, total_y, covariance = ((total - a * b / divisor).sum(0) for total, a, b in terms)
    size = np.sqrt(np.clip(total_x * total_y, 0, None))
    return np.clip(np.divide(covariance, size, out=np.full_like(covariance, np.nan), where=size > _TINY), -1, 1)


def _ranks(values: Float[np.ndarray, "n"], tasks: np.ndarray) -> Float[np.ndarray, "n"]:
    """Ranks within each task, divided by the number of models of the task."""
    ranks = np.zeros(len(values))
    for of_task in (tasks == task for task in np.unique(tasks)):
        ranks[of_task] = ranks_of(values[of_task]) / of_task.sum()
    return ranks
