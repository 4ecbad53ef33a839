"""The tables of a study as Arrow tables, which pandas, polars, DuckDB and R can read.

Values that are unknown or were not measured are null.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypedDict, get_type_hints

import numpy as np
import pyarrow as pa
from jaxtyping import Float

_KINDS = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


class Place(TypedDict):
    """The place of a cell in its study; the first columns of every table except that of claims.

    protocol  ``paper`` or ``released``
    encoding  label of the encoding in the study
    """

    protocol: str
    task: str
    encoding: str
    seed: int


class CellRow(Place, total=False):
    """One model.

    run                     its directory's name, the hash of its spec
    status                  ``complete`` or ``diverged``
    settled                 whether it had stopped learning
    accuracy, loss          on test examples after training; the loss in nats
    fit_accuracy, fit_loss  on training examples, without dropout
    chance, guess           accuracy of the best constant guess, and of the length-only baseline
    skill                   accuracy above that baseline, relative to the maximum possible gain
    half_learned            log2 of the epochs until a skill of 0.5; ``setbacks``: sum of drops in test accuracy
    peak                    the largest accuracy drop by one head, relative to skill
    peak_layer, peak_head   index of that head, from 0
    epochs, steps, seconds  of training; ``tokens_per_second`` likewise
    """

    run: str
    status: str
    settled: bool
    accuracy: float
    loss: float
    fit_accuracy: float
    fit_loss: float
    chance: float
    guess: float
    skill: float
    half_learned: float
    setbacks: float
    peak: float
    peak_layer: int
    peak_head: int
    parameters: int
    epochs: float
    steps: int
    seconds: float
    tokens_per_second: float


class HeadRow(Place, total=False):
    """One head of one model; layers and heads are counted from 0.

    drop                   accuracy drop when ablated; ``drop_low``, ``drop_high``: 95 % interval
    gain                   increase in test loss when ablated, in nats; ``gain_low``, ``gain_high`` likewise
    positional, symbolic, interaction  shares of the variance of its logits (docs/how-to/behaviour.md)
    toeplitz               share of the logits' energy that remains when each diagonal is replaced by its mean
    centre                 mean log2 of the frequencies in rad per token, weighted by the logits' variance
    previous, first, induction  mean attention on the previous token, the first token, the token after a copy (language)
    """

    layer: int
    head: int
    drop: float
    drop_low: float
    drop_high: float
    gain: float
    gain_low: float
    gain_high: float
    positional: float
    symbolic: float
    interaction: float
    toeplitz: float
    centre: float
    previous: float
    first: float
    induction: float


class EpochRow(Place, total=False):
    """One evaluation of one model during training; names as in `CellRow`, ``train`` is the running mean."""

    epoch: float
    step: int
    lr: float
    train_accuracy: float
    train_loss: float
    fit_accuracy: float
    fit_loss: float
    test_accuracy: float
    test_loss: float
    seconds: float


class LengthRow(Place, total=False):
    """One model on test sequences of one length.

    length, factor  length in tokens, and relative to the training length
    accuracy        with its 95 % interval ``low`` to ``high``; ``loss`` in nats
    chance, guess   as in `CellRow`, on these sequences
    bits            for language models, bits per byte, with each text read in one pass; ``sliding``: with windows
    """

    length: int
    factor: float
    examples: int
    accuracy: float
    low: float
    high: float
    loss: float
    chance: float
    guess: float
    bits: float
    sliding: float


class ClaimRow(TypedDict, total=False):
    """One claim under one protocol.

    verdict   corrected for all comparisons of the ledger; ``uncorrected``: without correction
    evidence  one line per part
    """

    claim: str
    protocol: str
    verdict: str
    uncorrected: str
    source: str
    statement: str
    rule: str
    evidence: str


@cache
def schema(kind: type) -> pa.Schema:
    """The columns of a row class, in order."""
    return pa.schema([(name, _KINDS[hint]) for name, hint in get_type_hints(kind).items()])


def table(kind: type, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table with the columns of ``kind``; null for NaN and missing values."""
    columns = schema(kind)
    kept = [
        {name: value for name, value in row.items() if value == value} for row in rows
    ]  # NaN is not equal to itself
    return pa.table({name: [row.get(name) for row in kept] for name in columns.names}, schema=columns)


def by_head(**figures: Float[np.ndarray, "L H"] | None) -> Iterator[dict[str, Any]]:
    """One row per head; values that are None are skipped, and there are no rows if all are None."""
    known = {name: values for name, values in figures.items() if values is not None}
    if not known:
        return
    layers, heads = next(iter(known.values())).shape
    for layer in range(layers):
        for head in range(heads):
            yield {"layer": layer, "head": head, **{name: float(each[layer, head]) for name, each in known.items()}}
