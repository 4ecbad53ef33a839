"""Encodings whose positions, distances or biases depend on the tokens' content."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import linear, offsets_between, require_number, require_whole, widened
from toeplens.encodings.relative import at_each
from toeplens.encodings.seen import Seen
from toeplens.encodings.shapes import Earlier, Notes, Pairs, Positions, ScoreMod, Stream
from toeplens.ground import choose


class CoPE(PositionalEncoding):
    """Contextual position encoding: the query decides which tokens count as steps between it and a key.

    Golovneva et al. 2024: each query opens a gate sigmoid(q_i . k_m) to each key. The position of key j
    is the sum p_ij of the gates from j to i, and the logit gains q_i . e[p_ij], interpolated between the two integers
    around p_ij. Gates are computed from scaled logits, and only for visible keys. Keys are counted in their order;
    positions are not used. Keys after the query, which the paper never scores, are counted from the one next to the
    query (our choice). One table, initialised to zero, serves all heads.

    Arguments
        positions_max  rows of the table; larger positions share the last (default: max_len + 1, enough for every key;
                       published: 64)
        scaled         scale the position term by the factor of q . k (1/sqrt(d)) too, as the authors' code does by
                       default; otherwise do not, as in the paper's listing and in x-transformers
        shared         one table for all layers; otherwise one per layer
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
        self.weight = self.learned((self.positions_max, self.head_dim), nn.init.zeros_)

    def transform_logits(self, logits: Pairs, q_positions: Positions, k_positions: Positions, seen: Seen) -> Pairs:
        last = self.positions_max - 1
        places = self.places(logits, seen).clamp(max=last)
        below = places.detach().floor()
        index = below.long()
        q = seen.q.to(places.dtype)
        table = q @ self.weight.to(q.dtype).T
        lower, upper = table.gather(-1, index), table.gather(-1, (index + 1).clamp(max=last))
        term = lower + (places - below) * (upper - lower)
        return (logits + (term * seen.scale if self.scaled else term)).to(logits.dtype)

    def places(self, logits: Pairs, seen: Seen) -> Pairs:
        """p_ij: the cumulative sum of gates between key and query."""
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
    """The reversed cumulative sum: each entry plus those after it."""
    return x.flip(-1).cumsum(-1).flip(-1)


