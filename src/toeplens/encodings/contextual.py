"""Encodings whose positions, distances or biases depend on the tokens' content."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings import kit
from toeplens.encodings.base import AttentionInputs, CachedFeatures, KeyFeatures, PositionalEncoding
from toeplens.encodings.logits import gather_per_row
from toeplens.encodings.rotary import Pairing, rotate_by
from toeplens.encodings.shapes import Keys, PairMatrix, Positions, Queries, RotatedQK, ScoreMod, Stream
from toeplens.utils import invalid
from toeplens.utils.options import FiniteFloat, Positive, PositiveInt, Range

BLOCK = 64  # keys per block of `accumulate`
EPS = 1e-6  # added to a squared norm before the square root, as in the released codes


class CoPE(PositionalEncoding, name="cope"):
    """Contextual position encoding: the query decides which tokens count as steps between it and a key.

    Golovneva et al. 2024: each query opens a gate sigmoid(q_i . k_m) to each key. The position of key j is the sum p_ij
    of the gates from j to i, and the logit gains q_i . e[p_ij], interpolated between two integers. Gates are computed
    from scaled logits, for visible keys in their order; positions are not used. Keys after the query are counted from
    the one next to the query (our choice). One table, initialised to zero, serves all heads.

    Arguments
        positions_max  rows of the table; larger positions share the last (default: max_len + 1, enough for every key;
                       published: 64)
        scaled         scale the position term by the factor of q . k (1/sqrt(d)) too, as the authors' code does by
                       default; otherwise do not, as in the paper's listing and in x-transformers
        shared         one table for all layers; otherwise one per layer
    """

    coupling = "logits"
    data_dependent = True
    pair_width = 4
    citation = "Golovneva et al. 2024, arXiv 2405.18719"
    formula = r"s_{ij} + q_i^\top e\big[\sum_{m=j}^{i} \sigma(s_{im})\big],\quad s_{ij} = q_i^\top k_j / \sqrt d"

    def __init__(
        self, *, positions_max: PositiveInt | None = None, scaled: bool = False, shared: bool = False, **sizes: int
    ) -> None:
        super().__init__(**sizes)
        self.positions_max = self.max_len + 1 if positions_max is None else positions_max
        self.scaled, self.shared = scaled, shared
        self.weight = self.new_parameter((self.positions_max, self.head_dim), nn.init.zeros_)

    def transform_logits(
        self, logits: PairMatrix, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs
    ) -> PairMatrix:
        last = self.positions_max - 1
        token_positions = self.contextual_positions(logits, inputs).clamp(max=last)
        floor = token_positions.detach().floor()
        index = floor.long()
        q = inputs.q.to(token_positions.dtype)
        table = q @ self.weight.to(q.dtype).T
        lower, upper = table.gather(-1, index), table.gather(-1, (index + 1).clamp(max=last))
        term = lower + (token_positions - floor) * (upper - lower)
        return (logits + (term * inputs.scale if self.scaled else term)).to(logits.dtype)

    def contextual_positions(self, logits: PairMatrix, inputs: AttentionInputs) -> PairMatrix:
        """p_ij: the cumulative sum of gates between key and query."""
        gates = logits.to(kit.wide_dtype(logits.dtype)).sigmoid()
        visible = inputs.visible_mask()
        if visible is not None:
            gates = gates.masked_fill(~visible, 0.0)
        if inputs.causal:
            return kit.reverse_cumsum(gates)
        causal_mask = inputs.causal_mask()
        return kit.reverse_cumsum(gates.masked_fill(~causal_mask, 0.0)) + gates.masked_fill(causal_mask, 0.0).cumsum(-1)


class RelativeProjection(PositionalEncoding, name="relative-projection"):
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
    citation = "x-transformers, RelativeProjPositionalBias"
    formula = r"b_{ij} = (W_h x_i)^\top B_{:, \delta}"

    def __init__(
        self, *, basis: PositiveInt = 16, max_distance: PositiveInt | None = None, shared: bool = False, **sizes: int
    ) -> None:
        super().__init__(**sizes)
        self.max_distance = min(1024, self.max_len) if max_distance is None else max_distance
        self.shared = shared
        self.mix = nn.Linear(self.d_model, self.num_heads * basis)
        self.bank = nn.Parameter(torch.randn(basis, self.max_distance) * 0.02)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.bank, std=0.02)

    def key_features(self, x: Stream, cached: CachedFeatures | None = None) -> KeyFeatures:
        return kit.linear(self.mix, x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def bias(self, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs) -> PairMatrix:
        mixture = inputs.query_features()
        offsets = kit.offsets_between(q_positions, k_positions)
        kit.require_integers("RelativeProjection", offsets)
        curves = F.pad(mixture @ self.bank.to(mixture.dtype), (1, 1))  # a column of zeros at either end
        return gather_per_row(curves, offsets.clamp(-1, self.max_distance) + 1)


class CumulativeBias(PositionalEncoding):
    """A penalty on the distance |c_i - c_j|, where c is the cumulative sum of content-dependent steps.

    Subclasses define `steps`, and also `weights` and `penalty` if the bias is more than minus the distance. Tokens are
    counted in the order of the keys; positions are not used. The sum is kept in float64.
    """

    coupling = "bias"
    data_dependent = True
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

    def key_features(self, x: Stream, cached: CachedFeatures | None = None) -> KeyFeatures:
        totals = self.steps(x).to(torch.float64).cumsum(-1)
        if cached is not None:
            totals = totals + cached[:, :, -1:, 0]
        weights = self.weights(x)
        return torch.stack((totals,) if weights is None else (totals, weights.to(totals.dtype)), dim=-1)

    def bias(self, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs) -> PairMatrix:
        query_totals, totals, weights = self._totals(inputs)
        dtype = kit.wide_dtype(inputs.q.dtype)
        return self.penalty((query_totals - totals).abs().to(dtype), None if weights is None else weights.to(dtype))

    def _totals(
        self, inputs: AttentionInputs
    ) -> tuple[Float[Tensor, "B H Nq 1"], Float[Tensor, "B H _Nq Nk"], Tensor | None]:
        """c at each query and key, over the tokens that the query sees, and the queries' weights."""
        features = inputs.query_features()
        query_totals, totals = features[..., :1], inputs.features[..., 0].unsqueeze(-2)
        counted = inputs.visible_mask() if inputs.is_scattered() else None
        if counted is None and inputs.padding is not None:
            counted = ~inputs.padding[:, None, None, :]
        if counted is not None:
            steps = totals.diff(dim=-1, prepend=torch.zeros_like(totals[..., :1]))
            totals = torch.where(counted, steps, 0.0).cumsum(-1)
            query_totals = totals.take_along_dim(inputs.row_index(), dim=-1)
        return query_totals, totals, features[..., 1:] if features.shape[-1] > 1 else None

    def bias_product(
        self, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs
    ) -> tuple[Float[Tensor, "B H Nq 1"], Float[Tensor, "B H Nk 1"]]:
        query_totals, totals, weights = self._totals(inputs)
        weights = torch.ones_like(query_totals) if weights is None else weights
        return weights, (totals - query_totals[..., :1, :]).transpose(-2, -1)

    def score_mod(self, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs) -> ScoreMod:
        totals = inputs.features[..., 0]
        large = totals.float()
        small = (totals - large).detach().float()  # two float32 numbers hold what one would round away
        weights = inputs.features[..., 1].float() if inputs.features.shape[-1] > 1 else None

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance = large[batch, head, query] - large[batch, head, key]
            distance = (distance + (small[batch, head, query] - small[batch, head, key])).abs()
            return score + self.penalty(distance, None if weights is None else weights[batch, head, query])

        return add


