"""Where the tokens of a host's pass stand, and what its key cache must keep beside keys: their places and notes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from toeplens.encodings.shapes import Notes
from toeplens.ground import InputError

_KEPT = "toeplens_memory"  # where a cache of transformers carries it


@dataclass
class Memory:
    """What belongs to the keys in a cache: positions, [B, M] or [1, M] for all, and each layer's notes [B, H, M, c]."""

    positions: Int[Tensor, "_ M"] | None = None
    notes: dict[int, Notes] = field(default_factory=dict)

    def each(self, change: Any) -> None:
        """Change all of it as the cache changes its keys."""
        if self.positions is not None and len(self.positions) > 1:
            self.positions = change(self.positions)
        self.notes = {layer: change(notes) for layer, notes in self.notes.items()}

    def crop(self, removed: int) -> None:
        """Forget the last ``removed`` tokens."""
        if removed and self.positions is not None:
            length = self.positions.shape[1] - removed
            self.positions = self.positions[:, :length]
            self.notes = {layer: notes[:, :, :length] for layer, notes in self.notes.items()}


class _Remembering:
    """A cache of transformers that does to what belongs to its keys what it does to them."""

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
        self.__dict__[_KEPT] = Memory()
        return super().reset()  # type: ignore[misc]


_CLASSES: dict[type, type] = {}


def remember(cache: Any, memory: Memory) -> None:
    """Have a cache of transformers carry what belongs to its keys."""
    kind = type(cache)
    if not issubclass(kind, _Remembering):
        if kind not in _CLASSES:
            _CLASSES[kind] = type(kind.__name__, (_Remembering, kind), {"__module__": kind.__module__})
        cache.__class__ = _CLASSES[kind]
    cache.__dict__[_KEPT] = memory


def remembered(cache: Any) -> Memory | None:
    """What belongs to a cache's keys, if it was filled by a host."""
    return None if cache is None else cache.__dict__.get(_KEPT)


@dataclass(frozen=True)
class Pass:
    """One pass of a stack of layers.

    positions    of the new tokens: [N], or [B, N] where sequences differ
    k_positions  of all tokens so far: [M] or [B, M]
    padding      True where a token so far is padding: [B, M]; None if none is
    texts        which text each token is of: [B, M]; None if each sequence is one
    memory       what is kept beside the cache's keys, these tokens' included
    before       the notes of each layer before these tokens
    tables       cosines and sines of the new tokens, by encoding
    """

    positions: Int[Tensor, "*B N"]
    k_positions: Int[Tensor, "*B M"]
    padding: Bool[Tensor, "B M"] | None
    texts: Int[Tensor, "B M"] | None
    memory: Memory
    before: dict[int, Notes]
    tables: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def new_padding(self) -> Bool[Tensor, "B N"] | None:
        """True where a new token is padding."""
        return None if self.padding is None else self.padding[:, -self.positions.shape[-1] :]

    def keys(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Positions and texts of the keys that a layer's cache gives: the last ones, or all and room for more."""
        known = self.k_positions.shape[-1]
        if count <= known:
            return self.k_positions[..., known - count :], None if self.texts is None else self.texts[
                :, known - count :
            ]
        return F.pad(self.k_positions, (0, count - known)), None if self.texts is None else F.pad(
            self.texts, (0, count - known), value=-1
        )

    def rows(self, count: int) -> Int[Tensor, "N"] | None:
        """Which of ``count`` keys the new tokens are; None for the last ones."""
        known, new = self.k_positions.shape[-1], self.positions.shape[-1]
        return None if count <= known else torch.arange(known - new, known, device=self.positions.device)


def begin(
    batch: int,
    tokens: int,
    device: torch.device,
    *,
    position_ids: Tensor | None,
    attention_mask: Any,
    cache: Any,
) -> Pass:
    """What a pass of ``tokens`` new tokens a sequence begins with.

    Positions are those given; else tokens are counted without padding, after those in the cache. Positions that begin
    again inside a sequence are those of texts packed one after another.
    """
    past = 0 if cache is None else int(cache.get_seq_length())
    memory = remembered(cache)
    if past and (memory is None or memory.positions is None or memory.positions.shape[1] != past):
        raise InputError(
            f"past_key_values: a cache of {past} tokens was given that was not filled by this model since its encoding "
            "was installed; begin with an empty one."
        )
    memory = memory or Memory()
    padding = _padding(attention_mask, batch, past, tokens, device)
    positions = position_ids
    if positions is not None and positions.ndim != 2:
        raise InputError(f"position_ids: a shape of {tuple(positions.shape)} was given; it must be [B, N].")
    if positions is None and padding is not None:
        positions = ((~padding).long().cumsum(1) - 1).clamp(min=0)[:, past:]
    if positions is None:
        positions = torch.arange(past, past + tokens, device=device).unsqueeze(0)
    texts = _texts(positions) if position_ids is not None and not past else None
    whole = (
        positions
        if memory.positions is None
        else torch.cat((_as(memory.positions, positions), _as(positions, memory.positions)), 1)
    )
    kept = Memory(whole, dict(memory.notes))
    if cache is not None:
        remember(cache, kept)
    here, there = (x[0] if len(x) == 1 else x for x in (positions, whole))
    return Pass(here, there, padding, texts, kept, dict(memory.notes))


def _as(x: Tensor, other: Tensor) -> Tensor:
    """With as many rows."""
    return x.expand(max(len(x), len(other)), -1)


def _padding(mask: Any, batch: int, past: int, tokens: int, device: torch.device) -> Tensor | None:
    """True where a token so far is padding, from a mask [B, M]; None where none is, or the mask is of another kind."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < past + tokens:
        return None
    padding = mask[:, : past + tokens].to(device) == 0
    if torch.compiler.is_compiling():
        return padding
    return padding if bool(padding.any()) else None


def _texts(positions: Tensor) -> Tensor | None:
    """Which text each token is of, where positions begin again; transformers tells packed texts so too."""
    if positions.shape[1] < 2 or torch.compiler.is_compiling():
        return None
    steps = positions.diff(dim=1) != 1
    begins = steps & (positions[:, 1:] == 0) & (positions[:, :-1] != 0)
    return F.pad(begins.long().cumsum(1), (1, 0)) if bool(begins.any()) else None
