"""The result of an audit, and its directory with JSON, Parquet and CSV files."""

from __future__ import annotations

import io
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyarrow import csv, parquet

from toeplens.studies.auditing.record import PARTS, Audit
from toeplens.studies.kit.changes import VERSIONS
from toeplens.utils import write_bytes, write_json
from toeplens.utils.files import make_directory

RECORD = "audit.json"  # file name of the record
PARQUET, CSV = "heads.parquet", "heads.csv"


def finish_audit(effects: Audit, about: dict[str, Any], *, seed: int, started: float, **fields: Any) -> Audit:
    """The finished audit, with seed, versions and seconds added to its ``about``.

    ``started`` is the start time, from `time.monotonic`.
    """
    seconds = round(time.monotonic() - started, 1)
    fields["about"] = {**about, "seed": seed, **effects.about, **VERSIONS, "seconds": seconds}
    return replace(effects, **fields)


def save_audit(audit: Audit, directory: Path) -> Path:
    """Write the record and its tables atomically, replacing an earlier audit. Returns the directory.

    The saved progress of an unfinished audit is removed.
    """
    make_directory(directory)
    write_bytes(directory / PARQUET, parquet_of(audit))
    stream = io.BytesIO()
    csv.write_csv(audit.frame(), stream)  # empty if unknown
    write_bytes(directory / CSV, stream.getvalue())
    write_json(directory / RECORD, audit.to_dict())
    shutil.rmtree(directory / PARTS, ignore_errors=True)
    return directory


def open_audit(directory: Path | str) -> Audit:
    """The audit in a directory. Raises `InputError` if there is none or if it is damaged."""
    return Audit.from_directory(directory, RECORD)


def parquet_of(audit: Audit) -> bytes:
    """The table of heads (`COLUMNS`) as a Parquet file; null if unknown."""
    stream = io.BytesIO()
    parquet.write_table(audit.frame(), stream)
    return stream.getvalue()
