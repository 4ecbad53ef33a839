"""Options of a constructor: what its signature says that each may be, and values that are nothing of the kind."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin

from toeplens.ground.errors import invalid

_ONE: dict[Any, str] = {int: "a whole number", float: "a number", str: "a word", type(None): "None"}
_LISTS = (Sequence, list)
_MANY: dict[Any, str] = {int: "whole numbers", float: "numbers", str: "words", bool: "true and false"}


@cache
def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """A function's parameters, with their annotations as what they mean; as text where that cannot be told here."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except Exception:  # whatever a name that is not there makes of an annotation
        return inspect.signature(function).parameters


def must_be(field: str, value: Any, annotation: Any) -> None:
    """Raise an `InputError` if ``value`` is of no kind that the annotation allows.

    Kinds are told alone: a wrong word among several, and a number out of its range, are the constructor's to refuse. An
    annotation of something else than numbers, words, true and false, None, and lists of these allows anything.
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
    """What an annotation allows, one by one."""
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
