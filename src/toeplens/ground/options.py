"""Options: fields of dataclasses that are also options of commands, and checks of constructors' options."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from toeplens.ground.errors import choose, invalid

MEASURE, TRAINING, MACHINE = "What to measure", "Training", "Machine"  # panels of --help
CLUSTER = "Cluster (with --engine ray)"


def option(default: Any, help: str, metavar: str | None = "N", panel: str = MEASURE, **about: Any) -> Any:
    """A field of a dataclass that is also an option of a command (`toeplens.cli.options.with_options`).

    ``about`` may have the option's ``flag`` and type, ``typed``, on the command line (default: the field's).
    """
    return field(default=default, metadata={"help": help, "metavar": metavar, "panel": panel, **about})


def check_fields(options: Any) -> None:
    """Raise an `InputError` for a field of a dataclass outside its `Limits` or choices."""
    for name, hint in _hints(type(options)).items():
        if any(get_origin(each) in (Annotated, Literal) for each in _members(hint)):
            must_be(name, getattr(options, name), hint)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@dataclass(frozen=True)
class Limits:
    """The range of a finite number, as in ``Annotated[float, Limits(over=0)]``."""

    at_least: float = -math.inf
    at_most: float = math.inf
    over: float = -math.inf

    def check(self, field: str, value: float) -> None:
        """Raise an `InputError` that states the range, unless the value is in it."""
        if -math.inf < value < math.inf and value > self.over and self.at_least <= value <= self.at_most:
            return
        low, high, over = (f"{each:g}" if isinstance(each, float) else str(each) for each in vars(self).values())
        limits = {f"at least {low}": self.at_least, f"over {over}": self.over, f"at most {high}": self.at_most}
        words = " and ".join(word for word, limit in limits.items() if math.isfinite(limit))
        if math.isfinite(self.at_least) and math.isfinite(self.at_most):
            words = f"from {low} to {high}"
        elif math.isinf(self.at_most) and not (isinstance(value, Integral) and words):
            words = f"finite{words and ' and '}{words}"
        raise invalid(field, f"be {words}", value)


def within(field: str, given: float | Sequence[float], low: float, high: float) -> None:
    """Raise an `InputError` unless each number is from ``low`` to ``high``."""
    for value in given if isinstance(given, Sequence) else (given,):
        Limits(low, high).check(field, value)


Finite = Annotated[float, Limits()]
Positive = Annotated[float, Limits(over=0)]
NotNegative = Annotated[float, Limits(0)]
Share = Annotated[float, Limits(0, 1)]
Count = Annotated[int, Limits(1)]
CountOrZero = Annotated[int, Limits(0)]
AtLeast2 = Annotated[int, Limits(2)]


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


def check(known: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> None:
    """Raise an `InputError` for a given value that does not match its parameter's annotation (see `must_be`)."""
    for option in filter(known.__contains__, given):
        must_be(option, given[option], known[option].annotation)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which first checks its keyword arguments against their annotations."""

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        check(parameters(function), given)
        return function(*args, **given)

    return call


def must_be(field: str, value: Any, annotation: Any) -> None:
    """Raise an `InputError` unless ``value`` matches the annotation: its type, its `Limits`, or one of its choices.

    Annotations other than numbers, strings, booleans, None, and lists of these allow anything.
    """
    if not _fits(value, annotation):
        *others, last = _words(annotation)
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise invalid(field, f"be {allowed}", value)
    members = [each for each in _members(annotation) if _fits(value, each)]
    if all(get_origin(each) is Literal for each in members):
        choose(field, value, [choice for each in members for choice in get_args(each)])
    for each in members:
        if get_origin(each) is Annotated:
            get_args(each)[1].check(field, value)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Annotated:
        return _fits(value, inner[0])
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
    if origin is Annotated:
        return _words(inner[0])
    if origin is Literal:
        return [repr(each) for each in inner]
    if hint is bool:
        return ["true", "false"]
    return [f"a list of {_many(inner[0])}" if origin in _LISTS else _ONE[hint]]


def _many(hint: Any) -> str:
    return f"lists of {_many(get_args(hint)[0])}" if get_origin(hint) in _LISTS else _MANY.get(hint, "values")
