"""Packages whose names are imported when they are first used, so that importing the package is fast."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from toeplens.utils.renamed import renamed_getattr


def lazy_getattr(package: str, file: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose file imports its names under ``if TYPE_CHECKING:``."""

    @cache
    def sources() -> dict[str, str]:
        type_checking = next(
            node for node in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(node, ast.If)
        )
        imports = [node for node in type_checking.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        source = sources().get(name, "")
        if source == package or any(f"{module}.".startswith(f"{package}.{name}.") for module in sources().values()):
            return importlib.import_module(f"{package}.{name}")
        if source:
            return getattr(importlib.import_module(source), name)
        return renamed_getattr(package)(name, level=4)

    return get
