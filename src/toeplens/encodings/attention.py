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
from toeplens.encodings.base import PositionalEncoding, Seen
from toeplens.encodings.cpu_attention import attend_blocked, is_faster
from toeplens.encodings.shapes import Keys, Notes, Pairs, Positions, Queries
from toeplens.ground import invalid

AT_ONCE = 1 << 22  # query-key pairs per chunk, over batch and heads, where logits are formed explicitly
KEPT = 4 * AT_ONCE  # maximum size of a bias that is cached for all layers that share it
FACTORED = 512  # queries per chunk for low-rank biases, whose factors are relative to the chunk's first query
LEAST = 128  # minimum queries per chunk with a window: smaller chunks do not pay
_OF_SEEN = {field.name for field in fields(Seen)}
SMALLEST_HEAD = 16  # smallest head dimension of flex attention's kernels


class Places(TypedDict):
    """Positions of queries and keys, and the mask."""

    q_positions: Positions
    k_positions: Positions
    rows: NotRequired[Int[Tensor, "*B Nq"] | None]
    mask: NotRequired[Bool[Tensor, "*_B _H _Nq Nk"] | None]


class Told(Places):
    """Keyword arguments of `attend` other than queries, keys and values."""

    encoding: PositionalEncoding
    scale: float
    notes: NotRequired[Notes | None]
    causal: NotRequired[bool]
    window: NotRequired[int | None]
    texts: NotRequired[Int[Tensor, "B Nk"] | None]
    padding: NotRequired[Bool[Tensor, "B Nk"] | None]
    softcap: NotRequired[float | None]
    sinks: NotRequired[Float[Tensor, "H"] | None]
    turned: NotRequired[bool]


def check_inputs(q: Tensor, k: Tensor, v: Tensor | None, told: Told) -> None:
    """Raise `InputError` for shapes that do not match; reads no values. See `attend`."""
    encoding = told["encoding"]
    kit.require_tensor("q", q, "float", ("B", encoding.num_heads, "Nq", "d"))
    batch, heads, queries, width = q.shape
    kit.require_tensor("k", k, "float", (batch, "G", "Nk", width))
    groups, keys = k.shape[1:3]
    if groups < 1 or heads % groups:
        raise invalid("k", f"have a number of heads that divides the {heads} heads of q", groups)
    if v is not None:
        kit.require_tensor("v", v, "float", (batch, groups, keys, "dv"))
    check_positions("q_positions", told["q_positions"], encoding, batch, queries)
    check_positions("k_positions", told["k_positions"], encoding, batch, keys)
    rows, mask, window = told.get("rows"), told.get("mask"), told.get("window")
    if mask is not None:
        kit.require_tensor("mask", mask, "bool")
        square = (batch, heads, queries, keys)
        fits = 1 <= mask.ndim <= 4 and mask.shape[-1] == keys
        if not fits or any(a not in (1, b) for a, b in zip(reversed(mask.shape), reversed(square), strict=False)):
            whole = f"[batch, heads, queries, keys] = [{batch}, {heads}, {queries}, {keys}]"
            raise invalid("mask", f"broadcast to {whole}, with all keys", got=f"shape {list(mask.shape)}")
    shapes: dict[str, tuple[kit.Kind, Sequence[int | str]]] = {
        "rows": ("integer", (queries,) if rows is not None and rows.ndim == 1 else (batch, queries)),
        "notes": ("real", (batch, "H", keys, "c")),
        "texts": ("real", (batch, keys)),
        "padding": ("bool", (batch, keys)),
        "sinks": ("float", (heads,)),
    }
    for name, (kind, shape) in shapes.items():
        if told.get(name) is not None:
            kit.require_tensor(name, told.get(name), kind, shape)
    if window is not None and (window < 1 or not told.get("causal", True)):
        raise invalid("window", "be at least 1, and attention causal", window)
    if told.get("softcap") is not None:
        kit.require_number("softcap", told.get("softcap"), over=0)


def check_positions(name: str, positions: Positions, encoding: PositionalEncoding, batch: int, length: int) -> None:
    """Check that there is one position per token; coordinates, if any, are the last dimension."""
    kit.require_tensor(name, positions, "real")
    shape, axes = positions.shape, encoding.axes
    whole = ((length,), (batch, length), (1, length))
    if shape in whole or (axes > 1 and shape[-1:] == (axes,) and shape[:-1] in whole):
        return
    last = f", {axes}" if axes > 1 else ""
    raise invalid(name, f"have shape [{length}{last}] or [{batch}, {length}{last}]", got=f"shape {list(shape)}")


