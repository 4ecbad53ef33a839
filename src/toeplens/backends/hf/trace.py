"""A module's own attention: followed operation by operation from q . k to the heads' outputs, or its eager function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from toeplens.backends.hf.attention import MASK_FILL, blocks, masking_limit
from toeplens.backends.hf.model import InterfaceCall, tolerance
from toeplens.utils.machine import is_out_of_memory

_PRODUCT_OPS = ("matmul", "rmatmul", "bmm", "baddbmm")
_IDENTITY_OPS = ("view", "reshape", "contiguous", "to", "float", "type", "type_as", "dropout", "clone", "detach")
_ADD_OPS = {"add": 1.0, "radd": 1.0, "iadd": 1.0, "sub": -1.0, "isub": -1.0}
_MULTIPLY_OPS = ("mul", "rmul", "imul", "multiply")
_DIVIDE_OPS = ("div", "truediv", "itruediv", "true_divide")
_SOFTMAX_NAMES = ("softmax", "sumexp", "attention", "attn")  # parts of the names of operations that distribute weight
_EXP_OPS = ("exp", "exp2", "expm1", "special_exp2", "special_expm1", "pow")
_FUSED_FROM = 1 << 22  # weights, over batch and heads, from which on fused attention is tried
_MATMUL_OPS = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot")


@dataclass(frozen=True)
class TracedTensor:
    """What is known about a tensor of logits or weights: logits = scale left @ right + the sum of the terms."""

    left: Tensor  # [B, H, N, d], or with batch and heads as one dimension
    right: Tensor  # [B, H, d, N], likewise
    scale: float = 1.0
    terms: tuple[tuple[Tensor, int], ...] = ()  # each with the number of dimensions that the logits had at the time
    masks: tuple[tuple[Tensor, int], ...] = ()  # masks, True where a key is masked, likewise
    causal: bool = False  # whether the keys after the query are masked in addition
    is_softmax: bool = False  # whether the softmax has been applied
    weights: Tensor | None = None  # those multiplied by the values; None before that, and for fused attention
    unsupported: str | None = None  # the first operation that was not supported; None if all were


@dataclass(eq=False)
class ProductTracer(TorchFunctionMode):
    """Follows the products of queries and keys while ``is_active()``, in its own thread; passes on the attention found,
    values and outputs, which ``on_attention`` may replace. It does not keep queries-by-keys tables alive."""

    is_active: Callable[[], bool]
    on_attention: Callable[[TracedTensor, Tensor, Tensor], Tensor | None]
    failure: str | None = None  # why the last softmax of logits, or use of its weights, is not supported
    _traced: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)  # to `TracedTensor`

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor) or not self.is_active():
            return out
        name, view = getattr(func, "__name__", str(func)).strip("_"), out
        if name == "einsum":
            name, args, view = _as_matmul(args, out)
        replacement = self._trace_operation(name, args, kwargs, view)
        return out if replacement is None else _permuted_like(out, view, replacement)

    def _trace_operation(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor | None:
        """Follow one operation; returns a replacement of its result, if any."""
        if name == "scaled_dot_product_attention":
            traced, values = _trace_fused(*args, **kwargs)
            return self.on_attention(traced, values, out)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if name in _PRODUCT_OPS and len(tensors) >= 2:
            return self._trace_product(name, tensors, kwargs, out)
        operands = [(x, traced) for x in tensors if (traced := self._traced.get(x)) is not None]
        if not operands:
            return None
        # for two tables of logits, follow the first supported one; the other is a term
        operand, traced = next(((x, state) for x, state in operands if state.unsupported is None), operands[0])
        if traced.unsupported is None:
            traced = _trace_next(name, operand, args, kwargs, out, traced) or replace(traced, unsupported=name)
        if name == "softmax" and traced.unsupported is not None:
            self.failure = f"{traced.unsupported!r} between the product of queries and keys and its softmax"
        self._traced[out] = traced
        return None

    def _trace_product(self, name: str, tensors: list[Tensor], kwargs: dict[str, Any], out: Tensor) -> Tensor | None:
        if name == "rmatmul":
            tensors = tensors[::-1]
        left, right = tensors[-2:]
        traced = self._traced.get(left)
        if traced is not None and traced.is_softmax:
            if traced.unsupported is None:
                return self.on_attention(replace(traced, weights=left), right, out)
            self.failure = f"{traced.unsupported!r} between the softmax and the product with the values"
        elif left.ndim in (3, 4) and right.ndim == left.ndim:
            terms = ((tensors[0] * kwargs.get("beta", 1), out.ndim),) if name == "baddbmm" else ()
            self._traced[out] = TracedTensor(left, right, float(kwargs.get("alpha", 1)), terms)
        return None


class SoftmaxObserver(TorchDispatchMode):
    """Reports every operation, while ``is_active()``, that may distribute weight among keys, followed or not: a softmax
    of anything, by any torch function, and an exponential that depends on a product of two tensors that are not
    parameters. It sees the operations inside torch's functions and compiled code."""

    def __init__(
        self, is_active: Callable[[], bool], on_softmax: Callable[..., None], weights: Iterable[Tensor]
    ) -> None:
        super().__init__()
        self._is_active, self._on_softmax = is_active, on_softmax
        self._weights = {_storage_id(weight) for weight in weights}
        # memory that depends on products, by id, which stays unique
        self._product_storages: dict[int, StorageWeakRef] = {}

    def forget(self) -> None:
        """Forget the products so far."""
        self._product_storages.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._is_active():
            self._inspect(func.overloadpacket.__name__, args, kwargs or {}, out)
        return out

    def _inspect(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        inputs, outputs = ([x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in ((args, kwargs), out))
        shape = tuple(inputs[0].shape) if inputs else ()
        is_strided = all(x.layout is torch.strided for x in (*inputs, *outputs))
        if any(word in name for word in _SOFTMAX_NAMES) or not is_strided:
            self._on_softmax(name, shape)
            return
        depends = any(_storage_id(x) in self._product_storages for x in inputs)
        if depends and name.rstrip("_") in _EXP_OPS and not (name == "pow" and isinstance(args[0], Tensor)):
            self._on_softmax(name, shape)
        if name.rstrip("_") in _MATMUL_OPS:
            depends = depends or not any(_storage_id(x) in self._weights for x in inputs[-2:])
        if depends:
            self._product_storages |= {_storage_id(x): StorageWeakRef(x.untyped_storage()) for x in outputs}


def is_innermost(mode: ProductTracer | SoftmaxObserver) -> bool:
    """Whether an operation reaches this mode first, among modes of its kind."""
    return mode is (_get_current_function_mode() if isinstance(mode, ProductTracer) else _get_current_dispatch_mode())


def _storage_id(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _as_matmul(args: tuple[Any, ...], out: Tensor) -> tuple[str, tuple[Any, ...], Tensor]:
    """Rewrite a sum over the one index shared only by two factors as a matrix product; other sums stay ``einsum``."""
    terms = str(args[0]).replace(" ", "").replace("->", ",").split(",")
    if len(terms) != 3 or len(args) != 3 or any(len(set(term)) != len(term) or "." in term for term in terms):
        return "einsum", args, out
    left, right, result = terms
    shared = [index for index in left if index in right]
    summed = [index for index in shared if index not in result]
    rows, columns = ([index for index in term if index not in shared] for term in (left, right))
    if len(summed) != 1 or len(rows) != 1 or len(columns) != 1 or len(result) != len(shared) + 1:
        return "einsum", args, out
    ends = result.endswith(rows[0] + columns[0])
    batch = "".join(index for index in (result if ends else left) if index in shared and index in result)
    x = _permute(args[1], left, batch + rows[0] + summed[0])
    y = _permute(args[2], right, batch + summed[0] + columns[0])
    return "matmul", (x, y), _permute(out, result, batch + rows[0] + columns[0])


def _permute(x: Tensor, indices: str, order: str) -> Tensor:
    return x if indices == order else x.permute([indices.index(index) for index in order])


def _permuted_like(out: Tensor, view: Tensor, result: Tensor) -> Tensor:
    """``result`` with the dimension order of ``out``, of which ``view``, shaped as ``result``, is a permuted view."""
    remaining, order = list(zip(view.shape, view.stride(), strict=True)), []
    for dimension in zip(out.shape, out.stride(), strict=True):
        order.append(remaining.index(dimension))
        remaining[order[-1]] = (-1, -1)
    return result.permute(order)


def _trace_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[TracedTensor, Tensor]:
    """The logits and the values of torch's fused attention."""
    traced = TracedTensor(q, k.transpose(-2, -1), q.shape[-1] ** -0.5 if scale is None else scale, causal=is_causal)
    if attn_mask is not None:
        is_boolean = attn_mask.dtype == torch.bool
        traced = replace(traced, masks=((~attn_mask, 4),)) if is_boolean else replace(traced, terms=((attn_mask, 4),))
    return traced, v


def _trace_next(
    name: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, traced: TracedTensor
) -> TracedTensor | None:
    """What is known about the result of one operation on x; None if the operation is not supported."""
    other_args = [arg for arg in args if arg is not x]
    is_first = bool(args) and args[0] is x
    if name in _IDENTITY_OPS:
        return traced
    if traced.is_softmax:  # masked weights must still be the softmax over the visible keys: see `prove`
        sets_zero = name == "masked_fill" and is_first and _number(other_args[1:], 0.0) is not None
        return traced if sets_zero else None
    if name == "softmax":
        dim = kwargs.get("dim", other_args[0] if other_args else None)
        return replace(traced, is_softmax=True) if dim in (-1, out.ndim - 1) else None
    if name in _MULTIPLY_OPS or (name in _DIVIDE_OPS and is_first):
        factor = _number(other_args)
        if kwargs:
            return None
        if factor is None:
            mask = other_args[0] if name in _MULTIPLY_OPS and len(other_args) == 1 else None
            if not isinstance(mask, Tensor) or not bool(((mask == 0) | (mask == 1)).all()):
                return None
            return replace(traced, masks=(*traced.masks, (mask == 0, x.ndim)))
        factor = 1 / factor if name in _DIVIDE_OPS else factor
        terms = tuple((term * factor, ndim) for term, ndim in traced.terms)
        return replace(traced, scale=traced.scale * factor, terms=terms)
    if name in _ADD_OPS and len(other_args) == 1 and not kwargs and (is_first or _ADD_OPS[name] > 0):
        term = torch.as_tensor(other_args[0], dtype=x.dtype, device=x.device) * _ADD_OPS[name]
        return replace(traced, terms=(*traced.terms, (term, x.ndim)))
    if name == "max" and _number(other_args, masking_limit(x.dtype)) is not None:
        return traced
    # a value that replaces logits, such as the minimum of float16 in float32, masks keys: the proof checks it
    if name == "masked_fill" and is_first and _number(other_args[1:], MASK_FILL) is not None:
        return replace(traced, masks=(*traced.masks, (other_args[0], x.ndim)))
    if name == "where" and len(args) == 3 and args[1] is x and _number(other_args[1:], MASK_FILL) is not None:
        return replace(traced, masks=(*traced.masks, (~other_args[0], x.ndim)))
    return None


def _number(others: list[Any], limit: float | None = None) -> float | None:
    """The only other argument, as a number or one-element tensor; None unless it is at most ``limit``."""
    if len(others) != 1 or (isinstance(others[0], Tensor) and others[0].numel() != 1):
        return None
    value = float(others[0])
    return value if limit is None or value <= limit else None


def attends_within_tokens(traced: TracedTensor) -> bool:
    """Whether the queries are the same numbers in memory all along their second dimension, which never happens for
    heads. So each token attends to its own items, such as its states in earlier layers, not to tokens."""
    return traced.left.ndim == 4 and traced.left.shape[1] > 1 and traced.left.stride(1) == 0


def split_heads(x: Tensor, batch: int, ndim: int = 3) -> Tensor:
    """[B, H, ., .] from a tensor with ``ndim`` dimensions; with three, the first is batch and heads."""
    is_merged = x.ndim == 3 and ndim == 3 and x.shape[0] % batch == 0 and x.shape[0] > 1
    return x.reshape(batch, -1, *x.shape[1:]) if is_merged else x.reshape((1,) * (4 - x.ndim) + x.shape)


@dataclass(frozen=True)
class EagerOutputs:
    """Outputs of eager attention, its weights if all queries were computed at once, and the weights of some queries,
    ``rows``, if the function returns any."""

    heads: Float[Tensor, "B Nq H dv"]
    weights: Float[Tensor, "B H Nq Nk"] | None
    rows: Int[Tensor, "R"]
    row_weights: Float[Tensor, "B H R Nk"] | None


def run_eager(
    call: InterfaceCall, causal: bool, rows: Int[Tensor, "R"], fused: Callable[[], Tensor] | None = None
) -> EagerOutputs:
    """Run an eager function on all queries: at once if they are few, otherwise in blocks.

    On long inputs only some queries are run; all outputs, [B, Nq, H, dv], are then those of ``fused``, if they agree
    there. Queries-by-keys tables among the call's arguments are sliced as the mask is, and sinks of each query as the
    queries. If ``causal``, keys after the query are masked without a mask that says so. Weights of ``rows`` are kept.
    """
    queries, keys = size = call.q.shape[2], call.k.shape[2]
    row_size = call.q.shape[0] * call.q.shape[1] * keys
    sinks = sinks_of(call.options, call.q)

    def run(block: slice | Tensor, visible: int) -> tuple[Tensor, Tensor | None]:
        block_slices = (block, slice(0, visible))
        options = {name: _slice_table(value, size, block_slices) for name, value in call.options.items()}
        if sinks is not None and sinks.ndim == 3:
            options["sinks"] = call.options["sinks"][:, :, block]
        selected = replace(
            call,
            q=call.q[:, :, block],
            k=call.k[:, :, :visible],
            v=call.v[:, :, :visible],
            mask=_block_mask(call.mask, causal, size, block_slices, call.q),
            args=tuple(_slice_table(value, size, block_slices) for value in call.args),
            options=options,
        )
        return selected.run()

    if fused is not None and row_size * queries >= _FUSED_FROM:
        selected, weights = run(rows, keys)
        try:
            all_heads, allowed = fused(), tolerance(selected.dtype) * selected.abs().max()
            if weights is not None and (all_heads.index_select(1, rows) - selected).abs().max() <= allowed:
                return EagerOutputs(all_heads, None, rows, weights)
        except (ValueError, TypeError, RuntimeError) as error:  # for example with a softcap
            if is_out_of_memory(error):
                raise
    heads, row_weights, all_weights = list[Tensor](), list[Tensor](), None
    for block in blocks(queries, row_size):
        visible = min(block.stop, keys) if causal else keys
        out, weights = run(block, visible)
        heads.append(out)
        if weights is not None:
            weights = torch.nn.functional.pad(weights, (0, keys - visible)) if visible < keys else weights
            all_weights = weights if block == slice(0, queries) else None
            indices = rows[(rows >= block.start) & (rows < block.stop)] - block.start
            row_weights.append(weights.index_select(2, indices))
    joined_weights = torch.cat(row_weights, dim=2) if row_weights else None
    return EagerOutputs(torch.cat(heads, dim=1) if len(heads) > 1 else heads[0], all_weights, rows, joined_weights)


def _slice_table(x: Any, size: tuple[int, int], slices: tuple[slice | Tensor, slice]) -> Any:
    """The rows and keys of a queries-by-keys table; anything else is returned unchanged."""
    return x[..., *slices] if isinstance(x, Tensor) and x.ndim >= 3 and x.shape[-2:] == size else x


def _block_mask(
    mask: Tensor | None, causal: bool, size: tuple[int, int], slices: tuple[slice | Tensor, slice], query: Tensor
) -> Tensor | None:
    """The mask added to the logits of these queries and keys."""
    rows, keys = slices
    if mask is not None:
        mask = mask[..., rows, keys] if mask.shape[-2] == size[0] else mask[..., keys]
    elif causal:
        positions = torch.arange(rows.start, rows.stop, device=query.device) if isinstance(rows, slice) else rows
        mask = (torch.arange(keys.stop, device=query.device) <= positions.unsqueeze(-1))[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=query.dtype, device=query.device), torch.finfo(query.dtype).min)


def sinks_of(options: Mapping[str, Any], query: Float[Tensor, "B H Nq d"]) -> Tensor | None:
    """Sinks as in `AttentionFunction`: one per head, or of each query."""
    sinks = options.get("sinks")
    if not isinstance(sinks, Tensor) or sinks.shape != (*query.shape[:3], 1):
        return options.get("s_aux")
    return sinks[..., 0].transpose(0, 1)
