"""A pass of a Hugging Face model with its attention calls found and verified, and its difference from a plain pass."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from toeplens.backends.hf import model as hf
from toeplens.backends.hf import trace
from toeplens.backends.hf.attention import AttentionFunction, bias_and_mask, is_causal_mask, no_later_keys
from toeplens.backends.hf.calls import AttentionCall, Proof, Side, join_products, prove, verified_rows
from toeplens.backends.hf.patches import AttentionPatch, LayerContext
from toeplens.backends.hf.rotation import Rotation, capture_equal_tokens, find_rotation, is_position_free, undo_rotation
from toeplens.encodings.attention import AttentionComponents, attention_components
from toeplens.lens.kit.terms import NotSeparable
from toeplens.lens.kit.toeplitz import toeplitz_profile
from toeplens.utils import InputError

_CACHE_INPUTS = ("past_key_values", "cache_params")  # inputs that would contain the keys of all layers
_SHARE_POSITIONS = 256  # positions whose logits are computed to measure how much the offset explains
_FULL_SHARE = 0.995  # shares below this are reported as whole percents
_ROTATIONS = re.compile(r"_?apply_\w*(rot|rope)\w*|rotate_queries_or_keys")
_ROTATION_WORDS = re.compile(r"rotar|rotate|rope(?![a-z])")
_ANGLES = re.compile(r"cos|sin(?![a-z])|freq|position")
_CROSS_INPUTS = ("key_value_states", "encoder_hidden_states", "encoder_hidden_state")  # optional inputs of keys
_HOOKS = {"score": "products", "transform_logits": "logits", "transform_weights": "weights", "add_values": "outputs"}
_NO_ROTATION = (
    "changes queries and keys by more than a rotation of pairs of dimensions, equal in all heads, by an angle "
    "linear in the position."
)
_LAST_LOGITS = 64  # positions of a language model whose logits are computed, as those of all may not fit
_FIRST_TOKENS = 256  # tokens of a long sequence in the plain pass, if later tokens do not affect them
_TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask")
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "n_ctx")
# queries and keys before their rotation, the rotation, or why it is not known; see `AttentionCall`
_RotationResult = tuple[tuple[Tensor, Tensor] | None, Rotation | None, str | None]


@torch.no_grad()
def capture_attention(
    model: Any,
    inputs: Mapping[str, Any],
    on_layer: Callable[[AttentionCall], None],
    replace_heads: Callable[[AttentionCall], Tensor | None] | None = None,
) -> Any:
    """Run a transformers model once and pass each verified attention call to ``on_layer`` before the pass continues.

    The model runs in evaluation mode without a key cache. If it uses transformers' attention interface, its own eager
    attention runs, some queries at a time. Afterwards everything is restored, even after an error. Only one layer's
    attention is in memory at a time, unless ``on_layer`` keeps it. Passes in other threads are not observed. Layers
    without attention are ignored; modules that are named after attention only if nothing in them can be a softmax.

    Arguments
        model          a `transformers.PreTrainedModel`
        inputs         arguments of its ``forward`` by name: ``input_ids``, ``attention_mask``, ``decoder_input_ids``
        on_layer       called with each `AttentionCall`, in the order of the pass
        replace_heads  called with each call, too, before the pass continues; returns a replacement of its ``heads``,
                       or None. The call itself is as the model made it. If it consists of several products of the same
                       weights, ``replace_heads`` is called with each of them, all with the same layer

    Returns the model's output. Raises `InputError` that names the module if an attention is not supported: weights and
    outputs formed from the parts differ from the model's own, or no parts were found, or no module is named after
    attention. Raises `EnvironmentFailure` if transformers is not installed.
    """
    hf.require_pretrained(model)
    for name in _CACHE_INPUTS:
        if inputs.get(name) is not None:
            raise InputError(f"inputs must contain all tokens of a pass and not {name}.")
    class_name, observer = type(model).__name__, _PassObserver(model, inputs, on_layer, replace_heads)
    if not observer.modules:
        raise InputError(f"model: {class_name} has no module named after attention.")
    changes = _attention_entries(model), _rotation_entries(model), hf.module_entries(observer.modules)
    with hf.observing(observer), hf.apply_patches(model, *changes), observer.product_tracer, observer.softmax_observer:
        output = model(**inputs)
    if observer.counts:
        return output
    if not observer.without_softmax:
        raise InputError(f"model: {class_name} calls no attention.")
    zeros = [name for name, is_zero in observer.without_softmax.items() if is_zero]
    hint = f" ({zeros[0]} returned only zeros: its kernel may be missing)" if zeros else ""
    reason = f"no softmax of queries and keys in {', '.join(observer.without_softmax)}{hint}"
    raise InputError(f"model: no attention of {class_name} was understood: {reason}.")


def _attention_entries(model: nn.Module) -> Iterator[hf.PatchEntry]:
    """Observe attention that uses the interface: its entry in the table, or the model's own eager function."""
    if hf.has_installed_encoding(model):  # it uses the attention of toeplens
        yield from hf.table_entries([hf.IMPLEMENTATION])
    elif hf.uses_interface(*hf.attention_modules(model)):
        name = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
        yield from hf.implementation_entries(model, name)
        yield from hf.table_entries([name]) if name in hf.interface_table() else hf.eager_entries(model)


