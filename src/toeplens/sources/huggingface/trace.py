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

from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.attention import FILLS, blocks, low
from toeplens.sources.huggingface.model import AttentionInputs, tolerance

_PRODUCTS = ("matmul", "rmatmul", "bmm", "baddbmm")
_SAME = ("view", "reshape", "contiguous", "to", "float", "type", "type_as", "dropout", "clone", "detach")
_PLUS = {"add": 1.0, "radd": 1.0, "iadd": 1.0, "sub": -1.0, "isub": -1.0}
_TIMES = ("mul", "rmul", "imul", "multiply")
_OVER = ("div", "truediv", "itruediv", "true_divide")
_SHARING = ("softmax", "sumexp", "attention", "attn")  # parts of the names of operations that distribute weight
_EXPONENTIALS = ("exp", "exp2", "expm1", "special_exp2", "special_expm1", "pow")
_LONG = 1 << 22  # weights, over batch and heads, from which on fused attention is tried
_MULTIPLIED = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot")


@dataclass(frozen=True)
class Followed:
    """What is known about a tensor of logits or weights: logits = scale left @ right + the sum of the terms."""

    left: Tensor  # [B, H, N, d], or with batch and heads as one dimension
    right: Tensor  # [B, H, d, N], likewise
    scale: float = 1.0
    terms: tuple[tuple[Tensor, int], ...] = ()  # each with the number of dimensions that the logits had at the time
    hidden: tuple[tuple[Tensor, int], ...] = ()  # masks, True where a key is masked, likewise
    causal: bool = False  # whether the keys after the query are masked in addition
    taken: bool = False  # whether the softmax has been applied
    weights: Tensor | None = None  # those multiplied by the values; None before that, and for fused attention
    broken: str | None = None  # the first operation that was not supported; None if all were


@dataclass(eq=False)
class Products(TorchFunctionMode):
    """Follows the products of queries and keys while ``watching()``, in its own thread; passes on the attention found,
    values and outputs, which ``found`` may replace. It does not keep queries-by-keys tables alive."""

    watching: Callable[[], bool]
    found: Callable[[Followed, Tensor, Tensor], Tensor | None]
    last: str | None = None  # why the last softmax of logits, or use of its weights, is not supported
    _known: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)  # to `Followed`

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor) or not self.watching():
            return out
        name, seen = getattr(func, "__name__", str(func)).strip("_"), out
        if name == "einsum":
            name, args, seen = _as_matmul(args, out)
        put = self._follow(name, args, kwargs, seen)
        return out if put is None else _laid_out_as(out, seen, put)

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor | None:
        """Follow one operation; returns a replacement of its result, if any."""
        if name == "scaled_dot_product_attention":
            made, values = _fused(*args, **kwargs)
            return self.found(made, values, out)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if name in _PRODUCTS and len(given) >= 2:
            return self._product(name, given, kwargs, out)
        known = [(x, made) for x in given if (made := self._known.get(x)) is not None]
        if not known:
            return None
        # for two tables of logits, follow the first supported one; the other is a term
        followed, made = next(((x, each) for x, each in known if each.broken is None), known[0])
        if made.broken is None:
            made = _next(name, followed, args, kwargs, out, made) or replace(made, broken=name)
        if name == "softmax" and made.broken is not None:
            self.last = f"{made.broken!r} between the product of queries and keys and its softmax"
        self._known[out] = made
        return None

    def _product(self, name: str, given: list[Tensor], kwargs: dict[str, Any], out: Tensor) -> Tensor | None:
        if name == "rmatmul":
            given = given[::-1]
        left, right = given[-2:]
        made = self._known.get(left)
        if made is not None and made.taken:
            if made.broken is None:
                return self.found(replace(made, weights=left), right, out)
            self.last = f"{made.broken!r} between the softmax and the product with the values"
        elif left.ndim in (3, 4) and right.ndim == left.ndim:
            terms = ((given[0] * kwargs.get("beta", 1), out.ndim),) if name == "baddbmm" else ()
            self._known[out] = Followed(left, right, float(kwargs.get("alpha", 1)), terms)
        return None


