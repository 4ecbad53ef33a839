"""One attention module of a host, with its installed encoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings import PositionalEncoding, Rotary, attend, attention_weights
from toeplens.encodings.attention import AttentionParts, Told, attention_parts
from toeplens.encodings.base import HOOKS
from toeplens.ground import InputError
from toeplens.sources.huggingface.hosts.passes import PASS, Pass
from toeplens.sources.huggingface.interface import eager_function, table
from toeplens.sources.huggingface.model import NAME, SEAT, library

Table = tuple[Tensor, Tensor]  # cosines and sines, as transformers passes them to its layers


def is_a_turn(encoding: PositionalEncoding, turns: str | None) -> bool:
    """Whether the module's own rotation function can apply everything that this encoding does to queries and keys.

    Keys are then cached after the rotation, and each is rotated once. The function must pair halves (``turns``); the
    encoding must rotate all heads alike, by angles that do not depend on the length.
    """
    if not (isinstance(encoding, Rotary) and encoding.turns_alike and not encoding.length_dependent):
        return False
    if any(encoding.overrides(hook) for hook in HOOKS if hook not in ("embed", "rotate")) or encoding.axes > 1:
        return False
    return turns == "half" and encoding.pairing == "half" and not encoding.first


def fits(encoding: Any, given: Any) -> bool:
    """Whether the module's function receives the angles of both halves, as many as the encoding has."""
    return isinstance(given, tuple) and given[0].shape[-1] == 2 * encoding.frequencies.shape[-1]


def our_table(encoding: Any, now: Pass, given: Table) -> Table:
    """Cosines and sines of the new tokens in the format of ``given``; computed once per pass and encoding."""
    if (known := now.tables.get(id(encoding))) is not None:
        return known
    positions = now.positions
    made = encoding.tables(positions, encoding.frequencies_at(positions), given[0].dtype)
    cos, sin = (torch.cat((x, x), dim=-1).to(given[0].dtype) for x in made)  # [1, N, d], or [B, 1, N, d]
    table = (cos, sin) if positions.ndim == 1 else (cos.squeeze(1), sin.squeeze(1))
    now.tables[id(encoding)] = table
    return table


def neutral(given: Table) -> Table:
    """The identity rotation."""
    return torch.ones_like(given[0]), torch.zeros_like(given[1])


