"""Encodings that change logits or weights: vectors and networks of the offset, learned factors, stick-breaking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings import kit
from toeplens.encodings.additive import FIRE, T5, ALiBi, KerpleLog, RelativeTable
from toeplens.encodings.base import AttentionInputs, PositionalEncoding
from toeplens.encodings.rotary import RoPE
from toeplens.encodings.shapes import Keys, PairMatrix, Positions, Queries, RotatedQK
from toeplens.utils import InputError, choose, invalid
from toeplens.utils.options import NonNegative, PositiveInt, Range


def gather_per_row(table: Float[Tensor, "B H N R"], index: Int[Tensor, "*B N M"]) -> Float[Tensor, "B H N M"]:
    """For every row of ``table``, its entries at that row's indices, the same for all heads."""
    return table.gather(-1, index.unsqueeze(-3).expand(*table.shape[:-1], index.shape[-1]))


def _one_hot_kernel(index: Int[Tensor, "D"], count: int) -> Complex[Tensor, "1 n D"]:
    return F.one_hot(index, count).T.unsqueeze(0).to(torch.complex128)


def _xavier_per_table(tables: Float[Tensor, "H R d"]) -> None:
    for table in tables:
        nn.init.xavier_uniform_(table)


class Shaw(PositionalEncoding, name="shaw"):
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
        max_distance: Annotated[int, Range(at_least=0)] = 16,
        on_values: bool = True,
        shared_heads: bool = True,
        shared: bool = False,
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        self.max_distance, self.shared = max_distance, shared
        shape = (1 if shared_heads else self.num_heads, 2 * max_distance + 1, self.head_dim)
        self.keys = self.new_parameter(shape, _xavier_per_table)
        self.values = self.new_parameter(shape, _xavier_per_table) if on_values else None

    def table_rows(self, offsets: Int[Tensor, "*D"]) -> Int[Tensor, "*D"]:
        """The table row of each offset i - j."""
        kit.require_integers("Shaw", offsets)
        return (-offsets).clamp(-self.max_distance, self.max_distance) + self.max_distance

    def transform_logits(
        self, logits: PairMatrix, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs
    ) -> PairMatrix:
        products = inputs.q @ self.keys.to(inputs.q.dtype).transpose(-2, -1)
        rows = self.table_rows(kit.offsets_between(q_positions, k_positions))
        return logits + inputs.scale * gather_per_row(products, rows)

    def add_values(self, weights: PairMatrix, q_positions: Positions, k_positions: Positions) -> Queries | None:
        if self.values is None:
            return None
        index = self.table_rows(kit.offsets_between(q_positions, k_positions)).unsqueeze(-3).expand(weights.shape)
        wide = weights.to(kit.wide_dtype(weights.dtype))
        sums = wide.new_zeros(*weights.shape[:-1], self.values.shape[-2]).scatter_add(-1, index, wide)
        return sums.to(weights.dtype) @ self.values.to(weights.dtype)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 n D"]:
        """The functions of the offset that queries weight: per table row, 1 where the offset uses it, otherwise 0."""
        return _one_hot_kernel(self.table_rows(offsets), self.keys.shape[-2])


