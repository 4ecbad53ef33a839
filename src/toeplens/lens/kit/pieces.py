"""The parts of a layer's logits, as products and fixed matrices, for as many sequences at a time as are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.ground import InputError
from toeplens.lens.kit.rotation import rotation_of
from toeplens.lens.kit.terms import Fixed, Offsets, Whole, Written
from toeplens.lens.kit.toeplitz import ToeplitzProfile, toeplitz_profile
from toeplens.lens.kit.trace import Counted, LayerTrace

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}

PRODUCTS = ("content-content", "content-position", "position-content", "position-position")
BIAS, CONTENT_OFFSET, POSITION_OFFSET = "bias", "content-offset", "position-offset"
_AT_ONCE = 1 << 23  # numbers of a tensor [sequences, heads, positions, dimensions] worked at once
_WRITTEN = 1 << 25


class Pieces:
    """The parts of a layer's logits for any of its sequences, in float64; nothing of queries by keys is kept.

    Queries that do not count (`LayerTrace.counted`) are 0.
    """

    def __init__(self, layer: LayerTrace, p: Tensor, key_p: Tensor, counted: Counted = "all") -> None:
        self.layer = layer
        self.present, self.asked = layer.present, layer.counted(counted)
        heads = layer.q.shape[1]

        def wide(x: Tensor, where: Tensor) -> Tensor:
            x = where_present(x.double(), where)
            return x.repeat_interleave(heads // x.shape[1], 1)

        q_p, k_p = layer.part(p, key_p)
        self.q, self.k = wide(layer.q, self.asked), wide(layer.k, self.present)
        self.q_p, self.k_p = wide(q_p, self.asked), wide(k_p, self.present)
        self.rotation = rotation_of(layer)
        seen = self.present.cumsum(1) if layer.causal else self.present.sum(1, keepdim=True)
        self.pairs = float((seen * self.asked).sum())

    def of(self, sequences: slice) -> Batch:
        """Some sequences' parts."""
        layer = self.layer
        q, k, q_p, k_p = (x[sequences] for x in (self.q, self.k, self.q_p, self.k_p))
        part = replace(
            layer, q=q, k=k, v=layer.v[sequences], lengths=None if layer.lengths is None else layer.lengths[sequences]
        )
        content, place = part.turn(q - q_p, k - k_p), part.turn(q_p, k_p)
        pairs = zip(PRODUCTS, [(a, b) for a in (content[0], place[0]) for b in (content[1], place[1])], strict=True)
        products = {name: (a * layer.scale, b) for name, (a, b) in pairs}
        fixed: dict[str, Fixed] = {}
        if layer.encoding.overrides("transform_logits"):
            nothing = rest(part, q * 0, k * 0)
            fixed = {
                BIAS: Written(nothing),
                CONTENT_OFFSET: Written(rest(part, q - q_p, k - k_p) - nothing),
                POSITION_OFFSET: Written(rest(part, q_p, k_p) - nothing),
            }
        elif layer.encoding.overrides("bias"):
            fixed = {BIAS: _bias(part)}
        return Batch(part, products, fixed, self.present[sequences], self.asked[sequences])

    def batches(self) -> Iterator[tuple[slice, Batch]]:
        """All sequences, some at a time."""
        count = self.q.shape[0]
        size = max(1, _AT_ONCE * count // max(1, self.q.numel()))
        if self.layer.encoding.overrides("transform_logits"):
            size = max(1, size * self.q.shape[-1] // self.q.shape[-2])
        for start in range(0, count, size):
            part = slice(start, min(start + size, count))
            yield part, self.of(part)

    def error(self) -> float:
        """How far the sum of the parts is from the model's own logits, over some sequences and queries."""
        worst = largest = 0.0
        for sequence in sorted({0, len(self.q) // 2, len(self.q) - 1}):
            part, asked = slice(sequence, sequence + 1), self.asked[sequence].nonzero().flatten()
            if not len(asked):
                continue
            rows = asked[torch.linspace(0, len(asked) - 1, min(64, len(asked)), device=asked.device).round().long()]
            true = self.layer.logits(sequences=part, queries=rows)[0].double()
            batch = self.of(part)
            ours = torch.stack([batch.rows(name, rows) for name in (*batch.products, *batch.fixed)]).sum(0)
            seen = true.isfinite()
            if seen.any():
                worst = max(worst, float((ours - true)[seen].abs().max()))
                largest = max(largest, float(true[seen].abs().max()))
        return worst / largest if largest else worst

    @cached_property
    def mean(self) -> LayerTrace:
        """The layer with each position's mean query and key over the sequences, as a batch of one.

        It is as long as the longest of them: a place that none reaches has no mean.
        """
        count = self.present.sum(0).clamp(min=1)[None, None, :, None]
        q, k = (x.sum(0, keepdim=True) / count for x in (self.q, self.k))
        lengths = None if self.layer.lengths is None else self.layer.lengths.max().unsqueeze(0)
        return replace(self.layer, q=q, k=k, v=self.layer.v[:1], lengths=lengths, notes=None)

    def kernel(self) -> ToeplitzProfile:
        """The Toeplitz profile of what mean contents give."""
        return _profile(self.mean, self.mean.q, self.mean.k)

    def profile(self) -> ToeplitzProfile:
        """The Toeplitz profile of the logits."""
        return _profile(self.layer, self.q, self.k)


def where_present(x: Float[Tensor, "B H N d"], present: Bool[Tensor, "B N"]) -> Float[Tensor, "B H N d"]:
    """0 elsewhere, whatever stands there: padding may hold NaN."""
    return x.masked_fill(~present[:, None, :, None], 0)


@dataclass(frozen=True)
class Batch:
    """Some sequences' parts: products (scale in the query) and fixed matrices."""

    layer: LayerTrace
    products: dict[str, tuple[Tensor, Tensor]]
    fixed: dict[str, Fixed]
    present: Tensor
    asked: Tensor

    def whole(self) -> Whole:
        (a, b), (_, d), (c, _), _ = self.products.values()
        return Whole(a + c, b + d, list(self.fixed.values()), self.present, self.layer.causal, self.asked)

    def rows(self, name: str, queries: Int[Tensor, "Q"]) -> Float[Tensor, "H Q N"]:
        """Some queries' rows of a part, of the first sequence; 0 where a key is not seen."""
        if name in self.fixed:
            made = self.fixed[name].at(queries, 0)
        else:
            q, k = self.products[name]
            made = q[0][:, queries] @ k[0].transpose(-2, -1)
        seen = self.present[0, queries, None] & self.present[0]
        if self.layer.causal:
            seen = seen & (queries[:, None] >= torch.arange(seen.shape[1], device=seen.device))
        return made * seen


def bias_by_offset(layer: LayerTrace, offsets: Int[Tensor, "D"]) -> Float[Tensor, "_H D"] | None:
    """The encoding's bias at these offsets, in float64; None where it is no function of the offset alone."""
    if not layer.encoding.toeplitz or layer.encoding.axes > 1 or not layer.consecutive:
        return None
    kernel = layer.encoding.kernel(offsets)
    return None if kernel is None or kernel.is_complex() else kernel.detach().double()


def _bias(layer: LayerTrace) -> Fixed:
    """The encoding's bias: by offset where it has a kernel, else written out."""
    encoding, length = layer.encoding, len(layer.rows)
    if "bias" in encoding._seeing:
        raise NoForm(
            f"encoding: the bias of {type(encoding).__name__} reads queries or tokens, so it is no position part by "
            "itself."
        )
    kernel = bias_by_offset(layer, torch.arange(-length + 1, length, device=layer.q.device))
    if kernel is not None:
        return Offsets(kernel.expand(encoding.num_heads, -1), layer.causal)
    bias = encoding.bias(layer.positions, layer.positions)
    assert bias is not None
    matrix = bias.detach().double()
    matrix = matrix.expand(encoding.num_heads, -1, -1).unsqueeze(0) if matrix.ndim == 3 else matrix
    return Written(matrix.tril() if layer.causal else matrix)


def rest(layer: LayerTrace, q: Tensor, k: Tensor) -> Float[Tensor, "B H N N"]:
    """What the encoding adds to the scaled product of these queries and keys; 0 where a key is not seen."""
    logits = layer.logits(q, k)
    a, b = layer.turn(q, k)
    rest = logits.double() - (a @ b.transpose(-2, -1)) * layer.scale
    return rest.masked_fill(~logits.isfinite() | ~layer.present[:, None, :, None], 0)


def _profile(layer: LayerTrace, q: Tensor, k: Tensor) -> ToeplitzProfile:
    bias: Tensor | None = None
    if layer.encoding.overrides("transform_logits"):
        bias = rest(layer, q, k)
    elif layer.encoding.overrides("bias"):
        fixed = _bias(layer)
        if isinstance(fixed, Offsets):
            length = len(layer.rows)
            bias = fixed.kernel[:, length - 1 :] if layer.causal else fixed.kernel
        else:
            bias = fixed.matrix
    lengths = layer.kept_lengths
    turned = layer.turn(q, k)
    found = toeplitz_profile(*turned, bias=bias, causal=layer.causal, scale=layer.scale, lengths=lengths, layout="bhnd")
    return found.pooled(0)


@torch.no_grad()
def written_out_profile(layer: LayerTrace) -> ToeplitzProfile:
    """The Toeplitz profile of a layer's logits from the logits themselves, all sequences together.

    For encodings whose logits are no sum of products and a bias. Forms R x R logits, of the first sequences alone if
    all were over 32 million numbers.
    """
    count = max(1, _WRITTEN // (layer.q.shape[1] * len(layer.rows) ** 2))
    logits = layer.logits(sequences=slice(count)).double()
    nothing = logits.new_zeros(*logits.shape[:3], 1)
    lengths = None if layer.kept_lengths is None else layer.kept_lengths[:count]
    seen = logits.masked_fill(~logits.isfinite(), 0)
    found = toeplitz_profile(nothing, nothing, bias=seen, causal=layer.causal, lengths=lengths, layout="bhnd")
    return found.pooled(0)


class NoForm(InputError):
    """The encoding has no split of its logits into content and position."""


def checked(pieces: Pieces) -> float:
    """How far the parts are from the layer's own logits; raises `NoForm` where that is more than rounding."""
    error = pieces.error()
    if not error <= _TOLERANCE.get(pieces.layer.q.dtype, 0.05):
        raise NoForm(
            f"encoding: the parts of {type(pieces.layer.encoding).__name__} do not sum to its logits (off by "
            f"{error:.2g} of the largest); it is not linear in queries and keys, so that content and position are no "
            "sum there."
        )
    return error
