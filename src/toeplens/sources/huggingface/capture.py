"""A pass of a Hugging Face model with its attention calls found and verified, and its difference from a plain pass."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from toeplens.encodings.attention import AttentionParts, attention_parts
from toeplens.ground import InputError
from toeplens.ground.machine import out_of_memory
from toeplens.lens.kit.terms import NoForm
from toeplens.sources.huggingface import model as hf
from toeplens.sources.huggingface import trace
from toeplens.sources.huggingface.attention import Attention, bias_and_mask, just_causal, one_way
from toeplens.sources.huggingface.calls import AttentionCall, Proof, Side, joined, prove, proved_rows
from toeplens.sources.huggingface.installed import AttentionPatch, LayerContext
from toeplens.sources.huggingface.rotation import Rotation, before_rotation, find_rotation, of_equal_tokens, stays

_HELD = ("past_key_values", "cache_params")  # inputs that would contain the keys of all layers
_LOOKED_AT = 256  # positions whose logits are computed to measure how much the offset explains
_ALL = 0.995  # shares below this are reported as whole percents
_ROTATIONS = re.compile(r"_?apply_\w*(rot|rope)\w*|rotate_queries_or_keys")
_SAID = re.compile(r"rotar|rotate|rope(?![a-z])")
_ANGLES = re.compile(r"cos|sin(?![a-z])|freq|position")
_ELSEWHERE = ("key_value_states", "encoder_hidden_states", "encoder_hidden_state")  # optional inputs of keys
_OTHER = {"score": "products", "transform_logits": "logits", "transform_weights": "weights", "add_values": "outputs"}
_NO_ROTATION = (
    "changes queries and keys by more than a rotation of pairs of dimensions, equal in all heads, by an angle "
    "linear in the position."
)
_LAST = 64  # positions of a language model whose logits are computed, as those of all may not fit
_FIRST = 256  # tokens of a long sequence in the plain pass, if later tokens do not affect them
_ROWS = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask")
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "n_ctx")
# queries and keys before their rotation, the rotation, or why it is not known; see `AttentionCall`
_Rotated = tuple[tuple[Tensor, Tensor] | None, Rotation | None, str | None]


@torch.no_grad()
def captured(
    model: Any,
    inputs: Mapping[str, Any],
    on_layer: Callable[[AttentionCall], None],
    instead: Callable[[AttentionCall], Tensor | None] | None = None,
) -> Any:
    """Run a transformers model once and pass each verified attention call to ``on_layer`` before the pass continues.

    The model runs in evaluation mode without a key cache. If it uses transformers' attention interface, its own eager
    attention runs, some queries at a time. Afterwards everything is restored, even after an error. Only one layer's
    attention is in memory at a time, unless ``on_layer`` keeps it. Passes in other threads are not observed. Layers
    without attention are ignored; modules that are named after attention only if nothing in them can be a softmax.

    Arguments
        model     a `transformers.PreTrainedModel`
        inputs    arguments of its ``forward`` by name: ``input_ids``, ``attention_mask``, ``decoder_input_ids``, ...
        on_layer  called with each `AttentionCall`, in the order of the pass
        instead   called with each call, too, before the pass continues; returns a replacement of its ``heads``, or
                  None. The call itself is as the model made it. If it consists of several products of the same weights,
                  ``instead`` is called with each of them, all with the same layer

    Returns the model's output. Raises `InputError` that names the module if an attention is not supported: weights and
    outputs formed from the parts differ from the model's own, or no parts were found, or no module is named after
    attention. Raises `EnvironmentFailure` if transformers is not installed.
    """
    hf.checked_model(model)
    for name in _HELD:
        if inputs.get(name) is not None:
            raise InputError(f"inputs must contain all tokens of a pass and not {name}.")
    kind, observer = type(model).__name__, _PassObserver(model, inputs, on_layer, instead)
    if not observer.modules:
        raise InputError(f"model: {kind} has no module named after attention.")
    changes = _asking(model), _rotations(model), hf.visited(observer.modules)
    with hf.observing(observer), hf.patched(model, *changes), observer.products, observer.exponentials:
        output = model(**inputs)
    if observer.counts:
        return output
    if not observer.passed:
        raise InputError(f"model: {kind} calls no attention.")
    zeros = [name for name, nothing in observer.passed.items() if nothing]
    hint = f" ({zeros[0]} returned only zeros: its kernel may be missing)" if zeros else ""
    where = f"no softmax of queries and keys in {', '.join(observer.passed)}{hint}"
    raise InputError(f"model: no attention of {kind} was understood: {where}.")


def _asking(model: nn.Module) -> Iterator[hf.Entry]:
    """Observe attention that uses the interface: its entry in the table, or the model's own eager function."""
    if hf.is_host(model):  # it uses the attention of toeplens
        yield from hf.table_entries([hf.NAME])
    elif hf.asks_interface(*hf.attention_modules(model)):
        name = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
        yield from hf.asking_for(model, name)
        yield from hf.table_entries([name]) if name in hf.table() else hf.eager_entries(model)


