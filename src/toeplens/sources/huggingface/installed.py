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
from toeplens.encodings import MLA, PositionalEncoding, Rotary, attend, attention_weights
from toeplens.encodings.attention import Told
from toeplens.encodings.base import HOOKS
from toeplens.encodings.shapes import Notes, Positions
from toeplens.ground import InputError, invalid
from toeplens.nn.attention import count_unpadded
from toeplens.sources.huggingface import model as hf

_EXTRAS = "toeplens_memory"  # attribute of a transformers cache


@dataclass
class CacheExtras:
    """What a cache does not hold of its keys: the name of their stack, positions, [B, M] or [1, M], and notes."""

    owner: str
    positions: Int[Tensor, "_ M"] | None = None
    padding: Bool[Tensor, "B M"] | None = None
    notes: dict[int, Notes] = field(default_factory=dict)

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply the change that the cache applies to its keys."""
        if self.positions is not None and len(self.positions) > 1:
            self.positions = change(self.positions)
        self.padding = None if self.padding is None else change(self.padding)
        self.notes = {layer: change(notes) for layer, notes in self.notes.items()}

    def crop(self, removed: int) -> None:
        """Remove the last ``removed`` tokens."""
        if removed and self.positions is not None:
            length = self.positions.shape[1] - removed
            self.positions = self.positions[:, :length]
            self.padding = None if self.padding is None else self.padding[:, :length]
            self.notes = {layer: notes[:, :, :length] for layer, notes in self.notes.items()}


class _WithExtras:
    """A transformers cache that applies every change of its keys to their extras, too."""

    def reorder_cache(self, beam_idx: Tensor) -> Any:
        self.__dict__[_EXTRAS].each(lambda x: x.index_select(0, beam_idx.to(x.device)))
        return super().reorder_cache(beam_idx)  # type: ignore[misc]

    def batch_repeat_interleave(self, repeats: int) -> Any:
        self.__dict__[_EXTRAS].each(lambda x: x.repeat_interleave(repeats, dim=0))
        return super().batch_repeat_interleave(repeats)  # type: ignore[misc]

    def batch_select_indices(self, indices: Tensor) -> Any:
        self.__dict__[_EXTRAS].each(lambda x: x[indices, ...])
        return super().batch_select_indices(indices)  # type: ignore[misc]

    def crop(self, *args: Any, **more: Any) -> Any:
        before = int(self.get_seq_length())  # type: ignore[attr-defined]
        made = super().crop(*args, **more)  # type: ignore[misc]
        self.__dict__[_EXTRAS].crop(before - int(self.get_seq_length()))  # type: ignore[attr-defined]
        return made

    def reset(self) -> Any:
        self.__dict__[_EXTRAS] = CacheExtras(self.__dict__[_EXTRAS].owner)
        return super().reset()  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_cache, (type(self).__mro__[2],), self.__dict__


@cache
def _with_extras(kind: type) -> type:
    return type(kind.__name__, (_WithExtras, kind), {"__module__": kind.__module__})


def _new_cache(kind: type) -> Any:
    made: Any = _with_extras(kind)
    return made.__new__(made)


def _attach(cache: Any, extras: CacheExtras) -> None:
    if not isinstance(cache, _WithExtras):
        cache.__class__ = _with_extras(type(cache))
    cache.__dict__[_EXTRAS] = extras


@dataclass(frozen=True)
class ForwardContext:
    """One pass of a stack of layers."""

    positions: Int[Tensor, "*B N"]  # of the new tokens: [N], or [B, N] if sequences differ
    k_positions: Int[Tensor, "*B M"]  # of all tokens so far: [M] or [B, M]
    padding: Bool[Tensor, "B M"] | None  # True where a token so far is padding: [B, M]; None if none is
    extras: CacheExtras  # of the cache's keys, including these tokens
    before: dict[int, Notes]  # the notes of each layer for earlier tokens
    tables: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # cosines and sines, by encoding
    weights: bool = False  # whether attention weights are requested

    def padding_of(self, count: int) -> Bool[Tensor, "B count"] | None:
        """True where one of ``count`` keys is padding; None if none is."""
        return None if self.padding is None else _last(self.padding, count)


def _last(x: Tensor, count: int) -> Tensor:
    """Of all tokens so far, those whose keys a layer's cache returns: the last ones, or all plus unused slots."""
    known = x.shape[-1]
    return x[..., known - count :] if count <= known else F.pad(x, (0, count - known))