def _rotation_entries(model: nn.Module) -> Iterator[hf.PatchEntry]:
    """Observed functions that apply rotations: in the modules that define the attention, and its own methods."""

    def observed(rotate: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            output = rotate(*args, **kwargs)
            hf.OBSERVER.get().on_rotation(args, kwargs, output)
            return output

        return wrapper

    for namespace in hf.namespaces_of(model):
        for name in [name for name, value in namespace.items() if callable(value) and _ROTATIONS.fullmatch(name)]:
            yield namespace, name, observed
    for module in hf.attention_modules(model):
        for name in {name for cls in type(module).__mro__ for name in vars(cls) if _ROTATIONS.fullmatch(name)}:
            if callable(method := getattr(module, name)):
                yield vars(module), name, lambda before, method=method: observed(method)


@dataclass
class _ModuleFrame:
    """A running attention module: its length, whether its keys come from elsewhere, its calls."""

    module: nn.Module
    tokens: int
    is_cross: bool
    states: Tensor  # the input of the module
    equal_tokens: tuple[Tensor, Tensor] | None  # queries and keys if all tokens were equal
    calls: list[AttentionCall] = field(default_factory=list)
    nested_calls: int = 0  # calls of modules in it
    rotations: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    rotation_inputs: list[Tensor] = field(default_factory=list)  # other inputs of rotations
    softmaxes: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # see `SoftmaxObserver`

    def unsupported_reason(self) -> str:
        """Why its first operation that may distribute weight among keys is not a supported attention."""
        name, shape = self.softmaxes[0]
        if not shape or (shape[-2:-1] == (self.tokens,) and shape[-1] >= self.tokens):
            return f"its {name!r} is not a softmax of a traced product"
        instead = f"instead of one product of all {self.tokens} queries and keys"
        return f"its {name!r} has shape {list(shape)}: bands or blocks of keys {instead}"


class _PassObserver(hf.Observer):
    """Observes one pass of a model, from one thread."""

    joins_calls = True

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        on_layer: Callable[[AttentionCall], None],
        replace_heads: Callable[[AttentionCall], Tensor | None] | None = None,
    ) -> None:
        self.modules = hf.attention_modules(model)
        self.names = {module: name for name, module in model.named_modules()}
        self.is_encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self.rounding = hf.precision(model)
        self.positions = inputs.get("position_ids")
        self.on_layer = on_layer
        self.replace_heads = replace_heads
        self.frames: list[_ModuleFrame] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.unrotated_keys: list[tuple[StorageWeakRef, Tensor]] = []  # memory of rotated keys, and the keys before
        self.without_softmax: dict[str, bool] = {}  # classes of modules, and whether they returned only 0
        self.is_paused = False  # True while other code than an attention module's own runs
        tensors = [x for x in inputs.values() if isinstance(x, Tensor) and x.ndim >= 2]
        self.batch = tensors[0].shape[0] if tensors else 1
        self.lengths = {x.shape[1] for x in tensors}
        self.product_tracer = trace.ProductTracer(lambda: not self.is_paused, self.on_traced_attention)
        self.softmax_observer = trace.SoftmaxObserver(
            lambda: bool(self.frames) and not self.is_paused,
            lambda name, shape: self.frames[-1].softmaxes.append((name, shape)),
            [*model.parameters(), *model.buffers()],
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Computations in here are not followed, and run at full speed."""
        before, self.is_paused = self.is_paused, True
        modes = [mode for mode in (self.product_tracer, self.softmax_observer) if trace.is_innermost(mode)]
        try:
            for mode in modes:
                mode.__exit__(None, None, None)
            yield
        finally:
            for mode in modes:
                mode.__enter__()
            self.is_paused = before

    def name_of(self, module: nn.Module) -> str:
        """Name and class of a module of the model."""
        return f"{self.names.get(module, '?')} ({type(module).__name__})"

    def run_module(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an attention module and pass on its call. Refuse a module with a softmax but without a call."""
        if module not in self.modules:
            return forward(*args, **kwargs)
        arguments = dict(zip(inspect.signature(forward).parameters, args, strict=False)) | kwargs
        first = next((x for x in arguments.values() if isinstance(x, Tensor) and x.ndim >= 2), torch.empty(0, 0))
        cross = any(arguments.get(name) is not None for name in _CROSS_INPUTS)
        cross = cross or bool(getattr(module, "encoder_decoder_attention", False))  # FSMT's, whose keys are "key"
        axis, equal = 1, None  # of tokens: [B, N, d], otherwise [N, B, d] or [B, d, N]
        if first.ndim == 3 and first.shape[0] != self.batch and first.shape[1] == self.batch:
            axis = 0
        elif first.ndim == 3 and first.shape[1] not in self.lengths and first.shape[2] in self.lengths:
            axis = 2
        if self.frames:  # a module nested in an attention module
            equal = self.frames[-1].equal_tokens
        else:
            self.softmax_observer.forget()
            if not cross and first.numel() and first.is_floating_point():
                with self.paused():
                    equal = capture_equal_tokens(module, args, kwargs, first, axis, self.batch)
        self.frames.append(_ModuleFrame(module, first.shape[axis], cross, first, equal))
        self.product_tracer.failure = None
        output = forward(*args, **kwargs)
        frame, reason = self.frames.pop(), self.product_tracer.failure
        self.product_tracer.failure = None
        if len(frame.calls) + frame.nested_calls == 0:
            if reason is not None or frame.softmaxes:
                reason = frame.unsupported_reason() if reason is None else f"it has {reason}"
                raise hf.attention_error(self.name_of(module), reason)
            if not self.counts:  # linear attention, a recurrence
                is_zero = not any(bool(x.any()) for x in tree_leaves(output) if isinstance(x, Tensor))
                name = type(module).__name__
                self.without_softmax[name] = is_zero and self.without_softmax.get(name, True)
            return output
        if self.frames:
            self.frames[-1].nested_calls += 1
        if frame.calls:
            self._report_call(join_products(frame.calls))
        return output

    def on_rotation(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A function that applies a rotation was called."""
        if not self.frames:
            return
        outputs = [x for x in (output if isinstance(output, tuple) else (output,)) if isinstance(x, Tensor)]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for after in outputs:
            if (before := next((x for x in inputs if x.shape == after.shape), None)) is not None:
                inputs = [x for x in inputs if x is not before]
                self.frames[-1].rotations.append((before, after))
        self.frames[-1].rotation_inputs += inputs

    def attend(self, call: hf.InterfaceCall) -> tuple[Tensor, Tensor | None]:
        """Run the module's own eager attention, or the installed encoding, and add its call."""
        context = call.context if isinstance(call.context, LayerContext) else None
        if context is not None and not context.is_rotated:
            with self.paused():
                heads = call.run()[0]
                replacement = self._add_installed(call, context, heads)
            return heads if replacement is None else replacement, None
        module, mask = call.module, call.mask
        mask = None if mask is None else mask[..., : call.k.shape[2]]  # a static cache has more
        causal = call.from_table and mask is None and call.q.shape[2] > 1 and call.is_causal(default=True)
        eager = hf.eager_function(module) if call.from_table else call.function
        bound = inspect.signature(eager).bind(module, call.q, call.k, call.v, mask, *call.args, **call.options)
        bound.apply_defaults()
        options = bound.arguments | bound.arguments.get("kwargs", {})
        scale = options.get("scaling")
        scale = float(getattr(module, "scaling", call.q.shape[-1] ** -0.5) if scale is None else scale)
        with self.paused():
            eager_call = replace(call, function=eager, mask=mask, context=None)
            rows = verified_rows(call.q, call.k)
            output = trace.run_eager(eager_call, causal, rows, (lambda: call.run()[0]) if call.from_table else None)
            if output.row_weights is None:
                raise hf.attention_error(self.name_of(module), "it returns no weights")
            terms = [x for x in (options.get("position_bias"), mask) if x is not None and x.dtype != torch.bool]
            masks = [~mask] if mask is not None and mask.dtype == torch.bool else []
            cap, sinks = options.get("softcap"), trace.sinks_of(options, call.q)
            q, k, v = call.q, call.k, call.v
            parts = AttentionFunction(q=q, k=k, v=v, scale=scale, causal=causal, softcap=cap, sinks=sinks)
            positions = None if context is None else context.positions
            replacement = self._add_call(module, parts, output, terms, masks, positions)
        return (output.heads if replacement is None else replacement), output.weights

    def on_traced_attention(self, traced: trace.TracedTensor, v: Tensor, out: Tensor) -> Tensor | None:
        """A module's own code computed a product of queries and keys, its softmax, and the product with the values."""
        if not self.frames:
            problem = "outside the attention modules, so it was not captured"
            raise InputError(f"model: a softmax of queries and keys was found {problem}.")
        frame, batch = self.frames[-1], self.batch
        terms = [trace.split_heads(term, batch, ndim) for term, ndim in traced.terms]
        masks = [trace.split_heads(mask, batch, ndim) for mask, ndim in traced.masks]
        q, k = trace.split_heads(traced.left, batch), trace.split_heads(traced.right, batch).transpose(-2, -1)
        parts = AttentionFunction(q=q, k=k, v=trace.split_heads(v, batch), scale=traced.scale, causal=traced.causal)
        if len(q) != batch or (not frame.is_cross and q.shape[2] != frame.tokens):
            if trace.attends_within_tokens(traced) and q.shape[1] == frame.tokens:
                del frame.softmaxes[-1:]  # the softmax of this product, which is not over tokens
                return None
            size = f"{len(q)} sequences of {batch}" if len(q) != batch else f"{q.shape[2]} queries of {frame.tokens}"
            raise hf.attention_error(self.name_of(frame.module), f"a softmax in it is over {size}")
        weights = None if traced.weights is None else trace.split_heads(traced.weights, batch)
        rows = verified_rows(q, k)
        row_weights = None if weights is None else weights.index_select(2, rows)
        eager = trace.EagerOutputs(trace.split_heads(out, batch).transpose(1, 2), weights, rows, row_weights)
        replacement = self._add_call(frame.module, parts, eager, terms, masks)
        return None if replacement is None else replacement.transpose(1, 2).reshape(out.shape)

    def _add_call(
        self,
        module: nn.Module,
        parts: AttentionFunction,
        output: trace.EagerOutputs,
        terms: list[Tensor],
        masks: list[Tensor],
        positions: Tensor | None = None,
    ) -> Tensor | None:
        """Find a call's bias, mask and rotation, verify it and pass it on; returns a replacement of its outputs, if
        any."""
        frame = self._current_frame(module)
        if frame is not None and frame.calls:
            return self._add_product(frame, parts.v, output)

        def weights(bias: Tensor | None, visible: Tensor | None) -> Tensor:
            """The model's own weights at the verified queries, or weights formed with this bias and mask."""
            if output.row_weights is not None:
                return output.row_weights
            candidate = replace(parts, bias=bias, visible=visible)
            return candidate.softmax(candidate.logits(output.rows, dtype=torch.float32), output.rows)

        bias, visible = bias_and_mask(terms, masks, parts.k.shape[2], output.rows, weights)
        parts = self._with_causal(replace(parts, bias=bias, visible=visible), frame)
        proof = prove(self.name_of(module), parts, output.rows, output.row_weights, output.heads)
        if positions is None:
            positions, given = torch.arange(parts.q.shape[2], device=parts.q.device).unsqueeze(0), self.positions
            if isinstance(given, Tensor) and given.ndim == 2 and given.shape[1] == parts.q.shape[2]:
                positions = given
        rotation = self._find_rotation(module, frame, parts.q, parts.k, positions)
        return self._add_verified(module, parts, output, proof, rotation, positions)

    def _add_installed(self, call: hf.InterfaceCall, context: LayerContext, heads: Tensor) -> Tensor | None:
        """Verify a call of an installed encoding, which provides its parts, and pass it on; returns a replacement of
        its outputs, if any."""
        module, rows, positions = call.module, verified_rows(call.q, call.k), context.positions
        patch: AttentionPatch = vars(module)[hf.INSTALLED]
        frame, (k, _, arguments) = self._current_frame(module), patch.arguments(call, context)
        attention = attention_components(call.q, k, **arguments)
        cap, sinks = call.options.get("softcap"), call.options.get("s_aux")
        tensors = {name: getattr(attention, name) for name in ("q", "k", "bias", "visible", "factor")}
        parts = AttentionFunction(v=call.v, scale=float(call.scale), softcap=cap, sinks=sinks, **tensors)
        parts = self._with_causal(parts, frame)
        added = None if attention.values is None else attention.values.transpose(1, 2)
        proof = prove(self.name_of(module), parts, rows, None, heads, added)
        unrotated, rotation, reason = self._rotation_of(call, attention, positions)
        changed = [target for hook, target in _HOOKS.items() if patch.encoding.overrides(hook)]
        if reason is None and changed:
            reason = f"changes the {' and the '.join(changed)} by more than a rotation or a bias."
        equal = None if frame is None else frame.equal_tokens
        if reason is None and equal is None:
            reason = "may have keys that depend on position beyond their content; this could not be checked."
        elif reason is None and equal is not None and not is_position_free(*equal, None, positions, self.rounding):
            reason = "has queries or keys that depend on position in an unknown way."
        if reason is not None:
            rotation, reason = None, f"encoding {patch.stack.name} {reason}"
        eager = trace.EagerOutputs(heads, None, rows, None)
        return self._add_verified(module, parts, eager, proof, (unrotated, rotation, reason), positions)

    def _rotation_of(self, call: hf.InterfaceCall, parts: AttentionComponents, positions: Tensor) -> _RotationResult:
        """How an encoding changed queries and keys before their product, if by a rotation of pairs."""
        q, k = call.q, call.k
        if parts.k.shape[1] != k.shape[1]:  # keys per head
            k = k.repeat_interleave(parts.k.shape[1] // k.shape[1], 1)
        if torch.equal(parts.q, q) and torch.equal(parts.k, k):
            return None, None, None
        with suppress(NotSeparable):
            if parts.q.shape == q.shape:
                return (q, k), find_rotation((q, parts.q), (k, parts.k), positions, self.rounding), None
        return (q, k), None, _NO_ROTATION

    def _current_frame(self, module: nn.Module) -> _ModuleFrame | None:
        return self.frames[-1] if self.frames and self.frames[-1].module is module else None

    def _with_causal(self, parts: AttentionFunction, frame: _ModuleFrame | None) -> AttentionFunction:
        """The same parts with ``causal`` if no query sees a later key."""
        visible, causal = parts.visible, parts.causal
        if visible is None or self._is_cross(parts, frame):
            return parts
        causal = causal or no_later_keys(visible)
        return replace(parts, visible=None if causal and is_causal_mask(visible) else visible, causal=causal)

    def _is_cross(self, parts: AttentionFunction, frame: _ModuleFrame | None) -> bool:
        return parts.q.shape[2] != parts.k.shape[2] if frame is None else frame.is_cross

    def _add_verified(
        self,
        module: nn.Module,
        parts: AttentionFunction,
        output: trace.EagerOutputs,
        proof: Proof,
        rotation: _RotationResult,
        positions: Tensor,
    ) -> Tensor | None:
        """Pass a call on; returns a replacement of its outputs, if any."""
        frame = self._current_frame(module)
        cross = self._is_cross(parts, frame)
        side = self._side_of(module) if self.is_encoder_decoder else None
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
            module=self.name_of(module),
            weights=output.weights,
            heads=output.heads,
            unrotated=rotation[0],
            rotation=rotation[1],
            unknown=rotation[2],
            proof=proof,
            positions=positions,
            encoding=None if patch is None else patch.stack.name,
        )
        if frame is None:
            self._report_call(call)
        return self._store_call(frame, call)

    def _add_product(self, frame: _ModuleFrame, v: Tensor, output: trace.EagerOutputs) -> Tensor | None:
        """Another product in a module that had one: a piece of its attention, if the weights are equal."""
        first, name = frame.calls[0], self.name_of(frame.module)
        try:
            proof = prove(name, replace(first, v=v), output.rows, output.row_weights, output.heads)
            if v.shape[1] != first.v.shape[1]:
                raise InputError("values must have the heads of the first piece.")
        except InputError as error:
            raise hf.attention_error(name, "it has several pieces, each with its own softmax") from error
        return self._store_call(frame, replace(first, v=v, weights=output.weights, heads=output.heads, proof=proof))

    def _store_call(self, frame: _ModuleFrame | None, call: AttentionCall) -> Tensor | None:
        """Keep a call until its module ends; returns a replacement of its outputs, if any."""
        if frame is not None:
            frame.calls.append(call)
        if self.replace_heads is None:
            return None
        with self.paused():
            replacement = self.replace_heads(call)
        return None if replacement is None else replacement.to(call.heads.dtype)

    def _report_call(self, call: AttentionCall) -> None:
        with hf.observing(hf.NO_OBSERVER), self.paused():
            self.on_layer(call)

    def _side_of(self, module: nn.Module) -> Side | None:
        """The side of a module: the outermost part of its name that says so."""
        for word in self.names.get(module, "").split("."):
            sides: list[Side] = [side for side in ("encoder", "decoder") if side in word]
            if len(sides) == 1:
                return sides[0]
        return None

    def _find_rotation(
        self, module: nn.Module, frame: _ModuleFrame | None, q: Tensor, k: Tensor, positions: Tensor
    ) -> _RotationResult:
        """q and k before their rotation, and the rotation; or why it is not known."""
        unrotated, rotation = None, None
        if frame is not None and frame.rotations:
            before = undo_rotation(q, frame.rotations), undo_rotation(k, frame.rotations)
            self.unrotated_keys = [entry for entry in self.unrotated_keys if not entry[0].expired()]
            storage, shared = StorageWeakRef(k.untyped_storage()), None
            if before[1] is None:  # the keys of another layer
                shared = next((x for ref, x in self.unrotated_keys if ref == storage and x.shape == k.shape), None)
            if shared is not None:  # the other layer's call showed how they depend on position
                before = before[0], shared
                frame.equal_tokens = frame.equal_tokens and (frame.equal_tokens[0], frame.equal_tokens[0])
            if before[0] is None or before[1] is None:
                if any(
                    x.data_ptr() == frame.states.data_ptr()
                    and x.shape == frame.states.shape
                    and x.stride() == frame.states.stride()
                    for x, _ in frame.rotations
                ):
                    return None, None, describe_early_rotation(frame.equal_tokens)
                return None, None, "its rotated queries and keys are changed before their product."
            unrotated = before[0], before[1]
            if shared is None:
                self.unrotated_keys.append((storage, before[1]))
            if q.shape[2] != k.shape[2]:
                return unrotated, None, "its queries and keys are rotated but belong to different tokens."
            try:
                queries, keys = (unrotated[0], q), (unrotated[1], k)
                rotation = find_rotation(queries, keys, positions, self.rounding, frame.rotation_inputs)
            except NotSeparable as error:
                return unrotated, None, str(error)
        elif _mentions_rotation(module):
            return None, None, "it has a rotation that was not observed."
        if frame is None or frame.is_cross or q.shape[2] != k.shape[2]:
            return unrotated, rotation, None
        reason = "it could not be checked whether its keys depend on position beyond their content."
        if frame.equal_tokens is not None:
            if is_position_free(*frame.equal_tokens, rotation, positions, self.rounding):
                return unrotated, rotation, None
            reason = "its queries or keys depend on position in an unknown way."
        return unrotated, None, reason


def _mentions_rotation(module: nn.Module) -> bool:
    """Whether the module's own code names a rotation that is not an observed function or method."""
    references = [(name, f.__globals__) for f in hf.functions_of(module) for name in f.__code__.co_names]
    if any(_ROTATIONS.fullmatch(name) and (name in names or hasattr(module, name)) for name, names in references):
        return False
    rotations = {name for name, _ in references if _ROTATION_WORDS.search(name.lower())}
    # the width of a rotated part without angles is not a rotation
    used = {name for f in hf.functions_of(module) for name in (*f.__code__.co_varnames, *f.__code__.co_names)}
    return any(not name.endswith("_dim") for name in rotations) or (bool(rotations) and any(map(_ANGLES.search, used)))


def describe_early_rotation(equal: tuple[Float[Tensor, "1 H N d"], Float[Tensor, "1 G N d"]] | None) -> str:
    """Describe a rotation R that is applied to the states x, from which queries and keys are projected afterwards.

    The product x_i^T R_i^T W_q^T W_k R_j x_j is a function of i - j for all x only if W_q^T W_k and R commute. Queries
    and keys of one token at every position may be known.
    """
    message = "its rotation is applied to the hidden states, before their projection to queries and keys"
    share = 1.0 if equal is None else offset_share(*equal)
    explained = f"the offset explains at most {100 * share:.0f}% of the variance of a head's logits"
    return f"{message}: with the last token at every position, {explained}." if share < _FULL_SHARE else f"{message}."


def offset_share(q: Float[Tensor, "1 H N d"], k: Float[Tensor, "1 G N d"]) -> float:
    """Share of the variance of q . k over all pairs of positions that the offset explains: the maximum over heads."""
    q, k = (x[:, :, :_SHARE_POSITIONS] for x in (q, k))
    shares = toeplitz_profile(q, k, causal=False, layout="bhnd").variance_explained
    return float(shares.nan_to_num(1.0).max())


def capture_and_compare(model: Any, inputs: Mapping[str, Any], on_layer: Callable[[AttentionCall], None]) -> float:
    """Run `capture_attention` and a plain pass of the model in its own attention; returns the largest difference.

    The difference is relative to the largest output: of the last states, or of a language model's logits at the last 64
    positions, which depend on all layers and earlier positions. Outputs are compared for the first sequence, of a long
    sequence only for its first 256 tokens (not if attention is custom code); if these are not equal, because sequences
    or positions affect one another, for all. Both passes draw the same random numbers, and the caller's generators are
    not changed.

    Raises `InputError` if the outputs differ by more than rounding, and as `capture_attention` does.
    """
    with hf.apply_patches(model, _last_logits_entries(model)), torch.no_grad():
        plain_inputs, plain_output = _plain_pass(model, inputs)
        with _fork_rng(model):
            output = _first_tensor(capture_attention(model, inputs, on_layer))
        dtype = hf.precision(model)
        difference = hf.relative_difference(output[tuple(map(slice, plain_output.shape[:2]))], plain_output)
        allowed = hf.tolerance(dtype, "pass")
        if not difference <= allowed and plain_inputs is not inputs:
            difference = hf.relative_difference(output, _plain_output(model, inputs))
    if not difference <= allowed:
        dtype_name = str(dtype).removeprefix("torch.")
        advice = f"; {dtype_name} rounds coarsely, use a model in float32 (--dtype float32)"
        coarse = "" if dtype_name.endswith(("32", "64")) else advice
        reason = f"its reproduced outputs differ by {difference:.1e} (relative), at most {allowed:.0e} is allowed"
        raise InputError(f"model: {type(model).__name__} was not understood: {reason}{coarse}.")
    return difference


def _plain_pass(model: Any, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Tensor]:
    """The inputs and output of a plain pass: of the first sequence, and of its first tokens if all attention goes
    through the interface, where these can be run separately; otherwise of all."""
    names = {getattr(config, "_attn_implementation", None) for config in hf.configs_of(model)}
    is_standard = hf.uses_interface(*hf.attention_modules(model)) and names <= {"eager", "sdpa", None}
    length = _FIRST_TOKENS if is_standard and not any(name.startswith("decoder") for name in inputs) else None
    if all(name in _TOKEN_INPUTS and isinstance(x, Tensor) and x.ndim == 2 for name, x in inputs.items()):
        shortened = {name: x[:1, :length] for name, x in inputs.items()}
        if any(x.shape != inputs[name].shape for name, x in shortened.items()):
            with suppress(InputError):
                return shortened, _plain_output(model, shortened)
    return inputs, _plain_output(model, inputs)


def _fork_rng(model: Any) -> AbstractContextManager[None]:
    """Restore the random state, on a CPU and on the model's GPU, afterwards."""
    device = hf.device_of(model)
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _plain_output(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    length = max((x.shape[1] for x in inputs.values() if isinstance(x, Tensor) and x.ndim > 1), default=0)
    limits = {name: getattr(model.config, name, None) for name in _LENGTH_FIELDS}
    exceeded = [f"{name} = {x}" for name, x in limits.items() if isinstance(x, int) and 0 < x < length]
    hint = f" (a sequence has {length} tokens, and its configuration says {exceeded[0]})" if exceeded else ""
    with hf.library_errors(f"model: {type(model).__name__} does not run on this input: {{}}{hint}."), _fork_rng(model):
        return _first_tensor(model(**inputs))


def _last_logits_entries(model: Any) -> Iterator[hf.PatchEntry]:
    """Compute the output embedding only at the last positions, and at the last ones of the first tokens of longer
    inputs, if it is a separate module."""
    embedding = model.get_output_embeddings()
    if isinstance(embedding, nn.Linear) and embedding is not hf.input_embedding(model):
        forward = embedding.forward

        def forward_last(x: Tensor) -> Tensor:
            if x.ndim != 3:
                return forward(x)
            last = x[:, -_LAST_LOGITS:]
            if x.shape[1] <= _FIRST_TOKENS:
                return forward(last)
            return forward(torch.cat((x[:, _FIRST_TOKENS - _LAST_LOGITS : _FIRST_TOKENS], last), 1))

        yield vars(embedding), "forward", lambda before: forward_last


def _first_tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else next(x for x in output.values() if isinstance(x, Tensor))
