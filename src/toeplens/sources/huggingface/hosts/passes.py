"""Token positions in a pass of a host, and the extra content of its key cache: positions and notes of the keys."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings import PositionalEncoding
from toeplens.encodings.shapes import Notes, Positions
from toeplens.ground import InputError, invalid
from toeplens.sources.huggingface.interface import NOBODY, OBSERVER

PASS = "toeplens_pass"  # argument by which layers pass on the state of a pass, and a module to its attention
_KEPT = "toeplens_memory"  # attribute of a transformers cache


@dataclass
class Memory:
    """Data of the keys in a cache: positions, [B, M] or [1, M] for all, and each layer's notes [B, H, M, c].

    ``owner`` is the name of their stack.
    """

    owner: str
    positions: Int[Tensor, "_ M"] | None = None
    padding: Bool[Tensor, "B M"] | None = None
    notes: dict[int, Notes] = field(default_factory=dict)

    def each(self, change: Any) -> None:
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


class _Remembering:
    """A transformers cache that applies every change of its keys to their extra data, too."""

    def reorder_cache(self, beam_idx: Tensor) -> Any:
        self.__dict__[_KEPT].each(lambda x: x.index_select(0, beam_idx.to(x.device)))
        return super().reorder_cache(beam_idx)  # type: ignore[misc]

    def batch_repeat_interleave(self, repeats: int) -> Any:
        self.__dict__[_KEPT].each(lambda x: x.repeat_interleave(repeats, dim=0))
        return super().batch_repeat_interleave(repeats)  # type: ignore[misc]

    def batch_select_indices(self, indices: Tensor) -> Any:
        self.__dict__[_KEPT].each(lambda x: x[indices, ...])
        return super().batch_select_indices(indices)  # type: ignore[misc]

    def crop(self, *args: Any, **more: Any) -> Any:
        before = int(self.get_seq_length())  # type: ignore[attr-defined]
        made = super().crop(*args, **more)  # type: ignore[misc]
        self.__dict__[_KEPT].crop(before - int(self.get_seq_length()))  # type: ignore[attr-defined]
        return made

    def reset(self) -> Any:
        self.__dict__[_KEPT] = Memory(self.__dict__[_KEPT].owner)
        return super().reset()  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _remembering, (type(self).__mro__[2],), self.__dict__


_CLASSES: dict[type, type] = {}


def _class_of(kind: type) -> type:
    if kind not in _CLASSES:
        _CLASSES[kind] = type(kind.__name__, (_Remembering, kind), {"__module__": kind.__module__})
    return _CLASSES[kind]


def _remembering(kind: type) -> Any:
    """An empty cache of this class, as created by pickle and copy."""
    made: Any = _class_of(kind)
    return made.__new__(made)


def remember(cache: Any, memory: Memory) -> None:
    """Attach the extra data of its keys to a transformers cache."""
    if not isinstance(cache, _Remembering):
        cache.__class__ = _class_of(type(cache))
    cache.__dict__[_KEPT] = memory


def remembered(cache: Any) -> Memory | None:
    """The extra data of a cache's keys, if a host filled it."""
    return None if cache is None else cache.__dict__.get(_KEPT)


