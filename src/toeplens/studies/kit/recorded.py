"""The record of a study: its results.json, compressed or not, and claims.json, without the directory of its pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toeplens.ground import InputError, parse_json, read_json
from toeplens.ground.files import read_bytes, unzipped
from toeplens.ground.reading import LARGEST, Count, Number, Text, Truth
from toeplens.ground.records import Record

STUDY, RESULTS, CLAIMS_FILE = "study.json", "results.json", "claims.json"
PACKED = (f"{RESULTS}.xz", f"{RESULTS}.gz")
FIRST = "reproduce"  # the first kind of study to be had, whose files did not name it


@dataclass(frozen=True, kw_only=True)
class _Head(Record):
    finished: Count
    total: Count
    environment: dict[str, Text | Number | Truth | None]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A results.json.

    path     where it lies
    content  all that it holds: what was asked, and what was found
    head     what of a `toeplens.studies.kit.study.State` every kind of study has the same, but for its ledger
    """

    path: Path
    content: Mapping[str, Any]
    head: dict[str, Any]


def record_in(directory: Path) -> tuple[str, Path] | None:
    """Which study's record alone is kept in a directory, and its results beside its claims.json; None where none is."""
    claims = directory / CLAIMS_FILE
    results = next((path for name in (RESULTS, *PACKED) if (path := directory / name).is_file()), None)
    if results is None or (directory / STUDY).exists() or not claims.is_file():
        return None
    content = read_json(claims)
    return (content.get("study", FIRST), results) if isinstance(content, dict) else None


def read_record(path: Path) -> Kept:
    """A results.json, or one compressed by gzip or xz; what cannot be read, or is no such, raises `InputError`."""
    try:
        packed = read_bytes(path)
        text = (unzipped(packed, LARGEST) if path.suffix in (".gz", ".xz") else packed).decode()
    except (OSError, ValueError) as error:
        raise InputError(f"study: {path} could not be read ({str(error).lower().rstrip('.')}).") from None
    content = parse_json(text, path)
    head = _Head.from_dict(content, path)
    return Kept(path=path, content=content, head={"directory": path.parent, **vars(head)})
