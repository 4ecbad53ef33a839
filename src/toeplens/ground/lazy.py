"""Packages whose names are imported when they are first used, so that importing the package is fast."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def lazy(package: str, file: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose file imports its names under ``if TYPE_CHECKING:``."""

    @cache
    def holders() -> dict[str, str]:
        typed = next(
            node for node in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(node, ast.If)
        )
        found = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in found for alias in node.names}

    def get(name: str) -> Any:
        holder = holders().get(name, "")
        if holder == package or any(f"{each}.".startswith(f"{package}.{name}.") for each in holders().values()):
            return importlib.import_module(f"{package}.{name}")
        if holder:
            return getattr(importlib.import_module(holder), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