class RelativeProjection(PositionalEncoding):
    """Each query token weights a bank of learned curves of the distance: b_ij = w_i . B[i - j].

    As in x-transformers (`RelativeProjPositionalBias`, after Thinking Machines' Inkling; there is no paper). The
    weights w_i are a separate projection of the layer's input, one set per head; all heads share the bank. The bias is
    zero for distances of ``max_distance`` and more, and for keys after the query.

    Arguments
        basis         curves in the bank
        max_distance  distances in the bank (default: 1024, but at most ``max_len``)
        shared        one projection and bank for all layers; otherwise one per layer
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
        super().reset_parameters()
        nn.init.normal_(self.bank, std=0.02)

    def note(self, x: Stream, before: Earlier | None = None) -> Notes:
        mixed = linear(self.mix, x)
        return mixed.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def bias(self, q_positions: Positions, k_positions: Positions, seen: Seen) -> Pairs:
        mixed = seen.own_notes()
        offsets = offsets_between(q_positions, k_positions)
        require_whole("RelativeProjection", offsets)
        curves = F.pad(mixed @ self.bank.to(mixed.dtype), (1, 1))  # a column of zeros at either end
        return at_each(curves, offsets.clamp(-1, self.max_distance) + 1)


class CumulativeBias(PositionalEncoding):
    """A penalty on the distance |c_i - c_j|, where c is the cumulative sum of content-dependent steps.

    Subclasses define `steps`, and also `weights` and `penalty` if the bias is more than minus the distance. Tokens are
    counted in the order of the keys; positions are not used. The cumulative sum is kept in float64, so that differences
    between nearby tokens stay exact in long sequences.
    """

    coupling = "bias"
    data_dependent = True
    toeplitz = False
    shared = False
    factorable = True

    def steps(self, x: Stream) -> Float[Tensor, "B H N"]:
        """The distance of each token from the previous one; must not be negative."""
        raise NotImplementedError

    def weights(self, x: Stream) -> Float[Tensor, "B H N"] | None:
        """A weight per token for its role as a query, cached in the second key feature; or None."""
        return None

    def penalty(self, distance: Tensor, weight: Tensor | None) -> Tensor:
        """The bias at a distance from a query of the given weight."""
        return -distance

    def note(self, x: Stream, before: Earlier | None = None) -> Notes:
        totals = self.steps(x).to(torch.float64).cumsum(-1)
        if before is not None:
            totals = totals + before[:, :, -1:, 0]
        weights = self.weights(x)
        return torch.stack((totals,) if weights is None else (totals, weights.to(totals.dtype)), dim=-1)

    def bias(self, q_positions: Positions, k_positions: Positions, seen: Seen) -> Pairs:
        own, totals, weights = self._sums(seen)
        dtype = widened(seen.q.dtype)
        return self.penalty((own - totals).abs().to(dtype), None if weights is None else weights.to(dtype))

    def _sums(self, seen: Seen) -> tuple[Float[Tensor, "B H Nq 1"], Float[Tensor, "B H _Nq Nk"], Tensor | None]:
        """c at each query and key, over the tokens that the query sees, and the queries' weights."""
        assert seen.notes is not None
        notes = seen.own_notes()
        own, totals = notes[..., :1], seen.notes[..., 0].unsqueeze(-2)
        if seen.padding is not None or seen.mask is not None:
            counts = seen.visible() if seen.is_scattered() else None
            if counts is None and seen.padding is not None:
                counts = ~seen.padding[:, None, None, :]
            if counts is not None:
                steps = totals.diff(dim=-1, prepend=torch.zeros_like(totals[..., :1]))
                totals = torch.where(counts, steps, 0.0).cumsum(-1)
                own = totals.take_along_dim(seen.own_index(), dim=-1)
        return own, totals, notes[..., 1:] if notes.shape[-1] > 1 else None

    def bias_product(
        self, q_positions: Positions, k_positions: Positions, seen: Seen
    ) -> tuple[Float[Tensor, "B H Nq 1"], Float[Tensor, "B H Nk 1"]]:
        own, totals, weights = self._sums(seen)
        return (torch.ones_like(own) if weights is None else weights), (totals - own[..., :1, :]).transpose(-2, -1)

    def score_mod(self, q_positions: Positions, k_positions: Positions, seen: Seen) -> ScoreMod:
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
    """The Forgetting Transformer: a key's logit decreases by -log f of every token after it, up to and with the query.

    Lin et al. 2025: f = sigmoid(w . x + b), one gate per head and token, computed from the layer's input. The bias
    is the sum of log f_m over m in (j, i]. Keys after the query, which the paper never scores, take the sum over
    (i, j] (our choice).

    Arguments
        bias_init  initial value of b: 0 in the authors' code (x-transformers: 5, for gates that start almost open)
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

    def steps(self, x: Stream) -> Float[Tensor, "B H N"]:
        return -F.logsigmoid(by_head(self.gate, x))


class CABLE(CumulativeBias):
    """Context-aware biases for length extrapolation: -g_i times the sum of f_m over m in (j, i].

    Veisi et al. 2025: steps f = ReLU(w . x + b) >= 0 and a weight g = softplus(v . x + c) of the query. The
    paper prints the bias without its minus sign; its text and code have it. Keys after the query take
    -g_i |S_i - S_j|, as in the authors' bidirectional code.

    Not verified: that the paper's experiments used the default step, ``relu``, and not ``softplus``.

    Arguments
        step        ``relu``; or ``softplus``, the paper's first version (without a weight), and FoX with the sign of
                    its gate reversed
        weighted    with the weight g; otherwise the paper's CABLE-NW
        kernelised  -g_i log(1 + (S_i - S_j)^2) instead of -g_i |S_i - S_j|: the paper's kernelised form
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

    def steps(self, x: Stream) -> Float[Tensor, "B H N"]:
        z = by_head(self.stride, x)
        return F.relu(z) if self.step == "relu" else F.softplus(z)

    def weights(self, x: Stream) -> Float[Tensor, "B H N"] | None:
        return None if self.weight is None else F.softplus(by_head(self.weight, x))

    def penalty(self, distance: Tensor, weight: Tensor | None) -> Tensor:
        if self.kernelised:
            distance = torch.log1p(distance * distance)
        return -distance if weight is None else -weight * distance


def by_head(layer: nn.Linear, x: Stream) -> Float[Tensor, "B H N"]:
    """One number per head and token, in float32 or, for float64, float64."""
    return linear(layer, x.to(widened(x.dtype))).transpose(1, 2)


ENCODINGS = {"cope": CoPE, "relative-projection": RelativeProjection, "fox": FoX, "cable": CABLE}
