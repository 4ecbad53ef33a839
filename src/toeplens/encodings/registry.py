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
from toeplens.encodings.composed import Composed, compose, joint_facts
from toeplens.ground import InputError, choose, invalid, shown
from toeplens.ground.errors import first_line

# the modules of this package, in the order of the list of names
FAMILIES = ("additive", "rotary", "coordinates", "contextual", "logits", "scaled", "generated", "lengths")


def _all() -> dict[str, type[PositionalEncoding]]:
    return _found()[0]


@cache
def _found() -> tuple[dict[str, type[PositionalEncoding]], dict[str, str]]:
    """The encodings by name, and why encodings of other packages cannot be used."""
    found: dict[str, type[PositionalEncoding]] = {}
    for family in FAMILIES:
        module = import_module(f"toeplens.encodings.{family}")
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, PositionalEncoding) and kind.__module__ == module.__name__:
                found |= {kind._registered: kind} if kind._registered else {}
    faults: dict[str, str] = {}
    for entry in entry_points(group="toeplens.encodings"):
        where = f"{entry.value} of the package {'?' if entry.dist is None else entry.dist.name}"
        if entry.name in found:
            faults[entry.name] = f"{where} uses a name that is already taken"
            warnings.warn(f"encoding {entry.name!r}: {faults[entry.name]}", stacklevel=2)
            continue
        try:
            kind = entry.load()
        except Exception as error:  # a faulty package must not disable the others
            faults[entry.name] = f"{where} cannot be loaded ({first_line(error)})"
        else:
            if isinstance(kind, type) and issubclass(kind, PositionalEncoding):
                found[entry.name] = kind
            else:
                faults[entry.name] = f"{where} is not a subclass of PositionalEncoding"
    return found, faults


def names() -> tuple[str, ...]:
    """The names of all available encodings."""
    return tuple(_all())


def unusable() -> dict[str, str]:
    """Encodings of other packages that cannot be used: name -> reason."""
    return dict(_found()[1])


def package_of(name: str) -> str | None:
    """The other package that provides an encoding, or the first of several joined by ``+``; None for our own."""
    brought = {entry.name: entry for entry in entry_points(group="toeplens.encodings")}
    for part in named(name):
        entry = brought.get(part)
        if entry is not None and not _all()[part].__module__.startswith("toeplens."):
            return "?" if entry.dist is None else entry.dist.name
    return None


def _known(name: str) -> str:
    """The name, if there is such an encoding."""
    if name not in _all() and name in unusable():
        raise InputError(f"encoding: {name!r} cannot be used: {unusable()[name]}.")
    return choose("encoding", name, _all())


def named(name: str | Sequence[str]) -> tuple[str, ...]:
    """The names of the encodings that ``name`` stands for: one, or several given as a list or as ``rope + alibi``.

    Raises `InputError` for unknown and for repeated names.
    """
    if isinstance(name, str) and (name in _all() or "+" not in name):
        return (_known(name),)
    given = [part.strip() for part in name.split("+")] if isinstance(name, str) else name
    if not isinstance(given, Sequence) or not given or not all(isinstance(part, str) for part in given):
        raise invalid("encoding", "be a name or a list of names", name)
    for part in given:
        _known(part)
        if given.count(part) > 1:
            raise InputError(f"encoding must not name {part!r} twice, got {shown(name)}.")
    return tuple(given)


def canonical(name: str | Sequence[str]) -> str:
    """The name as used in specs, tables and labels; several are written ``rope + alibi``, in the order given."""
    return " + ".join(named(name))


def get(name: str | Sequence[str]) -> type[PositionalEncoding]:
    """The class for ``name``; raises an `InputError` that lists similar names if there is none.

    For several names, a class that combines them (`toeplens.encodings.compose`), with each one's options under its
    name.
    """
    parts = named(name)
    kinds = tuple(_all()[part] for part in parts)
    return kinds[0] if len(parts) == 1 else _together(parts, kinds)


@cache
def _together(parts: tuple[str, ...], kinds: tuple[type[PositionalEncoding], ...]) -> type[PositionalEncoding]:
    firsts = [f"{part}: {str(inspect.getdoc(kind)).splitlines()[0]}" for part, kind in zip(parts, kinds, strict=True)]
    every = {f"{part}.{option}": taken for part in parts for option, taken in options(part).items()}
    facts = {
        **joint_facts(kinds),
        "toeplitz": False,  # depends on the options; ask a built instance
        "options": classmethod(lambda cls: dict(every)),
        "__doc__": "\n\n".join(("Several encodings that act together, each through its own hooks.", *firsts)),
        "__new__": lambda cls, **given: build(parts, **given),
    }
    return type("Composed", (Composed,), facts)


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
    parts = named(name)
    together = len(parts) > 1
    kind, label = get(name), canonical(name)
    known = dict.fromkeys(parts) if together else kind.options()
    types = options_given.get("layer_types") or ()  # each layer type is a further option; there may be unused ones
    for option, value in options_given.items():
        if option not in types and not ("layer_types" in known and isinstance(value, Mapping)):
            choose(f"option of encoding {label!r}", option, known)
        if together and not isinstance(value, Mapping):
            raise invalid(option, f"be options of {option!r}, by name", value)
    if together:
        return compose(*(_part(part, sizes, options_given.get(part, {})) for part in parts), names=parts)
    try:
        return kind(**sizes, **options_given)
    except InputError:
        raise
    except (TypeError, ValueError, ArithmeticError, RuntimeError, MemoryError) as error:  # unusable values
        given = ", ".join(f"{option}={shown(value)}" for option, value in options_given.items())
        raise InputError(f"encoding: {label!r} cannot be built from {given or 'these sizes'}: {error}.") from error


def _part(name: str, sizes: dict[str, int], options_given: Mapping[str, Any]) -> PositionalEncoding:
    """Build one of several encodings; errors in its options name it."""
    try:
        return build(name, **sizes, **options_given)
    except InputError as error:
        if error.name not in options(name):
            raise
        raise InputError(f"{name}.{error}") from error
