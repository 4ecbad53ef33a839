"""Records: dataclasses that are stored as JSON and validated field by field when read.

A record's annotations define its fields: numbers and strings (the strict ones of `toeplens.ground.reading`),
arrays with dimensions (jaxtyping's; a letter is one size throughout a record), other records, and lists and
dictionaries of these. NaN is stored as None. Unknown fields, from later versions, are ignored. Fields that are missing
in earlier versions are listed in `Record.LATER` and have defaults.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

import numpy as np
from jaxtyping import AbstractArray
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from toeplens.ground.errors import InputError, located, problem, shown
from toeplens.ground.reading import Number, Text, Truth

AtLeast1 = Annotated[int, Field(strict=True, ge=1)]
_OR_NAN = BeforeValidator(lambda value: math.nan if value is None else value)
MaybeNaN = Annotated[float, Field(strict=True), _OR_NAN]
NearlyShare = Annotated[float, Field(strict=True, ge=-0.01, le=1.01)]  # with a tolerance for rounding
_STRICT: dict[Any, Any] = {int: Annotated[int, Field(strict=True)], float: Number, str: Text, bool: Truth}
_ELEMENTS: dict[str, Any] = {"bool": Truth, "int": Annotated[int, Field(strict=True)], "float": Number}


class Dims:
    """The dimensions of a field that is not an array, as in ``L`` or ``M 2``."""

    def __init__(self, names: str) -> None:
        self.names = names


class Each:
    """The type of an array's items, besides None for NaN, such as `toeplens.ground.reading.Share`."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


class Like:
    """Validate plain content by this annotation but keep it unchanged."""

    def __init__(self, hint: Any) -> None:
        self.hint = hint


class _Fault(ValueError):
    def __init__(self, message: str, *place: str | int) -> None:
        super().__init__(message)
        self.message, self.place = message, place

    def within(self, place: str | int) -> _Fault:
        return _Fault(self.message, place, *self.place)

    def __str__(self) -> str:
        return located(self.place, self.message)


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
        return cls._checked(cls, content, where)

    @classmethod
    def from_list(cls, content: Any, where: Path | str | None = None) -> list[Self]:
        """Records from a list; messages also give the index."""
        return cls._checked(list[cls], content, where)

    @classmethod
    def _checked(cls, hint: Any, content: Any, where: Path | str | None) -> Any:
        try:
            return _reader(hint)(content)
        except _Fault as fault:
            place = where if where is not None else f"{cls.WORDS or cls.__name__}: the record"
            raise InputError(f"{place} is damaged: {str(fault).rstrip('.')}.") from None


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
        return plain_numbers(value) if value.dtype.kind == "f" else value.tolist()
    return value


def plain_numbers(values: np.ndarray) -> Any:
    """Nested lists of numbers, with None for NaN."""
    numbers = values.astype(object)
    numbers[np.isnan(values)] = None
    return numbers.tolist()


Reader = Callable[[Any], Any]  # from JSON content; raises `_Fault`


