"""Biases that add up along the sequence: each token says how far it is from the one before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.base import PositionalEncoding, Positions, require_number
from toeplens.encodings.precision import linear, widened
from toeplens.encodings.seen import Seen
from toeplens.ground import choose


class CumulativeBias(PositionalEncoding):
    """A penalty on the distance |c_i - c_j|, where c is the running sum of steps that tokens' content decides.

    A subclass gives `steps`; and `weights` and `penalty`, where the bias is more than minus the distance. Tokens are
    counted in the order of the keys; positions are not used. The running sum is kept in float64, so that what is near
    stays exact far out.
    """

    coupling = "bias"
    data_dependent = True
    toeplitz = False
    shared = False
    factorable = True

    def steps(self, x: Float[Tensor, "B N d_model"]) -> Float[Tensor, "B H N"]:
        """How far each token is from the one before it; none may be negative."""
        raise NotImplementedError

    def weights(self, x: Float[Tensor, "B N d_model"]) -> Float[Tensor, "B H N"] | None:
        """A number of each token for when it is the query, kept in its note's second column; or None."""
        return None

    def penalty(self, distance: Tensor, weight: Tensor | None) -> Tensor:
        """The bias at a distance from a query of the given weight."""
        return -distance

    def note(
        self, x: Float[Tensor, "B N d_model"], before: Float[Tensor, "B H M c"] | None = None
    ) -> Float[Tensor, "B H N c"]:
        totals = self.steps(x).to(torch.float64).cumsum(-1)
        if before is not None:
            totals = totals + before[:, :, -1:, 0]
        weights = self.weights(x)
        return torch.stack((totals,) if weights is None else (totals, weights.to(totals.dtype)), dim=-1)

    def bias(self, q_positions: Positions, k_positions: Positions, seen: Seen) -> Float[Tensor, "B H Nq Nk"]:
        assert seen.notes is not None
        own, dtype = seen.own_notes(), widened(seen.q.dtype)
        distance = (own[..., :1] - seen.notes[..., 0].unsqueeze(-2)).abs().to(dtype)
        return self.penalty(distance, own[..., 1:].to(dtype) if own.shape[-1] > 1 else None)

    def bias_product(
        self, q_positions: Positions, k_positions: Positions, seen: Seen
    ) -> tuple[Float[Tensor, "B H Nq 1"], Float[Tensor, "B H Nk 1"]]:
        assert seen.notes is not None
        own = seen.own_notes()
        totals = seen.notes[..., :1] - own[..., :1, :1]
        return (own[..., 1:] if own.shape[-1] > 1 else torch.ones_like(own)), totals

    def score_mod(
        self, q_positions: Positions, k_positions: Positions, seen: Seen
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
        assert seen.notes is not None
        totals = seen.notes[..., 0]
        large = totals.float()
        small = (totals - large).detach().float()  # two float32 numbers hold what one would round away
        weights = seen.notes[..., 1].float() if seen.notes.shape[-1] > 1 else None

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance = large[batch, head, query] - large[batch, head, key]
            distance = (distance + (small[batch, head, query] - small[batch, head, key])).abs()
            return score + self.penalty(distance, None if weights is None else weights[batch, head, query])

        return add


class FoX(CumulativeBias):
    """The forgetting transformer: a key's logit falls by -log f of every token after it, up to and with the query.

    Lin et al. 2025: f = sigmoid(w . x + b), one gate a head and token, of the layer's own input. The bias
    is the sum of log f_m over m in (j, i]. Keys after the query, which the paper never scores, take the sum over
    (i, j]: ours.

    Arguments
        bias_init  where b starts: 0 in the authors' program (x-transformers: 5, gates that start almost open)
    """

    citation = "Lin et al. 2025, arXiv 2503.02130"
    formula = r"b_{ij} = \sum_{m=j+1}^{i} \log \sigma(w_h^\top x_m + b_h)"

    def __init__(self, *, bias_init: float = 0.0, **sizes: int) -> None:
        super().__init__(**sizes)
        self.bias_init = require_number("bias_init", bias_init)
        self.gate = nn.Linear(self.d_model, self.num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate.weight, std=0.02)
        nn.init.constant_(self.gate.bias, self.bias_init)

    def steps(self, x: Float[Tensor, "B N d_model"]) -> Float[Tensor, "B H N"]:
        return -F.logsigmoid(by_head(self.gate, x))


class CABLE(CumulativeBias):
    """Context-aware biases for length extrapolation: -g_i times the sum of f_m over m in (j, i].

    Veisi et al. 2025: steps f = ReLU(w . x + b) >= 0 and a weight g = softplus(v . x + c) of the query. The
    paper prints the bias without its minus sign; its text and its program have it. Keys after the query take
    -g_i |S_i - S_j|, as in the authors' bidirectional program.

    Not verified: that the step of the paper's experiments is the default here, ``relu``, and not ``softplus``.

    Arguments
        step        ``relu``, or ``softplus``: the paper's first version (which has no weight), and FoX with the sign of
                    its gate turned around
        weighted    with the weight g; else the paper's CABLE-NW
        kernelised  -g_i log(1 + (S_i - S_j)^2) in place of -g_i |S_i - S_j|: the paper's kernelised form
    """

    citation = "Veisi et al. 2025, arXiv 2503.08067"
    formula = r"b_{ij} = -\mathrm{softplus}(v_h^\top x_i + c_h) \sum_{m=j+1}^{i} \mathrm{ReLU}(w_h^\top x_m + b_h)"

    def __init__(
        self,
        *,
        step: Literal["relu", "softplus"] = "relu",
        weighted: bool = True,
        kernelised: bool = False,
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        self.step = choose("step", step, ("relu", "softplus"))
        self.kernelised = kernelised
        self.factorable = not kernelised
        self.stride = nn.Linear(self.d_model, self.num_heads)
        self.weight = nn.Linear(self.d_model, self.num_heads) if weighted else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.stride, self.weight):
            if layer is not None:
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def steps(self, x: Float[Tensor, "B N d_model"]) -> Float[Tensor, "B H N"]:
        z = by_head(self.stride, x)
        return F.relu(z) if self.step == "relu" else F.softplus(z)

    def weights(self, x: Float[Tensor, "B N d_model"]) -> Float[Tensor, "B H N"] | None:
        return None if self.weight is None else F.softplus(by_head(self.weight, x))

    def penalty(self, distance: Tensor, weight: Tensor | None) -> Tensor:
        if self.kernelised:
            distance = torch.log1p(distance * distance)
        return -distance if weight is None else -weight * distance


def by_head(layer: nn.Linear, x: Float[Tensor, "B N d_model"]) -> Float[Tensor, "B H N"]:
    """One number a head and token, in float32 or, for float64, float64."""
    return linear(layer, x.to(widened(x.dtype))).transpose(1, 2)


ENCODINGS = {"fox": FoX, "cable": CABLE}
