"""Results that a page shows. The page's function is named, not imported: pages stand above studies."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar


class HasPage:
    """Results with a page."""

    PAGE: ClassVar[str]  # module and name of the function that makes the page, as "module:function"

    def page(self) -> Any:
        """The page, a `toeplens.report.page.Page`."""
        module, _, name = self.PAGE.partition(":")
        return getattr(import_module(module), name)(self)

    def charts(self) -> dict[str, Any]:
        """The page's charts by name, as Altair charts: ``charts()["accuracy"].save("accuracy.pdf")``."""
        return self.page().charts()
