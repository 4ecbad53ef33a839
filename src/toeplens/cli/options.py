"""The options that commands share, and how their values are read."""

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


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def url_or_path(text: str) -> Any:
    """A URL as it was typed, but for that of a file of this machine; anything else is a `path`."""
    if text.lower().startswith("file://"):
        return path(text[len("file://") :])
    return text if _URL.match(text) else path(text)


def path(text: str) -> Path:
    """A path as it was typed; the name is the one that ``--help`` shows."""
    if not text:
        raise typer.BadParameter("The path is empty. Use '.' for the current directory.")
    if _URL.match(text):
        raise typer.BadParameter(f"{text} is a URL. Give a local path.")
    length = len(os.fsencode(text))
    if length > _LONGEST_PATH or any(len(os.fsencode(part)) > _LONGEST_NAME for part in Path(text).parts):
        raise typer.BadParameter(f"The path of {length} bytes, or a name in it, is longer than the system allows.")
    return Path(text)


RunDirectory = Annotated[Path, typer.Argument(help="A finished run's directory.", parser=path)]
StudyDirectory = Annotated[Path, typer.Argument(help="A study's directory.", parser=path)]
Recorded = Annotated[Path, typer.Argument(help="The directory of a study, an audit or a probe.", parser=path)]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON on standard output.")]
Full = Annotated[bool, typer.Option("--full", help="All that is known of each, instead of a line.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
ModelDtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")]
ModelDevice = Annotated[str, typer.Option(help="auto (spread over GPUs, if there are some), cpu, cuda or cuda:N.")]
Pickled = Annotated[
    bool, typer.Option("--pickled", help="Read weights that are no safetensors; they can run what they hold.")
]
Compile = Annotated[str, typer.Option(help="torch.compile: auto (where it pays), on or off.")]
StudyOut = Annotated[
    Path, typer.Option(help="Output directory. An interrupted study found here is resumed.", parser=path)
]
StudyPlace = Annotated[
    Path,
    typer.Option(
        help="Output directory, or a URL such as s3://bucket/study. An interrupted study found here is resumed.",
        parser=url_or_path,
        metavar="PATH|URL",
    ),
]
Workers = Annotated[int | None, typer.Option(help="Processes; one a core unless given.")]
Follow = Annotated[
    list[str] | None,
    typer.Option(
        help="Log each run's evaluations to tensorboard, wandb or mlflow, too; may be repeated. See docs/how-to/tracking.md."
    ),
]
Budget = Annotated[str | None, typer.Option(help="Stop within this time, e.g. 90s, 9m, 2h; the same command goes on.")]


def seconds(text: str | None) -> float | None:
    """``90s``, ``9m``, ``2h`` or plain seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise invalid("time_budget", "be a positive time such as 90s, 9m or 2h", text)
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def changed(content: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    """A spec with ``path=value`` changes; a model's protocol switches follow if its encoding or protocol changes."""
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
    """JSON as it stands, anything else as a word."""

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
