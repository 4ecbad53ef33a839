"""The names of the encodings, ours and those that other packages bring by the entry point ``toeplens.encodings``."""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from toeplens.encodings.base import PositionalEncoding
from toeplens.ground import InputError, choose, shown
from toeplens.ground.options import must_be

FAMILIES = (
    "absolute",
    "bias",
    "rotary",
    "bands",
    "rotations",
    "axial",
    "adaptive",
    "kernels",
    "contextual",
    "relative",
    "householder",
    "scoremap",
    "tree",
    "configured",
    "scaled",
    "generated",
    "learned_angles",
    "remembered",
    "remapped",
    "planes",
    "tempered",
    "breaking",
    "segments",
)  # the modules of this package, each with its ENCODINGS: name -> class


@cache
def _all() -> dict[str, type[PositionalEncoding]]:
    found: dict[str, type[PositionalEncoding]] = {}
    for family in FAMILIES:
        found.update(import_module(f"toeplens.encodings.{family}").ENCODINGS)
    for entry in entry_points(group="toeplens.encodings"):
        if entry.name not in found:
            found[entry.name] = entry.load()
    return found


def names() -> tuple[str, ...]:
    """The names of all encodings that can be built."""
    return tuple(_all())


def get(name: str) -> type[PositionalEncoding]:
    """The class behind ``name``; an unknown name raises an `InputError` that lists the nearest ones."""
    return _all()[choose("encoding", name, _all())]


def options(name: str) -> dict[str, inspect.Parameter]:
    """The options that ``build(name, ...)`` takes beside the sizes, with their defaults."""
    return get(name).options()


def build(
    name: str, *, d_model: int, num_heads: int, head_dim: int, max_len: int, **options_given: Any
) -> PositionalEncoding:
    """Build the encoding ``name``.

    Arguments
        d_model    width of the residual stream
        num_heads  heads of one attention layer
        head_dim   dimensions of one head (for ``mla``: of its content part)
        max_len    number of positions that a table must hold
        options    the encoding's own options; ``toeplens encodings`` lists them

    Raises `InputError` for an unknown name or option, or sizes that the encoding cannot take.
    """
    kind = get(name)
    known = options(name)
    for option, value in options_given.items():
        if option in known:
            must_be(option, value, known[option].annotation)
    types = options_given.get("layer_types") or ()  # each names a further option, and there may be parameters of more
    for option, value in options_given.items():
        nested = isinstance(value, dict) and "layer_types" in known
        if nested and not types:
            raise InputError(f"layer_types: none was given; parameters by layer type, as {option!r}, need it.")
        if nested:
            for inner in filter(known.__contains__, value):
                must_be(f"{option}.{inner}", value[inner], known[inner].annotation)
        if not nested and option not in types:
            choose(f"option of encoding {name!r}", option, known)
    try:
        return kind(d_model=d_model, num_heads=num_heads, head_dim=head_dim, max_len=max_len, **options_given)
    except InputError:
        raise
    except (TypeError, ValueError, ArithmeticError, RuntimeError, MemoryError) as error:  # numbers that none can take
        given = ", ".join(f"{option}={shown(value)}" for option, value in options_given.items())
        raise InputError(f"encoding {name!r} cannot be built from {given or 'these sizes'}: {error}.") from error
