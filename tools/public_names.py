"""Write tests/public-names.txt: the stable public names, with their parameters (docs/reference/stability.md).

    python tools/public_names.py

`tests/test_public_names.py` checks that the file is up to date, so changes of names and parameters are noticed.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import toeplens

PAGE = Path(__file__).resolve().parents[1] / "tests" / "public-names.txt"
_HEAD = "# Made by tools/public_names.py: what docs/reference/stability.md says is kept. '=' stands for a default.\n"


def public_names() -> str:
    """Every public name of the package and its subpackages, a line each, with its parameters if it has any."""
    names = [name for name in toeplens.__all__ if inspect.ismodule(getattr(toeplens, name))]
    packages = {"toeplens": toeplens} | {f"toeplens.{name}": getattr(toeplens, name) for name in names}
    lines = [
        f"{place}.{name}{_parameters(getattr(package, name))}"
        for place, package in packages.items()
        for name in sorted(getattr(package, "__all__", ()))
    ]
    return _HEAD + "\n".join(lines) + "\n"


def _parameters(entry: Any) -> str:
    if not callable(entry):
        return ""
    try:
        parameters = inspect.signature(entry).parameters.values()
    except ValueError:  # without a signature of its own
        return ""
    bare = inspect.Signature([each.replace(annotation=each.empty, default=each.empty) for each in parameters])
    optional = {each.name for each in parameters if each.default is not each.empty}
    shown = (f"{part}=" if part in optional else part for part in str(bare)[1:-1].split(", "))
    return f"({', '.join(shown)})"


if __name__ == "__main__":
    PAGE.write_text(public_names(), encoding="utf-8")
    print(PAGE)
