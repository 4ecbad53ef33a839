"""Results that a page shows, with their tables and charts.

The function that makes the page is named, not imported: pages stand above studies.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

import pyarrow as pa

from toeplens.studies.kit.frames import Frames


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
