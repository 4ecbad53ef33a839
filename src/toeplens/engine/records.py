"""What is measured of a run lies beside it, each record with the examples it was made of.

The first record of a kind is ``NAME.json``. One of other examples never replaces it, and is never taken for it: that is
``NAME-SPLIT-EXAMPLES.json``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from toeplens.engine.examples import DataSplit
from toeplens.engine.kinds import KINDS, as_record
from toeplens.ground import InputError, choose, read_json, write_json
from toeplens.ground.records import AtLeast1, Record
from toeplens.training.run import CHECKPOINT, RESULT

_ASKED = "asked"


@dataclass(frozen=True)
class Asked(Record):
    """What examples were asked for: how many, and of which split."""

    examples: AtLeast1
    split: DataSplit = "test"

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise InputError(f"examples: {self.examples} was given; it must be at least 1.")
        choose("split", self.split, get_args(DataSplit))


@dataclass(frozen=True)
class _Asking(Record):
    asked: Asked


def read_record(directory: Path, name: str, asked: Asked) -> dict[str, Any] | None:
    """The record of these examples, or None; a damaged one raises `InputError` (see `toeplens.engine.kinds`)."""
    for path in _places(directory, name, asked):
        if path.exists() and (content := _read(path)).pop(_ASKED) == asdict(asked):
            as_record(name, content, path)
            return content
    return None


def write_record(directory: Path, name: str, asked: Asked, content: dict[str, Any]) -> Path:
    """Write a record; returns where."""
    first, other = _places(directory, name, asked)
    path = other if first.exists() and _read(first)[_ASKED] != asdict(asked) else first
    write_json(path, {**content, _ASKED: asdict(asked)})
    return path


def forget_measured(directory: Path) -> None:
    """Remove what was measured of weights that are gone: a run that has no result and no checkpoint begins anew."""
    if not any((directory / name).exists() for name in (RESULT, CHECKPOINT)):
        for path in directory.glob("*.json"):
            if any(f"{path.stem}-".startswith(f"{name}-") for name in KINDS):
                path.unlink()


def _places(directory: Path, name: str, asked: Asked) -> tuple[Path, Path]:
    return directory / f"{name}.json", directory / f"{name}-{asked.split}-{asked.examples}.json"


def _read(path: Path) -> dict[str, Any]:
    content = read_json(path)
    _Asking.from_dict(content, path)
    return content