def attend(
    q: Queries,
    k: Keys,
    v: Float[Tensor, "B G Nk dv"],
    *,
    added: Float[Tensor, "*_B H Nq Nk"] | None = None,
    dropout: float = 0.0,
    fused: bool = True,
    at_once: int = AT_ONCE,
    **told: Unpack[Told],
) -> Float[Tensor, "B H Nq dv"]:
    """Attention with an encoding: each head's output [B, H, Nq, dv].

    Queries and keys are passed as projected. Keys and values may have fewer heads than queries, a divisor G of H; each
    then serves H / G adjacent heads. A query without any visible key (such as left padding) has output 0. Raises
    `InputError` for shapes that do not match.

    Arguments
        encoding  an encoding for H heads
        q_positions, k_positions  positions of the queries and keys
        scale     factor of q . k
        rows      index of each query's own token among the keys (default: the last Nq keys, as in decoding with a
                  cache)
        notes     per-key features of the encoding (see `PositionalEncoding.note`)
        mask      True where a key may be seen (default: everywhere)
        causal    mask the keys after each query's own token (default: True)
        window    sliding window: the number of keys that a query sees, including its own (default: no limit)
        texts     id of the packed document that each key belongs to; keys of other documents are masked
        padding   True where a key's token is padding: masked, and not counted in cumulative sums, as are keys that a
                  mask hides from all queries
        softcap   c, where logits are c tanh(q . k scale / c) before any bias (Gemma 2, arXiv 2408.00118)
        sinks     one logit per head that takes part in the softmax without a key or value (gpt-oss, arXiv 2508.10925)
        turned    whether queries and keys are already multiplied by the encoding's `pair_factors`
        added     a precomputed bias with the mask in it, from `fixed_bias`, which layers can share
        dropout   dropout rate on the attention weights
        fused     use torch's fused attention (on a GPU, flex attention for content-dependent biases) where the encoding
                  allows it; the result is the same
        at_once   query-key pairs per chunk where logits are formed: memory is linear in the number of keys
    """
    check_inputs(q, k, v, told)
    encoding = told["encoding"]
    groups = fused and encoding.turns_alike and not encoding.looks_at_keys and q.device.type == "cpu"
    whole = after_rotation(q, k, told, groups=groups)
    in_order = told.get("rows") is None  # queries are then the last tokens of the keys
    fused = fused and encoding.fusable and whole.plain and not kit.is_mapped()  # vmap would loop over models or fail
    whole = whole if fused else whole.ungrouped()
    q_positions, k_positions, seen = whole.q_positions, whole.k_positions, whole.seen
    q, k, causal, scale, window = seen.q, seen.k, seen.causal, seen.scale, seen.window
    v, masked = for_each_head(v, k.shape[1]), seen.is_masked
    square = in_order and not masked and q.shape[-2] == k.shape[-2] and window is None
    near = window if fused and in_order else None  # keys outside the window are skipped
    if fused and added is None and not encoding.overrides("bias"):
        if square or not (masked or causal):
            return _fused(q, k, v, None, dropout, scale, is_causal=causal)
        if near is None or q.shape[-2] <= near:
            return _fused(q, k, v, seen.visible(), dropout, scale)
    if fused and added is None and square and not dropout and q.is_cuda:
        flexed = flex_attend(v, encoding, q_positions, k_positions, seen)
        if flexed is not None:
            return flexed
    factored = fused and added is None and encoding.factorable and causal and kit.product_dtype(q) in kit.PRECISE
    factored = factored and in_order and encoding.factors_at(q_positions, k_positions)
    factored = factored and not (encoding.looks_at_keys and seen.is_scattered())
    once = fused and added is None and square and encoding.fixed_bias and not factored
    once = once and q_positions is k_positions and not encoding.by_sequence(k_positions)
    if once and encoding.pair_width * q.shape[1] * k.shape[2] ** 2 <= 4 * at_once:
        added = fixed_bias(encoding, k_positions, dtype=q.dtype, mask=None, causal=causal)
    whole = replace(whole, v=v, added=added, dropout=dropout, fused=fused, factored=factored, square=square)
    numbers = (encoding.pair_width if added is None else 1) * q.shape[0] * q.shape[1] * k.shape[2]  # for each query
    size = FACTORED if factored else max(1, at_once // max(1, numbers))
    size = size if near is None else min(size, max(near, LEAST))
    starts, earlier = range(0, q.shape[-2], size), k.shape[-2] - q.shape[-2]
    parts = []
    for start in starts:
        stop = min(start + size, q.shape[-2])
        first = 0 if near is None else max(0, start + earlier + 1 - near)
        last = stop + earlier if in_order and causal else k.shape[-2]
        work = whole.part(slice(start, stop), slice(first, last))
        if len(starts) > 1 and torch.is_grad_enabled() and not (torch.compiler.is_compiling() or kit.is_mapped()):
            parts.append(checkpoint(work.attend, use_reentrant=False))
        else:
            parts.append(work.attend())
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def attention_logits(q: Queries, k: Keys, **told: Unpack[Told]) -> Pairs:
    """The logits before the softmax, formed explicitly; minus infinity where a key is masked."""
    check_inputs(q, k, None, told)
    return after_rotation(q, k, told).logits()


def attention_weights(q: Queries, k: Keys, **told: Unpack[Told]) -> Pairs:
    """The attention weights, formed explicitly; 0 for queries without a visible key."""
    check_inputs(q, k, None, told)
    return after_rotation(q, k, told).weights()


@dataclass(frozen=True)
class AttentionParts:
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
def attention_parts(q: Queries, k: Keys, **told: Unpack[Told]) -> AttentionParts:
    """The components of the attention that `toeplens.encodings.attend` computes for these queries and keys.

    Where an encoding changes the logits in another way (``score``, ``transform_logits``), the bias is the difference
    between its logits and the scaled product. It is formed for all queries and keys, so memory grows with their
    product.

    Arguments are those of `toeplens.encodings.attend`.
    """
    encoding = told["encoding"]
    rotated = after_rotation(q, k, told, groups=encoding.turns_alike)
    whole = rotated.ungrouped()
    seen, visible = whole.seen, whole.seen.visible()
    visible = None if visible is None else _four(visible)
    logits = bias = factor = values = None
    if encoding.overrides("score") or encoding.overrides("transform_logits"):
        logits = whole.logits()
        wide = torch.promote_types(logits.dtype, torch.float32)
        product = (seen.q.to(wide) @ seen.k.to(wide).transpose(-2, -1)) * seen.scale
        if whole.softcap is not None:
            product = whole.softcap * (product / whole.softcap).tanh()
        hidden = logits.isneginf()
        if bool((hidden if visible is None else hidden & visible).any()):
            visible = ~hidden
        bias = (logits.to(wide) - product).masked_fill(hidden, 0.0)
    elif encoding.overrides("bias"):
        bias = whole.hook("bias")
        bias = None if bias is None else _four(bias)
        if bias is not None and visible is not None and len(visible) == 1:
            bias = bias.masked_fill(~visible, 0.0)
    if encoding.overrides("transform_weights") or encoding.overrides("add_values"):
        weights = whole.softmax(whole.logits() if logits is None else logits)
        changed = whole.hook("transform_weights", weights)
        if encoding.overrides("transform_weights"):
            factor = torch.where(weights == 0, 0.0, changed / weights)
        values = whole.hook("add_values", changed)
    return AttentionParts(rotated.seen.q, rotated.seen.k, bias, visible, factor, values)


def fixed_bias(
    encoding: PositionalEncoding,
    positions: Positions,
    *,
    dtype: torch.dtype,
    mask: Bool[Tensor, "*_B _H _N N"] | None,
    causal: bool,
) -> Float[Tensor, "_ H N N"]:
    """The bias of an encoding with a `fixed_bias` between all ``positions``, including the mask, for `attend`.

    It is float32 if ``dtype`` has 16 bits.
    """
    with kit.without_autocast(positions):
        bias = encoding.bias(positions, positions)
    assert bias is not None
    added = _four(bias.to(kit.widened(dtype)))
    if causal:
        length = added.shape[-1]
        future = torch.ones(length, length, dtype=torch.bool, device=added.device).triu(1)
        added = added.masked_fill(future, float("-inf"))
    return _hidden(added, mask)


@dataclass(frozen=True)
class _Queries:
    """A chunk of queries after `rotate`, with the keys that any of them sees."""

    encoding: PositionalEncoding
    q_positions: Positions
    k_positions: Positions
    seen: Seen
    v: Tensor | None = None
    added: Tensor | None = None
    dropout: float = 0.0
    fused: bool = False
    factored: bool = False
    square: bool = False  # as many queries as keys, each seeing all keys or those up to its own
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether only the encoding changes the logits or the softmax."""
        return self.softcap is None and self.sinks is None

    def ungrouped(self) -> _Queries:
        """With the keys repeated for each head."""
        return replace(self, seen=replace(self.seen, k=for_each_head(self.seen.k, self.seen.q.shape[1])))

    def part(self, queries: slice, keys: slice) -> _Queries:
        """A slice of the queries and keys."""
        return replace(
            self,
            q_positions=_between(self.encoding, self.q_positions, queries),
            k_positions=_between(self.encoding, self.k_positions, keys),
            seen=self.seen.part(queries, keys),
            v=None if self.v is None else self.v[..., keys, :],
            added=None if self.added is None else self.added[..., queries, keys],
            square=self.square and queries.start == 0,
        )

    def attend(self) -> Tensor:
        """Each head's output for these queries."""
        assert self.v is not None
        if self.factored:
            return self._with_factors(self.v)
        if self.fused:
            seen, bias = self.seen, self._bias()
            if bias is not None and self.square and is_faster(seen.q, seen.k, bias, self.dropout):
                k, v = (for_each_head(x, seen.q.shape[1]) for x in (seen.k, self.v))
                return attend_blocked(seen.q, k, v, _four(bias), self.dropout, seen.scale, causal=seen.causal)
            return _fused(seen.q, seen.k, self.v, bias, self.dropout, seen.scale)
        weights = F.dropout(self.weights().to(self.v.dtype), self.dropout)
        out, more = weights @ self.v, self.hook("add_values", weights)
        return out if more is None else out + more

    def _with_factors(self, v: Tensor) -> Tensor:
        """Causal attention with the bias as one or two extra dimensions of queries and keys."""
        seen = self.seen
        a, b = self.hook("bias_product")
        q = torch.cat((seen.q, (a / seen.scale).to(seen.q.dtype).expand(*seen.q.shape[:-1], -1)), dim=-1)
        k, v = (for_each_head(x, q.shape[1]) for x in (seen.k, v))
        k = torch.cat((k, b.to(k.dtype).expand(*k.shape[:-1], -1)), dim=-1)
        mask = None if self.square else seen.visible()  # SDPA's is_causal only fits square attention
        return _fused(q, k, v, mask, self.dropout, seen.scale, is_causal=self.square)

    def _bias(self) -> Tensor | None:
        """The bias with the mask in it, in the dtype of fused attention; without a bias, the mask."""
        bias, visible = self.added, None
        if bias is None:
            bias, visible = self.hook("bias"), self.seen.visible()
        if bias is None:
            return visible
        q = self.seen.q
        if kit.product_dtype(q) in kit.PRECISE:
            return _hidden(bias.to(q.dtype), visible)
        bias = _hidden(bias, visible)  # relative to each row's maximum, so that large entries are rounded least
        largest = bias.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(bias.dtype).min)
        return (bias - largest).to(kit.product_dtype(q))

    def logits(self) -> Tensor:
        """The input of the softmax."""
        seen = self.seen
        logits = self.hook("score", seen.q, seen.k) * seen.scale
        if self.softcap is not None:
            logits = self.softcap * (logits / self.softcap).tanh()
        if self.added is not None:
            return logits + self.added
        bias = self.hook("bias")
        if bias is not None:
            logits = logits + bias.to(kit.widened(logits.dtype))
        return _hidden(self.hook("transform_logits", logits), seen.visible())

    def weights(self) -> Tensor:
        """The attention weights."""
        return self.hook("transform_weights", self.softmax(self.logits()))

    def softmax(self, logits: Tensor) -> Tensor:
        """The softmax over keys and the optional sink; 0 for queries without a visible key."""
        if self.sinks is not None:
            lost = self.sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)
            return torch.cat((logits, lost), dim=-1).softmax(-1)[..., :-1]
        if not self.seen.is_masked and self.added is None:  # only a mask can hide all keys
            return logits.softmax(-1)
        blind = logits.isneginf().all(-1, keepdim=True)
        return logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)

    def hook(self, name: str, *arguments: Tensor) -> Any:
        return self.encoding.hook(name, *arguments, self.q_positions, self.k_positions, seen=self.seen)


