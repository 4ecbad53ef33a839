"""Encodings that change the map of scores or weights: networks, learned factors, and stick-breaking."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.base import PositionalEncoding, Seen
from toeplens.encodings.bias import FIRE, T5, ALiBi, KerpleLog, RelativeTable
from toeplens.encodings.kit import sum_from, widened
from toeplens.encodings.rotary import RoPE
from toeplens.encodings.shapes import Keys, Pairs, Positions, Queries, Turned
from toeplens.ground import InputError, invalid
from toeplens.ground.options import Count, NotNegative

_BASES = {"alibi": ALiBi, "kerple-log": KerpleLog, "fire": FIRE, "rope": RoPE, "none": None}
Base = Literal["alibi", "kerple-log", "fire", "rope", "none"]


class DAPEv2(PositionalEncoding):
    """Scores and a base bias, refined by a small convolutional network over heads and keys (Zheng et al. 2024).

    With S the scaled scores and B the base bias of all heads, the logits are S + B + f([S; B]). f is two convolutions
    along the keys of a query's row, with a LeakyReLU between, over the 2H maps of S and B. S and B are set to 0 at
    masked keys before the first convolution, so later tokens have no influence.

    The released code pads each convolution with zeros at the ends of the map, so a row's last logits depend on whether
    later keys exist. Here a row holds the visible keys side by side, with masked ones at both ends. The two differ only
    in the first and last ``kernel_size // 2`` keys of the map.

    Arguments
        base         the base bias: ``alibi``, ``kerple-log``, ``fire`` (with its published ReLU; the code's FIRE
                     has a LeakyReLU); ``rope``, which is not a bias: the scores are RoPE's (in halves, as in the code),
                     and only they enter the network; or ``none`` for the plain scores
        kernel_size  keys per convolution; odd (published: 3)
        width        channels between the convolutions (published: 32)
    """

    coupling = "logits"
    data_dependent = True
    toeplitz = False
    shared = False
    citation = "Zheng et al. 2024, arXiv 2410.04798"
    formula = r"S + B + f([S; B]), \; S_{ij} = q_i^\top k_j / \sqrt{d}, \; f \text{ convolves along } j"

    def __init__(self, *, base: Base = "alibi", kernel_size: int = 3, width: Count = 32, **sizes: int) -> None:
        super().__init__(**sizes)
        kind = _BASES[base]
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise invalid("kernel_size", "be odd and at least 1", kernel_size)
        if kind is None and kernel_size == 1:
            raise InputError("base must be a bias if the convolutions cover one key, got 'none'.")
        self.turns = kind is RoPE
        self.base = kind and (RoPE(pairing="half", **sizes) if self.turns else kind(**sizes))
        if self.turns:
            self.also_couples = ("rotation",)
        else:
            self.unused_hooks = {"rotate"}
        maps = self.num_heads * (1 if kind is None or self.turns else 2)
        self.pair_width = 1 + 2 * (maps + width) // self.num_heads
        self.reach = kernel_size - 1  # of both convolutions together, to either side
        self.inward = nn.Conv2d(maps, width, (1, kernel_size))
        self.outward = nn.Conv2d(width, self.num_heads, (1, kernel_size))

    def reset_parameters(self) -> None:
        self.inward.reset_parameters()
        self.outward.reset_parameters()
        if self.base is not None:
            self.base.reset_parameters()

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        return self.base.rotate(q, k, q_positions, k_positions) if self.base and self.turns else (q, k)

    def transform_logits(self, logits: Pairs, q_positions: Positions, k_positions: Positions, seen: Seen) -> Pairs:
        parts = [logits]
        bias = None if self.base is None else self.base.bias(q_positions, k_positions)
        if bias is not None:
            parts.append(bias.to(logits.dtype).expand_as(logits))
        visible = seen.visible()
        shown = parts if visible is None else [part.masked_fill(~visible, 0.0) for part in parts]
        maps, order = torch.cat(shown, dim=1), None
        if self.reach and visible is not None and (seen.mask is not None or seen.padding is not None):
            hidden = ~visible[(None,) * (4 - visible.ndim)].any(dim=1, keepdim=True)
            order = hidden.to(torch.uint8).argsort(dim=-1, stable=True)
            maps = maps.take_along_dim(order, dim=-1)  # the visible keys, side by side
        maps = F.pad(maps, (self.reach, self.reach))
        refined = _convolve(self.outward, F.leaky_relu(_convolve(self.inward, maps)))
        if order is not None:
            refined = refined.take_along_dim(order.argsort(dim=-1), dim=-1)
        return sum(parts, refined.to(logits.dtype))


def _convolve(layer: nn.Conv2d, maps: Float[Tensor, "B c Nq m"]) -> Float[Tensor, "B e Nq n"]:
    """The layer, in the maps' dtype."""
    assert layer.bias is not None
    return F.conv2d(maps, layer.weight.to(maps.dtype), layer.bias.to(maps.dtype))


