"""Attention with any encoding: fused where the encoding allows it, otherwise explicit in chunks of queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NotRequired, TypedDict, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from toeplens.encodings import kit
from toeplens.encodings.base import AttentionInputs, KeyFeatures, PositionalEncoding
from toeplens.encodings.cpu_attention import attend_blocked, blocked_is_faster
from toeplens.encodings.shapes import Keys, PairMatrix, Positions, Queries, Values
from toeplens.utils import invalid
from toeplens.utils.options import check_value
from toeplens.utils.renamed import renamed

PAIRS_PER_CHUNK = 1 << 22  # query-key pairs per chunk, over batch and heads, where logits are formed explicitly
MAX_SHARED_BIAS = 4 * PAIRS_PER_CHUNK  # maximum size of a bias that is cached for all layers that share it
LOW_RANK_CHUNK = 512  # queries per chunk for low-rank biases, whose factors are relative to the chunk's first query
MIN_CHUNK = 128  # minimum queries per chunk with a window: smaller chunks do not pay
_INPUT_FIELDS = {field.name for field in fields(AttentionInputs)}
MIN_FLEX_HEAD_DIM = 16  # smallest head dimension of flex attention's kernels


class PositionArguments(TypedDict):
    """Positions of queries and keys, and the mask."""

    q_positions: Positions
    k_positions: Positions
    rows: NotRequired[Int[Tensor, "*B Nq"] | None]
    mask: NotRequired[Bool[Tensor, "*_B _H _Nq Nk"] | None]


class AttentionArguments(PositionArguments):
    """Keyword arguments of `attend` other than queries, keys and values."""

    encoding: PositionalEncoding
    scale: float
    key_features: NotRequired[KeyFeatures | None]
    causal: NotRequired[bool]
    window: NotRequired[int | None]
    document_ids: NotRequired[Int[Tensor, "B Nk"] | None]
    padding: NotRequired[Bool[Tensor, "B Nk"] | None]
    softcap: NotRequired[float | None]
    sinks: NotRequired[Float[Tensor, "H"] | None]
    rotated: NotRequired[bool]


def check_inputs(q: Tensor, k: Tensor, v: Tensor | None, arguments: AttentionArguments) -> None:
    """Raise `InputError` for shapes that do not match; reads no values. See `attend`."""
    encoding = arguments["encoding"]
    kit.require_tensor("q", q, "float", ("B", encoding.num_heads, "Nq", "d"))
    batch, heads, queries, width = q.shape
    kit.require_tensor("k", k, "float", (batch, "G", "Nk", width))
    groups, keys = k.shape[1:3]
    if groups < 1 or heads % groups:
        raise invalid("k", f"have a number of heads that divides the {heads} heads of q", groups)
    if v is not None:
        kit.require_tensor("v", v, "float", (batch, groups, keys, "dv"))
    check_positions("q_positions", arguments["q_positions"], encoding, batch, queries)
    check_positions("k_positions", arguments["k_positions"], encoding, batch, keys)
    rows, mask, window = arguments.get("rows"), arguments.get("mask"), arguments.get("window")
    if mask is not None:
        kit.require_tensor("mask", mask, "bool")
        full_shape = (batch, heads, queries, keys)
        fits = 1 <= mask.ndim <= 4 and mask.shape[-1] == keys
        if not fits or any(a not in (1, b) for a, b in zip(reversed(mask.shape), reversed(full_shape), strict=False)):
            expected = f"[batch, heads, queries, keys] = [{batch}, {heads}, {queries}, {keys}]"
            raise invalid("mask", f"broadcast to {expected}, with all keys", got=f"shape {list(mask.shape)}")
    shapes: dict[str, tuple[kit.TensorKind, Sequence[int | str]]] = {
        "rows": ("integer", (queries,) if getattr(rows, "ndim", 1) == 1 else (batch, queries)),
        "key_features": ("real", (batch, "H", keys, "c")),
        "document_ids": ("real", (batch, keys)),
        "padding": ("bool", (batch, keys)),
        "sinks": ("float", (heads,)),
    }
    for name, (dtype_kind, shape) in shapes.items():
        if arguments.get(name) is not None:
            kit.require_tensor(name, arguments.get(name), dtype_kind, shape)
    check_value("window", window, int | None)
    if window is not None and (window < 1 or not arguments.get("causal", True)):
        raise invalid("window", "be at least 1, and attention causal", window)
    if arguments.get("softcap") is not None:
        kit.require_number("softcap", arguments.get("softcap"), above=0)


def check_positions(name: str, positions: Positions, encoding: PositionalEncoding, batch: int, length: int) -> None:
    """Check that there is one position per token; coordinates, if any, are the last dimension."""
    kit.require_tensor(name, positions, "real")
    if not positions.is_floating_point() and positions.dtype not in (torch.int32, torch.int64):
        raise invalid(name, "be int32, int64 or floating point", positions.dtype)
    shape, axes = positions.shape, encoding.axes
    token_shapes = ((length,), (batch, length), (1, length))
    allowed = token_shapes if axes == 1 else ((length,), *((*shape, axes) for shape in token_shapes))
    if shape in allowed:
        return
    last = f", {axes}" if axes > 1 else ""
    raise invalid(name, f"have shape [{length}{last}] or [{batch}, {length}{last}]", got=f"shape {list(shape)}")


@renamed
def attend(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    shared_bias: Float[Tensor, "*_B H Nq Nk"] | None = None,
    dropout: float = 0.0,
    fused: bool = True,
    pairs_per_chunk: int = PAIRS_PER_CHUNK,
    **arguments: Unpack[AttentionArguments],
) -> Float[Tensor, "B H Nq dv"]:
    """Attention with an encoding: each head's output [B, H, Nq, dv].

    Queries and keys are passed as projected. Keys and values may have fewer heads than queries, a divisor G of H; each
    then serves H / G adjacent heads. A query without any visible key (such as left padding) has output 0. Raises
    `InputError` for shapes that do not match.

    Arguments
        encoding         an encoding for H heads
        q_positions, k_positions  positions of the queries and keys
        scale            factor of q . k
        rows             index of each query's own token among the keys (default: the last Nq keys, as in decoding with
                         a cache)
        key_features     per-key features of the encoding (see `PositionalEncoding.key_features`)
        mask             True where a key may be seen (default: everywhere)
        causal           mask the keys after each query's own token (default: True)
        window           sliding window: the number of keys that a query sees, including its own and without padding
                         (default: no limit)
        document_ids     id of the packed document that each key belongs to; keys of other documents are masked
        padding          True where a key's token is padding: masked, and not counted in cumulative sums, as are keys
                         that a mask hides from all queries
        softcap          c, where logits are c tanh(q . k scale / c) before any bias (Gemma 2, arXiv 2408.00118)
        sinks            one logit per head that takes part in the softmax without a key or value (gpt-oss, arXiv
                         2508.10925)
        rotated          whether queries and keys are already multiplied by the encoding's `pair_factors`
        shared_bias      a precomputed bias with the mask in it, from `fixed_bias`, which layers can share
        dropout          dropout rate on the attention weights
        fused            use torch's fused attention (on a GPU, flex attention for content-dependent biases) where the
                         encoding allows it; the result is the same
        pairs_per_chunk  query-key pairs per chunk where logits are formed: memory is linear in the number of keys
    """
    check_inputs(q, k, v, arguments)
    encoding = arguments["encoding"]
    keep_groups = fused and encoding.rotation_is_shared and not encoding.needs_per_head_keys and q.device.type == "cpu"
    qk = rotate_inputs(q, k, arguments, keep_groups=keep_groups)
    in_order = arguments.get("rows") is None  # queries are then the last tokens of the keys
    fused = fused and encoding.fusable and qk.is_plain_softmax
    fused = fused and not kit.is_in_transform()  # vmap would loop over models or fail
    qk = qk if fused else qk.repeat_keys()
    q_positions, k_positions, inputs = qk.q_positions, qk.k_positions, qk.inputs
    q, k, causal, scale, window = inputs.q, inputs.k, inputs.causal, inputs.scale, inputs.window
    v, masked = repeat_groups(v, k.shape[1]), inputs.is_masked
    square = in_order and not masked and q.shape[-2] == k.shape[-2] and window is None
    is_local = fused and in_order and window is not None and not inputs.has_inner_padding()
    local_window = window if is_local else None  # keys outside the window are skipped
    if fused and shared_bias is None and not encoding.overrides("bias"):
        if square or not (masked or causal):
            return _fused_attention(q, k, v, None, dropout, scale, is_causal=causal)
        if local_window is None or q.shape[-2] <= local_window:
            return _fused_attention(q, k, v, inputs.visible_mask(), dropout, scale)
    if fused and shared_bias is None and square and not dropout and q.is_cuda:
        flex_output = flex_attend(v, encoding, q_positions, k_positions, inputs)
        if flex_output is not None:
            return flex_output
    low_rank = fused and shared_bias is None and causal and in_order and kit.product_dtype(q) in kit.FULL_PRECISION
    low_rank = low_rank and encoding.factorable and encoding.has_low_rank_bias(q_positions, k_positions)
    low_rank = low_rank and not (encoding.needs_per_head_keys and inputs.is_scattered())
    use_fixed_bias = fused and shared_bias is None and square and encoding.has_fixed_bias and not low_rank
    use_fixed_bias = use_fixed_bias and q_positions is k_positions and not encoding.is_per_sequence(k_positions)
    if use_fixed_bias and encoding.pair_width * q.shape[1] * k.shape[2] ** 2 <= 4 * pairs_per_chunk:
        shared_bias = fixed_bias(encoding, k_positions, dtype=q.dtype, mask=None, causal=causal)
    qk = replace(qk, v=v, shared_bias=shared_bias, dropout=dropout, fused=fused, low_rank=low_rank, is_square=square)
    pairs_per_query = (encoding.pair_width if shared_bias is None else 1) * q.shape[0] * q.shape[1] * k.shape[2]
    chunk_size = LOW_RANK_CHUNK if low_rank else max(1, pairs_per_chunk // max(1, pairs_per_query))
    chunk_size = chunk_size if local_window is None else min(chunk_size, max(local_window, MIN_CHUNK))
    starts, num_cached = range(0, q.shape[-2], chunk_size), k.shape[-2] - q.shape[-2]
    outputs = []
    for start in starts:
        stop = min(start + chunk_size, q.shape[-2])
        first_key = 0 if local_window is None else max(0, start + num_cached + 1 - local_window)
        last_key = stop + num_cached if in_order and causal else k.shape[-2]
        chunk = qk.select(slice(start, stop), slice(first_key, last_key))
        if len(starts) > 1 and torch.is_grad_enabled() and not (torch.compiler.is_compiling() or kit.is_in_transform()):
            outputs.append(checkpoint(chunk.attend, use_reentrant=False))
        else:
            outputs.append(chunk.attend())
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2)


@renamed
def attention_logits(q: Queries, k: Keys, **arguments: Unpack[AttentionArguments]) -> PairMatrix:
    """The logits before the softmax, formed explicitly; minus infinity where a key is masked."""
    check_inputs(q, k, None, arguments)
    return rotate_inputs(q, k, arguments).logits()


@renamed
def attention_weights(q: Queries, k: Keys, **arguments: Unpack[AttentionArguments]) -> PairMatrix:
    """The attention weights, formed explicitly; 0 for queries without a visible key."""
    check_inputs(q, k, None, arguments)
    return rotate_inputs(q, k, arguments).weights()


@dataclass(frozen=True)
class AttentionComponents:
    """Weights = factor softmax(softcap(scale q . k) + bias) over the visible keys and a sink.

    q, k       [B, H, Nq, d], [B, G, Nk, d] as they enter the product, after `PositionalEncoding.rotate`
    bias       the sum of all terms added to the scaled product; 0 where no key is visible; None if there are none
    visible    True where a query sees a key; None if every query sees every key
    factor     factor on the weights after the softmax; None if there is none
    values     [B, H, Nq, dv] added to the heads' outputs; None if nothing is added
    """

    q: Float[Tensor, "B H Nq d"]
    k: Float[Tensor, "B G Nk d"]
    bias: Float[Tensor, "_B _H Nq Nk"] | None
    visible: Bool[Tensor, "_B _H _Nq Nk"] | None
    factor: Float[Tensor, "B H Nq Nk"] | None
    values: Float[Tensor, "B H Nq dv"] | None


@torch.no_grad()
def attention_components(q: Queries, k: Keys, **arguments: Unpack[AttentionArguments]) -> AttentionComponents:
    """The components of the attention that `toeplens.encodings.attend` computes for these queries and keys.

    Where an encoding changes the logits in another way (``score``, ``transform_logits``), the bias is the difference
    between its logits and the scaled product. It is formed for all queries and keys, so memory grows with their
    product.

    Arguments are those of `toeplens.encodings.attend`.
    """
    encoding = arguments["encoding"]
    rotated = rotate_inputs(q, k, arguments, keep_groups=encoding.rotation_is_shared)
    full = rotated.repeat_keys()
    inputs, visible = full.inputs, full.inputs.visible_mask()
    visible = None if visible is None else _to_4d(visible)
    logits = bias = factor = values = None
    if encoding.overrides("score") or encoding.overrides("transform_logits"):
        logits = full.logits()
        wide = torch.promote_types(logits.dtype, torch.float32)
        product = (inputs.q.to(wide) @ inputs.k.to(wide).transpose(-2, -1)) * inputs.scale
        if full.softcap is not None:
            product = full.softcap * (product / full.softcap).tanh()
        hidden = logits.isneginf()
        if bool((hidden if visible is None else hidden & visible).any()):
            visible = ~hidden
        bias = (logits.to(wide) - product).masked_fill(hidden, 0.0)
    elif encoding.overrides("bias"):
        bias = full.call_hook("bias")
        bias = None if bias is None else _to_4d(bias)
        if bias is not None and visible is not None and len(visible) == 1:
            bias = bias.masked_fill(~visible, 0.0)
    if encoding.overrides("transform_weights") or encoding.overrides("add_values"):
        weights = full.softmax(full.logits() if logits is None else logits)
        new_weights = full.call_hook("transform_weights", weights)
        if encoding.overrides("transform_weights"):
            factor = torch.where(weights == 0, 0.0, new_weights / weights)
        values = full.call_hook("add_values", new_weights)
    return AttentionComponents(rotated.inputs.q, rotated.inputs.k, bias, visible, factor, values)


def fixed_bias(
    encoding: PositionalEncoding,
    positions: Positions,
    *,
    dtype: torch.dtype,
    mask: Bool[Tensor, "*_B _H _N N"] | None,
    causal: bool,
) -> Float[Tensor, "_ H N N"]:
    """The bias of an encoding that `has_fixed_bias`, between all ``positions``, including the mask, for `attend`.

    It is float32 if ``dtype`` has 16 bits.
    """
    with kit.without_autocast(positions):
        bias = encoding.bias(positions, positions)
    assert bias is not None
    masked_bias = _to_4d(bias.to(kit.wide_dtype(dtype)))
    if causal:
        length = masked_bias.shape[-1]
        future = torch.ones(length, length, dtype=torch.bool, device=masked_bias.device).triu(1)
        masked_bias = masked_bias.masked_fill(future, float("-inf"))
    return _apply_mask(masked_bias, mask)


@dataclass(frozen=True)
class _AttentionChunk:
    """A chunk of queries after `rotate`, with the keys that any of them sees."""

    encoding: PositionalEncoding
    q_positions: Positions
    k_positions: Positions
    inputs: AttentionInputs
    v: Tensor | None = None
    shared_bias: Tensor | None = None
    dropout: float = 0.0
    fused: bool = False
    low_rank: bool = False
    is_square: bool = False  # as many queries as keys, each seeing all keys or those up to its own
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain_softmax(self) -> bool:
        """Whether only the encoding changes the logits or the softmax."""
        return self.softcap is None and self.sinks is None

    def repeat_keys(self) -> _AttentionChunk:
        """With the keys repeated for each head."""
        return replace(self, inputs=replace(self.inputs, k=repeat_groups(self.inputs.k, self.inputs.q.shape[1])))

    def select(self, queries: slice, keys: slice) -> _AttentionChunk:
        """A slice of the queries and keys."""
        return replace(
            self,
            q_positions=_slice_positions(self.encoding, self.q_positions, queries),
            k_positions=_slice_positions(self.encoding, self.k_positions, keys),
            inputs=self.inputs.select(queries, keys),
            v=None if self.v is None else self.v[..., keys, :],
            shared_bias=None if self.shared_bias is None else self.shared_bias[..., queries, keys],
            is_square=self.is_square and queries.start == 0,
        )

    def attend(self) -> Tensor:
        """Each head's output for these queries."""
        assert self.v is not None
        if self.low_rank:
            return self._attend_low_rank(self.v)
        if self.fused:
            inputs, bias = self.inputs, self._masked_bias()
            if bias is not None and self.is_square and blocked_is_faster(inputs.q, inputs.k, bias, self.dropout):
                k, v = (repeat_groups(x, inputs.q.shape[1]) for x in (inputs.k, self.v))
                return attend_blocked(inputs.q, k, v, _to_4d(bias), self.dropout, inputs.scale, causal=inputs.causal)
            return _fused_attention(inputs.q, inputs.k, self.v, bias, self.dropout, inputs.scale)
        weights = F.dropout(self.weights().to(self.v.dtype), self.dropout)
        out, added_values = weights @ self.v, self.call_hook("add_values", weights)
        return out if added_values is None else out + added_values

    def _attend_low_rank(self, v: Tensor) -> Tensor:
        """Causal attention with the bias as one or two extra dimensions of queries and keys."""
        inputs = self.inputs
        a, b = self.call_hook("bias_product")
        q = torch.cat((inputs.q, (a / inputs.scale).to(inputs.q.dtype).expand(*inputs.q.shape[:-1], -1)), dim=-1)
        k, v = (repeat_groups(x, q.shape[1]) for x in (inputs.k, v))
        k = torch.cat((k, b.to(k.dtype).expand(*k.shape[:-1], -1)), dim=-1)
        mask = None if self.is_square else inputs.visible_mask()  # SDPA's is_causal only fits square attention
        return _fused_attention(q, k, v, mask, self.dropout, inputs.scale, is_causal=self.is_square)

    def _masked_bias(self) -> Tensor | None:
        """The bias with the mask in it, in the dtype of fused attention; without a bias, the mask."""
        bias, visible = self.shared_bias, None
        if bias is None:
            bias, visible = self.call_hook("bias"), self.inputs.visible_mask()
        if bias is None:
            return visible
        q = self.inputs.q
        if kit.product_dtype(q) in kit.FULL_PRECISION:
            return _apply_mask(bias.to(q.dtype), visible)
        bias = _apply_mask(bias, visible)  # relative to each row's maximum, so that large entries are rounded least
        largest = bias.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(bias.dtype).min)
        return (bias - largest).to(kit.product_dtype(q))

    def logits(self) -> Tensor:
        """The input of the softmax."""
        inputs = self.inputs
        logits = self.call_hook("score", inputs.q, inputs.k) * inputs.scale
        if self.softcap is not None:
            logits = self.softcap * (logits / self.softcap).tanh()
        if self.shared_bias is not None:
            return logits + self.shared_bias
        bias = self.call_hook("bias")
        if bias is not None:
            logits = logits + bias.to(kit.wide_dtype(logits.dtype))
        return _apply_mask(self.call_hook("transform_logits", logits), inputs.visible_mask())

    def weights(self) -> Tensor:
        """The attention weights."""
        return self.call_hook("transform_weights", self.softmax(self.logits()))

    def softmax(self, logits: Tensor) -> Tensor:
        """The softmax over keys and the optional sink; 0 for queries without a visible key."""
        if self.sinks is not None:
            sinks = self.sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)
            return torch.cat((logits, sinks), dim=-1).softmax(-1)[..., :-1]
        if not self.inputs.is_masked and self.shared_bias is None:  # only a mask can hide all keys
            return logits.softmax(-1)
        sees_no_key = logits.isneginf().all(-1, keepdim=True)
        return logits.masked_fill(sees_no_key, 0.0).softmax(-1).masked_fill(sees_no_key, 0.0)

    def call_hook(self, name: str, *arguments: Tensor) -> Any:
        return self.encoding.call_hook(name, *arguments, self.q_positions, self.k_positions, inputs=self.inputs)


