"""Encodings that add: vectors to the token embeddings, biases to the logits; and no encoding at all."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings import kit
from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.shapes import Positions, Stream
from toeplens.utils import invalid
from toeplens.utils.options import FiniteFloat, NonNegative, Positive, PositiveInt, Range


class NoPE(PositionalEncoding, name="nope"):
    """No positional encoding (Haviv et al. 2022, arXiv 2203.16634; Kazemnejad et al. 2023, arXiv 2305.19466)."""

    coupling = "none"
    citation = "Kazemnejad et al. 2023, arXiv 2305.19466"
    formula = r"q_i \cdot k_j / \sqrt{d}"

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        """Zero at every offset."""
        return torch.zeros(self.num_heads, offsets.numel(), device=offsets.device)


class Sinusoidal(PositionalEncoding, name="sinusoidal"):
    """Fixed sines and cosines of the position, added to the token embeddings (Vaswani et al. 2017, section 3.5).

    Arguments
        base    the longest wavelength is 2 pi base
        layout  ``interleaved`` (as in the paper: sin, cos, sin, cos, ...) or ``halves`` (all sines, then all cosines,
                as in Marian and in the undocumented sinusoid of the released code's RoPE)
    """

    coupling = "input"
    citation = "Vaswani et al. 2017, arXiv 1706.03762"
    formula = r"p_{i,2t} = \sin(i\,\theta_t),\quad p_{i,2t+1} = \cos(i\,\theta_t),\quad \theta_t = b^{-2t/d}"

    def __init__(
        self, *, base: float = 10000.0, layout: Literal["interleaved", "halves"] = "interleaved", **sizes: int
    ) -> None:
        super().__init__(**sizes)
        kit.require_even("d_model", self.d_model, "a sinusoid takes dimensions in pairs of sine and cosine")
        self.layout = layout
        self.frequencies = self.register_exact("frequencies", kit.rotary_frequencies(self.d_model, base))

    def table(self, positions: Positions) -> Float[Tensor, "*B N d_model"]:
        """The encoding vectors of ``positions``, in float64."""
        phases = positions.to(torch.float64).unsqueeze(-1) * self.frequencies
        return torch.stack((phases.sin(), phases.cos()), dim=-1 if self.layout == "interleaved" else -2).flatten(-2)

    def embed(self, x: Stream, positions: Positions) -> Stream:
        return x + self.table(positions).to(x.dtype)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "1 D"]:
        """p_i . p_j = sum over t of cos((i - j) theta_t): the Gram matrix of the input vectors is Toeplitz."""
        phases = offsets.to(torch.float64).unsqueeze(-1) * self.frequencies
        return phases.cos().sum(-1).unsqueeze(0).to(torch.get_default_dtype())


class Learned(PositionalEncoding, name="learned"):
    """One learned vector per position (Gehring et al. 2017; BERT, GPT-2).

    Arguments
        init_std  standard deviation of the initial table. 0 starts without position information. Small values were
                  found to give interpretable positions (Ito et al. 2024, arXiv 2406.08272)
    """

    coupling = "input"
    toeplitz = False
    bounded = True
    citation = "Gehring et al. 2017, arXiv 1705.03122"
    formula = r"x_i + p_i,\quad p_i \text{ learned}"
    weight: Tensor

    def __init__(self, *, init_std: NonNegative = 0.02, **sizes: int) -> None:
        super().__init__(**sizes)
        self.weight = self.new_parameter((self.max_len, self.d_model), kit.normal_init(init_std))

    def embed(self, x: Stream, positions: Positions) -> Stream:
        self.check_positions(positions)
        return x + F.embedding(positions, self.weight).to(x.dtype)


class RandomTable(Learned, name="random-fixed"):
    """One random normal vector per position, either fixed (the paper's "random") or trained (the released code).

    Arguments
        trainable  train the table from its random initialisation
        std        standard deviation of the entries
    """

    citation = "Gu et al. 2025, arXiv 2505.13027, section 4.1"
    formula = r"x_i + p_i,\quad p_i \sim N(0, \sigma^2 I)"

    def __init__(self, *, trainable: bool = False, std: Positive = 1.0, **sizes: int) -> None:
        PositionalEncoding.__init__(self, **sizes)
        table = torch.randn(self.max_len, self.d_model) * std
        if trainable:
            self.weight = nn.Parameter(table)
        else:
            self.register_buffer("weight", table)


class ScaledSinusoidal(Sinusoidal, name="scaled-sinusoidal"):
    """The sinusoid multiplied by one learned scalar (Li et al. 2019).

    As in x-transformers, the scalar starts at 1/sqrt(d_model), so that the vectors are not longer than the token
    embeddings, and sines come before cosines. In the paper the scalar starts at 1.

    Arguments
        start         initial value of the scalar (default: 1/sqrt(d_model))
    """

    citation = "Li et al. 2019, arXiv 1809.08895"
    formula = r"x_i + \alpha\, p_i"

    def __init__(
        self, *, start: FiniteFloat | None = None, layout: Literal["interleaved", "halves"] = "halves", **inherited: Any
    ) -> None:
        super().__init__(layout=layout, **inherited)
        initial = self.d_model**-0.5 if start is None else start
        # checkpoints call it ``scale``; as an attribute, ``scale`` is the factor of q . k
        self._parameters["scale"] = self.new_parameter((), partial(nn.init.constant_, val=initial))

    @property
    def learned_scale(self) -> Float[Tensor, ""]:
        """The learned scalar."""
        return cast(Tensor, self._parameters["scale"])

    def table(self, positions: Positions) -> Float[Tensor, "*B N d_model"]:
        return super().table(positions) * self.learned_scale.to(torch.float64)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "1 D"]:
        """alpha^2 times the sinusoid's kernel."""
        return super().kernel(offsets) * self.learned_scale**2


class SHAPE(Sinusoidal, name="shape"):
    """Shifted absolute positions: in training, each sequence is shifted by a random k (Kiyono et al. 2021).

    k is drawn from {0, ..., max_shift} for each sequence on every call of `embed` in training mode. In evaluation
    nothing is shifted. The released code shifts by the maximum there; to reproduce that, add it to the positions.

    Arguments
        max_shift     the largest shift (default: ``max_len``; the paper: 500)
    """

    citation = "Kiyono et al. 2021, arXiv 2109.05644"
    formula = r"x_i + p_{i + k},\quad k \sim U\{0, \ldots, K\}"

    def __init__(self, *, max_shift: Annotated[int, Range(at_least=0)] | None = None, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.max_shift = self.max_len if max_shift is None else max_shift

    def embed(self, x: Stream, positions: Positions) -> Stream:
        if self.training:
            positions = positions + torch.randint(self.max_shift + 1, (x.shape[0], 1), device=positions.device)
        return super().embed(x, positions)


class RandomizedSinusoidal(Sinusoidal, name="randomized-sinusoidal"):
    """Randomized positions: in training, N positions are replaced by N random ones below ``max_position``, in order.

    Ruoss et al. 2023, section 3: on every call of `embed` in training mode, N distinct integers below L are drawn, once
    for the whole batch. The token with the n-th smallest position gets the n-th smallest integer. In evaluation,
    positions are used unchanged. The paper also draws in evaluation; to do that, pass positions drawn from all L.

    Arguments
        max_position  L (default: four times ``max_len``; the paper: 2048, for training lengths up to 40)
    """

    citation = "Ruoss et al. 2023, arXiv 2305.16843"
    formula = r"x_i + p_{s_i},\quad s_1 < \ldots < s_N \text{ drawn from } \{0, \ldots, L - 1\}"

    def __init__(self, *, max_position: int | None = None, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.max_position = 4 * self.max_len if max_position is None else max_position
        kit.require_number("max_position", self.max_position, at_least=self.max_len)

    def embed(self, x: Stream, positions: Positions) -> Stream:
        return super().embed(x, self.draw_positions(positions) if self.training else positions)

    def draw_positions(self, positions: Positions) -> Positions:
        """Random integers below ``max_position``, in the order of the positions."""
        count = positions.shape[-1]
        if count > self.max_position:
            raise invalid("max_position", f"be at least the number of tokens, {count}", self.max_position)
        drawn = torch.randperm(self.max_position, device=positions.device)[:count].sort().values
        return drawn[torch.searchsorted(positions.sort(-1).values, positions.contiguous())]


class TUPE(PositionalEncoding, name="tupe"):
    """Transformer with untied positional encoding: the bias p_i U_q . p_j U_k / sqrt(2 d) (Ke et al. 2021, section 3).

    p is a learned table, U_q and U_k project it for each head, and all layers share the bias. As in the authors'
    code, LayerNorm is applied to p, the projections have their own biases, and the table is initialised from
    N(0, 0.02^2). The product q . k is scaled by 1/sqrt(2 d) as well; this is the encoding's `scale`.

    Arguments
        relative      add T5's bidirectional bucket bias (TUPE-R); otherwise TUPE-A
        untied_first  treat position 0 ([CLS]) as having no position: its row and its column each get one learned value
                      per head instead of the product, and entry (0, 0) takes the row's value. In the released code
                      these values are products of two extra table rows. Here, as in the paper, they are free parameters
                      that start at zero. With ``relative``, the row and the column also get their own buckets, as in
                      the released code, so that neither depends on the other token's position
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
        self.first = self.new_parameter((2, self.num_heads), nn.init.zeros_) if untied_first else None
        own_buckets = relative and untied_first
        self.relative_first = nn.Parameter(torch.empty(2, self.num_heads)) if own_buckets else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        super().reset_parameters()
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
        projected = layer(self.norm(F.embedding(positions, self.weight)))
        return projected.unflatten(-1, (self.num_heads, self.head_dim)).transpose(-3, -2)


class OffsetBias(PositionalEncoding):
    """A bias that is a function of the offset i - j only; subclasses define `kernel`."""

    coupling = "bias"

    def bias(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*H_Nq_Nk"]:
        offsets = kit.offsets_between(q_positions, k_positions)
        values = kit.evaluate_distinct(self._checked_kernel, offsets.flatten()).unflatten(-1, offsets.shape)
        return values if offsets.ndim == 2 else values.movedim(0, 1)

    def _checked_kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        values = self.kernel(offsets)
        expected = [self.num_heads, len(offsets)]
        if list(values.shape) != expected:
            field = f"{type(self).__name__}.kernel"
            raise invalid(field, f"return shape {expected}", got=f"shape {list(values.shape)}")
        return values

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        raise NotImplementedError


class T5(OffsetBias, name="t5"):
    """One learned value per head and distance bucket, shared by all layers (Raffel et al. 2020, section 2.1).

    Half of the buckets are exact distances, the others grow logarithmically up to ``max_distance``, and larger
    distances share the last one. T5 does not scale q . k by 1/sqrt(d): its `scale` is 1.

    Arguments
        num_buckets    number of buckets (both directions together)
        max_distance   distance from which on all share the last bucket
        bidirectional  use half of the buckets for keys after the query, as in T5's encoder; otherwise these share
                       bucket 0
    """

    citation = "Raffel et al. 2020, arXiv 1910.10683"
    formula = r"b_{ij} = w_{h,\,\mathrm{bucket}(i - j)}"
    scale_terms = 0

    def __init__(
        self, *, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = False, **sizes: int
    ) -> None:
        super().__init__(**sizes)
        ranges = 4 if bidirectional else 2  # near and far, in each direction
        exact = num_buckets // ranges
        if num_buckets % ranges or exact < 1:
            raise invalid("num_buckets", f"be a positive multiple of {ranges}", num_buckets)
        if max_distance <= exact:
            raise invalid("max_distance", f"be over the {exact} exact distances", max_distance)
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.randn(num_buckets, self.num_heads) * 0.02)

    def buckets(self, offsets: Int[Tensor, "*D"]) -> Int[Tensor, "*D"]:
        """The bucket of each offset i - j."""
        kit.require_integers("T5", offsets)
        count = self.num_buckets
        start, distance = 0, offsets.clamp(min=0)
        if self.bidirectional:
            count //= 2
            start, distance = (offsets < 0).to(offsets.dtype) * count, offsets.abs()
        exact = count // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (count - exact)).to(offsets.dtype)).clamp(max=count - 1)
        return start + torch.where(distance < exact, distance, far)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        return F.embedding(self.buckets(offsets), self.weight).T


class RelativeTable(OffsetBias, name="relative-table"):
    """One learned value per head and signed distance, no buckets (the released code's "relative", arXiv 2505.13027).

    Distances of ``max_len`` and more share the value of the last one.

    Arguments
        shared    one table for all layers; otherwise one per layer, as in the released code
        init_std  standard deviation of the initial table
    """

    citation = "Gu et al. 2025, arXiv 2505.13027, released code"
    formula = r"b_{ij} = w_{h,\,i - j}"

    def __init__(self, *, shared: bool = False, init_std: NonNegative = 0.02, **sizes: int) -> None:
        super().__init__(**sizes)
        self.shared = shared
        self.weight = self.new_parameter((2 * self.max_len - 1, self.num_heads), kit.normal_init(init_std))

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        kit.require_integers("RelativeTable", offsets)
        edge = self.max_len - 1
        return F.embedding(offsets.clamp(-edge, edge) + edge, self.weight).T


class ALiBi(OffsetBias, name="alibi"):
    """A penalty linear in the distance, -m_h |i - j|, with a fixed slope per head (Press et al. 2022, section 3).

    Under a causal mask |i - j| is the published i - j; without one it is the usual symmetric form.

    Arguments
        slopes  ``geometric``: m_h = 2^(-8h/H), h = 1..H, with the published interleaving if H is not a power of two;
                ``exponential``: m_h = e^(-h/H), h = 0..H-1, as in the released code of arXiv 2505.13027
    """

    citation = "Press et al. 2022, arXiv 2108.12409"
    formula = r"b_{ij} = -m_h |i - j|,\quad m_h = 2^{-8h/H}"
    factorable = True

    def __init__(self, *, slopes: Literal["geometric", "exponential"] = "geometric", **sizes: int) -> None:
        super().__init__(**sizes)
        exponential = torch.exp(-torch.arange(self.num_heads, dtype=torch.float64) / self.num_heads)
        values = geometric_slopes(self.num_heads) if slopes == "geometric" else exponential
        self.slopes = self.register_exact("slopes", values)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        return -self.slopes.unsqueeze(-1) * offsets.abs()

    def has_low_rank_bias(self, q_positions: Positions, k_positions: Positions) -> bool:
        """Whether the keys are in the order of their positions; read only where that is cheap."""
        if k_positions.device.type != "cpu" or torch.compiler.is_compiling() or k_positions.ndim != q_positions.ndim:
            return False
        return bool((k_positions.diff() >= 0).all()) and torch.equal(
            q_positions, k_positions[..., k_positions.shape[-1] - q_positions.shape[-1] :]
        )

    def bias_product(
        self, q_positions: Positions, k_positions: Positions
    ) -> tuple[Float[Tensor, "H Nq 1"], Float[Tensor, "*B H Nk 1"]]:
        offsets = (k_positions - q_positions[..., :1]).double()[..., None, :, None]
        slopes = self.slopes[:, None, None].expand(-1, q_positions.shape[-1], 1)
        return slopes, offsets.expand(*offsets.shape[:-3], self.num_heads, -1, -1)


def geometric_slopes(num_heads: int) -> Float[Tensor, "H"]:
    """2^(-8h/H) for a power of two; otherwise the next lower power's, then every second of the next higher's."""

    def powers(n: int) -> list[float]:
        return [2.0 ** (-8.0 * h / n) for h in range(1, n + 1)]

    lower = 2 ** int(math.log2(num_heads))
    values = powers(lower) + powers(2 * lower)[0::2][: num_heads - lower]
    return torch.tensor(values, dtype=torch.float64)


MIN_INIT = 0.01  # the released code's lower bound of KERPLE's parameters; here, of their initial values


def _init_inverse_softplus(x: Tensor, upper: float) -> Tensor:
    """Numbers whose softplus is uniform from ``MIN_INIT`` to ``upper``."""
    return x.uniform_(MIN_INIT, upper).expm1_().log_()


def _init_logit(x: Tensor) -> Tensor:
    """Numbers whose sigmoid is uniform from 0 to 1, without the ends."""
    return x.uniform_(MIN_INIT / 2, 1 - MIN_INIT / 2).logit_()


class Kerple(OffsetBias):
    """A learned kernel of the distance with two parameters r1, r2 per head (Chi et al. 2022).

    The released code keeps them in range by clamping outside the gradient. Here r1 is the softplus of a free parameter,
    so that the gradient is never cut off. Both start as in the released code, uniform, but at least 0.01. Keys after
    the query, which the released code never scores, are penalised by their distance too.

    Arguments
        shared  one pair (r1, r2) per head for all layers; otherwise one per layer, as published
    """

    citation = "Chi et al. 2022, arXiv 2205.09921"

    def __init__(self, *, shared: bool = False, **sizes: int) -> None:
        super().__init__(**sizes)
        self.shared = shared

    def positive_parameter(self, upper: float) -> nn.Parameter:
        """A positive number per head (a softplus) that starts from U(0, ``upper``), but at least 0.01."""
        return self.new_parameter((self.num_heads,), partial(_init_inverse_softplus, upper=upper))


class KerpleLog(Kerple, name="kerple-log"):
    """The logarithmic kernel -r1 log(1 + r2 |i - j|), r1, r2 > 0: see `Kerple`.

    r1 starts from U(0, 2), and r2, also a softplus, from U(0, 1).
    """

    formula = r"b_{ij} = -r_1 \log(1 + r_2 |\delta|)"

    def __init__(self, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.size, self.rate = self.positive_parameter(2.0), self.positive_parameter(1.0)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        size, rate = (F.softplus(p.to(kit.wide_dtype(p.dtype))).unsqueeze(-1) for p in (self.size, self.rate))
        return -size * torch.log1p(rate * offsets.abs().to(rate.dtype))


class KerplePower(Kerple, name="kerple-power"):
    """The power kernel -r1 |i - j|^r2, r1 > 0 and 0 < r2 < 2: see `Kerple`.

    r1 starts from U(0, 1), r2 from U(0, 2). The paper also allows r2 = 2; here r2 is twice the sigmoid of a free
    parameter, which stays below 2.
    """

    formula = r"b_{ij} = -r_1 |\delta|^{r_2}"

    def __init__(self, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.size = self.positive_parameter(1.0)
        self.power = self.new_parameter((self.num_heads,), _init_logit)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        size, power = (p.to(kit.wide_dtype(p.dtype)).unsqueeze(-1) for p in (self.size, self.power))
        return -F.softplus(size) * offsets.abs().to(power.dtype) ** (2 * power.sigmoid())


class Sandwich(OffsetBias, name="sandwich"):
    """The inner product of sinusoids as a bias, p_i . p_j / c_h, c_h = 8h/H, h = 1..H (Chi et al. 2023).

    p_i . p_j is the sum over t of cos((i - j) / base^(2t/width)), t = 0..width/2 - 1, whatever the model's width. It
    is even, so keys after the query need no extra rule. It is often written minus its maximum, width/2. That constant
    does not change the softmax and is left out here, as in the paper's code.

    Arguments
        width  dimensions of the sinusoids
        base   the longest wavelength is 2 pi base
    """

    citation = "Chi et al. 2023, arXiv 2212.10356"
    formula = r"b_{ij} = \frac{H}{8h} \sum_t \cos(\delta\, \theta_t),\quad \theta_t = b^{-2t/\bar d}"

    def __init__(self, *, width: int = 128, base: float = 10000.0, **sizes: int) -> None:
        super().__init__(**sizes)
        kit.require_even("width", width, "a sinusoid takes dimensions in pairs of sine and cosine")
        self.frequencies = self.register_exact("frequencies", kit.rotary_frequencies(width, base))
        heads = torch.arange(1, self.num_heads + 1, dtype=torch.float64)
        self.slopes = self.register_exact("slopes", self.num_heads / (8 * heads))

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        total = torch.zeros(offsets.shape, dtype=torch.float64, device=offsets.device)
        for frequency in self.frequencies:  # in turn, to need memory for the sum only
            total = total + (offsets * frequency).cos()
        return self.slopes.unsqueeze(-1) * total


class DynamicBias(OffsetBias, name="dynamic-bias"):
    """An MLP of the signed distance computes each head's bias (Wang et al. 2022, in one dimension).

    As in x-transformers: Linear(1, hidden), then depth - 1 times Linear(hidden, hidden), each followed by SiLU, then
    Linear(hidden, heads). The paper's version is for images: it takes two distances and uses ReLU.

    Arguments
        hidden        width of the network (default: ``d_model`` / 4)
        depth         number of hidden layers
        log_distance  the input is sign(i - j) log(1 + |i - j|) instead of i - j
        norm          LayerNorm before each SiLU, as in the paper
        shared        one network for all layers; otherwise one per layer
    """

    citation = "Wang et al. 2022, arXiv 2108.00154"
    formula = r"b_{ij} = f_\theta(\delta)_h"

    def __init__(
        self,
        *,
        hidden: PositiveInt | None = None,
        depth: PositiveInt = 2,
        log_distance: bool = False,
        norm: bool = False,
        shared: bool = True,
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        hidden = max(1, self.d_model // 4) if hidden is None else hidden
        self.log_distance, self.shared = log_distance, shared
        self.layers_in = nn.ModuleList(nn.Linear(hidden if n else 1, hidden) for n in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) if norm else nn.Identity() for _ in range(depth))
        self.layer_out = nn.Linear(hidden, self.num_heads)
        self.pair_width = 1 + 2 * hidden // self.num_heads

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        x = offsets.to(kit.wide_dtype(self.layer_out.weight.dtype)).unsqueeze(-1)
        if self.log_distance:
            x = x.sign() * x.abs().log1p()
        for layer, norm in zip(self.layers_in, self.norms, strict=True):
            x = kit.linear(layer, x)
            if isinstance(norm, nn.LayerNorm):
                x = F.layer_norm(x, x.shape[-1:], norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)
            x = F.silu(x)
        return kit.linear(self.layer_out, x).T


class FIRE(PositionalEncoding, name="fire"):
    """f(psi(i - j) / psi(max(i, L))), psi(x) = log(c x + 1): the distance relative to the query's position.

    Li et al. 2024: f is a network 1-32-H with one hidden layer and ReLU. c and the threshold L are learned,
    as |c| and |m| times ``threshold``, m starting at 1, with 10^-6 added to the denominator, as in the paper's listing.
    The normaliser uses the query's position, counted from 0. The bias is therefore not a function of the offset, and
    shifting all positions changes it. Keys after the query take |i - j| with the same normaliser, which is what the
    listing computes; the paper covers only causal models.

    Arguments
        threshold  initial value of L
        c          initial value of c
        hidden     width of the network
        shared     one f, c and L for all layers (the paper's FIRE-S); otherwise one set per layer
    """

    coupling = "bias"
    toeplitz = False
    citation = "Li et al. 2024, arXiv 2310.04418"
    formula = r"b_{ij} = f_\theta\big(\psi(|\delta|) / \psi(\max(i, L))\big)_h,\quad \psi(x) = \log(c x + 1)"

    def __init__(
        self,
        *,
        threshold: Positive = 512.0,
        c: Positive = 0.1,
        hidden: PositiveInt = 32,
        shared: bool = False,
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        self.shared = shared
        self.c = self.new_parameter((), partial(nn.init.constant_, val=c))
        self.start_threshold = threshold
        self.multiplier = self.new_parameter((), nn.init.ones_)
        self.pair_width = 1 + 2 * hidden // self.num_heads
        self.inner, self.outer = nn.Linear(1, hidden), nn.Linear(hidden, self.num_heads)

    def bias(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*H_Nq_Nk"]:
        dtype = kit.wide_dtype(self.c.dtype)
        c, threshold = self.c.to(dtype).abs(), (self.multiplier.to(dtype) * self.start_threshold).abs()
        distance = torch.log1p(c * kit.offsets_between(q_positions, k_positions).abs().to(dtype))
        normaliser = torch.log1p(c * torch.maximum(q_positions.to(dtype), threshold)) + 1e-6
        ratio = (distance / normaliser.unsqueeze(-1)).unsqueeze(-1)
        return kit.linear(self.outer, kit.linear(self.inner, ratio).relu()).movedim(-1, -3)