def after_rotation(q: Tensor, k: Tensor, told: Told, *, groups: bool = False) -> _Queries:
    """All queries and their keys after `rotate`; keys are repeated for each head unless ``groups``."""
    encoding, places = told["encoding"], (told["q_positions"], told["k_positions"])
    k = k if encoding.turns_alike else for_each_head(k, q.shape[1])
    inputs: dict[str, Any] = {name: value for name, value in told.items() if name in _OF_SEEN}
    seen = Seen.of(q, k, **inputs)
    if not told.get("turned"):
        q, k = encoding.hook("rotate", q, k, *places, seen=seen)
    seen = replace(seen, q=q, k=k if groups else for_each_head(k, q.shape[1]))
    return _Queries(encoding, *places, seen, softcap=told.get("softcap"), sinks=told.get("sinks"))


def for_each_head(x: Float[Tensor, "B G Nk d"], heads: int) -> Float[Tensor, "B H Nk d"]:
    """Keys or values of groups, repeated for each head of a group."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _hidden(x: Tensor, visible: Tensor | None) -> Tensor:
    return x if visible is None else x.masked_fill(~visible, float("-inf"))


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float, *, is_causal: bool = False
) -> Tensor:
    """Fused attention; narrower inputs are padded with zeros, as the kernels need equal widths.

    Blocked CPU attention is used where it is faster: without a mask, or with a mask over keys only (padding).
    """
    mask = None if mask is None else _four(mask)
    if (mask is None or (mask.dtype == torch.bool and mask.shape[-2] == 1)) and is_faster(q, k, dropout=dropout):
        k, v = (for_each_head(x, q.shape[1]) for x in (k, v))
        if mask is None:
            return attend_blocked(q, k, v, None, dropout, scale, causal=is_causal)
        sees = mask.any(-1, keepdim=True)
        hidden = _hidden(q.new_zeros(mask.shape), mask | ~sees).expand(-1, -1, q.shape[-2], -1)
        found = attend_blocked(q, k, v, hidden, dropout, scale, causal=is_causal)
        return found if sees.all() else found * sees
    width = v.shape[-1]
    missing = q.shape[-1] - width
    if missing > 0:
        v = F.pad(v, (0, missing))
    elif missing < 0:
        q, k = F.pad(q, (0, -missing)), F.pad(k, (0, -missing))
    grouped = q.shape[1] != k.shape[1]
    more = {"dropout_p": dropout, "is_causal": is_causal, "scale": scale, "enable_gqa": grouped}
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **more)
    return out[..., :width]


def _between(encoding: PositionalEncoding, positions: Positions, some: slice) -> Positions:
    dim = positions.ndim - 1 - (encoding.axes > 1)
    return positions.narrow(dim, some.start, some.stop - some.start)


def _four(x: Tensor) -> Tensor:
    """With leading dimensions of 1, which fused kernels need to accept a mask."""
    return x[(None,) * (4 - x.ndim)]


def flex_attend(
    v: Float[Tensor, "B H N dv"],
    encoding: PositionalEncoding,
    q_positions: Positions,
    k_positions: Positions,
    seen: Seen,
) -> Float[Tensor, "B H N dv"] | None:
    """Flex attention with the encoding's `score_mod`, for square, unmasked attention; None if it has none."""
    if min(seen.q.shape[-1], v.shape[-1]) < SMALLEST_HEAD:
        return None
    score_mod = encoding.score_mod(q_positions, k_positions, seen)
    if score_mod is None:
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # importing it takes a second

    block_mask = None
    if seen.causal:
        length = seen.q.shape[-2]
        block_mask = create_block_mask(
            lambda batch, head, query, key: query >= key, None, None, length, length, device=str(seen.q.device)
        )
    run = flex_attention if torch.compiler.is_compiling() else _kernel(seen.q.device.type)
    return run(seen.q, seen.k, v, score_mod=score_mod, block_mask=block_mask, scale=seen.scale)


@cache
def _kernel(device: str) -> Callable[..., Any]:
    """Compiled flex attention where a kernel exists, otherwise its eager form."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention
