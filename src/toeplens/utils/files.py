"""Files: written atomically (under a temporary name, fsynced, renamed); JSON read safely.

What is read has a limited size, finite numbers and strict types; problems raise an `InputError`.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import lzma
import math
import os
import re
import secrets
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from toeplens.utils.errors import EnvironmentFailure, InputError, invalid, repr_of, validation_message

FORMAT = 1  # version of the JSON format; increase it if older readers could misinterpret a file
MAX_BYTES = 2**28  # bytes; the largest known record, a laptop study's results, has 5 million
_NUMBERS = (int, float, int | None, float | None)
T = TypeVar("T")
type_adapter: Any = cache(TypeAdapter)

_MACHINE_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.EFBIG: "the file is larger than the system allows",
    errno.EIO: "the disk reported an input/output error",
}


def environment_failure(error: OSError, path: Path | str) -> EnvironmentFailure:
    """The operating system's error when writing ``path``, as an `EnvironmentFailure`."""
    reason = _MACHINE_ERRORS.get(error.errno or 0, (error.strerror or str(error)).lower())
    return EnvironmentFailure(f"Cannot write {path}: {reason}. Finished work is saved; no file is incomplete.")


def cache_directory(name: str) -> Path:
    """A directory in ``$TOEPLENS_CACHE``, or else ``$XDG_CACHE_HOME`` or ``~/.cache``; it may not exist.

    Raises `RuntimeError` if there is no home directory.
    """
    cache = os.environ.get("TOEPLENS_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "toeplens" / name


def make_directory(path: Path) -> Path:
    """Create ``path`` and its parents; raises `EnvironmentFailure` if that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        if path.is_symlink() and not path.exists():
            raise InputError(f"out must be a directory, but {path} is a broken link.") from None
        raise InputError(f"out must be a directory, but {path} is a file or lies under one.") from None
    except OSError as error:
        raise environment_failure(error, path) from None
    return path


def read_bytes(path: Path | str, max_bytes: int = -1) -> bytes:
    """The content of a file, at most its first ``max_bytes``."""
    with open(path, "rb") as stream:
        return stream.read(max_bytes)


def read_yaml(path: Path) -> dict[str, Any]:
    """The content of a YAML file of this package."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if libyaml is there
    content: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), loader)
    return content


