"""Records: dataclasses that are stored as JSON and validated field by field when read.

A record's annotations define its fields: numbers and strings (strict: true is not a number, nor are "3" and 1e999),
arrays with dimensions (jaxtyping's; a letter is one size throughout a record), other records, and lists and
dictionaries of these. NaN is stored as None. Unknown fields, from later versions, are ignored. Fields that are missing
in earlier versions are listed in `Record.LATER` and have defaults.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Self, Union, get_args, get_origin, get_type_hints

import numpy as np
from jaxtyping import AbstractArray, Shaped, jaxtyped
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator
from typing_extensions import TypedDict

from toeplens.ground.errors import InputError
from toeplens.ground.files import adapter, checked, read_json

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
Share = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]
Count = Annotated[int, Field(strict=True, ge=0)]
Text = Annotated[str, Field(strict=True)]
Truth = Annotated[bool, Field(strict=True)]
_Int = Annotated[int, Field(strict=True)]
AtLeast1 = Annotated[int, Field(strict=True, ge=1)]
MaybeNaN = Annotated[float, Field(strict=True), BeforeValidator(lambda value: math.nan if value is None else value)]
NearlyShare = Annotated[float, Field(strict=True, ge=-0.01, le=1.01)]  # with a tolerance for rounding
_STRICT: dict[Any, Any] = {bool: Truth, int: _Int, float: Number, str: Text}


class Dims:
    """The dimensions of a field that is not an array, as in ``L`` or ``M 2``."""

    def __init__(self, names: str) -> None:
        self.names = names


class Each:
    """The type of an array's items, besides None for NaN, such as `Share`."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


def like(hint: Any) -> BeforeValidator:
    """Metadata of a field: validate plain content by this annotation but keep it unchanged."""

    def check(content: Any) -> Any:
        adapter(hint).validate_python(content)
        return content

    return BeforeValidator(check)


class Record:
    """Base class of records."""

    WORDS: ClassVar[str] = ""  # name in messages about records that do not come from a file
    LATER: ClassVar[tuple[str, ...]] = ()  # fields with defaults that records of earlier versions lack

    def verify(self) -> None:
        """Raise `ValueError`, naming the field, for constraints between fields."""

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON; None for NaN."""
        return {field.name: plain_value(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, content: Any, where: Path | str | None = None) -> Self:
        """The inverse of `to_dict`; raises `InputError` naming ``where`` and the field if the content is invalid."""
        return checked(cls, content, cls._place(where))

    @classmethod
    def in_directory(cls, directory: Path | str, file: str) -> Self:
        """The record in a directory's file. Raises `InputError` if there is none or if it is damaged."""
        path = Path(directory) / file
        if not path.is_file():
            raise InputError(f"{cls.WORDS} must be a directory that holds one, but {directory} contains no {file}.")
        return cls.from_dict(read_json(path), path)

    @classmethod
    def from_list(cls, content: Any, where: Path | str | None = None) -> list[Self]:
        """Records from a list; messages also give the index."""
        return checked(list[cls], content, cls._place(where))

    @classmethod
    def _place(cls, where: Path | str | None) -> Path | str:
        return f"{cls.WORDS or cls.__name__}: the record" if where is None else where

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        hints = get_type_hints(cls, include_extras=True)
        own = {field.name: hints[field.name] for field in fields(cls)}  # type: ignore[arg-type]
        strict = {name: NotRequired[_strict(own[name])] if name in cls.LATER else _strict(own[name]) for name in own}
        dims = {name: found for name, hint in own.items() if (found := _dims_of(hint))}
        content: Any = TypedDict(cls.__name__, strict)  # type: ignore[operator]
        return handler.generate_schema(Annotated[content, AfterValidator(partial(_made, cls, dims))])


def plain_value(value: Any) -> Any:
    """``value`` as JSON types: arrays and tuples as lists, records as objects, None for NaN."""
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: plain_value(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(each) for each in value]
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    if isinstance(value, np.ndarray):
        numbers = value.astype(object)
        numbers[numbers != numbers] = None
        return numbers.tolist()
    return value


def _made(kind: Any, dims: dict[str, str], values: dict[str, Any]) -> Any:
    """The record of these fields; their sizes must agree."""
    with jaxtyped("context"):  # remembers the sizes
        for name, names in sorted(dims.items(), key=lambda each: "+" in each[1]):
            if (value := values.get(name)) is None:
                continue
            try:
                shape = np.shape(value) if isinstance(value, np.ndarray) or " " in names else (len(value),)
            except ValueError:
                raise ValueError(f"{name} must have rows of equal length.") from None
            known = " ".join(names.split()[: len(shape)]) if 0 in shape else names
            kind_of_shape: Any = Shaped[np.ndarray, known]
            if not isinstance(np.broadcast_to(0, shape), kind_of_shape):
                raise ValueError(f"{name} must have the size [{names}] of the other fields, got {list(shape)}.")
    made = kind(**values)
    made.verify()
    return made


def _dims_of(hint: Any) -> str:
    """The dimensions of a field, from its array type or metadata; empty if it has none."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return next(filter(None, map(_dims_of, inner)), "")
    if origin is Annotated:
        return next((each.names for each in inner[1:] if isinstance(each, Dims)), _dims_of(inner[0]))
    return hint.dim_str if _is_array(hint) else ""


def _is_array(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def _strict(hint: Any) -> Any:
    """The annotation as pydantic reads it: true is not a number, "3" is not one, and arrays are nested lists."""
    origin, inner = get_origin(hint), get_args(hint)
    if _is_array(hint):
        return _array(hint)
    if origin is Annotated:
        kind, *about = inner
        if _is_array(kind):
            return _array(kind, *about)
        return hint if kind in _STRICT else Annotated[(_strict(kind), *about)]  # type: ignore[valid-type]
    if not inner or origin is Literal:
        return _STRICT.get(hint, hint)
    if origin in (Union, types.UnionType):
        return Union[tuple(_strict(each) for each in inner)]  # noqa: UP007
    return origin[tuple(each if each is ... else _strict(each) for each in inner)]


def _array(kind: Any, *about: Any) -> Any:
    """Arrays as lists nested as deep as the dimensions, or deeper for variadic dimensions."""
    element = next((each for each in (bool, int) if any(each.__name__ in str(name) for name in kind.dtypes)), float)
    item = next((each.kind for each in about if isinstance(each, Each)), _STRICT[element])
    item = item | None if element is float else item
    dims = kind.dim_str.split()
    if not any(dim.startswith("*") for dim in dims):
        return Annotated[(_nested(item, len(dims)), *about, AfterValidator(partial(_to_array, element)))]  # type: ignore[valid-type]

    def read(content: Any) -> np.ndarray:
        return _to_array(element, adapter(_nested(item, _depth(content))).validate_python(content))

    return Annotated[Any, PlainValidator(read)]


def _to_array(element: type, rows: Any) -> np.ndarray:
    try:
        return np.array(rows, dtype=element)
    except ValueError:
        raise ValueError("must have rows of equal length.") from None


def _depth(content: Any) -> int:
    return 1 + _depth(content[0]) if isinstance(content, list) and content else int(isinstance(content, list))


def _nested(item: Any, depth: int) -> Any:
    return _nested(list[item], depth - 1) if depth else item
