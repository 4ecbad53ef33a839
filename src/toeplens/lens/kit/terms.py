"""Terms of attention logits and their shares of the total variance, without forming the N x N logits.

A term is a product q_i . k_j or a fixed matrix, by offset (a position kernel) or stored. Its share is its covariance
with the total, divided by the variance of the total.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch
from jaxtyping import Bool, Complex, Float, Int
from scipy.fft import next_fast_len
from torch import Tensor
from torch.nn import functional as F

from toeplens.encodings import Rotary
from toeplens.lens.kit.rotation import groups_of
from toeplens.lens.kit.toeplitz import ToeplitzProfile, sum_over_keys, toeplitz_profile, windowed_inner_product
from toeplens.lens.kit.trace import CountedQueries, LayerTrace
from toeplens.utils import InputError


class NotSeparable(InputError):
    """The encoding's logits do not split into content and position."""


# ---- rotated pairs of dimensions -------------------------------------------------------------------------------------


def index_of(dimensions: Int[Tensor, "n"]) -> slice | Int[Tensor, "n"]:
    """An index for these dimensions, in this order: a slice (a view, several times faster) if evenly spaced."""
    values = dimensions.tolist()
    if not values:
        return slice(0, 0)
    step = values[1] - values[0] if len(values) > 1 else 1
    is_even = step > 0 and values == list(range(values[0], values[0] + step * len(values), step))
    return slice(values[0], values[-1] + 1, step) if is_even else dimensions


def pairs_index(groups: Int[Tensor, "d"], pairs: int) -> tuple[slice | Int[Tensor, "n"], slice | Int[Tensor, "n"]]:
    """Indices of the first and of the second dimension of each rotated pair, from the dimensions' groups."""
    order = groups.argsort(stable=True)[len(groups) - 2 * pairs :]
    return index_of(order[::2]), index_of(order[1::2])


def rotate_pairs(
    x: Float[Tensor, "B H N d"], groups: Int[Tensor, "d"], factors: Complex[Tensor, "*_H _N n"]
) -> Float[Tensor, "B H N d"]:
    """Queries or keys with their pairs multiplied by these factors."""
    first, second = pairs_index(groups, factors.shape[-1])
    a, b, cos, sin = x[..., first], x[..., second], factors.real, factors.imag
    rotated = x.clone()
    rotated[..., first] = (a * cos).addcmul_(b, sin, value=-1)
    rotated[..., second] = (a * sin).addcmul_(b, cos)
    return rotated


@dataclass(frozen=True)
class PairRotation:
    """An encoding that rotates pairs of dimensions, so that a logit is Re sum_t q_t conj(k_t) kernel_t(i - j).

    groups       [d] the frequency that each dimension belongs to, from 1; 0 where it is not rotated
    frequencies  [H or 1, n] radians per position
    """

    encoding: Rotary
    groups: Int[Tensor, "d"]
    frequencies: Float[Tensor, "_ n"]

    def complex_pairs(self, x: Float[Tensor, "*B d"]) -> Complex[Tensor, "*B n"]:
        """The rotated dimensions as complex numbers."""
        first, second = pairs_index(self.groups, self.frequencies.shape[-1])
        return torch.complex(x[..., first], x[..., second])

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "_ n D"]:
        """The rotation at these offsets, [H or 1, n, D]."""
        kernel = self.encoding.kernel(offsets)
        assert kernel is not None
        return kernel.to(torch.complex128)

    def rotate_by_mean(self, q: Float[Tensor, "B H N d"], layer: LayerTrace) -> Float[Tensor, "B H N d"]:
        """Queries rotated (and shrunk) by the mean of the rotation over the visible pairs of a batch."""
        length = len(layer.rows)
        offsets = torch.arange(0 if layer.causal else 1 - length, length, device=layer.q.device)
        counts = (layer.present.sum(1).unsqueeze(1) - offsets.abs()).clamp(min=0).sum(0).double()
        mean = (self.kernel(offsets) * counts).sum(-1) / counts.sum()
        return rotate_pairs(q, self.groups, mean.unsqueeze(-2))


