"""RoPE scaled to longer contexts, with the keywords of transformers' rope parameters, so that model configs fit.

In this file the default pairing is ``half``, the layout of the models with such configs.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings import kit
from toeplens.encodings.additive import NoPE
from toeplens.encodings.base import SIZES, PositionalEncoding
from toeplens.encodings.coordinates import axes_of_pairs, axis_phases
from toeplens.encodings.rotary import Pairing, RoPE, Rotary
from toeplens.encodings.shapes import Frequencies, Keys, Positions, Queries, RotatedQK
from toeplens.utils import InputError, choose, invalid
from toeplens.utils.options import NonNegative, Positive, PositiveInt, Range, Share, check_arguments, parameters

_Length = Annotated[float, Range(at_least=1)]
# keywords of all types: default and annotation
COMMON_OPTIONS: dict[str, tuple[Any, Any]] = {
    "rope_type": (None, str),
    "type": (None, str),
    "rope_theta": (10000.0, Positive),
    "partial_rotary_factor": (1.0, Share),
    "max_position_embeddings": (None, _Length),
    "pairing": ("half", Pairing),
}


@dataclass(frozen=True)
class BaseRoPE:
    """The input of a rule: RoPE of a head, and the maximum length."""

    head_dim: int
    base: float
    partial_factor: float
    max_positions: int

    @property
    def frequencies(self) -> Float[Tensor, "n"]:
        """RoPE's frequencies, spread over the rotated share of the dimensions."""
        dim = int(self.head_dim * self.partial_factor)
        kit.require_even("partial_rotary_factor", dim, f"{self.partial_factor} of head_dim {self.head_dim} is rotated")
        return kit.rotary_frequencies(dim, self.base)


@dataclass(frozen=True)
class ScaledFrequencies:
    """The result of a rule."""

    frequencies: Float[Tensor, "n"]  # at all lengths, or up to ``original_length`` tokens
    magnitude: float = 1.0  # factor of queries and keys
    original_length: float = math.inf  # length from which on a length-dependent type differs
    long_frequencies: Float[Tensor, "n"] | None = None  # its frequencies from there on (longrope)
    base_growth: float | None = None  # growth rate of its base from there on (dynamic)


def sequence_length(k_positions: Positions) -> Int[Tensor, "*B"]:
    """The sequence length of these keys: the largest position plus 1, per sequence; 1 if all are negative."""
    return F.pad(k_positions, (1, 0)).amax(-1) + 1


def ntk_frequencies(
    frequencies: Float[Tensor, "... n"], factor: Float[Tensor, "... 1"] | float
) -> Float[Tensor, "... n"]:
    """NTK-aware: base s^(d/(d-2)), which leaves the first frequency unchanged and divides the last by s."""
    exponent = torch.linspace(0, 1, frequencies.shape[-1], dtype=torch.float64, device=frequencies.device)
    return frequencies * factor**-exponent


def default(rope: BaseRoPE) -> ScaledFrequencies:
    return ScaledFrequencies(rope.frequencies)


def linear(rope: BaseRoPE, *, factor: Positive) -> ScaledFrequencies:
    return ScaledFrequencies(rope.frequencies / factor)


def ntk(rope: BaseRoPE, *, factor: Positive) -> ScaledFrequencies:
    return ScaledFrequencies(ntk_frequencies(rope.frequencies, factor))


def dynamic(rope: BaseRoPE, *, factor: Positive) -> ScaledFrequencies:
    return ScaledFrequencies(rope.frequencies, original_length=rope.max_positions, base_growth=factor)


