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
        match = _NAME_PATTERN.match(str(self))
        return match[0] if match else ""


class InputError(ToeplensError, ValueError):
    """A field has an invalid value; the message names the field, the value, and what is allowed."""


class EnvironmentFailure(ToeplensError):
    """The machine, not the input, is at fault: a full disk, missing permissions, a missing package."""

    exit_code = 3


_MAX_REPR = 80  # characters
_MAX_NAMES = 20  # names
_NO_VALUE = object()
_NAME_PATTERN = re.compile(r"[\w.]+((, | and | or )[\w.]+)*(?=:| must )")
_RULES = {  # pydantic's types of errors, where its words are not ours
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must have named fields",
    "model_type": "must have named fields",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must not be empty",
}
_BOUNDS = {"greater than or equal to": "at least", "less than or equal to": "at most", "greater than": "over"}
Name = TypeVar("Name", bound=str)


def invalid(name: str, must: str, value: object = _NO_VALUE, *, got: str = "") -> InputError:
    """The error ``NAME must ..., got VALUE.``; ``got`` is text that stands for the value."""
    got = got or ("" if value is _NO_VALUE else repr_of(value))
    return InputError(f"{name} must {must}{got and f', got {got}'}.")


def choose(field: str, name: str, allowed: Iterable[Name]) -> Name:
    """Return ``name`` if it is allowed, else raise an `InputError` that lists the allowed and the nearest names."""
    allowed = list(allowed)
    for candidate in allowed:
        if candidate == name:
            return candidate
    if not allowed:
        raise InputError(f"{field} must not be set: there are none to choose from, got {repr_of(name)}.")
    intro = "one of " if len(allowed) > 1 else ""
    raise InputError(f"{field} must be {intro}{_listing([*allowed])}, got {repr_of(name)}{_hint(name, allowed)}")


def _listing(names: list[str]) -> str:
    more = f", ... ({len(names)} names)" if len(names) > _MAX_NAMES else ""
    return ", ".join(sorted(names)[:_MAX_NAMES]) + more


def _hint(name: Any, allowed: Iterable[str]) -> str:
    """The end of a sentence: the names nearest to ``name``, if any."""
    matches = difflib.get_close_matches(str(name), sorted(allowed), n=3, cutoff=0.4)
    return f"; did you mean {' or '.join(map(repr, matches))}?" if matches else "."


def repr_of(value: Any) -> str:
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
    return text if len(text) <= _MAX_REPR else f"{text[: _MAX_REPR - 4]} ..."


def first_line(error: BaseException, default: str | None = None) -> str:
    """The first line of another library's error message, without its full stop.

    ``default`` replaces an empty message (default: the error's type).
    """
    lines = str(error).strip().splitlines()
    return (lines[0].rstrip(". ") if lines else "") or default or type(error).__name__


def validation_message(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """The first problem of a pydantic `ValidationError` as one sentence that names the field.

    With ``model``, the message for an unknown field lists the available ones.
    """
    first = error.errors(include_url=False)[0]
    path, kind, message = first["loc"], first["type"], first["msg"]
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
    elif kind == "missing":
        message = "is missing."
    elif kind == "extra_forbidden":
        fields = None if model is None else _field_names(model, path[:-1])
        hint = "." if fields is None else f"{_hint(path[-1], fields)} Fields: {_listing(fields)}."
        message = f"is not a field{hint}"
    elif kind in _RULES or message.startswith("Input should "):
        for pydantic_text, our_text in _BOUNDS.items():
            message = message.replace(pydantic_text, our_text)
        rule = _RULES.get(kind, "must " + re.split(", (?:unable|got)", message.removeprefix("Input should "))[0])
        message = f"{rule.format(**first.get('ctx', {}))}, got {repr_of(first['input'])}."
    else:
        message = f"{message[:1].lower()}{message[1:]}."
    return with_location(path, message)


def with_location(path: Iterable[int | str], message: str) -> str:
    """``message`` with the name of its place, once."""
    *outer, last = map(str, path) if path else ("",)
    where = ".".join((*outer, last))
    if message.startswith(("must ", "is ")):
        return f"{where or 'it'} {message}"
    if not where or re.match(rf"{re.escape(where)}[.: ]", message):
        return message
    if re.match(rf"{re.escape(last)}[.: ]", message):  # its own name, or a place within it
        return ".".join((*outer, message))
    return f"{where}.{message}" if re.match(r"\w+(:| must) ", message) else f"{where}: {message}"


def _field_names(kind: type[BaseModel], path: Iterable[int | str]) -> list[str] | None:
    """The fields at this location; None if it has no fixed fields."""
    for part in path:
        if part in kind.model_fields:  # otherwise a key or index in a collection
            inner = _models_in(kind.model_fields[str(part)].annotation)
            if len(inner) != 1:
                return None
            (kind,) = inner
    return list(kind.model_fields)


def _models_in(hint: Any) -> set[type[BaseModel]]:
    if isinstance(hint, type) and not get_args(hint):
        return {hint} if issubclass(hint, BaseModel) else set()
    return {model for inner in get_args(hint) for model in _models_in(inner)}
