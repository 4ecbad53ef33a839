"""RoPE scaled to longer contexts, with the keywords of transformers' rope parameters, so that model configs fit.

In this file the default pairing is ``half``, the layout of the models with such configs.
"""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.kit import require_count, require_even, require_whole
from toeplens.encodings.rotary import Pairing, RoPE, Rotary
from toeplens.encodings.scaling import (
    COMMON,
    RULES,
    Start,
    apply,
    check,
    every_keyword,
    keywords,
    kind_of,
    length_of,
    slowed,
)
from toeplens.encodings.shapes import Frequencies, Positions
from toeplens.ground import choose, invalid

TURNED = r"\mathrm{Re} \sum_t q_{i,t}\, \overline{k_{j,t}}\, e^{\mathrm{i}\delta\theta'_t}"


class ScaledRoPE(Rotary):
    """RoPE with frequencies lowered by a published rule, so that longer sequences reuse the angles of shorter ones.

    Takes the keywords of transformers' ``rope_parameters`` (or the older ``rope_scaling``) under the same names. For a
    model's full configuration use `ConfiguredRoPE`. A keyword that the type does not take raises an error here, and is
    ignored with a warning there. None is the same as not given.

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
    without any state. transformers instead takes the longest sequence of a batch, and for
    ``dynamic`` keeps the longest length so far. Only without state does decoding with a cache of unrotated keys
    equal a pass over the whole sequence. Positions shared by all sequences, and those of
    documents packed in one row, have one length, which includes padding and the other documents. `kernel` is that of
    ``max_len`` tokens.
    """

    citation = "Chen et al. 2023, arXiv 2306.15595; Peng et al. 2023, arXiv 2309.00071"
    formula = r"m^2\, " + TURNED
    only: ClassVar[str | None] = None  # the single type of a subclass, with different defaults
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, **given: Any) -> None:
        given = {"pairing": "half"} | self.defaults | {n: value for n, value in given.items() if value is not None}
        older, chosen = given.pop("type", None), given.pop("rope_type", None)
        if chosen is not None and older is not None and chosen != older:
            raise invalid("type", f"be the same as rope_type, {chosen!r}", older)
        chosen = chosen or older or self.only or "default"
        if self.only not in (None, chosen):
            raise invalid("rope_type", f"be {self.only!r} for this encoding", chosen)
        choose("rope_type", chosen, RULES)
        require_even("head_dim", given["head_dim"])
        start = Start(
            given["head_dim"],
            base=given.pop("rope_theta", COMMON["rope_theta"]),
            share=given.pop("partial_rotary_factor", COMMON["partial_rotary_factor"]),
            longest=given.pop("max_position_embeddings", max(1, given["max_len"])),
        )
        options = {name: given.pop(name) for name in every_keyword() if name in given}
        check(chosen, options, start)
        scaled = apply(chosen, self.complete(options, start), start)
        super().__init__(scaled.frequencies.unsqueeze(0), **given)
        self.rope_type, self.magnitude = chosen, scaled.magnitude
        self.until, self.growth = scaled.until, scaled.growth
        self.length_dependent = scaled.growth is not None or scaled.beyond is not None
        if scaled.beyond is not None:
            self.beyond = self.register_exact("beyond", scaled.beyond.unsqueeze(0))

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        defaults = COMMON | {"rope_type": cls.only} | cls.defaults
        kind = inspect.Parameter.KEYWORD_ONLY
        first, last = list(COMMON)[:-1], list(COMMON)[-1]
        names = (*first, *(keywords(cls.only) if cls.only else every_keyword()), last)
        rope = {
            name: inspect.Parameter(name, kind, default=defaults.get(name), annotation=kind_of(name)) for name in names
        }
        return rope | {name: own for name, own in super().options().items() if name not in rope}

    def complete(self, options: dict[str, Any], start: Start) -> dict[str, Any]:
        """The rule's options, with defaults that a subclass derives from the sizes."""
        return options

    def frequencies_at(self, k_positions: Positions) -> Frequencies:
        if not self.length_dependent:
            return self.frequencies
        length = length_of(k_positions).to(torch.float64)[..., None, None]
        if self.growth is not None:
            return slowed(self.frequencies, (self.growth * length / self.until - (self.growth - 1)).clamp(min=1))
        return torch.where(length > self.until, self.beyond, self.frequencies)


