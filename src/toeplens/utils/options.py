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

from toeplens.utils.errors import choose, invalid

MEASURE, TRAINING, MACHINE = "What to measure", "Training", "Machine"  # panels of --help
CLUSTER = "Cluster (with --engine ray)"


def option(default: Any, help: str, metavar: str | None = "N", panel: str = MEASURE, **about: Any) -> Any:
    """A field of a dataclass that is also an option of a command (`toeplens.cli.options.with_options`).

    ``about`` may have the option's ``flag`` and type, ``typed``, on the command line (default: the field's).
    """
    return field(default=default, metadata={"help": help, "metavar": metavar, "panel": panel, **about})


def check_fields(options: Any) -> None:
    """Raise an `InputError` for a field of a dataclass outside its `Range` or choices."""
    for name, hint in _hints(type(options)).items():
        if any(get_origin(member) in (Annotated, Literal) for member in _union_members(hint)):
            check_value(name, getattr(options, name), hint)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@dataclass(frozen=True)
class Range:
    """The range of a finite number, as in ``Annotated[float, Range(above=0)]``."""

    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf

    def check(self, field: str, value: float) -> None:
        """Raise an `InputError` that states the range, unless the value is in it."""
        if -math.inf < value < math.inf and value > self.above and self.at_least <= value <= self.at_most:
            return
        low, high, over = (f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in vars(self).values())
        limits = {f"at least {low}": self.at_least, f"over {over}": self.above, f"at most {high}": self.at_most}
        requirement = " and ".join(text for text, limit in limits.items() if math.isfinite(limit))
        if math.isfinite(self.at_least) and math.isfinite(self.at_most):
            requirement = f"from {low} to {high}"
        elif math.isinf(self.at_most) and not (isinstance(value, Integral) and requirement):
            requirement = f"finite{requirement and ' and '}{requirement}"
        raise invalid(field, f"be {requirement}", value)


def check_range(field: str, values: float | Sequence[float], low: float, high: float) -> None:
    """Raise an `InputError` unless each number is from ``low`` to ``high``."""
    for value in values if isinstance(values, Sequence) else (values,):
        Range(low, high).check(field, value)


FiniteFloat = Annotated[float, Range()]
Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
AtLeast2 = Annotated[int, Range(2)]


_TYPE_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", str: "a string", type(None): "None"}
_LISTS = (Sequence, list)
_PLURALS: dict[Any, str] = {int: "whole numbers", float: "numbers", str: "strings", bool: "true and false"}


@cache
def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """A function's parameters with evaluated annotations, or as strings if they cannot be evaluated."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except Exception:  # unresolvable names can raise anything
        return inspect.signature(function).parameters


def check_arguments(signature: Mapping[str, inspect.Parameter], values: Mapping[str, Any]) -> None:
    """Raise an `InputError` for a given value that does not match its parameter's annotation (see `check_value`)."""
    for option in filter(signature.__contains__, values):
        check_value(option, values[option], signature[option].annotation)


def check_keywords(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which first checks its keyword arguments against their annotations."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_arguments(parameters(function), kwargs)
        return function(*args, **kwargs)

    return call


def check_value(field: str, value: Any, annotation: Any) -> None:
    """Raise an `InputError` unless ``value`` matches the annotation: its type, its `Range`, or one of its choices.

    Annotations other than numbers, strings, booleans, None, and lists of these allow anything.
    """
    if not _matches(value, annotation):
        *others, last = _type_names(annotation)
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise invalid(field, f"be {allowed}", value)
    members = [member for member in _union_members(annotation) if _matches(value, member)]
    if all(get_origin(member) is Literal for member in members):
        choose(field, value, [choice for member in members for choice in get_args(member)])
    for member in members:
        if get_origin(member) is Annotated:
            get_args(member)[1].check(field, value)


def _union_members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _matches(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_matches(value, item) for item in inner)
    if origin is Annotated:
        return _matches(value, inner[0])
    if origin is Literal:
        return any(isinstance(value, type(item)) for item in inner)
    if origin in _LISTS:
        if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
            return False
        return not isinstance(value, Sequence) or all(_matches(item, inner[0]) for item in value)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return hint not in (bool, str, type(None)) or isinstance(value, hint)


def _type_names(hint: Any) -> list[str]:
    """The allowed types, as a list of descriptions."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return [word for member in inner for word in _type_names(member)]
    if origin is Annotated:
        return _type_names(inner[0])
    if origin is Literal:
        return [repr(member) for member in inner]
    if hint is bool:
        return ["true", "false"]
    return [f"a list of {_plural(inner[0])}" if origin in _LISTS else _TYPE_NAMES[hint]]


def _plural(hint: Any) -> str:
    return f"lists of {_plural(get_args(hint)[0])}" if get_origin(hint) in _LISTS else _PLURALS.get(hint, "values")