def decompress(content: bytes, max_bytes: int) -> bytes:
    """Decompress gzip or xz. Raises `ValueError` for anything else, and for more than ``max_bytes``."""
    stream = io.BytesIO(content)
    try:
        with lzma.LZMAFile(stream) if content.startswith(b"\xfd7zXZ") else gzip.GzipFile(fileobj=stream) as packed:
            unpacked = packed.read(max_bytes + 1)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(str(error)) from None
    if len(unpacked) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return unpacked


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` atomically, via a temporary file next to it."""
    path = Path(path)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise environment_failure(error, path) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def is_leftover(path: Path) -> bool:
    """Whether ``path`` is a temporary file of `write_bytes` left by a killed process."""
    return re.fullmatch(r"\..+\.[a-z0-9_]{8}\.tmp", path.name) is not None


def write_text(path: Path, content: str) -> None:
    """Write ``content`` to ``path`` atomically, as UTF-8."""
    write_bytes(path, content.encode())


def write_json(path: Path, content: Any, *, rows: str | None = None, record: bool = True) -> None:
    """Write ``content`` to ``path`` atomically; NaN and infinities are written as null.

    Records (objects with named fields) also get the number of the current `FORMAT`.

    ``rows`` names a field of ``content`` with a long list; it is written last, one item per line.
    """
    content = nan_to_none(content)
    if record and isinstance(content, dict):
        content["format"] = FORMAT
    tail = "\n"
    if rows is not None:
        items = [json.dumps(item, allow_nan=False, sort_keys=True, separators=(",", ":")) for item in content[rows]]
        content = {key: value for key, value in content.items() if key != rows}
        tail = f',\n "{rows}": [\n' + ",\n".join(items) + "\n ]\n}\n"
    text = json.dumps(content, indent=1, allow_nan=False, sort_keys=True)
    text = re.sub(r"\[\n([^\[\]{}\"]*?)\n *\]", lambda match: f"[{' '.join(match[1].split())}]", text)
    write_text(path, (text if rows is None else text.removesuffix("\n}")) + tail)


def to_json_types(content: Any, field: str = "options") -> Any:
    """``content`` as JSON returns it (tuples become lists); raises `InputError` for anything JSON cannot represent.

    ``field`` is the name of the content in the message, which also gives the place in it.
    """
    try:
        return json.loads(json.dumps(content, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(content, dict) and not isinstance(error, RecursionError):
            for name, value in content.items():
                to_json_types(value, f"{field}.{name}")
        raise invalid(field, "be serializable as JSON", got=f"{repr_of(content)} ({error})") from None


def nan_to_none(content: Any) -> Any:
    """``content`` with non-finite floats replaced by None."""
    return _map_floats(content, lambda value: value if math.isfinite(value) else None)


def round_floats(content: Any, digits: int = 6) -> Any:
    """``content`` with every float rounded to so many significant digits."""
    return _map_floats(content, lambda value: float(f"{value:.{digits}g}"))


def _map_floats(content: Any, change: Callable[[float], float | None]) -> Any:
    if isinstance(content, float):
        return change(content)
    if isinstance(content, dict):
        return {key: _map_floats(value, change) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_map_floats(value, change) for value in content]
    return content


# ---- reading --------------------------------------------------------------------------------------------------------


def parse_json(text: str, where: Path | str) -> Any:
    """Parse JSON with finite numbers; invalid JSON raises an `InputError` that names ``where``."""
    try:
        return json.loads(text, parse_float=_finite_float, parse_constant=_finite_float)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is damaged: it is not JSON ({error}).") from None


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"a number is not finite: {text[:20]}")
    return number


def read_json(path: Path | str) -> Any:
    """Read JSON from ``path``; a missing or damaged file raises an `InputError` (see `parse_json`).

    The format number is removed from objects. Objects without one are older than the first format; formats later than
    `FORMAT` are rejected.
    """
    content = parse_json(_read_text(path), path)
    number = content.pop("format", 0) if isinstance(content, dict) else 0
    if not isinstance(number, int) or number < 0:
        raise InputError(f"{path} is damaged: format must be a whole number, got {repr_of(number)}.")
    if number > FORMAT:
        raise InputError(f"{path} has format {number} of a later version. This version reads formats up to {FORMAT}.")
    return content


def read_rows(path: Path) -> list[Any]:
    """The rows of a JSON lines file; empty if it does not exist."""
    if not path.exists():
        return []
    return [parse_json(line, f"{path}, line {number},") for number, line in enumerate(_read_text(path).splitlines(), 1)]


def _read_text(path: Path | str) -> str:
    try:
        content = read_bytes(path, MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise InputError(f"{path} is damaged: it has more than {MAX_BYTES} bytes.")
        return content.decode()
    except FileNotFoundError:
        raise InputError(f"file {path} does not exist.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is damaged: it is not JSON ({error}).") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}.") from None


def refuse_booleans(content: Any, fields: Mapping[str, FieldInfo]) -> None:
    """Reject booleans for number fields; Python would accept them as 1 and 0."""
    for name, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, bool) and name in fields and fields[name].annotation in _NUMBERS:
            raise invalid(name, "be a number", got=str(value).lower())


def validate_as(kind: type[T], content: Any, where: Path | str) -> T:
    """``content`` validated as ``kind``; invalid content raises an `InputError` that names ``where`` and the field."""
    try:
        return type_adapter(kind).validate_python(content)
    except ValidationError as error:
        raise InputError(f"{where} is damaged: {validation_message(error).removesuffix('.')}.") from None