class FoX(CumulativeBias, name="fox"):
    """The Forgetting Transformer: a key's logit decreases by -log f of every token after it, up to and with the query.

    Lin et al. 2025: f = sigmoid(w . x + b), one gate per head and token, computed from the layer's input. The bias
    is the sum of log f_m over m in (j, i]. Keys after the query, which the paper never scores, take the sum over
    (i, j] (our choice).

    Arguments
        bias_init  initial value of b: 0 in the authors' code (x-transformers: 5, for gates that start almost open)
    """

    citation = "Lin et al. 2025, arXiv 2503.02130"
    formula = r"b_{ij} = \sum_{m=j+1}^{i} \log \sigma(w_h^\top x_m + b_h)"

    def __init__(self, *, bias_init: FiniteFloat = 0.0, **sizes: int) -> None:
        super().__init__(**sizes)
        self.gate = nn.Linear(self.d_model, self.num_heads)
        self.initialise(kit.normal_init(0.02), self.gate.weight)
        self.initialise(partial(nn.init.constant_, val=bias_init), self.gate.bias)

    def steps(self, x: Stream) -> Float[Tensor, "B H N"]:
        return -F.logsigmoid(linear_per_head(self.gate, x))


class CABLE(CumulativeBias, name="cable"):
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
        self.step, self.kernelised = step, kernelised
        self.factorable = not kernelised
        self.stride = nn.Linear(self.d_model, self.num_heads)
        self.weight = nn.Linear(self.d_model, self.num_heads) if weighted else None
        for layer in [self.stride] if self.weight is None else [self.stride, self.weight]:
            self.initialise(kit.normal_init(0.02), layer.weight)
            self.initialise(nn.init.zeros_, layer.bias)

    def steps(self, x: Stream) -> Float[Tensor, "B H N"]:
        z = linear_per_head(self.stride, x)
        return F.relu(z) if self.step == "relu" else F.softplus(z)

    def weights(self, x: Stream) -> Float[Tensor, "B H N"] | None:
        return None if self.weight is None else F.softplus(linear_per_head(self.weight, x))

    def penalty(self, distance: Tensor, weight: Tensor | None) -> Tensor:
        if self.kernelised:
            distance = torch.log1p(distance * distance)
        return -distance if weight is None else -weight * distance


