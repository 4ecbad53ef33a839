"""The parts of a model with an installed encoding: its passes, key caches, stacks of layers and attention modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from secrets import token_hex
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens import encodings
from toeplens.backends.hf import model as hf
from toeplens.encodings import MLA, PositionalEncoding, Rotary, attend, attention_weights
from toeplens.encodings.attention import AttentionArguments
from toeplens.encodings.base import HOOKS, KeyFeatures
from toeplens.encodings.shapes import Positions
from toeplens.nn.attention import count_unpadded
from toeplens.utils import InputError, invalid

_EXTRAS = "toeplens_memory"  # attribute of a transformers cache


@dataclass
class CacheExtras:
    """What a cache does not hold of its keys: the name of their stack, positions, [B, M] or [1, M], and features."""

    owner: str
    positions: Int[Tensor, "_ M"] | None = None
    padding: Bool[Tensor, "B M"] | None = None
    key_features: dict[int, KeyFeatures] = field(default_factory=dict)

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply the change that the cache applies to its keys."""
        if self.positions is not None and len(self.positions) > 1:
            self.positions = change(self.positions)
        self.padding = None if self.padding is None else change(self.padding)
        self.key_features = {layer: change(features) for layer, features in self.key_features.items()}

    def crop(self, removed: int) -> None:
        """Remove the last ``removed`` tokens."""
        if removed and self.positions is not None:
            length = self.positions.shape[1] - removed
            self.positions = self.positions[:, :length]
            self.padding = None if self.padding is None else self.padding[:, :length]
            self.key_features = {layer: features[:, :, :length] for layer, features in self.key_features.items()}


class _CacheWithExtras:
    """A transformers cache that applies every change of its keys to their extras, too."""

    def reorder_cache(self, beam_idx: Tensor) -> Any:
        self.__dict__[_EXTRAS].apply(lambda x: x.index_select(0, beam_idx.to(x.device)))
        return super().reorder_cache(beam_idx)  # type: ignore[misc]

    def batch_repeat_interleave(self, repeats: int) -> Any:
        self.__dict__[_EXTRAS].apply(lambda x: x.repeat_interleave(repeats, dim=0))
        return super().batch_repeat_interleave(repeats)  # type: ignore[misc]

    def batch_select_indices(self, indices: Tensor) -> Any:
        self.__dict__[_EXTRAS].apply(lambda x: x[indices, ...])
        return super().batch_select_indices(indices)  # type: ignore[misc]

    def crop(self, *args: Any, **options: Any) -> Any:
        before = int(self.get_seq_length())  # type: ignore[attr-defined]
        result = super().crop(*args, **options)  # type: ignore[misc]
        self.__dict__[_EXTRAS].crop(before - int(self.get_seq_length()))  # type: ignore[attr-defined]
        return result

    def reset(self) -> Any:
        self.__dict__[_EXTRAS] = CacheExtras(self.__dict__[_EXTRAS].owner)
        return super().reset()  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_cache, (type(self).__mro__[2],), self.__dict__


@cache
def _class_with_extras(kind: type) -> type:
    return type(kind.__name__, (_CacheWithExtras, kind), {"__module__": kind.__module__})


def _new_cache(kind: type) -> Any:
    cls: Any = _class_with_extras(kind)
    return cls.__new__(cls)


def _attach_extras(cache: Any, extras: CacheExtras) -> None:
    if not isinstance(cache, _CacheWithExtras):
        cache.__class__ = _class_with_extras(type(cache))
    cache.__dict__[_EXTRAS] = extras


@dataclass(frozen=True)
class ForwardContext:
    """One pass of a stack of layers."""

    positions: Int[Tensor, "*B N"]  # of the new tokens: [N], or [B, N] if sequences differ
    k_positions: Int[Tensor, "*B M"]  # of all tokens so far: [M] or [B, M]
    padding: Bool[Tensor, "B M"] | None  # True where a token so far is padding: [B, M]; None if none is
    extras: CacheExtras  # of the cache's keys, including these tokens
    cached_features: dict[int, KeyFeatures]  # each layer's features of earlier tokens
    tables: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # cosines and sines, by encoding
    needs_weights: bool = False  # whether attention weights are requested

    def padding_of(self, count: int) -> Bool[Tensor, "B count"] | None:
        """True where one of ``count`` keys is padding; None if none is."""
        return None if self.padding is None else _tokens_in_cache(self.padding, count)


