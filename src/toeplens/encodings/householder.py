"""Accumulated transformations: a product of Householder-like matrices, one per token, between query and key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import linear, require_count, short_convolution, widened, without_autocast
from toeplens.encodings.seen import Seen
from toeplens.encodings.shapes import Earlier, Keys, Notes, Pairs, Positions, Queries, Stream
from toeplens.ground import choose, invalid

BLOCK = 64  # keys per block
EPS = 1e-6  # added to |w|^2 before the square root, as in the released code


def accumulate(
    q: Float[Tensor, "B H Nq d"],
    k: Float[Tensor, "B H Nk d"],
    w: Float[Tensor, "B H Nk d"],
    beta: Float[Tensor, "B H Nk"],
    rows: Int[Tensor, "*B Nq"],
    *,
    block: int = BLOCK,
) -> Pairs:
    """q_i^T H_i H_{i-1} ... H_{j+1} k_j with H_m = I - beta_m w_m w_m^T, for each query's row i and every key j.

    Blocks of keys are processed from last to first, and each query is updated block by block: after keys e to
    s, it is (H_e ... H_s)^T q. Within a block the products have a closed form, the paper's UT transform. With W
    the rows w_m, D = diag(beta) and T = (I + strictly lower(D W W^T))^-1 D,

        H_e ... H_s = I - W^T T W  and  [H_e ... H_{j+1} k_j]_j = K^T - W^T T strictly lower(W K^T),

    and transformations after a query's own row are removed by setting their columns of q W^T to 0. Keys after the query
    are therefore compared without any transformation.
    """
    count = k.shape[-2]
    block = min(block, count)
    blocks = -(-count // block)
    short = blocks * block - count
    k, w = (F.pad(x, (0, 0, 0, short)).unflatten(2, (blocks, block)) for x in (k, w))
    scaled = F.pad(beta, (0, short)).unflatten(2, (blocks, block)).unsqueeze(-1) * w
    right = torch.cat(((scaled @ k.transpose(-2, -1)).tril(-1), scaled), dim=-1)
    # only entries strictly below the diagonal are read
    undone = torch.linalg.solve_triangular(scaled @ w.transpose(-2, -1), right, upper=False, unitriangular=True)
    both = torch.cat((w, k), dim=-2).transpose(-2, -1)
    passed = torch.arange(blocks * block, device=rows.device) <= rows.unsqueeze(-1)
    passed = (passed if passed.ndim == 2 else passed.unsqueeze(1)).split(block, dim=-1)
    scores = []
    for n in reversed(range(blocks)):
        along, plain = (q @ both[:, :, n]).split(block, dim=-1)
        corrections, moved = (along.masked_fill(~passed[n], 0.0) @ undone[:, :, n]).split((block, q.shape[-1]), dim=-1)
        scores.append(plain - corrections)
        q = q - moved
    return torch.cat(scores[::-1], dim=-1)[..., :count]


class PaTH(PositionalEncoding):
    """Position by accumulated Householder-like transformations (Yang et al. 2025).

    Each token defines H_m = I - beta_m w_m w_m^T from its content. A query and a key are compared through the
    product of the matrices after the key, up to the query's own. The direction w is a low-rank projection of the
    layer's input, followed by a short causal convolution and normalisation to norm 1. The strength is beta = 2
    sigmoid(u . x + b), so that H has eigenvalues in (-1, 1]. The scheme uses the order of the keys, not their
    positions, and is causal. Without a causal mask, keys after the query are compared untransformed (our choice).

    The cached key features are w before the convolution and beta before the sigmoid, in the model's dtype. Convolution,
    norm and products are computed from them in at least float32, so that decoding with a cache equals the full
    pass. The released code applies a SiLU after the convolution, which the paper does not mention. Its projections
    use the model's initialisation; ours use torch's.

    Arguments
        rank        rank of the projection to w; None for a full matrix
        conv_size   tokens in the convolution; with 1 it is a factor per channel
        activation  after the convolution: ``silu`` (the released code) or ``none`` (the paper's text)
    """

    coupling = "accumulated"
    data_dependent = True
    toeplitz = False
    shared = False
    citation = "Yang et al. 2025, arXiv 2505.16381"
    formula = r"q_i^\top H_i H_{i-1} \cdots H_{j+1} k_j, \; H_m = I - \beta_m w_m w_m^\top"

    def __init__(
        self,
        *,
        rank: int | None = 32,
        conv_size: int = 3,
        activation: Literal["silu", "none"] = "silu",
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        if rank is not None and rank < 1:
            raise invalid("rank", "be at least 1, or None for a full matrix", rank)
        require_count(conv_size=conv_size)
        self.activation = choose("activation", activation, ("silu", "none"))
        width = self.num_heads * self.head_dim
        self.down = None if rank is None else nn.Linear(self.d_model, rank, bias=False)
        self.up = nn.Linear(self.d_model if rank is None else rank, width, bias=False)
        self.conv = nn.Conv1d(width, width, conv_size, groups=width, bias=False)
        self.strength = nn.Linear(self.d_model, self.num_heads)

    def note(self, x: Stream, before: Earlier | None = None) -> Notes:
        low = x if self.down is None else linear(self.down, x)
        direction = linear(self.up, low).unflatten(-1, (self.num_heads, -1))
        return torch.cat((direction, linear(self.strength, x).unsqueeze(-1)), dim=-1).transpose(1, 2)

    def transformations(
        self,
        notes: Float[Tensor, "B H N c"],
        texts: Int[Tensor, "B N"] | None = None,
        padding: Bool[Tensor, "B N"] | None = None,
    ) -> tuple[Float[Tensor, "B H N d"], Float[Tensor, "B H N"]]:
        """w, of norm 1, and beta of every key, in the dtype of the notes; ``texts`` and ``padding`` as in `Seen`."""
        taps = self.conv.weight.to(notes.dtype).view(self.num_heads, self.head_dim, -1)
        w = short_convolution(notes[..., : self.head_dim], taps, texts, padding)
        if self.activation == "silu":
            w = F.silu(w)
        beta = 2 * notes[..., self.head_dim].sigmoid()
        beta = beta if padding is None else beta.masked_fill(padding.unsqueeze(1), 0.0)
        return w * (w.square().sum(-1, keepdim=True) + EPS).rsqrt(), beta

    def score(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions, *, seen: Seen) -> Pairs:
        assert seen.notes is not None
        seen.require_run(self)
        wide = widened(q.dtype)
        with without_autocast(q):
            w, beta = self.transformations(seen.notes.to(wide), seen.texts, seen.padding)
            return accumulate(q.to(wide), k.to(wide), w, beta, seen.rows).to(q.dtype)


class PaTHFoX(PaTH):
    """PaTH with a forget gate: the logit also decreases by the log gates between key and query (Yang et al. 2025).

    log f_m = log sigmoid(u_f . x_m + b_f) is summed over the tokens after the key up to the query, in float64, and
    added to the scaled logit as in the Forgetting Transformer (Lin et al. 2025, arXiv 2503.02130). The released code
    (fla) multiplies the sum by d^-1/2 too. Without a causal mask, keys after the query are not penalised (our choice).
    """

    also_couples = ("bias",)
    formula = r"q_i^\top H_i \cdots H_{j+1} k_j / \sqrt{d} + \sum_{m=j+1}^{i} \log f_m"

    def __init__(self, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.gate = nn.Linear(self.d_model, self.num_heads)

    def note(self, x: Stream, before: Earlier | None = None) -> Notes:
        return torch.cat((super().note(x), linear(self.gate, x).transpose(1, 2).unsqueeze(-1)), dim=-1)

    def bias(self, q_positions: Positions, k_positions: Positions, *, seen: Seen) -> Pairs:
        assert seen.notes is not None
        steps = F.logsigmoid(seen.notes[..., -1:].double())
        steps = steps if seen.padding is None else steps.masked_fill(seen.padding[:, None, :, None], 0.0)
        sums = steps.cumsum(dim=-2)
        own = replace(seen, notes=sums).own_notes()
        return (own - sums.transpose(-2, -1)).clamp(max=0.0).to(widened(seen.notes.dtype))


ENCODINGS = {"path": PaTH, "path-fox": PaTHFoX}
