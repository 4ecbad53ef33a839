"""Utilities used throughout the package: errors, atomic files, records, number formatting.

Nothing here is specific to attention.
"""

from toeplens.utils.errors import (
    EnvironmentFailure,
    InputError,
    ToeplensError,
    choose,
    invalid,
    repr_of,
    validation_message,
)
from toeplens.utils.files import (
    parse_json,
    read_json,
    read_rows,
    round_floats,
    to_json_types,
    validate_as,
    write_bytes,
    write_json,
    write_text,
)
from toeplens.utils.renamed import renamed_getattr

__all__ = [
    "EnvironmentFailure",
    "InputError",
    "ToeplensError",
    "choose",
    "invalid",
    "parse_json",
    "read_json",
    "read_rows",
    "repr_of",
    "round_floats",
    "to_json_types",
    "validate_as",
    "validation_message",
    "write_bytes",
    "write_json",
    "write_text",
]
__getattr__ = renamed_getattr(__name__)