def encoding_groups(encoding: Rotary, width: int, device: torch.device) -> Int[Tensor, "d"] | None:
    """The pair of each of ``width`` dimensions, as in `groups_of`; None if the pairs do not fit."""
    pairs, first = encoding.frequencies.shape[-1], encoding.first
    return None if first + 2 * pairs > width else groups_of(pairs, encoding.pairing, width, first, device)


def pair_rotation(layer: LayerTrace) -> PairRotation | None:
    """The rotation of a layer's encoding; None unless it rotates pairs by a function of the offset.

    Some pairs are checked: for random queries and keys the kernel must give the encoding's own products.
    """
    encoding, device, width = layer.encoding, layer.q.device, layer.q.shape[-1]
    if not isinstance(encoding, Rotary) or encoding.axes > 1 or not layer.is_consecutive:
        return None
    frequencies = encoding.frequencies_at(layer.positions)
    groups = encoding_groups(encoding, width, device)
    at_0 = encoding.kernel(torch.zeros(1, dtype=torch.long, device=device))
    if frequencies.ndim > 2 or groups is None or at_0 is None:
        return None
    rotation, length = PairRotation(encoding, groups, frequencies), len(layer.rows)
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(layer.q.shape[1], 2, width, generator=generator, dtype=torch.float64).to(device)
    q, k = (x[None, :, None].expand(1, -1, length, -1) for x in samples.unbind(1))
    rotated_q, rotated_k = encoding.rotate(q, k, layer.positions, layer.positions)
    if rotated_q.shape != q.shape:
        return None
    offsets = torch.arange(0, length, max(1, length // 16), device=device)
    expected = (rotated_q[0, :, offsets] * rotated_k[0, :, :1]).sum(-1)
    z = rotation.complex_pairs(samples[:, 0]) * rotation.complex_pairs(samples[:, 1]).conj()
    unrotated = (samples[:, 0] * samples[:, 1])[:, groups == 0].sum(-1, keepdim=True)
    computed = (z.unsqueeze(-1) * rotation.kernel(offsets)).sum(1).real + unrotated
    return rotation if torch.allclose(expected, computed, rtol=1e-6, atol=1e-6) else None


# ---- terms and their shares ------------------------------------------------------------------------------------------

_NEGLIGIBLE = 1e-12  # variances below this part of the energy before centring are rounding errors


# The covariance of a term with the whole, over the sequences of a batch: the sum over the visible pairs of the term,
# and of the term times the whole; the sum over queries of (row sum of the term) (row sum of the whole) / (visible keys)
CovarianceSums = Float[Tensor, "3 H *_columns"]


@dataclass(frozen=True)
class ToeplitzMatrix:
    """A Toeplitz matrix by its kernel, [H, 2N - 1] at offsets i - j = -(N - 1) .. N - 1; masked pairs count as 0."""

    kernel: Float[Tensor, "H D"]
    causal: bool

    @classmethod
    def from_bias(cls, bias: Float[Tensor, "H _"], length: int, causal: bool, window: int | None) -> ToeplitzMatrix:
        """From a bias at the offsets 0 .. N-1 if ``causal``, 0 from ``window`` on; otherwise at all offsets."""
        reach = length if window is None else min(length, window)
        return cls(F.pad(bias[:, :reach], (length - 1, length - reach)) if causal else bias, causal)

    def apply(self, x: Float[Tensor, "B _H N d"]) -> Float[Tensor, "B _H2 N d"]:
        """The matrix times ``x``, summed over the visible keys."""
        length = x.shape[-2]
        kernel = self.kernel[:, length - 1 :] if self.causal else self.kernel
        size = next_fast_len(2 * length - 1, real=True)  # wrapped-around values are cut off
        wave = torch.fft.rfft(kernel, size).unsqueeze(-1) * torch.fft.rfft(x, size, dim=-2)
        first = 0 if self.causal else length - 1
        return torch.fft.irfft(wave, size, dim=-2)[..., first : first + length, :]

    def hadamard(self, other: FixedMatrix) -> ToeplitzMatrix:
        """The Hadamard product with another matrix of the same type."""
        assert isinstance(other, ToeplitzMatrix)
        return ToeplitzMatrix(self.kernel * other.kernel, self.causal)

    def query_rows(self, queries: Int[Tensor, "Q"]) -> Float[Tensor, "H Q N"]:
        """Some queries' rows for the first sequence."""
        length = (self.kernel.shape[1] + 1) // 2
        offsets = queries.unsqueeze(1) - torch.arange(length, device=self.kernel.device)
        rows = self.kernel[:, offsets + length - 1]
        return rows.masked_fill(offsets < 0, 0) if self.causal else rows


@dataclass(frozen=True)
class DenseMatrix:
    """A stored matrix, [B or 1, H, N, N], 0 for masked pairs, with the methods of `ToeplitzMatrix`."""

    matrix: Float[Tensor, "_ H N N"]

    def apply(self, x: Float[Tensor, "B H N d"]) -> Float[Tensor, "B H N d"]:
        return self.matrix @ x

    def hadamard(self, other: FixedMatrix) -> DenseMatrix:
        assert isinstance(other, DenseMatrix)
        return DenseMatrix(self.matrix * other.matrix)

    def query_rows(self, queries: Int[Tensor, "Q"]) -> Float[Tensor, "H Q N"]:
        return self.matrix[0][:, queries]


FixedMatrix = ToeplitzMatrix | DenseMatrix  # a fixed matrix of logits


class BatchLogits:
    """The logits q_i . k_j + fixed_ij of a batch, over the visible pairs.

    Arguments
        q, k        as they enter the inner product, with the scale in q; 0 at padding
        fixed       the fixed terms, all of one type
        present     False at masked padding
        query_mask  the present queries that count; q is 0 at the others
        window      maximum number of keys that a query sees up to its own, if causal; fixed terms are 0 beyond it
    """

    def __init__(
        self,
        q: Float[Tensor, "B H N d"],
        k: Float[Tensor, "B H N d"],
        fixed: Sequence[FixedMatrix],
        present: Bool[Tensor, "B N"],
        causal: bool,
        query_mask: Bool[Tensor, "B N"],
        window: int | None = None,
    ) -> None:
        self.q, self.k, self.fixed, self.causal, self.window = q, k, fixed, causal, window
        weights = present.to(q.dtype), query_mask.to(q.dtype)
        self.key_weight, self.query_weight = (x[:, None, :, None].expand(-1, q.shape[1], -1, -1) for x in weights)
        num_visible = sum_over_keys(weights[0].unsqueeze(-1), causal, window).squeeze(-1).expand_as(weights[0])
        self.num_visible = (num_visible * weights[0]).clamp(min=1).unsqueeze(1)  # number of keys that each query sees
        self.num_pairs = float((num_visible * weights[1]).sum())
        self.row_sums = self._product_rows(q, k).sum(-1) + sum(self._fixed_rows(term) for term in fixed)

    def product_sums(self, q: Float[Tensor, "B H N e"], k: Float[Tensor, "B H N e"]) -> CovarianceSums:
        """The term q_i . k_j, by dimension: [3, H, e]."""
        if not (q is self.q or (q.any() and k.any())):
            return q.new_zeros(3, q.shape[1], q.shape[-1])
        raw = windowed_inner_product(self.window, q, k, self.q, self.k, causal=self.causal).sum(0)
        for term in self.fixed:
            raw = raw + (q * term.apply(k)).sum((0, 2))
        rows, means = self._product_rows(q, k), (self.row_sums / self.num_visible).unsqueeze(-1)
        return torch.stack((rows.sum((0, 2)), raw, (rows * means).sum((0, 2))))

    def fixed_sums(self, term: FixedMatrix) -> CovarianceSums:
        """A fixed term: [3, H]."""
        raw = (self.q * term.apply(self.k)).sum((0, 2, 3))
        for other in self.fixed:
            raw = raw + self._fixed_rows(term.hadamard(other)).sum((0, 2))
        rows = self._fixed_rows(term)
        return torch.stack((rows.sum((0, 2)), raw, (rows * self.row_sums / self.num_visible).sum((0, 2))))

    def _product_rows(self, q: Tensor, k: Tensor) -> Float[Tensor, "B H N e"]:
        return q * sum_over_keys(k, self.causal, self.window)

    def _fixed_rows(self, term: FixedMatrix) -> Float[Tensor, "B H N"]:
        return (term.apply(self.key_weight) * self.query_weight).squeeze(-1)


@dataclass(frozen=True)
class TermShares:
    """Each term's share of the variance of the logits over the visible pairs: its covariance with them / variance.

    Shares sum to 1; a share is negative if its term works against the rest. ``softmax`` is the same with each query's
    mean over its keys removed, which softmax ignores. NaN if the logits do not vary.
    """

    logits: Float[Tensor, "H P"]
    softmax: Float[Tensor, "H P"]


def centred_sums(term: CovarianceSums, logit_sums: CovarianceSums, num_pairs: float) -> tuple[Tensor, Tensor]:
    """Centred sums of products with the whole: about the mean of all pairs, and about each row's mean."""
    total, inner, rows = term
    logit_total = logit_sums[0] if term.ndim == logit_sums.ndim else logit_sums[0].unsqueeze(-1)
    return inner - total * logit_total / num_pairs, inner - rows


def shares_of(
    terms: list[tuple[Tensor, Tensor]], variances: tuple[Tensor, Tensor], energy: Float[Tensor, "H"]
) -> TermShares:
    """The terms' centred sums divided by the whole's (`centred_sums`); NaN if that is tiny next to the energy."""
    shares = []
    for index, variance in enumerate(variances):
        stacked = torch.stack([term[index] for term in terms], dim=-1)
        varies = variance > _NEGLIGIBLE * energy.clamp(min=1e-300)
        shares.append(torch.where(varies.unsqueeze(-1), stacked / variance.unsqueeze(-1), torch.nan))
    return TermShares(*shares)


def sum_by_group(x: Float[Tensor, "*B d"], groups: Int[Tensor, "d"], count: int | None = None) -> Float[Tensor, "*B g"]:
    """Dimensions summed by group, into ``count`` groups (default: as many as occur)."""
    count = int(groups.max()) + 1 if count is None else count
    return x.new_zeros(*x.shape[:-1], count).index_add_(-1, groups, x)


def split_columns(sums: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The centred sums of each column of a term, [H] each."""
    return list(zip(*(x.unbind(-1) for x in sums), strict=True))


# ---- a layer's logits as terms of content and position ---------------------------------------------------------------

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
PRODUCTS = ("content-content", "content-position", "position-content", "position-position")
BIAS, CONTENT_OFFSET, POSITION_OFFSET = "bias", "content-offset", "position-offset"
_MAX_ELEMENTS = 1 << 23  # target size of a working tensor [sequences, heads, positions, dimensions]
_MAX_DENSE_LOGITS = 1 << 25


class LayerTerms:
    """The parts of a layer's logits for any of its sequences, in float64, without keeping N x N logits.

    Queries that do not count (`LayerTrace.query_mask`) are 0. ``p`` and ``key_p`` are the position parts of the inputs.
    """

    def __init__(self, layer: LayerTrace, p: Tensor, key_p: Tensor, counted: CountedQueries = "all") -> None:
        self.layer = layer
        self.present, self.query_mask = layer.present, layer.query_mask(counted)
        heads = layer.q.shape[1]

        def expand_heads(x: Tensor, mask: Tensor) -> Tensor:
            x = zero_padding(x.double(), mask)
            return x.repeat_interleave(heads // x.shape[1], 1)

        q_p, k_p = layer.project_part(p, key_p)
        self.q, self.k = expand_heads(layer.q, self.query_mask), expand_heads(layer.k, self.present)
        self.q_p, self.k_p = expand_heads(q_p, self.query_mask), expand_heads(k_p, self.present)
        self.rotation = pair_rotation(layer)
        num_visible = self.present.cumsum(1) if layer.causal else self.present.sum(1, keepdim=True)
        self.num_pairs = float((num_visible * self.query_mask).sum())

    def batch_terms(self, sequences: slice) -> BatchTerms:
        """The parts of some sequences."""
        layer = self.layer
        q, k, q_p, k_p = (x[sequences] for x in (self.q, self.k, self.q_p, self.k_p))
        lengths = None if layer.lengths is None else layer.lengths[sequences]
        layer_batch = replace(layer, q=q, k=k, v=layer.v[sequences], lengths=lengths)
        content, position = layer_batch.rotate(q - q_p, k - k_p), layer_batch.rotate(q_p, k_p)
        pairs = product((content[0], position[0]), (content[1], position[1]))
        products = {name: (a * layer.scale, b) for name, (a, b) in zip(PRODUCTS, pairs, strict=True)}
        fixed: dict[str, FixedMatrix] = {}
        if layer.encoding.overrides("transform_logits"):
            constant = added_logits(layer_batch, q * 0, k * 0)
            fixed = {
                BIAS: DenseMatrix(constant),
                CONTENT_OFFSET: DenseMatrix(added_logits(layer_batch, q - q_p, k - k_p) - constant),
                POSITION_OFFSET: DenseMatrix(added_logits(layer_batch, q_p, k_p) - constant),
            }
        elif layer.encoding.overrides("bias"):
            fixed = {BIAS: _bias_matrix(layer_batch)}
        return BatchTerms(layer_batch, products, fixed, self.present[sequences], self.query_mask[sequences])

    def batches(self) -> Iterator[tuple[slice, BatchTerms]]:
        """All sequences, some at a time."""
        count = self.q.shape[0]
        size = max(1, _MAX_ELEMENTS * count // max(1, self.q.numel()))
        if self.layer.encoding.overrides("transform_logits"):
            size = max(1, size * self.q.shape[-1] // self.q.shape[-2])
        for start in range(0, count, size):
            sequences = slice(start, min(start + size, count))
            yield sequences, self.batch_terms(sequences)

    def max_error(self) -> float:
        """Error of the sum of the parts against the model's own logits, over some sequences and queries."""
        worst = largest = 0.0
        for sequence in sorted({0, len(self.q) // 2, len(self.q) - 1}):
            selected, queries = slice(sequence, sequence + 1), self.query_mask[sequence].nonzero().flatten()
            if not len(queries):
                continue
            count = len(queries)
            rows = queries[torch.linspace(0, count - 1, min(64, count), device=queries.device).round().long()]
            expected = self.layer.logits(sequences=selected, queries=rows)[0].double()
            batch = self.batch_terms(selected)
            computed = torch.stack([batch.query_rows(name, rows) for name in (*batch.products, *batch.fixed)]).sum(0)
            visible = expected.isfinite()
            if visible.any():
                worst = max(worst, float((computed - expected)[visible].abs().max()))
                largest = max(largest, float(expected[visible].abs().max()))
        return worst / largest if largest else worst

    @cached_property
    def mean_layer(self) -> LayerTrace:
        """The layer with each position's mean query and key over the sequences, as one of the longest's length."""
        count = self.present.sum(0).clamp(min=1)[None, None, :, None]
        q, k = (x.sum(0, keepdim=True) / count for x in (self.q, self.k))
        lengths = None if self.layer.lengths is None else self.layer.lengths.max().unsqueeze(0)
        return replace(self.layer, q=q, k=k, v=self.layer.v[:1], lengths=lengths, key_features=None)


def zero_padding(x: Float[Tensor, "B H N d"], present: Bool[Tensor, "B N"]) -> Float[Tensor, "B H N d"]:
    """Set padding to 0, as it may contain NaN."""
    return x if bool(present.all()) else x.masked_fill(~present[:, None, :, None], 0)


@dataclass(frozen=True)
class BatchTerms:
    """The parts of some sequences: products (with the scale in the query) and fixed matrices."""

    layer: LayerTrace
    products: dict[str, tuple[Tensor, Tensor]]
    fixed: dict[str, FixedMatrix]
    present: Tensor
    query_mask: Tensor

    def logits(self) -> BatchLogits:
        (a, b), (_, d), (c, _), _ = self.products.values()
        return BatchLogits(a + c, b + d, list(self.fixed.values()), self.present, self.layer.causal, self.query_mask)

    def query_rows(self, name: str, queries: Int[Tensor, "Q"]) -> Float[Tensor, "H Q N"]:
        """Some queries' rows of a part, for the first sequence; 0 for masked keys."""
        if name in self.fixed:
            rows = self.fixed[name].query_rows(queries)
        else:
            q, k = self.products[name]
            rows = q[0][:, queries] @ k[0].mT
        visible = self.present[0, queries, None] & self.present[0]
        if self.layer.causal:
            visible = visible & (queries[:, None] >= torch.arange(visible.shape[1], device=visible.device))
        return rows * visible


def bias_by_offset(layer: LayerTrace, causal: bool = False) -> Float[Tensor, "_H D"] | None:
    """The encoding's bias at all offsets (if ``causal`` from 0 on), in float64; None unless it depends only on them."""
    if not layer.encoding.toeplitz or layer.encoding.axes > 1 or not layer.is_consecutive:
        return None
    length = len(layer.rows)
    kernel = layer.encoding.kernel(torch.arange(0 if causal else 1 - length, length, device=layer.q.device))
    return None if kernel is None or kernel.is_complex() else kernel.detach().double()


def _bias_matrix(layer: LayerTrace) -> FixedMatrix:
    """The encoding's bias: by offset if it has a kernel, otherwise as a stored matrix."""
    encoding = layer.encoding
    if "bias" in encoding._inputs_argument:
        raise NotSeparable(
            f"encoding: the bias of {type(encoding).__name__} depends on queries or tokens, so it is not a position "
            "part."
        )
    kernel = bias_by_offset(layer)
    if kernel is not None:
        return ToeplitzMatrix(kernel.expand(encoding.num_heads, -1), layer.causal)
    matrix = bias_by_position(layer).expand(-1, encoding.num_heads, -1, -1)
    return DenseMatrix(matrix.tril() if layer.causal else matrix)


def bias_by_position(layer: LayerTrace) -> Float[Tensor, "_B _H R R"]:
    """The encoding's bias by query and position, in float64."""
    bias = layer.encoding.bias(layer.positions, layer.positions)
    assert bias is not None
    return bias.detach().double() if bias.ndim == 4 else bias.detach().double().unsqueeze(0)


def added_logits(layer: LayerTrace, q: Tensor, k: Tensor) -> Float[Tensor, "B H N N"]:
    """What the encoding adds to the scaled product of these queries and keys; 0 for masked keys."""
    logits = layer.logits(q, k)
    a, b = layer.rotate(q, k)
    added = logits.double() - (a @ b.mT) * layer.scale
    return added.masked_fill(~logits.isfinite() | ~layer.present[:, None, :, None], 0)


def layer_profile(layer: LayerTrace, q: Tensor, k: Tensor) -> ToeplitzProfile:
    """The Toeplitz profile of a layer's logits with these queries and keys, over all sequences."""
    bias: Tensor | None = None
    if layer.encoding.overrides("transform_logits"):
        bias = added_logits(layer, q, k)
    elif layer.encoding.overrides("bias"):
        fixed = _bias_matrix(layer)
        first = len(layer.rows) - 1 if layer.causal else 0
        bias = fixed.kernel[:, first:] if isinstance(fixed, ToeplitzMatrix) else fixed.matrix
    q, k = layer.rotate(q, k)
    lengths, causal, scale = layer.traced_lengths, layer.causal, layer.scale
    return toeplitz_profile(q, k, bias=bias, causal=causal, scale=scale, lengths=lengths, layout="bhnd").pool(0)


@torch.no_grad()
def dense_profile(layer: LayerTrace) -> ToeplitzProfile:
    """The Toeplitz profile of a layer's logits from the logits themselves, if they are no sum of products and a bias.

    Forms R x R logits, only of the first sequences if all of them have more than 32 million numbers.
    """
    count = max(1, _MAX_DENSE_LOGITS // (layer.q.shape[1] * len(layer.rows) ** 2))
    logits = layer.logits(sequences=slice(count)).double()
    zeros, visible_logits = logits.new_zeros(*logits.shape[:3], 1), logits.masked_fill(~logits.isfinite(), 0)
    lengths = None if layer.traced_lengths is None else layer.traced_lengths[:count]
    result = toeplitz_profile(zeros, zeros, bias=visible_logits, causal=layer.causal, lengths=lengths, layout="bhnd")
    return result.pool(0)


def check_error(layer_terms: LayerTerms) -> float:
    """Error of the parts against the layer's own logits; raises `NotSeparable` if it is more than rounding."""
    error = layer_terms.max_error()
    if not error <= _TOLERANCE.get(layer_terms.layer.q.dtype, 0.05):
        raise NotSeparable(
            f"encoding: {type(layer_terms.layer.encoding).__name__} is not linear in queries and keys. The parts "
            f"differ from its logits by {error:.2g} of the largest."
        )
    return error