class Exponentials(TorchDispatchMode):
    """Reports every operation, while ``watching()``, that may distribute weight among keys, followed or not: a softmax
    of anything, by any torch function, and an exponential that depends on a product of two tensors that are not
    parameters. It sees the operations inside torch's functions and compiled code."""

    def __init__(
        self, watching: Callable[[], bool], found: Callable[[str, tuple[int, ...]], None], weights: Iterable[Tensor]
    ) -> None:
        super().__init__()
        self._watching, self._found = watching, found
        self._weights = {_storage(weight) for weight in weights}
        self._products: dict[int, StorageWeakRef] = {}  # memory that depends on products, by id, which stays unique

    def forget(self) -> None:
        """Forget the products so far."""
        self._products.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._watching():
            self._note(func.overloadpacket.__name__, args, kwargs or {}, out)
        return out

    def _note(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        given, made = ([x for x in tree_leaves(each) if isinstance(x, Tensor)] for each in ((args, kwargs), out))
        shape = tuple(given[0].shape) if given else ()
        if any(word in name for word in _SHARING) or any(x.layout is not torch.strided for x in (*given, *made)):
            self._found(name, shape)
            return
        follows = any(_storage(x) in self._products for x in given)
        if follows and name.rstrip("_") in _EXPONENTIALS and not (name == "pow" and isinstance(args[0], Tensor)):
            self._found(name, shape)
        if name.rstrip("_") in _MULTIPLIED:
            follows = follows or not any(_storage(x) in self._weights for x in given[-2:])
        if follows:
            self._products |= {_storage(x): StorageWeakRef(x.untyped_storage()) for x in made}


def innermost(mode: Products | Exponentials) -> bool:
    """Whether an operation reaches this mode first, among modes of its kind."""
    return mode is (_get_current_function_mode() if isinstance(mode, Products) else _get_current_dispatch_mode())


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _as_matmul(args: tuple[Any, ...], out: Tensor) -> tuple[str, tuple[Any, ...], Tensor]:
    """Rewrite a sum over the one index shared only by two factors as a matrix product; other sums stay ``einsum``."""
    terms = str(args[0]).replace(" ", "").replace("->", ",").split(",")
    if len(terms) != 3 or len(args) != 3 or any(len(set(term)) != len(term) or "." in term for term in terms):
        return "einsum", args, out
    left, right, made = terms
    shared = [index for index in left if index in right]
    summed = [index for index in shared if index not in made]
    rows, columns = ([index for index in term if index not in shared] for term in (left, right))
    if len(summed) != 1 or len(rows) != 1 or len(columns) != 1 or len(made) != len(shared) + 1:
        return "einsum", args, out
    ends = made.endswith(rows[0] + columns[0])
    batch = "".join(index for index in (made if ends else left) if index in shared and index in made)
    x = _laid_out(args[1], left, batch + rows[0] + summed[0])
    y = _laid_out(args[2], right, batch + summed[0] + columns[0])
    return "matmul", (x, y), _laid_out(out, made, batch + rows[0] + columns[0])


def _laid_out(x: Tensor, indices: str, wanted: str) -> Tensor:
    return x if indices == wanted else x.permute([indices.index(index) for index in wanted])


def _laid_out_as(out: Tensor, seen: Tensor, made: Tensor) -> Tensor:
    """``made`` with the dimension order of ``out``, of which ``seen``, shaped as ``made``, is a permuted view."""
    left, order = list(zip(seen.shape, seen.stride(), strict=True)), []
    for own in zip(out.shape, out.stride(), strict=True):
        order.append(left.index(own))
        left[order[-1]] = (-1, -1)
    return made.permute(order)


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Followed, Tensor]:
    """The logits and the values of torch's fused attention."""
    made = Followed(q, k.transpose(-2, -1), q.shape[-1] ** -0.5 if scale is None else scale, causal=is_causal)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        made = replace(made, hidden=((~attn_mask, 4),)) if boolean else replace(made, terms=((attn_mask, 4),))
    return made, v


