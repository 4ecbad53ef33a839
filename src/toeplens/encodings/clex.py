"""RoPE whose frequencies follow a learned differential equation as the text grows."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.kit import Positions, require_count, require_whole
from toeplens.encodings.rotary import Frequencies, Pairing, RoPE
from toeplens.encodings.scaled import TURNED
from toeplens.encodings.scaling import length_of
from toeplens.ground import choose


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
    share: Tensor

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
        self.register_exact("share", torch.linspace(0, 1, pairs, dtype=torch.float64))

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


ENCODINGS = {"clex": CLEX}
