"""No positional encoding: order reaches a causal decoder only through its mask."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.encodings.base import PositionalEncoding


class NoPE(PositionalEncoding):
    """No positional encoding (Haviv et al. 2022, arXiv 2203.16634; Kazemnejad et al. 2023, arXiv 2305.19466)."""

    coupling = "none"
    citation = "Kazemnejad et al. 2023, arXiv 2305.19466"
    formula = r"q_i \cdot k_j / \sqrt{d}"

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        """Zero at every offset."""
        return torch.zeros(self.num_heads, offsets.numel(), device=offsets.device)


ENCODINGS = {"nope": NoPE}
