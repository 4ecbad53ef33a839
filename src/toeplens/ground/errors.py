"""Errors that a user can fix: one sentence each, with the exit code of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError


class ToeplensError(Exception):
    """Base class of errors that a user can fix; the message is one sentence."""

    exit_code = 2


class InputError(ToeplensError, ValueError):
    """A field has an invalid value; the message names the field, the value, and what is allowed."""


class EnvironmentFailure(ToeplensError):
    """The machine, not the input, is at fault: a full disk, missing permissions, a missing package."""

    exit_code = 3


_SHOWN = 80  # characters
_NEEDED = {  # pydantic's messages that name Python types
    "tuple_type": "it must be a list",
    "list_type": "it must be a list",
    "dict_type": "it must have names and values",
    "too_short": "it must have {min_length} or more",
    "too_long": "it must have {max_length} at most",
    "string_too_short": "it must not be empty",
}
Name = TypeVar("Name", bound=str)


def choose(field: str, name: str, allowed: Iterable[Name]) -> Name:
    """Return ``name`` if it is allowed, else raise an `InputError` that lists the nearest names first."""
    allowed = list(allowed)
    for known in allowed:
        if known == name:
            return known
    raise InputError(f"{field}: there is no {shown(name)}; {_offered(name, allowed)}.")


def _offered(name: Any, allowed: Iterable[str]) -> str:
    """The available names, the most similar first."""
    allowed = sorted(allowed)
    near = difflib.get_close_matches(str(name), allowed, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}? Known" if near else "known"
    return f"{hint}: {', '.join(allowed)}"


def shown(value: Any) -> str:
    """``repr(value)``, shortened for messages."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; deeply nested lists
        return f"one of the type {type(value).__name__} that is too large to show"
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
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        there = None if of is None else _fields(of, first["loc"][:-1])
        message = "no such field" if there is None else f"no such field; {_offered(first['loc'][-1], there)}"
    elif first["type"] == "missing":
        message = "it is missing"
    elif first["type"] == "model_type":
        message = f"it must have named fields (given: {shown(first['input'])})"
    elif first["type"] != "value_error":
        about = _NEEDED.get(first["type"], f"{message[:1].lower()}{message[1:]}").format(**first.get("ctx", {}))
        message = f"{about} (given: {shown(first['input'])})"
    elif not field or message.startswith(field):
        return message
    elif message.startswith((f"{first['loc'][-1]}.", f"{first['loc'][-1]}:")):  # it names the field
        return ".".join((*map(str, first["loc"][:-1]), message))
    return f"{field}: {message}" if field else message


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