def _tokens_in_cache(x: Tensor, count: int) -> Tensor:
    """Of all tokens so far, those whose keys a layer's cache returns: the last ones, or all plus unused slots."""
    tokens = x.shape[-1]
    return x[..., tokens - count :] if count <= tokens else F.pad(x, (0, count - tokens))


def _start_pass(x: Tensor, arguments: Mapping[str, Any], owner: str, needs_weights: bool) -> ForwardContext:
    """Start a pass of the new tokens x [B, N, ...], given the arguments of a stack. If it gets no positions, tokens are
    counted after those in the cache, without padding."""
    batch, tokens, device = x.shape[0], x.shape[1], x.device
    cache, mask, positions = (arguments.get(name) for name in ("past_key_values", "attention_mask", "position_ids"))
    past = 0 if cache is None else int(cache.get_seq_length())
    shape = list(mask.shape) if isinstance(mask, Tensor) else []
    if len(shape) == 2 and (shape[0] != batch or shape[1] < past + tokens):
        must = f"have shape [{batch}, {past + tokens}], including the tokens in the cache"
        raise invalid("attention_mask", must, got=f"shape {shape}")
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)
    keys = getattr(layers[0], "keys", None) if past and layers else None
    if isinstance(keys, Tensor) and keys.numel() and len(keys) != batch:
        raise invalid("past_key_values", f"have {batch} sequences", len(keys))
    extras = (cache.__dict__.get(_EXTRAS) if past else None) or CacheExtras(owner)
    cached = 0 if extras.positions is None else extras.positions.shape[1]
    if cached != past or extras.owner != owner:
        must = "be empty or filled by this model with its encoding installed"
        raise invalid("past_key_values", must, got=f"a cache of {past} tokens")
    padding = _padding_mask(mask, extras.padding, past, x)
    if positions is not None and positions.ndim != 2:
        raise invalid("position_ids", "be [B, N]", got=f"a shape of {tuple(positions.shape)}")
    if positions is None and padding is not None:
        positions = count_unpadded(padding)[:, past:]
    if positions is None:
        positions = torch.arange(past, past + tokens, device=device).unsqueeze(0)
    all_positions = positions
    if extras.positions is not None:
        rows = max(len(extras.positions), len(positions))
        all_positions = torch.cat([x.expand(rows, -1) for x in (extras.positions, positions)], dim=1)
    features = dict(extras.key_features)
    new_extras = CacheExtras(owner, all_positions, padding, dict(features))
    if cache is not None:
        _attach_extras(cache, new_extras)
    q_positions, k_positions = (x[0] if len(x) == 1 else x for x in (positions, all_positions))
    return ForwardContext(q_positions, k_positions, padding, new_extras, features, needs_weights=needs_weights)


def _padding_mask(mask: Any, before: Tensor | None, past: int, x: Tensor) -> Tensor | None:
    """True where a token so far is padding; None if none is. These are the zeros of a mask [B, M]; in a mask by queries
    and keys (of a static cache) the new tokens that do not see themselves."""
    batch, tokens, device = x.shape[0], x.shape[1], x.device
    if isinstance(mask, dict):
        mask = next((value for value in mask.values() if isinstance(value, Tensor)), None)
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4) or mask.shape[-1] < past + tokens:
        return None
    if mask.ndim == 2:
        padding = mask[:, : past + tokens].to(device) == 0
    else:
        self_mask = mask[:, 0, -tokens:, past : past + tokens].diagonal(dim1=-2, dim2=-1)
        new = ~self_mask if self_mask.dtype == torch.bool else self_mask != 0
        cached = torch.zeros(batch, past, dtype=torch.bool, device=device) if before is None else before
        padding = torch.cat((cached, new.expand(batch, -1)), dim=1)
    return padding if torch.compiler.is_compiling() or bool(padding.any()) else None