def rotate_inputs(q: Tensor, k: Tensor, arguments: AttentionArguments, *, keep_groups: bool = False) -> _AttentionChunk:
    """All queries and their keys after `rotate`; keys are repeated for each head unless ``keep_groups``."""
    encoding, positions = arguments["encoding"], (arguments["q_positions"], arguments["k_positions"])
    k = k if encoding.rotation_is_shared else repeat_groups(k, q.shape[1])
    values: dict[str, Any] = {name: value for name, value in arguments.items() if name in _INPUT_FIELDS}
    inputs = AttentionInputs.with_defaults(q, k, **values)
    if not arguments.get("rotated"):
        q, k = encoding.call_hook("rotate", q, k, *positions, inputs=inputs)
    inputs = replace(inputs, q=q, k=k if keep_groups else repeat_groups(k, q.shape[1]))
    return _AttentionChunk(encoding, *positions, inputs, softcap=arguments.get("softcap"), sinks=arguments.get("sinks"))


def repeat_groups(x: Float[Tensor, "B G Nk d"], heads: int) -> Float[Tensor, "B H Nk d"]:
    """Keys or values of groups, repeated for each head of a group."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _apply_mask(x: Tensor, visible: Tensor | None) -> Tensor:
    return x if visible is None else x.masked_fill(~visible, float("-inf"))


def _fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float, *, is_causal: bool = False
) -> Tensor:
    """Fused attention; narrower inputs are padded with zeros, as the kernels need equal widths.

    Blocked CPU attention is used where it is faster: without a mask, or with a mask over keys only (padding).
    """
    mask = None if mask is None else _to_4d(mask)
    is_padding = mask is None or (mask.dtype == torch.bool and mask.shape[-2] == 1)
    if is_padding and blocked_is_faster(q, k, dropout=dropout):
        k, v = (repeat_groups(x, q.shape[1]) for x in (k, v))
        if mask is None:
            return attend_blocked(q, k, v, None, dropout, scale, causal=is_causal)
        sees_a_key = mask.any(-1, keepdim=True)
        mask_bias = _apply_mask(q.new_zeros(mask.shape), mask | ~sees_a_key).expand(-1, -1, q.shape[-2], -1)
        output = attend_blocked(q, k, v, mask_bias, dropout, scale, causal=is_causal)
        return output if sees_a_key.all() else output * sees_a_key
    width = v.shape[-1]
    pad = q.shape[-1] - width
    if pad > 0:
        v = F.pad(v, (0, pad))
    elif pad < 0:
        q, k = F.pad(q, (0, -pad)), F.pad(k, (0, -pad))
    grouped = q.shape[1] != k.shape[1]
    options = {"dropout_p": dropout, "is_causal": is_causal, "scale": scale, "enable_gqa": grouped}
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    return out[..., :width]


def _slice_positions(encoding: PositionalEncoding, positions: Positions, tokens: slice) -> Positions:
    dim = positions.ndim - 1 - (encoding.axes > 1)
    return positions.narrow(dim, tokens.start, tokens.stop - tokens.start)


def _to_4d(x: Tensor) -> Tensor:
    """With leading dimensions of 1, which fused kernels need to accept a mask."""
    return x[(None,) * (4 - x.ndim)]


def flex_attend(
    v: Float[Tensor, "B H N dv"],
    encoding: PositionalEncoding,
    q_positions: Positions,
    k_positions: Positions,
    inputs: AttentionInputs,
) -> Float[Tensor, "B H N dv"] | None:
    """Flex attention with the encoding's `score_mod`, for square, unmasked attention; None if it has none."""
    if min(inputs.q.shape[-1], v.shape[-1]) < MIN_FLEX_HEAD_DIM:
        return None
    score_mod = encoding.score_mod(q_positions, k_positions, inputs)
    if score_mod is None:
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # importing it takes a second

    block_mask = None
    if inputs.causal:
        length = inputs.q.shape[-2]
        block_mask = create_block_mask(
            lambda batch, head, query, key: query >= key, None, None, length, length, device=str(inputs.q.device)
        )
    attention = flex_attention if torch.compiler.is_compiling() else _flex_kernel(inputs.q.device.type)
    return attention(inputs.q, inputs.k, v, score_mod=score_mod, block_mask=block_mask, scale=inputs.scale)


@cache
def _flex_kernel(device: str) -> Callable[..., Any]:
    """Compiled flex attention where a kernel exists, otherwise its eager form."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention
