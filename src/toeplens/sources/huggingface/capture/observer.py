"""Observation of one pass: the attention calls of its modules, found and verified one by one."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from toeplens.ground import InputError
from toeplens.ground.machine import out_of_memory
from toeplens.lens.kit.terms import NoForm
from toeplens.sources.huggingface.capture.attention import Attention, bias_and_mask, blocks, just_causal, one_way
from toeplens.sources.huggingface.capture.calls import AttentionCall, Side, joined
from toeplens.sources.huggingface.capture.installed import (
    RotationParts,
    installed_call,
    name_of,
    pass_of,
    positions_of,
    without_pass,
)
from toeplens.sources.huggingface.capture.products import (
    Exponentials,
    Followed,
    Products,
    at_each_token,
    four,
    innermost,
)
from toeplens.sources.huggingface.capture.proof import Proof, prove, proved_rows
from toeplens.sources.huggingface.capture.rotation import (
    Rotation,
    Turned,
    before_rotation,
    find_rotation,
    of_equal_tokens,
    stays,
    tables_of,
)
from toeplens.sources.huggingface.hosts.seat import Here
from toeplens.sources.huggingface.interface import NOBODY, OBSERVER, Observer, eager_function
from toeplens.sources.huggingface.model import attention_modules, functions_of, precision, tolerance

_LONG = 1 << 22  # weights, over batch and heads, from which on fused attention is tried


@dataclass(frozen=True)
class Eager:
    """The result of eager attention.

    heads    [B, Nq, H, dv] outputs
    weights  [B, H, Nq, Nk], if all queries were computed at once; otherwise None
    rows     [R] queries whose weights were kept
    own      [B, H, R, Nk] those weights; None if the function returns no weights
    """

    heads: Float[Tensor, "B Nq H dv"]
    weights: Float[Tensor, "B H Nq Nk"] | None
    rows: Int[Tensor, "R"]
    own: Float[Tensor, "B H R Nk"] | None


def run_eager(
    eager: Callable[..., tuple[Tensor, Tensor | None]],
    module: nn.Module,
    query: Float[Tensor, "B H Nq d"],
    key: Float[Tensor, "B G Nk d"],
    value: Float[Tensor, "B G Nk dv"],
    mask: Tensor | None,
    causal: bool,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    fused: Callable[[], Tensor] | None = None,
) -> Eager:
    """Run the eager function of ``module`` on all queries: at once if they are few, otherwise in blocks.

    On long inputs only some queries are run; all outputs are then those of ``fused``, if they agree there.

    Arguments
        mask          as passed to the function, or boolean: True where a key is visible
        causal        whether keys after the query are masked without a mask that says so
        args, kwargs  other arguments of the function; queries-by-keys tables among them are sliced as the mask is
        fused         returns all outputs, [B, Nq, H, dv], of the model's fused attention; None if it has none
    """
    size, keys = (query.shape[2], key.shape[2]), key.shape[2]
    rows, many = proved_rows(query, key), query.shape[0] * query.shape[1] * key.shape[2]

    def run(part: slice | Tensor, seen: int) -> tuple[Tensor, Tensor | None]:
        cut = (part, slice(0, seen))
        rest = [_cut(each, size, cut) for each in args], {name: _cut(each, size, cut) for name, each in kwargs.items()}
        made = _mask(mask, causal, size, cut, query)
        return eager(module, query[:, :, part], key[:, :, :seen], value[:, :, :seen], made, *rest[0], **rest[1])

    if fused is not None and many * query.shape[2] >= _LONG:
        all_heads, (some, weights) = _tried(fused), run(rows, keys)
        if (
            all_heads is not None
            and weights is not None
            and ((all_heads.index_select(1, rows) - some).abs().max() <= tolerance(some.dtype) * some.abs().max())
        ):
            return Eager(all_heads, None, rows, weights)
    heads, own, whole = [], [], None
    for part in blocks(query.shape[2], many):
        seen = min(part.stop, keys) if causal else keys
        out, weights = run(part, seen)
        heads.append(out)
        if weights is not None:
            weights = torch.nn.functional.pad(weights, (0, keys - seen)) if seen < keys else weights
            whole = weights if part == slice(0, size[0]) else None
            asked = rows[(rows >= part.start) & (rows < part.stop)] - part.start
            own.append(weights.index_select(2, asked))
    joined = torch.cat(own, dim=2) if own else None
    return Eager(torch.cat(heads, dim=1) if len(heads) > 1 else heads[0], whole, rows, joined)


def _tried(fused: Callable[[], Tensor]) -> Tensor | None:
    """The output of fused attention; None if it fails, for example with a softcap."""
    try:
        return fused()
    except (ValueError, TypeError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        return None


def _cut(x: Any, size: tuple[int, int], cut: tuple[slice | Tensor, slice]) -> Any:
    """The rows and keys of a queries-by-keys table; anything else is returned unchanged."""
    table = isinstance(x, Tensor) and x.ndim >= 3 and tuple(x.shape[-2:]) == size
    return x[..., cut[0], cut[1]] if table else x


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


def sinks_of(options: Mapping[str, Any], query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Sinks as in `Attention`; if each query has its own, also as a table [B, H, Nq, Nk], constant over keys."""
    sinks = options.get("sinks")
    if not isinstance(sinks, Tensor) or sinks.shape != (*query.shape[:3], 1):
        return options.get("s_aux"), None
    return sinks[..., 0].transpose(0, 1), sinks.expand(-1, -1, -1, key.shape[2])


def with_sinks(eager: Callable[..., Any]) -> Callable[..., Any]:
    """Eager attention that takes sinks as a table, which is sliced with the queries, and reads one column of it."""

    def attend(*args: Any, sinks: Tensor, **kwargs: Any) -> Any:
        return eager(*args, sinks=sinks[..., :1], **kwargs)

    return attend


_LOOKED_AT = 256  # positions whose logits are computed to measure how much the offset explains
_ALL = 0.995  # shares below this are reported as whole percents


class Shared(NamedTuple):
    """An operation that may distribute weight among keys, and the shape of its input."""

    name: str
    shape: tuple[int, ...]

    def why(self, tokens: int) -> str:
        """Why it is not a supported attention, in a module of this many tokens."""
        *_, rows, columns = (0, 0, *self.shape)
        if (rows == tokens and columns >= tokens) or not self.shape:
            return f"its {self.name!r} is not a softmax of a traced product"
        return (
            f"its {self.name!r} has shape {list(self.shape)}: bands or blocks of keys instead of one product of all "
            f"{tokens} queries and keys"
        )


def without_softmax(kind: str, passed: Mapping[str, bool]) -> str:
    """Describe a model whose pass had no attention call.

    Arguments
        kind    its class
        passed  classes of attention modules that were called, and whether they returned only 0
    """
    if not passed:
        return f"{kind} calls no attention"
    zeros = [name for name, nothing in passed.items() if nothing]
    said = f"no attention of {kind} was understood: no softmax of queries and keys in {', '.join(passed)}"
    return f"{said}{f' ({zeros[0]} returned only zeros: its kernel may be missing)' if zeros else ''}"