def yarn(
    rope: BaseRoPE,
    *,
    original_max_position_embeddings: _Length,
    factor: Positive | None = None,
    attention_factor: Positive | None = None,
    beta_fast: NonNegative = 32.0,
    beta_slow: NonNegative = 1.0,
    mscale: NonNegative = 0.0,
    mscale_all_dim: NonNegative = 0.0,
    truncate: bool = True,
) -> ScaledFrequencies:
    kit.require_number("rope_theta", rope.base, above=1)
    kit.require_number("beta_slow", beta_slow, above=0)
    kit.require_number("beta_fast", beta_fast, at_least=beta_slow)
    original = original_max_position_embeddings
    factor = rope.max_positions / original if factor is None else factor

    def temperature(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    if attention_factor is None:
        has_weights = mscale and mscale_all_dim
        attention_factor = temperature(mscale) / temperature(mscale_all_dim) if has_weights else temperature()
    frequencies = rope.frequencies
    dim = 2 * len(frequencies)

    def pair_with(rotations: float) -> float:
        """The pair index, not necessarily an integer, with this many rotations in the original length."""
        return dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(rope.base))

    low, high = pair_with(beta_fast), pair_with(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return ScaledFrequencies(frequencies * (1 - ramp + ramp / factor), attention_factor)


def longrope(
    rope: BaseRoPE,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_max_position_embeddings: _Length,
    factor: Positive | None = None,
    attention_factor: Positive | None = None,
) -> ScaledFrequencies:
    original = original_max_position_embeddings
    factor = rope.max_positions / original if factor is None else factor
    if attention_factor is None:
        kit.require_number("original_max_position_embeddings", original, above=1)
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    frequencies = rope.frequencies
    short = frequencies / _divisors("short_factor", short_factor, len(frequencies))
    long = frequencies / _divisors("long_factor", long_factor, len(frequencies))
    return ScaledFrequencies(short, attention_factor, original_length=original, long_frequencies=long)


def llama3(
    rope: BaseRoPE,
    *,
    factor: Positive,
    low_freq_factor: Positive,
    high_freq_factor: Positive,
    original_max_position_embeddings: _Length,
) -> ScaledFrequencies:
    kit.require_number("high_freq_factor", high_freq_factor, above=low_freq_factor)
    frequencies = rope.frequencies
    rotations = original_max_position_embeddings * frequencies / (2 * math.pi)
    unscaled = ((rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return ScaledFrequencies(frequencies * (unscaled + (1 - unscaled) / factor))


def proportional(rope: BaseRoPE, *, factor: float = 1.0) -> ScaledFrequencies:
    frequencies = kit.rotary_frequencies(rope.head_dim, rope.base) / factor
    frequencies[int(rope.partial_factor * rope.head_dim // 2) :] = 0
    return ScaledFrequencies(frequencies)


RULES: dict[str, Callable[..., ScaledFrequencies]] = {
    rule.__name__: rule for rule in (default, linear, ntk, dynamic, yarn, longrope, llama3, proportional)
}


def rule_options(rope_type: str) -> dict[str, inspect.Parameter]:
    """A type's own keywords."""
    return {name: p for name, p in parameters(RULES[rope_type]).items() if name != "rope"}


# the own keywords of all types, with their annotations; None is the same as not given
_hints: dict[str, Any] = {n: p.annotation | None for kind in reversed(RULES) for n, p in rule_options(kind).items()}
RULE_OPTIONS = {n: _hints[n] for kind in RULES for n in rule_options(kind)}


def apply_rule(rope_type: str, options: dict[str, Any], rope: BaseRoPE) -> ScaledFrequencies:
    """The rule's result; raises `InputError` for options that the type does not take, and for missing ones."""
    known_options = rule_options(rope_type)
    for name in options:
        if name not in known_options:
            known = ", ".join((*known_options, *COMMON_OPTIONS))
            raise InputError(f"{name}: rope type {rope_type!r} does not take it. It takes {known}.")
    for name, parameter in known_options.items():
        if parameter.default is parameter.empty and name not in options:
            raise InputError(f"{name} must be set for rope type {rope_type!r}.")
    return RULES[rope_type](rope, **options)


def _divisors(field: str, values: Sequence[float], count: int) -> Float[Tensor, "n"]:
    if len(values) != count or not all(math.isfinite(value) and value > 0 for value in values):
        must = f"be {count} positive numbers, one per pair of rotated dimensions"
        raise invalid(field, must, got=f"{list(values)[:4]} (length {len(values)})")
    return torch.tensor(list(values), dtype=torch.float64)


ROTATION_FORMULA = r"\mathrm{Re} \sum_t q_{i,t}\, \overline{k_{j,t}}\, e^{\mathrm{i}\delta\theta'_t}"


class ScaledRoPE(Rotary):
    """RoPE with frequencies lowered by a published rule, so that longer sequences reuse the angles of shorter ones.

    Takes the keywords of transformers' ``rope_parameters`` (or the older ``rope_scaling``); None is the same as not
    given. A keyword that the type does not take raises an error; `ConfiguredRoPE`, for a model's full configuration,
    ignores it with a warning.

    Arguments, for all types
        rope_type                 ``default`` (RoPE), ``linear``, ``dynamic``, ``yarn``, ``longrope``, ``llama3``,
                                  ``proportional``; and ``ntk``, which is not in transformers
        type                      the older name of ``rope_type``
        rope_theta                RoPE's base
        partial_rotary_factor     share of each head's dimensions that is rotated, starting at the first; the
                                  frequencies are spread over it. For ``proportional``, share of the frequencies kept
        max_position_embeddings   the maximum length (default: ``max_len``); for ``dynamic``, the training length
        pairing                   as in RoPE; ``half`` is the layout of the models

    Arguments, for some types
        factor                            ratio of the new to the original length
        original_max_position_embeddings  the training length (yarn, longrope, llama3)
        attention_factor                  factor of queries and keys (yarn, longrope); logits are scaled by its square
        beta_fast, beta_slow              pairs with more rotations than this in the original length are kept, pairs
                                          with fewer are slowed by ``factor`` (yarn: 32, 1)
        mscale, mscale_all_dim            weights in yarn's attention factor (DeepSeek, which also scales its softmax by
                                          the square of 0.1 mscale_all_dim ln(factor) + 1; that is up to the attention
                                          layer). Only one of them, or 0, has no effect, as in transformers
        truncate                          round the two pair indices outwards to integers (yarn: True)
        short_factor, long_factor         divisors of the frequencies up to and beyond the original length (longrope)
        low_freq_factor, high_freq_factor as beta_slow and beta_fast, for llama3

    ``dynamic`` and ``longrope`` depend on the sequence length: the largest position of the keys plus 1, per sequence,
    without any state, so that decoding with a cache of unrotated keys equals a pass over the whole sequence.
    transformers takes the longest sequence of a batch, and for ``dynamic`` the longest so far. Positions shared by all
    sequences or by documents packed in one row have one length, with padding. `kernel` is that of ``max_len`` tokens.
    """

    citation = "Chen et al. 2023, arXiv 2306.15595; Peng et al. 2023, arXiv 2309.00071"
    formula = r"m^2\, " + ROTATION_FORMULA
    only_type: ClassVar[str | None] = None  # the single type of a subclass, with different defaults
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, **arguments: Any) -> None:
        arguments = {name: value for name, value in arguments.items() if value is not None}
        arguments = {"pairing": "half"} | self.defaults | arguments
        legacy_type, rope_type = arguments.pop("type", None), arguments.pop("rope_type", None)
        if rope_type is not None and legacy_type is not None and rope_type != legacy_type:
            raise invalid("type", f"be the same as rope_type, {rope_type!r}", legacy_type)
        rope_type = rope_type or legacy_type or self.only_type or "default"
        if self.only_type not in (None, rope_type):
            raise invalid("rope_type", f"be {self.only_type!r} for this encoding", rope_type)
        choose("rope_type", rope_type, RULES)
        check_arguments(self.options(), arguments)
        kit.require_even("head_dim", arguments["head_dim"])
        rope = BaseRoPE(
            arguments["head_dim"],
            base=arguments.pop("rope_theta", 10000.0),
            partial_factor=arguments.pop("partial_rotary_factor", 1.0),
            max_positions=arguments.pop("max_position_embeddings", max(1, arguments["max_len"])),
        )
        options = {name: arguments.pop(name) for name in RULE_OPTIONS if name in arguments}
        scaled = apply_rule(rope_type, self.complete_options(options, rope), rope)
        super().__init__(scaled.frequencies.unsqueeze(0), **arguments)
        self.rope_type, self.magnitude = rope_type, scaled.magnitude
        self.original_length, self.base_growth = scaled.original_length, scaled.base_growth
        self.length_dependent = scaled.base_growth is not None or scaled.long_frequencies is not None
        if scaled.long_frequencies is not None:
            self.long_frequencies = self.register_exact("long_frequencies", scaled.long_frequencies.unsqueeze(0))

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        defaults = {name: value for name, (value, _) in COMMON_OPTIONS.items()}
        defaults |= {"rope_type": cls.only_type} | cls.defaults
        hints = {name: hint | None for name, (_, hint) in COMMON_OPTIONS.items()} | RULE_OPTIONS
        *first, last = COMMON_OPTIONS
        kind, rope = inspect.Parameter.KEYWORD_ONLY, {}
        for name in (*first, *(rule_options(cls.only_type) if cls.only_type else RULE_OPTIONS), last):
            rope[name] = inspect.Parameter(name, kind, default=defaults.get(name), annotation=hints[name])
        return rope | {name: option for name, option in super().options().items() if name not in rope}

    def complete_options(self, options: dict[str, Any], rope: BaseRoPE) -> dict[str, Any]:
        """The rule's options, with defaults that a subclass derives from the sizes."""
        return options

    def frequencies_at(self, k_positions: Positions) -> Frequencies:
        if not self.length_dependent:
            return self.frequencies
        length = sequence_length(k_positions).to(torch.float64)[..., None, None]
        if self.base_growth is not None:
            factor = self.base_growth * length / self.original_length - (self.base_growth - 1)
            return ntk_frequencies(self.frequencies, factor.clamp(min=1))
        return torch.where(length > self.original_length, self.long_frequencies, self.frequencies)


class LinearRoPE(ScaledRoPE, name="rope-linear"):
    """Position interpolation: theta_t / s (Chen et al. 2023, section 2.3).

    ``factor`` s (default: 4, the paper's step from 2048 to 8192 tokens).
    """

    citation = "Chen et al. 2023, arXiv 2306.15595, section 2.3"
    formula = ROTATION_FORMULA + r",\ \theta'_t = \theta_t / s"
    only_type = "linear"
    defaults: ClassVar = {"factor": 4.0}


class NTKRoPE(ScaledRoPE, name="rope-ntk"):
    """NTK-aware scaling: base s^(d/(d-2)), which divides theta_t by s^(2t/(d-2)) (Peng et al. 2023, 3.1).

    The first frequency is unchanged, the last is divided by s, those between by a power of s. First described by the
    user bloc97 on Reddit. ``factor`` s (default: 4, our choice); the other options as in `ScaledRoPE`.
    """

    citation = "Peng et al. 2023, arXiv 2309.00071, section 3.1"
    formula = ROTATION_FORMULA + r",\ \theta'_t = \theta_t s^{-2t/(d-2)}"
    only_type = "ntk"
    defaults: ClassVar = {"factor": 4.0}


class DynamicRoPE(ScaledRoPE, name="rope-dynamic"):
    """NTK-aware scaling by the sequence length l: s = a l/N - (a - 1), and 1 for l below N (Peng et al. 2023, 3.3).

    N is ``max_position_embeddings``, the training length (default: ``max_len``, so that only longer sequences are
    scaled). ``factor`` a (default: 1, which is the paper's s = l/N); models in transformers set other values.
    """

    citation = "Peng et al. 2023, arXiv 2309.00071, section 3.3"
    formula = ROTATION_FORMULA + r",\ \theta'_t = \theta_t s^{-2t/(d-2)},\ s = \max(1, a\ell/N - a + 1)"
    length_dependent = True
    only_type = "dynamic"
    defaults: ClassVar = {"factor": 1.0}


class YaRN(ScaledRoPE, name="rope-yarn"):
    """YaRN: pairs with many rotations are kept, others slowed by s, and logits scaled up (Peng et al. 2023, 3.2-3.4).

    ``beta_fast`` 32, ``beta_slow`` 1 and the factor 0.1 ln s + 1 of queries and keys are the paper's. The ramp between
    the two rotation counts is linear in the pair's index, as in the paper's code and in transformers; in the paper it
    is linear in the number of rotations. ``factor`` s is ``max_position_embeddings`` /
    ``original_max_position_embeddings``. Either may be omitted; without both, s is about 4 (our choice).
    """

    citation = "Peng et al. 2023, arXiv 2309.00071"
    formula = r"m^2\, " + ROTATION_FORMULA + r",\ \theta'_t = \theta_t (\gamma_t + (1-\gamma_t)/s),\ m = 0.1 \ln s + 1"
    only_type = "yarn"
    defaults: ClassVar = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}

    def complete_options(self, options: dict[str, Any], rope: BaseRoPE) -> dict[str, Any]:
        return {"original_max_position_embeddings": _original_length(options, rope), **options}


class LongRoPE(ScaledRoPE, name="rope-longrope"):
    """LongRoPE: a divisor per frequency, with one list up to the original length and one beyond (Ding et al. 2024).

    The lists result from a search on a trained model, so there are no published defaults. Ours are 1 up to the
    original length, and beyond it the NTK-aware s^(2t/(d-2)), one of the three starting points of the paper's search.
    ``factor`` and ``original_max_position_embeddings`` as in `YaRN`. Queries and keys are multiplied by
    sqrt(1 + ln s / ln N) at all lengths, as in Phi-3. The paper also leaves the first tokens unscaled; Phi-3,
    transformers and this class do not.
    """

    citation = "Ding et al. 2024, arXiv 2402.13753"
    formula = r"m^2\, " + ROTATION_FORMULA + r",\ \theta'_t = \theta_t / \lambda_t(\ell),\ m^2 = 1 + \ln s / \ln N"
    length_dependent = True
    only_type = "longrope"

    def complete_options(self, options: dict[str, Any], rope: BaseRoPE) -> dict[str, Any]:
        original = _original_length(options, rope)
        ones = torch.ones_like(rope.frequencies)
        return {
            "original_max_position_embeddings": original,
            "short_factor": ones.tolist(),
            "long_factor": (1 / ntk_frequencies(ones, options.get("factor", rope.max_positions / original))).tolist(),
            **options,
        }


def _original_length(options: dict[str, Any], rope: BaseRoPE) -> int:
    """The original length: as given, or the maximum length divided by the factor."""
    return options.get("original_max_position_embeddings", max(2, int(rope.max_positions / options.get("factor", 4))))


class Llama3RoPE(ScaledRoPE, name="rope-llama3"):
    """Llama 3.1's scaling: pairs with over 4 rotations in 8192 tokens are kept, with less than 1 divided by 8.

    Pairs between are interpolated. All defaults, including the base, are Llama 3.1's; other options as in `ScaledRoPE`.
    """

    citation = "Grattafiori et al. 2024, arXiv 2407.21783"
    formula = (
        ROTATION_FORMULA + r",\ \theta'_t = \theta_t (\gamma_t + (1-\gamma_t)/8),"
        r"\ \gamma_t = \mathrm{clip}\bigl((N\theta_t/2\pi - 1)/(4 - 1), 0, 1\bigr)"
    )
    only_type = "llama3"
    defaults: ClassVar = {
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


class ProportionalRoPE(ScaledRoPE, name="rope-proportional"):
    """The highest share of RoPE's frequencies, spread as over the whole head, and 0 for the rest (Barbero et al. 2024).

    Defaults are those of Gemma 4's global layers: ``partial_rotary_factor`` 0.25 and ``rope_theta`` 1,000,000.
    ``factor`` divides the kept frequencies (default: 1).
    """

    citation = "Barbero et al. 2024, arXiv 2410.06205"
    formula = ROTATION_FORMULA + r",\ \theta'_t = \theta_t\, [t < p d/2]"
    only_type = "proportional"
    defaults: ClassVar = {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "factor": 1.0}


class CLEX(RoPE, name="clex"):
    """Continuous length extrapolation: log theta as a function of the length's scale t (Chen et al. 2023, section 3).

    At t = 1 the frequencies are RoPE's. From there d log theta / dt = W_down a(W_up (log theta + log theta_NTK(t))) +
    d log theta_NTK / dt, with theta_NTK NTK-aware scaling by 2t - 1. The NTK part is added exactly, and the learned
    part is integrated by the classical Runge-Kutta method in float64. W_down starts at zero (so W_up has no gradient at
    first), and CLEX starts as NTK-aware scaling. One instance serves all layers, as published.

    The scale is ceil(l / N), at most ``max_factor``, where l is the largest position of the keys plus 1, per sequence,
    without any state. `kernel` is that of ``max_len`` tokens. Frequencies are taken modulo 2 pi: equivalent for integer
    positions, and exact for large ones.

    In training, sequences of n tokens are treated as sequences of n t tokens, with t drawn from 1..max_factor once per
    pass: `to_positions` draws increasing positions, without replacement, from 0 to n t - 1. Explicit positions are not
    affected. Differences from the authors' code: its t is the drawn one, ours follows from the positions (the same for
    sequences of N tokens); for sequences over N, whose positions the code divides, positions end at N t - 1 or, if that
    is too few, are token indices; the NTK part of the equation's input uses our ``base``, not always 10000.

    Arguments
        max_factor    largest scale t
        param_factor  inner width of the learned map, relative to the head dimension
        act           its activation a: ``tanh`` (the code's default) or ``silu`` (the paper's)
        steps         integration steps from one integer t to the next (the code: 100, in float32). 2 are within 1e-5 of
                      the exact log theta if W_down changes it by up to 4 in total, and 4 within 1e-6
        max_position_embeddings  the training length N (default: ``max_len``)
        base, pairing as in RoPE, but the default layout is Llama's, as in the code
    """

    citation = "Chen et al. 2023, arXiv 2310.16450"
    formula = (
        ROTATION_FORMULA + r",\ \theta' = e^{z(t)},\ z(1) = \log\theta,"
        r"\ \dot z = W_2\, a(W_1 (z + \log\theta^{\mathrm{NTK}}(t))) + \tfrac{d}{dt} \log\theta^{\mathrm{NTK}}(t)"
    )
    length_dependent = True

    def __init__(
        self,
        *,
        max_factor: PositiveInt = 16,
        param_factor: PositiveInt = 1,
        act: Literal["tanh", "silu"] = "tanh",
        steps: PositiveInt = 2,
        max_position_embeddings: PositiveInt | None = None,
        pairing: Pairing = "half",
        **inherited: Any,
    ) -> None:
        train_length = max(1, inherited["max_len"]) if max_position_embeddings is None else max_position_embeddings
        super().__init__(pairing=pairing, **inherited)
        self.max_factor, self.steps, self.train_length = max_factor, steps, train_length
        self.act = act
        pairs, inner = self.head_dim // 2, param_factor * self.head_dim
        self.up = self.new_parameter((pairs, inner), partial(nn.init.kaiming_uniform_, a=math.sqrt(5)))
        self.down = self.new_parameter((inner, pairs), nn.init.zeros_)
        self.share = self.register_exact("share", torch.linspace(0, 1, pairs, dtype=torch.float64))

    def to_positions(self, tokens: Int[Tensor, "*B N"]) -> Positions:
        """Token indices; in training, increasing positions of a sequence up to ``max_factor`` times as long."""
        length = tokens.shape[-1]
        if not self.training or length < 2:
            return tokens
        limit = self.max_factor * min(length, self.train_length)
        times = torch.randint(1, self.max_factor + 1, (), device=tokens.device)
        last = (times * min(length, self.train_length)).clamp(min=length) - 1
        between = torch.arange(1, max(length, limit) - 1, device=tokens.device)
        order = torch.rand(between.shape, device=tokens.device).masked_fill(between >= last, math.inf)
        inner = between[order.topk(length - 2, largest=False).indices].sort().values
        drawn = torch.cat((torch.zeros_like(last)[None], inner, last[None]))
        return tokens + (drawn - torch.arange(length, device=tokens.device))

    def frequencies_at(self, k_positions: Positions) -> Frequencies:
        kit.require_integers("CLEX", k_positions)
        scale = ((sequence_length(k_positions) + self.train_length - 1) // self.train_length).clamp(max=self.max_factor)
        is_readable = scale.device.type == "cpu" and not torch.compiler.is_compiling() and scale.numel() > 0
        table = self.frequency_table(int(scale.max()) if is_readable else self.max_factor)
        return F.embedding(scale - 1, table).remainder(2 * math.pi).unsqueeze(-2)

    def frequency_table(self, largest: int) -> Float[Tensor, "largest n"]:
        """The frequencies at t = 1, 2, ..., ``largest``."""
        up, down = self.up.to(torch.float64), self.down.to(torch.float64)
        activation = torch.tanh if self.act == "tanh" else F.silu
        log_frequencies = self.frequencies.log()

        def ntk(t: float) -> Tensor:
            return -self.share * math.log(2 * t - 1)

        def slope(t: float, learned_part: Tensor) -> Tensor:
            return activation((2 * (log_frequencies + ntk(t)) + learned_part) @ up) @ down

        learned_part, step = torch.zeros_like(log_frequencies), 1 / self.steps
        rows = [learned_part]
        for n in range(self.steps * (largest - 1)):
            t = 1 + n * step
            first = slope(t, learned_part)
            second = slope(t + step / 2, learned_part + step / 2 * first)
            third = slope(t + step / 2, learned_part + step / 2 * second)
            fourth = slope(t + step, learned_part + step * third)
            learned_part = learned_part + step / 6 * (first + 2 * second + 2 * third + fourth)
            if (n + 1) % self.steps == 0:
                rows.append(ntk(2 + n // self.steps) + learned_part)
        return self.frequencies * torch.cat(rows).exp()


_COMMON_TO_TYPES = (*SIZES, "pairing")  # the same for all layer types


class ConfiguredRoPE(ScaledRoPE, name="scaled-rope"):
    """The rotation of a transformers model, from its configuration's ``rope_parameters``.

    ``build("scaled-rope", max_len=config.max_position_embeddings, layer_types=config.layer_types, **sizes,
    **config.rope_parameters)``. ``layer_types`` is only needed if the parameters are nested by layer type. Each type's
    parameters are then under its name, or None if it has no rotation. All layers must have the same head size.

    Arguments in addition to those of `ScaledRoPE`
        layer_types           the type of each layer
        mrope_section         pairs of time, height and width, as in `MRoPE`; positions have these three coordinates
        mrope_interleaved     alternate the axes, as Qwen3-VL's code does even if its configuration does not say so
        llama_4_scaling_beta  queries are multiplied by 1 + beta ln(1 + floor(i / original_max_position_embeddings))
                              after the rotation (Ministral 3, after Llama 4's temperature)

        short_mscale, long_mscale  factors of queries and keys up to and beyond the original length, instead of
                              ``attention_factor`` (longrope: Phi-3.5-MoE)
        alpha                 instead of ``factor``: growth of the base at all lengths, as in ``ntk`` (dynamic: Hunyuan)
        attn_factor, finetuned  ignored with a warning, as in transformers; so are keywords of other types

    As in transformers, ``rope_type`` takes precedence over ``type``. The original length defaults to
    ``max_position_embeddings``, and a ``beta_fast`` or ``beta_slow`` of 0 means the default. The ``type`` ``mrope`` of
    Qwen2-VL's configurations is ``default``, and Phi-3's ``su`` is ``longrope``. The type ``axial`` of vision models is
    not supported, because each model's code implements it differently; see `AxialRoPE`.
    """

    temperature: float = 0.0
    step: float = 1.0  # positions per step of the temperature
    layer_types: tuple[str, ...] = ()
    mscales: tuple[float, float] | None = None  # up to the original length, and beyond

    def __init__(
        self,
        *,
        layer_types: Sequence[str] | None = None,
        mrope_section: Sequence[int] | None = None,
        mrope_interleaved: bool | None = None,
        llama_4_scaling_beta: NonNegative | None = None,
        short_mscale: Positive | None = None,
        long_mscale: Positive | None = None,
        alpha: Positive | None = None,
        attn_factor: float | None = None,
        finetuned: bool | None = None,
        **parameters: Any,
    ) -> None:
        types = () if layer_types is None else tuple(layer_types)
        nested = [name for name, value in parameters.items() if name in types or isinstance(value, Mapping)]
        if nested:
            if not types:
                raise InputError(f"layer_types must be set with parameters by layer type ({nested[0]!r}).")
            by_type = {name: parameters.pop(name) for name in nested}
            flat = {"mrope_section": mrope_section, "llama_4_scaling_beta": llama_4_scaling_beta, **parameters}
            self._build_types(types, by_type, flat)
            return
        extra = {"short_mscale": short_mscale, "long_mscale": long_mscale, "alpha": alpha}
        extra |= {"attn_factor": attn_factor, "finetuned": finetuned}
        original = parameters.get("original_max_position_embeddings")  # which llama_4_scaling_beta reads
        used, mscales = _hf_parameters(parameters, extra, reads_original=llama_4_scaling_beta is not None)
        super().__init__(**used)
        if mscales is not None:
            self.mscales = mscales
            self.magnitude = mscales[self.max_len > self.original_length]
        if mrope_section is not None:
            axis_of = axes_of_pairs("mrope_section", mrope_section, self.frequencies.shape[-1], bool(mrope_interleaved))
            self.axes = 3
            self.axis_of = self.register_exact("axis_of", torch.tensor(axis_of))
        if llama_4_scaling_beta is not None:
            self.temperature = llama_4_scaling_beta
            step = used.get("original_max_position_embeddings", original)
            if step is None:
                raise InputError("llama_4_scaling_beta needs original_max_position_embeddings.")
            if self.axes > 1:
                raise InputError("llama_4_scaling_beta must not be set with mrope_section.")
            self.step, self.toeplitz = step, self.temperature == 0

    def _build_types(
        self, layer_types: tuple[str, ...], by_type: Mapping[str, Mapping[str, Any] | None], flat: dict[str, Any]
    ) -> None:
        """Build one rotation per layer type; this instance takes the first type that has a rotation."""
        common = {name: flat.pop(name) for name in _COMMON_TO_TYPES if name in flat}
        misplaced = next((name for name, value in flat.items() if value is not None), None)
        if misplaced is not None:
            raise InputError(f"{misplaced} must not be set with parameters by layer type.")
        for layer, kind in enumerate(layer_types):
            if kind not in by_type:
                raise InputError(f"layer_types: layer {layer} has type {kind!r}, which has no parameters.")
        rotated = {kind: dict(options) for kind in dict.fromkeys(layer_types) if (options := by_type[kind]) is not None}
        if not rotated:
            raise InputError("layer_types: no layer type has parameters. Use encoding 'nope'.")
        first = next(iter(rotated))
        ConfiguredRoPE.__init__(self, **common, **rotated[first])
        self.layer_types, self.first_type = layer_types, first
        self.others = nn.ModuleDict(
            {kind: ConfiguredRoPE(**common, **parameters) for kind, parameters in rotated.items() if kind != first}
        )
        if any(other.axes != self.axes for other in self.others.values()):
            raise InputError("mrope_section must be set for all layer types or for none.")
        self.toeplitz = all(rotation.toeplitz for rotation in (self, *self.others.values()))
        if len(rotated) < len(set(layer_types)):
            self.layers = frozenset(layer for layer, kind in enumerate(layer_types) if kind in rotated)

    def for_layer(self, layer: int) -> PositionalEncoding:
        if not self.layer_types:
            return self
        if layer >= len(self.layer_types):
            must = f"have an entry for layer {layer}, counted from 0"
            raise invalid("layer_types", must, got=f"{len(self.layer_types)} entries")
        kind = self.layer_types[layer]
        if kind == self.first_type:
            return self
        return cast(ConfiguredRoPE, self.others[kind]) if kind in self.others else NoPE(**self.sizes)

    def to_positions(self, tokens: Int[Tensor, "*B N"]) -> Positions:
        """Token indices; with ``mrope_section``, three equal coordinates as for text."""
        return tokens if self.axes == 1 else tokens.unsqueeze(-1).expand(*tokens.shape, self.axes)

    def frequencies_at(self, k_positions: Positions) -> Frequencies:
        return super().frequencies_at(self._largest_coordinate(k_positions))

    def phases(self, positions: Positions, frequencies: Frequencies) -> Float[Tensor, "*B H N n"]:
        if self.axes == 1 or positions.ndim == 1:
            return super().phases(positions, frequencies)
        return axis_phases(positions.to(torch.float64), self.axis_of, frequencies)

    def _largest_coordinate(self, positions: Positions) -> Positions:
        """Of a position's coordinates."""
        return positions if self.axes == 1 or positions.ndim == 1 else positions.amax(-1)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> RotatedQK:
        q, k = super().rotate(q, k, q_positions, k_positions)
        if self.mscales is not None and self.mscales[0] != self.mscales[1]:
            short, long = (mscale / self.magnitude for mscale in self.mscales)
            is_long = sequence_length(self._largest_coordinate(k_positions)) > self.original_length
            factor = torch.where(is_long, long, short)[..., None, None, None]
            q, k = (x * factor.to(x.dtype) for x in (q, k))
        if not self.temperature:
            return q, k
        steps = torch.div(q_positions, self.step, rounding_mode="floor").to(kit.wide_dtype(q.dtype))
        factor = (1 + self.temperature * steps.log1p()).unsqueeze(-1).unsqueeze(-3)
        return (q.to(factor.dtype) * factor).to(q.dtype), k

    def kernel(self, offsets: Int[Tensor, "D *axes"]) -> Complex[Tensor, "H n D"] | None:
        """The first layer type's kernel at offsets [D] or [D, axes]; None with a temperature."""
        return None if self.temperature else super().kernel(offsets)


def _hf_parameters(
    parameters: Mapping[str, Any], extra_options: Mapping[str, Any], *, reads_original: bool
) -> tuple[dict[str, Any], tuple[float, float] | None]:
    """The parameters that transformers uses, with its defaults, and longrope's two factors; warns about the others.

    Arguments
        extra_options   parameters that `ScaledRoPE` does not take
        reads_original  whether one of them reads the original length, whatever the type
    """
    arguments = {name: value for name, value in parameters.items() if value is not None}
    rope_type, legacy_type = arguments.get("rope_type"), arguments.pop("type", None)
    kind = {"mrope": "default", "su": "longrope"}.get(rope_type or legacy_type, rope_type or legacy_type or "default")
    arguments["rope_type"] = kind
    extra = {name: value for name, value in extra_options.items() if value is not None}
    mscales = None
    if kind == "longrope" and {"short_mscale", "long_mscale"} & extra.keys():
        if not {"short_mscale", "long_mscale"} <= extra.keys():
            raise InputError("short_mscale and long_mscale must be set together.")
        mscales = extra.pop("short_mscale"), extra.pop("long_mscale")
        arguments["attention_factor"] = mscales[1]
    if kind == "dynamic" and "alpha" in extra:
        arguments |= {"rope_type": "ntk", "factor": extra.pop("alpha")}
    known_options = rule_options(arguments["rope_type"]) if arguments["rope_type"] in RULES else RULE_OPTIONS
    ignored = [name for name in arguments if name in RULE_OPTIONS and name not in known_options] + list(extra)
    if legacy_type not in (None, "mrope", rope_type) and rope_type is not None:
        ignored.append("type")
    ignored = [name for name in ignored if not (reads_original and name == "original_max_position_embeddings")]
    if ignored:
        verb = "is not used by it and is" if len(ignored) == 1 else "are not used by it and are"
        warnings.warn(f"rope type {kind!r}: {', '.join(ignored)} {verb} ignored, as in transformers.", stacklevel=3)
    if "original_max_position_embeddings" in known_options:
        length = arguments.get("max_position_embeddings", arguments["max_len"])
        arguments.setdefault("original_max_position_embeddings", length)
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        if not arguments.get(name, default):
            arguments[name] = default
    known = {name: value for name, value in arguments.items() if name in known_options or name not in RULE_OPTIONS}
    return known, mscales
