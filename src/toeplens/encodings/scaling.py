"""The rules by which published models lower RoPE's frequencies for longer contexts, one function each.

A rule's keywords are those of its type in transformers' rope parameters; those without a default are required.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from toeplens.encodings.kit import require_even, require_number, rotary_frequencies
from toeplens.encodings.shapes import Positions
from toeplens.ground import InputError, invalid
from toeplens.ground.options import parameters

# keywords of all types, with defaults
COMMON: dict[str, Any] = {
    "rope_type": None,
    "type": None,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "max_position_embeddings": None,
    "pairing": "half",
}
_KINDS: dict[str, Any] = dict.fromkeys(COMMON, float) | dict.fromkeys(("rope_type", "type", "pairing"), str)
# ranges of the numbers; see `require_number`
RANGES: dict[str, dict[str, float]] = {
    "rope_theta": {"over": 0},
    "partial_rotary_factor": {"at_least": 0, "at_most": 1},
    "max_position_embeddings": {"at_least": 1},
    "original_max_position_embeddings": {"at_least": 1},
    "factor": {"over": 0},
    "attention_factor": {"over": 0},
    "beta_fast": {"over": 0},
    "beta_slow": {"over": 0},
    "mscale": {"at_least": 0},
    "mscale_all_dim": {"at_least": 0},
    "low_freq_factor": {"over": 0},
    "high_freq_factor": {"over": 0},
}


@dataclass(frozen=True)
class Start:
    """The input of a rule: RoPE of a head, and the maximum length."""

    head_dim: int
    base: float
    share: float
    longest: int

    @property
    def frequencies(self) -> Float[Tensor, "n"]:
        """RoPE's frequencies, spread over the rotated share of the dimensions."""
        dim = int(self.head_dim * self.share)
        require_even("partial_rotary_factor", dim, f"{self.share} of head_dim {self.head_dim} is rotated")
        return rotary_frequencies(dim, self.base)


@dataclass(frozen=True)
class Scaled:
    """The result of a rule.

    frequencies  at all lengths, or up to ``until`` tokens
    magnitude    factor of queries and keys
    until        length from which on a length-dependent type differs
    beyond       its frequencies from there on (longrope)
    growth       growth rate of its base from there on (dynamic)
    """

    frequencies: Float[Tensor, "n"]
    magnitude: float = 1.0
    until: float = math.inf
    beyond: Float[Tensor, "n"] | None = None
    growth: float | None = None


def length_of(k_positions: Positions) -> Int[Tensor, "*B"]:
    """The sequence length of these keys: the largest position plus 1, per sequence; 1 if all are negative."""
    return F.pad(k_positions, (1, 0)).amax(-1) + 1


def slowed(frequencies: Float[Tensor, "... n"], factor: Float[Tensor, "... 1"] | float) -> Float[Tensor, "... n"]:
    """NTK-aware: base s^(d/(d-2)), which leaves the first frequency unchanged and divides the last by s."""
    share = torch.linspace(0, 1, frequencies.shape[-1], dtype=torch.float64, device=frequencies.device)
    return frequencies * factor**-share


def default(start: Start) -> Scaled:
    return Scaled(start.frequencies)


def linear(start: Start, *, factor: float) -> Scaled:
    return Scaled(start.frequencies / factor)


def ntk(start: Start, *, factor: float) -> Scaled:
    return Scaled(slowed(start.frequencies, factor))


def dynamic(start: Start, *, factor: float) -> Scaled:
    return Scaled(start.frequencies, until=start.longest, growth=factor)


def yarn(
    start: Start,
    *,
    original_max_position_embeddings: float,
    factor: float | None = None,
    attention_factor: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    mscale: float = 0.0,
    mscale_all_dim: float = 0.0,
    truncate: bool = True,
) -> Scaled:
    require_number("rope_theta", start.base, over=1)
    require_number("beta_fast", beta_fast, at_least=beta_slow)
    original = original_max_position_embeddings
    factor = start.longest / original if factor is None else factor

    def temperature(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    if attention_factor is None:
        weighed = mscale and mscale_all_dim
        attention_factor = temperature(mscale) / temperature(mscale_all_dim) if weighed else temperature()
    frequencies = start.frequencies
    dim = 2 * len(frequencies)

    def pair_with(turns: float) -> float:
        """The pair index, not necessarily an integer, with this many rotations in the original length."""
        return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(start.base))

    low, high = pair_with(beta_fast), pair_with(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return Scaled(frequencies * (1 - ramp + ramp / factor), attention_factor)


def longrope(
    start: Start,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_max_position_embeddings: float,
    factor: float | None = None,
    attention_factor: float | None = None,
) -> Scaled:
    original = original_max_position_embeddings
    factor = start.longest / original if factor is None else factor
    if attention_factor is None:
        require_number("original_max_position_embeddings", original, over=1)
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    frequencies = start.frequencies
    short = frequencies / _divisors("short_factor", short_factor, len(frequencies))
    long = frequencies / _divisors("long_factor", long_factor, len(frequencies))
    return Scaled(short, attention_factor, until=original, beyond=long)


def llama3(
    start: Start,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Scaled:
    require_number("high_freq_factor", high_freq_factor, over=low_freq_factor)
    frequencies = start.frequencies
    turns = original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return Scaled(frequencies * (kept + (1 - kept) / factor))


def proportional(start: Start, *, factor: float = 1.0) -> Scaled:
    frequencies = rotary_frequencies(start.head_dim, start.base) / factor
    frequencies[int(start.share * start.head_dim // 2) :] = 0
    return Scaled(frequencies)


RULES: dict[str, Callable[..., Scaled]] = {
    rule.__name__: rule for rule in (default, linear, ntk, dynamic, yarn, longrope, llama3, proportional)
}


def keywords(rope_type: str) -> dict[str, bool]:
    """A type's own keywords, and whether each is required."""
    parameters = inspect.signature(RULES[rope_type]).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def every_keyword() -> list[str]:
    """The own keywords of all types."""
    return list(dict.fromkeys(name for rope_type in RULES for name in keywords(rope_type)))


def kind_of(name: str) -> Any:
    """The annotation of a keyword; None is the same as not given."""
    own = (rules[name].annotation for rule in RULES.values() if name in (rules := parameters(rule)))
    return (_KINDS.get(name) or next(own)) | None


def check(rope_type: str, options: dict[str, Any], start: Start) -> None:
    """Raise `InputError` for options that the type does not take, and for numbers out of range."""
    takes = keywords(rope_type)
    for name in options:
        if name not in takes:
            known = ", ".join((*takes, *COMMON))
            raise InputError(f"{name}: rope type {rope_type!r} does not take it. It takes {known}.")
    common = {
        "rope_theta": start.base,
        "partial_rotary_factor": start.share,
        "max_position_embeddings": start.longest,
    }
    for name, value in {**common, **options}.items():
        if name in RANGES:
            require_number(name, value, **RANGES[name])


def apply(rope_type: str, options: dict[str, Any], start: Start) -> Scaled:
    """The rule's result; a missing option raises an `InputError`."""
    for name, needed in keywords(rope_type).items():
        if needed and name not in options:
            raise InputError(f"{name} must be set for rope type {rope_type!r}.")
    return RULES[rope_type](start, **options)


def _divisors(field: str, values: Sequence[float], count: int) -> Float[Tensor, "n"]:
    if len(values) != count or not all(math.isfinite(value) and value > 0 for value in values):
        raise invalid(
            field,
            f"be {count} positive numbers, one per pair of rotated dimensions",
            got=f"{list(values)[:4]} (length {len(values)})",
        )
    return torch.tensor(list(values), dtype=torch.float64)
