"""Relative positions as vectors: the offset's contribution to a logit is weighted by the query, the key, or both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.base import PositionalEncoding, Seen
from toeplens.encodings.kit import (
    normal,
    offsets_between,
    require_even,
    require_whole,
    rotary_frequencies,
    turns,
    widened,
)
from toeplens.encodings.shapes import Pairs, Positions, Queries
from toeplens.ground import choose, invalid
from toeplens.ground.options import Count, Limits


def at_each(table: Float[Tensor, "B H N R"], index: Int[Tensor, "*B N M"]) -> Float[Tensor, "B H N M"]:
    """For every row of ``table``, its entries at that row's indices, the same for all heads."""
    return table.gather(-1, index.unsqueeze(-3).expand(*table.shape[:-1], index.shape[-1]))


def _indicators(index: Int[Tensor, "D"], count: int) -> Complex[Tensor, "1 n D"]:
    return F.one_hot(index, count).T.unsqueeze(0).to(torch.complex128)


def _each_xavier(tables: Float[Tensor, "H R d"]) -> None:
    for table in tables:
        nn.init.xavier_uniform_(table)


class Shaw(PositionalEncoding):
    """Relative position vectors for keys, q_i . a^K, and for values, a^V (Shaw et al. 2018, section 3.1-3.2).

    One learned vector per offset j - i from -k to k; larger offsets share the last. Both terms of a logit are
    scaled by 1/sqrt(d). The products of a query with the 2k + 1 vectors are computed once and gathered.

    Arguments
        max_distance  k
        on_values     with the vectors a^V
        shared_heads  the same vectors for all heads; otherwise one set per head
        shared        one set for all layers; otherwise one per layer, as published

    The defaults match neither of the paper's models: its base model has k = 16 and one set per head (``shared_heads``
    False), its large model k = 8 and one set for all heads. The paper gives no initialisation; here it is
    Glorot uniform, as in tensor2tensor.
    """

    coupling = "logits"
    citation = "Shaw et al. 2018, arXiv 1803.02155"
    formula = r"q_i^\top (k_j + a^K_{\mathrm{clip}(-\delta, -k, k)}) / \sqrt d"

    def __init__(
        self,
        *,
        max_distance: Annotated[int, Limits(at_least=0)] = 16,
        on_values: bool = True,
        shared_heads: bool = True,
        shared: bool = False,
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        self.max_distance, self.shared = max_distance, shared
        shape = (1 if shared_heads else self.num_heads, 2 * max_distance + 1, self.head_dim)
        self.keys = self.learned(shape, _each_xavier)
        self.values = self.learned(shape, _each_xavier) if on_values else None

    def index(self, offsets: Int[Tensor, "*D"]) -> Int[Tensor, "*D"]:
        """The table row of each offset i - j."""
        require_whole("Shaw", offsets)
        return (-offsets).clamp(-self.max_distance, self.max_distance) + self.max_distance

    def transform_logits(self, logits: Pairs, q_positions: Positions, k_positions: Positions, seen: Seen) -> Pairs:
        products = seen.q @ self.keys.to(seen.q.dtype).transpose(-2, -1)
        return logits + seen.scale * at_each(products, self.index(offsets_between(q_positions, k_positions)))

    def add_values(self, weights: Pairs, q_positions: Positions, k_positions: Positions) -> Queries | None:
        if self.values is None:
            return None
        index = self.index(offsets_between(q_positions, k_positions)).unsqueeze(-3).expand(weights.shape)
        wide = weights.to(widened(weights.dtype))
        sums = wide.new_zeros(*weights.shape[:-1], self.values.shape[-2]).scatter_add(-1, index, wide)
        return sums.to(weights.dtype) @ self.values.to(weights.dtype)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 n D"]:
        """The functions of the offset that queries weight: per table row, 1 where the offset uses it, otherwise 0."""
        return _indicators(self.index(offsets), self.keys.shape[-2])


class TransformerXL(PositionalEncoding):
    """Sinusoids of the offset, multiplied with the query and with a bias vector (Dai et al. 2019, section 3.3).

    logit = (q_i . k_j + q_i . W_R r + u . k_j + v . W_R r) / sqrt(d), with r the sinusoid of i - j (sines, then
    cosines) of the model's width. Each layer has its own W_R; all layers share u and v. As in the released code, all
    four terms are scaled by 1/sqrt(d), and all parameters start from N(0, 0.02^2); its dropout on r is left out. Keys
    after the query have negative offsets, as in XLNet.

    The sine and cosine of i - j are decomposed into those of i and of j. So (q_i + v) . W_R r is an inner product of
    d_model dimensions between a vector of the query and its position and a vector of the key's position. This
    works for any positions and forms no vector per pair. It costs d_model products per pair, where q . k costs
    head_dim.

    Arguments
        base         the longest wavelength is 2 pi base
        tied_biases  one u and v for all layers, as published; otherwise one per layer (possible in XLNet)
    """

    coupling = "logits"
    shared = False
    citation = "Dai et al. 2019, arXiv 1901.02860"
    formula = r"((q_i + u)^\top k_j + (q_i + v)^\top W_R r_\delta) / \sqrt d"

    def __init__(self, *, base: float = 10000.0, tied_biases: bool = True, **sizes: int) -> None:
        super().__init__(**sizes)
        require_even("d_model", self.d_model, "a sinusoid takes dimensions in pairs of sine and cosine")
        self.frequencies = self.register_exact("frequencies", rotary_frequencies(self.d_model, base))
        self.tied_biases = tied_biases
        self.weight = self.learned((self.num_heads, self.head_dim, self.d_model), normal(0.02))
        self.u, self.v = (self.learned((self.num_heads, 1, self.head_dim), normal(0.02)) for _ in range(2))

    def for_layer(self, layer: int) -> PositionalEncoding:
        own = super().for_layer(layer)
        if self.tied_biases:
            assert isinstance(own, TransformerXL)
            own.u, own.v = self.u, self.v
        return own

    def transform_logits(self, logits: Pairs, q_positions: Positions, k_positions: Positions, seen: Seen) -> Pairs:
        dtype = widened(seen.q.dtype)
        weight, u, v = (parameter.to(dtype) for parameter in (self.weight, self.u, self.v))
        on_sin, on_cos = ((seen.q.to(dtype) + v) @ weight).chunk(2, dim=-1)
        q_sin, q_cos = self._tables(q_positions, dtype)
        k_sin, k_cos = self._tables(k_positions, dtype)
        of_query = torch.cat((on_sin * q_sin + on_cos * q_cos, on_cos * q_sin - on_sin * q_cos), dim=-1)
        of_key = torch.cat((k_cos, k_sin), dim=-1)
        added = of_query @ of_key.transpose(-2, -1) + u @ seen.k.to(dtype).transpose(-2, -1)
        return (logits + seen.scale * added).to(logits.dtype)

    def _tables(self, positions: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        phases = (positions.to(torch.float64).unsqueeze(-1) * self.frequencies).unsqueeze(-3)
        return phases.sin().to(dtype), phases.cos().to(dtype)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 n D"]:
        """e^(i delta theta_t), whose real and imaginary parts are the functions of the offset that content weights."""
        return turns(self.frequencies.unsqueeze(-1) * offsets.to(torch.float64)).unsqueeze(0)


class DeBERTa(PositionalEncoding):
    """Disentangled attention: content to position and position to content (He et al. 2021, section 3.1).

    logit = (q_i . k_j + q_i . Kr[d(i, j)] + k_j . Qr[d(j, i)]) / sqrt(3 d), where Kr = P W_kr and Qr = P W_qr are
    per-layer projections of one table P of 2k rows that all layers share; d(i, j) = i - j + k, clipped to the
    table. All terms have the same scale: `scale` is 1/sqrt(3 d), or 1/sqrt(2 d) with one added term. Left out are
    DeBERTa's absolute positions in the last layers, dropout and LayerNorm on P, the bias of the first version's
    W_qr, and v2's reuse of the content projections for P, which an encoding has no access to.

    Arguments
        max_distance      k (default: 512, but at most ``max_len``)
        position_buckets  exact offsets up to half of this number, then logarithmic buckets up to ``max_distance``, as
                          in DeBERTa-v2 and v3 (256 of 512); the table has twice as many rows. None: one row per offset
        terms             ``c2p`` (content to position) and ``p2c`` (position to content), or one of them
        p2c_index         ``paper``: a key uses the row d(j, i), as printed; ``released``: the row d(i, j), as in the
                          released code and in transformers
    """

    coupling = "logits"
    shared = False
    citation = "He et al. 2021, arXiv 2006.03654"
    formula = r"(q_i^\top k_j + q_i^\top W_{kr} P_{d(i,j)} + k_j^\top W_{qr} P_{d(j,i)}) / \sqrt{3 d}"
    scale_terms = 3

    def __init__(
        self,
        *,
        max_distance: Count | None = None,
        position_buckets: int | None = None,
        terms: Sequence[str] = ("c2p", "p2c"),
        p2c_index: Literal["paper", "released"] = "paper",
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        self.max_distance = min(512, self.max_len) if max_distance is None else max_distance
        self.position_buckets = position_buckets
        if position_buckets is not None:
            require_even("position_buckets", position_buckets, "half of them are exact offsets")
            most = 2 * (self.max_distance - 1)
            if position_buckets >= most:
                raise invalid("position_buckets", f"be under 2 * (max_distance - 1) = {most}", position_buckets)
        self.terms = tuple(choose("terms", term, ("c2p", "p2c")) for term in terms)
        if not self.terms or len(set(self.terms)) != len(self.terms):
            raise invalid("terms", "be 'c2p', 'p2c', or both, each once", list(terms))
        self.scale_terms = 1 + len(self.terms)
        self.p2c_index = p2c_index
        self.span = self.max_distance if position_buckets is None else position_buckets
        self.table = self.learned((2 * self.span, self.d_model), normal(0.02))
        shape = (self.num_heads, self.d_model, self.head_dim)
        self.projections = nn.ParameterDict({term: self.learned(shape, normal(0.02)) for term in self.terms})

    def for_layer(self, layer: int) -> PositionalEncoding:
        own = super().for_layer(layer)
        assert isinstance(own, DeBERTa)
        own.table = self.table
        return own

    def index(self, offsets: Int[Tensor, "*D"]) -> Int[Tensor, "*D"]:
        """The table row of each offset."""
        require_whole("DeBERTa", offsets)
        if self.position_buckets is not None:
            middle = self.position_buckets // 2
            distance = offsets.abs().clamp(min=middle).to(torch.float64)
            steps = torch.log(distance / middle) / torch.tensor((self.max_distance - 1) / middle).double().log()
            far = offsets.sign() * ((steps * (middle - 1)).ceil().long() + middle)
            offsets = torch.where(offsets.abs() <= middle, offsets, far)
        return (offsets + self.span).clamp(0, 2 * self.span - 1)

    def transform_logits(self, logits: Pairs, q_positions: Positions, k_positions: Positions, seen: Seen) -> Pairs:
        if "c2p" in self.terms:
            index = self.index(offsets_between(q_positions, k_positions))
            logits = logits + seen.scale * at_each(self._products("c2p", seen.q), index)
        if "p2c" in self.terms:
            back = offsets_between(k_positions, q_positions)
            index = self.index(back if self.p2c_index == "paper" else -back)
            logits = logits + seen.scale * at_each(self._products("p2c", seen.k), index).mT
        return logits

    def _products(self, term: str, x: Float[Tensor, "B H N d"]) -> Float[Tensor, "B H N R"]:
        return x @ (self.table.to(x.dtype) @ self.projections[term].to(x.dtype)).mT

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 n D"]:
        """The functions of the offset that content weights: 1 where an offset or its negative uses a row, else 0."""
        return torch.cat([_indicators(self.index(side), 2 * self.span) for side in (offsets, -offsets)], dim=1)


ENCODINGS = {"shaw": Shaw, "transformer-xl": TransformerXL, "deberta": DeBERTa}
