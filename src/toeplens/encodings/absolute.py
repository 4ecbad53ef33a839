"""Absolute encodings: a vector for each position, added to the token embeddings."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from toeplens.encodings.base import PositionalEncoding, Positions, require_even
from toeplens.ground import InputError, choose


class Sinusoidal(PositionalEncoding):
    """Fixed sines and cosines of the position, added at the input (Vaswani et al. 2017, section 3.5).

    Arguments
        base    the longest wavelength is 2 pi base
        layout  ``interleaved`` (the paper: sin, cos, sin, cos, ...) or ``halves`` (all sines, then all cosines, as in
                Marian and in the hidden sinusoid of the released program's RoPE)
    """

    coupling = "input"
    citation = "Vaswani et al. 2017, arXiv 1706.03762"
    formula = r"p_{i,2t} = \sin(i\,\theta_t),\quad p_{i,2t+1} = \cos(i\,\theta_t),\quad \theta_t = b^{-2t/d}"
    frequencies: Tensor

    def __init__(
        self, *, base: float = 10000.0, layout: Literal["interleaved", "halves"] = "interleaved", **sizes: int
    ) -> None:
        super().__init__(**sizes)
        require_even("d_model", self.d_model, "a sinusoid takes dimensions in pairs of sine and cosine")
        if not 0 < base < math.inf:
            raise InputError(f"base: {base} was given; it must be positive and finite.")
        self.layout = choose("layout", layout, ("interleaved", "halves"))
        exponents = torch.arange(0, self.d_model, 2, dtype=torch.float64) / self.d_model
        self.register_exact("frequencies", base**-exponents)

    def table(self, positions: Positions) -> Float[Tensor, "*B N d_model"]:
        """The encoding vectors of ``positions``, in float64."""
        phases = positions.to(torch.float64).unsqueeze(-1) * self.frequencies
        if self.layout == "interleaved":
            return torch.stack((phases.sin(), phases.cos()), dim=-1).flatten(-2)
        return torch.cat((phases.sin(), phases.cos()), dim=-1)

    def embed(self, x: Float[Tensor, "B N d_model"], positions: Positions) -> Float[Tensor, "B N d_model"]:
        return x + self.table(positions).to(x.dtype)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "1 D"]:
        """p_i . p_j = sum over t of cos((i - j) theta_t): the input vectors' own Gram matrix is Toeplitz."""
        phases = offsets.to(torch.float64).unsqueeze(-1) * self.frequencies
        return phases.cos().sum(-1).unsqueeze(0).to(torch.get_default_dtype())


class _Table(PositionalEncoding):
    """A row of a [max_len, d_model] table for each position, added at the input."""

    coupling = "input"
    toeplitz = False
    bounded = True
    weight: Tensor

    def embed(self, x: Float[Tensor, "B N d_model"], positions: Positions) -> Float[Tensor, "B N d_model"]:
        self.check_positions(positions)
        return x + nn.functional.embedding(positions, self.weight).to(x.dtype)


class Learned(_Table):
    """A learned vector for each position (Gehring et al. 2017; BERT, GPT-2).

    Arguments
        init_std  standard deviation of the initial table; 0 starts from no position at all, and a small one has been
                  found to give interpretable positions (Ito et al. 2024, arXiv 2406.08272)
    """

    citation = "Gehring et al. 2017, arXiv 1705.03122"
    formula = r"x_i + p_i,\quad p_i \text{ learned}"

    def __init__(self, *, init_std: float = 0.02, **sizes: int) -> None:
        super().__init__(**sizes)
        if not (math.isfinite(init_std) and init_std >= 0):
            raise InputError(f"init_std: {init_std} was given; it must be finite and not negative.")
        self.weight = nn.Parameter(torch.randn(self.max_len, self.d_model) * init_std)


class RandomTable(_Table):
    """Normal random vectors, one a position: kept fixed (the paper's "random") or trained (the released program's).

    Arguments
        trainable  learn the table from its random start
        std        standard deviation of the entries
    """

    citation = "Gu et al. 2025, arXiv 2505.13027, section 4.1"
    formula = r"x_i + p_i,\quad p_i \sim N(0, \sigma^2 I)"

    def __init__(self, *, trainable: bool = False, std: float = 1.0, **sizes: int) -> None:
        super().__init__(**sizes)
        if not (math.isfinite(std) and std > 0):
            raise InputError(f"std: {std} was given; it must be finite and positive.")
        table = torch.randn(self.max_len, self.d_model) * std
        if trainable:
            self.weight = nn.Parameter(table)
        else:
            self.register_buffer("weight", table)


ENCODINGS = {"sinusoidal": Sinusoidal, "learned": Learned, "random-fixed": RandomTable}
