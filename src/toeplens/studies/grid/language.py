"""Measures of a grid study's language models: bits per byte, longer texts, needles, heads; NaN if missing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
from jaxtyping import Float

from toeplens.engine.language import BitsPerByte, Copying, Extension, HeadPatterns, Needles
from toeplens.lens.kit.intervals import spearman
from toeplens.studies.grid.spec import GridSpec
from toeplens.studies.kit.results import CellResult, Results, mean_of
from toeplens.utils.records import Record

MAX_HEADS = 3  # maximum number of heads of a type: those with the most attention on the previous token or after a copy
MIN_ATTENTION = 0.2  # minimum attention of a head of a type
NEAR_FACTOR = 0.5  # distance for comparing copies, in training lengths
LONG_FACTOR = 4.0  # length for comparing longer texts, in training lengths
_NAN = float("nan")
_ROUNDING = 1e-6  # smaller effects in nats count as 0


def is_language(cell: CellResult) -> bool:
    """Whether a cell is a language model with the measure ``bits``."""
    return isinstance(cell.measure("bits"), BitsPerByte)


def bits_per_byte(cell: CellResult) -> float:
    """Bits per byte at the training length."""
    measure = cell.measure("bits")
    return measure.bits.value if isinstance(measure, BitsPerByte) else _NAN


def bits_increase(cell: CellResult, factor: float = LONG_FACTOR) -> float:
    """Increase in bits per byte at the end of a text of that length, compared with one training length of context."""
    measure = cell.measure("bits")
    row = measure.at_factor(factor) if isinstance(measure, BitsPerByte) else None
    return _NAN if row is None or row.gain is None else row.gain.value


def needle_accuracy(cell: CellResult, factor: float) -> float:
    """Accuracy on needles in texts of that length, mean over depths."""
    measure = cell.measure("needles")
    rows = [row for row in measure.rows if row.factor == factor] if isinstance(measure, Needles) else []
    if not rows or any(row.accuracy is None for row in rows):
        return _NAN
    return float(np.mean([row.accuracy.value for row in rows if row.accuracy is not None]))


def copy_gain(cell: CellResult, factor: float) -> float:
    """Bits per token saved at the second copy of a span, at that distance."""
    measure = cell.measure("copying")
    rows = [row for row in measure.rows if row.factor == factor] if isinstance(measure, Copying) else []
    return rows[0].gain.value if rows and rows[0].gain is not None else _NAN


def extended_bits(cell: CellResult, method: str, factor: float = LONG_FACTOR, *, tuned: bool = False) -> float:
    """Bits per byte at the end of longer texts after a change of the trained model's rotation."""
    measure = cell.measure("extension-tuned" if tuned else "extension")
    rows = measure.rows if isinstance(measure, Extension) else ()
    row = next((row for row in rows if (row.method, row.factor) == (method, factor)), None)
    return _NAN if row is None or row.bits is None else row.bits.value


def head_type_share(cell: CellResult, head_type: str, share: str) -> float:
    """Mean share over the (`MAX_HEADS`) heads with the most attention of a type, ``previous`` or ``induction``, if it
    is at least `MIN_ATTENTION`."""
    return _by_head_type(cell, head_type, share)[0]


def head_type_lead(cell: CellResult, head_type: str, share: str) -> float:
    """`head_type_share` minus the mean share of the model's other heads."""
    of_type, others = _by_head_type(cell, head_type, share)
    return of_type - others


def _by_head_type(cell: CellResult, head_type: str, share: str) -> tuple[float, float]:
    """Mean share over the heads of a type, and over all others; NaN if there are none."""
    patterns, behaviour = cell.measure("patterns"), cell.measure("behaviour")
    if not isinstance(patterns, HeadPatterns) or behaviour is None:
        return _NAN, _NAN
    weights, values = getattr(patterns, head_type).ravel(), getattr(behaviour, share).ravel()
    top = np.argsort(-weights, kind="stable")[:MAX_HEADS]
    is_type = np.zeros(len(values), dtype=bool)
    is_type[top[weights[top] >= MIN_ATTENTION]] = True
    known = np.isfinite(values)
    of_type, others = values[is_type & known], values[~is_type & known]
    return (float(of_type.mean()) if len(of_type) else _NAN), (float(others.mean()) if len(others) else _NAN)


def position_shares(cell: CellResult) -> Float[np.ndarray, "L H"] | None:
    """Effects of removing position from each head, as shares of the sum of all significant positive effects.

    None without such effects, or if the encoding does not act in heads.
    """
    ablation = cell.measure("position-loss")
    if ablation is None:
        return None
    drops = np.where((ablation.low > 0) & (ablation.drops > _ROUNDING), ablation.drops, 0.0)
    return drops / drops.sum() if drops.sum() > 0 else None


def deposit(cell: CellResult, layer: int | None = None) -> float:
    """The largest of `position_shares`, over all heads or those of one layer."""
    shares = position_shares(cell)
    return _NAN if shares is None else float((shares if layer is None else shares[layer]).max())


def positional_by_frequency(cell: CellResult, *, untrained: bool = False) -> float:
    """Rank correlation over heads of positional share and mean frequency; ``untrained``: before training."""
    behaviour, use = map(cell.measure, ("beginning",) * 2 if untrained else ("behaviour", "frequency"))
    if behaviour is None or use is None:
        return _NAN
    pairs = np.stack((behaviour.positional.ravel(), use.centre.ravel()))
    pairs = pairs[:, np.isfinite(pairs).all(0)]
    return float(spearman(pairs)) if pairs.shape[1] > 2 else _NAN


@dataclass(frozen=True)
class LanguageRow(Record):
    """Language models of an encoding. Values are means over the seeds that have one; None if none has."""

    task: str  # its label
    label: str
    title: str
    seeds: int
    bits: float | None  # per byte at the training length
    lowest: float | None  # of the seeds
    highest: float | None
    lost: float | None  # increase in bits per byte at the end of texts of `LONG_FACTOR` training lengths
    needle: float | None  # accuracy on needles at the training length
    needle_long: float | None  # and at `LONG_FACTOR` times it
    copied: float | None  # bits per token saved by an earlier copy at a distance of `NEAR_FACTOR` training lengths
    deposit: float | None  # largest share of one head in the effects of removing position
    parameters: int
    seconds: float | None  # training time


def language_rows(spec: GridSpec, results: Results) -> list[LanguageRow]:
    """Every encoding with evaluated language models, task by task, best first."""
    rows = []
    for task, column in product(spec.tasks, spec.columns()):
        cells = [c for c in results.cells_of(task, column.label) if c.status == "complete" and is_language(c)]
        if cells:
            values, mean = [bits_per_byte(cell) for cell in cells], partial(mean_of, cells)
            row = LanguageRow(
                *(task, column.label, column.title, len(cells)),
                bits=mean(bits_per_byte),
                lowest=min(values),
                highest=max(values),
                lost=mean(bits_increase),
                needle=mean(lambda cell: needle_accuracy(cell, 1.0)),
                needle_long=mean(lambda cell: needle_accuracy(cell, LONG_FACTOR)),
                copied=mean(lambda cell: copy_gain(cell, NEAR_FACTOR)),
                deposit=mean(deposit),
                parameters=cells[0].parameters,
                seconds=mean(lambda cell: cell.result["seconds"]),
            )
            rows.append(row)
    order = list(spec.tasks)
    return sorted(rows, key=lambda row: (order.index(row.task), np.inf if row.bits is None else row.bits))