class TransformerXL(PositionalEncoding, name="transformer-xl"):
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
        kit.require_even("d_model", self.d_model, "a sinusoid takes dimensions in pairs of sine and cosine")
        self.frequencies = self.register_exact("frequencies", kit.rotary_frequencies(self.d_model, base))
        self.tied_biases = tied_biases
        self.weight = self.new_parameter((self.num_heads, self.head_dim, self.d_model), kit.normal_init(0.02))
        shape = (self.num_heads, 1, self.head_dim)
        self.u, self.v = (self.new_parameter(shape, kit.normal_init(0.02)) for _ in range(2))

    def for_layer(self, layer: int) -> PositionalEncoding:
        layer_copy = super().for_layer(layer)
        if self.tied_biases:
            assert isinstance(layer_copy, TransformerXL)
            layer_copy.u, layer_copy.v = self.u, self.v
        return layer_copy

    def transform_logits(
        self, logits: PairMatrix, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs
    ) -> PairMatrix:
        dtype = kit.wide_dtype(inputs.q.dtype)
        weight, u, v = (parameter.to(dtype) for parameter in (self.weight, self.u, self.v))
        on_sin, on_cos = ((inputs.q.to(dtype) + v) @ weight).chunk(2, dim=-1)
        q_sin, q_cos = self._tables(q_positions, dtype)
        k_sin, k_cos = self._tables(k_positions, dtype)
        query_terms = torch.cat((on_sin * q_sin + on_cos * q_cos, on_cos * q_sin - on_sin * q_cos), dim=-1)
        key_terms = torch.cat((k_cos, k_sin), dim=-1)
        terms = query_terms @ key_terms.transpose(-2, -1) + u @ inputs.k.to(dtype).transpose(-2, -1)
        return (logits + inputs.scale * terms).to(logits.dtype)

    def _tables(self, positions: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        phases = (positions.to(torch.float64).unsqueeze(-1) * self.frequencies).unsqueeze(-3)
        return phases.sin().to(dtype), phases.cos().to(dtype)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 n D"]:
        """e^(i delta theta_t), whose real and imaginary parts are the functions of the offset that content weights."""
        return kit.complex_exp(self.frequencies.unsqueeze(-1) * offsets.to(torch.float64)).unsqueeze(0)


class DeBERTa(PositionalEncoding, name="deberta"):
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
        max_distance: PositiveInt | None = None,
        position_buckets: int | None = None,
        terms: Sequence[str] = ("c2p", "p2c"),
        p2c_index: Literal["paper", "released"] = "paper",
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        self.max_distance = min(512, self.max_len) if max_distance is None else max_distance
        self.position_buckets = position_buckets
        if position_buckets is not None:
            kit.require_even("position_buckets", position_buckets, "half of them are exact offsets")
            limit = 2 * (self.max_distance - 1)
            if position_buckets >= limit:
                raise invalid("position_buckets", f"be under 2 * (max_distance - 1) = {limit}", position_buckets)
        self.terms = tuple(choose("terms", term, ("c2p", "p2c")) for term in terms)
        if not self.terms or len(set(self.terms)) != len(self.terms):
            raise invalid("terms", "be 'c2p', 'p2c', or both, each once", list(terms))
        self.scale_terms = 1 + len(self.terms)
        self.p2c_index = p2c_index
        self.span = self.max_distance if position_buckets is None else position_buckets
        self.table = self.new_parameter((2 * self.span, self.d_model), kit.normal_init(0.02))
        shape, init = (self.num_heads, self.d_model, self.head_dim), kit.normal_init(0.02)
        self.projections = nn.ParameterDict({term: self.new_parameter(shape, init) for term in self.terms})

    def for_layer(self, layer: int) -> PositionalEncoding:
        layer_copy = super().for_layer(layer)
        assert isinstance(layer_copy, DeBERTa)
        layer_copy.table = self.table
        return layer_copy

    def table_rows(self, offsets: Int[Tensor, "*D"]) -> Int[Tensor, "*D"]:
        """The table row of each offset."""
        kit.require_integers("DeBERTa", offsets)
        if self.position_buckets is not None:
            middle = self.position_buckets // 2
            distance = offsets.abs().clamp(min=middle).to(torch.float64)
            steps = torch.log(distance / middle) / torch.tensor((self.max_distance - 1) / middle).double().log()
            far = offsets.sign() * ((steps * (middle - 1)).ceil().long() + middle)
            offsets = torch.where(offsets.abs() <= middle, offsets, far)
        return (offsets + self.span).clamp(0, 2 * self.span - 1)

    def transform_logits(
        self, logits: PairMatrix, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs
    ) -> PairMatrix:
        if "c2p" in self.terms:
            index = self.table_rows(kit.offsets_between(q_positions, k_positions))
            logits = logits + inputs.scale * gather_per_row(self._products("c2p", inputs.q), index)
        if "p2c" in self.terms:
            reversed_offsets = kit.offsets_between(k_positions, q_positions)
            index = self.table_rows(reversed_offsets if self.p2c_index == "paper" else -reversed_offsets)
            logits = logits + inputs.scale * gather_per_row(self._products("p2c", inputs.k), index).mT
        return logits

    def _products(self, term: str, x: Float[Tensor, "B H N d"]) -> Float[Tensor, "B H N R"]:
        return x @ (self.table.to(x.dtype) @ self.projections[term].to(x.dtype)).mT

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 n D"]:
        """The functions of the offset that content weights: 1 where an offset or its negative uses a row, else 0."""
        return torch.cat([_one_hot_kernel(self.table_rows(side), 2 * self.span) for side in (offsets, -offsets)], dim=1)


_BASES = {"alibi": ALiBi, "kerple-log": KerpleLog, "fire": FIRE, "rope": RoPE, "none": None}
BaseBias = Literal["alibi", "kerple-log", "fire", "rope", "none"]


class DAPEv2(PositionalEncoding, name="dape-v2"):
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
    shared = False
    citation = "Zheng et al. 2024, arXiv 2410.04798"
    formula = r"S + B + f([S; B]), \; S_{ij} = q_i^\top k_j / \sqrt{d}, \; f \text{ convolves along } j"

    def __init__(
        self, *, base: BaseBias = "alibi", kernel_size: int = 3, width: PositiveInt = 32, **sizes: int
    ) -> None:
        super().__init__(**sizes)
        base_class = _BASES[base]
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise invalid("kernel_size", "be odd and at least 1", kernel_size)
        if base_class is None and kernel_size == 1:
            raise InputError("base must be a bias if the convolutions cover one key, got 'none'.")
        self.uses_rope = base_class is RoPE
        self.base = base_class and (RoPE(pairing="half", **sizes) if self.uses_rope else base_class(**sizes))
        if self.uses_rope:
            self.also_couples = ("rotation",)
        else:
            self.unused_hooks = {"rotate"}
        maps = self.num_heads * (1 if base_class is None or self.uses_rope else 2)
        self.pair_width = 1 + 2 * (maps + width) // self.num_heads
        self.reach = kernel_size - 1  # of both convolutions together, to either side
        self.inward = nn.Conv2d(maps, width, (1, kernel_size))
        self.outward = nn.Conv2d(width, self.num_heads, (1, kernel_size))

    def reset_parameters(self) -> None:
        self.inward.reset_parameters()
        self.outward.reset_parameters()
        if self.base is not None:
            self.base.reset_parameters()

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> RotatedQK:
        return self.base.rotate(q, k, q_positions, k_positions) if self.base and self.uses_rope else (q, k)

    def transform_logits(
        self, logits: PairMatrix, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs
    ) -> PairMatrix:
        terms = [logits]
        bias = None if self.base is None else self.base.bias(q_positions, k_positions)
        if bias is not None:
            terms.append(bias.to(logits.dtype).expand_as(logits))
        visible = inputs.visible_mask()
        masked = terms if visible is None else [part.masked_fill(~visible, 0.0) for part in terms]
        maps, order = torch.cat(masked, dim=1), None
        if self.reach and visible is not None and (inputs.mask is not None or inputs.padding is not None):
            is_hidden = ~visible[(None,) * (4 - visible.ndim)].any(dim=1, keepdim=True)
            order = is_hidden.to(torch.uint8).argsort(dim=-1, stable=True)
            maps = maps.take_along_dim(order, dim=-1)  # the visible keys, side by side
        maps = F.pad(maps, (self.reach, self.reach))
        refined = _convolve(self.outward, F.leaky_relu(_convolve(self.inward, maps)))
        if order is not None:
            refined = refined.take_along_dim(order.argsort(dim=-1), dim=-1)
        return sum(terms, refined.to(logits.dtype))


def _convolve(layer: nn.Conv2d, maps: Float[Tensor, "B c Nq m"]) -> Float[Tensor, "B e Nq n"]:
    """The layer, in the maps' dtype."""
    assert layer.bias is not None
    return F.conv2d(maps, layer.weight.to(maps.dtype), layer.bias.to(maps.dtype))


class DAPE(DAPEv2, name="dape"):
    """The first version: the network sees one query and one key at a time (Zheng et al. 2024, NeurIPS, section 3).

    It is `DAPEv2` with convolutions over one key.

    Arguments
        base, width  as in DAPEv2; base must be a bias, as position would otherwise not enter
    """

    citation = "Zheng et al. 2024, arXiv 2405.14722"
    formula = r"S + B + f([S; B]), \; S_{ij} = q_i^\top k_j / \sqrt{d}, \; f \text{ acts on each } (i, j)"

    def __init__(
        self, *, base: Literal["alibi", "kerple-log", "fire", "rope"] = "alibi", width: PositiveInt = 32, **sizes: int
    ) -> None:
        super().__init__(base=base, kernel_size=1, width=width, **sizes)


class URPE(PositionalEncoding, name="urpe"):
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
        self, *, base: Literal["t5", "relative-table", "none"] = "t5", init_std: NonNegative = 0.0, **sizes: int
    ) -> None:
        super().__init__(**sizes)
        bases = {"t5": T5, "relative-table": partial(RelativeTable, shared=True), "none": None}
        base_class = bases[base]
        self.init_std = init_std
        self.base = base_class and base_class(**sizes)
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

    def transform_weights(self, weights: PairMatrix, q_positions: Positions, k_positions: Positions) -> PairMatrix:
        return weights * self.factors.bias(q_positions, k_positions).to(weights.dtype)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"] | None:
        """The bias inside the softmax; the factors' kernel is ``factors.kernel``."""
        return None if self.base is None else self.base.kernel(offsets)


