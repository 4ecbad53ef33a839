"""A verified attention call: weights and outputs formed again from its parts equal the model's own up to rounding.

The allowed rounding follows from the arithmetic of the call, element by element:

- Let u be the unit roundoff of the dtype in which the product of queries and keys is formed (float32 at least, since
  models compute the softmax of wider numbers in float32). A product of d terms, accumulated in float32 with unit
  roundoff u32, is off by about sqrt(d) u32 sum_i |q_i k_i| (the worst case d u32 sum_i |q_i k_i| does not occur:
  roundings behave like random numbers, Higham and Mary 2019). Product, scale and the sum with the bias round the logit
  s three times, by u |s| each, and the bias b twice. A model or kernel that scales queries or keys first rounds each
  factor, which adds up like a random walk: 4 u (sum_i q_i^2 k_i^2)^(1/2). So a logit is off by at most
      delta = u (3 |s| + 2 |b| + 4 |scale| |q * k|_2) + sqrt(d) u32 |scale| sum_i |q_i k_i|.
- A bias that is a difference of running sums (FoX) is rounded like them: 2 u32 max |b| over the keys of a query.
- A softcap c tanh(s / c) maps s +- delta to the interval between its values at both ends, and rounds three times.
- The argument s - max s of the exponential is rounded, too: u32 (max s - s).
- Weights w = softmax(s) lie between w_j e^-delta_j / (w_j e^-delta_j + sum_{k != j} w_k e^delta_k) and the same with
  the opposite signs. Exponentials (20 units in the last place in torch's fused attention), their sum over N keys and
  the rounding to the output's dtype add (2 u + (32 + sqrt(N)) u32) w.
- A sink is one more logit, rounded three times, as is the sum of exponentials that it is compared with.
- Outputs sum_j w_j v_j are off by the weights' differences times |v_j|, and by (2 u + sqrt(N) u32) sum_j w_j |v_j|.

Single differences cannot reveal a slightly wrong scale if logits are large and close to each other. All of them
together can, as rounding is not correlated with d weight / d log scale. So the scale that fits the model's weights best
may differ from 1 by its own rounding plus five standard errors, over the sums over each query's keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.backends.hf.attention import AttentionFunction, at_rows, blocks, by_offset, padded_lengths, reach_of
from toeplens.backends.hf.model import attention_error, tolerance
from toeplens.backends.hf.rotation import Rotation
from toeplens.encodings.cpu_products import medium_is_exact
from toeplens.encodings.kit import product_dtype
from toeplens.lens.kit.terms import NotSeparable
from toeplens.utils import InputError

_AT_ONCE = 1 << 19  # weights formed again, over batch and heads
_IN_CACHE = 1 << 18  # of these at once, so that they stay in the cache
_TABLES = ("bias", "visible", "factor")  # parts with one number for each query and key
_MIN_QUERIES = 8  # minimum number of queries: the first ones of causal attention would prove nothing
_FLOAT32 = torch.finfo(torch.float32).eps / 2
_EXP = 32  # units in the last place: torch's fused attention allows 20
_TINY = 2.0**-120  # smaller numbers may be flushed to 0
_MAX_DELTA = 300.0  # limit of delta: e^600 is finite, and a logit this uncertain carries no information
_UNDECIDED = 0.5  # if rounding may change the largest weight of a query by this much, the query proves nothing
_MAX_ERRORS = 5.0  # allowed standard errors of the best-fitting scale
_MIN_SCALE_ERROR = 1e-5  # its minimum allowed difference from 1
_BLOCK = 1 << 20  # numbers of `AttentionCall.blocks`
_MIN_BIAS_TOKENS = 3  # tokens that determine a bias by offset
AttentionKind = Literal["self", "cross"]
Side = Literal["encoder", "decoder"]
CallKey = tuple[str, str, int]  # side, kind, layer


@dataclass(frozen=True)
class Proof:
    """How far weights and outputs formed again in float64 are from the model's own.

    weights    largest difference of an attention weight; None if the model returns only outputs
    outputs    largest difference of a head's output, relative to the largest output of the layer
    queries    number of queries of a sequence that were formed again
    tolerance  largest allowed difference of a weight (each has its own, see the module)
    used       largest difference as a share of the allowed rounding, over weights and outputs: at most 1
    logit      largest absolute logit of a visible key
    undecided  share of the queries whose largest weight rounding may change by a half or more
    """

    weights: float | None
    outputs: float
    queries: int
    tolerance: float
    used: float
    logit: float
    undecided: float


def verified_rows(q: Float[Tensor, "B H Nq d"], k: Float[Tensor, "B _G Nk d"]) -> Int[Tensor, "R"]:
    """The queries whose weights are formed again: all, or on long inputs some, including the first and the last."""
    count = min(q.shape[2], max(_MIN_QUERIES, _AT_ONCE // (q.shape[0] * q.shape[1] * k.shape[2])))
    return torch.linspace(0, q.shape[2] - 1, count, device=q.device, dtype=torch.float64).round().long()


def prove(
    name: str,
    parts: AttentionFunction,
    rows: Int[Tensor, "R"],
    actual: Float[Tensor, "B H R Nk"] | None,
    heads: Float[Tensor, "B Nq H dv"],
    added: Float[Tensor, "B Nq H dv"] | None = None,
) -> Proof:
    """Form weights and outputs again at these queries and compare them with the model's own.

    Arguments
        name    of the module
        parts   of the call
        rows    queries
        actual  the model's weights there; None if it returns none
        heads   the model's outputs, for all queries
        added   their part besides weighted values (vectors weighted by the encoding); None if there is none

    Raises `InputError` that names the module if they differ from the model's own, and if rounding could explain any
    weights. Queries that see no key are ignored: their weights depend on the model's substitute for minus infinity.
    """
    q, k, v = parts.q, parts.k, parts.v
    fits = q.ndim == k.ndim == v.ndim == 4 and q.shape[1] % k.shape[1] == 0 and q.shape[1] % v.shape[1] == 0
    fits = fits and q.shape[3] == k.shape[3]
    fits = fits and (actual is None or actual.shape == (*q.shape[:2], len(rows), k.shape[2]))
    if not fits or heads.shape != (q.shape[0], q.shape[2], q.shape[1], v.shape[3]):
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v, actual, heads) if x is not None)
        raise attention_error(name, f"shapes of its queries, keys, values, weights and outputs do not match: {shapes}")
    widest = max(q.dtype, heads.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    unit = _unit_roundoff(q, widest)
    least = max(_TINY, torch.finfo(widest).smallest_normal * torch.finfo(widest).eps)
    v = v.double()
    factors = v, v.abs().float(), k.abs().float(), k.float().square()
    outputs = heads.index_select(1, rows).transpose(1, 2).double()
    extra = None if added is None else added.index_select(1, rows).transpose(1, 2).double()
    parts, results = replace(parts, k=k.double()), []
    for block in blocks(len(rows), q.shape[0] * q.shape[1] * k.shape[2], _IN_CACHE):
        own, added = (None if x is None else x[:, :, block] for x in (actual, extra))
        results.append(_compare_queries(parts, factors, rows[block], own, outputs[:, :, block], added, unit, least))
    maxima, sums = (torch.stack(values) for values in zip(*results, strict=True))
    share, output_error, largest_output, largest_allowed, logit, *of_weights = (
        maxima.amax(0).nan_to_num(torch.inf, posinf=torch.inf).tolist()
    )
    undecided, queries, norm, product, square = sums.sum(0).tolist()
    undecided, scale, weight_error = undecided / max(queries, 1), _scale_error(norm, product, square, unit), None
    if of_weights:  # some models return weights before removing the sink's part
        weight_share, weight_error = min(zip(of_weights[::2], of_weights[1::2], strict=True))
        share, scale = max(share, weight_share), scale if weight_share == of_weights[0] else None
    far_out = output_error / (largest_output or 1.0)
    dtype, size = str(widest).removeprefix("torch."), f"{logit:,.0f}" if logit >= 100 else f"{logit:.3g}"
    coarse = f" in {dtype}" if unit > _FLOAT32 else ""
    hint = "; use a model in float32 (--dtype float32)" if coarse else ""
    if not largest_output < torch.inf:
        location = f"from logits up to {size} in {dtype}{hint}"
        raise InputError(f"model: the attention of {name} has values that are not finite, {location}.")
    if undecided > 0.5:
        halved = f"rounding may halve the largest weight of {100 * undecided:.0f}% of its queries"
        coarse = f"{dtype} is too coarse for the attention of {name}. Its logits are up to {size}"
        raise InputError(f"model: {coarse}: {halved}. Use a model in float32 (--dtype float32).")
    if not share <= 1:
        weights_differ = "" if weight_error is None else f"its weights differ by {weight_error:.1e} and "
        raise attention_error(
            name,
            f"recomputed from its parts, {weights_differ}its outputs differ by {far_out:.1e} (relative), {share:.3g} "
            f"times the rounding{coarse} of logits up to {size}. Supported parts are a scaled product, a cap, a bias, "
            f"a mask and sinks{hint}",
        )
    if scale is not None:
        problem = f"more than rounding{coarse} explains{hint}"
        raise attention_error(name, f"its weights fit logits {1 + scale:.6f} times as large, {problem}")
    return Proof(weight_error, far_out, len(rows), largest_allowed, share, logit, undecided)


def _compare_queries(
    parts: AttentionFunction,
    factors: tuple[Tensor, ...],
    rows: Int[Tensor, "R"],
    actual: Float[Tensor, "B H R Nk"] | None,
    outputs: Float[Tensor, "B H R dv"],
    extra: Float[Tensor, "B H R dv"] | None,
    unit: float,
    least: float,
) -> tuple[Float[Tensor, "_"], Float[Tensor, "5"]]:
    """What `prove` needs to know of some queries: maxima over them, and sums. ``factors`` are v, |v|, |k| and k^2.

    Logits, weights and outputs are formed in float64. What is allowed is formed in float32 unless rounding may change
    a logit by more than 1. It consists of sums and products of positive numbers, with relative errors of a few u32,
    except for differences from sums, with errors of a few u32 of a weight, of which more than 32 u32 is allowed.
    """
    v, v_size, k_size, k_square = factors
    count, hidden = parts.k.shape[2], None
    if parts.causal:  # no query sees the keys after the last one
        keys = min(count, int(rows.max()) + 1)
        tables = {name: x[..., :keys] for name in _TABLES if (x := getattr(parts, name)) is not None}
        parts = replace(parts, k=parts.k[:, :, :keys], **tables)
        v, v_size, k_size, k_square = (x[:, :, :keys] for x in factors)
        if actual is not None and keys < count:
            actual, hidden = actual[..., :keys], actual[..., keys:]
    logits = parts.logits(rows)
    visible = logits.isfinite()
    has_keys = visible.any(-1)
    seen = has_keys.double()

    def largest(x: Tensor) -> Tensor:
        return (x.amax(-1) * seen).max()

    def values(weights: Tensor, v: Tensor) -> Tensor:
        groups = v.shape[1]  # of heads that share values
        return (weights.unflatten(1, (groups, -1)).flatten(2, 3) @ v).view(*weights.shape[:3], -1)

    logits.masked_fill_(~has_keys.unsqueeze(-1), 0)
    weights = replace(parts, factor=None).softmax(logits, rows)
    top = logits.amax(-1, keepdim=True)
    below = (logits - top).float().nan_to_num_(0.0, posinf=0.0, neginf=0.0)
    finite = (logits.float() if parts.softcap is None else logits).nan_to_num(0.0, posinf=0.0, neginf=0.0)
    logit = finite.abs().amax(-1, keepdim=True)
    delta = _logit_rounding(parts, rows, k_size, k_square, finite, unit).float().sub_(below, alpha=_FLOAT32)
    delta = delta.nan_to_num_(0.0, posinf=_MAX_DELTA).clamp_(max=_MAX_DELTA).masked_fill_(~visible, 0)
    sinks = None if parts.sinks is None else (3 * unit * (logit + parts.sinks.abs().max())).clamp(max=_MAX_DELTA)
    if max(float(x.max()) for x in (delta, sinks) if x is not None) > 1:
        delta = delta.double()
    w, sink = weights.to(delta.dtype), None
    slope = below - (w * below).sum(-1, keepdim=True)  # of the weights with respect to the log of the scale
    if sinks is not None:
        sink = (1 - weights.sum(-1, keepdim=True)).clamp(min=0).to(w.dtype), sinks.to(w.dtype)
        slope = slope + top.to(w.dtype) * sink[0]
    slope = slope * w
    rounding = 2 * unit + (_EXP + count**0.5) * _FLOAT32
    allowed = _weight_rounding(w, delta, sink).add_(w, alpha=rounding)
    if parts.factor is not None:
        factor = at_rows(parts.factor, rows).double()
        weights, slope, allowed = weights * factor, slope * factor, allowed * factor.abs()
        w = weights
    allowed = allowed.add_(least)
    recomputed = values(weights, v)
    bound = values(allowed + (2 * unit + count**0.5 * _FLOAT32) * w.abs(), v_size.to(allowed.dtype)) + least
    if extra is not None:
        recomputed, of_weights = recomputed + extra, 4 * allowed.sum(-1, keepdim=True)
        bound = bound + (4 * unit + count**0.5 * _FLOAT32 + of_weights) * extra.abs().amax(-1, keepdim=True)
    residual = outputs - recomputed
    maxima = [largest(x) for x in (residual.abs() / bound, residual.abs(), outputs.abs(), allowed, logit)]
    sums = [((allowed.amax(-1) >= _UNDECIDED) * seen).sum(), seen.sum()]
    if actual is None:
        slope = values(slope, v.to(slope.dtype))
    else:
        references = [(weights, allowed)]
        if parts.sinks is not None:
            no_sink = logits.softmax(-1)
            w = no_sink.to(delta.dtype)
            references.append((no_sink, _weight_rounding(w, delta, None).add_(w, alpha=rounding).add_(least)))
        for candidate, bound in reversed(references):
            residual = actual - candidate
            maxima[5:5] = [largest(residual.to(bound.dtype).abs_() / bound), largest(residual.abs())]
        if hidden is not None:
            far = largest(hidden.abs())
            maxima[5:] = [torch.maximum(x, far / least if n % 2 == 0 else far) for n, x in enumerate(maxima[5:])]
    products = residual.to(slope.dtype) * slope
    of_queries = products.sum(-1) * seen
    sums += [(slope.square().sum(-1) * seen).sum(), of_queries.sum(), of_queries.square().sum()]
    return torch.stack([x.double() for x in maxima]), torch.stack(sums)


def _unit_roundoff(q: Tensor, dtype: torch.dtype) -> float:
    """Unit roundoff of products of queries, and of outputs of this dtype; coarser if torch may round float32."""
    used, allowed = [product_dtype(q), dtype, torch.float32], torch.get_float32_matmul_precision()
    if allowed == "medium" and (q.is_cuda or not medium_is_exact()):
        used.append(torch.bfloat16)
    elif allowed == "high" and q.is_cuda:  # TF32 has the digits of float16
        used.append(torch.float16)
    return max(torch.finfo(used_dtype).eps for used_dtype in used) / 2


def _logit_rounding(
    parts: AttentionFunction,
    rows: Int[Tensor, "R"],
    k_size: Float[Tensor, "B _G Nk d"],
    k_square: Float[Tensor, "B _G Nk d"],
    logits: Float[Tensor, "B H R Nk"],
    unit: float,
) -> Float[Tensor, "B H R Nk"]:
    """delta: by how much rounding may change each logit, from |k| and k^2 in float32."""
    q = parts.q.index_select(2, rows).float().abs().unflatten(1, (k_size.shape[1], -1)).flatten(2, 3)

    def product(q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1)).view(len(q), k.shape[1], -1, len(rows), k.shape[2]).flatten(1, 2)

    scale, bias = abs(parts.scale), parts.bias
    raw = logits if bias is None else logits - at_rows(bias, rows)
    cap = parts.softcap
    if cap is not None:  # the product before the softcap, unless saturated to the last bit
        raw = cap * (raw / cap).clamp(-1 + _FLOAT32, 1 - _FLOAT32).atanh()
    delta = product(q, k_size).mul_(parts.q.shape[-1] ** 0.5 * _FLOAT32 * scale)
    delta = delta.add_(product(q.square(), k_square).sqrt_(), alpha=4 * unit * scale).add(raw.abs(), alpha=3 * unit)
    if cap is not None:
        low, middle, high = (cap * ((raw + shift) / cap).tanh() for shift in (-delta, 0, delta))
        delta = torch.maximum(high - middle, middle - low) + 3 * unit * middle.abs()
    if bias is not None:
        bias = at_rows(bias, rows).abs()
        delta = delta + unit * (2 * bias + logits.abs()) + 2 * _FLOAT32 * bias.amax(-1, keepdim=True)
    return delta


def _weight_rounding(
    weights: Float[Tensor, "B H R Nk"],
    delta: Float[Tensor, "B H R Nk"],
    sink: tuple[Float[Tensor, "B H R 1"], Float[Tensor, "B H R 1"]] | None,
) -> Float[Tensor, "B H R Nk"]:
    """By how much each weight may change if logits change by at most delta, and a sink's; a sink's weight and delta.

    In float32, for delta up to 1, without the cancellation in w e^delta - w: with a_j = w_j (e^delta_j - 1), b_j = w_j
    (1 - e^-delta_j) and their sums A and B over all other keys, a weight may grow by (a (1 - w) + w B) / (1 + a - B),
    and fall by (b (1 - w) + w A) / (1 - b + A).
    """
    if delta.dtype == torch.float32:
        up, down = delta.expm1().mul_(weights), (-delta).expm1_().neg_().mul_(weights)
        above, below = (x.sum(-1, keepdim=True) for x in (up, down))
        if sink is not None:
            above, below = above + sink[0] * sink[1].expm1(), below - sink[0] * (-sink[1]).expm1()
        above, below, others = above - up, below - down, 1 - weights
        high = (up * others).addcmul_(weights, below).div_(up.sub_(below).add_(1))
        low = (down * others).addcmul_(weights, above).div_(above.sub_(down).add_(1))
    else:
        up, down = weights * delta.exp(), weights * (-delta).exp()
        above, below = _sum_of_others(up), _sum_of_others(down)
        if sink is not None:
            above, below = above + sink[0] * sink[1].exp(), below + sink[0] * (-sink[1]).exp()
        high, low = up / (up + below).clamp(min=1e-300) - weights, weights - down / (down + above).clamp(min=1e-300)
    return torch.maximum(high, low).clamp_(min=0)


def _sum_of_others(x: Float[Tensor, "B H R Nk"]) -> Float[Tensor, "B H R Nk"]:
    """The sum over all other keys, without cancellation if one key has nearly all."""
    top, at = x.max(-1, keepdim=True)
    others = x.scatter(-1, at, 0.0).sum(-1, keepdim=True)
    return (others + top - x).scatter_(-1, at, others).clamp_(min=0)


def _scale_error(norm: float, product: float, square: float, unit: float) -> float | None:
    """The relative error of the scale that explains the residuals best, from sums over the queries: of the squares of
    the slopes, the derivatives with respect to the log of the scale, and of the queries' products of residuals and
    slopes, and of the squares of these; None if rounding explains it."""
    if norm == 0:
        return None
    estimate, error = product / norm, square**0.5 / norm
    return estimate if abs(estimate) > max(_MIN_SCALE_ERROR, 4 * unit) + _MAX_ERRORS * error else None


@dataclass(frozen=True, kw_only=True)
class AttentionCall(AttentionFunction):
    """One attention call of a module, in its parts (`AttentionFunction`).

    It holds the model's own tensors, not copies: read them before the pass continues.

    layer      from 0, counted over the attention calls of its kind and side, in the order of the pass
    kind       ``self`` or ``cross``
    side       ``encoder`` or ``decoder``; for a model without both, whether the keys after the query are visible
    module     name of the module in the model, and its class
    weights    [B, H, Nq, Nk] the model's own; None on long inputs, where they are computed some queries at a time, and
               for models that return only outputs
    heads      [B, Nq, H, dv] each head's output, before the output projection
    unrotated  q and k before their rotation, with dimensions ordered as after it except for `Rotation.pairs`; None if
               no rotation was observed
    rotation   the rotation; None if there is none, or if it is not known (see ``unknown``)
    unknown    why it is not known whether or how q and k are rotated, as a sentence; None if it is known
    proof      how close the parts come to the model's own weights and outputs
    positions  [B or 1, Nq] of the queries, and of the keys too if they belong to the same tokens
    products   number of products of the weights, each with its own values; ``v`` and ``heads`` are their
               concatenation, as if it were one product
    encoding   name of the encoding installed by `toeplens.hosts.install`; None for the model's own
    """

    layer: int
    kind: AttentionKind
    side: Side
    module: str
    weights: Float[Tensor, "B H Nq Nk"] | None = field(repr=False)
    heads: Float[Tensor, "B Nq H dv"] = field(repr=False)
    unrotated: tuple[Float[Tensor, "B H Nq d"], Float[Tensor, "B G Nk d"]] | None = field(repr=False)
    rotation: Rotation | None = field(repr=False)
    unknown: str | None
    proof: Proof
    positions: Int[Tensor, "_B Nq"] = field(repr=False)
    products: int = 1
    encoding: str | None = None

    @property
    def key(self) -> CallKey:
        """Side, kind and layer, which identify the call in its pass."""
        return self.side, self.kind, self.layer

    def blocks(self) -> Iterator[tuple[Int[Tensor, "R"], int, Float[Tensor, "B H R K"], Float[Tensor, "B H R K"]]]:
        """Queries, the first key, logits and weights of the keys from it on, some queries at a time.

        Contains all keys that any of the queries sees. In float32, or the model's own dtype if wider. The weights are 0
        for a query that sees no key; the weight of a sink is left out.
        """
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        for block in blocks(self.q.shape[2], self.q.shape[0] * self.q.shape[1] * self.k.shape[2], _BLOCK):
            rows = torch.arange(block.start, block.stop, device=self.q.device)
            first = 0 if self.window is None else max(0, block.start - self.window + 1)
            first = first if self.chunk is None else block.start - block.start % self.chunk
            last = self.k.shape[2] if self.window is None else min(self.k.shape[2], block.stop + self.window - 1)
            last = block.stop if self.causal and self.kind == "self" else last
            logits = self.logits(rows, slice(first, last), dtype)
            weights = self.softmax(logits, rows, slice(first, last))
            yield rows, first, logits, weights if self.visible is None else weights.nan_to_num(nan=0.0)

    @cached_property
    def _reach(self) -> tuple[int | None, int | None]:
        is_square = self.kind == "self" and self.q.shape[2] == self.k.shape[2]
        return reach_of(self.visible if is_square else None, self.causal)

    @property
    def window(self) -> int | None:
        """Maximum number of keys up to its own that a query sees, on either side if not causal; None for no limit."""
        return self._reach[0]

    @property
    def chunk(self) -> int | None:
        """Number of positions per chunk; a query sees no key of an earlier chunk. None without chunks."""
        return self._reach[1]

    @cached_property
    def lengths(self) -> Int[Tensor, "B"] | None:
        """Number of tokens before the padding, if only padding, ``causal``, window and chunks mask keys.

        None without padding. Raises `NotSeparable` for other masks: packed sequences, padding on the left.
        """
        if self.visible is None:
            return None
        ends = padded_lengths(self.visible, self.causal, self.window, self.chunk)
        if isinstance(ends, str):
            supported = "Known masks are all keys, earlier keys, a window and chunks"
            raise NotSeparable(f"{self.module}: its queries see {ends}. {supported}.")
        return None if ends is None else ends.expand(self.q.shape[0])

    def bias_by_offset(self) -> Float[Tensor, "_H D"] | None:
        """The bias by offset i - j: 0 .. N-1 if causal, otherwise -(N-1) .. N-1; None without a bias.

        A constant over all keys of a query changes no weight, so a bias of this form plus such constants is accepted,
        and set to 0 at offset 0. Raises `NotSeparable` for a bias of another form.
        """
        if self.bias is None:
            return None
        tables, length = [], self.q.shape[2]
        allowed = max(tolerance(self.bias.dtype), self._bias_rounding())
        for head in range(self.bias.shape[1]):
            bias = self.bias[:, head].expand(-1, length, -1)
            visible = None
            if self.visible is not None:
                visible = self.visible[:, head if self.visible.shape[1] > 1 else 0].expand(-1, length, -1)
                bias = bias.expand(len(visible), -1, -1)
            # with fewer tokens, any table depends only on the offset up to a constant per query
            modes = (False, True) if length > _MIN_BIAS_TOKENS else (False,)
            candidates = (by_offset(bias, visible, self.causal, relative, allowed) for relative in modes)
            table = next((candidate for candidate in candidates if candidate is not None), None)
            if table is None:
                raise NotSeparable(f"{self.module}: its bias is not a function of the offset only.")
            tables.append(table[length - 1 :] if self.causal else table)
        return torch.stack(tables)

    def _bias_rounding(self) -> float:
        """Largest relative difference that rounding explains for a 16-bit bias, even if converted later: one that
        contains only 16-bit numbers, or their products with the scale (Falcon's ALiBi)."""
        assert self.bias is not None
        for dtype in (torch.bfloat16, torch.float16):
            for unit in (1.0, self.scale):
                x = self.bias / unit
                if bool(((x.to(dtype).to(x.dtype) - x).abs() <= 4 * torch.finfo(x.dtype).eps * x.abs()).all()):
                    return 2 * torch.finfo(dtype).eps
        return 0.0

    def _bias_by_position(self) -> Float[Tensor, "_B _H N N"] | None:
        """The bias as a table, if it does not depend on the content of keys, as an installed encoding's or one that is
        equal for several sequences; None if that is not known."""
        assert self.bias is not None
        if self.bias.shape[2] not in (1, self.q.shape[2]):
            return None
        is_shared = len(self.q) > 1 and (len(self.bias) == 1 or bool((self.bias == self.bias[:1]).all()))
        if self.encoding is None and not is_shared:
            return None
        return (self.bias[:1] if is_shared else self.bias).expand(-1, -1, self.q.shape[2], -1)

    def behaviour_arguments(self, *, tables: bool = False) -> dict[str, Any]:
        """Arguments of `toeplens.lens.behaviour` for this layer: queries, keys and everything else about their logits.

        The rotated pairs come first, interleaved, with the rotation's magnitude applied. A softcap is left out: these
        are the logits before it. Raises `NotSeparable` unless these are a rotation of pairs by an angle per position
        and a bias by offset.

        Arguments
            tables  return a 4-D bias by query and position if it is not by offset and does not depend on the content
                    of keys
        """
        if self.kind == "cross":
            raise NotSeparable(f"{self.module}: its queries and keys come from different sequences.")
        if self.q.shape[2] != self.k.shape[2]:
            raise NotSeparable(f"{self.module}: it has {self.q.shape[2]} queries for {self.k.shape[2]} keys.")
        if self.unknown is not None:
            raise NotSeparable(f"{self.module}: {self.unknown}")
        if self.softcap is not None and self.bias is not None:
            raise NotSeparable(f"{self.module}: a bias is added after its softcap, c tanh(x / c).")
        try:
            bias = self.bias_by_offset()
        except NotSeparable:
            bias = self._bias_by_position() if tables else None
            if bias is None:
                raise
        q, k, rotation = self.q, self.k, None
        if self.rotation is not None and self.unrotated is not None:
            pairs = self.rotation.pairs
            is_fixed = torch.ones(q.shape[-1], dtype=torch.bool, device=q.device)
            is_fixed[pairs.flatten()] = False
            order = torch.cat((pairs.flatten(), is_fixed.nonzero().flatten()))
            sizes = torch.ones(q.shape[-1], dtype=q.dtype, device=q.device)
            sizes[: pairs.numel()] = self.rotation.magnitudes.repeat_interleave(2).to(q.dtype)
            q, k = (x[..., order] * sizes for x in self.unrotated)
            rotation = self.rotation.frequencies
        return {
            "q": q,
            "k": k,
            "rotation": rotation,
            "pairing": "interleaved",
            "layout": "bhnd",
            "bias": bias,
            "causal": self.causal,
            "scale": self.scale,
            "lengths": self.lengths,
            "window": self.window,
            "chunk": self.chunk,
        }


def join_products(calls: Sequence[AttentionCall]) -> AttentionCall:
    """Combine products of the same weights with several values into one call, with values and outputs concatenated."""
    first, *others = calls
    if not others:
        return first
    worst = max((call.proof for call in calls), key=lambda proof: proof.outputs)
    weights = max((call.proof.weights for call in calls if call.proof.weights is not None), default=None)
    return replace(
        first,
        v=torch.cat([call.v for call in calls], dim=-1),
        heads=torch.cat([call.heads for call in calls], dim=-1),
        proof=replace(worst, weights=weights),
        products=len(calls),
    )
