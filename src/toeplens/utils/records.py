"""Records: dataclasses that are stored as JSON and validated field by field when read.

A record's annotations define its fields: numbers and strings (strict: true is not a number, nor are "3" and 1e999),
arrays with dimensions (jaxtyping's; a letter is one size throughout a record), other records, and lists and
dictionaries of these. NaN is stored as None. Unknown fields, from later versions, are ignored. Fields that are missing
in earlier versions are listed in `Record.ADDED_LATER` and have defaults.
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

from toeplens.utils.errors import InputError
from toeplens.utils.files import read_json, type_adapter, validate_as
from toeplens.utils.renamed import rename_keys

FiniteFloat = Annotated[float, Field(strict=True, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
Share = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
StrictStr = Annotated[str, Field(strict=True)]
StrictBool = Annotated[bool, Field(strict=True)]
_StrictInt = Annotated[int, Field(strict=True)]
PositiveInt = Annotated[int, Field(strict=True, ge=1)]
FloatOrNaN = Annotated[float, Field(strict=True), BeforeValidator(lambda value: math.nan if value is None else value)]
ApproxShare = Annotated[float, Field(strict=True, ge=-0.01, le=1.01)]  # with a tolerance for rounding
_STRICT_TYPES: dict[Any, Any] = {bool: StrictBool, int: _StrictInt, float: FiniteFloat, str: StrictStr}


class Dims:
    """The dimensions of a field that is not an array, as in ``L`` or ``M 2``."""

    def __init__(self, names: str) -> None:
        self.names = names


class ItemType:
    """The type of an array's items, besides None for NaN, such as `Share`."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


def keep_raw(hint: Any) -> BeforeValidator:
    """Metadata of a field: validate plain content by this annotation but keep it unchanged."""

    def check(content: Any) -> Any:
        type_adapter(hint).validate_python(content)
        return content

    return BeforeValidator(check)


class Record:
    """Base class of records."""

    LABEL: ClassVar[str] = ""  # name in messages about records that do not come from a file
    ADDED_LATER: ClassVar[tuple[str, ...]] = ()  # fields with defaults that records of earlier versions lack

    def verify(self) -> None:
        """Raise `ValueError`, naming the field, for constraints between fields."""

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON; None for NaN."""
        return {field.name: json_value(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, content: Any, where: Path | str | None = None) -> Self:
        """The inverse of `to_dict`; raises `InputError` naming ``where`` and the field if the content is invalid."""
        return validate_as(cls, content, cls._location(where))

    @classmethod
    def from_directory(cls, directory: Path | str, file: str) -> Self:
        """The record in a directory's file. Raises `InputError` if there is none or if it is damaged."""
        path = Path(directory) / file
        if not path.is_file():
            raise InputError(f"{cls.LABEL} must be a directory that holds one, but {directory} contains no {file}.")
        return cls.from_dict(read_json(path), path)

    @classmethod
    def from_list(cls, content: Any, where: Path | str | None = None) -> list[Self]:
        """Records from a list; messages also give the index."""
        return validate_as(list[cls], content, cls._location(where))

    @classmethod
    def _location(cls, where: Path | str | None) -> Path | str:
        return f"{cls.LABEL or cls.__name__}: the record" if where is None else where

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        hints = get_type_hints(cls, include_extras=True)
        hint_of = {field.name: hints[field.name] for field in fields(cls)}  # type: ignore[arg-type]
        strict = {name: _strict_type(hint) for name, hint in hint_of.items()}
        strict |= {name: NotRequired[strict[name]] for name in cls.ADDED_LATER if name in strict}
        dims = {name: field_dims for name, hint in hint_of.items() if (field_dims := _dims_of(hint))}
        content: Any = TypedDict(cls.__name__, strict)  # type: ignore[operator]
        rename = BeforeValidator(partial(rename_keys, fields=hint_of))
        return handler.generate_schema(Annotated[content, rename, AfterValidator(partial(_make_record, cls, dims))])


def json_value(value: Any) -> Any:
    """``value`` as JSON types: arrays and tuples as lists, records as objects, None for NaN."""
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: json_value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    if isinstance(value, np.ndarray):
        numbers = value.astype(object)
        numbers[numbers != numbers] = None
        return numbers.tolist()
    return value


def _make_record(kind: Any, dims: dict[str, str], values: dict[str, Any]) -> Any:
    """The record of these fields; their sizes must agree."""
    with jaxtyped("context"):  # remembers the sizes
        for name, names in sorted(dims.items(), key=lambda item: "+" in item[1]):
            if (value := values.get(name)) is None:
                continue
            try:
                shape = np.shape(value) if isinstance(value, np.ndarray) or " " in names else (len(value),)
            except ValueError:
                raise ValueError(f"{name} must have rows of equal length.") from None
            required = " ".join(names.split()[: len(shape)]) if 0 in shape else names
            kind_of_shape: Any = Shaped[np.ndarray, required]
            if not isinstance(np.broadcast_to(0, shape), kind_of_shape):
                raise ValueError(f"{name} must have the size [{names}] of the other fields, got {list(shape)}.")
    record = kind(**values)
    record.verify()
    return record


def _dims_of(hint: Any) -> str:
    """The dimensions of a field, from its array type or metadata; empty if it has none."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return next(filter(None, map(_dims_of, inner)), "")
    if origin is Annotated:
        return next((extra.names for extra in inner[1:] if isinstance(extra, Dims)), _dims_of(inner[0]))
    return hint.dim_str if _is_array(hint) else ""


def _is_array(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def _strict_type(hint: Any) -> Any:
    """The annotation as pydantic reads it: true is not a number, "3" is not one, and arrays are nested lists."""
    origin, inner = get_origin(hint), get_args(hint)
    if _is_array(hint):
        return _array_type(hint)
    if origin is Annotated:
        kind, *extras = inner
        if _is_array(kind):
            return _array_type(kind, *extras)
        return hint if kind in _STRICT_TYPES else Annotated[(_strict_type(kind), *extras)]  # type: ignore[valid-type]
    if not inner or origin is Literal:
        return _STRICT_TYPES.get(hint, hint)
    if origin in (Union, types.UnionType):
        return Union[tuple(_strict_type(member) for member in inner)]  # noqa: UP007
    return origin[tuple(member if member is ... else _strict_type(member) for member in inner)]


def _array_type(kind: Any, *extras: Any) -> Any:
    """Arrays as lists nested as deep as the dimensions, or deeper for variadic dimensions."""
    element = next((t for t in (bool, int) if any(t.__name__ in str(name) for name in kind.dtypes)), float)
    item = next((t.kind for t in extras if isinstance(t, ItemType)), _STRICT_TYPES[element])
    item = item | None if element is float else item
    dims = kind.dim_str.split()
    if not any(dim.startswith("*") for dim in dims):
        return Annotated[(_nested_list(item, len(dims)), *extras, AfterValidator(partial(_to_array, element)))]  # type: ignore[valid-type]

    def read(content: Any) -> np.ndarray:
        return _to_array(element, type_adapter(_nested_list(item, _depth(content))).validate_python(content))

    return Annotated[Any, PlainValidator(read)]


def _to_array(element: type, rows: Any) -> np.ndarray:
    try:
        return np.array(rows, dtype=element)
    except ValueError:
        raise ValueError("must have rows of equal length.") from None


def _depth(content: Any) -> int:
    return 1 + _depth(content[0]) if isinstance(content, list) and content else int(isinstance(content, list))


def _nested_list(item: Any, depth: int) -> Any:
    return _nested_list(list[item], depth - 1) if depth else item
