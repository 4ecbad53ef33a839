"""Errors that a user can fix: one sentence each, with the exit code of the command line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError


class ToeplensError(Exception):
    """Base class of errors that a user can fix; the message is one sentence."""

    exit_code = 2

    @property
    def name(self) -> str:
        """The argument, option or field that the message names first; empty if none."""
        found = _NAMED.match(str(self))
        return found[0] if found else ""


class InputError(ToeplensError, ValueError):
    """A field has an invalid value; the message names the field, the value, and what is allowed."""


class EnvironmentFailure(ToeplensError):
    """The machine, not the input, is at fault: a full disk, missing permissions, a missing package."""

    exit_code = 3


_SHOWN = 80  # characters
_OFFERED = 20  # names
_NOTHING = object()
_NAMED = re.compile(r"[\w.]+((, | and | or )[\w.]+)*(?=:| must )")
_NEEDED = {  # pydantic's types of errors, where its words are not ours
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must have named fields",
    "model_type": "must have named fields",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must not be empty",
}
_RANGES = {"greater than or equal to": "at least", "less than or equal to": "at most", "greater than": "over"}
Name = TypeVar("Name", bound=str)


def invalid(name: str, must: str, value: object = _NOTHING, *, got: str = "") -> InputError:
    """The error ``NAME must ..., got VALUE.``; ``got`` is text that stands for the value."""
    got = got or ("" if value is _NOTHING else shown(value))
    return InputError(f"{name} must {must}{got and f', got {got}'}.")


def choose(field: str, name: str, allowed: Iterable[Name]) -> Name:
    """Return ``name`` if it is allowed, else raise an `InputError` that lists the allowed and the nearest names."""
    allowed = list(allowed)
    for known in allowed:
        if known == name:
            return known
    of = "one of " if len(allowed) > 1 else ""
    raise InputError(f"{field} must be {of}{_listed([*allowed])}, got {shown(name)}{_nearest(name, allowed)}")


def _listed(names: list[str]) -> str:
    more = f", ... ({len(names)} names)" if len(names) > _OFFERED else ""
    return ", ".join(sorted(names)[:_OFFERED]) + more


def _nearest(name: Any, allowed: Iterable[str]) -> str:
    """The end of a sentence: the names nearest to ``name``, if any."""
    near = difflib.get_close_matches(str(name), sorted(allowed), n=3, cutoff=0.4)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else "."


def shown(value: Any) -> str:
    """``value`` as a message shows it: its representation, cut if long; a tensor by its type and shape."""
    module, shape = type(value).__module__.partition(".")[0], getattr(value, "shape", None)
    if module == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    if module in ("torch", "numpy") and shape:
        return f"{str(value.dtype).removeprefix('torch.')} of shape {list(shape)}"
    if module in ("torch", "numpy") and shape is not None:
        value = value.item()
    try:
        text = repr(str(value) if isinstance(value, PurePath) else value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; lists in lists in lists
        return f"a value of type {type(value).__name__} that is too large to show"
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 4]} ..."


def first_line(error: BaseException, silent: str | None = None) -> str:
    """The first line of another library's error message, without its full stop.

    ``silent`` replaces an empty message (default: the error's type).
    """
    lines = str(error).strip().splitlines()
    return (lines[0].rstrip(". ") if lines else "") or silent or type(error).__name__


def sentence(error: ValidationError, of: type[BaseModel] | None = None) -> str:
    """The first problem of a pydantic `ValidationError` as one sentence that names the field.

    ``of`` is the model; with it, the message for an unknown field lists the available ones.
    """
    first = error.errors(include_url=False)[0]
    place, kind, message = first["loc"], first["type"], first["msg"]
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
    elif kind == "missing":
        message = "is missing."
    elif kind == "extra_forbidden":
        there = None if of is None else _fields(of, place[:-1])
        message = "is not a field" + (
            "." if there is None else f"{_nearest(place[-1], there)} Fields: {_listed(there)}."
        )
    elif kind in _NEEDED or message.startswith("Input should "):
        for theirs, ours in _RANGES.items():
            message = message.replace(theirs, ours)
        must = _NEEDED.get(kind, "must " + re.split(", (?:unable|got)", message.removeprefix("Input should "))[0])
        message = f"{must.format(**first.get('ctx', {}))}, got {shown(first['input'])}."
    else:
        message = f"{message[:1].lower()}{message[1:]}."
    return located(place, message)


def located(place: Iterable[int | str], message: str) -> str:
    """``message`` with the name of its place, once."""
    *outer, last = map(str, place) if place else ("",)
    where = ".".join((*outer, last))
    if message.startswith(("must ", "is ")):
        return f"{where or 'it'} {message}"
    if not where or re.match(rf"{re.escape(where)}[.: ]", message):
        return message
    if re.match(rf"{re.escape(last)}[.: ]", message):  # its own name, or a place within it
        return ".".join((*outer, message))
    return f"{where}.{message}" if re.match(r"\w+(:| must) ", message) else f"{where}: {message}"


def _fields(kind: type[BaseModel], place: Iterable[int | str]) -> list[str] | None:
    """The fields at this location; None if it has no fixed fields."""
    for part in place:
        if part in kind.model_fields:  # otherwise a key or index in a collection
            inner = _models(kind.model_fields[str(part)].annotation)
            if len(inner) != 1:
                return None
            (kind,) = inner
    return list(kind.model_fields)


def _models(hint: Any) -> set[type[BaseModel]]:
    if isinstance(hint, type) and not get_args(hint):
        return {hint} if issubclass(hint, BaseModel) else set()
    return {model for each in get_args(hint) for model in _models(each)}
