"""Utilities used throughout the package: errors, atomic files, records, number formatting.

Nothing here is specific to attention.
"""

from toeplens.ground.errors import EnvironmentFailure, InputError, ToeplensError, choose, invalid, sentence, shown
from toeplens.ground.files import (
    checked,
    parse_json,
    plain,
    read_json,
    read_rows,
    rounded,
    write_bytes,
    write_json,
    write_text,
)

__all__ = [
    "EnvironmentFailure",
    "InputError",
    "ToeplensError",
    "checked",
    "choose",
    "invalid",
    "parse_json",
    "plain",
    "read_json",
    "read_rows",
    "rounded",
    "sentence",
    "shown",
    "write_bytes",
    "write_json",
    "write_text",
]
