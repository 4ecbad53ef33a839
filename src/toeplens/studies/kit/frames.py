"""The tables of a study as Arrow tables, which pandas, polars, DuckDB and R can read.

docs/how-to/export.md explains the columns. Values that are unknown or were not measured are null.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float

_KINDS = {"": pa.float64(), "text": pa.string(), "count": pa.int64(), "flag": pa.bool_()}


def _schema(columns: str, place: str = "protocol:text task:text encoding:text seed:count") -> pa.Schema:
    """Columns by name and type, after those of the place; floats without a type."""
    named = (column.partition(":") for column in f"{place} {columns}".split())
    return pa.schema([(name, _KINDS[kind]) for name, _, kind in named])


# a row is a model, a head of a model, an evaluation during training, a test length, a claim under a protocol
CELLS = _schema(
    "run:text status:text settled:flag accuracy loss fit_accuracy fit_loss chance guess skill half_learned setbacks "
    "peak peak_layer:count peak_head:count parameters:count epochs steps:count seconds tokens_per_second"
)
HEADS = _schema(
    "layer:count head:count drop drop_low drop_high gain gain_low gain_high positional symbolic interaction toeplitz "
    "centre previous first induction"
)
EPOCHS = _schema("epoch step:count lr train_accuracy train_loss fit_accuracy fit_loss test_accuracy test_loss seconds")
LENGTHS = _schema("length:count factor examples:count accuracy low high loss chance guess bits sliding")
CLAIMS = _schema(
    "claim:text protocol:text verdict:text uncorrected:text source:text statement:text rule:text evidence:text", ""
)


def table(columns: pa.Schema, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table with these columns; null for NaN, which is not equal to itself, and for missing values."""
    kept = [{name: value for name, value in row.items() if value == value} for row in rows]
    return pa.table({name: [row.get(name) for row in kept] for name in columns.names}, schema=columns)


def by_head(**figures: Float[np.ndarray, "L H"]) -> Iterator[dict[str, Any]]:
    """One row per head; no rows without values."""
    for layer, head in np.ndindex(next(iter(figures.values())).shape if figures else (0, 0)):
        yield {"layer": layer, "head": head, **{name: float(each[layer, head]) for name, each in figures.items()}}