class DAPE(DAPEv2):
    """The first version: the network sees one query and one key at a time (Zheng et al. 2024, NeurIPS, section 3).

    It is `DAPEv2` with convolutions over one key.

    Arguments
        base, width  as in DAPEv2; base must be a bias, as position would otherwise not enter
    """

    citation = "Zheng et al. 2024, arXiv 2405.14722"
    formula = r"S + B + f([S; B]), \; S_{ij} = q_i^\top k_j / \sqrt{d}, \; f \text{ acts on each } (i, j)"

    def __init__(
        self, *, base: Literal["alibi", "kerple-log", "fire", "rope"] = "alibi", width: Count = 32, **sizes: int
    ) -> None:
        super().__init__(base=base, kernel_size=1, width=width, **sizes)


class URPE(PositionalEncoding):
    """Attention weights times a learned factor of the offset (Luo et al. 2022, eq. 8).

    A_ij = softmax(S + B)_ij c_{i-j}, with one factor per head and signed distance. Rows are not normalised again, and
    factors may have any sign. The factors are the paper's Toeplitz matrix, one per distance; distances of ``max_len``
    and more share the last (the released code also has a form with 64 buckets). They start at 1, the released code's
    recommended initialisation. All layers share factors and biases, as there.

    Arguments
        base      the bias B inside the softmax: ``t5`` (as published: buckets, here T5's causal ones),
                  ``relative-table`` (a value for each signed distance) or ``none``
        init_std  standard deviation of the initial factors around 1
    """

    coupling = "weights"
    also_couples = ("bias",)
    citation = "Luo et al. 2022, arXiv 2205.13401"
    formula = r"\operatorname{softmax}_j(q_i^\top k_j / \sqrt{d} + b_\delta) \, c_\delta"

    def __init__(
        self, *, base: Literal["t5", "relative-table", "none"] = "t5", init_std: NotNegative = 0.0, **sizes: int
    ) -> None:
        super().__init__(**sizes)
        bases = {"t5": T5, "relative-table": partial(RelativeTable, shared=True), "none": None}
        kind = bases[base]
        self.init_std = init_std
        self.base = kind and kind(**sizes)
        if self.base is None:
            self.also_couples, self.unused_hooks = (), {"bias"}
        self.factors = RelativeTable(shared=True, **sizes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.base is not None:
            self.base.reset_parameters()
        nn.init.normal_(self.factors.weight, mean=1.0, std=self.init_std)

    def bias(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*H_Nq_Nk"] | None:
        return None if self.base is None else self.base.bias(q_positions, k_positions)

    def transform_weights(self, weights: Pairs, q_positions: Positions, k_positions: Positions) -> Pairs:
        return weights * self.factors.bias(q_positions, k_positions).to(weights.dtype)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"] | None:
        """The bias inside the softmax; the factors' kernel is ``factors.kernel``."""
        return None if self.base is None else self.base.kernel(offsets)


class StickBreaking(PositionalEncoding):
    """Stick-breaking attention (Tan et al. 2024): A_ij = beta_ij times the product of 1 - beta_im over m from j to i.

    beta_ij = sigmoid(q_i . k_j / sqrt(d)), where i is the query, j the key, and m runs over the keys between them.
    Only the order of tokens matters; positions are not used. Masked keys (padding, other documents) take nothing
    of the stick. Keys after the query are never attended to, even without a causal mask (our choice).

    The remainder R_i = 1 - sum_j A_ij is assigned to the query's own key in the softmax, whose weights are then A
    itself. Afterwards it is removed or kept. If the softmax has no entry for it, weights are multiplied by 1 - R_i,
    computed again from queries and keys, without a softcap on the logits.

    Arguments
        own        the query's own token is also a key, the first to take from the stick (``attend_current`` in the
                   released code); otherwise keys are those strictly before it, as published, and the first query has
                   none
        remainder  what happens to R_i: ``dropped``, as in the paper's equations, so that weights sum to 1 - R_i; or
                   ``own``, assigned to the query's own value, as in the tests of the authors' code
    """

    coupling = "logits"
    also_couples = ("weights",)
    data_dependent = True
    toeplitz = False
    forms_logits = True
    pair_width = 4
    citation = "Tan et al. 2024, arXiv 2410.17980"
    formula = (
        r"A_{ij} = \beta_{ij} \prod_{m=j+1}^{i-1} (1 - \beta_{im}),\quad \beta_{ij} = \sigma(q_i^\top k_j / \sqrt d)"
    )

    def __init__(self, *, own: bool = False, remainder: Literal["dropped", "own"] = "dropped", **sizes: int) -> None:
        super().__init__(**sizes)
        self.own, self.remainder = own, remainder
        if self.remainder == "own":
            self.also_couples = ()

    def transform_logits(self, logits: Pairs, q_positions: Positions, k_positions: Positions, seen: Seen) -> Pairs:
        z = logits.to(widened(logits.dtype))
        before, own = _places(seen)
        left, taken = self._left(z, seen), before | own if self.own else before
        log_weights = (F.logsigmoid(z) + left[..., 1:]).masked_fill(~taken, -torch.inf)
        if not self.own:
            log_weights = torch.where(own, left[..., :1], log_weights)
        elif self.remainder == "own":
            log_weights = torch.where(own, torch.logaddexp(log_weights, left[..., :1]), log_weights)
        return log_weights.to(logits.dtype)

    def transform_weights(self, weights: Pairs, q_positions: Positions, k_positions: Positions, seen: Seen) -> Pairs:
        own = _places(seen)[1]
        if self.own and self.remainder == "dropped":
            weights = weights * self._sum(seen).to(weights.dtype)
        elif (visible := seen.visible()) is not None and seen.is_masked:
            held = (own & visible).any(-1, keepdim=True)
            weights = weights * torch.where(held, 1.0, self._sum(seen)).to(weights.dtype)
        return weights if self.own or self.remainder == "own" else weights.masked_fill(own, 0.0)

    def _left(self, z: Pairs, seen: Seen) -> Float[Tensor, "B H Nq more"]:
        """The log of what each key and all nearer ones leave of the stick; and a last 0, for the whole stick."""
        before, own = _places(seen)
        breaking, visible = before | own if self.own else before, seen.visible()
        breaking = breaking if visible is None else breaking & visible
        kept = F.logsigmoid(-z).masked_fill(~breaking, 0.0)
        return F.pad(sum_from(kept), (0, 1))

    def _sum(self, seen: Seen) -> Float[Tensor, "B H Nq 1"]:
        """1 - R_i, computed again from queries and keys."""
        q, k = (x.to(widened(x.dtype)) for x in (seen.q, seen.k))
        return -torch.expm1(self._left(q @ k.transpose(-2, -1) * seen.scale, seen)[..., :1])


def _places(seen: Seen) -> tuple[Bool[Tensor, "*B Nq Nk"], Bool[Tensor, "*B Nq Nk"]]:
    """Which keys are before each query's own, and which is its own, for all heads."""
    before = replace(seen, rows=seen.rows - 1).past()
    return before, seen.past() & ~before


ENCODINGS: dict[str, type[PositionalEncoding]] = {
    "dape-v2": DAPEv2,
    "dape": DAPE,
    "urpe": URPE,
    "stick-breaking": StickBreaking,
}