@dataclass(frozen=True)
class Pass:
    """One pass of a stack of layers.

    positions    of the new tokens: [N], or [B, N] if sequences differ
    k_positions  of all tokens so far: [M] or [B, M]
    padding      True where a token so far is padding: [B, M]; None if none is
    memory       extra data of the cache's keys, including these tokens
    before       the notes of each layer for earlier tokens
    tables       cosines and sines of the new tokens, by encoding
    weights      whether attention weights are requested
    """

    positions: Int[Tensor, "*B N"]
    k_positions: Int[Tensor, "*B M"]
    padding: Bool[Tensor, "B M"] | None
    memory: Memory
    before: dict[int, Notes]
    tables: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    weights: bool = False

    @property
    def new_padding(self) -> Bool[Tensor, "B N"] | None:
        """True where a new token is padding."""
        return None if self.padding is None else self.padding[:, -self.positions.shape[-1] :]

    def padding_of(self, count: int) -> Bool[Tensor, "B count"] | None:
        """True where one of ``count`` keys, those of `keys`, is padding; None if none is."""
        if self.padding is None:
            return None
        known = self.padding.shape[-1]
        return F.pad(self.padding, (0, count - known)) if count > known else self.padding[:, known - count :]

    def keys(self, count: int) -> Int[Tensor, "*B count"]:
        """Positions of the keys that a layer's cache returns: the last ones, or all plus unused slots."""
        known = self.k_positions.shape[-1]
        return (
            self.k_positions[..., max(0, known - count) :]
            if count <= known
            else F.pad(self.k_positions, (0, count - known))
        )

    def rows(self, count: int) -> Int[Tensor, "N"] | None:
        """Indices of the new tokens among ``count`` keys; None if they are the last ones."""
        known, new = self.k_positions.shape[-1], self.positions.shape[-1]
        return None if count <= known else torch.arange(known - new, known, device=self.positions.device)


def begin(
    batch: int,
    tokens: int,
    device: torch.device,
    *,
    owner: str,
    position_ids: Tensor | None,
    attention_mask: Any,
    cache: Any,
    weights: bool = False,
) -> Pass:
    """Start a pass of ``tokens`` new tokens per sequence.

    Positions are those passed in; otherwise tokens are counted after those in the cache, without padding.
    """
    past = 0 if cache is None else int(cache.get_seq_length())
    _check_batch(batch, tokens, past, attention_mask, cache)
    memory = remembered(cache) or Memory(owner)
    held = 0 if memory.positions is None else memory.positions.shape[1]
    if past and (held != past or memory.owner != owner):
        raise InputError(
            "past_key_values must be empty or filled by this model with its encoding installed, got a cache of "
            f"{past} tokens."
        )
    if not past:
        memory = Memory(owner)
    padding = _padding(attention_mask, memory.padding, batch, past, tokens, device)
    positions = position_ids
    if positions is not None and positions.ndim != 2:
        raise invalid("position_ids", "be [B, N]", got=f"a shape of {tuple(positions.shape)}")
    if positions is None and padding is not None:
        positions = ((~padding).long().cumsum(1) - 1).clamp(min=0)[:, past:]
    if positions is None:
        positions = torch.arange(past, past + tokens, device=device).unsqueeze(0)
    whole = positions
    if memory.positions is not None:
        rows = max(len(memory.positions), len(positions))
        whole = torch.cat([x.expand(rows, -1) for x in (memory.positions, positions)], dim=1)
    kept = Memory(owner, whole, padding, dict(memory.notes))
    if cache is not None:
        remember(cache, kept)
    here, there = (x[0] if len(x) == 1 else x for x in (positions, whole))
    return Pass(here, there, padding, kept, dict(memory.notes), weights=weights)


def _check_batch(batch: int, tokens: int, past: int, mask: Any, cache: Any) -> None:
    """Raise `InputError` for a cache of another batch size, and for a mask that does not fit the tokens."""
    if isinstance(mask, Tensor) and mask.ndim == 2 and (len(mask) != batch or mask.shape[1] < past + tokens):
        raise invalid(
            "attention_mask",
            f"have shape [{batch}, {past + tokens}], including the tokens in the cache",
            got=f"shape {list(mask.shape)}",
        )
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)
    keys = getattr(layers[0], "keys", None) if past and layers else None
    if isinstance(keys, Tensor) and keys.numel() and len(keys) != batch:
        raise invalid("past_key_values", f"have {batch} sequences", len(keys))


def _padding(
    mask: Any, before: Tensor | None, batch: int, past: int, tokens: int, device: torch.device
) -> Tensor | None:
    """True where a token so far is padding; None if none is.

    In a mask [B, M] these are the zeros. In a mask by queries and keys (of a static cache) these are the new tokens
    that do not see themselves, in addition to the padding known ``before``.
    """
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
    if torch.compiler.is_compiling():
        return padding
    return padding if bool(padding.any()) else None


