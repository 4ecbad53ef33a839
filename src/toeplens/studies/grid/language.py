"""Measures of a grid study's language models: bits per byte, longer texts, needles, heads; NaN if missing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
from jaxtyping import Float

from toeplens.engine.language import Bits, Copying, Extension, HeadPatterns, Needles
from toeplens.ground.records import Record
from toeplens.lens.kit.intervals import spearman
from toeplens.studies.grid.spec import GridSpec
from toeplens.studies.kit.results import CellResult, Results, mean_of

TOP = 3  # maximum number of heads of a type: those with the most attention on the previous token or after a copy
LEAST = 0.2  # minimum attention of a head of a type
NEAR = 0.5  # distance for comparing copies, in training lengths
LONG = 4.0  # length for comparing longer texts, in training lengths
_NOTHING = float("nan")
_ROUNDING = 1e-6  # smaller effects in nats count as 0


def is_language(cell: CellResult) -> bool:
    """Whether a cell is a language model with the measure ``bits``."""
    return isinstance(cell.measure("bits"), Bits)


def bits(cell: CellResult) -> float:
    """Bits per byte at the training length."""
    found = cell.measure("bits")
    return found.bits.value if isinstance(found, Bits) else _NOTHING


def lost(cell: CellResult, factor: float = LONG) -> float:
    """Increase in bits per byte at the end of a text of that length, compared with one training length of context."""
    found = cell.measure("bits")
    row = found.at(factor) if isinstance(found, Bits) else None
    return _NOTHING if row is None or row.gain is None else row.gain.value


def retrieved(cell: CellResult, factor: float) -> float:
    """Accuracy on needles in texts of that length, mean over depths."""
    found = cell.measure("needles")
    rows = [row for row in found.rows if row.factor == factor] if isinstance(found, Needles) else []
    if not rows or any(row.accuracy is None for row in rows):
        return _NOTHING
    return float(np.mean([row.accuracy.value for row in rows if row.accuracy is not None]))


def copied(cell: CellResult, factor: float) -> float:
    """Bits per token saved at the second copy of a span, at that distance."""
    found = cell.measure("copying")
    rows = [row for row in found.rows if row.factor == factor] if isinstance(found, Copying) else []
    return rows[0].gain.value if rows and rows[0].gain is not None else _NOTHING


def extended(cell: CellResult, method: str, factor: float = LONG, *, tuned: bool = False) -> float:
    """Bits per byte at the end of longer texts after a change of the trained model's rotation."""
    found = cell.measure("extension-tuned" if tuned else "extension")
    rows = found.rows if isinstance(found, Extension) else ()
    row = next((row for row in rows if (row.method, row.factor) == (method, factor)), None)
    return _NOTHING if row is None or row.bits is None else row.bits.value


def kind_share(cell: CellResult, kind: str, share: str) -> float:
    """Mean share over the (`TOP`) heads with the most attention of a type, ``previous`` or ``induction``, if it is at
    least `LEAST`."""
    return _by_kind(cell, kind, share)[0]


def kind_lead(cell: CellResult, kind: str, share: str) -> float:
    """`kind_share` minus the mean share of the model's other heads."""
    own, others = _by_kind(cell, kind, share)
    return own - others


def _by_kind(cell: CellResult, kind: str, share: str) -> tuple[float, float]:
    """Mean share over the heads of a type, and over all others; NaN if there are none."""
    patterns, follows = cell.measure("patterns"), cell.measure("behaviour")
    if not isinstance(patterns, HeadPatterns) or follows is None:
        return _NOTHING, _NOTHING
    weights, values = getattr(patterns, kind).ravel(), getattr(follows, share).ravel()
    top = np.argsort(-weights, kind="stable")[:TOP]
    among = np.zeros(len(values), dtype=bool)
    among[top[weights[top] >= LEAST]] = True
    known = np.isfinite(values)
    own, others = values[among & known], values[~among & known]
    return (float(own.mean()) if len(own) else _NOTHING), (float(others.mean()) if len(others) else _NOTHING)


def position_shares(cell: CellResult) -> Float[np.ndarray, "L H"] | None:
    """Effects of removing position from each head, as shares of the sum of all significant positive effects.

    None without such effects, or if the encoding does not act in heads.
    """
    found = cell.measure("position-loss")
    if found is None:
        return None
    drops = np.where((found.low > 0) & (found.drops > _ROUNDING), found.drops, 0.0)
    return drops / drops.sum() if drops.sum() > 0 else None


def deposit(cell: CellResult, layer: int | None = None) -> float:
    """The largest of `position_shares`, over all heads or those of one layer."""
    shares = position_shares(cell)
    return _NOTHING if shares is None else float((shares if layer is None else shares[layer]).max())


def positional_by_frequency(cell: CellResult, *, untrained: bool = False) -> float:
    """Rank correlation over heads of positional share and mean frequency; ``untrained``: before training."""
    follows, use = map(cell.measure, ("beginning",) * 2 if untrained else ("behaviour", "frequency"))
    if follows is None or use is None:
        return _NOTHING
    both = np.stack((follows.positional.ravel(), use.centre.ravel()))
    both = both[:, np.isfinite(both).all(0)]
    return float(spearman(both)) if both.shape[1] > 2 else _NOTHING


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
    lost: float | None  # increase in bits per byte at the end of texts of `LONG` training lengths
    needle: float | None  # accuracy on needles at the training length
    needle_long: float | None  # and at `LONG` times it
    copied: float | None  # bits per token saved by an earlier copy at a distance of `NEAR` training lengths
    deposit: float | None  # largest share of one head in the effects of removing position
    parameters: int
    seconds: float | None  # training time


def language_rows(spec: GridSpec, results: Results) -> list[LanguageRow]:
    """Every encoding with evaluated language models, task by task, best first."""
    rows = []
    for task, column in product(spec.tasks, spec.columns()):
        cells = [cell for cell in results.of(task, column.label) if cell.status == "complete" and is_language(cell)]
        if cells:
            every, mean = [bits(cell) for cell in cells], partial(mean_of, cells)
            row = LanguageRow(
                *(task, column.label, column.title, len(cells)),
                bits=mean(bits),
                lowest=min(every),
                highest=max(every),
                lost=mean(lost),
                needle=mean(lambda cell: retrieved(cell, 1.0)),
                needle_long=mean(lambda cell: retrieved(cell, LONG)),
                copied=mean(lambda cell: copied(cell, NEAR)),
                deposit=mean(deposit),
                parameters=cells[0].parameters,
                seconds=mean(lambda cell: cell.result["seconds"]),
            )
            rows.append(row)
    order = list(spec.tasks)
    return sorted(rows, key=lambda row: (order.index(row.task), np.inf if row.bits is None else row.bits))
