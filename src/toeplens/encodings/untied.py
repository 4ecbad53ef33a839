"""TUPE: positions meet positions in a product of their own, untied from the content."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.base import PositionalEncoding, Positions
from toeplens.encodings.bias import T5


class TUPE(PositionalEncoding):
    """Transformer with untied positional encoding: the bias p_i U_q . p_j U_k / sqrt(2 d) (Ke et al. 2021, section 3).

    p is a learned table, U_q and U_k project it for each head, and all layers share the bias. As in the authors'
    program, LayerNorm is applied to p, the projections have biases of their own, and the table starts from
    N(0, 0.02^2). The content's product takes the factor 1/sqrt(2 d) as well: it is the encoding's `scale`.

    Arguments
        relative      add T5's bias with buckets for both sides (TUPE-R); else not (TUPE-A)
        untied_first  position 0 stands for no place ([CLS]): its row and its column each have one learned value a head
                      in place of the product, and (0, 0) takes the row's. In the program these are products of two
                      extra rows of the table; here, as in the paper, they are free, and start at zero. Under
                      ``relative`` the row and the column each have a bucket of their own too, as in the program, so
                      that nothing of either depends on where the other token stands
    """

    coupling = "bias"
    toeplitz = False
    bounded = True
    scale_terms = 2
    citation = "Ke et al. 2021, arXiv 2006.15595"
    formula = r"b_{ij} = (p_i U_q)^\top (p_j U_k) / \sqrt{2d}"

    def __init__(self, *, relative: bool = False, untied_first: bool = False, **sizes: int) -> None:
        super().__init__(**sizes)
        self.weight = nn.Parameter(torch.empty(self.max_len, self.d_model))
        self.norm = nn.LayerNorm(self.d_model)
        self.to_q, self.to_k = (nn.Linear(self.d_model, self.num_heads * self.head_dim) for _ in range(2))
        self.relative = T5(bidirectional=True, **sizes) if relative else None
        self.first = nn.Parameter(torch.zeros(2, self.num_heads)) if untied_first else None
        own_buckets = relative and untied_first
        self.relative_first = nn.Parameter(torch.empty(2, self.num_heads)) if own_buckets else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        for layer in (self.norm, self.to_q, self.to_k):
            layer.reset_parameters()
        if self.relative is not None:
            self.relative.reset_parameters()
        if self.first is not None:
            nn.init.zeros_(self.first)
        if self.relative_first is not None:
            nn.init.normal_(self.relative_first, std=0.02)

    def bias(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*H_Nq_Nk"]:
        q, k = self._project(self.to_q, q_positions), self._project(self.to_k, k_positions)
        bias = q @ k.transpose(-2, -1) * (2 * self.head_dim) ** -0.5
        if self.relative is not None:
            bias = bias + self.relative.bias(q_positions, k_positions)
        if self.first is None:
            return bias
        values = self.first if self.relative_first is None else self.first + self.relative_first
        row, column = values.unsqueeze(-1).unsqueeze(-1)
        bias = torch.where((k_positions == 0).unsqueeze(-2).unsqueeze(-3), column, bias)
        return torch.where((q_positions == 0).unsqueeze(-1).unsqueeze(-3), row, bias)

    def _project(self, layer: nn.Linear, positions: Positions) -> Float[Tensor, "*B H N d"]:
        self.check_positions(positions)
        places = layer(self.norm(F.embedding(positions, self.weight)))
        return places.unflatten(-1, (self.num_heads, self.head_dim)).transpose(-3, -2)


ENCODINGS = {"tupe": TUPE}