class LinearRoPE(ScaledRoPE):
    """Position interpolation: theta_t / s (Chen et al. 2023, section 2.3).

    ``factor`` s (default: 4, the paper's step from 2048 to 8192 tokens); the other options as in `ScaledRoPE`.
    """

    citation = "Chen et al. 2023, arXiv 2306.15595, section 2.3"
    formula = TURNED + r",\ \theta'_t = \theta_t / s"
    only = "linear"
    defaults: ClassVar = {"factor": 4.0}


class NTKRoPE(ScaledRoPE):
    """NTK-aware scaling: base s^(d/(d-2)), which divides theta_t by s^(2t/(d-2)) (Peng et al. 2023, 3.1).

    The first frequency is unchanged, the last is divided by s, those between by a power of s. First described by the
    user bloc97 on Reddit. ``factor`` s (default: 4, our choice); the other options as in `ScaledRoPE`.
    """

    citation = "Peng et al. 2023, arXiv 2309.00071, section 3.1"
    formula = TURNED + r",\ \theta'_t = \theta_t s^{-2t/(d-2)}"
    only = "ntk"
    defaults: ClassVar = {"factor": 4.0}


class DynamicRoPE(ScaledRoPE):
    """NTK-aware scaling by the sequence length l: s = a l/N - (a - 1), and 1 for l below N (Peng et al. 2023, 3.3).

    N is ``max_position_embeddings``, the training length (default: ``max_len``, so that only longer sequences are
    scaled). ``factor`` a (default: 1, which is the paper's s = l/N); models in transformers
    set other values. See `ScaledRoPE` for the length, `kernel` and the other options.
    """

    citation = "Peng et al. 2023, arXiv 2309.00071, section 3.3"
    formula = TURNED + r",\ \theta'_t = \theta_t s^{-2t/(d-2)},\ s = \max(1, a\ell/N - a + 1)"
    length_dependent = True
    only = "dynamic"
    defaults: ClassVar = {"factor": 1.0}


class YaRN(ScaledRoPE):
    """YaRN: pairs with many rotations are kept, others slowed by s, and logits scaled up (Peng et al. 2023, 3.2-3.4).

    ``beta_fast`` 32, ``beta_slow`` 1 and the factor 0.1 ln s + 1 of queries and keys are the paper's. The ramp between
    the two rotation counts is linear in the pair's index, as in the paper's code and in transformers; in the paper it
    is linear in the number of rotations. ``factor`` s is ``max_position_embeddings`` /
    ``original_max_position_embeddings``. Either may be omitted; without both, s is 4 (our choice). The other options as
    in `ScaledRoPE`.
    """

    citation = "Peng et al. 2023, arXiv 2309.00071"
    formula = r"m^2\, " + TURNED + r",\ \theta'_t = \theta_t (\gamma_t + (1-\gamma_t)/s),\ m = 0.1 \ln s + 1"
    only = "yarn"
    defaults: ClassVar = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}

    def complete(self, options: dict[str, Any], start: Start) -> dict[str, Any]:
        return {"original_max_position_embeddings": _trained_on(options, start), **options}


class LongRoPE(ScaledRoPE):
    """LongRoPE: a divisor per frequency, with one list up to the original length and one beyond (Ding et al. 2024).

    The lists result from a search on a trained model, so there are no published defaults. Ours are 1 up to the
    original length, and beyond it the NTK-aware s^(2t/(d-2)), one of the three starting points of the paper's search.
    ``factor`` and ``original_max_position_embeddings`` as in `YaRN`. Queries and keys are multiplied by
    sqrt(1 + ln s / ln N) at all lengths, as in Phi-3. The paper also leaves the first tokens unscaled; Phi-3,
    transformers and this class do not. See `ScaledRoPE` for the length, `kernel` and the other options.
    """

    citation = "Ding et al. 2024, arXiv 2402.13753"
    formula = r"m^2\, " + TURNED + r",\ \theta'_t = \theta_t / \lambda_t(\ell),\ m^2 = 1 + \ln s / \ln N"
    length_dependent = True
    only = "longrope"

    def complete(self, options: dict[str, Any], start: Start) -> dict[str, Any]:
        original = _trained_on(options, start)
        ones = torch.ones_like(start.frequencies)
        return {
            "original_max_position_embeddings": original,
            "short_factor": ones.tolist(),
            "long_factor": (1 / slowed(ones, options.get("factor", start.longest / original))).tolist(),
            **options,
        }


