"""Results as tidy Arrow tables, which pandas, polars, DuckDB and R can read; docs/how-to/export.md has the columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from toeplens.utils import choose

_TYPES = {"": pa.float64(), "text": pa.string(), "count": pa.int64(), "flag": pa.bool_()}


class Frames(Mapping[str, pa.Table]):
    """Tables by name, each made when it is read; an unknown name raises `InputError` with those there are."""

    def __init__(self, makers: Mapping[str, Callable[[], pa.Table]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> pa.Table:
        return self._makers[choose("frames", name, self._makers)]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def schema(columns: str, key_columns: str = "") -> pa.Schema:
    """Columns by name and type (``text``, ``count``, ``flag``; default: float), after ``key_columns``."""
    parsed = (column.partition(":") for column in f"{key_columns} {columns}".split())
    return pa.schema([(name, _TYPES[kind]) for name, _, kind in parsed])


def table(columns: pa.Schema, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table with these columns; null for NaN, which is not equal to itself, and for missing values."""
    names = set(columns.names)
    known_rows = [{name: value for name, value in row.items() if name in names and value == value} for row in rows]
    return pa.table({name: [row.get(name) for row in known_rows] for name in columns.names}, schema=columns)


def stack_tables(column: str, tables: Mapping[str, pa.Table]) -> pa.Table:
    """Tables with the same columns one after the other, with their names as the first column."""
    named = [rows.add_column(0, column, pa.array([name] * rows.num_rows, pa.string())) for name, rows in tables.items()]
    return pa.concat_tables(named) if named else pa.table({column: pa.array([], pa.string())})
