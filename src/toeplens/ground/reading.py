"""JSON read back: of limited size, its numbers finite, and what a record may hold; a fault is one sentence.

Files that are no records are stated once, as a type that pydantic knows made of the numbers below; `checked` looks at
what was read by it. They are strict: true is no number, "3" is none, and 1e999 is none either.
"""

from __future__ import annotations

import json
import math
import re
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

LARGEST = 2**28  # the largest record, a laptop study's results, has 5 million
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NUMBERS = (int, float, int | None, float | None)
T = TypeVar("T")


def parse_json(text: str, where: Path | str) -> Any:
    """What ``text`` holds, all its numbers finite; what is no JSON raises an `InputError` that names ``where``."""
    try:
        content = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if _SURROGATE.search(text):  # half a character can be neither shown nor written
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is damaged: it is not JSON ({error}).") from None
    return content


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"a number is not finite: {text[:20]}")
    return number


def read_json(path: Path | str, *, pipes: bool = False) -> Any:
    """Read JSON from ``path``; a missing or damaged file is one sentence (see `parse_json`).

    A named pipe is refused, unless ``pipes`` are allowed.

    Objects come without the number of their format. Those without one are older than the first; a later format than
    `FORMAT` is refused.
    """
    content = parse_json(_text(path, pipes), path)
    number = content.pop("format", 0) if isinstance(content, dict) else 0
    if not isinstance(number, int) or number < 0:
        raise InputError(f"{path} is damaged: format must be a whole number, got {shown(number)}.")
    if number > FORMAT:
        raise InputError(f"{path} has format {number} of a later version. This version reads formats up to {FORMAT}.")
    return content


def read_rows(path: Path) -> list[Any]:
    """The rows of a file of JSON lines; none if it is not there."""
    if not path.exists():
        return []
    return [parse_json(line, f"{path}, line {number},") for number, line in enumerate(_text(path).splitlines(), 1)]


def _text(path: Path | str, pipes: bool = False) -> str:
    try:
        content = read_bytes(path, LARGEST + 1, pipes=pipes)
        text = content.decode() if len(content) <= LARGEST else None
    except FileNotFoundError:
        raise InputError(f"file {path} does not exist.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is damaged: it is not JSON ({error}).") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}.") from None
    except ValueError as error:  # a name with a null character in it
        raise InputError(f"{str(path)!r} cannot be read: {error}.") from None
    if text is None:
        raise InputError(f"{path} is damaged: it has more than {LARGEST} bytes.")
    return text


def refuse_truths(given: Any, fields: Mapping[str, FieldInfo]) -> None:
    """Refuse true and false where a field is a number: Python would count them as 1 and 0."""
    for name, value in given.items() if isinstance(given, dict) else ():
        if isinstance(value, bool) and name in fields and fields[name].annotation in _NUMBERS:
            raise invalid(name, "be a number", got=str(value).lower())


def checked(kind: type[T], content: Any, where: Path | str) -> T:
    """``content`` as a record of this kind; what is none raises an `InputError` that names ``where`` and the field."""
    try:
        return _adapter(kind).validate_python(content)
    except ValidationError as error:
        raise InputError(f"{where} is damaged: {sentence(error).rstrip('.')}.") from None


_adapter: Any = cache(TypeAdapter)
