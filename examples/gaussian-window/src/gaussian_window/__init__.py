"""A positional encoding of one's own: a Gaussian window whose width each head learns."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from toeplens.encodings import OffsetBias
from toeplens.utils import InputError


class GaussianWindow(OffsetBias):
    """A bias -delta^2 / (2 w_h^2): head h looks about w_h tokens far.

    Arguments
        widest  the starting widths are spread geometrically from 1 token to this many
    """

    citation = "the toeplens documentation"
    formula = r"b_{ij} = -\delta^2 / (2 w_h^2)"

    def __init__(self, *, widest: float = 32.0, **sizes: int) -> None:
        super().__init__(**sizes)
        if not 1 < widest < math.inf:
            raise InputError(f"widest: {widest} was given; it must be over 1 and finite.")
        self.widest = widest
        self.log_width = nn.Parameter(torch.empty(self.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.log_width.copy_(torch.linspace(0, math.log(self.widest), self.num_heads))

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        return -0.5 * (offsets * torch.exp(-self.log_width).unsqueeze(-1)) ** 2
