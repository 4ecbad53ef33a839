"""The record of a study: results.json (possibly compressed) and claims.json, without its runs."""

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
FIRST = "reproduce"  # the kind of study in files that do not name one


@dataclass(frozen=True, kw_only=True)
class _Head(Record):
    finished: Count
    total: Count
    environment: dict[str, Text | Number | Truth | None]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A results.json.

    path     path of the file
    content  its content: the request and the results
    head     fields of a `toeplens.studies.kit.study.State` that all kinds of study share, without the ledger
    """

    path: Path
    content: Mapping[str, Any]
    head: dict[str, Any]


def record_in(directory: Path) -> tuple[str, Path] | None:
    """The kind of study and its results file, if a directory only holds a record; otherwise None."""
    claims = directory / CLAIMS_FILE
    results = next((path for name in (RESULTS, *PACKED) if (path := directory / name).is_file()), None)
    if results is None or (directory / STUDY).exists() or not claims.is_file():
        return None
    content = read_json(claims)
    return (content.get("study", FIRST), results) if isinstance(content, dict) else None


def read_record(path: Path) -> Kept:
    """Read a results.json, plain or compressed by gzip or xz. Raises `InputError` if that fails."""
    try:
        packed = read_bytes(path)
        text = (unzipped(packed, LARGEST) if path.suffix in (".gz", ".xz") else packed).decode()
    except (OSError, ValueError) as error:
        raise InputError(f"study: {path} could not be read ({str(error).lower().rstrip('.')}).") from None
    content = parse_json(text, path)
    head = _Head.from_dict(content, path)
    return Kept(path=path, content=content, head={"directory": path.parent, **vars(head)})
