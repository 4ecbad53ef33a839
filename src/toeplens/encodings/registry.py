"""The names of the encodings: ours, and those of other packages via the entry point ``toeplens.encodings``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.composed import Composed, compose, joint_attributes
from toeplens.utils import InputError, choose, invalid, repr_of
from toeplens.utils.errors import first_line

# the modules of this package, in the order of the list of names
FAMILIES = (
    "additive",
    "rotary",
    "coordinates",
    "contextual",
    "logits",
    "rope_scaling",
    "lie_rotations",
    "length_extrapolation",
)


def _encodings() -> dict[str, type[PositionalEncoding]]:
    return _load_encodings()[0]


@cache
def _load_encodings() -> tuple[dict[str, type[PositionalEncoding]], dict[str, str]]:
    """The encodings by name, and why encodings of other packages cannot be used."""
    classes: dict[str, type[PositionalEncoding]] = {}
    for family in FAMILIES:
        module = import_module(f"toeplens.encodings.{family}")
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, PositionalEncoding) and cls.__module__ == module.__name__:
                classes |= {cls._registered_name: cls} if cls._registered_name else {}
    errors: dict[str, str] = {}
    for entry in entry_points(group="toeplens.encodings"):
        origin = f"{entry.value} of the package {'?' if entry.dist is None else entry.dist.name}"
        if entry.name in classes:
            errors[entry.name] = f"{origin} uses a name that is already taken"
            warnings.warn(f"encoding {entry.name!r}: {errors[entry.name]}", stacklevel=2)
            continue
        try:
            encoding_class = entry.load()
        except Exception as error:  # a faulty package must not disable the others
            errors[entry.name] = f"{origin} cannot be loaded ({first_line(error)})"
        else:
            if isinstance(encoding_class, type) and issubclass(encoding_class, PositionalEncoding):
                classes[entry.name] = encoding_class
            else:
                errors[entry.name] = f"{origin} is not a subclass of PositionalEncoding"
    return classes, errors


def names() -> tuple[str, ...]:
    """The names of all available encodings."""
    return tuple(_encodings())


def load_errors() -> dict[str, str]:
    """Encodings of other packages that cannot be used: name -> reason."""
    return dict(_load_encodings()[1])


def package_of(name: str) -> str | None:
    """The other package that provides an encoding, or the first of several joined by ``+``; None for our own."""
    entries = {entry.name: entry for entry in entry_points(group="toeplens.encodings")}
    for part in split_names(name):
        entry = entries.get(part)
        if entry is not None and not _encodings()[part].__module__.startswith("toeplens."):
            return "?" if entry.dist is None else entry.dist.name
    return None


def _require_known(name: str) -> str:
    """The name, if there is such an encoding."""
    if name not in _encodings() and name in load_errors():
        raise InputError(f"encoding: {name!r} cannot be used: {load_errors()[name]}.")
    return choose("encoding", name, _encodings())


def split_names(name: str | Sequence[str]) -> tuple[str, ...]:
    """The names of the encodings that ``name`` stands for: one, or several given as a list or as ``rope + alibi``.

    Raises `InputError` for unknown and for repeated names.
    """
    if isinstance(name, str) and (name in _encodings() or "+" not in name):
        return (_require_known(name),)
    parts = [part.strip() for part in name.split("+")] if isinstance(name, str) else name
    if not isinstance(parts, Sequence) or not parts or not all(isinstance(part, str) for part in parts):
        raise invalid("encoding", "be a name or a list of names", name)
    for part in parts:
        _require_known(part)
        if parts.count(part) > 1:
            raise InputError(f"encoding must not name {part!r} twice, got {repr_of(name)}.")
    return tuple(parts)


def canonical_name(name: str | Sequence[str]) -> str:
    """The name as used in specs, tables and labels; several are written ``rope + alibi``, in the order given."""
    return " + ".join(split_names(name))


def get(name: str | Sequence[str]) -> type[PositionalEncoding]:
    """The class for ``name``; raises an `InputError` that lists similar names if there is none.

    For several names, a class that combines them (`toeplens.encodings.compose`), with each one's options under its
    name.
    """
    parts = split_names(name)
    classes = tuple(_encodings()[part] for part in parts)
    return classes[0] if len(parts) == 1 else _combined_class(parts, classes)


@cache
def _combined_class(parts: tuple[str, ...], classes: tuple[type[PositionalEncoding], ...]) -> type[PositionalEncoding]:
    docs = zip(parts, map(inspect.getdoc, classes), strict=True)
    summaries = [f"{part}: {str(doc).splitlines()[0]}" for part, doc in docs]
    all_options = {f"{part}.{option}": parameter for part in parts for option, parameter in options(part).items()}
    attributes = {
        **joint_attributes(classes),
        "toeplitz": False,  # depends on the options; ask a built instance
        "options": classmethod(lambda cls: dict(all_options)),
        "__doc__": "\n\n".join(("Several encodings that act together, each through its own hooks.", *summaries)),
        "__new__": lambda cls, **arguments: build(parts, **arguments),
    }
    return type("Composed", (Composed,), attributes)


def options(name: str | Sequence[str]) -> dict[str, inspect.Parameter]:
    """The options of ``build(name, ...)`` other than the sizes, with defaults; ``rope.base`` for several encodings."""
    return get(name).options()


def build(
    name: str | Sequence[str], *, d_model: int, num_heads: int, head_dim: int, max_len: int, **options_given: Any
) -> PositionalEncoding:
    """Build the encoding ``name``, or several as one: ``["rope", "fox"]``, or ``"rope + fox"``.

    Arguments
        d_model    width of the residual stream
        num_heads  number of heads of one attention layer
        head_dim   dimensions of one head (for ``mla``: of its content part)
        max_len    number of positions of position tables
        options    the encoding's options, as listed by ``toeplens encodings --full``. For several encodings, each one's
                   options under its name: ``rope={"base": 500}``

    Raises `InputError` for an unknown name or option, and for sizes that the encoding does not support.
    """
    sizes = {"d_model": d_model, "num_heads": num_heads, "head_dim": head_dim, "max_len": max_len}
    parts = split_names(name)
    is_combined = len(parts) > 1
    encoding_class, label = get(name), canonical_name(name)
    known = dict.fromkeys(parts) if is_combined else encoding_class.options()
    types = options_given.get("layer_types")  # each layer type is a further option; there may be unused ones
    types = types if isinstance(types, Sequence) else ()
    for option, value in options_given.items():
        if option not in types and not ("layer_types" in known and isinstance(value, Mapping)):
            choose(f"option of encoding {label!r}", option, known)
        if is_combined and not isinstance(value, Mapping):
            raise invalid(option, f"be options of {option!r}, by name", value)
    if is_combined:
        return compose(*(_build_part(part, sizes, options_given.get(part, {})) for part in parts), names=parts)
    try:
        return encoding_class(**sizes, **options_given)
    except InputError:
        raise
    except (TypeError, ValueError, ArithmeticError, RuntimeError, MemoryError) as error:  # unusable values
        text = ", ".join(f"{option}={repr_of(value)}" for option, value in options_given.items()) or "these sizes"
        raise InputError(f"encoding: {label!r} cannot be built from {text}: {error}.") from error


def _build_part(name: str, sizes: dict[str, int], options_given: Mapping[str, Any]) -> PositionalEncoding:
    """Build one of several encodings; errors in its options name it."""
    try:
        return build(name, **sizes, **options_given)
    except InputError as error:
        if error.name not in options(name):
            raise
        raise InputError(f"{name}.{error}") from error
