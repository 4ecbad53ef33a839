"""What every floor stands on: errors that are one sentence, files never half-written, and records read strictly."""

from toeplens.ground.errors import EnvironmentFailure, InputError, ToeplensError, choose, sentence, shown
from toeplens.ground.files import plain, rounded, write_bytes, write_json, write_text
from toeplens.ground.reading import checked, parse_json, read_json, read_record, read_rows

__all__ = [
    "EnvironmentFailure",
    "InputError",
    "ToeplensError",
    "checked",
    "choose",
    "parse_json",
    "plain",
    "read_json",
    "read_record",
    "read_rows",
    "rounded",
    "sentence",
    "shown",
    "write_bytes",
    "write_json",
    "write_text",
]
