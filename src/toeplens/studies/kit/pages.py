"""Results that a page shows, with their tables and charts.

The function that makes the page is named, not imported: pages stand above studies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any, ClassVar

import pyarrow as pa

from toeplens.ground import choose


class Frames(Mapping[str, pa.Table]):
    """Arrow tables by name, made when they are accessed; an unknown name raises `InputError` with those there are."""

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


class HasPage:
    """Results with a page."""

    PAGE: ClassVar[str]  # module and name of the function that makes the page, as "module:function"

    def page(self) -> Any:
        """The page, a `toeplens.report.Page`."""
        module, _, name = self.PAGE.partition(":")
        return getattr(import_module(module), name)(self)

    def charts(self) -> dict[str, Any]:
        """The page's charts by name, as Altair charts: ``charts()["accuracy"].save("accuracy.pdf")``."""
        return self.page().charts()

    def table_makers(self) -> dict[str, Callable[[], pa.Table]]:
        """Functions that make its tables, by what a row is."""
        return {}

    def frames(self) -> Frames:
        """Its tables by what a row is, as Arrow tables (columns: docs/how-to/export.md): ``frames()["heads"]``."""
        return Frames(self.table_makers())


def scalars_of(records: Iterable[Any]) -> pa.Table:
    """Records as a table of their fields that are texts, numbers or truth values, in order."""
    plain = (str, int, float, bool, type(None))
    rows = []
    for record in records:
        values = {each.name: getattr(record, each.name) for each in fields(record)}
        rows.append({name: value for name, value in values.items() if isinstance(value, plain)})
    return pa.Table.from_pylist(rows)
