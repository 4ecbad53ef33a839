"""What encodings that act together are as one, and what keeps some from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Any

import torch

from toeplens.encodings.absolute import Sinusoidal
from toeplens.encodings.base import Coupling, PositionalEncoding
from toeplens.encodings.tempered import Tempered
from toeplens.ground import InputError
from toeplens.ground.words import listed

_ALONE = ("rotate", "score", "transform_logits", "transform_weights", "add_values")  # through which one acts alone
_PLACES = 64  # running numbers on which coordinates must agree
Part = PositionalEncoding | type[PositionalEncoding]


def quoted(names: Iterable[str]) -> str:
    """Names as a list in a sentence."""
    return listed(repr(name) for name in names)


def couplings(parts: Iterable[Part]) -> tuple[Coupling, tuple[Coupling, ...]]:
    """Where position enters, first and also; vectors at the input come last."""
    every: list[Coupling] = [coupling for part in parts for coupling in (part.coupling, *part.also_couples)]
    found: list[Coupling] = [coupling for n, coupling in enumerate(every) if coupling not in ("none", *every[:n])]
    found.sort(key=lambda coupling: coupling == "input")
    return (found[0], tuple(found[1:])) if found else ("none", ())


def citation(parts: Iterable[Part]) -> str:
    """Those of all, each once."""
    return "; ".join(dict.fromkeys(part.citation for part in parts if part.citation))


def formula(parts: Iterable[Part]) -> str:
    """Those of all, side by side."""
    return r",\qquad ".join(part.formula for part in parts if part.formula)


def is_toeplitz(parts: Iterable[PositionalEncoding]) -> bool:
    """Whether the offset still is all that counts.

    Not for input vectors beside anything, as queries and keys then hold positions; nor for a rotation beside what
    reads queries and keys in the logits, as these then are those of a turned query.
    """
    acting = [part for part in parts if part.coupling != "none"]
    if not all(part.toeplitz for part in acting) or any(part.data_dependent for part in acting):
        return False
    if len(acting) < 2:
        return True
    reading = any("transform_logits" in part._seeing and part.overrides("transform_logits") for part in acting)
    turning = any(part.overrides("rotate") for part in acting)
    return not (any("input" in (part.coupling, *part.also_couples) for part in acting) or (turning and reading))


def layers_of(parts: Iterable[PositionalEncoding]) -> frozenset[int] | None:
    """The layers on which one of them acts; None for all."""
    found: set[int] = set()
    for part in parts:
        if part.coupling != "none" and part.layers is None:
            return None
        found |= part.layers or frozenset()
    return frozenset(found) if found else None


def check(parts: Mapping[str, PositionalEncoding]) -> None:
    """Refuse, in a sentence that names two of them, what cannot act together."""
    for (a, one), (b, other) in combinations(parts.items(), 2):
        if one is other:
            raise InputError(f"encoding: {a!r} and {b!r} are one and the same; each is to be given once.")
        for size, value in one.sizes.items():
            if value != other.sizes[size]:
                raise InputError(f"{size}: {a!r} was built with {value} and {b!r} with {other.sizes[size]}.")
        if "none" not in (one.coupling, other.coupling):
            _agree(a, b, "coordinates of a position", one.axes, other.axes)
        _agree(a, b, "dimensions of a query", one.query_dim, other.query_dim)
        if one.scale_terms != 1 and other.scale_terms != 1:
            _agree(a, b, "terms in the published factor of q . k", one.scale_terms, other.scale_terms)
        for hook in _ALONE:
            if one.overrides(hook) and other.overrides(hook) and not (hook == "rotate" and _tempers(one, other)):
                raise InputError(f"encoding: {a!r} and {b!r} both act through {hook}, where there is room for one.")
        for x, y, first, second in ((a, b, one, other), (b, a, other, one)):
            if first.overrides("rotate") and second.overrides("score") and not _tempers(first):
                raise InputError(
                    f"encoding: {x!r} acts through rotate and {y!r} through score, each its own way from queries and "
                    f"keys to their product; there is room for one."
                )
        if one.axes == other.axes > 1 and not _same(_placed, one, other):
            raise InputError(f"encoding: {a!r} and {b!r} place running numbers otherwise (place); give both one grid.")
        waves = isinstance(one, Sinusoidal) and isinstance(other, Sinusoidal) and one.layout == other.layout
        if waves and _same(lambda part: part.frequencies, one, other):
            raise InputError(f"encoding: {a!r} and {b!r} both add the same waves at the input (embed).")


def _tempers(*parts: PositionalEncoding) -> bool:
    return any(isinstance(part, Tempered) for part in parts)


def _agree(a: str, b: str, what: str, one: int, other: int) -> None:
    if one != other:
        raise InputError(f"encoding: {a!r} has {one} {what} and {b!r} {other}; they must have the same number.")


def _placed(part: PositionalEncoding) -> torch.Tensor:
    return part.place(torch.arange(min(part.max_len, _PLACES)))


def _same(made: Callable[[Any], torch.Tensor], one: PositionalEncoding, other: PositionalEncoding) -> bool:
    a, b = made(one), made(other)
    return a.shape == b.shape and (a.is_meta or b.is_meta or torch.equal(a.cpu(), b.cpu()))