def _rotations(model: nn.Module) -> Iterator[hf.Entry]:
    """Observed functions that apply rotations: in the modules that define the attention, and its own methods."""

    def observed(rotate: Callable[..., Any]) -> Callable[..., Any]:
        def reported(*args: Any, **kwargs: Any) -> Any:
            output = rotate(*args, **kwargs)
            hf.OBSERVER.get().rotated(args, kwargs, output)
            return output

        return reported

    for names in hf.namespaces_of(model):
        for name in [name for name, value in names.items() if callable(value) and _ROTATIONS.fullmatch(name)]:
            yield names, name, observed
    for module in hf.attention_modules(model):
        for name in {name for cls in type(module).__mro__ for name in vars(cls) if _ROTATIONS.fullmatch(name)}:
            if callable(method := getattr(module, name)):
                yield vars(module), name, lambda before, method=method: observed(method)


@dataclass
class _Frame:
    """A running attention module: its length, whether its keys come from elsewhere, its calls."""

    module: nn.Module
    tokens: int
    cross: bool
    states: Tensor  # the input of the module
    equal: tuple[Tensor, Tensor] | None  # queries and keys if all tokens were equal
    calls: list[AttentionCall] = field(default_factory=list)
    inside: int = 0  # calls of modules in it
    turned: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    beside: list[Tensor] = field(default_factory=list)  # other inputs of rotations
    shared: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # see `Exponentials`

    def not_followed(self) -> str:
        """Why its first operation that may distribute weight among keys is not a supported attention."""
        name, shape = self.shared[0]
        if not shape or (shape[-2:-1] == (self.tokens,) and shape[-1] >= self.tokens):
            return f"its {name!r} is not a softmax of a traced product"
        instead = f"instead of one product of all {self.tokens} queries and keys"
        return f"its {name!r} has shape {list(shape)}: bands or blocks of keys {instead}"