@dataclass(frozen=True)
class ModelStack:
    """One side of a model: a stack and its self-attention, layer by layer."""

    stack: nn.Module  # the module that runs the layers
    modules: list[nn.Module]  # their attention
    heads: int  # sizes of a layer's attention
    head_dim: int
    d_model: int
    max_len: int  # number of positions that a table must have
    position_tables: list[nn.Module]  # modules that look up positions in a table at the input
    pairings: list[str | None]  # how each layer's rotation pairs dimensions, if it is purely one of queries and keys
    receivers: list[nn.Module | None]  # by attention module, itself or one around it, with arguments of the stack
    causal: bool  # whether attention is causal

    def build(self, name: str | Sequence[str], options: dict[str, Any]) -> PositionalEncoding:
        """The encoding for this side; ``pairing`` and ``bidirectional`` default to the model's own."""
        sizes = {"d_model": self.d_model, "num_heads": self.heads, "head_dim": self.head_dim, "max_len": self.max_len}
        parts = encodings.split_names(name)
        if len(parts) == 1:
            options = self._default_options(parts[0]) | options
        else:
            options = options | {part: self._default_options(part) | dict(options.get(part, {})) for part in parts}
        encoding = encodings.build(name, **sizes, **options)
        if isinstance(encoding, MLA) or encoding.query_dim != self.head_dim:
            heads = f"heads of {type(self.modules[0]).__name__} have {self.head_dim}"
            dim = encoding.query_dim
            raise InputError(f"encoding: {name!r} needs queries and keys of {dim} dimensions, but {heads}.")
        return encoding

    def _default_options(self, name: str) -> dict[str, Any]:
        pairing = next((pairing_ for pairing_ in self.pairings if pairing_), None)
        defaults = {"pairing": pairing, "bidirectional": not self.causal or None}
        return {option: value for option, value in defaults.items() if value and option in encodings.options(name)}


