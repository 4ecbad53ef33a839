"""The tables of a study as Arrow tables, which pandas, polars, DuckDB and R read as they are.

A number that is not known, or was not measured, is null in all of them.
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
    """Where a cell stands in its study; the first columns of every table but that of claims.

    protocol  ``paper`` or ``released``
    encoding  what the study calls it
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
    chance, guess           accuracy of the best constant guess, and of the best guess from a text's length
    skill                   accuracy over that guess, as a share of what there is to learn
    half_learned            doublings of an epoch until half of it was learned; ``setbacks`` accuracy lost on the way
    peak                    the largest loss by one head, as a share of the skill
    peak_layer, peak_head   which head that is, from 0
    epochs, steps, seconds  of training; ``tokens_per_second`` then
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
    """One head of one model; layers and heads count from 0.

    drop                   accuracy lost when it is silenced; ``drop_low``, ``drop_high`` its 95 % interval
    gain                   test loss gained then, in nats; ``gain_low``, ``gain_high`` likewise
    positional, symbolic, interaction  shares of the variance of its logits (docs/how-to/behaviour.md)
    toeplitz               share of the energy of its logits that is left when each diagonal is replaced by its mean
    centre                 of the frequencies that it uses: mean log2 of radians a token, by the logits' variance
    previous, first, induction  mean attention to the token before, to the first, to what followed a copy (language)
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
    """One evaluation of one model while it was trained; names as in `CellRow`, ``train`` the running mean."""

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
    """One model on test texts of one length.

    length, factor  tokens, and over the length of training
    accuracy        with its 95 % interval ``low`` to ``high``; ``loss`` in nats
    chance, guess   as in `CellRow`, on these texts
    bits            of a language model, bits a byte on these texts, each read in one pass; ``sliding`` by windows
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

    verdict   corrected for all comparisons of the ledger; ``uncorrected`` without that
    evidence  a sentence a part, a line each
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
    """The columns that a row's class names, in its order."""
    return pa.schema([(name, _KINDS[hint]) for name, hint in get_type_hints(kind).items()])


def table(kind: type, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table of the columns that ``kind`` names; null for NaN and for what a row does not have."""
    columns = schema(kind)
    kept = [{name: value for name, value in row.items() if value == value} for row in rows]  # NaN is not itself
    return pa.table({name: [row.get(name) for row in kept] for name in columns.names}, schema=columns)


def by_head(**figures: Float[np.ndarray, "L H"] | None) -> Iterator[dict[str, Any]]:
    """A row a head from figures of all of them, passing over those that are None; no rows where all are."""
    known = {name: values for name, values in figures.items() if values is not None}
    if not known:
        return
    layers, heads = next(iter(known.values())).shape
    for layer in range(layers):
        for head in range(heads):
            yield {"layer": layer, "head": head, **{name: float(each[layer, head]) for name, each in known.items()}}