def _begin(x: Tensor, given: Mapping[str, Any], owner: str, weights: bool) -> ForwardContext:
    """Start a pass of the new tokens x [B, N, ...], given the arguments of a stack. If it gets no positions, tokens are
    counted after those in the cache, without padding."""
    batch, tokens, device = x.shape[0], x.shape[1], x.device
    cache, mask, positions = (given.get(name) for name in ("past_key_values", "attention_mask", "position_ids"))
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
    held = 0 if extras.positions is None else extras.positions.shape[1]
    if held != past or extras.owner != owner:
        must = "be empty or filled by this model with its encoding installed"
        raise invalid("past_key_values", must, got=f"a cache of {past} tokens")
    padding = _padding(mask, extras.padding, past, x)
    if positions is not None and positions.ndim != 2:
        raise invalid("position_ids", "be [B, N]", got=f"a shape of {tuple(positions.shape)}")
    if positions is None and padding is not None:
        positions = count_unpadded(padding)[:, past:]
    if positions is None:
        positions = torch.arange(past, past + tokens, device=device).unsqueeze(0)
    whole = positions
    if extras.positions is not None:
        rows = max(len(extras.positions), len(positions))
        whole = torch.cat([x.expand(rows, -1) for x in (extras.positions, positions)], dim=1)
    kept = CacheExtras(owner, whole, padding, dict(extras.notes))
    if cache is not None:
        _attach(cache, kept)
    here, there = (x[0] if len(x) == 1 else x for x in (positions, whole))
    return ForwardContext(here, there, padding, kept, dict(extras.notes), weights=weights)


def _padding(mask: Any, before: Tensor | None, past: int, x: Tensor) -> Tensor | None:
    """True where a token so far is padding; None if none is. These are the zeros of a mask [B, M]; in a mask by queries
    and keys (of a static cache) the new tokens that do not see themselves."""
    batch, tokens, device = x.shape[0], x.shape[1], x.device
    if isinstance(mask, dict):
        mask = next((each for each in mask.values() if isinstance(each, Tensor)), None)
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4) or mask.shape[-1] < past + tokens:
        return None
    if mask.ndim == 2:
        padding = mask[:, : past + tokens].to(device) == 0
    else:
        own = mask[:, 0, -tokens:, past : past + tokens].diagonal(dim1=-2, dim2=-1)
        new = ~own if own.dtype == torch.bool else own != 0
        known = torch.zeros(batch, past, dtype=torch.bool, device=device) if before is None else before
        padding = torch.cat((known, new.expand(batch, -1)), dim=1)
    return padding if torch.compiler.is_compiling() or bool(padding.any()) else None


@dataclass(frozen=True)
class Side:
    """One side of a model: a stack and its self-attention, layer by layer."""

    stack: nn.Module  # the module that runs the layers
    modules: list[nn.Module]  # their attention
    heads: int  # sizes of a layer's attention
    head_dim: int
    d_model: int
    max_len: int  # number of positions that a table must have
    tables: list[nn.Module]  # modules that look up positions in a table at the input
    turns: list[str | None]  # how each layer's rotation pairs dimensions, if it is a pure rotation of queries and keys
    reached: list[nn.Module | None]  # by attention module, itself or one around it, with arguments of the stack
    causal: bool  # whether attention is causal

    def build(self, name: str | Sequence[str], options: dict[str, Any]) -> PositionalEncoding:
        """The encoding for this side; ``pairing`` and ``bidirectional`` default to the model's own."""
        sizes = {"d_model": self.d_model, "num_heads": self.heads, "head_dim": self.head_dim, "max_len": self.max_len}
        parts = encodings.named(name)
        if len(parts) == 1:
            options = self._own(parts[0]) | options
        else:
            options = options | {part: self._own(part) | dict(options.get(part, {})) for part in parts}
        made = encodings.build(name, **sizes, **options)
        if isinstance(made, MLA) or made.query_dim != self.head_dim:
            heads = f"heads of {type(self.modules[0]).__name__} have {self.head_dim}"
            raise InputError(f"encoding: {name!r} needs queries and keys of {made.query_dim} dimensions, but {heads}.")
        return made

    def _own(self, name: str) -> dict[str, Any]:
        pairing = next((each for each in self.turns if each), None)
        own = {"pairing": pairing, "bidirectional": not self.causal or None}
        return {option: value for option, value in own.items() if value and option in encodings.options(name)}


