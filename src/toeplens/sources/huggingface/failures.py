"""What other libraries raise over a model, as a few words of a sentence."""

from __future__ import annotations

import re
import traceback
from typing import Any

from toeplens.ground import InputError
from toeplens.ground.machine import out_of_memory

_LONGEST = 200  # characters that are told
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CHECKED = re.compile(
    r"^(class )?validation error for .*?: (\w+Error: )?", re.IGNORECASE
)  # of a configuration's fields
_LIBRARIES = {"torch", "transformers", "safetensors", "tokenizers", "toeplens"}
_PLAIN = (OSError, ValueError, RuntimeError, ImportError)  # whose words say enough without their name


def words(error: BaseException) -> str:
    """The first line of what went wrong (of a heading the next one too), without an end of sentence."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    count = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    text, checked = _CHECKED.subn("", " ".join(" ".join(lines[:count]).split()))
    if len(text) > _LONGEST:
        text = text.partition(". ")[0]
    text = text.rstrip(".: ") if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    if isinstance(error, EOFError) or not text:
        return "a file ends too early" if isinstance(error, EOFError) else type(error).__name__
    if isinstance(error, KeyError):
        return f"there is no {text}"
    return text if checked or isinstance(error, _PLAIN) else f"{type(error).__name__}: {text}"


def token_ids(tokenizer: Any, text: str, **options: Any) -> list[Any]:
    """The token ids that a tokenizer makes of a text, or lists of these where the options ask for several.

    Raises `InputError` where the tokenizer fails.
    """
    try:
        return list(tokenizer(text, **options)["input_ids"])
    except Exception as error:  # whatever its files make of a text
        if out_of_memory(error) or not of_libraries(error):
            raise
        raise InputError(f"model: its tokenizer fails on a text ({words(error)}).") from None


def of_libraries(error: BaseException) -> bool:
    """Whether it was raised in a library of models or in this one, and not by what a caller handed in."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and str(frames[-1][0].f_globals.get("__name__", "")).split(".")[0] in _LIBRARIES