def _trained_on(options: dict[str, Any], start: Start) -> int:
    """The original length: as given, or the maximum length divided by the factor."""
    return options.get("original_max_position_embeddings", max(2, int(start.longest / options.get("factor", 4))))


class Llama3RoPE(ScaledRoPE):
    """Llama 3.1's scaling: pairs with over 4 rotations in 8192 tokens are kept, with less than 1 divided by 8.

    Pairs between are interpolated. All defaults, including the base, are Llama 3.1's; other options as in `ScaledRoPE`.
    """

    citation = "Grattafiori et al. 2024, arXiv 2407.21783"
    formula = (
        TURNED + r",\ \theta'_t = \theta_t (\gamma_t + (1-\gamma_t)/8),"
        r"\ \gamma_t = \mathrm{clip}\bigl((N\theta_t/2\pi - 1)/(4 - 1), 0, 1\bigr)"
    )
    only = "llama3"
    defaults: ClassVar = {
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


class ProportionalRoPE(ScaledRoPE):
    """The highest share of RoPE's frequencies, spread as over the whole head, and 0 for the rest (Barbero et al. 2024).

    Defaults are those of Gemma 4's global layers: ``partial_rotary_factor`` 0.25 and ``rope_theta`` 1,000,000.
    ``factor`` divides the kept frequencies (default: 1). The other options as in `ScaledRoPE`.
    """

    citation = "Barbero et al. 2024, arXiv 2410.06205"
    formula = TURNED + r",\ \theta'_t = \theta_t\, [t < p d/2]"
    only = "proportional"
    defaults: ClassVar = {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "factor": 1.0}


class CLEX(RoPE):
    """Continuous length extrapolation: log theta as a function of the length's scale t (Chen et al. 2023, section 3).

    At t = 1 the frequencies are RoPE's. From there d log theta / dt = W_down a(W_up (log theta + log theta_NTK(t))) +
    d log theta_NTK / dt, with theta_NTK NTK-aware scaling by 2t - 1. The NTK part is added exactly, and the learned
    part is integrated by the classical Runge-Kutta method in float64. W_down starts at zero (so W_up has no gradient at
    first), and CLEX starts as NTK-aware scaling. One instance serves all layers, as published.

    The scale is ceil(l / N), at most ``max_factor``, where l is the largest position of the keys plus 1, per
    sequence. There is no state, so decoding with a cache of unrotated keys equals a pass over the whole sequence.
    `kernel` is that of ``max_len`` tokens. Nothing keeps frequencies below 2 pi; they are taken modulo 2 pi, which is
    equivalent for integer positions, and exact for large ones.

    In training, sequences of n tokens are treated as sequences of n t tokens, with t drawn from 1..max_factor once per
    pass: `place` gives them increasing positions, drawn without replacement, from 0 to n t - 1. Evaluation and explicit
    positions are not affected. There are three differences from the authors' code. Its t is the drawn one; here t
    always follows from the positions, which is the same for sequences of N tokens. For sequences over N, whose
    positions the code divides, positions end at N t - 1 or, if that is too few, are token indices. And the NTK part of
    the equation's input uses our ``base``, where the code always uses 10000.

    Arguments
        max_factor    largest scale t
        param_factor  inner width of the learned map, relative to the head dimension
        act           its activation a: ``tanh`` (the code's default) or ``silu`` (the paper's)
        steps         integration steps from one integer t to the next. The code takes 100 (its ``time_dt`` is
                      0.01), in float32; 2 are within 1e-5 of the exact log theta if W_down changes it by up to 4 in
                      total, and 4 within 1e-6
        max_position_embeddings  the training length N (default: ``max_len``)
        base, pairing as in RoPE, but the default layout is Llama's, as in the code
    """

    citation = "Chen et al. 2023, arXiv 2310.16450"
    formula = (
        TURNED + r",\ \theta' = e^{z(t)},\ z(1) = \log\theta,"
        r"\ \dot z = W_2\, a(W_1 (z + \log\theta^{\mathrm{NTK}}(t))) + \tfrac{d}{dt} \log\theta^{\mathrm{NTK}}(t)"
    )
    length_dependent = True

    def __init__(
        self,
        *,
        max_factor: int = 16,
        param_factor: int = 1,
        act: Literal["tanh", "silu"] = "tanh",
        steps: int = 2,
        max_position_embeddings: int | None = None,
        pairing: Pairing = "half",
        **inherited: Any,
    ) -> None:
        trained_on = max(1, inherited["max_len"]) if max_position_embeddings is None else max_position_embeddings
        require_count(max_factor=max_factor, param_factor=param_factor, steps=steps, max_position_embeddings=trained_on)
        super().__init__(pairing=pairing, **inherited)
        self.max_factor, self.steps, self.trained_on = max_factor, steps, trained_on
        self.act = choose("act", act, ("tanh", "silu"))
        pairs, inner = self.head_dim // 2, param_factor * self.head_dim
        self.up = self.learned((pairs, inner), partial(nn.init.kaiming_uniform_, a=math.sqrt(5)))
        self.down = self.learned((inner, pairs), nn.init.zeros_)
        self.share = self.register_exact("share", torch.linspace(0, 1, pairs, dtype=torch.float64))

    def place(self, tokens: Int[Tensor, "*B N"]) -> Positions:
        """Token indices; in training, increasing positions of a sequence up to ``max_factor`` times as long."""
        length = tokens.shape[-1]
        if not self.training or length < 2:
            return tokens
        most = self.max_factor * min(length, self.trained_on)
        times = torch.randint(1, self.max_factor + 1, (), device=tokens.device)
        last = (times * min(length, self.trained_on)).clamp(min=length) - 1
        between = torch.arange(1, max(length, most) - 1, device=tokens.device)
        order = torch.rand(between.shape, device=tokens.device).masked_fill(between >= last, math.inf)
        inner = between[order.topk(length - 2, largest=False).indices].sort().values
        drawn = torch.cat((torch.zeros_like(last)[None], inner, last[None]))
        return tokens + (drawn - torch.arange(length, device=tokens.device))

    def frequencies_at(self, k_positions: Positions) -> Frequencies:
        require_whole("CLEX", k_positions)
        scale = ((length_of(k_positions) + self.trained_on - 1) // self.trained_on).clamp(max=self.max_factor)
        look = scale.device.type == "cpu" and not torch.compiler.is_compiling() and scale.numel() > 0
        table = self.by_scale(int(scale.max()) if look else self.max_factor)
        return F.embedding(scale - 1, table).remainder(2 * math.pi).unsqueeze(-2)

    def by_scale(self, largest: int) -> Float[Tensor, "largest n"]:
        """The frequencies at t = 1, 2, ..., ``largest``."""
        up, down = self.up.to(torch.float64), self.down.to(torch.float64)
        activation = torch.tanh if self.act == "tanh" else F.silu
        start = self.frequencies.log()

        def ntk(t: float) -> Tensor:
            return -self.share * math.log(2 * t - 1)

        def slope(t: float, learned: Tensor) -> Tensor:
            return activation((2 * (start + ntk(t)) + learned) @ up) @ down

        learned, step = torch.zeros_like(start), 1 / self.steps
        rows = [learned]
        for n in range(self.steps * (largest - 1)):
            t = 1 + n * step
            first = slope(t, learned)
            second = slope(t + step / 2, learned + step / 2 * first)
            third = slope(t + step / 2, learned + step / 2 * second)
            fourth = slope(t + step, learned + step * third)
            learned = learned + step / 6 * (first + 2 * second + 2 * third + fourth)
            if (n + 1) % self.steps == 0:
                rows.append(ntk(2 + n // self.steps) + learned)
        return self.frequencies * torch.cat(rows).exp()


ENCODINGS = {
    "rope-linear": LinearRoPE,
    "rope-ntk": NTKRoPE,
    "rope-dynamic": DynamicRoPE,
    "rope-yarn": YaRN,
    "rope-longrope": LongRoPE,
    "rope-llama3": Llama3RoPE,
    "rope-proportional": ProportionalRoPE,
    "clex": CLEX,
}