def _next(
    name: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, made: Followed
) -> Followed | None:
    """What is known about the result of one operation on x; None if the operation is not supported."""
    others = [each for each in args if each is not x]
    leads = bool(args) and args[0] is x
    if name in _SAME:
        return made
    if made.taken:  # masked weights must still be the softmax over the visible keys: see `prove`
        emptied = name == "masked_fill" and leads and _number(others[1:], 0.0) is not None
        return made if emptied else None
    if name == "softmax":
        dim = kwargs.get("dim", others[0] if others else None)
        return replace(made, taken=True) if dim in (-1, out.ndim - 1) else None
    if name in _TIMES or (name in _OVER and leads):
        factor = _number(others)
        if kwargs:
            return None
        if factor is None:
            mask = others[0] if name in _TIMES and len(others) == 1 and isinstance(others[0], Tensor) else None
            if mask is None or not bool(((mask == 0) | (mask == 1)).all()):
                return None
            return replace(made, hidden=(*made.hidden, (mask == 0, x.ndim)))
        factor = 1 / factor if name in _OVER else factor
        terms = tuple((term * factor, ndim) for term, ndim in made.terms)
        return replace(made, scale=made.scale * factor, terms=terms)
    if name in _PLUS and len(others) == 1 and not kwargs and (leads or _PLUS[name] > 0):
        term = torch.as_tensor(others[0], dtype=x.dtype, device=x.device) * _PLUS[name]
        return replace(made, terms=(*made.terms, (term, x.ndim)))
    if name == "max" and _number(others, low(x.dtype)) is not None:
        return made
    # a value that replaces logits, such as the minimum of float16 in float32, masks keys: the proof checks it
    if name == "masked_fill" and leads and _number(others[1:], FILLS) is not None:
        return replace(made, hidden=(*made.hidden, (others[0], x.ndim)))
    if name == "where" and len(args) == 3 and args[1] is x and _number(others[1:], FILLS) is not None:
        return replace(made, hidden=(*made.hidden, (~others[0], x.ndim)))
    return None


def _number(others: list[Any], most: float | None = None) -> float | None:
    """The only other argument, as a number or one-element tensor; None unless it is at most ``most``."""
    if len(others) != 1 or (isinstance(others[0], Tensor) and others[0].numel() != 1):
        return None
    value = float(others[0])
    return value if most is None or value <= most else None


def at_each_token(made: Followed) -> bool:
    """Whether the queries are the same numbers in memory all along their second dimension, which never happens for
    heads. So each token attends to its own items, such as its states in earlier layers, not to tokens."""
    return made.left.ndim == 4 and made.left.shape[1] > 1 and made.left.stride(1) == 0


def four(x: Tensor, batch: int, ndim: int = 3) -> Tensor:
    """[B, H, ., .] from a tensor with ``ndim`` dimensions; with three, the first is batch and heads."""
    both = x.ndim == 3 and ndim == 3 and x.shape[0] % batch == 0 and x.shape[0] > 1
    return x.reshape(batch, -1, *x.shape[1:]) if both else x.reshape((1,) * (4 - x.ndim) + x.shape)


@dataclass(frozen=True)
class Eager:
    """Outputs of eager attention, its weights if all queries were computed at once, and the weights of some queries,
    ``own``, if the function returns any."""

    heads: Float[Tensor, "B Nq H dv"]
    weights: Float[Tensor, "B H Nq Nk"] | None
    rows: Int[Tensor, "R"]
    own: Float[Tensor, "B H R Nk"] | None


