"""An audit: its record, its notebook view, and its directory with JSON, Parquet and CSV files."""

from __future__ import annotations

import io
import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pyarrow import csv, parquet

from toeplens.ground import InputError, read_json, write_bytes, write_json
from toeplens.ground.files import make_directory
from toeplens.studies.auditing.effects import Silenced
from toeplens.studies.auditing.kept import PARTS
from toeplens.studies.auditing.notebook import notebook_html
from toeplens.studies.auditing.record import AuditRecord

RECORD = "audit.json"  # file name of the record
PARQUET, CSV = "heads.parquet", "heads.csv"


@dataclass(frozen=True)
class Audit(AuditRecord):
    """The result of `audit`; notebooks show it as maps of heads."""

    def _repr_html_(self) -> str:
        """The HTML that notebooks show."""
        return notebook_html(self)


def finished(
    changed: Silenced,
    about: Mapping[str, Any],
    *,
    whole: float,
    seed: int,
    started: float,
    words: tuple[str, ...] = (),
) -> Audit:
    """The finished audit, with seed, effects, versions and seconds added to its ``about``.

    Arguments
        started  start time, from `time.monotonic`
    """
    said = {"no_effects": changed.unknown, "intervals": changed.intervals, "race": changed.race}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    known = {name: value for name, value in said.items() if value is not None}
    own: dict[str, Any] = {name: value for name, value in vars(changed).items() if name not in (*said, "unknown")}
    about = {**about, "seed": seed, **known, **versions, "seconds": round(time.monotonic() - started, 1)}
    return Audit(about=about, whole=whole, words=words, **own)


def save(audit: Audit, directory: Path) -> Path:
    """Write the record and its tables atomically, replacing an earlier audit. Returns the directory.

    The saved progress of an unfinished audit is removed.
    """
    make_directory(directory)
    write_bytes(directory / PARQUET, parquet_of(audit))
    write_bytes(directory / CSV, csv_of(audit))
    write_json(directory / RECORD, audit.to_dict())
    shutil.rmtree(directory / PARTS, ignore_errors=True)
    return directory


def open_audit(directory: Path | str) -> Audit:
    """The audit in a directory. Raises `InputError` if there is none or if it is damaged."""
    path = Path(directory) / RECORD
    if not path.is_file():
        raise InputError(f"audit must be the directory of an audit, but {directory} contains no {RECORD}.")
    return Audit.from_dict(read_json(path), path)


def parquet_of(audit: Audit) -> bytes:
    """The table of heads (`COLUMNS`) as a Parquet file; null if unknown."""
    stream = io.BytesIO()
    parquet.write_table(audit.frame(), stream)
    return stream.getvalue()


def csv_of(audit: Audit) -> bytes:
    """The table of heads as comma-separated values with a header; empty if unknown."""
    stream = io.BytesIO()
    csv.write_csv(audit.frame(), stream)
    return stream.getvalue()