@cache
def _reader(hint: Any) -> Reader:
    """The reader for an annotation; cached."""
    kind, *about = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if like := next((each.hint for each in about if isinstance(each, Like)), None):
        of, whole = _reader(like), _plain_reader(kind)
        return lambda content: whole(content if of(content) is not None else None)
    if _is_table(kind):
        return _table_reader(kind, about)
    if isinstance(kind, type) and issubclass(kind, Record):
        return _record_reader(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if not any(map(_holds_more, inner)):
        return _plain_reader(hint)
    if origin in (Union, types.UnionType):
        of = _reader(next(each for each in inner if each is not type(None)))
        return lambda content: None if content is None else of(content)
    assert origin is not None
    whole = _plain_reader(_with(dict[str, Any] if origin is dict else list[Any], about))
    of = _reader(inner[1] if origin is dict else inner[0])

    def read(content: Any) -> Any:
        rows = whole(content)
        if origin is dict:
            return {name: _at(name, of, each) for name, each in rows.items()}
        return origin(_at(index, of, each) for index, each in enumerate(rows))

    return read


def _at(place: str | int, reader: Reader, content: Any) -> Any:
    try:
        return reader(content)
    except _Fault as fault:
        raise fault.within(place) from None


def _record_reader(kind: type[Any]) -> Reader:
    hints = get_type_hints(kind, include_extras=True)
    readers = {field.name: _reader(hints[field.name]) for field in fields(kind)}
    dims = {name: found for name in readers if (found := _dims_of(hints[name]))[0]}

    def read(content: Any) -> Any:
        if not isinstance(content, dict):
            raise _Fault(f"must have named fields, got {shown(content)}.")
        missing = next((name for name in readers if name not in content and name not in kind.LATER), None)
        if missing is not None:
            raise _Fault("is missing.", missing)
        values = {name: _at(name, reader, content[name]) for name, reader in readers.items() if name in content}
        if dims:
            _sizes_agree(dims, values)
        made = kind(**values)
        try:
            made.verify()
        except ValueError as error:
            raise _Fault(str(error)) from None
        return made

    return read


def _holds_more(hint: Any) -> bool:
    """Whether the annotation contains records or arrays, which pydantic cannot read."""
    record = isinstance(hint, type) and issubclass(hint, Record)
    return record or _is_table(hint) or any(map(_holds_more, get_args(hint)))


def _is_table(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


@cache
def _plain_reader(hint: Any) -> Reader:
    """Reader for annotations that pydantic supports."""
    adapter = TypeAdapter(_strict(hint))

    def read(content: Any) -> Any:
        try:
            return adapter.validate_python(content)
        except ValidationError as error:
            place, message = problem(error)
            raise _Fault(message, *place) from None

    return read


def _strict(hint: Any) -> Any:
    """The annotation with strict numbers and strings: true is not a number, and "3" is not one."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _with(inner[0] if inner[0] in _STRICT else _strict(inner[0]), inner[1:])
    if not inner or origin is Literal:
        return _STRICT.get(hint, hint)
    if origin in (Union, types.UnionType):
        return Union[tuple(_strict(each) for each in inner)]  # noqa: UP007
    return origin[tuple(each if each is ... else _strict(each) for each in inner)]


def _with(hint: Any, about: Iterable[Any]) -> Any:
    """The annotation with pydantic's metadata, without this module's own."""
    for each in about:
        hint = hint if isinstance(each, (Each, Dims, Like)) else Annotated[hint, each]
    return hint


def _table_reader(kind: Any, about: list[Any]) -> Reader:
    """Reader for arrays: lists nested as deep as the dimensions, or deeper for variadic dimensions."""
    element = next((name for name in _ELEMENTS if any(name in str(dtype) for dtype in kind.dtypes)), "float")
    allowed = next((each.kind for each in about if isinstance(each, Each)), _ELEMENTS[element])
    allowed = allowed | None if element == "float" else allowed
    dims = kind.dim_str.split()

    def read(content: Any) -> np.ndarray:
        depth = _depth(content) if any(dim.startswith("*") for dim in dims) else len(dims)
        rows = _plain_reader(_nested(allowed, depth, tuple(about)))(content)
        try:
            return np.array(rows, dtype=element)
        except ValueError:
            raise _Fault("must have rows of equal length.") from None

    return read


def _depth(content: Any) -> int:
    return 1 + _depth(content[0]) if isinstance(content, list) and content else int(isinstance(content, list))


@cache
def _nested(element: Any, depth: int, about: tuple[Any, ...]) -> Any:
    for _ in range(depth):
        element = list[element]
    return _with(element, about)


def _dims_of(hint: Any) -> tuple[list[str], bool]:
    """The dimensions of a field, from its array type or metadata, and whether it is an array."""
    stated = ""
    while (origin := get_origin(hint)) in (Annotated, Union, types.UnionType):
        hint, *about = get_args(hint)
        stated = next((each.names for each in about if origin is Annotated and isinstance(each, Dims)), stated)
    return (hint.dim_str if _is_table(hint) else stated).split(), _is_table(hint)


def _sizes_agree(dims: dict[str, tuple[list[str], bool]], values: dict[str, Any]) -> None:
    """Check sizes: a letter is one size, ``H+1`` is one more, ``*P`` the same sizes."""
    sizes: dict[str, Any] = {}
    there = {name: value for name, value in values.items() if name in dims and value is not None}
    found = [(name, *pair) for name, value in there.items() for pair in _measured(name, *dims[name], value)]
    for name, dim, size in sorted(found, key=lambda one: "+" in one[1]):
        letter, _, more = dim.partition("+")
        least = int(letter) if letter.isdigit() else sizes.setdefault(letter, size - int(more) if more else size)
        needed = least + int(more) if more else least
        if size != needed:
            raise _Fault(f"must have size {_said(needed)} along {dim}, got {_said(size)}.", name)


def _said(size: Any) -> str:
    return str(list(size) if isinstance(size, tuple) else size)


def _measured(name: str, dims: list[str], is_table: bool, value: Any) -> Iterator[tuple[str, Any]]:
    try:
        shape = np.shape(value) if is_table or len(dims) > 1 else (len(value),)
    except ValueError:
        raise _Fault("must have rows of equal length.", name) from None
    star = next((place for place, dim in enumerate(dims) if dim.startswith("*")), None)
    if star is not None:  # the sizes not taken by the other dimensions
        end = max(star, len(shape) - len(dims) + star + 1)
        yield dims[star], tuple(shape[star:end])
        dims, shape = [*dims[:star], *dims[star + 1 :]], shape[:star] + shape[end:]
    yield from ((dim, size) for dim, size in zip(dims, shape, strict=False) if dim != "_")