def same_numbers(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one shape are the same numbers in memory."""
    return x.shape == y.shape and x.stride() == y.stride() and x.data_ptr() == y.data_ptr()


def turned_before(equal: tuple[Float[Tensor, "1 H N d"], Float[Tensor, "1 G N d"]] | None) -> str:
    """Describe a rotation R that is applied to the states x, from which queries and keys are projected afterwards.

    The product x_i^T R_i^T W_q^T W_k R_j x_j is a function of i - j for all x if W_q^T W_k and R commute. In general
    they do not: the parts of W_q^T W_k between pairs with different angles, or mirrored ones, depend on both positions.

    Arguments
        equal  queries and keys of one token at every position; None if not known
    """
    said = "its rotation is applied to the hidden states, before their projection to queries and keys"
    share = 1.0 if equal is None else offset_share(*equal)
    if not share < _ALL:
        return f"{said}."
    return (
        f"{said}: with the last token at every position, the offset explains at most {100 * share:.0f}% of the "
        "variance of a head's logits."
    )


def offset_share(q: Float[Tensor, "1 H N d"], k: Float[Tensor, "1 G N d"]) -> float:
    """Share of the variance of q . k over all pairs of positions that the offset explains: the maximum over heads."""
    q, k = (x[0, :, :_LOOKED_AT].double() for x in (q, k))
    logits = q @ k.repeat_interleave(len(q) // len(k), 0).transpose(-2, -1)
    logits = logits - logits.mean((-2, -1), keepdim=True)
    there = torch.arange(logits.shape[-1], device=logits.device)
    offset = (there.unsqueeze(-1) - there + len(there) - 1).flatten()
    sums = logits.new_zeros(len(q), 2 * len(there) - 1).index_add_(1, offset, logits.flatten(1))
    explained = (sums.square() / offset.bincount()).sum(-1)
    whole = logits.square().sum((-2, -1))
    return float(torch.where(whole > 0, explained / whole, torch.ones_like(whole)).max())


ROTATIONS = re.compile(r"_?apply_\w*(rot|rope)\w*|rotate_queries_or_keys")
_SAID = re.compile(r"rotar|rotate|rope(?![a-z])")
_ANGLES = re.compile(r"cos|sin(?![a-z])|freq|position")
_ELSEWHERE = ("key_value_states", "encoder_hidden_states", "encoder_hidden_state")  # optional inputs of keys


def _turns(module: nn.Module) -> bool:
    """Whether the module's own code names a rotation that is not an observed function or method."""
    named = [(name, each.__globals__) for each in functions_of(module) for name in each.__code__.co_names]
    if any(ROTATIONS.fullmatch(name) and (name in names or hasattr(module, name)) for name, names in named):
        return False
    said = {name for name, _ in named if _SAID.search(name.lower())}
    # the width of a rotated part without angles is not a rotation
    given = {name for each in functions_of(module) for name in (*each.__code__.co_varnames, *each.__code__.co_names)}
    return any(not name.endswith("_dim") for name in said) or (bool(said) and any(map(_ANGLES.search, given)))


@dataclass
class _Frame:
    """A running attention module: its length, whether its keys come from elsewhere, its calls."""

    module: nn.Module
    tokens: int
    cross: bool
    states: Tensor  # the input of the module
    calls: list[AttentionCall] = field(default_factory=list)
    inside: int = 0  # calls of modules in it
    turned: list[Turned] = field(default_factory=list)
    beside: list[Tensor] = field(default_factory=list)  # other inputs of rotations
    equal: tuple[Tensor, Tensor] | None = None  # queries and keys if all tokens were equal
    shared: list[Shared] = field(default_factory=list)  # operations in it that may distribute weight among keys


class PassObserver(Observer):
    """Observes one pass of a model, from one thread."""

    pieces = True

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        on_layer: Callable[[AttentionCall], None],
        instead: Callable[[AttentionCall], Tensor | None] | None = None,
    ) -> None:
        self.modules = attention_modules(model)
        self.names = {module: name for name, module in model.named_modules()}
        self.two_sided = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self.rounding = precision(model)
        self.positions = inputs.get("position_ids")
        self.on_layer = on_layer
        self.instead = instead
        self.frames: list[_Frame] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.unrotated_keys: list[tuple[StorageWeakRef, Tensor]] = []  # memory of rotated keys, and the keys before
        self.passed: dict[str, bool] = {}  # classes of modules without a softmax, and whether they returned only 0
        self.aside = False  # True while other code than an attention module's own runs
        given = [x for x in inputs.values() if isinstance(x, Tensor) and x.ndim >= 2]
        self.batch = given[0].shape[0] if given else 1
        self.lengths = {x.shape[1] for x in given}
        self.products = Products(lambda: not self.aside, self.written_out)
        held = [*model.parameters(), *model.buffers()]
        self.exponentials = Exponentials(lambda: bool(self.frames) and not self.aside, self.shares, held)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Computations in here are not followed, and run at full speed."""
        before, self.aside = self.aside, True
        modes = [mode for mode in (self.products, self.exponentials) if innermost(mode)]
        try:
            for mode in modes:
                mode.__exit__(None, None, None)
            yield
        finally:
            for mode in modes:
                mode.__enter__()
            self.aside = before

    def name(self, module: nn.Module) -> str:
        """Name and class of a module of the model."""
        return f"{self.names.get(module, '?')} ({type(module).__name__})"

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An attention module starts."""
        if OBSERVER.get() is not self:
            return
        named = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        first = next((x for x in named.values() if isinstance(x, Tensor) and x.ndim >= 2), torch.empty(0, 0))
        cross = any(named.get(name) is not None for name in _ELSEWHERE)
        cross = cross or bool(getattr(module, "encoder_decoder_attention", False))  # FSMT's, whose keys are "key"
        axis = self._tokens(first)
        equal = None
        if self.frames:  # a module nested in an attention module
            equal = self.frames[-1].equal
        else:
            self.exponentials.forget()
            if not cross and first.numel() and first.is_floating_point():
                with self.outside():
                    equal = of_equal_tokens(module, args, kwargs, first, axis, self.batch)
        self.frames.append(_Frame(module, first.shape[axis], cross, first, equal=equal))
        self.products.last = None

    def _tokens(self, x: Tensor) -> int:
        """The token dimension of a module's input: [B, N, d], [N, B, d] or [B, d, N]."""
        if x.ndim != 3:
            return 1
        if x.shape[0] != self.batch and x.shape[1] == self.batch:
            return 0
        return 2 if x.shape[1] not in self.lengths and x.shape[2] in self.lengths else 1

    def shares(self, name: str, shape: tuple[int, ...]) -> None:
        """An operation in a module's own code may distribute weight among keys."""
        self.frames[-1].shared.append(Shared(name, shape))

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """An attention module ends: pass on its call. Refuse a module with a softmax but without a call."""
        if OBSERVER.get() is not self:
            return
        frame, why = self.frames.pop(), self.products.last
        self.products.last = None
        if len(frame.calls) + frame.inside == 0:
            if why is None and not frame.shared:  # linear attention, a recurrence
                if not self.counts:
                    zero = not any(bool(x.any()) for x in tree_leaves(output) if isinstance(x, Tensor))
                    name = type(module).__name__
                    self.passed[name] = zero and self.passed.get(name, True)
                return
            why = frame.shared[0].why(frame.tokens) if why is None else f"it has {why}"
            raise InputError(f"model: the attention of {self.name(module)} was not understood: {why}.")
        if self.frames:
            self.frames[-1].inside += 1
        if frame.calls:
            self._hand_over(joined(frame.calls))

    def rotated(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A function that applies a rotation was called."""
        if not self.frames:
            return
        made = [x for x in (output if isinstance(output, tuple) else (output,)) if isinstance(x, Tensor)]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for after in made:
            before = next((x for x in given if x.shape == after.shape), None)
            if before is not None:
                given = [x for x in given if x is not before]
                self.frames[-1].turned.append((before, after))
        self.frames[-1].beside += given

    def attend(
        self,
        function: Callable[..., Any],
        from_table: bool,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the module's own eager attention, or the installed encoding, and add its call."""
        here = pass_of(kwargs)
        if here is not None and not here.turned:
            with self.outside():
                heads = function(module, query, key, value, attention_mask, *args, **kwargs)[0]
                put = self._add_installed(module, query, key, value, attention_mask, here, kwargs, heads)
            return heads if put is None else put, None
        mask = None if attention_mask is None else attention_mask[..., : key.shape[2]]  # a static cache has more
        causal = False
        if from_table and mask is None and query.shape[2] > 1:  # as in torch's fused attention
            told = kwargs.get("is_causal")
            causal = bool(getattr(module, "is_causal", True) if told is None else told)
        eager = eager_function(module) if from_table else function
        named = inspect.signature(eager).bind(module, query, key, value, mask, *args, **without_pass(kwargs))
        named.apply_defaults()
        options = named.arguments | named.arguments.get("kwargs", {})
        sinks, own = sinks_of(options, query, key)
        scale = options.get("scaling")
        if scale is None:
            scale = getattr(module, "scaling", query.shape[-1] ** -0.5)

        asked, kwargs = kwargs, without_pass(kwargs)

        def fused() -> Tensor:
            return function(module, query, key, value, attention_mask, *args, **asked)[0]

        with self.outside():
            attend = eager if own is None else with_sinks(eager)
            more = kwargs if own is None else kwargs | {"sinks": own}
            made = run_eager(attend, module, query, key, value, mask, causal, args, more, fused if from_table else None)
            if made.own is None:
                raise InputError(
                    f"model: the attention of {self.name(module)} was not understood: it returns no weights."
                )
            terms = [x for x in (options.get("position_bias"), mask) if x is not None and x.dtype != torch.bool]
            hidden = [~mask] if mask is not None and mask.dtype == torch.bool else []
            cap = options.get("softcap")
            parts = Attention(q=query, k=key, v=value, scale=float(scale), causal=causal, softcap=cap, sinks=sinks)
            put = self._add(module, parts, made, terms, hidden, positions_of(here))
        return (made.heads if put is None else put), made.weights

    def written_out(self, made: Followed, v: Tensor, out: Tensor) -> Tensor | None:
        """A module's own code computed a product of queries and keys, its softmax, and the product with the values."""
        if not self.frames:
            raise InputError(
                "model: a softmax of queries and keys was found outside the attention modules, so it was not captured."
            )
        frame, batch = self.frames[-1], self.batch
        terms = [four(term, batch, ndim) for term, ndim in made.terms]
        hidden = [four(mask, batch, ndim) for mask, ndim in made.hidden]
        q, k = four(made.left, batch), four(made.right, batch).transpose(-2, -1)
        parts = Attention(q=q, k=k, v=four(v, batch), scale=made.scale, causal=made.causal)
        over = None
        if len(q) != batch:
            over = f"{len(q)} sequences of {batch}"
        elif not frame.cross and q.shape[2] != frame.tokens:
            over = f"{q.shape[2]} queries of {frame.tokens}"
        if over is not None:
            if at_each_token(made) and q.shape[1] == frame.tokens:
                del frame.shared[-1:]  # the softmax of this product, which is not over tokens
                return None
            raise InputError(
                f"model: the attention of {self.name(frame.module)} was not understood: a softmax in it is over {over}."
            )
        weights = None if made.weights is None else four(made.weights, batch)
        rows = proved_rows(q, k)
        own = None if weights is None else weights.index_select(2, rows)
        found = Eager(four(out, batch).transpose(1, 2), weights, rows, own)
        put = self._add(frame.module, parts, found, terms, hidden)
        return None if put is None else put.transpose(1, 2).reshape(out.shape)

    def _add(
        self,
        module: nn.Module,
        parts: Attention,
        made: Eager,
        terms: list[Tensor],
        hidden: list[Tensor],
        positions: Tensor | None = None,
    ) -> Tensor | None:
        """Find a call's bias, mask and rotation, verify it and pass it on; returns a replacement of its outputs, if
        any."""
        frame = self._frame(module)
        if frame is not None and frame.calls:
            return self._add_piece(module, frame, parts.v, made)

        def weights(bias: Tensor | None, visible: Tensor | None) -> Tensor:
            """The model's own weights at the verified queries, or weights formed with this bias and mask."""
            if made.own is not None:
                return made.own
            tried = replace(parts, bias=bias, visible=visible)
            return tried.softmax(tried.logits(made.rows, dtype=torch.float32), made.rows)

        bias, visible = bias_and_mask(terms, hidden, parts.k.shape[2], made.rows, weights)
        parts = self._causal(replace(parts, bias=bias, visible=visible), frame)
        proof = prove(self.name(module), parts, made.rows, made.own, made.heads)
        positions = self._positions(parts.q) if positions is None else positions
        rotation = RotationParts(*self._rotation(module, frame, parts.q, parts.k, positions))
        return self._add_proved(module, parts, made, proof, rotation, positions)

    def _add_installed(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        here: Here,
        kwargs: dict[str, Any],
        heads: Tensor,
    ) -> Tensor | None:
        """Verify a call of an installed encoding and pass it on; returns a replacement of its outputs, if any."""
        frame = self._frame(module)
        equal = None if frame is None else frame.equal
        call = installed_call(module, query, key, value, mask, here, kwargs, equal, self.rounding)
        parts, rows = self._causal(call.parts, frame), proved_rows(query, key)
        proof = prove(self.name(module), parts, rows, None, heads, call.added)
        return self._add_proved(module, parts, Eager(heads, None, rows, None), proof, call.rotation, call.positions)

    def _frame(self, module: nn.Module) -> _Frame | None:
        """The running module, if it is this one."""
        return self.frames[-1] if self.frames and self.frames[-1].module is module else None

    def _causal(self, parts: Attention, frame: _Frame | None) -> Attention:
        """The same parts with ``causal`` if no query sees a later key."""
        visible, causal = parts.visible, parts.causal
        if visible is None or self._is_cross(parts, frame):
            return parts
        causal = causal or one_way(visible)
        return replace(parts, visible=None if causal and just_causal(visible) else visible, causal=causal)

    def _is_cross(self, parts: Attention, frame: _Frame | None) -> bool:
        return parts.q.shape[2] != parts.k.shape[2] if frame is None else frame.cross

    def _add_proved(
        self, module: nn.Module, parts: Attention, made: Eager, proof: Proof, rotation: RotationParts, positions: Tensor
    ) -> Tensor | None:
        """Pass a call on; returns a replacement of its outputs, if any."""
        frame = self._frame(module)
        cross = self._is_cross(parts, frame)
        side = self._side(module) if self.two_sided else None
        if side is None:
            side = "decoder" if parts.causal or cross else "encoder"
        kind = "cross" if cross else "self"
        layer = self.counts[side, kind]
        self.counts[side, kind] += 1
        call = AttentionCall(
            **vars(parts),
            layer=layer,
            kind=kind,
            side=side,
            module=self.name(module),
            weights=made.weights,
            heads=made.heads,
            **vars(rotation),
            proof=proof,
            positions=positions,
            encoding=name_of(module),
        )
        if frame is None:
            self._hand_over(call)
        else:
            frame.calls.append(call)
        return self._put_instead(call)

    def _add_piece(self, module: nn.Module, frame: _Frame, v: Tensor, made: Eager) -> Tensor | None:
        """Another product in a module that had one: a piece of its attention, if the weights are equal."""
        first = frame.calls[0]
        try:
            proof = prove(self.name(module), replace(first, v=v), made.rows, made.own, made.heads)
            if v.shape[1] != first.v.shape[1]:
                raise InputError("values must have the heads of the first piece.")
        except InputError as error:
            raise InputError(
                f"model: the attention of {self.name(module)} was not understood: it has several pieces, each with "
                "its own softmax."
            ) from error
        frame.calls.append(replace(first, v=v, weights=made.weights, heads=made.heads, proof=proof))
        return self._put_instead(frame.calls[-1])

    def _put_instead(self, call: AttentionCall) -> Tensor | None:
        if self.instead is None:
            return None
        with self.outside():
            put = self.instead(call)
        return None if put is None else put.to(call.heads.dtype)

    def _hand_over(self, call: AttentionCall) -> None:
        token = OBSERVER.set(NOBODY)
        try:
            with self.outside():
                self.on_layer(call)
        finally:
            OBSERVER.reset(token)

    def _side(self, module: nn.Module) -> Side | None:
        """The side of a module: the outermost part of its name that says so."""
        for word in self.names.get(module, "").split("."):
            said: list[Side] = [side for side in ("encoder", "decoder") if side in word]
            if len(said) == 1:
                return said[0]
        return None

    def _positions(self, q: Tensor) -> Tensor:
        """Positions of the queries: those passed to the model, or 0, 1, 2, ..."""
        if isinstance(self.positions, Tensor) and self.positions.ndim == 2 and self.positions.shape[1] == q.shape[2]:
            return self.positions
        return torch.arange(q.shape[2], device=q.device).unsqueeze(0)

    def _keys_of_another_layer(self, k: Tensor) -> Tensor | None:
        """Keys before their rotation, if they come from another layer; None otherwise."""
        self.unrotated_keys = [each for each in self.unrotated_keys if not each[0].expired()]
        here = StorageWeakRef(k.untyped_storage())
        return next((x for memory, x in self.unrotated_keys if memory == here and x.shape == k.shape), None)

    def _rotation(
        self, module: nn.Module, frame: _Frame | None, q: Tensor, k: Tensor, positions: Tensor
    ) -> tuple[tuple[Tensor, Tensor] | None, Rotation | None, str | None]:
        """q and k before their rotation, and the rotation; or why it is not known."""
        unrotated, rotation = None, None
        if frame is not None and frame.turned:
            before = before_rotation(q, frame.turned), before_rotation(k, frame.turned)
            others = None if before[1] is not None else self._keys_of_another_layer(k)
            if others is not None:  # the other layer's call showed how they depend on position
                before = before[0], others
                frame.equal = frame.equal and (frame.equal[0], frame.equal[0])
            if before[0] is None or before[1] is None:
                if any(same_numbers(x, frame.states) for x, _ in frame.turned):
                    return None, None, turned_before(frame.equal)
                return None, None, "its rotated queries and keys are changed before their product."
            unrotated = before[0], before[1]
            if others is None:
                self.unrotated_keys.append((StorageWeakRef(k.untyped_storage()), before[1]))
            if q.shape[2] != k.shape[2]:
                return unrotated, None, "its queries and keys are rotated but belong to different tokens."
            tables = tables_of(frame.beside, q.shape[2])
            try:
                rotation = find_rotation((unrotated[0], q), (unrotated[1], k), positions, self.rounding, tables)
            except NoForm as error:
                return unrotated, None, str(error)
        elif _turns(module):
            return None, None, "it has a rotation that was not observed."
        if frame is None or frame.cross or q.shape[2] != k.shape[2]:
            return unrotated, rotation, None
        if frame.equal is None:
            return (
                unrotated,
                None,
                "it could not be checked whether its keys depend on position beyond their content.",
            )
        if not stays(*frame.equal, rotation, positions, self.rounding):
            return unrotated, None, "its queries or keys depend on position in an unknown way."
        return unrotated, rotation, None