class StickBreaking(PositionalEncoding, name="stick-breaking"):
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

    def transform_logits(
        self, logits: PairMatrix, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs
    ) -> PairMatrix:
        z = logits.to(kit.wide_dtype(logits.dtype))
        before, own_key = _past_and_own(inputs)
        log_left, takes_part = self._log_remainder(z, inputs), before | own_key if self.own else before
        log_weights = (F.logsigmoid(z) + log_left[..., 1:]).masked_fill(~takes_part, -torch.inf)
        if not self.own:
            log_weights = torch.where(own_key, log_left[..., :1], log_weights)
        elif self.remainder == "own":
            log_weights = torch.where(own_key, torch.logaddexp(log_weights, log_left[..., :1]), log_weights)
        return log_weights.to(logits.dtype)

    def transform_weights(
        self, weights: PairMatrix, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs
    ) -> PairMatrix:
        own_key = _past_and_own(inputs)[1]
        if self.own and self.remainder == "dropped":
            weights = weights * self._weight_sum(inputs).to(weights.dtype)
        elif (visible := inputs.visible_mask()) is not None and inputs.is_masked:
            has_own_key = (own_key & visible).any(-1, keepdim=True)
            weights = weights * torch.where(has_own_key, 1.0, self._weight_sum(inputs)).to(weights.dtype)
        return weights if self.own or self.remainder == "own" else weights.masked_fill(own_key, 0.0)

    def _log_remainder(self, z: PairMatrix, inputs: AttentionInputs) -> Float[Tensor, "B H Nq more"]:
        """The log of what each key and all nearer ones leave of the stick; and a last 0, for the whole stick."""
        before, own_key = _past_and_own(inputs)
        takes_part, visible = before | own_key if self.own else before, inputs.visible_mask()
        takes_part = takes_part if visible is None else takes_part & visible
        log_left = F.logsigmoid(-z).masked_fill(~takes_part, 0.0)
        return F.pad(kit.reverse_cumsum(log_left), (0, 1))

    def _weight_sum(self, inputs: AttentionInputs) -> Float[Tensor, "B H Nq 1"]:
        """1 - R_i, computed again from queries and keys."""
        q, k = (x.to(kit.wide_dtype(x.dtype)) for x in (inputs.q, inputs.k))
        return -torch.expm1(self._log_remainder(q @ k.transpose(-2, -1) * inputs.scale, inputs)[..., :1])


def _past_and_own(inputs: AttentionInputs) -> tuple[Bool[Tensor, "*B Nq Nk"], Bool[Tensor, "*B Nq Nk"]]:
    """Which keys are before each query's own, and which is its own, for all heads."""
    before = replace(inputs, rows=inputs.rows - 1).causal_mask()
    return before, inputs.causal_mask() & ~before