class StackPatch:
    """A module that runs layers one after another: a decoder-only model's trunk, or one side of an encoder-decoder.

    Arguments
        side            the stack and its attention
        encoding        the encoding of its first layer; its vectors are added to the token embeddings
        uses_interface  whether it uses the attention interface; if not, the family's own forward is replaced
        name            of the encoding
    """

    def __init__(self, side: ModelStack, encoding: PositionalEncoding, uses_interface: bool, name: str) -> None:
        self.side, self.encoding, self.uses_interface, self.name = side, encoding, uses_interface, name
        module: Any = side.stack
        self.context: ForwardContext | None = None
        self.owner = token_hex(8)
        self._signature = inspect.signature(module.forward)
        self._states_argument = "inputs_embeds" if "inputs_embeds" in self._signature.parameters else "hidden_states"
        self._hooks = [
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            module.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
            *(table.register_forward_hook(_zero_output) for table in side.position_tables),
        ]
        self._pending_positions: Positions | None = None  # of tokens whose embedding this pass has not yet called
        self._embedding: nn.Module | None = None  # the embedding with our hook
        if encoding.overrides("embed") and "input_ids" in self._signature.parameters:
            self._hook_embedding(module.get_input_embeddings())

    def remove(self) -> None:
        """Restore the stack."""
        for hook in self._hooks:
            hook.remove()

    def _before_forward(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.uses_interface and module.config._attn_implementation != hf.IMPLEMENTATION:
            problem = f"attention was set to {module.config._attn_implementation!r} after an encoding was installed"
            raise InputError(f"model: {problem}. Uninstall the encoding first.")
        arguments = dict(zip(self._signature.parameters, args, strict=False)) | kwargs
        tokens = arguments.get("input_ids")
        x = arguments.get(self._states_argument) if tokens is None else tokens
        if not isinstance(x, Tensor):
            return args, kwargs
        needs_weights = arguments.get("output_attentions", getattr(module.config, "output_attentions", False))
        context = self.context = _start_pass(x, arguments, self.owner, bool(needs_weights))
        if self.encoding.overrides("embed"):
            positions = self.encoding.to_positions(context.positions)
            if tokens is None:
                arguments[self._states_argument] = self.encoding.embed(x, positions)
            else:  # the model changes the token embeddings further
                if module.get_input_embeddings() is not self._embedding:  # it was replaced
                    self._hook_embedding(module.get_input_embeddings())
                self._pending_positions = positions
        if any(self.side.receivers):
            arguments[hf.CONTEXT] = context
        return (), arguments

    def _hook_embedding(self, embedding: nn.Module) -> None:
        self._embedding = embedding
        self._hooks.append(embedding.register_forward_hook(self._add_positions))

    def _add_positions(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Add position vectors to the token embeddings, at the first call in a pass."""
        if self._pending_positions is None:
            return None
        positions, self._pending_positions = self._pending_positions, None
        return self.encoding.embed(output, positions)

    def _after_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        context, self.context = kwargs.get(hf.CONTEXT, self.context), None
        unused, self._pending_positions = self._pending_positions is not None, None
        if unused and output is not None and not hf.OBSERVER.get().may_skip:
            raise InputError("model: it does not call its token embedding, so no vectors can be added.")
        cache = getattr(output, "past_key_values", None)
        if cache is not None and context is not None and hasattr(cache, "get_seq_length"):
            _attach_extras(cache, context.extras)


def _zero_output(module: nn.Module, args: Any, output: Any) -> Any:
    """A position table's vectors, set to 0."""
    return torch.zeros_like(output)


@dataclass(frozen=True)
class LayerContext:
    """The context of a pass for one attention module: the pass, the features of all tokens so far, and whether the
    module's own function applies the whole encoding, as a rotation of queries and keys."""

    forward_context: ForwardContext
    key_features: Tensor | None
    is_rotated: bool

    @property
    def positions(self) -> Int[Tensor, "_B N"]:
        """Positions of the new tokens."""
        return self.forward_context.positions.view(-1, self.forward_context.positions.shape[-1])


class AttentionPatch:
    """Removes position before an attention module, and applies the encoding in its attention.

    It receives the pass through the layers' arguments and stores nothing of it. So a layer that is recomputed in the
    backward pass (gradient checkpointing) finds its own pass, whatever else was run in between.
    """

    def __init__(self, stack: StackPatch, layer: int, encoding: PositionalEncoding) -> None:
        self.stack, self.layer, self.encoding = stack, layer, encoding
        self._context: ForwardContext | None = None  # the pass, if it only reaches the module around this one
        self.module = module = stack.side.modules[layer]
        outer = stack.side.receivers[layer]
        module.__dict__[hf.INSTALLED] = self
        self._hooks = [module.register_forward_pre_hook(self._before_forward, with_kwargs=True)]
        if outer is not None and outer is not module:
            self._hooks.append(outer.register_forward_pre_hook(self._keep_context, with_kwargs=True))
        if (forward := replacement_forward(module)) is not None:
            module.forward = partial(forward, module)

    def _rotates_in_module(self) -> bool:
        """Whether the module's own rotation function, which must pair halves, can apply all that the encoding does: it
        must rotate all heads alike, by angles independent of the length. Keys are then cached after the rotation."""
        encoding = self.encoding
        return (
            isinstance(encoding, Rotary)
            and not any(encoding.overrides(hook) for hook in HOOKS if hook not in ("embed", "rotate"))
            and encoding.rotation_is_shared
            and not (encoding.length_dependent or encoding.first)
            and encoding.axes == 1
            and self.stack.side.pairings[self.layer] == encoding.pairing == "half"
        )

    def remove(self) -> None:
        """Restore the module."""
        del self.module.__dict__[hf.INSTALLED]
        self.module.__dict__.pop("forward", None)
        for hook in self._hooks:
            hook.remove()

    def _before_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Compute the content's features, and pass the identity rotation, or the encoding's own, to the module."""
        kwargs = dict(kwargs)
        context = kwargs.pop(hf.CONTEXT, None) or self._context
        context = context or _stored_context(kwargs.get("alibi"), self.stack.context)
        if context is None:
            raise InputError("model: a layer was called outside of the model's forward pass.")
        hidden = next((kwargs[name] for name in ("hidden_states", "x") if name in kwargs), args[0] if args else None)
        cos_sin: Any = kwargs.get("position_embeddings")
        encoding: Any = self.encoding
        is_rotated = isinstance(cos_sin, tuple) and self._rotates_in_module()
        if is_rotated := is_rotated and cos_sin[0].shape[-1] == 2 * encoding.frequencies.shape[-1]:  # both halves
            kwargs["position_embeddings"] = _rotation_tables(encoding, context, cos_sin[0].dtype)
        elif cos_sin is not None:
            kwargs["position_embeddings"] = torch.ones_like(cos_sin[0]), torch.zeros_like(cos_sin[1])
        if (relative := kwargs.get("relative_position_embeddings")) is not None:  # Wav2Vec2-Conformer's
            if module.position_embeddings_type == "rotary":
                relative = torch.stack((torch.ones_like(relative[0]), torch.zeros_like(relative[0])))
            kwargs["relative_position_embeddings"] = relative
        kwargs[hf.CONTEXT] = LayerContext(context, self._key_features(hidden, context), is_rotated)
        return args, kwargs

    def _keep_context(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._context = kwargs.get(hf.CONTEXT)

    def _key_features(self, hidden: Any, context: ForwardContext) -> Tensor | None:
        """The features of all tokens so far; a recomputed layer does not add to a cache twice."""
        if not isinstance(hidden, Tensor):
            return None
        padding, cached = context.padding_of(context.positions.shape[-1]), context.cached_features.get(self.layer)
        cached = None if cached is None or not cached.shape[2] else cached
        content = hidden if padding is None else hidden.masked_fill(padding.unsqueeze(-1), 0.0)
        features = self.encoding.key_features(content, cached)
        if features is None:
            return None
        features = features if cached is None else torch.cat((cached, features), dim=2)
        context.extras.key_features[self.layer] = features.detach()
        return features

    def attend(self, call: hf.InterfaceCall, layer: LayerContext) -> tuple[Tensor, Tensor | None]:
        """Attention by the encoding, [B, N, H, d], and its weights if the pass requests them."""
        k, v, arguments = self.arguments(call, layer)
        out = attend(call.q, k, v, dropout=call.options.get("dropout") or 0.0, **arguments)
        weights = attention_weights(call.q, k, **arguments) if layer.forward_context.needs_weights else None
        return out.transpose(1, 2).contiguous(), weights

    def arguments(self, call: hf.InterfaceCall, layer: LayerContext) -> tuple[Tensor, Tensor, AttentionArguments]:
        """Keys, values and other arguments of `toeplens.encodings.attend`; a mask that is passed on is all there is."""
        context, features, q, k, v = layer.forward_context, layer.key_features, call.q, call.k, call.v
        mask = None if call.mask is None else _visible_keys(call.mask)
        dropped = 0 if features is None else features.shape[2] - k.shape[2]
        if dropped > 0:  # by a sliding-window cache: masked slots, whose features still count (in a running sum)
            if mask is None:
                mask = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=k.device)
                mask = mask.tril(k.shape[2] - q.shape[2])
            k, v, mask = F.pad(k, (0, 0, dropped, 0)), F.pad(v, (0, 0, dropped, 0)), F.pad(mask, (dropped, 0))
        count, positions = k.shape[2], context.positions
        k_positions, total = _tokens_in_cache(context.k_positions, count), context.k_positions.shape[-1]
        q_positions = self.encoding.to_positions(positions)
        is_same = k_positions.shape == positions.shape
        rows = None if count <= total else torch.arange(total - positions.shape[-1], total, device=positions.device)
        arguments: AttentionArguments = {
            "encoding": self.encoding,
            "q_positions": q_positions,
            "k_positions": q_positions if is_same else self.encoding.to_positions(k_positions),
            "scale": call.scale,
            "rows": rows,
            "key_features": features if features is None else F.pad(features, (0, 0, 0, count - features.shape[2])),
            "mask": mask,
            "causal": mask is None and call.is_causal(self.stack.side.causal),
            "document_ids": None if features is None else _sequence_ids(mask, q.shape[0], count),
            "padding": None if features is None else context.padding_of(count),
            "softcap": call.options.get("softcap"),
            "sinks": call.options.get("s_aux"),
        }
        return k, v, arguments


def _rotation_tables(encoding: Any, context: ForwardContext, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the new tokens as transformers passes them to layers; computed once per pass."""
    if (tables := context.tables.get(id(encoding))) is None:
        halves = encoding.tables(context.positions, encoding.frequencies_at(context.positions), dtype)
        cos, sin = (torch.cat((x, x), dim=-1).to(dtype) for x in halves)  # [1, N, d], or [B, 1, N, d]
        tables = (cos, sin) if context.positions.ndim == 1 else (cos.squeeze(1), sin.squeeze(1))
        context.tables[id(encoding)] = tables
    return tables


def _stored_context(tensor: Tensor | None, context: ForwardContext | None) -> ForwardContext | None:
    """The pass stored with a tensor: BLOOM's layers do not accept further arguments."""
    if tensor is None:
        return context
    if not hasattr(tensor, hf.CONTEXT):
        setattr(tensor, hf.CONTEXT, context)
    return getattr(tensor, hf.CONTEXT)


def _visible_keys(mask: Tensor) -> Tensor:
    """True where a key is visible. Raises `InputError` for a mask with partial values."""
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    if not torch.compiler.is_compiling() and bool((~visible & (mask > torch.finfo(mask.dtype).min / 4)).any()):
        raise InputError("attention_mask must contain only 0 (visible) and the lowest number of its dtype (masked).")
    return visible


def _sequence_ids(mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """Which packed sequence each key belongs to, for encodings that read earlier tokens."""
    if mask is None or mask.shape[-2] != keys:
        return None
    index = torch.arange(keys, device=mask.device)
    first = index.where(mask.any(dim=1), keys).amin(-1)  # the first key visible to each query
    starts = first.flip(-1).cummin(-1).values.flip(-1) >= index
    return starts.long().cumsum(-1).expand(batch, -1)


def _bloom_forward(module: Any, hidden_states: Tensor, residual: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """BLOOM's forward, without its linear biases."""
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    if (past := kwargs.get("layer_past")) is not None:
        k, v = past.update(k, v, module.layer_idx)
    rate = module.attention_dropout.p if module.training else 0.0
    arguments = {"scaling": module.inv_norm_factor, "dropout": rate, "is_causal": True, hf.CONTEXT: kwargs[hf.CONTEXT]}
    z, weights = hf.interface_table()[hf.IMPLEMENTATION](module, q, k, v, kwargs.get("attention_mask"), **arguments)
    out = module.dense(z.flatten(-2))
    return residual + F.dropout(out, p=module.hidden_dropout, training=module.training), weights


def replacement_forward(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """A replacement of the module's forward, for BLOOM, which does not use the attention interface; None for others."""
    return _bloom_forward if type(module).__name__ == "BloomAttention" else None


def register_attention() -> None:
    """Register the attention function ``toeplens`` with transformers, with the masks of fused attention."""
    transformers = hf.import_transformers()
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    transformers.AttentionInterface.register(hf.IMPLEMENTATION, attention)
    AttentionMaskInterface.register(hf.IMPLEMENTATION, sdpa_mask)


def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """A module's attention, with its encoding unless already applied, otherwise unchanged."""
    call = hf.interface_call(attention, True, module, *args, **kwargs)
    patch: AttentionPatch | None = module.__dict__.get(hf.INSTALLED)
    context: LayerContext | ForwardContext | None = call.context
    if patch is not None:
        if not isinstance(context, LayerContext):
            raise InputError(f"model: {type(module).__name__} does not pass on the arguments of its attention.")
        if not context.is_rotated:
            return patch.attend(call, context)
    forward_context = context.forward_context if isinstance(context, LayerContext) else context
    return plain_attention(call, needs_weights=forward_context is not None and forward_context.needs_weights)


def plain_attention(call: hf.InterfaceCall, needs_weights: bool = False) -> tuple[Tensor, Tensor | None]:
    """The module's original attention: torch's fused one, or its own eager one with a numeric mask, which also returns
    weights."""
    if call.module.__dict__.get(hf.PREVIOUS) == "sdpa" and not needs_weights:
        return replace(call, function=hf.interface_table()["sdpa"], context=None).run()
    mask, queries, keys = call.mask, call.q.shape[2], call.k.shape[2]
    if mask is None and queries > 1 and call.is_causal(default=False):
        mask = torch.ones(queries, keys, dtype=torch.bool, device=call.q.device).tril(keys - queries)[None, None]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=call.q.dtype).masked_fill(~mask, torch.finfo(call.q.dtype).min)
    return replace(call, function=hf.eager_function(call.module), mask=mask, context=None).run()
