"""What happens inside the attention modules of one pass: their calls, found and proved one by one."""

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

_LONG = 1 << 22  # weights, over batch and heads: from here on fused attention is tried


@dataclass(frozen=True)
class Eager:
    """What eager attention gave.

    heads    [B, Nq, H, dv] outputs
    weights  [B, H, Nq, Nk], where all queries were formed at once; else None
    rows     [R] queries whose weights were kept
    own      [B, H, R, Nk] those; None where the function gives no weights
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
    """The eager function of ``module`` on all queries: at once if they are few, else in blocks.

    On long inputs on some queries alone; all outputs are then those of ``fused``, if they are the same there.

    Arguments
        mask          as the function takes it, or of truth values: True where a key is seen
        causal        whether it hides the keys after the query too, without a mask that says so
        args, kwargs  what else the function takes; tables of queries by keys among it are cut as the mask is
        fused         gives all outputs, [B, Nq, H, dv], in the model's fused attention; None where it has none
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
    """What fused attention gives; None where it cannot be had, as with a cap."""
    try:
        return fused()
    except (ValueError, TypeError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        return None


def _cut(x: Any, size: tuple[int, int], cut: tuple[slice | Tensor, slice]) -> Any:
    """The rows and keys of a table of queries by keys; anything else as it is."""
    table = isinstance(x, Tensor) and x.ndim >= 3 and tuple(x.shape[-2:]) == size
    return x[..., cut[0], cut[1]] if table else x


def _mask(
    mask: Tensor | None, causal: bool, size: tuple[int, int], cut: tuple[slice | Tensor, slice], like: Tensor
) -> Tensor | None:
    """What is added to the logits of these queries and keys."""
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
    """Sinks as `Attention` has them; and, where each query has its own, as a table [B, H, Nq, Nk], each key's alike."""
    sinks = options.get("sinks")
    if not isinstance(sinks, Tensor) or sinks.shape != (*query.shape[:3], 1):
        return options.get("s_aux"), None
    return sinks[..., 0].transpose(0, 1), sinks.expand(-1, -1, -1, key.shape[2])


def with_sinks(eager: Callable[..., Any]) -> Callable[..., Any]:
    """Eager attention that is given sinks as a table, which goes with the queries, and reads one column of it."""

    def attend(*args: Any, sinks: Tensor, **kwargs: Any) -> Any:
        return eager(*args, sinks=sinks[..., :1], **kwargs)

    return attend


_LOOKED_AT = 256  # places whose logits are formed, to see what the offset explains of them
_ALL = 0.995  # of what varies: less is said in whole percents


class Shared(NamedTuple):
    """An operation that may share weight out among keys, and the shape of what it was given."""

    name: str
    shape: tuple[int, ...]

    def why(self, tokens: int) -> str:
        """Why it is no attention that was followed, in a module of so many tokens."""
        *_, rows, columns = (0, 0, *self.shape)
        if (rows == tokens and columns >= tokens) or not self.shape:
            return f"its {self.name!r} is not a softmax of a traced product"
        return (
            f"its {self.name!r} has shape {list(self.shape)}: bands or blocks of keys instead of one product of all "
            f"{tokens} queries and keys"
        )


def without_softmax(kind: str, passed: Mapping[str, bool]) -> str:
    """What to say of a model whose pass had no call of attention.

    Arguments
        kind    its class
        passed  classes of modules that are named after attention and were called, and whether they gave but 0
    """
    if not passed:
        return f"{kind} calls no attention"
    zeros = [name for name, nothing in passed.items() if nothing]
    said = f"no attention of {kind} was understood: its {', '.join(passed)} has no softmax of queries and keys"
    more = ", as if its kernel were missing" if zeros else ""
    return f"{said}{f', and {zeros[0]} returned only 0{more}' if zeros else ''}"


def same_numbers(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one shape are the same numbers in memory."""
    return x.shape == y.shape and x.stride() == y.stride() and x.data_ptr() == y.data_ptr()


def turned_before(equal: tuple[Float[Tensor, "1 H N d"], Float[Tensor, "1 G N d"]] | None) -> str:
    """What to say of a rotation R of the states x, from which queries and keys are projected then.

    The product x_i^T R_i^T W_q^T W_k R_j x_j is a function of i - j for all x where W_q^T W_k and R can change places,
    as they cannot in general: what W_q^T W_k has between pairs that are turned by other angles, or mirrored, stands at
    both positions.

    Arguments
        equal  queries and keys of one token in every place; None where they are not known
    """
    said = "its rotation is of the states, before their projection to queries and keys"
    share = 1.0 if equal is None else offset_share(*equal)
    if not share < _ALL:
        return f"{said}."
    return (
        f"{said}: with the last token in every place, the offset explains at most {100 * share:.0f} % of what varies "
        "in a head's logits."
    )


def offset_share(q: Float[Tensor, "1 H N d"], k: Float[Tensor, "1 G N d"]) -> float:
    """Share of the variance of q . k over all pairs of places that their offset explains: the largest of a head's."""
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
_ELSEWHERE = ("key_value_states", "encoder_hidden_states", "encoder_hidden_state")  # what keys are made of, if given


def _turns(module: nn.Module) -> bool:
    """Whether the module's own code names a rotation that is no function or method that is observed."""
    named = [(name, each.__globals__) for each in functions_of(module) for name in each.__code__.co_names]
    if any(ROTATIONS.fullmatch(name) and (name in names or hasattr(module, name)) for name, names in named):
        return False
    said = {name for name, _ in named if _SAID.search(name.lower())}
    # the width alone of what others would rotate, and no angles, is no rotation
    given = {name for each in functions_of(module) for name in (*each.__code__.co_varnames, *each.__code__.co_names)}
    return any(not name.endswith("_dim") for name in said) or (bool(said) and any(map(_ANGLES.search, given)))


@dataclass
class _Frame:
    """An attention module that is running: its length, whether its keys come from elsewhere, its calls."""

    module: nn.Module
    tokens: int
    cross: bool
    states: Tensor  # what the module is given
    calls: list[AttentionCall] = field(default_factory=list)
    inside: int = 0  # calls of the modules in it
    turned: list[Turned] = field(default_factory=list)
    beside: list[Tensor] = field(default_factory=list)  # what else rotations were given
    equal: tuple[Tensor, Tensor] | None = None  # queries and keys of tokens that are all alike
    shared: list[Shared] = field(default_factory=list)  # operations in it that may share weight out among keys


class PassObserver(Observer):
    """One pass of a model under observation, from one thread."""

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
        self.unrotated_keys: list[tuple[StorageWeakRef, Tensor]] = []  # memory of rotated keys, and they before
        self.passed: dict[str, bool] = {}  # classes of modules without a softmax, and whether they gave but 0
        self.aside = False  # while what is computed is no attention module's own code
        given = [x for x in inputs.values() if isinstance(x, Tensor) and x.ndim >= 2]
        self.batch = given[0].shape[0] if given else 1
        self.lengths = {x.shape[1] for x in given}
        self.products = Products(lambda: not self.aside, self.written_out)
        held = [*model.parameters(), *model.buffers()]
        self.exponentials = Exponentials(lambda: bool(self.frames) and not self.aside, self.shares, held)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What is computed in here is not followed, and is as fast as without this pass."""
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
        """An attention module begins."""
        if OBSERVER.get() is not self:
            return
        named = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        first = next((x for x in named.values() if isinstance(x, Tensor) and x.ndim >= 2), torch.empty(0, 0))
        cross = any(named.get(name) is not None for name in _ELSEWHERE)
        cross = cross or bool(getattr(module, "encoder_decoder_attention", False))  # FSMT's, whose keys are "key"
        axis = self._tokens(first)
        equal = None
        if self.frames:  # a module in one that was tried
            equal = self.frames[-1].equal
        else:
            self.exponentials.forget()
            if not cross and first.numel() and first.is_floating_point():
                with self.outside():
                    equal = of_equal_tokens(module, args, kwargs, first, axis, self.batch)
        self.frames.append(_Frame(module, first.shape[axis], cross, first, equal=equal))
        self.products.last = None

    def _tokens(self, x: Tensor) -> int:
        """Which dimension of a module's input is that of the tokens: [B, N, d], [N, B, d] or [B, d, N]."""
        if x.ndim != 3:
            return 1
        if x.shape[0] != self.batch and x.shape[1] == self.batch:
            return 0
        return 2 if x.shape[1] not in self.lengths and x.shape[2] in self.lengths else 1

    def shares(self, name: str, shape: tuple[int, ...]) -> None:
        """An operation in a module's own code may share weight out among keys."""
        self.frames[-1].shared.append(Shared(name, shape))

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """An attention module ends: its call is handed over. Without one, it was not understood if it has a softmax."""
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
        """The module's own eager attention, and its call; or that of the encoding that is installed in it."""
        here = pass_of(kwargs)
        if here is not None and not here.turned:
            with self.outside():
                heads = function(module, query, key, value, attention_mask, *args, **kwargs)[0]
                put = self._add_installed(module, query, key, value, attention_mask, here, kwargs, heads)
            return heads if put is None else put, None
        mask = None if attention_mask is None else attention_mask[..., : key.shape[2]]  # a cache of fixed size has more
        causal = False
        if from_table and mask is None and query.shape[2] > 1:  # as torch's fused attention has it
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
        """A module's own code took a product of queries and keys, its softmax, and the product with the values."""
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
                del frame.shared[-1:]  # the softmax of this product: it is among no tokens
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
        """Find a call's bias, mask and rotation, prove and hand it over; what is to take its outputs' place, if
        anything."""
        frame = self._frame(module)
        if frame is not None and frame.calls:
            return self._add_piece(module, frame, parts.v, made)

        def weights(bias: Tensor | None, visible: Tensor | None) -> Tensor:
            """The model's own at the queries that are proved; formed with this bias and mask where it gives none."""
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
        """Prove a call of an installed encoding and hand it over; what is to take its outputs' place, if anything."""
        frame = self._frame(module)
        equal = None if frame is None else frame.equal
        call = installed_call(module, query, key, value, mask, here, kwargs, equal, self.rounding)
        parts, rows = self._causal(call.parts, frame), proved_rows(query, key)
        proof = prove(self.name(module), parts, rows, None, heads, call.added)
        return self._add_proved(module, parts, Eager(heads, None, rows, None), proof, call.rotation, call.positions)

    def _frame(self, module: nn.Module) -> _Frame | None:
        """The module that is running, if it is this one."""
        return self.frames[-1] if self.frames and self.frames[-1].module is module else None

    def _causal(self, parts: Attention, frame: _Frame | None) -> Attention:
        """The same with ``causal`` where no query sees a key after it."""
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
        """Hand a call over; what is to take its outputs' place, if anything."""
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
        """Another product in a module that had one: a piece of its attention, if the weights are the same."""
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
        """Which side a module is on: the outermost part of its name that says so."""
        for word in self.names.get(module, "").split("."):
            said: list[Side] = [side for side in ("encoder", "decoder") if side in word]
            if len(said) == 1:
                return said[0]
        return None

    def _positions(self, q: Tensor) -> Tensor:
        """Of the queries: those that the pass was given, or 0, 1, 2, ..."""
        if isinstance(self.positions, Tensor) and self.positions.ndim == 2 and self.positions.shape[1] == q.shape[2]:
            return self.positions
        return torch.arange(q.shape[2], device=q.device).unsqueeze(0)

    def _keys_of_another_layer(self, k: Tensor) -> Tensor | None:
        """Keys before their rotation in the layer that they come from; None where they are of no other layer."""
        self.unrotated_keys = [each for each in self.unrotated_keys if not each[0].expired()]
        here = StorageWeakRef(k.untyped_storage())
        return next((x for memory, x in self.unrotated_keys if memory == here and x.shape == k.shape), None)

    def _rotation(
        self, module: nn.Module, frame: _Frame | None, q: Tensor, k: Tensor, positions: Tensor
    ) -> tuple[tuple[Tensor, Tensor] | None, Rotation | None, str | None]:
        """q and k before their rotation, and what it is; or why that is not known."""
        unrotated, rotation = None, None
        if frame is not None and frame.turned:
            before = before_rotation(q, frame.turned), before_rotation(k, frame.turned)
            others = None if before[1] is not None else self._keys_of_another_layer(k)
            if others is not None:  # whose own call showed how they depend on the position
                before = before[0], others
                frame.equal = frame.equal and (frame.equal[0], frame.equal[0])
            if before[0] is None or before[1] is None:
                if any(same_numbers(x, frame.states) for x, _ in frame.turned):
                    return None, None, turned_before(frame.equal)
                return None, None, "what its rotation makes of queries and keys is changed before their product."
            unrotated = before[0], before[1]
            if others is None:
                self.unrotated_keys.append((StorageWeakRef(k.untyped_storage()), before[1]))
            if q.shape[2] != k.shape[2]:
                return unrotated, None, "its queries and keys are rotated, and not of the same tokens."
            tables = tables_of(frame.beside, q.shape[2])
            try:
                rotation = find_rotation((unrotated[0], q), (unrotated[1], k), positions, self.rounding, tables)
            except NoForm as error:
                return unrotated, None, str(error)
        elif _turns(module):
            return None, None, "it has a rotation that was not seen."
        if frame is None or frame.cross or q.shape[2] != k.shape[2]:
            return unrotated, rotation, None
        if frame.equal is None:
            return (
                unrotated,
                None,
                "it was not seen whether its keys depend on the position by more than what they hold.",
            )
        if not stays(*frame.equal, rotation, positions, self.rounding):
            return unrotated, None, "its queries or keys depend on the position in a way that was not found."
        return unrotated, rotation, None