def run_eager(
    call: AttentionInputs, causal: bool, rows: Int[Tensor, "R"], fused: Callable[[], Tensor] | None = None
) -> Eager:
    """Run an eager function on all queries: at once if they are few, otherwise in blocks.

    On long inputs only some queries are run; all outputs, [B, Nq, H, dv], are then those of ``fused``, if they agree
    there. Queries-by-keys tables among the call's arguments are sliced as the mask is, and sinks of each query as the
    queries. If ``causal``, keys after the query are masked without a mask that says so. Weights of ``rows`` are kept.
    """
    queries, keys = size = call.q.shape[2], call.k.shape[2]
    many = call.q.shape[0] * call.q.shape[1] * keys
    sinks = sinks_of(call.how, call.q)

    def run(part: slice | Tensor, seen: int) -> tuple[Tensor, Tensor | None]:
        cut = (part, slice(0, seen))
        how = {name: _cut(each, size, cut) for name, each in call.how.items()}
        if sinks is not None and sinks.ndim == 3:
            how["sinks"] = call.how["sinks"][:, :, part]
        some = replace(
            call,
            q=call.q[:, :, part],
            k=call.k[:, :, :seen],
            v=call.v[:, :, :seen],
            mask=_mask(call.mask, causal, size, cut, call.q),
            args=tuple(_cut(each, size, cut) for each in call.args),
            how=how,
        )
        return some.run()

    if fused is not None and many * queries >= _LONG:
        some, weights = run(rows, keys)
        try:
            all_heads, allowed = fused(), tolerance(some.dtype) * some.abs().max()
            if weights is not None and (all_heads.index_select(1, rows) - some).abs().max() <= allowed:
                return Eager(all_heads, None, rows, weights)
        except (ValueError, TypeError, RuntimeError) as error:  # for example with a softcap
            if out_of_memory(error):
                raise
    heads, own, whole = list[Tensor](), list[Tensor](), None
    for part in blocks(queries, many):
        seen = min(part.stop, keys) if causal else keys
        out, weights = run(part, seen)
        heads.append(out)
        if weights is not None:
            weights = torch.nn.functional.pad(weights, (0, keys - seen)) if seen < keys else weights
            whole = weights if part == slice(0, queries) else None
            asked = rows[(rows >= part.start) & (rows < part.stop)] - part.start
            own.append(weights.index_select(2, asked))
    joined = torch.cat(own, dim=2) if own else None
    return Eager(torch.cat(heads, dim=1) if len(heads) > 1 else heads[0], whole, rows, joined)


def _cut(x: Any, size: tuple[int, int], cut: tuple[slice | Tensor, slice]) -> Any:
    """The rows and keys of a queries-by-keys table; anything else is returned unchanged."""
    return x[..., *cut] if isinstance(x, Tensor) and x.ndim >= 3 and x.shape[-2:] == size else x


def _mask(
    mask: Tensor | None, causal: bool, size: tuple[int, int], cut: tuple[slice | Tensor, slice], like: Tensor
) -> Tensor | None:
    """The mask added to the logits of these queries and keys."""
    rows, keys = cut
    if mask is not None:
        mask = mask[..., rows, keys] if mask.shape[-2] == size[0] else mask[..., keys]
    elif causal:
        places = torch.arange(rows.start, rows.stop, device=like.device) if isinstance(rows, slice) else rows
        mask = (torch.arange(keys.stop, device=like.device) <= places.unsqueeze(-1))[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=like.dtype, device=like.device), torch.finfo(like.dtype).min)


def sinks_of(options: Mapping[str, Any], query: Float[Tensor, "B H Nq d"]) -> Tensor | None:
    """Sinks as in `Attention`: one per head, or of each query."""
    sinks = options.get("sinks")
    if not isinstance(sinks, Tensor) or sinks.shape != (*query.shape[:3], 1):
        return options.get("s_aux")
    return sinks[..., 0].transpose(0, 1)
