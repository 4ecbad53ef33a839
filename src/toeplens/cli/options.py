"""Options that commands share, and how their values are parsed."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from toeplens.studies.kit.options import AuditOptions
from toeplens.utils import InputError, invalid
from toeplens.utils.execution import ExecutionOptions

_LONGEST_PATH, _LONGEST_NAME = 4095, 255  # bytes, as Linux has them


_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def url_or_path(text: str) -> Any:
    """A URL unchanged, except ``file://``; anything else as a `path`."""
    if text.lower().startswith("file://"):
        return path(text[len("file://") :])
    return text if _URL.match(text) else path(text)


def path(text: str) -> Path:
    """A path as typed; ``--help`` shows this function's name."""
    if not text:
        raise typer.BadParameter("The path is empty. Use '.' for the current directory.")
    if _URL.match(text):
        raise typer.BadParameter(f"{text} is a URL. Give a local path.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise typer.BadParameter("The path is not valid UTF-8.")
    length = len(os.fsencode(text))
    if length > _LONGEST_PATH or any(len(os.fsencode(part)) > _LONGEST_NAME for part in Path(text).parts):
        raise typer.BadParameter(f"The path of {length} bytes, or a name in it, is longer than the system allows.")
    return Path(text)


_PARSERS = {"PATH": path, "FILE": path, "PATH|URL": url_or_path}  # by metavar


def option(default: Any, help: str, metavar: str | None = None, panel: str | None = None, flag: str = "") -> Any:
    """A command's option with this default (``...``: required), which ``help`` gives as ``(default: 16)``."""
    about: Any = {"help": help, "rich_help_panel": panel, "metavar": metavar, "parser": _PARSERS.get(metavar or "")}
    return typer.Option(default, *filter(None, [flag]), **about, show_default=False)


def argument(default: Any, help: str, *, is_path: bool = False) -> Any:
    """A command's argument with this default (``...``: required)."""
    return typer.Argument(default, help=help, parser=path if is_path else None)


def option_of(kind: type[Any], name: str) -> Any:
    """The option of a field of a dataclass (`toeplens.utils.options.option`)."""
    about = next(field.metadata for field in fields(kind) if field.name == name)
    return option(..., about["help"], about["metavar"], about["panel"], about.get("flag", ""))


RunDirectory = Annotated[Path, argument(..., "Directory of a finished run.", is_path=True)]
StudyDirectory = Annotated[Path, argument(..., "Directory of a study.", is_path=True)]
RecordDirectory = Annotated[Path, argument(..., "Directory of a study, an audit or a probe.", is_path=True)]
Json = Annotated[bool, option(..., "Print JSON to standard output.", flag="--json")]
Full = Annotated[bool, option(..., "Show all details of each entry.", flag="--full")]
Device = Annotated[str, option_of(ExecutionOptions, "device")]
ModelDtype = Annotated[str, option_of(AuditOptions, "dtype")]
ModelMemory = Annotated[str | None, option_of(AuditOptions, "memory")]
AllowPickle = Annotated[bool, option_of(AuditOptions, "pickled")]
_RESUME_NOTE = "An interrupted study found here is resumed."
StudyOut = Annotated[Path, option(..., f"Output directory. {_RESUME_NOTE}", "PATH")]
OutOrUrl = Annotated[Path, option(..., f"Output directory or URL. {_RESUME_NOTE}", "PATH|URL")]


def with_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options for its parameters that are dataclasses: their fields that have a help text.

    Arguments
        names  only these fields (default: all)
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        groups: dict[str, tuple[Any, list[str]]] = {}
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            if not (isinstance(kind := parameter.annotation, type) and is_dataclass(kind)):
                parameters.append(parameter.replace(kind=_KEYWORD))
                continue
            hints = get_type_hints(kind)
            selected = [item for item in fields(kind) if "help" in item.metadata and (not names or item.name in names)]
            for item in selected:
                hint: Any = Annotated[item.metadata.get("typed", hints[item.name]), option_of(kind, item.name)]
                default = None if item.default == () else item.default
                parameters.append(inspect.Parameter(item.name, _KEYWORD, default=default, annotation=hint))
            groups[name] = kind, [item.name for item in selected]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {item.name: item.annotation for item in parameters}
        command.groups = groups  # type: ignore[attr-defined]
        return command

    return decorate


class Command(TyperCommand):
    """A command that calls its function with dataclasses of options (`with_options`).

    If ``out`` is a URL, the function works in a local copy, which is published when it ends.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.callback: Any = inspect.unwrap(kwargs["callback"])  # without Typer's, which passes each option

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        remaining = super().parse_args(ctx, args)
        if ctx.resilient_parsing:  # for completion
            return remaining
        values: dict[str, Any] = {
            name: list(x) or None if isinstance(x, tuple) else x for name, x in ctx.params.items()
        }
        for name, (kind, options) in getattr(self.callback, "groups", {}).items():
            group = {option: values.pop(option) for option in options}
            values[name] = kind(**{option: value for option, value in group.items() if value is not None})
        if isinstance(url := values.get("out"), str):
            from toeplens.engine import working_copy

            values["execution"] = replace(values["execution"], publish=url)
            values["out"] = ctx.with_resource(working_copy(url))
        ctx.params = values
        return remaining


def apply_changes(content: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    """A spec with ``path=value`` changes. A new encoding or protocol also changes the switches that depend on it."""
    content = deepcopy(content)
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals or not path:
            raise invalid("set", "be of the form field=value", change)
        target = content
        *parents, last = path.split(".")
        for name in parents:
            target = target.setdefault(name, {})
            if not isinstance(target, dict):
                raise InputError(f"set: {name} has no fields, so {path} cannot be set.")
        try:
            target[last] = json.loads(text)
        except json.JSONDecodeError:
            target[last] = text
        except (ValueError, RecursionError) as error:
            raise InputError(f"set: the value of {path} is too large ({error}).") from None
    return content
