"""Rows as an Arrow table, which pandas, polars, DuckDB and R read as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import isnan
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa
from jaxtyping import Float

_KINDS = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


@cache
def schema(kind: type) -> pa.Schema:
    """The columns that a row's class names, in its order."""
    return pa.schema([(name, _KINDS[hint]) for name, hint in get_type_hints(kind).items()])


def table(kind: type, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table of the columns that ``kind`` names; null for NaN and for what a row does not have."""
    columns = schema(kind)
    kept = list(rows)
    return pa.table({name: [_known(row.get(name)) for row in kept] for name in columns.names}, schema=columns)


def by_head(**figures: Float[np.ndarray, "L H"] | None) -> Iterator[dict[str, Any]]:
    """A row a head from figures of all of them, passing over those that are None; no rows where all are."""
    known = {name: values for name, values in figures.items() if values is not None}
    if not known:
        return
    layers, heads = next(iter(known.values())).shape
    for layer in range(layers):
        for head in range(heads):
            yield {"layer": layer, "head": head, **{name: float(each[layer, head]) for name, each in known.items()}}


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and isnan(value) else value
