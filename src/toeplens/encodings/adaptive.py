"""RoPE with learned components: frequencies, a map before the rotation, or content-dependent steps."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import require_even, require_number, widened, without_autocast
from toeplens.encodings.rotary import Pairing, RoPE, pairing_of, turn
from toeplens.encodings.seen import Seen
from toeplens.encodings.shapes import Earlier, Frequencies, Keys, Notes, Positions, Queries, Stream, Turned
from toeplens.ground import choose


class RopeLearned(RoPE):
    """RoPE with learned frequencies (``learned_freq`` of rotary-embedding-torch).

    The parameter is an offset from RoPE's frequencies and receives the gradient that the frequency would receive. The
    base frequencies stay in float64, so casting the model to half precision does not round them.

    Arguments
        per_head       separate frequencies for each head; otherwise all heads share them, as published
        shared         one set for all layers, as published; otherwise one per layer
    """

    citation = "Wang, rotary-embedding-torch, learned_freq"
    formula = r"\mathrm{Re} \sum_t q_t \bar k_t \, e^{\mathrm{i} \delta (\theta_t + \epsilon_t)}"

    def __init__(self, *, per_head: bool = False, shared: bool = True, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.shared = shared
        self.offset = self.learned((self.num_heads if per_head else 1, self.head_dim // 2), nn.init.zeros_)

    def frequencies_at(self, k_positions: Positions) -> Frequencies:
        return self.frequencies + self.offset.to(torch.float64)


class HARoPE(RoPE):
    """A learned map applied to each head's queries and keys before the rotation (Li et al. 2025).

    M = U diag(s) V^T with U, V the exponentials of skew-symmetric matrices and s = softplus(sigma) + 10^-6. M starts
    within 10^-6 of the identity, so the encoding starts as RoPE. The paper and its code use it with axial RoPE on
    images; here positions are those of a sequence. `kernel` is that of the rotation, between the mapped queries and
    keys.

    Arguments
        map            ``inverse``: M on queries and M^-T on keys, as in the released code, so that at offset 0 the
                       logit is q . k; ``shared``: M on both, as the abstract can be read
    """

    citation = "Li et al. 2025, arXiv 2510.10489"
    formula = r"q^\top M^\top R_{j-i} M^{-\top} k, \quad M = U \,\mathrm{diag}(s)\, V^\top"
    shared = False

    def __init__(self, *, map: Literal["inverse", "shared"] = "inverse", **inherited: Any) -> None:
        super().__init__(**inherited)
        self.map = choose("map", map, ("inverse", "shared"))
        self.left, self.right = (
            self.learned((self.num_heads, self.head_dim, self.head_dim), nn.init.zeros_) for _ in range(2)
        )
        self.sigma = self.learned((self.num_heads, self.head_dim), partial(nn.init.constant_, val=math.log(math.e - 1)))

    def maps(self, dtype: torch.dtype) -> tuple[Float[Tensor, "H d d"], Float[Tensor, "H d d"]]:
        """The matrices that queries and keys are multiplied by."""
        u, v = (torch.matrix_exp(0.5 * (a - a.mT)) for a in (self.left.to(dtype), self.right.to(dtype)))
        s = (F.softplus(self.sigma.to(dtype)) + 1e-6).unsqueeze(-2)
        forward = (u * s) @ v.mT
        return forward, (u / s) @ v.mT if self.map == "inverse" else forward

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        wide = widened(q.dtype)
        on_q, on_k = self.maps(wide)
        turned_q, turned_k = super().rotate(q.to(wide) @ on_q.mT, k.to(wide) @ on_k.mT, q_positions, k_positions)
        return turned_q.to(q.dtype), turned_k.to(k.dtype)


class CARoPE(PositionalEncoding):
    """Context-aware RoPE: tokens set how far each head's angles advance (Veisi et al. 2025).

    Each token's step for a head is f = 1/(softplus(x W) + 1). Pair t is rotated by the cumulative sum of f^t over the
    tokens so far, where RoPE has the sum of theta_1^t. The angle between a query and a key is the sum over the tokens
    after the key, up to and including the query. Only the order of tokens matters, not their position numbers. The sums
    are kept in float64.

    The paper says that it starts as RoPE, but its formula cannot: W = 0 gives f = 0.59. Our W starts at zero with a
    constant inside the softplus that makes f = theta_1 = base^(-2/d). x is the input of the layer's keys, so each
    layer has its own W. The paper says "token embedding", which may mean the first layer only.

    Not verified: the powers, which start at t = 0 here, as in RoPE; the authors' code was not available.

    Arguments
        start          ``rope``: with that constant; ``printed``: the formula as printed, without it
        base, pairing  as in RoPE; base must be over 1
    """

    coupling = "rotation"
    data_dependent = True
    toeplitz = False
    shared = False
    citation = "Veisi et al. 2025, arXiv 2507.23083"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \exp\Big(\mathrm{i} \sum_{m=j+1}^{i} f(x_m)^t\Big),"
        r" \quad f(x) = \frac{1}{\mathrm{softplus}(x W) + 1}"
    )

    def __init__(
        self,
        *,
        start: Literal["rope", "printed"] = "rope",
        base: float = 10000.0,
        pairing: Pairing = "interleaved",
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        require_even("head_dim", self.head_dim)
        require_number("base", base, over=1)
        self.pairing: Pairing = pairing_of(pairing)
        constant = torch.zeros((), dtype=torch.float64)
        if choose("start", start, ("rope", "printed")) == "rope":
            softplus = torch.tensor(base, dtype=torch.float64) ** (2 / self.head_dim) - 1
            constant = softplus + (-torch.expm1(-softplus)).log()
        self.start = self.register_exact("start", constant)
        self.powers = self.register_exact("powers", torch.arange(self.head_dim // 2, dtype=torch.float64))
        self.weight = self.learned((self.num_heads, self.d_model), nn.init.zeros_)

    def note(self, x: Stream, before: Earlier | None = None) -> Notes:
        """The angles of each token: cumulative sums of f^t, in float64."""
        wide = widened(x.dtype)
        with without_autocast(x):
            chosen = F.linear(x.to(wide), self.weight.to(wide)).transpose(1, 2).unsqueeze(-1)
        step = 1 / (F.softplus(chosen.to(torch.float64) + self.start, threshold=40) + 1)
        angles = (step**self.powers).cumsum(-2)
        return angles if before is None else angles + before[:, :, -1:]

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions, *, seen: Seen) -> Turned:
        assert seen.notes is not None
        seen.require_run(self)
        wide = widened(q.dtype)
        if seen.padding is not None:
            steps = seen.notes.diff(dim=-2, prepend=torch.zeros_like(seen.notes[:, :, :1]))
            steps = steps.masked_fill(seen.padding[:, None, :, None], 0.0)
            seen = replace(seen, notes=steps.cumsum(-2))
        assert seen.notes is not None
        turned = [
            turn(x, angles.cos().to(wide), angles.sin().to(wide), self.pairing)
            for x, angles in ((q, seen.own_notes()), (k, seen.notes))
        ]
        return turned[0], turned[1]


ENCODINGS = {"rope-learned": RopeLearned, "harope": HARoPE, "carope": CARoPE}
