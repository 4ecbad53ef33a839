"""Options that commands share, and how their values are parsed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from toeplens.ground import InputError, invalid

_DIGITS = 300  # of an integer that a spec's file can be read back with
_LONGEST_PATH, _LONGEST_NAME = 4095, 255  # bytes, as Linux has them


MEASURE, TRAINING, MACHINE, CLUSTER = "What to measure", "Training", "Machine", "Cluster (with --engine ray)"  # panels
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
    length = len(os.fsencode(text))
    if length > _LONGEST_PATH or any(len(os.fsencode(part)) > _LONGEST_NAME for part in Path(text).parts):
        raise typer.BadParameter(f"The path of {length} bytes, or a name in it, is longer than the system allows.")
    return Path(text)


def option(help: str, *names: str, panel: str | None = None, metavar: str | None = None, parser: Any = None) -> Any:
    """A command's option; ``help`` gives its default as ``(default: 16)``."""
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar, parser=parser, show_default=False)


RunDirectory = Annotated[Path, typer.Argument(help="Directory of a finished run.", parser=path)]
StudyDirectory = Annotated[Path, typer.Argument(help="Directory of a study.", parser=path)]
Recorded = Annotated[Path, typer.Argument(help="Directory of a study, an audit or a probe.", parser=path)]
Json = Annotated[bool, option("Print JSON to standard output.", "--json")]
Full = Annotated[bool, option("Show all details of each entry.", "--full")]
Device = Annotated[str, option("auto, cpu, cuda or cuda:N (default: auto).", panel=MACHINE, metavar="NAME")]
ModelDtype = Annotated[
    str,
    option("auto, float32, bfloat16, float16 or float64 (default: auto).", panel=MACHINE, metavar="NAME"),
]
ModelDevice = Annotated[
    str,
    option("auto, cpu, cuda or cuda:N (default: auto).", panel=MACHINE, metavar="NAME"),
]
Pickled = Annotated[
    bool,
    option("Allow pickle checkpoints. Unsafe: they can execute code.", "--pickled", panel=MACHINE),
]
Compile = Annotated[str, option("torch.compile: auto, on or off (default: auto).", panel=TRAINING, metavar="WHEN")]
StudyOut = Annotated[
    Path,
    option("Output directory. An interrupted study found here is resumed.", metavar="PATH", parser=path),
]
StudyPlace = Annotated[
    Path,
    option(
        "Output directory or URL. An interrupted study found here is resumed.",
        parser=url_or_path,
        metavar="PATH|URL",
    ),
]
Workers = Annotated[int | None, option("Number of processes (default: one per core).", panel=MACHINE, metavar="N")]
Follow = Annotated[
    list[str] | None,
    option("Log to tensorboard, wandb or mlflow; repeatable.", panel=TRAINING, metavar="NAME"),
]
Budget = Annotated[
    str | None,
    option("Stop after e.g. 90s, 9m or 2h; resumable.", panel=MACHINE, metavar="TIME"),
]


def seconds(text: str | None) -> float | None:
    """``90s``, ``9m``, ``2h`` or plain seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise invalid("time_budget", "be a positive time such as 90s, 9m or 2h", text)
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def changed(content: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    """A spec with ``path=value`` changes. A new encoding or protocol also changes the switches that depend on it."""
    content = json.loads(json.dumps(content))
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals or not path:
            raise invalid("set", "be of the form field=value", change)
        place = content
        *parents, last = path.split(".")
        for name in parents:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise InputError(f"set: {name} has no fields, so {path} cannot be set.")
        place[last] = _value(path, text)
    return content


def _value(path: str, text: str) -> Any:
    """A JSON value, or the text itself if it is not JSON."""

    def integer(digits: str) -> int:
        if len(digits) > _DIGITS:
            raise ValueError(f"an integer of {len(digits)} digits")
        return int(digits)

    try:
        value = json.loads(text, parse_int=integer)
        json.dumps(value)
    except json.JSONDecodeError:
        return text
    except (ValueError, RecursionError) as error:
        raise InputError(f"set: the value of {path} is too large ({error}).") from None
    return value
