"""Encodings whose positions, or the shape of whose bias, the content of tokens decides."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.base import PositionalEncoding, Positions, offsets_between, require_number, require_whole
from toeplens.encodings.precision import linear, widened
from toeplens.encodings.relative import at_each
from toeplens.encodings.seen import Seen


class CoPE(PositionalEncoding):
    """Contextual position encoding: how many tokens count between query and key is for the query to say.

    Golovneva et al. 2024: each query opens a gate sigmoid(q_i . k_m) to each key, the position of key j
    is the sum p_ij of the gates from j to i, and the logit gains q_i . e[p_ij], interpolated between the whole numbers
    beside p_ij. Gates are made from scaled logits, and only of keys that are visible. Keys are counted in their order;
    positions are not used. Keys after the query, which the paper never scores, are counted from the one beside the
    query on: ours. The table is one for all heads and starts at zero.

    Arguments
        positions_max  rows of the table; larger positions share the last. Default max_len + 1, enough for every key,
                       which is ours; published: 64
        scaled         the position term takes the factor of q . k (1/sqrt(d)) too, which is the authors' program's
                       default; else it does not, as in the paper's listing and in x-transformers
        shared         one table for all layers; else each layer has its own
    """

    coupling = "logits"
    data_dependent = True
    toeplitz = False
    pair_width = 4
    citation = "Golovneva et al. 2024, arXiv 2405.18719"
    formula = r"s_{ij} + q_i^\top e\big[\sum_{m=j}^{i} \sigma(s_{im})\big],\quad s_{ij} = q_i^\top k_j / \sqrt d"

    def __init__(
        self, *, positions_max: int | None = None, scaled: bool = False, shared: bool = False, **sizes: int
    ) -> None:
        super().__init__(**sizes)
        self.positions_max = self.max_len + 1 if positions_max is None else positions_max
        require_number("positions_max", self.positions_max, at_least=1)
        self.scaled, self.shared = scaled, shared
        self.weight = nn.Parameter(torch.zeros(self.positions_max, self.head_dim))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def transform_logits(
        self, logits: Float[Tensor, "B H Nq Nk"], q_positions: Positions, k_positions: Positions, seen: Seen
    ) -> Float[Tensor, "B H Nq Nk"]:
        last = self.positions_max - 1
        places = self.places(logits, seen).clamp(max=last)
        below = places.detach().floor()
        index = below.long()
        q = seen.q.to(places.dtype)
        table = q @ self.weight.to(q.dtype).T
        lower, upper = table.gather(-1, index), table.gather(-1, (index + 1).clamp(max=last))
        term = lower + (places - below) * (upper - lower)
        return (logits + (term * seen.scale if self.scaled else term)).to(logits.dtype)

    def places(self, logits: Float[Tensor, "B H Nq Nk"], seen: Seen) -> Float[Tensor, "B H Nq Nk"]:
        """p_ij: the gates between key and query, added up."""
        gates = logits.to(widened(logits.dtype)).sigmoid()
        visible = seen.visible()
        if visible is not None:
            gates = gates.masked_fill(~visible, 0.0)
        if seen.causal:
            return _sum_from(gates)
        past = torch.arange(gates.shape[-1], device=gates.device) <= seen.rows.unsqueeze(-1)
        past = past if past.ndim == 2 else past.unsqueeze(1)
        return _sum_from(gates.masked_fill(~past, 0.0)) + gates.masked_fill(past, 0.0).cumsum(-1)


def _sum_from(x: Tensor) -> Tensor:
    """The sum of each entry and those after it."""
    return x.flip(-1).cumsum(-1).flip(-1)


class RelativeProjection(PositionalEncoding):
    """Each query token mixes a bank of learned curves of the distance into its bias: b_ij = w_i . B[i - j].

    As in x-transformers (`RelativeProjPositionalBias`, after Thinking Machines' Inkling; there is no paper): the
    weights w_i are a projection of the layer's input of their own, a set a head; the bank is one for all heads. Zero
    for distances of ``max_distance`` and more, and for keys after the query.

    Arguments
        basis         curves in the bank
        max_distance  distances that the bank holds; default 1024, but at most ``max_len``
        shared        one projection and bank for all layers; else each layer has its own
    """

    coupling = "bias"
    data_dependent = True
    toeplitz = False
    citation = "x-transformers, RelativeProjPositionalBias"
    formula = r"b_{ij} = (W_h x_i)^\top B_{:, \delta}"

    def __init__(self, *, basis: int = 16, max_distance: int | None = None, shared: bool = False, **sizes: int) -> None:
        super().__init__(**sizes)
        self.max_distance = min(1024, self.max_len) if max_distance is None else max_distance
        require_number("basis", basis, at_least=1)
        require_number("max_distance", self.max_distance, at_least=1)
        self.shared = shared
        self.mix = nn.Linear(self.d_model, self.num_heads * basis)
        self.bank = nn.Parameter(torch.randn(basis, self.max_distance) * 0.02)

    def reset_parameters(self) -> None:
        self.mix.reset_parameters()
        nn.init.normal_(self.bank, std=0.02)

    def note(
        self, x: Float[Tensor, "B N d_model"], before: Float[Tensor, "B H M c"] | None = None
    ) -> Float[Tensor, "B H N c"]:
        mixed = linear(self.mix, x)
        return mixed.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def bias(self, q_positions: Positions, k_positions: Positions, seen: Seen) -> Float[Tensor, "B H Nq Nk"]:
        mixed = seen.own_notes()
        offsets = offsets_between(q_positions, k_positions)
        require_whole("RelativeProjection", offsets)
        curves = F.pad(mixed @ self.bank.to(mixed.dtype), (1, 1))  # a column of zeros at either end
        return at_each(curves, offsets.clamp(-1, self.max_distance) + 1)


ENCODINGS = {"cope": CoPE, "relative-projection": RelativeProjection}
