"""RoPE stretched to longer texts, with the keywords of transformers' rope parameters, so that a model's config fits.

The default pairing is ``half`` in all of this file, the layout of the models whose configs these are.
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
    """RoPE whose frequencies a published rule slows down, so that a longer text fits the angles of a shorter one.

    Takes the keywords of transformers' ``rope_parameters`` (or its older ``rope_scaling``) under their own names; a
    model's own, with what else they may hold, are for `ConfiguredRoPE`. A keyword that the type does not take is
    refused, but ignored with a warning there; None is the same as not given.

    Arguments, for all types
        rope_type                 ``default`` (RoPE), ``linear``, ``dynamic``, ``yarn``, ``longrope``, ``llama3``,
                                  ``proportional``; and ``ntk``, which transformers has not
        type                      the older name of ``rope_type``
        rope_theta                RoPE's base
        partial_rotary_factor     share of each head's dimensions, from the first on, that is rotated, over which the
                                  frequencies are spread; for ``proportional``, share of the frequencies that are kept
        max_position_embeddings   the longest text, default ``max_len``; for ``dynamic``, the length trained on
        pairing                   as in RoPE; ``half`` is the layout of the models

    Arguments, for some
        factor                            how much longer the text gets
        original_max_position_embeddings  the length trained on (yarn, longrope, llama3)
        attention_factor                  factor of queries and keys (yarn, longrope), so that logits carry its square
        beta_fast, beta_slow              pairs that turn more often than this in the original length are kept, less
                                          often are slowed by ``factor`` (yarn: 32, 1)
        mscale, mscale_all_dim            weights in yarn's attention factor (DeepSeek; beside it, DeepSeek scales its
                                          softmax by the square of 0.1 mscale_all_dim ln(factor) + 1, which is the
                                          attention's business); one alone or 0 changes nothing, as in transformers
        truncate                          round those two pairs outwards to whole ones (yarn: True)
        short_factor, long_factor         divisors of the frequencies up to and beyond the original length (longrope)
        low_freq_factor, high_freq_factor as beta_slow and beta_fast, for llama3

    ``dynamic`` and ``longrope`` depend on the length of the text. It is the largest position of the keys and 1, of
    each sequence by itself, and nothing is remembered: transformers takes the longest sequence of a batch, and for
    ``dynamic`` goes on with the longest text it has met. Only without memory does decoding with a cache of keys that
    are not yet rotated give what a pass over the whole text gives. Positions that all sequences share, and those of
    texts packed in one row, have one length: padding and the other texts count there. `kernel` is that of a text of
    ``max_len`` tokens.
    """

    citation = "Chen et al. 2023, arXiv 2306.15595; Peng et al. 2023, arXiv 2309.00071"
    formula = r"m^2\, " + TURNED
    only: ClassVar[str | None] = None  # the one type that a subclass is of; its other defaults
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
        """The rule's options, with defaults that follow from the sizes where a subclass has such."""
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

    ``factor`` s is 4 unless given, the paper's step from 2048 to 8192 tokens; the other options as in `ScaledRoPE`.
    """

    citation = "Chen et al. 2023, arXiv 2306.15595, section 2.3"
    formula = TURNED + r",\ \theta'_t = \theta_t / s"
    only = "linear"
    defaults: ClassVar = {"factor": 4.0}


class NTKRoPE(ScaledRoPE):
    """NTK-aware scaling: base s^(d/(d-2)) for base, which divides theta_t by s^(2t/(d-2)) (Peng et al. 2023, 3.1).

    The first frequency stays, the last is divided by s, those between by a power of it. First described by the user
    bloc97 on Reddit. ``factor`` s is 4 unless given, which is ours; the other options as in `ScaledRoPE`.
    """

    citation = "Peng et al. 2023, arXiv 2309.00071, section 3.1"
    formula = TURNED + r",\ \theta'_t = \theta_t s^{-2t/(d-2)}"
    only = "ntk"
    defaults: ClassVar = {"factor": 4.0}


class DynamicRoPE(ScaledRoPE):
    """NTK-aware scaling by the text's own length l: s = a l/N - (a - 1), and 1 for l under N (Peng et al. 2023, 3.3).

    N is ``max_position_embeddings``, the length trained on: ``max_len`` unless given, so that nothing is scaled before
    texts are longer than that. ``factor`` a is 1 unless given, which is the paper's s = l/N; models in transformers
    give another. See `ScaledRoPE` for the length, for `kernel` and for the other options.
    """

    citation = "Peng et al. 2023, arXiv 2309.00071, section 3.3"
    formula = TURNED + r",\ \theta'_t = \theta_t s^{-2t/(d-2)},\ s = \max(1, a\ell/N - a + 1)"
    length_dependent = True
    only = "dynamic"
    defaults: ClassVar = {"factor": 1.0}


class YaRN(ScaledRoPE):
    """YaRN: pairs with many turns are kept, those with few slowed by s, and logits grow (Peng et al. 2023, 3.2-3.4).

    ``beta_fast`` 32, ``beta_slow`` 1 and queries and keys times 0.1 ln s + 1 are the paper's; between the two numbers
    of turns the ramp runs over the pair's index, as in the paper's program and in transformers, not over its turns, as
    in the paper. ``factor`` s is ``max_position_embeddings`` / ``original_max_position_embeddings``: either may be
    left out, and s is 4 without both, which is ours. The other options as in `ScaledRoPE`.
    """

    citation = "Peng et al. 2023, arXiv 2309.00071"
    formula = r"m^2\, " + TURNED + r",\ \theta'_t = \theta_t (\gamma_t + (1-\gamma_t)/s),\ m = 0.1 \ln s + 1"
    only = "yarn"
    defaults: ClassVar = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}

    def complete(self, options: dict[str, Any], start: Start) -> dict[str, Any]:
        return {"original_max_position_embeddings": _trained_on(options, start), **options}


class LongRoPE(ScaledRoPE):
    """LongRoPE: a divisor for each frequency, one list up to the original length and one beyond (Ding et al. 2024).

    The lists are found by a search on a trained model, so none is a published default. Ours are: all 1 up to the
    original length, and beyond it the NTK-aware s^(2t/(d-2)), one of the three lists that the paper's search starts
    from. ``factor`` and ``original_max_position_embeddings`` as in `YaRN`. Queries and keys are multiplied by
    sqrt(1 + ln s / ln N) at all lengths, as in Phi-3. The paper also leaves the first tokens unscaled, which neither
    Phi-3 nor transformers does, nor we. See `ScaledRoPE` for the length, for `kernel` and for the other options.
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
    """The original length: as given, or such that it gives the longest text when multiplied by the factor."""
    return options.get("original_max_position_embeddings", max(2, int(start.longest / options.get("factor", 4))))


