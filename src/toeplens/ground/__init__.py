"""What every floor stands on: errors that are one sentence, and files that are never half-written."""

from toeplens.ground.errors import EnvironmentFailure, InputError, ToeplensError, choose, sentence
from toeplens.ground.files import plain, read_json, rounded, write_bytes, write_json, write_text

__all__ = [
    "EnvironmentFailure",
    "InputError",
    "ToeplensError",
    "choose",
    "plain",
    "read_json",
    "rounded",
    "sentence",
    "write_bytes",
    "write_json",
    "write_text",
]
