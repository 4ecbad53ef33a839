"""The options of audits and probes: type, default, limits and help of each, for Python and the command line.

To add one, add a field here and use it. Importing this module is fast, as ``--help`` needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from operator import index
from typing import Annotated, Any, Literal, TypeVar

from toeplens.utils import InputError, invalid, repr_of
from toeplens.utils.formatting import join_list
from toeplens.utils.machine import parse_bytes
from toeplens.utils.options import MACHINE, Range, check_fields, option

MIN_TOKENS, MAX_TOKENS = 64, 1 << 20  # tokens
MAX_ITEMS, MAX_SEED = 1000, 2**31  # maximum number of items of each kind; largest seed
MAX_WORDS = 100  # maximum number of words of a list
Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]
Ablation = Literal["exact", "position", "bands", "attribution", "none"]
_MAX_COUNT = 100_000  # maximum of sequences, and of first


Function = TypeVar("Function", bound=Callable[..., Any])


def with_options(options: type[Any]) -> Callable[[Function], Function]:
    """Show the fields of a dataclass in place of a function's ``**options``, as in `help`."""

    def decorate(function: Function) -> Function:
        parameters = [p for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
        added = [inspect.Parameter(x.name, inspect.Parameter.KEYWORD_ONLY, default=x.default) for x in fields(options)]
        function.__signature__ = inspect.Signature([*parameters, *added])  # type: ignore[attr-defined]
        return function

    return decorate


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """The options of an audit; those ``of_runs`` also apply to audits of toeplens runs.

    Numbers of layers and heads are from 0; in a text such as ``"1,4,9-12"`` from 1.

    max_tokens  a shorter text is one sequence of its own length
    effects     ``exact`` ablates each head; ``attribution`` estimates this from gradients, for language models;
                ``position`` removes the position of each head (rotation and bias); ``bands`` freezes each frequency
                band of each layer
    first, heads  for ``exact`` and ``position``; heads that cannot be among the ``first`` are dropped early
    needles     as long as the sequences; for a causal language model and a text
    changes     `toeplens.backends.hf.Change`, or texts as on the command line. Every head is measured on the
                output of the changed heads before it. Not possible together with effects
    dtype, device, memory, pickled  as in `toeplens.backends.hf.load.load_model`
    seed        of random tokens, masked tokens and intervals

    Raises `InputError` for options that are invalid for every model or exclude each other.
    """

    layers: tuple[int, ...] | None = option(
        None, "Layers, e.g. 1,4,9-12 (default: all).", "LIST", of_runs=True, typed=str | None
    )
    heads: tuple[int, ...] | None = option(
        None, "Heads of each layer to ablate (default: all).", "LIST", typed=str | None
    )
    sequences: Annotated[int, Range(1, _MAX_COUNT)] | None = option(
        None, "Maximum sequences (default: 16; 256 for a run).", of_runs=True
    )
    max_tokens: Annotated[int, Range(2, MAX_TOKENS)] | None = option(
        None, "Maximum tokens per sequence (default: 256; with --tokens all)."
    )
    effects: Ablation | None = option(  # noqa: RUF009
        None,
        "Ablation effect: exact, attribution (an estimate), position (ablate only position), bands (freeze "
        "frequencies) or none (default: exact; none with --change).",
        "NAME",
        of_runs=True,
        typed=str | None,
    )
    first: Annotated[int, Range(1, _MAX_COUNT)] | None = option(None, "Find only the N largest effects (faster).")
    needles: Annotated[int, Range(0, MAX_ITEMS)] = option(0, "Needle texts for retrieval heads (default: 0).")
    changes: tuple[Any, ...] = option(
        (), "Intervention, e.g. 'layers=2 heads=3 output=zero'. Repeatable.", "CHANGE", flag="--change", typed=list[str]
    )
    dtype: Dtype = option(  # noqa: RUF009
        "auto", "auto, float32, bfloat16, float16 or float64 (default: auto).", "NAME", MACHINE, typed=str
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N (default: auto).", "NAME", MACHINE, of_runs=True)
    memory: str | None = option(
        None, "Bound on memory, e.g. 8G; other weights are read from disk (default: what is free).", "SIZE", MACHINE
    )
    pickled: bool = option(
        False, "Allow pickle checkpoints. Unsafe: they can execute code.", None, MACHINE, flag="--pickled"
    )
    seed: Annotated[int, Range(0, MAX_SEED)] = option(0, "Seed of tokens and needles (default: 0).", of_runs=True)

    def __post_init__(self) -> None:
        from toeplens.studies.kit.changes import parse_changes, parse_numbers

        changes = parse_changes(self.changes)
        object.__setattr__(self, "changes", changes)
        object.__setattr__(self, "effects", self.effects or ("none" if changes else "exact"))
        for name, value in (("layers", self.layers), ("heads", self.heads)):
            if value is not None:
                try:
                    numbers = parse_numbers(name, value) if isinstance(value, str) else tuple(map(index, value))
                except TypeError:
                    raise invalid(name, "be whole numbers in a tuple", value) from None
                if not numbers:
                    raise InputError(f"{name} must have at least one entry, got none.")
                object.__setattr__(self, name, numbers)
        check_fields(self)
        if self.memory is not None:
            parse_bytes("memory", self.memory)
        for name in ("first", "heads"):
            if getattr(self, name) is not None and self.effects not in ("exact", "position"):
                raise InputError(f"{name} must not be set with effects {self.effects!r}; use 'exact' or 'position'.")
        if changes and (self.effects != "none" or self.needles):
            raise InputError(f"changes and {'needles' if self.needles else 'effects'} must not both be set.")

    def check_run(self, **others: Any) -> None:
        """Raise `InputError` for options that do not apply to a run, and for ``others`` that are not None."""
        changed = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}
        allowed = [field.name for field in fields(self) if field.metadata.get("of_runs")]
        for name, value in (others | changed).items():
            if value is not None and name not in allowed:
                raise InputError(f"{name} must not be set for a run. Allowed are {join_list(allowed)}.")


@dataclass(frozen=True)
class ProbeSizes:
    """Number and size of the items of a probe.

    lengths    lengths in tokens of needle texts, repeated tokens, and (the longest) texts for the loss
    depths     depths of needles, 0 to 1
    sequences  texts for the loss, and sequences of repeated tokens per length
    lists      questions about lists, of each kind
    words      numbers of words that are asked for by index in a list, and by key in a list of pairs
    """

    lengths: tuple[int, ...] = option(
        "256,512,1024", "Text lengths in tokens (default: 256,512,1024).", "LIST", typed=str
    )
    depths: tuple[float, ...] = option(
        "0,0.25,0.5,0.75,1", "Needle depths (default: 0,0.25,0.5,0.75,1).", "LIST", typed=str
    )
    repeats: Annotated[int, Range(1, MAX_ITEMS)] = option(2, "Needles per length, depth (default: 2).")
    sequences: Annotated[int, Range(2, MAX_ITEMS)] = option(8, "Sequences and copies (default: 8).")
    lists: Annotated[int, Range(2, MAX_ITEMS)] = option(24, "Questions of each kind about lists (default: 24).")
    words: tuple[int, ...] = option(
        "", "Also ask for words by number and by key, in lists of so many words.", "LIST", typed=str
    )

    def __post_init__(self) -> None:
        limits = (("lengths", int, MIN_TOKENS, MAX_TOKENS), ("depths", float, 0, 1), ("words", int, 2, MAX_WORDS))
        for name, kind, low, high in limits:
            values: Any = getattr(self, name)
            if not isinstance(values, Collection):
                raise invalid(name, f"be numbers from {low} to {high} in a tuple", values)
            if isinstance(values, str):
                try:
                    object.__setattr__(self, name, values := tuple(map(kind, filter(None, values.split(",")))))
                except ValueError:
                    numbers = "whole numbers" if kind is int else "numbers"
                    raise invalid(name, f"be {numbers} with commas between them", values) from None
            if (
                (not values and name != "words")
                or len(set(values)) < len(values)
                or not all(low <= value <= high for value in values)
            ):
                got = ", ".join(repr_of(value) if isinstance(value, int) else f"{value:g}" for value in values)
                raise invalid(name, f"be different numbers from {low} to {high}", got=got or "none")
        check_fields(self)
