"""Absolute encodings (one vector per position, added to the token embeddings or untied), and no encoding at all."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings import kit
from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.bias import T5
from toeplens.encodings.shapes import Positions, Stream
from toeplens.ground import invalid
from toeplens.ground.options import Finite, Limits, NotNegative, Positive


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

    def __init__(self, *, init_std: NotNegative = 0.02, **sizes: int) -> None:
        super().__init__(**sizes)
        self.weight = self.learned((self.max_len, self.d_model), kit.normal(init_std))

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
        self, *, start: Finite | None = None, layout: Literal["interleaved", "halves"] = "halves", **inherited: Any
    ) -> None:
        super().__init__(layout=layout, **inherited)
        start = self.d_model**-0.5 if start is None else start
        # checkpoints call it ``scale``; as an attribute, ``scale`` is the factor of q . k
        self._parameters["scale"] = self.learned((), partial(nn.init.constant_, val=start))

    @property
    def number(self) -> Float[Tensor, ""]:
        """The learned scalar."""
        return cast(Tensor, self._parameters["scale"])

    def table(self, positions: Positions) -> Float[Tensor, "*B N d_model"]:
        return super().table(positions) * self.number.to(torch.float64)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "1 D"]:
        """alpha^2 times the sinusoid's kernel."""
        return super().kernel(offsets) * self.number**2


class SHAPE(Sinusoidal, name="shape"):
    """Shifted absolute positions: in training, each sequence is shifted by a random k (Kiyono et al. 2021).

    k is drawn from {0, ..., max_shift} for each sequence on every call of `embed` in training mode. In evaluation
    nothing is shifted. The released code shifts by the maximum there; to reproduce that, add it to the positions.

    Arguments
        max_shift     the largest shift (default: ``max_len``; the paper: 500)
    """

    citation = "Kiyono et al. 2021, arXiv 2109.05644"
    formula = r"x_i + p_{i + k},\quad k \sim U\{0, \ldots, K\}"

    def __init__(self, *, max_shift: Annotated[int, Limits(at_least=0)] | None = None, **inherited: Any) -> None:
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
        return super().embed(x, self.draw(positions) if self.training else positions)

    def draw(self, positions: Positions) -> Positions:
        """Random integers below ``max_position``, in the order of the positions."""
        count = positions.shape[-1]
        if count > self.max_position:
            raise invalid("max_position", f"be at least the number of tokens, {count}", self.max_position)
        places = torch.randperm(self.max_position, device=positions.device)[:count].sort().values
        return places[torch.searchsorted(positions.sort(-1).values, positions.contiguous())]


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
        self.first = self.learned((2, self.num_heads), nn.init.zeros_) if untied_first else None
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
        places = layer(self.norm(F.embedding(positions, self.weight)))
        return places.unflatten(-1, (self.num_heads, self.head_dim)).transpose(-3, -2)