class Llama3RoPE(ScaledRoPE):
    """Llama 3.1's scaling: pairs with more than 4 turns in 8192 tokens are kept, with less than 1 divided by 8.

    Between them it is a mean of the two. All defaults are Llama 3.1's, its base too; the rest as in `ScaledRoPE`.
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

    Defaults are those of Gemma 4's global layers: ``partial_rotary_factor`` 0.25 and ``rope_theta`` 1,000,000;
    ``factor`` divides what is left, 1 unless given. The other options as in `ScaledRoPE`.
    """

    citation = "Barbero et al. 2024, arXiv 2410.06205"
    formula = TURNED + r",\ \theta'_t = \theta_t\, [t < p d/2]"
    only = "proportional"
    defaults: ClassVar = {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "factor": 1.0}


class CLEX(RoPE):
    """Continuous length extrapolation: log theta as a function of the length's scale t (Chen et al. 2023, section 3).

    At t = 1 the frequencies are RoPE's. From there d log theta / dt = W_down a(W_up (log theta + log theta_NTK(t))) +
    d log theta_NTK / dt, with theta_NTK NTK-aware scaling by 2t - 1: its part is put in exactly, and the learned rest
    is integrated by Runge and Kutta's classical method in float64. W_down starts at zero (then W_up has no gradient),
    so that CLEX starts as NTK-aware scaling. One instance serves all layers, as published.

    The scale is ceil(l / N), at most ``max_factor``; l is the largest position of the keys and 1, of each sequence by
    itself, and nothing is remembered, so that decoding with a cache of keys that are not yet rotated gives what a pass
    over the whole text gives. `kernel` is that of a text of ``max_len`` tokens. A frequency over 2 pi, which nothing
    keeps the map from, is taken modulo 2 pi: the same for whole positions, and exact for far ones.

    In training, texts of n tokens pass for texts of n t tokens, t drawn from 1..max_factor once a pass: `place` gives
    them increasing positions, drawn without replacement, from 0 to n t - 1. Evaluation and positions that the caller
    gives are left alone. Three things differ from the authors' program. There t is the drawn one, here it always
    follows from the positions; the same for texts of N tokens. For texts over N, whose positions the program divides,
    they end at N t - 1 or, if that is too few, are running numbers. And the NTK part of the equation's input has our
    ``base``, where the program always has 10000 there.

    Arguments
        max_factor    largest scale t
        param_factor  inner width of the learned map, in head dimensions
        act           its activation a: ``tanh`` (the program's default) or ``silu`` (the paper's)
        steps         steps of the integration from one whole t to the next. The program takes 100 (its ``time_dt`` is
                      0.01), in float32; 2 are within 1e-5 of the exact log theta where W_down moves it by up to 4 in
                      all, and 4 within 1e-6
        max_position_embeddings  the length N trained on; default ``max_len``
        base, pairing as in RoPE, but the layout is Llama's unless given, as in the program
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
        """Running numbers, but in training those of a text that is up to ``max_factor`` times as long."""
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
