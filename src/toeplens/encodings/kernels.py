"""Biases from parametric functions of the distance: KERPLE, Sandwich, the dynamic position bias, FIRE."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.bias import OffsetBias
from toeplens.encodings.kit import linear, offsets_between, require_even, require_number, rotary_frequencies, widened
from toeplens.encodings.shapes import Positions

SMALLEST = 0.01  # the released code's lower bound of KERPLE's parameters; here, of their initial values


class Kerple(OffsetBias):
    """A learned kernel of the distance with two parameters r1, r2 per head (Chi et al. 2022).

    The released code keeps them in range by clamping outside the gradient. Here r1 is the softplus of a free parameter,
    so that the gradient is never cut off. Both start as in the released code, uniform, but at least 0.01. Keys after
    the query, which the released code never scores, are penalised by their distance too.

    Arguments
        shared  one pair (r1, r2) per head for all layers; otherwise one per layer, as published
    """

    citation = "Chi et al. 2022, arXiv 2205.09921"

    def __init__(self, *, shared: bool = False, **sizes: int) -> None:
        super().__init__(**sizes)
        self.shared = shared

    def positive(self, most: float) -> nn.Parameter:
        """A positive number per head (a softplus) that starts from U(0, ``most``), but at least 0.01."""
        return self.learned((self.num_heads,), lambda x: x.uniform_(SMALLEST, most).expm1_().log_())


class KerpleLog(Kerple):
    """The logarithmic kernel -r1 log(1 + r2 |i - j|), r1, r2 > 0: see `Kerple`.

    r1 starts from U(0, 2), and r2, also a softplus, from U(0, 1).
    """

    formula = r"b_{ij} = -r_1 \log(1 + r_2 |\delta|)"

    def __init__(self, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.size, self.rate = self.positive(2.0), self.positive(1.0)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        size, rate = (F.softplus(p.to(widened(p.dtype))).unsqueeze(-1) for p in (self.size, self.rate))
        return -size * torch.log1p(rate * offsets.abs().to(rate.dtype))


class KerplePower(Kerple):
    """The power kernel -r1 |i - j|^r2, r1 > 0 and 0 < r2 < 2: see `Kerple`.

    r1 starts from U(0, 1), r2 from U(0, 2). The paper also allows r2 = 2; here r2 is twice the sigmoid of a free
    parameter, which stays below 2.
    """

    formula = r"b_{ij} = -r_1 |\delta|^{r_2}"

    def __init__(self, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.size = self.positive(1.0)
        self.power = self.learned((self.num_heads,), lambda x: x.uniform_(SMALLEST / 2, 1 - SMALLEST / 2).logit_())

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        size, power = (p.to(widened(p.dtype)).unsqueeze(-1) for p in (self.size, self.power))
        return -F.softplus(size) * offsets.abs().to(power.dtype) ** (2 * power.sigmoid())


class Sandwich(OffsetBias):
    """The inner product of sinusoids as a bias, p_i . p_j / c_h, c_h = 8h/H, h = 1..H (Chi et al. 2023).

    p_i . p_j is the sum over t of cos((i - j) / base^(2t/width)), t = 0..width/2 - 1, whatever the model's width. It
    is even, so keys after the query need no extra rule. It is often written minus its maximum, width/2. That constant
    does not change the softmax and is left out here, as in the paper's code.

    Arguments
        width  dimensions of the sinusoids
        base   the longest wavelength is 2 pi base
    """

    citation = "Chi et al. 2023, arXiv 2212.10356"
    formula = r"b_{ij} = \frac{H}{8h} \sum_t \cos(\delta\, \theta_t),\quad \theta_t = b^{-2t/\bar d}"

    def __init__(self, *, width: int = 128, base: float = 10000.0, **sizes: int) -> None:
        super().__init__(**sizes)
        require_even("width", width, "a sinusoid takes dimensions in pairs of sine and cosine")
        self.frequencies = self.register_exact("frequencies", rotary_frequencies(width, base))
        heads = torch.arange(1, self.num_heads + 1, dtype=torch.float64)
        self.slopes = self.register_exact("slopes", self.num_heads / (8 * heads))

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        total = torch.zeros(offsets.shape, dtype=torch.float64, device=offsets.device)
        for frequency in self.frequencies:  # in turn, to need memory for the sum only
            total = total + (offsets * frequency).cos()
        return self.slopes.unsqueeze(-1) * total


class DynamicBias(OffsetBias):
    """An MLP of the signed distance computes each head's bias (Wang et al. 2022, in one dimension).

    As in x-transformers: Linear(1, hidden), then depth - 1 times Linear(hidden, hidden), each followed by SiLU, then
    Linear(hidden, heads). The paper's version is for images: it takes two distances and uses ReLU.

    Arguments
        hidden        width of the network (default: ``d_model`` / 4)
        depth         number of hidden layers
        log_distance  the input is sign(i - j) log(1 + |i - j|) instead of i - j
        norm          LayerNorm before each SiLU, as in the paper
        shared        one network for all layers; otherwise one per layer
    """

    citation = "Wang et al. 2022, arXiv 2108.00154"
    formula = r"b_{ij} = f_\theta(\delta)_h"

    def __init__(
        self,
        *,
        hidden: int | None = None,
        depth: int = 2,
        log_distance: bool = False,
        norm: bool = False,
        shared: bool = True,
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        hidden = max(1, self.d_model // 4) if hidden is None else hidden
        require_number("hidden", hidden, at_least=1)
        require_number("depth", depth, at_least=1)
        self.log_distance, self.shared = log_distance, shared
        self.layers_in = nn.ModuleList(nn.Linear(hidden if n else 1, hidden) for n in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) if norm else nn.Identity() for _ in range(depth))
        self.layer_out = nn.Linear(hidden, self.num_heads)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        x = offsets.to(widened(self.layer_out.weight.dtype)).unsqueeze(-1)
        if self.log_distance:
            x = x.sign() * x.abs().log1p()
        for layer, norm in zip(self.layers_in, self.norms, strict=True):
            x = linear(layer, x)
            if isinstance(norm, nn.LayerNorm):
                x = F.layer_norm(x, x.shape[-1:], norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)
            x = F.silu(x)
        return linear(self.layer_out, x).transpose(0, 1)


class FIRE(PositionalEncoding):
    """f(psi(i - j) / psi(max(i, L))), psi(x) = log(c x + 1): the distance relative to the query's position.

    Li et al. 2024: f is a network 1-32-H with one hidden layer and ReLU. c and the threshold L are learned,
    as |c| and |m| times ``threshold``, m starting at 1, with 10^-6 added to the denominator, as in the paper's listing.
    The normaliser uses the query's position, counted from 0. The bias is therefore not a function of the offset, and
    shifting all positions changes it. Keys after the query take |i - j| with the same normaliser, which is what the
    listing computes; the paper covers only causal models.

    Arguments
        threshold  initial value of L
        c          initial value of c
        hidden     width of the network
        shared     one f, c and L for all layers (the paper's FIRE-S); otherwise one set per layer
    """

    coupling = "bias"
    toeplitz = False
    citation = "Li et al. 2024, arXiv 2310.04418"
    formula = r"b_{ij} = f_\theta\big(\psi(|\delta|) / \psi(\max(i, L))\big)_h,\quad \psi(x) = \log(c x + 1)"

    def __init__(
        self, *, threshold: float = 512.0, c: float = 0.1, hidden: int = 32, shared: bool = False, **sizes: int
    ) -> None:
        super().__init__(**sizes)
        require_number("hidden", hidden, at_least=1)
        self.shared = shared
        self.c = self.learned((), partial(nn.init.constant_, val=require_number("c", c, over=0)))
        self.start_threshold = require_number("threshold", threshold, over=0)
        self.multiplier = self.learned((), nn.init.ones_)
        self.pair_width = 1 + 2 * hidden // self.num_heads
        self.inner, self.outer = nn.Linear(1, hidden), nn.Linear(hidden, self.num_heads)

    def bias(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*H_Nq_Nk"]:
        dtype = widened(self.c.dtype)
        c, threshold = self.c.to(dtype).abs(), (self.multiplier.to(dtype) * self.start_threshold).abs()
        distance = torch.log1p(c * offsets_between(q_positions, k_positions).abs().to(dtype))
        most = torch.log1p(c * torch.maximum(q_positions.to(dtype), threshold)) + 1e-6
        share = (distance / most.unsqueeze(-1)).unsqueeze(-1)
        return linear(self.outer, linear(self.inner, share).relu()).movedim(-1, -3)


ENCODINGS = {
    "kerple-log": KerpleLog,
    "kerple-power": KerplePower,
    "sandwich": Sandwich,
    "dynamic-bias": DynamicBias,
    "fire": FIRE,
}