class _PassObserver(hf.Observer):
    """Observes one pass of a model, from one thread."""

    pieces = True

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        on_layer: Callable[[AttentionCall], None],
        instead: Callable[[AttentionCall], Tensor | None] | None = None,
    ) -> None:
        self.modules = hf.attention_modules(model)
        self.names = {module: name for name, module in model.named_modules()}
        self.two_sided = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self.rounding = hf.precision(model)
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
        self.products = trace.Products(lambda: not self.aside, self.written_out)
        self.exponentials = trace.Exponentials(
            lambda: bool(self.frames) and not self.aside,
            lambda name, shape: self.frames[-1].shared.append((name, shape)),
            [*model.parameters(), *model.buffers()],
        )

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Computations in here are not followed, and run at full speed."""
        before, self.aside = self.aside, True
        modes = [mode for mode in (self.products, self.exponentials) if trace.innermost(mode)]
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

    def visit(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an attention module and pass on its call. Refuse a module with a softmax but without a call."""
        if module not in self.modules:
            return forward(*args, **kwargs)
        named = dict(zip(inspect.signature(forward).parameters, args, strict=False)) | kwargs
        first = next((x for x in named.values() if isinstance(x, Tensor) and x.ndim >= 2), torch.empty(0, 0))
        cross = any(named.get(name) is not None for name in _ELSEWHERE)
        cross = cross or bool(getattr(module, "encoder_decoder_attention", False))  # FSMT's, whose keys are "key"
        axis, equal = 1, None  # of tokens: [B, N, d], otherwise [N, B, d] or [B, d, N]
        if first.ndim == 3 and first.shape[0] != self.batch and first.shape[1] == self.batch:
            axis = 0
        elif first.ndim == 3 and first.shape[1] not in self.lengths and first.shape[2] in self.lengths:
            axis = 2
        if self.frames:  # a module nested in an attention module
            equal = self.frames[-1].equal
        else:
            self.exponentials.forget()
            if not cross and first.numel() and first.is_floating_point():
                with self.outside():
                    equal = of_equal_tokens(module, args, kwargs, first, axis, self.batch)
        self.frames.append(_Frame(module, first.shape[axis], cross, first, equal))
        self.products.last = None
        output = forward(*args, **kwargs)
        frame, why = self.frames.pop(), self.products.last
        self.products.last = None
        if len(frame.calls) + frame.inside == 0:
            if why is not None or frame.shared:
                why = frame.not_followed() if why is None else f"it has {why}"
                raise hf.not_understood(self.name(module), why)
            if not self.counts:  # linear attention, a recurrence
                zero = not any(bool(x.any()) for x in tree_leaves(output) if isinstance(x, Tensor))
                name = type(module).__name__
                self.passed[name] = zero and self.passed.get(name, True)
            return output
        if self.frames:
            self.frames[-1].inside += 1
        if frame.calls:
            self._hand_over(joined(frame.calls))
        return output

    def rotated(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A function that applies a rotation was called."""
        if not self.frames:
            return
        made = [x for x in (output if isinstance(output, tuple) else (output,)) if isinstance(x, Tensor)]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for after in made:
            if (before := next((x for x in given if x.shape == after.shape), None)) is not None:
                given = [x for x in given if x is not before]
                self.frames[-1].turned.append((before, after))
        self.frames[-1].beside += given

    def attend(self, call: hf.AttentionInputs) -> tuple[Tensor, Tensor | None]:
        """Run the module's own eager attention, or the installed encoding, and add its call."""
        here = call.context if isinstance(call.context, LayerContext) else None
        if here is not None and not here.turned:
            with self.outside():
                heads = call.run()[0]
                put = self._add_installed(call, here, heads)
            return heads if put is None else put, None
        module, mask = call.module, call.mask
        mask = None if mask is None else mask[..., : call.k.shape[2]]  # a static cache has more
        causal = call.from_table and mask is None and call.q.shape[2] > 1 and call.causal(default=True)
        eager = hf.eager_function(module) if call.from_table else call.function
        named = inspect.signature(eager).bind(module, call.q, call.k, call.v, mask, *call.args, **call.how)
        named.apply_defaults()
        options = named.arguments | named.arguments.get("kwargs", {})
        scale = options.get("scaling")
        scale = float(getattr(module, "scaling", call.q.shape[-1] ** -0.5) if scale is None else scale)
        with self.outside():
            eager_call = replace(call, function=eager, mask=mask, context=None)
            rows = proved_rows(call.q, call.k)
            made = trace.run_eager(eager_call, causal, rows, (lambda: call.run()[0]) if call.from_table else None)
            if made.own is None:
                raise hf.not_understood(self.name(module), "it returns no weights")
            terms = [x for x in (options.get("position_bias"), mask) if x is not None and x.dtype != torch.bool]
            hidden = [~mask] if mask is not None and mask.dtype == torch.bool else []
            cap, sinks = options.get("softcap"), trace.sinks_of(options, call.q)
            parts = Attention(q=call.q, k=call.k, v=call.v, scale=scale, causal=causal, softcap=cap, sinks=sinks)
            put = self._add(module, parts, made, terms, hidden, None if here is None else here.positions)
        return (made.heads if put is None else put), made.weights

    def written_out(self, made: trace.Followed, v: Tensor, out: Tensor) -> Tensor | None:
        """A module's own code computed a product of queries and keys, its softmax, and the product with the values."""
        if not self.frames:
            where = "outside the attention modules, so it was not captured"
            raise InputError(f"model: a softmax of queries and keys was found {where}.")
        frame, batch = self.frames[-1], self.batch
        terms = [trace.four(term, batch, ndim) for term, ndim in made.terms]
        hidden = [trace.four(mask, batch, ndim) for mask, ndim in made.hidden]
        q, k = trace.four(made.left, batch), trace.four(made.right, batch).transpose(-2, -1)
        parts = Attention(q=q, k=k, v=trace.four(v, batch), scale=made.scale, causal=made.causal)
        if len(q) != batch or (not frame.cross and q.shape[2] != frame.tokens):
            if trace.at_each_token(made) and q.shape[1] == frame.tokens:
                del frame.shared[-1:]  # the softmax of this product, which is not over tokens
                return None
            over = f"{len(q)} sequences of {batch}" if len(q) != batch else f"{q.shape[2]} queries of {frame.tokens}"
            raise hf.not_understood(self.name(frame.module), f"a softmax in it is over {over}")
        weights, rows = None if made.weights is None else trace.four(made.weights, batch), proved_rows(q, k)
        own = None if weights is None else weights.index_select(2, rows)
        found = trace.Eager(trace.four(out, batch).transpose(1, 2), weights, rows, own)
        put = self._add(frame.module, parts, found, terms, hidden)
        return None if put is None else put.transpose(1, 2).reshape(out.shape)

    def _add(
        self,
        module: nn.Module,
        parts: Attention,
        made: trace.Eager,
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
        if positions is None:
            positions = torch.arange(parts.q.shape[2], device=parts.q.device).unsqueeze(0)
            given = self.positions
            if isinstance(given, Tensor) and given.ndim == 2 and given.shape[1] == parts.q.shape[2]:
                positions = given
        rotation = self._rotation(module, frame, parts.q, parts.k, positions)
        return self._add_proved(module, parts, made, proof, rotation, positions)

    def _add_installed(self, call: hf.AttentionInputs, here: LayerContext, heads: Tensor) -> Tensor | None:
        """Verify a call of an installed encoding, which provides its parts, and pass it on; returns a replacement of
        its outputs, if any."""
        module, rows, positions = call.module, proved_rows(call.q, call.k), here.positions
        patch: AttentionPatch = vars(module)[hf.INSTALLED]
        frame, (k, _, arguments) = self._frame(module), patch.arguments(call, here)
        made = attention_parts(call.q, k, **arguments)
        cap, sinks = call.how.get("softcap"), call.how.get("s_aux")
        own = {name: getattr(made, name) for name in ("q", "k", "bias", "visible", "factor")}
        parts = Attention(v=call.v, scale=float(call.scale), softcap=cap, sinks=sinks, **own)
        parts, added = self._causal(parts, frame), None if made.values is None else made.values.transpose(1, 2)
        proof = prove(self.name(module), parts, rows, None, heads, added)
        unrotated, rotation, why = self._installed_rotation(call, made, positions)
        other = [what for hook, what in _OTHER.items() if patch.encoding.overrides(hook)]
        if why is None and other:
            why = f"changes the {' and the '.join(other)} by more than a rotation or a bias."
        equal = None if frame is None else frame.equal
        if why is None and equal is None:
            why = "may have keys that depend on position beyond their content; this could not be checked."
        elif why is None and equal is not None and not stays(*equal, None, positions, self.rounding):
            why = "has queries or keys that depend on position in an unknown way."
        if why is not None:
            rotation, why = None, f"encoding {patch.stack.name} {why}"
        eager = trace.Eager(heads, None, rows, None)
        return self._add_proved(module, parts, eager, proof, (unrotated, rotation, why), positions)

    def _installed_rotation(self, call: hf.AttentionInputs, made: AttentionParts, positions: Tensor) -> _Rotated:
        """How an encoding changed queries and keys before their product, if by a rotation of pairs."""
        q, k = call.q, call.k
        if made.k.shape[1] != k.shape[1]:  # keys per head
            k = k.repeat_interleave(made.k.shape[1] // k.shape[1], 1)
        if torch.equal(made.q, q) and torch.equal(made.k, k):
            return None, None, None
        with suppress(NoForm):
            if made.q.shape == q.shape:
                return (q, k), find_rotation((q, made.q), (k, made.k), positions, self.rounding), None
        return (q, k), None, _NO_ROTATION

    def _frame(self, module: nn.Module) -> _Frame | None:
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
        self, module: nn.Module, parts: Attention, made: trace.Eager, proof: Proof, rotated: _Rotated, positions: Tensor
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
        patch: AttentionPatch | None = vars(module).get(hf.INSTALLED)
        call = AttentionCall(
            **vars(parts),
            layer=layer,
            kind=kind,
            side=side,
            module=self.name(module),
            weights=made.weights,
            heads=made.heads,
            unrotated=rotated[0],
            rotation=rotated[1],
            unknown=rotated[2],
            proof=proof,
            positions=positions,
            encoding=None if patch is None else patch.stack.name,
        )
        if frame is None:
            self._hand_over(call)
        return self._keep(frame, call)

    def _add_piece(self, module: nn.Module, frame: _Frame, v: Tensor, made: trace.Eager) -> Tensor | None:
        """Another product in a module that had one: a piece of its attention, if the weights are equal."""
        first = frame.calls[0]
        try:
            proof = prove(self.name(module), replace(first, v=v), made.rows, made.own, made.heads)
            if v.shape[1] != first.v.shape[1]:
                raise InputError("values must have the heads of the first piece.")
        except InputError as error:
            raise hf.not_understood(self.name(module), "it has several pieces, each with its own softmax") from error
        return self._keep(frame, replace(first, v=v, weights=made.weights, heads=made.heads, proof=proof))

    def _keep(self, frame: _Frame | None, call: AttentionCall) -> Tensor | None:
        """Keep a call until its module ends; returns a replacement of its outputs, if any."""
        if frame is not None:
            frame.calls.append(call)
        if self.instead is None:
            return None
        with self.outside():
            put = self.instead(call)
        return None if put is None else put.to(call.heads.dtype)

    def _hand_over(self, call: AttentionCall) -> None:
        with hf.observing(hf.NOBODY), self.outside():
            self.on_layer(call)

    def _side(self, module: nn.Module) -> Side | None:
        """The side of a module: the outermost part of its name that says so."""
        for word in self.names.get(module, "").split("."):
            said: list[Side] = [side for side in ("encoder", "decoder") if side in word]
            if len(said) == 1:
                return said[0]
        return None

    def _rotation(self, module: nn.Module, frame: _Frame | None, q: Tensor, k: Tensor, positions: Tensor) -> _Rotated:
        """q and k before their rotation, and the rotation; or why it is not known."""
        unrotated, rotation = None, None
        if frame is not None and frame.turned:
            before = before_rotation(q, frame.turned), before_rotation(k, frame.turned)
            self.unrotated_keys = [each for each in self.unrotated_keys if not each[0].expired()]
            here, others = StorageWeakRef(k.untyped_storage()), None
            if before[1] is None:  # the keys of another layer
                others = next((x for memory, x in self.unrotated_keys if memory == here and x.shape == k.shape), None)
            if others is not None:  # the other layer's call showed how they depend on position
                before = before[0], others
                frame.equal = frame.equal and (frame.equal[0], frame.equal[0])
            if before[0] is None or before[1] is None:
                if any(
                    x.data_ptr() == frame.states.data_ptr()
                    and x.shape == frame.states.shape
                    and x.stride() == frame.states.stride()
                    for x, _ in frame.turned
                ):
                    return None, None, turned_before(frame.equal)
                return None, None, "its rotated queries and keys are changed before their product."
            unrotated = before[0], before[1]
            if others is None:
                self.unrotated_keys.append((here, before[1]))
            if q.shape[2] != k.shape[2]:
                return unrotated, None, "its queries and keys are rotated but belong to different tokens."
            try:
                rotation = find_rotation((unrotated[0], q), (unrotated[1], k), positions, self.rounding, frame.beside)
            except NoForm as error:
                return unrotated, None, str(error)
        elif _turns(module):
            return None, None, "it has a rotation that was not observed."
        if frame is None or frame.cross or q.shape[2] != k.shape[2]:
            return unrotated, rotation, None
        why = "it could not be checked whether its keys depend on position beyond their content."
        if frame.equal is not None:
            if stays(*frame.equal, rotation, positions, self.rounding):
                return unrotated, rotation, None
            why = "its queries or keys depend on position in an unknown way."
        return unrotated, None, why


def _turns(module: nn.Module) -> bool:
    """Whether the module's own code names a rotation that is not an observed function or method."""
    named = [(name, each.__globals__) for each in hf.functions_of(module) for name in each.__code__.co_names]
    if any(_ROTATIONS.fullmatch(name) and (name in names or hasattr(module, name)) for name, names in named):
        return False
    said = {name for name, _ in named if _SAID.search(name.lower())}
    # the width of a rotated part without angles is not a rotation
    given = {name for each in hf.functions_of(module) for name in (*each.__code__.co_varnames, *each.__code__.co_names)}
    return any(not name.endswith("_dim") for name in said) or (bool(said) and any(map(_ANGLES.search, given)))


def turned_before(equal: tuple[Float[Tensor, "1 H N d"], Float[Tensor, "1 G N d"]] | None) -> str:
    """Describe a rotation R that is applied to the states x, from which queries and keys are projected afterwards.

    The product x_i^T R_i^T W_q^T W_k R_j x_j is a function of i - j for all x only if W_q^T W_k and R commute. Queries
    and keys of one token at every position may be known.
    """
    said = "its rotation is applied to the hidden states, before their projection to queries and keys"
    share = 1.0 if equal is None else offset_share(*equal)
    explained = f"the offset explains at most {100 * share:.0f}% of the variance of a head's logits"
    return f"{said}: with the last token at every position, {explained}." if share < _ALL else f"{said}."


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


def compared(model: Any, inputs: Mapping[str, Any], on_layer: Callable[[AttentionCall], None]) -> float:
    """Run `captured` and a plain pass of the model in its own attention; returns the largest difference of outputs.

    The difference is relative to the largest output: of the last states, or of a language model's logits at the last 64
    positions, which depend on all layers and earlier positions. Outputs are compared for the first sequence, of a long
    sequence only for its first 256 tokens (not if attention is custom code); if these are not equal, because sequences
    or positions affect one another, for all. Both passes draw the same random numbers, and the caller's generators are
    not changed.

    Raises `InputError` if the outputs differ by more than rounding, and as `captured` does.
    """
    with hf.patched(model, _shortened(model)), torch.no_grad():
        few, own = _own(model, inputs)
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            made = _first(captured(model, inputs, on_layer))
        dtype = hf.precision(model)
        far, allowed = hf.apart(made[tuple(map(slice, own.shape[:2]))], own), hf.tolerance(dtype, "pass")
        if not far <= allowed and few is not inputs:
            far = hf.apart(made, _plain(model, inputs))
    if not far <= allowed:
        said = str(dtype).removeprefix("torch.")
        coarse = "" if said.endswith(("32", "64")) else f" ({said} rounds coarsely: use --dtype float32)"
        by = f"{far:.1e} (relative), at most {allowed:.0e} is allowed{coarse}"
        raise InputError(f"model: {type(model).__name__} was not understood: its reproduced outputs differ by {by}.")
    return far


def _own(model: Any, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Tensor]:
    """The inputs and output of a plain pass: of the first sequence, and of its first tokens if all attention goes
    through the interface, where these can be run separately; otherwise of all."""
    names = {getattr(config, "_attn_implementation", None) for config in hf.configs_of(model)}
    known = hf.asks_interface(*hf.attention_modules(model)) and names <= {"eager", "sdpa", None}
    first = _FIRST if known and not any(name.startswith("decoder") for name in inputs) else None
    if all(name in _ROWS and isinstance(x, Tensor) and x.ndim == 2 for name, x in inputs.items()):
        few = {name: x[:1, :first] for name, x in inputs.items()}
        if any(x.shape != inputs[name].shape for name, x in few.items()):
            with suppress(InputError):
                return few, _plain(model, few)
    return inputs, _plain(model, inputs)


def _plain(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    try:
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            return _first(model(**inputs))
    except Exception as error:
        if out_of_memory(error) or not hf.of_libraries(error):
            raise
        length = max((x.shape[1] for x in inputs.values() if isinstance(x, Tensor) and x.ndim > 1), default=0)
        known = {name: getattr(model.config, name, None) for name in _LIMITS}
        said = [f"{name} = {limit}" for name, limit in known.items() if isinstance(limit, int) and 0 < limit < length]
        longer = f" (a sequence has {length} tokens, and its configuration says {said[0]})" if said else ""
        why = f"{hf.words(error)}{longer}"
        raise InputError(f"model: {type(model).__name__} does not run on this input: {why}.") from error


def _shortened(model: Any) -> Iterator[hf.Entry]:
    """Compute the output embedding only at the last positions, and at the last ones of the first tokens of longer
    inputs, if it is a separate module."""
    embedding = model.get_output_embeddings()
    if isinstance(embedding, nn.Linear) and embedding is not hf.input_embedding(model):
        forward = embedding.forward

        def last(x: Tensor) -> Tensor:
            if x.ndim != 3:
                return forward(x)
            ends = (x[:, _FIRST - _LAST : _FIRST], x[:, -_LAST:]) if x.shape[1] > _FIRST else (x[:, -_LAST:],)
            return forward(torch.cat(ends, 1))

        yield vars(embedding), "forward", lambda before: last


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else next(x for x in output.values() if isinstance(x, Tensor))
