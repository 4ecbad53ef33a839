"""Constructor options: check values against the annotations of a signature."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin

from toeplens.ground.errors import invalid

_ONE: dict[Any, str] = {int: "a whole number", float: "a number", str: "a string", type(None): "None"}
_LISTS = (Sequence, list)
_MANY: dict[Any, str] = {int: "whole numbers", float: "numbers", str: "strings", bool: "true and false"}


@cache
def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """A function's parameters with evaluated annotations, or as strings if they cannot be evaluated."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except Exception:  # unresolvable names can raise anything
        return inspect.signature(function).parameters


def must_be(field: str, value: Any, annotation: Any) -> None:
    """Raise an `InputError` unless the type of ``value`` matches the annotation.

    Only types are checked: unknown choices and numbers out of range are left to the constructor. Annotations other than
    numbers, strings, booleans, None, and lists of these allow anything.
    """
    if not _fits(value, annotation):
        *others, last = _words(annotation)
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise invalid(field, f"be {allowed}", value)


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return any(isinstance(value, type(each)) for each in inner)
    if origin in _LISTS:
        if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
            return False
        return not isinstance(value, Sequence) or all(_fits(each, inner[0]) for each in value)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return hint not in (bool, str, type(None)) or isinstance(value, hint)


def _words(hint: Any) -> list[str]:
    """The allowed types, as a list of descriptions."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return [word for each in inner for word in _words(each)]
    if origin is Literal:
        return [repr(each) for each in inner]
    if hint is bool:
        return ["true", "false"]
    return [f"a list of {_many(inner[0])}" if origin in _LISTS else _ONE[hint]]


def _many(hint: Any) -> str:
    return f"lists of {_many(get_args(hint)[0])}" if get_origin(hint) in _LISTS else _MANY.get(hint, "values")