_VECTORS = ("inputs_embeds", "hidden_states")


class Stack:
    """A module that runs layers one after another: a decoder-only model's trunk, or one side of an encoder-decoder.

    Arguments
        module    the stack
        encoding  the encoding of its first layer; its vectors are added to the token embeddings
        tables    the modules that look up positions in a table, whose vectors are set to 0
        carries   whether arguments of the stack are passed on to its layers
        causal    whether its attention is causal if a module does not say
        asks      the required name of its attention implementation; None if the family's own forward is replaced
        name      of the encoding
    """

    def __init__(
        self,
        module: Any,
        encoding: PositionalEncoding,
        tables: list[nn.Module],
        *,
        carries: bool,
        causal: bool,
        asks: str | None,
        name: str,
    ) -> None:
        self.encoding, self.carries, self.causal, self.asks, self.name = encoding, carries, causal, asks, name
        self.now: Pass | None = None
        self.owner = token_hex(8)
        self._signature = inspect.signature(module.forward)
        self._vectors = next(name for name in _VECTORS if name in self._signature.parameters)
        self._hooks = [
            module.register_forward_pre_hook(self._begin, with_kwargs=True),
            module.register_forward_hook(self._end, with_kwargs=True, always_call=True),
            *(table.register_forward_hook(_nothing) for table in tables),
        ]
        self._waiting: Positions | None = None  # of tokens whose embedding has not yet been called in this pass
        self._embedding: nn.Module | None = None  # the embedding with our hook
        if encoding.overrides("embed") and "input_ids" in self._signature.parameters:
            self._hear(module.get_input_embeddings())

    def leave(self) -> None:
        """Restore the stack."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.asks is not None and module.config._attn_implementation != self.asks:
            raise InputError(
                f"model: attention was set to {module.config._attn_implementation!r} after an encoding was installed. "
                "Uninstall the encoding first."
            )
        given = dict(zip(self._signature.parameters, args, strict=False)) | kwargs
        tokens = given.get("input_ids")
        x = given.get(self._vectors) if tokens is None else tokens
        if not isinstance(x, Tensor):
            return args, kwargs
        now = begin(
            x.shape[0],
            x.shape[1],
            x.device,
            owner=self.owner,
            position_ids=given.get("position_ids"),
            attention_mask=given.get("attention_mask"),
            cache=given.get("past_key_values"),
            weights=bool(given.get("output_attentions", getattr(module.config, "output_attentions", False))),
        )
        self.now = now
        if self.encoding.overrides("embed"):
            positions = self.encoding.place(now.positions)
            if tokens is None:
                given[self._vectors] = self.encoding.embed(x, positions)
            else:  # the model changes the token embeddings further
                if module.get_input_embeddings() is not self._embedding:  # it was replaced
                    self._hear(module.get_input_embeddings())
                self._waiting = positions
        if self.carries:
            given[PASS] = now
        return (), given

    def _hear(self, embedding: nn.Module) -> None:
        self._embedding = embedding
        self._hooks.append(embedding.register_forward_hook(self._embed))

    def _embed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Add position vectors to the token embeddings, at the first call in a pass."""
        if self._waiting is None:
            return None
        positions, self._waiting = self._waiting, None
        return self.encoding.embed(output, positions)

    def _end(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        now, self.now = kwargs.get(PASS, self.now), None
        unused, self._waiting = self._waiting is not None, None
        if unused and output is not None and OBSERVER.get() is NOBODY:  # who observes may leave layers out
            raise InputError("model: it does not call its token embedding, so no vectors can be added.")
        cache = getattr(output, "past_key_values", None)
        if cache is not None and now is not None and hasattr(cache, "get_seq_length"):
            remember(cache, now.memory)


def _nothing(module: nn.Module, args: Any, output: Any) -> Any:
    """A position table's vectors, set to 0."""
    return torch.zeros_like(output)