class StackPatch:
    """A module that runs layers one after another: a decoder-only model's trunk, or one side of an encoder-decoder.

    Arguments
        encoding  the encoding of its first layer; its vectors are added to the token embeddings
        asks      whether it uses the attention interface; if not, the family's own forward is replaced
        name      of the encoding
    """

    def __init__(self, side: Side, encoding: PositionalEncoding, asks: bool, name: str) -> None:
        self.side, self.encoding, self.asks, self.name = side, encoding, asks, name
        module: Any = side.stack
        self.now: ForwardContext | None = None
        self.owner = token_hex(8)
        self._signature = inspect.signature(module.forward)
        self._vectors = "inputs_embeds" if "inputs_embeds" in self._signature.parameters else "hidden_states"
        self._hooks = [
            module.register_forward_pre_hook(self._begin, with_kwargs=True),
            module.register_forward_hook(self._end, with_kwargs=True, always_call=True),
            *(table.register_forward_hook(_nothing) for table in side.tables),
        ]
        self._waiting: Positions | None = None  # of tokens whose embedding has not yet been called in this pass
        self._embedding: nn.Module | None = None  # the embedding with our hook
        if encoding.overrides("embed") and "input_ids" in self._signature.parameters:
            self._hook_embedding(module.get_input_embeddings())

    def remove(self) -> None:
        """Restore the stack."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.asks and module.config._attn_implementation != hf.NAME:
            said = f"attention was set to {module.config._attn_implementation!r} after an encoding was installed"
            raise InputError(f"model: {said}. Uninstall the encoding first.")
        given = dict(zip(self._signature.parameters, args, strict=False)) | kwargs
        tokens = given.get("input_ids")
        x = given.get(self._vectors) if tokens is None else tokens
        if not isinstance(x, Tensor):
            return args, kwargs
        weights = given.get("output_attentions", getattr(module.config, "output_attentions", False))
        now = self.now = _begin(x, given, self.owner, bool(weights))
        if self.encoding.overrides("embed"):
            positions = self.encoding.place(now.positions)
            if tokens is None:
                given[self._vectors] = self.encoding.embed(x, positions)
            else:  # the model changes the token embeddings further
                if module.get_input_embeddings() is not self._embedding:  # it was replaced
                    self._hook_embedding(module.get_input_embeddings())
                self._waiting = positions
        if any(self.side.reached):
            given[hf.CONTEXT] = now
        return (), given

    def _hook_embedding(self, embedding: nn.Module) -> None:
        self._embedding = embedding
        self._hooks.append(embedding.register_forward_hook(self._embed))

    def _embed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Add position vectors to the token embeddings, at the first call in a pass."""
        if self._waiting is None:
            return None
        positions, self._waiting = self._waiting, None
        return self.encoding.embed(output, positions)

    def _end(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        now, self.now = kwargs.get(hf.CONTEXT, self.now), None
        unused, self._waiting = self._waiting is not None, None
        if unused and output is not None and not hf.OBSERVER.get().skips:
            raise InputError("model: it does not call its token embedding, so no vectors can be added.")
        cache = getattr(output, "past_key_values", None)
        if cache is not None and now is not None and hasattr(cache, "get_seq_length"):
            _attach(cache, now.extras)


def _nothing(module: nn.Module, args: Any, output: Any) -> Any:
    """A position table's vectors, set to 0."""
    return torch.zeros_like(output)


@dataclass(frozen=True)
class LayerContext:
    """The context of a pass for one attention module: the pass, the notes of all tokens so far, and whether the
    module's own function applies the whole encoding, as a rotation of queries and keys."""

    now: ForwardContext
    notes: Tensor | None
    turned: bool

    @property
    def positions(self) -> Int[Tensor, "_B N"]:
        """Positions of the new tokens."""
        return self.now.positions.view(-1, self.now.positions.shape[-1])


class AttentionPatch:
    """Removes position before an attention module, and applies the encoding in its attention.

    It receives the pass through the layers' arguments and stores nothing of it. So a layer that is recomputed in the
    backward pass (gradient checkpointing) finds its own pass, whatever else was run in between.
    """

    def __init__(self, stack: StackPatch, layer: int, encoding: PositionalEncoding) -> None:
        self.stack, self.layer, self.encoding = stack, layer, encoding
        self._told: ForwardContext | None = None  # the pass, if it only reaches the module around this one
        self.module = module = stack.side.modules[layer]
        around = stack.side.reached[layer]
        module.__dict__[hf.INSTALLED] = self
        self._hooks = [module.register_forward_pre_hook(self._before, with_kwargs=True)]
        if around is not None and around is not module:
            self._hooks.append(around.register_forward_pre_hook(self._tell, with_kwargs=True))
        if (forward := own_forward(module)) is not None:
            module.forward = partial(forward, module)

    def _rotates(self) -> bool:
        """Whether the module's own rotation function, which must pair halves, can apply all that the encoding does: it
        must rotate all heads alike, by angles independent of the length. Keys are then cached after the rotation."""
        encoding = self.encoding
        return (
            isinstance(encoding, Rotary)
            and not any(encoding.overrides(hook) for hook in HOOKS if hook not in ("embed", "rotate"))
            and encoding.turns_alike
            and not (encoding.length_dependent or encoding.first)
            and encoding.axes == 1
            and self.stack.side.turns[self.layer] == encoding.pairing == "half"
        )

    def remove(self) -> None:
        """Restore the module."""
        del self.module.__dict__[hf.INSTALLED]
        self.module.__dict__.pop("forward", None)
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Compute the content's notes, and pass the identity rotation, or the encoding's own, to the module."""
        kwargs = dict(kwargs)
        now = kwargs.pop(hf.CONTEXT, None) or self._told or _written_on(kwargs.get("alibi"), self.stack.now)
        if now is None:
            raise InputError("model: a layer was called outside of the model's forward pass.")
        hidden = next((kwargs[name] for name in ("hidden_states", "x") if name in kwargs), args[0] if args else None)
        given: Any = kwargs.get("position_embeddings")
        encoding: Any = self.encoding
        turned = isinstance(given, tuple) and self._rotates()
        turned = turned and given[0].shape[-1] == 2 * encoding.frequencies.shape[-1]  # the angles of both halves
        if turned:
            kwargs["position_embeddings"] = _tables(encoding, now, given[0].dtype)
        elif given is not None:
            kwargs["position_embeddings"] = torch.ones_like(given[0]), torch.zeros_like(given[1])
        if (around := kwargs.get("relative_position_embeddings")) is not None:  # Wav2Vec2-Conformer's
            still = torch.stack((torch.ones_like(around[0]), torch.zeros_like(around[0])))
            kwargs["relative_position_embeddings"] = still if (module.position_embeddings_type == "rotary") else around
        kwargs[hf.CONTEXT] = LayerContext(now, self._note(hidden, now), turned)
        return args, kwargs

    def _tell(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._told = kwargs.get(hf.CONTEXT)

    def _note(self, hidden: Any, now: ForwardContext) -> Tensor | None:
        """The notes of all tokens so far; a recomputed layer does not add to a cache twice."""
        if not isinstance(hidden, Tensor):
            return None
        padding, before = now.padding_of(now.positions.shape[-1]), now.before.get(self.layer)
        before = None if before is None or not before.shape[2] else before
        content = hidden if padding is None else hidden.masked_fill(padding.unsqueeze(-1), 0.0)
        notes = self.encoding.note(content, before)
        if notes is None:
            return None
        notes = notes if before is None else torch.cat((before, notes), dim=2)
        now.extras.notes[self.layer] = notes.detach()
        return notes

    def attend(self, call: hf.AttentionInputs, here: LayerContext) -> tuple[Tensor, Tensor | None]:
        """Attention by the encoding, [B, N, H, d], and its weights if the pass requests them."""
        k, v, arguments = self.arguments(call, here)
        out = attend(call.q, k, v, dropout=call.how.get("dropout") or 0.0, **arguments)
        weights = attention_weights(call.q, k, **arguments) if here.now.weights else None
        return out.transpose(1, 2).contiguous(), weights

    def arguments(self, call: hf.AttentionInputs, here: LayerContext) -> tuple[Tensor, Tensor, Told]:
        """Keys, values and other arguments of `toeplens.encodings.attend`; a mask that is passed on is all there is."""
        now, notes, q, k, v = here.now, here.notes, call.q, call.k, call.v
        mask = None if call.mask is None else _visible(call.mask)
        dropped = 0 if notes is None else notes.shape[2] - k.shape[2]
        if dropped > 0:  # by a sliding-window cache: masked slots, whose notes still count (in a running sum)
            if mask is None:
                mask = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=k.device)
                mask = mask.tril(k.shape[2] - q.shape[2])
            k, v, mask = F.pad(k, (0, 0, dropped, 0)), F.pad(v, (0, 0, dropped, 0)), F.pad(mask, (dropped, 0))
        count, positions = k.shape[2], now.positions
        k_positions, known = _last(now.k_positions, count), now.k_positions.shape[-1]
        places = self.encoding.place(positions)
        rows = None if count <= known else torch.arange(known - positions.shape[-1], known, device=positions.device)
        arguments: Told = {
            "encoding": self.encoding,
            "q_positions": places,
            "k_positions": places if k_positions.shape == positions.shape else self.encoding.place(k_positions),
            "scale": call.scale,
            "rows": rows,
            "notes": notes if notes is None else F.pad(notes, (0, 0, 0, count - notes.shape[2])),
            "mask": mask,
            "causal": mask is None and call.causal(self.stack.side.causal),
            "texts": None if notes is None else _texts(mask, q.shape[0], count),
            "padding": None if notes is None else now.padding_of(count),
            "softcap": call.how.get("softcap"),
            "sinks": call.how.get("s_aux"),
        }
        return k, v, arguments


def _tables(encoding: Any, now: ForwardContext, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the new tokens as transformers passes them to layers; computed once per pass."""
    if (known := now.tables.get(id(encoding))) is None:
        made = encoding.tables(now.positions, encoding.frequencies_at(now.positions), dtype)
        cos, sin = (torch.cat((x, x), dim=-1).to(dtype) for x in made)  # [1, N, d], or [B, 1, N, d]
        known = (cos, sin) if now.positions.ndim == 1 else (cos.squeeze(1), sin.squeeze(1))
        now.tables[id(encoding)] = known
    return known


def _written_on(tensor: Tensor | None, now: ForwardContext | None) -> ForwardContext | None:
    """The pass stored with a tensor: BLOOM's layers do not accept further arguments."""
    if tensor is None:
        return now
    if not hasattr(tensor, hf.CONTEXT):
        setattr(tensor, hf.CONTEXT, now)
    return getattr(tensor, hf.CONTEXT)


def _visible(mask: Tensor) -> Tensor:
    """True where a key is visible. Raises `InputError` for a mask with partial values."""
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    if not torch.compiler.is_compiling() and bool((~visible & (mask > torch.finfo(mask.dtype).min / 4)).any()):
        raise InputError("attention_mask must contain only 0 (visible) and the lowest number of its dtype (masked).")
    return visible


def _texts(mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """Which packed sequence each key belongs to, for encodings that read earlier tokens."""
    if mask is None or mask.shape[-2] != keys:
        return None
    index = torch.arange(keys, device=mask.device)
    first = index.where(mask.any(dim=1), keys).amin(-1)  # the first key visible to each query
    begins = first.flip(-1).cummin(-1).values.flip(-1) >= index
    return begins.long().cumsum(-1).expand(batch, -1)


def _bloom(module: Any, hidden_states: Tensor, residual: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
    """BLOOM's forward, without its linear biases."""
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    if (past := given.get("layer_past")) is not None:
        k, v = past.update(k, v, module.layer_idx)
    rate = module.attention_dropout.p if module.training else 0.0
    how = {"scaling": module.inv_norm_factor, "dropout": rate, "is_causal": True, hf.CONTEXT: given[hf.CONTEXT]}
    z, weights = hf.table()[hf.NAME](module, q, k, v, given.get("attention_mask"), **how)
    out = module.dense(z.flatten(-2))
    return residual + F.dropout(out, p=module.hidden_dropout, training=module.training), weights


def own_forward(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """A replacement of the module's forward, for BLOOM, which does not use the attention interface; None for others."""
    return _bloom if type(module).__name__ == "BloomAttention" else None


def register() -> None:
    """Register the attention function ``toeplens`` with transformers, with the masks of fused attention."""
    transformers = hf.library()
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    transformers.AttentionInterface.register(hf.NAME, attention)
    AttentionMaskInterface.register(hf.NAME, sdpa_mask)


def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """A module's attention, with its encoding unless already applied, otherwise unchanged."""
    call = hf.inputs_of(attention, True, module, *args, **kwargs)
    patch: AttentionPatch | None = module.__dict__.get(hf.INSTALLED)
    here: LayerContext | ForwardContext | None = call.context
    if patch is not None:
        if not isinstance(here, LayerContext):
            raise InputError(f"model: {type(module).__name__} does not pass on the arguments of its attention.")
        if not here.turned:
            return patch.attend(call, here)
    now = here.now if isinstance(here, LayerContext) else here
    return plain_attention(call, weights=now is not None and now.weights)


def plain_attention(call: hf.AttentionInputs, weights: bool = False) -> tuple[Tensor, Tensor | None]:
    """The module's original attention: torch's fused one, or its own eager one with a numeric mask, which also returns
    weights."""
    if call.module.__dict__.get(hf.BEFORE) == "sdpa" and not weights:
        return replace(call, function=hf.table()["sdpa"], context=None).run()
    mask, queries, keys = call.mask, call.q.shape[2], call.k.shape[2]
    if mask is None and queries > 1 and call.causal(default=False):
        mask = torch.ones(queries, keys, dtype=torch.bool, device=call.q.device).tril(keys - queries)[None, None]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=call.q.dtype).masked_fill(~mask, torch.finfo(call.q.dtype).min)
    return replace(call, function=hf.eager_function(call.module), mask=mask, context=None).run()
