"""What is asked of a grid study's language models: bits a byte, longer texts, needles, heads; NaN for nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Float

from toeplens.engine.language import Bits, Copying, Extension, HeadPatterns, Needles
from toeplens.ground.records import Record
from toeplens.lens.kit.intervals import spearman
from toeplens.studies.grid.spec import GridSpec
from toeplens.studies.kit.results import CellResult, Results, mean_of

TOP = 3  # heads that stand for a kind, at most: those with the most weight on the token before, or the copy's follower
LEAST = 0.2  # of its weight that a head of a kind gives there
NEAR = 0.5  # times the training length: where copies are compared
LONG = 4.0  # times the training length: where longer texts are compared
_NOTHING = float("nan")
_ROUNDING = 1e-6  # nats, below which a loss is none


def is_language(cell: CellResult) -> bool:
    """Whether a cell is a language model that was measured as one."""
    return isinstance(cell.measure("bits"), Bits)


def bits(cell: CellResult) -> float:
    """Bits a byte at the training length."""
    found = cell.measure("bits")
    return found.bits.value if isinstance(found, Bits) else _NOTHING


def lost(cell: CellResult, factor: float = LONG) -> float:
    """What the end of a text loses by being read with that much before it rather than a training length alone."""
    found = cell.measure("bits")
    row = found.at(factor) if isinstance(found, Bits) else None
    return _NOTHING if row is None or row.gain is None else row.gain.value


def retrieved(cell: CellResult, factor: float) -> float:
    """Accuracy on needles in texts of so many times the training length, mean over the depths."""
    found = cell.measure("needles")
    rows = [row for row in found.rows if row.factor == factor] if isinstance(found, Needles) else []
    if not rows or any(row.accuracy is None for row in rows):
        return _NOTHING
    return float(np.mean([row.accuracy.value for row in rows if row.accuracy is not None]))


def copied(cell: CellResult, factor: float) -> float:
    """Bits a token that the first copy of a span saves at the second, so many times the training length away."""
    found = cell.measure("copying")
    rows = [row for row in found.rows if row.factor == factor] if isinstance(found, Copying) else []
    return rows[0].gain.value if rows and rows[0].gain is not None else _NOTHING


def extended(cell: CellResult, method: str, factor: float = LONG, *, tuned: bool = False) -> float:
    """Bits a byte of the end of longer texts after a change of the trained model's rotation."""
    found = cell.measure("extension-tuned" if tuned else "extension")
    rows = found.rows if isinstance(found, Extension) else ()
    row = next((row for row in rows if (row.method, row.factor) == (method, factor)), None)
    return _NOTHING if row is None or row.bits is None else row.bits.value


def kind_share(cell: CellResult, kind: str, share: str) -> float:
    """A share of the heads of a kind (``previous`` or ``induction``), mean over them.

    They are the `TOP` heads with the most weight of that kind, as far as they give it `LEAST` of their weight.
    """
    return _by_kind(cell, kind, share)[0]


def kind_lead(cell: CellResult, kind: str, share: str) -> float:
    """That less the same share of the model's other heads, mean over them."""
    own, others = _by_kind(cell, kind, share)
    return own - others


def _by_kind(cell: CellResult, kind: str, share: str) -> tuple[float, float]:
    """A share's mean over the heads of a kind, and over all others; NaN where there are none."""
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
    """What is lost, in nats, when position is taken from each head, as shares of all heads' losses that are above 0.

    None where nothing is lost, or the encoding is no head's to lose.
    """
    found = cell.measure("position-loss")
    if found is None:
        return None
    drops = np.where((found.low > 0) & (found.drops > _ROUNDING), found.drops, 0.0)
    return drops / drops.sum() if drops.sum() > 0 else None


def deposit(cell: CellResult, layer: int | None = None) -> float:
    """The largest head's share of what is lost when position is taken from each head alone; of one layer's heads."""
    shares = position_shares(cell)
    if shares is None:
        return _NOTHING
    return float((shares if layer is None else shares[layer]).max())


def positional_by_frequency(cell: CellResult, *, untrained: bool = False) -> float:
    """Rank correlation over the heads: how positional, against the mean frequency that they use; or before training."""
    names = ("beginning", "beginning") if untrained else ("behaviour", "frequency")
    follows, use = map(cell.measure, names)
    if follows is None or use is None:
        return _NOTHING
    both = np.stack((follows.positional.ravel(), use.centre.ravel()))
    both = both[:, np.isfinite(both).all(0)]
    return float(spearman(both)) if both.shape[1] > 2 else _NOTHING


@dataclass(frozen=True)
class LanguageRow(Record):
    """An encoding's language models. Figures are means over the seeds that have one; None where none has.

    task           label of the task
    bits           bits a byte at the training length; ``lowest`` and ``highest`` over seeds
    lost           bits a byte that the end of a text loses at `LONG` times the length read whole
    needle, needle_long  accuracy on needles at the training length, and at `LONG` times it
    copied         bits a token that an earlier copy saves, at `NEAR` times the training length
    deposit        the largest head's share of what is lost when position is taken from each head alone
    seconds        of training
    """

    task: str
    label: str
    title: str
    seeds: int
    bits: float | None
    lowest: float | None
    highest: float | None
    lost: float | None
    needle: float | None
    needle_long: float | None
    copied: float | None
    deposit: float | None
    parameters: int
    seconds: float | None


def language_rows(spec: GridSpec, results: Results) -> list[LanguageRow]:
    """Every encoding that has a measured language model, task by task, best first."""
    rows = []
    for task in spec.tasks:
        for column in spec.columns():
            cells = [cell for cell in results.of(task, column.label) if cell.status == "complete" and is_language(cell)]
            if cells:
                rows.append(_row(task, column.label, column.title, cells))
    order = list(spec.tasks)
    return sorted(rows, key=lambda row: (order.index(row.task), np.inf if row.bits is None else row.bits))


def _row(task: str, label: str, title: str, cells: list[CellResult]) -> LanguageRow:
    mean = partial(mean_of, cells)
    every = [bits(cell) for cell in cells]
    return LanguageRow(
        task=task,
        label=label,
        title=title,
        seeds=len(cells),
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
