"""Documents from plain files, JSON lines, Parquet and folders of these, or from Python's standard library."""

from __future__ import annotations

import json
import os
import platform
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from toeplens.ground import InputError, invalid, shown
from toeplens.ground.errors import first_line

_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "lib2to3", "idlelib", "turtledemo"}
_TESTS = {"test", "tests", "idle_test"}
_OF_THE_MACHINE = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")  # differ between builds
_ROWS = 256  # rows of a Parquet file per read


@dataclass(frozen=True)
class Source:
    """The source of the text.

    text    files and folders, as absolute paths; empty for the standard library of the running Python
    column  the text column of JSON lines and Parquet files
    """

    text: tuple[str, ...]
    column: str

    @classmethod
    def of(cls, text: Sequence[str], column: str) -> Source:
        """A source with absolute paths."""
        return cls(tuple(os.path.abspath(path) for path in text), column)

    def __str__(self) -> str:
        if not self.text:
            return f"the standard library of Python {platform.python_version()}"
        return self.text[0] if len(self.text) == 1 else f"{self.text[0]} and {len(self.text) - 1} more"

    @property
    def about(self) -> dict[str, Any]:
        """The description of the source in a corpus record."""
        if self.text:
            return {"source": list(self.text)}
        return {"source": "the standard library of Python", "python": platform.python_version()}

    def files(self) -> list[Path]:
        """All files, sorted by name within a folder, without hidden ones. Raises `InputError` if there are none."""
        if not self.text:
            return _library()
        found = [file for path in self.text for file in _files(Path(path))]
        if not found:
            raise InputError(f"text: {self} contains no files.")
        return found

    def documents(self) -> Iterator[bytes]:
        """All documents in turn: a file, or a row of JSON lines or Parquet; empty ones are skipped."""
        for file in self.files():
            try:
                yield from filter(None, documents_in(file, self.column))
            except OSError as error:
                raise _unreadable(file, error) from None


def looked_at(files: Sequence[Path]) -> tuple[str, int]:
    """A fingerprint of the files' names, sizes and times, and the time of the last change.

    The time is in nanoseconds since 1970. A file that changes during the check may keep its fingerprint, so anything
    cached under a fingerprint must be created some time later.
    """
    mark, latest = sha256(), 0
    for file in files:
        try:
            facts = file.stat()
        except OSError as error:
            raise _unreadable(file, error) from None
        line = (os.fsencode(file).hex(), facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        mark.update(f"{line}\n".encode())
        latest = max(latest, facts.st_mtime_ns, facts.st_ctime_ns)
    return mark.hexdigest(), latest


def _files(path: Path) -> list[Path]:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise InputError(f"text: {path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if stat.S_ISREG(mode):
        return [path]
    if not stat.S_ISDIR(mode):
        raise invalid("text", "be a file or a folder", path)
    return _inside(path, lambda name: name.startswith("."))


def _library() -> list[Path]:
    place = Path(sysconfig.get_path("stdlib"))
    found = _inside(place, lambda name: name in _LEFT_OUT | _TESTS or name.startswith(_OF_THE_MACHINE))
    found = [file for file in found if file.suffix == ".py"]
    if not found:
        raise InputError(f"text: this Python has no library in {place}. Give files or folders.")
    return found


def _inside(folder: Path, left_out: Callable[[str], bool]) -> list[Path]:
    def fail(error: OSError) -> None:
        raise _unreadable(Path(error.filename or folder), error) from None

    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not left_out(name)]
        found += [Path(place, name) for name in names if not left_out(name)]
    return sorted((file for file in found if file.is_file()), key=lambda file: file.parts)


def documents_in(file: Path, column: str) -> Iterator[bytes]:
    """The documents of a file: rows of ``column`` for JSON lines and Parquet (empty rows included), otherwise the whole
    file. Raises `InputError` for unreadable rows and rows without the column.
    """
    if file.suffix == ".jsonl":
        return _lines(file, column)
    if file.suffix == ".parquet":
        return _rows(file, column)
    return iter((file.read_bytes(),))


def _lines(file: Path, column: str) -> Iterator[bytes]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"text: {file}, line {number}, is not JSON ({error}).") from None
            if not isinstance(row, dict) or column not in row:
                there = f"it has {', '.join(sorted(row))}" if isinstance(row, dict) else "it is not an object"
                raise InputError(f"column: {file}, line {number}, has no {column!r}; {there}.")
            yield _text(row[column], f"{file}, line {number},", column)


def _rows(file: Path, column: str) -> Iterator[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if column not in names:
                raise InputError(f"column: {file} has no {column!r}; it has {', '.join(names)}.")
            number = 0
            for batch in table.iter_batches(_ROWS, columns=[column]):
                for value in batch.column(0):
                    number += 1
                    yield _text(value.as_py(), f"{file}, row {number},", column)
    except pa.ArrowException as error:
        raise InputError(f"text: {file} is not a valid Parquet file ({first_line(error, 'damaged')}).") from None


def _text(value: object, where: str, column: str) -> bytes:
    if value is None:
        return b""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InputError(f"column: {where} must have text in {column!r}, got {shown(value)}.")
    return value.encode("utf-8", "surrogatepass")


def _unreadable(path: Path, error: OSError | ValueError) -> InputError:
    reason = getattr(error, "strerror", None) or str(error)
    return InputError(f"text: {path} cannot be read: {reason.lower()}.")