def linear_per_head(layer: nn.Linear, x: Stream) -> Float[Tensor, "B H N"]:
    """One number per head and token, in float32 or, for float64, float64."""
    return kit.linear(layer, x.to(kit.wide_dtype(x.dtype))).transpose(1, 2)


class _ContentRotation(PositionalEncoding):
    """A rotation by angles that subclasses compute from the key features; positions are not used."""

    coupling = "rotation"
    data_dependent = True
    shared = False

    def __init__(self, *, base: float, pairing: Pairing, **sizes: int) -> None:
        super().__init__(**sizes)
        kit.require_even("head_dim", self.head_dim)
        self.pairing: Pairing = pairing
        self.frequencies = self.register_exact("frequencies", kit.rotary_frequencies(self.head_dim, base))

    def angles(self, features: KeyFeatures, inputs: AttentionInputs) -> Float[Tensor, "B H N n"]:
        """The angles of all keys, in float64."""
        raise NotImplementedError

    def rotate(
        self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions, *, inputs: AttentionInputs
    ) -> RotatedQK:
        angles = self.angles(inputs.features, inputs)
        query_angles = replace(inputs, key_features=angles).query_features()
        return rotate_by(q, query_angles, self.pairing), rotate_by(k, angles, self.pairing)


class CARoPE(_ContentRotation, name="carope"):
    """Context-aware RoPE: tokens set how far each head's angles advance (Veisi et al. 2025).

    Each token's step for a head is f = 1/(softplus(x W) + 1). Pair t is rotated by the cumulative sum of f^t over the
    tokens so far (in float64), where RoPE has the sum of theta_1^t. Only the order of tokens matters.

    The paper says that it starts as RoPE, but its formula cannot: W = 0 gives f = 0.59. Our W starts at zero with a
    constant inside the softplus that makes f = theta_1 = base^(-2/d). x is the input of the layer's keys, so each
    layer has its own W. The paper says "token embedding", which may mean the first layer only.

    Not verified: the powers, which start at t = 0 here, as in RoPE; the authors' code was not available.

    Arguments
        start          ``rope``: with that constant; ``printed``: the formula as printed, without it
        base           as in RoPE, over 1
    """

    citation = "Veisi et al. 2025, arXiv 2507.23083"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \exp\Big(\mathrm{i} \sum_{m=j+1}^{i} f(x_m)^t\Big),"
        r" \quad f(x) = \frac{1}{\mathrm{softplus}(x W) + 1}"
    )

    def __init__(
        self,
        *,
        start: Literal["rope", "printed"] = "rope",
        base: Annotated[float, Range(above=1)] = 10000.0,
        pairing: Pairing = "interleaved",
        **sizes: int,
    ) -> None:
        super().__init__(base=base, pairing=pairing, **sizes)
        constant = torch.zeros((), dtype=torch.float64)
        if start == "rope":
            softplus = torch.tensor(base, dtype=torch.float64) ** (2 / self.head_dim) - 1
            constant = softplus + (-torch.expm1(-softplus)).log()
        self.start = self.register_exact("start", constant)
        self.powers = self.register_exact("powers", torch.arange(self.head_dim // 2, dtype=torch.float64))
        self.weight = self.new_parameter((self.num_heads, self.d_model), nn.init.zeros_)

    def key_features(self, x: Stream, cached: CachedFeatures | None = None) -> KeyFeatures:
        wide = kit.wide_dtype(x.dtype)
        with kit.without_autocast(x):
            projected = F.linear(x.to(wide), self.weight.to(wide)).transpose(1, 2).unsqueeze(-1)
        step = 1 / (F.softplus(projected.to(torch.float64) + self.start, threshold=40) + 1)
        angles = (step**self.powers).cumsum(-2)
        return angles if cached is None else angles + cached[:, :, -1:]

    def angles(self, features: KeyFeatures, inputs: AttentionInputs) -> Float[Tensor, "B H N n"]:
        inputs.require_contiguous_keys(self)
        if inputs.padding is None:
            return features
        return inputs.cumulative_sums(features.diff(dim=-2, prepend=torch.zeros_like(features[:, :, :1])))


class SelectiveRoPE(_ContentRotation, name="selective-rope"):
    """Selective RoPE: each token determines the step of every pair's angle, and steps add up (Movahedi et al. 2025).

    phi is a low-rank projection of the layer's input. Each head's slice of it is normalised and passed through a short
    causal depthwise convolution. A step is phi times a gate sigmoid(w_h . x + b_h) of the same normalised x. Pair t is
    rotated by tau_t = base^(-2t/d) (the temperature) times the cumulative sum of the steps, in float64. Only the order
    of tokens matters. The cached key features are phi before its convolution, and the gate.

    The defaults are those of the paper's language models, with SiLU and gate, as reported by others; the released code
    has neither by default. Left out here: its per-head projection with weight norm, temperatures that are learned or of
    the paper's tan(theta/2), and the norm of q and k after rotation.

    Arguments
        rank        rank of the projection (16 in the released code; the paper also has 8)
        conv_size   tokens in the convolution; None: phi's difference from the previous token instead of a convolution,
                    as in the released code, so that the angle is tau_t phi (without a gate)
        activation  after the convolution: ``silu`` or ``none``
        gate        with the gate
        bias        add exp(b) to the steps, with b learned and 0 at the start
        base, pairing  as in RoPE; 500000 and halves in the released code
    """

    citation = "Movahedi et al. 2025, arXiv 2511.17388"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \exp\Big(\mathrm{i} \tau_t \sum_{m=j+1}^{i} \sigma(w_h^\top \hat x_m + b_h)\,"
        r" \mathrm{silu}\,\phi_t(\hat x_{\le m})\Big)"
    )

    def __init__(
        self,
        *,
        rank: PositiveInt = 16,
        conv_size: PositiveInt | None = 4,
        activation: Literal["silu", "none"] = "silu",
        gate: bool = True,
        bias: bool = False,
        base: float = 500000.0,
        pairing: Pairing = "half",
        **sizes: int,
    ) -> None:
        super().__init__(base=base, pairing=pairing, **sizes)
        if self.d_model % self.num_heads:
            raise invalid("d_model", f"be a multiple of num_heads ({self.num_heads})", self.d_model)
        self.activation = activation
        self.down = nn.Linear(self.d_model, rank, bias=False)
        self.up = nn.Linear(rank, self.num_heads * self.head_dim // 2, bias=False)
        self.taps = self.register_exact("taps", torch.tensor([-1.0, 1.0], dtype=torch.float64).expand(1, 1, 2))
        shape = (self.num_heads, self.head_dim // 2, conv_size or 0)
        bound = (conv_size or 1) ** -0.5  # as torch initialises convolutions of one channel
        uniform = partial(nn.init.uniform_, a=-bound, b=bound)
        self.conv = None if conv_size is None else self.new_parameter(shape, uniform)
        self.gate = nn.Linear(self.d_model, self.num_heads) if gate else None
        self.constant = self.new_parameter((self.num_heads, 1, self.head_dim // 2), nn.init.zeros_) if bias else None

    def key_features(self, x: Stream, cached: CachedFeatures | None = None) -> KeyFeatures:
        slices = x.to(kit.wide_dtype(x.dtype)).unflatten(-1, (self.num_heads, -1))
        normed = (slices * (slices.square().sum(-1, keepdim=True) + EPS).rsqrt()).flatten(-2)
        phi = kit.linear(self.up, kit.linear(self.down, normed)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        if self.gate is None:
            return phi
        return torch.cat((phi, kit.linear(self.gate, normed).sigmoid().transpose(1, 2).unsqueeze(-1)), dim=-1)

    def angles(self, features: KeyFeatures, inputs: AttentionInputs) -> Float[Tensor, "B H N n"]:
        inputs.require_contiguous_keys(self)
        phi = features[..., : self.head_dim // 2]
        taps = self.taps.to(phi.dtype) if self.conv is None else self.conv.to(phi.dtype)
        steps = kit.short_convolution(phi, taps, inputs.document_ids, inputs.padding)
        if self.activation == "silu" and self.conv is not None:
            steps = F.silu(steps)
        if self.constant is not None:
            steps = steps + self.constant.to(steps.dtype).exp()
        if self.gate is not None:
            steps = steps * features[..., -1:]
        return inputs.cumulative_sums(steps.to(torch.float64)) * self.frequencies


class RePo(_ContentRotation, name="repo"):
    """RePo: each token predicts its own position, a real number per head, used by RoPE (Li et al. 2025).

    z = W_o (silu(W_g x) * W_c x), x the layer's input; z need not be ordered or positive. Position numbers and the
    order of tokens matter only through the mask. As in the released code, no projection has a bias, and
    all start from N(0, 0.02^2). Its models have RePo from layer 5 of 16 on, and RoPE before; here every layer has it.

    Arguments
        width    of the hidden layer; default d_model // 8, as published
        base, pairing  as in RoPE; 500000 and halves in the released code
    """

    citation = "Li et al. 2025, arXiv 2512.14391"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t\, e^{\mathrm{i} (z_i - z_j) \theta_t},"
        r"\quad z = W_o\, (\mathrm{silu}(W_g x) \odot W_c x)"
    )

    def __init__(
        self, *, width: PositiveInt | None = None, base: float = 500000.0, pairing: Pairing = "half", **sizes: int
    ) -> None:
        super().__init__(base=base, pairing=pairing, **sizes)
        width = max(1, self.d_model // 8) if width is None else width
        self.gate, self.content = (nn.Linear(self.d_model, width, bias=False) for _ in range(2))
        self.place_of = nn.Linear(width, self.num_heads, bias=False)
        self.initialise(kit.normal_init(0.02), self.gate.weight, self.content.weight, self.place_of.weight)

    def key_features(self, x: Stream, cached: CachedFeatures | None = None) -> KeyFeatures:
        wide = x.to(kit.wide_dtype(x.dtype))
        hidden = F.silu(kit.linear(self.gate, wide)) * kit.linear(self.content, wide)
        return kit.linear(self.place_of, hidden).transpose(1, 2).unsqueeze(-1)

    def angles(self, features: KeyFeatures, inputs: AttentionInputs) -> Float[Tensor, "B H N n"]:
        return features.to(torch.float64) * self.frequencies


class TAPA(PositionalEncoding, name="tapa"):
    """Token-aware phase attention: a cosine of two tokens' content and their distance (Wang et al. 2025, eq. 12).

    Heads are split: the first part of queries and keys gives the amplitude, the rest the phase,

        (q_A . k_A / sqrt(share d)) cos(2 pi |i - j|^alpha q_P . k_P / sqrt((1 - share) d)).

    It replaces q . k and has no parameters. It has no kernel: each query and key have their own function of the
    distance. At distance 0 it is q_A . k_A, scaled.

    Arguments
        alpha  exponent of the distance; published: 0.1
        share  share of the dimensions used for the amplitude; published: 0.5
        phase  ``quadratic``, as above, or ``linear``: the sum of q_P and k_P over sqrt((1 - share) d), which the paper
               finds worse
    """

    coupling = "logits"
    data_dependent = True
    forms_logits = True
    pair_width = 6
    citation = "Wang et al. 2025, arXiv 2509.12635"
    formula = (
        r"\frac{q_A^\top k_A}{\sqrt{\theta d}}"
        r" \cos\left(2 \pi |\delta|^\alpha \frac{q_P^\top k_P}{\sqrt{(1 - \theta) d}}\right)"
    )

    def __init__(
        self,
        *,
        alpha: Positive = 0.1,
        share: Positive = 0.5,
        phase: Literal["quadratic", "linear"] = "quadratic",
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        self.alpha, self.phase = alpha, phase
        self.amplitude_dim = round(share * self.head_dim)
        if not 1 <= self.amplitude_dim < self.head_dim:
            raise invalid("share", "leave amplitude and phase a dimension each", share)

    def transform_logits(
        self, logits: PairMatrix, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs
    ) -> PairMatrix:
        wide = kit.wide_dtype(inputs.q.dtype)
        split = (self.amplitude_dim, self.head_dim - self.amplitude_dim)
        (q_first, q_last), (k_first, k_last) = (x.to(wide).split(split, dim=-1) for x in (inputs.q, inputs.k))
        amplitude = q_first @ k_first.mT * (inputs.scale * math.sqrt(self.head_dim / self.amplitude_dim))
        q_last, k_last = q_last.to(torch.float64), k_last.to(torch.float64)
        if self.phase == "quadratic":
            phase = q_last @ k_last.mT
        else:
            phase = q_last.sum(-1).unsqueeze(-1) + k_last.sum(-1).unsqueeze(-2)
        distance = kit.offsets_between(q_positions, k_positions).abs().to(torch.float64).unsqueeze(-3)
        cycles = distance**self.alpha / math.sqrt(split[1]) * phase
        return (amplitude * torch.cos(2 * math.pi * cycles).to(wide)).to(logits.dtype)


def accumulate(
    q: Float[Tensor, "B H Nq d"],
    k: Float[Tensor, "B H Nk d"],
    w: Float[Tensor, "B H Nk d"],
    beta: Float[Tensor, "B H Nk"],
    rows: Int[Tensor, "*B Nq"],
    *,
    block: int = BLOCK,
) -> PairMatrix:
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
    pad = blocks * block - count
    k, w = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (blocks, block)) for x in (k, w))
    scaled = F.pad(beta, (0, pad)).unflatten(2, (blocks, block)).unsqueeze(-1) * w
    right = torch.cat(((scaled @ k.transpose(-2, -1)).tril(-1), scaled), dim=-1)
    # only entries strictly below the diagonal are read
    solved = torch.linalg.solve_triangular(scaled @ w.transpose(-2, -1), right, upper=False, unitriangular=True)
    wk = torch.cat((w, k), dim=-2).transpose(-2, -1)
    is_past = torch.arange(blocks * block, device=rows.device) <= rows.unsqueeze(-1)
    is_past = (is_past if is_past.ndim == 2 else is_past.unsqueeze(1)).split(block, dim=-1)
    scores = []
    for n in reversed(range(blocks)):
        q_w, q_k = (q @ wk[:, :, n]).split(block, dim=-1)
        corrections, update = (q_w.masked_fill(~is_past[n], 0.0) @ solved[:, :, n]).split((block, q.shape[-1]), dim=-1)
        scores.append(q_k - corrections)
        q = q - update
    return torch.cat(scores[::-1], dim=-1)[..., :count]


class PaTH(PositionalEncoding, name="path"):
    """Position by accumulated Householder-like transformations (Yang et al. 2025).

    Each token defines H_m = I - beta_m w_m w_m^T from its content. A query and a key are compared through the product
    of the matrices after the key, up to the query's own. The direction w is a low-rank projection of the layer's input,
    followed by a short causal convolution and normalisation. The strength is beta = 2 sigmoid(u . x + b), so that H has
    eigenvalues in (-1, 1]. The order of the keys counts, not their positions. Without a causal mask, keys after the
    query are compared untransformed (our choice).

    The cached key features are w before the convolution and beta before the sigmoid, in the model's dtype; the rest is
    computed in at least float32. The released code applies a SiLU after the convolution, which the paper does not
    mention, and the model's initialisation; ours is torch's.

    Arguments
        rank        rank of the projection to w; None for a full matrix
        conv_size   tokens in the convolution; with 1 it is a factor per channel
        activation  after the convolution: ``silu`` (the released code) or ``none`` (the paper's text)
    """

    coupling = "accumulated"
    data_dependent = True
    shared = False
    citation = "Yang et al. 2025, arXiv 2505.16381"
    formula = r"q_i^\top H_i H_{i-1} \cdots H_{j+1} k_j, \; H_m = I - \beta_m w_m w_m^\top"

    def __init__(
        self,
        *,
        rank: int | None = 32,
        conv_size: PositiveInt = 3,
        activation: Literal["silu", "none"] = "silu",
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        if rank is not None and rank < 1:
            raise invalid("rank", "be at least 1, or None for a full matrix", rank)
        self.activation = activation
        width = self.num_heads * self.head_dim
        self.down = None if rank is None else nn.Linear(self.d_model, rank, bias=False)
        self.up = nn.Linear(self.d_model if rank is None else rank, width, bias=False)
        self.conv = nn.Conv1d(width, width, conv_size, groups=width, bias=False)
        self.strength = nn.Linear(self.d_model, self.num_heads)

    def key_features(self, x: Stream, cached: CachedFeatures | None = None) -> KeyFeatures:
        low = x if self.down is None else kit.linear(self.down, x)
        direction = kit.linear(self.up, low).unflatten(-1, (self.num_heads, -1))
        return torch.cat((direction, kit.linear(self.strength, x).unsqueeze(-1)), dim=-1).transpose(1, 2)

    def transformations(
        self,
        features: Float[Tensor, "B H N c"],
        document_ids: Int[Tensor, "B N"] | None = None,
        padding: Bool[Tensor, "B N"] | None = None,
    ) -> tuple[Float[Tensor, "B H N d"], Float[Tensor, "B H N"]]:
        """w, of norm 1, and beta of every key, in the dtype of the features; arguments as in `AttentionInputs`."""
        taps = self.conv.weight.to(features.dtype).view(self.num_heads, self.head_dim, -1)
        w = kit.short_convolution(features[..., : self.head_dim], taps, document_ids, padding)
        if self.activation == "silu":
            w = F.silu(w)
        beta = 2 * features[..., self.head_dim].sigmoid()
        beta = beta if padding is None else beta.masked_fill(padding.unsqueeze(1), 0.0)
        return w * (w.square().sum(-1, keepdim=True) + EPS).rsqrt(), beta

    def score(
        self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions, *, inputs: AttentionInputs
    ) -> PairMatrix:
        inputs.require_contiguous_keys(self)
        wide = kit.wide_dtype(q.dtype)
        with kit.without_autocast(q):
            w, beta = self.transformations(inputs.features.to(wide), inputs.document_ids, inputs.padding)
            return accumulate(q.to(wide), k.to(wide), w, beta, inputs.rows).to(q.dtype)


class PaTHFoX(PaTH, name="path-fox"):
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

    def key_features(self, x: Stream, cached: CachedFeatures | None = None) -> KeyFeatures:
        return torch.cat((super().key_features(x), kit.linear(self.gate, x).transpose(1, 2).unsqueeze(-1)), dim=-1)

    def bias(self, q_positions: Positions, k_positions: Positions, *, inputs: AttentionInputs) -> PairMatrix:
        gate_sums = inputs.cumulative_sums(F.logsigmoid(inputs.features[..., -1:].double()))
        query_sums = replace(inputs, key_features=gate_sums).query_features()
        return (query_sums - gate_sums.transpose(-2, -1)).clamp(max=0.0).to(kit.wide_dtype(inputs.features.dtype))
