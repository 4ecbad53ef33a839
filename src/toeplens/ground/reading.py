"""Reading JSON safely: limited size, finite numbers, and strict types; problems raise an `InputError`.

Files that are not records are described by a pydantic type built from the types below, and `checked` validates
them. The types are strict: true is not a number, nor are "3" and 1e999.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from toeplens.ground.errors import InputError, invalid, sentence, shown
from toeplens.ground.files import FORMAT, read_bytes

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
Share = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]
Count = Annotated[int, Field(strict=True, ge=0)]
Text = Annotated[str, Field(strict=True)]
Truth = Annotated[bool, Field(strict=True)]

LARGEST = 2**28  # the largest known record, a laptop study's results, has 5 million
_NUMBERS = (int, float, int | None, float | None)
T = TypeVar("T")


def parse_json(text: str, where: Path | str) -> Any:
    """Parse JSON with finite numbers; invalid JSON raises an `InputError` that names ``where``."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is damaged: it is not JSON ({error}).") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"a number is not finite: {text[:20]}")
    return number


def read_json(path: Path | str) -> Any:
    """Read JSON from ``path``; a missing or damaged file raises an `InputError` (see `parse_json`).

    The format number is removed from objects. Objects without one are older than the first format; formats later than
    `FORMAT` are rejected.
    """
    content = parse_json(_text(path), path)
    number = content.pop("format", 0) if isinstance(content, dict) else 0
    if not isinstance(number, int) or number < 0:
        raise InputError(f"{path} is damaged: format must be a whole number, got {shown(number)}.")
    if number > FORMAT:
        raise InputError(f"{path} has format {number} of a later version. This version reads formats up to {FORMAT}.")
    return content


def read_rows(path: Path) -> list[Any]:
    """The rows of a JSON lines file; empty if it does not exist."""
    if not path.exists():
        return []
    return [parse_json(line, f"{path}, line {number},") for number, line in enumerate(_text(path).splitlines(), 1)]


def _text(path: Path | str) -> str:
    try:
        content = read_bytes(path, LARGEST + 1)
        if len(content) > LARGEST:
            raise InputError(f"{path} is damaged: it has more than {LARGEST} bytes.")
        return content.decode()
    except FileNotFoundError:
        raise InputError(f"file {path} does not exist.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is damaged: it is not JSON ({error}).") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}.") from None


def refuse_truths(given: Any, fields: Mapping[str, FieldInfo]) -> None:
    """Reject booleans for number fields; Python would accept them as 1 and 0."""
    for name, value in given.items() if isinstance(given, dict) else ():
        if isinstance(value, bool) and name in fields and fields[name].annotation in _NUMBERS:
            raise invalid(name, "be a number", got=str(value).lower())


def checked(kind: type[T], content: Any, where: Path | str) -> T:
    """``content`` validated as ``kind``; invalid content raises an `InputError` that names ``where`` and the field."""
    try:
        return adapter(kind).validate_python(content)
    except ValidationError as error:
        raise InputError(f"{where} is damaged: {sentence(error).removesuffix('.')}.") from None


adapter: Any = cache(TypeAdapter)