def _bloom(module: Any, hidden_states: Tensor, residual: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
    """BLOOM's forward, without its linear biases."""
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    if (past := given.get("layer_past")) is not None:
        k, v = past.update(k, v, module.layer_idx)
    mask = given.get("attention_mask")
    rate = module.attention_dropout.p if module.training else 0.0
    how = {"scaling": module.inv_norm_factor, "dropout": rate, "is_causal": True, PASS: given[PASS]}
    z, weights = table()[NAME](module, q, k, v, mask, **how)
    out = module.dense(z.flatten(-2))
    return residual + F.dropout(out, p=module.hidden_dropout, training=module.training), weights


_FORWARDS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {"BloomAttention": _bloom}


def forward_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """A replacement of the module's forward, for families that need one; None for all others."""
    return _FORWARDS.get(type(module).__name__)


_HIDDEN = ("hidden_states", "x")


class Side(Protocol):
    """What a seat needs from its stack: the current pass, whether attention is causal if a module does not say, and the
    encoding's name."""

    now: Pass | None
    causal: bool
    name: str


@dataclass(frozen=True)
class Here:
    """The state of a pass for one attention module.

    now     the pass
    notes   of all tokens so far
    turned  whether the module's own function applies the whole encoding, as a rotation of queries and keys
    """

    now: Pass
    notes: Tensor | None
    turned: bool


class Seat:
    """Removes position before an attention module, and applies the encoding in its attention.

    It receives the pass through the layers' arguments and stores nothing of it. So a layer that is recomputed in the
    backward pass (gradient checkpointing) finds its own pass, whatever else was run in between.

    Arguments
        layer   of the stack, from 0
        around  the module itself or one around it, which receives the pass; None if there is none
        turns   how the module's own rotation pairs dimensions, if it is a pure rotation of queries and keys
    """

    def __init__(
        self,
        module: nn.Module,
        stack: Side,
        layer: int,
        encoding: PositionalEncoding,
        *,
        around: nn.Module | None,
        turns: str | None,
    ) -> None:
        self.stack, self.layer, self.turns = stack, layer, turns
        self.encoding = encoding
        self.told: Pass | None = None  # the pass, if it only reaches the module around this one
        module.__dict__[SEAT] = self
        self._hooks = [module.register_forward_pre_hook(self._before, with_kwargs=True)]
        if around not in (None, module):
            assert around is not None
            self._hooks.append(around.register_forward_pre_hook(self._tell, with_kwargs=True))
        if (forward := forward_of(module)) is not None:
            module.forward = partial(forward, module)

    @property
    def encoding(self) -> PositionalEncoding:
        return self._encoding

    @encoding.setter
    def encoding(self, encoding: PositionalEncoding) -> None:
        self._encoding, self._is_a_turn = encoding, is_a_turn(encoding, self.turns)

    def leave(self, module: nn.Module) -> None:
        """Restore the module."""
        del module.__dict__[SEAT]
        module.__dict__.pop("forward", None)
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Compute the content's notes, and pass the identity rotation to the module."""
        kwargs = dict(kwargs)
        now = kwargs.pop(PASS, None) or self.told or _written_on(kwargs.get("alibi"), self.stack.now)
        if now is None:
            raise InputError("model: a layer was called outside of the model's forward pass.")
        hidden = next((kwargs[name] for name in _HIDDEN if name in kwargs), args[0] if args else None)
        given = kwargs.get("position_embeddings")
        turned = self._is_a_turn and fits(self.encoding, given)
        if given is not None:
            kwargs["position_embeddings"] = our_table(self.encoding, now, given) if turned else neutral(given)
        if (around := kwargs.get("relative_position_embeddings")) is not None:  # Wav2Vec2-Conformer's
            still = torch.stack((torch.ones_like(around[0]), torch.zeros_like(around[0])))
            kwargs["relative_position_embeddings"] = still if (module.position_embeddings_type == "rotary") else around
        kwargs[PASS] = Here(now, self._note(hidden, now), turned)
        return args, kwargs

    def _tell(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.told = kwargs.get(PASS)

    def _note(self, hidden: Any, now: Pass) -> Tensor | None:
        """The notes of all tokens so far; a recomputed layer does not add to a cache twice."""
        if not isinstance(hidden, Tensor):
            return None
        padding, before = now.new_padding, now.before.get(self.layer)
        before = None if before is None or not before.shape[2] else before
        content = hidden if padding is None else hidden.masked_fill(padding.unsqueeze(-1), 0.0)
        notes = self.encoding.note(content, before)
        if notes is None:
            return None
        notes = notes if before is None else torch.cat((before, notes), dim=2)
        now.memory.notes[self.layer] = notes.detach()
        return notes

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, here: Here, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention by the encoding, in the format of transformers' attention interface, [B, N, H, d].

        If the model passes a mask, only the mask determines which keys are visible; causal attention may not need one.
        Attention weights are returned, too, if the pass requests them.
        """
        k, v, told = self._told(module, q, k, v, mask, here, how)
        out = attend(q, k, v, dropout=how.get("dropout") or 0.0, **told)
        return out.transpose(1, 2).contiguous(), attention_weights(q, k, **told) if here.now.weights else None

    def parts(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, here: Here, **how: Any
    ) -> AttentionParts:
        """The parts of the same attention."""
        k, _, told = self._told(module, q, k, v, mask, here, how)
        return attention_parts(q, k, **told)

    def _told(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, here: Here, how: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Told]:
        """Keys, values and the other arguments of attention."""
        now, notes = here.now, here.notes
        mask = None if mask is None else _visible(mask)
        if notes is not None and k.shape[2] < notes.shape[2]:  # a sliding-window cache
            k, v, mask = _with_what_went(k, v, mask, q.shape[2], notes.shape[2] - k.shape[2])
        count, positions = k.shape[2], now.positions
        k_positions = now.keys(count)
        places = self.encoding.place(positions)
        causal = getattr(module, "is_causal", self.stack.causal) if how.get("is_causal") is None else how["is_causal"]
        told: Told = {
            "encoding": self.encoding,
            "q_positions": places,
            "k_positions": places if k_positions.shape == positions.shape else self.encoding.place(k_positions),
            "scale": scale_of(q, how),
            "rows": now.rows(count),
            "notes": notes if notes is None else F.pad(notes, (0, 0, 0, count - notes.shape[2])),
            "mask": mask,
            "causal": bool(causal) and mask is None,
            "texts": None if notes is None else _texts(mask, q.shape[0], count),
            "padding": None if notes is None else now.padding_of(count),
            "softcap": how.get("softcap"),
            "sinks": how.get("s_aux"),
        }
        return k, v, told


def scale_of(q: Tensor, how: Mapping[str, Any]) -> float:
    """The factor of q . k that a module passes to the attention interface."""
    return q.shape[-1] ** -0.5 if how.get("scaling") is None else how["scaling"]


def _written_on(tensor: Tensor | None, now: Pass | None) -> Pass | None:
    """The pass stored with a tensor: BLOOM's layers do not accept further arguments."""
    if tensor is None:
        return now
    if not hasattr(tensor, PASS):
        setattr(tensor, PASS, now)
    return getattr(tensor, PASS)


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


def _with_what_went(
    k: Tensor, v: Tensor, mask: Tensor | None, queries: int, went: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Masked slots for keys that left the cache but whose notes still count (in a convolution or a running sum)."""
    if mask is None:
        mask = torch.ones(1, 1, queries, k.shape[2], dtype=torch.bool, device=k.device).tril(k.shape[2] - queries)
    return F.pad(k, (0, 0, went, 0)), F.pad(v, (0, 0, went, 0)), F.pad(mask, (went, 0), value=False)


BEFORE = "toeplens_before"  # attribute of an attention module: its previous attention implementation


@dataclass(frozen=True)
class Call:
    """A call of the attention function by a module."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    kwargs: dict[str, Any]
    out: Tensor


_CALLS: ContextVar[list[Call] | None] = ContextVar("toeplens_calls", default=None)


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Record every call of the toeplens attention function."""
    calls: list[Call] = []
    token = _CALLS.set(calls)
    try:
        yield calls
    finally:
        _CALLS.reset(token)


def register() -> None:
    """Register the attention function ``toeplens`` with transformers, with the masks of fused attention."""
    transformers = library()
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    transformers.AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """A module's attention, with its encoding unless already applied, otherwise unchanged."""
    seat: Seat | None = module.__dict__.get(SEAT)
    told: Here | Pass | None = kwargs.pop(PASS, None)
    if seat is not None and not isinstance(told, Here):
        raise InputError(f"model: {type(module).__name__} does not pass on the arguments of its attention.")
    if seat is not None and isinstance(told, Here) and not told.turned:
        made = seat.attend(module, query, key, value, attention_mask, told, **kwargs)
    else:
        now = told.now if isinstance(told, Here) else told
        weights = now is not None and now.weights
        made = plain(module, query, key, value, attention_mask, weights=weights, **kwargs)
    calls = None if torch.compiler.is_compiling() else _CALLS.get()
    if calls is not None and (seat is None or BEFORE in vars(module)):  # not those of a replaced forward
        calls.append(Call(module, query, key, value, attention_mask, kwargs, made[0]))
    return made


def plain(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    weights: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The module's original attention: torch's fused one, or its own eager one with a numeric mask, which also returns
    weights."""
    if module.__dict__.get(BEFORE) == "sdpa" and not weights:
        return library().AttentionInterface._global_mapping["sdpa"](module, query, key, value, mask, **kwargs)
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", False) if kwargs.get("is_causal") is None else kwargs["is_causal"]
    if mask is None and causal and queries > 1:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)[None, None]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return eager_function(module)(module, query, key, value, mask, **kwargs)
