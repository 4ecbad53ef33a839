"""One attention module of a host, with the encoding that acts in it."""

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

Table = tuple[Tensor, Tensor]  # cosines and sines, as transformers hands them to its layers


def is_a_turn(encoding: PositionalEncoding, turns: str | None) -> bool:
    """Whether a function that turns queries and keys can do all that this encoding does to them.

    Then its keys are cached turned, and each is turned once. The function must pair halves (``turns``); the encoding
    must turn all heads alike, by angles that the length of a text does not change.
    """
    if not (isinstance(encoding, Rotary) and encoding.turns_alike and not encoding.length_dependent):
        return False
    if any(encoding.overrides(hook) for hook in HOOKS if hook not in ("embed", "rotate")) or encoding.axes > 1:
        return False
    return turns == "half" and encoding.pairing == "half" and not encoding.first


def fits(encoding: Any, given: Any) -> bool:
    """Whether a host's function is given the angles of both halves, as many as the encoding has."""
    return isinstance(given, tuple) and given[0].shape[-1] == 2 * encoding.frequencies.shape[-1]


def our_table(encoding: Any, now: Pass, given: Table) -> Table:
    """Our cosines and sines of the new tokens, in the form of those ``given``; made once a pass and encoding."""
    if (known := now.tables.get(id(encoding))) is not None:
        return known
    positions = now.positions
    made = encoding.tables(positions, encoding.frequencies_at(positions), given[0].dtype)
    cos, sin = (torch.cat((x, x), dim=-1).to(given[0].dtype) for x in made)  # [1, N, d], or [B, 1, N, d]
    table = (cos, sin) if positions.ndim == 1 else (cos.squeeze(1), sin.squeeze(1))
    now.tables[id(encoding)] = table
    return table


def neutral(given: Table) -> Table:
    """A rotation that turns nothing."""
    return torch.ones_like(given[0]), torch.zeros_like(given[1])


def _bloom(module: Any, hidden_states: Tensor, residual: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
    """BLOOM's, whose linear biases are left out."""
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
    """The forward of a family that needs one of ours; None for all others."""
    return _FORWARDS.get(type(module).__name__)


_HIDDEN = ("hidden_states", "x")


class Side(Protocol):
    """What a seat knows of its stack: the pass at hand, whether attention is causal where a module does not say, and
    the encoding's name."""

    now: Pass | None
    causal: bool
    name: str


@dataclass(frozen=True)
class Here:
    """What a module's attention is told beside queries and keys.

    now     the pass
    notes   of all tokens so far
    turned  whether the module's own function turns queries and keys as the encoding does, which is then all
    """

    now: Pass
    notes: Tensor | None
    turned: bool


class Seat:
    """Stands between an attention module and attention: position is taken out before, and put in by ours.

    A pass comes to it through the layers' arguments, so that a layer that is worked again in the backward pass
    (gradient checkpointing) finds its own, whatever else was run in between; and it keeps nothing of a pass.

    Arguments
        layer   of the stack, from 0
        around  the module itself or one around it, which is given the pass; None if none is
        turns   how the module's own rotation pairs dimensions, where a turn of its is one of its queries and keys
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
        self.told: Pass | None = None  # where the pass ends at the module around
        module.__dict__[SEAT] = self
        self._hooks = [module.register_forward_pre_hook(self._before, with_kwargs=True)]
        if around not in (None, module):
            assert around is not None
            self._hooks.append(around.register_forward_pre_hook(self._tell, with_kwargs=True))
        if (forward := forward_of(module)) is not None:
            module.forward = partial(forward, module)

    @property
    def encoding(self) -> PositionalEncoding:
        """What acts here."""
        return self._encoding

    @encoding.setter
    def encoding(self, encoding: PositionalEncoding) -> None:
        self._encoding, self._is_a_turn = encoding, is_a_turn(encoding, self.turns)

    def leave(self, module: nn.Module) -> None:
        """Give the module back as it was."""
        del module.__dict__[SEAT]
        module.__dict__.pop("forward", None)
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The content's notes, and a rotation that turns nothing."""
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
        """The notes of all tokens so far; those of a cache are not added to twice where a layer is worked again."""
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
        """What the module asks transformers' attention interface for, [B, N, H, d], by the encoding.

        A mask that the model gives says alone which keys are seen; causal attention has none where it needs none. The
        weights are beside it where the pass was asked for them.
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
        """Keys, values and what attention is told beside them."""
        now, notes = here.now, here.notes
        mask = None if mask is None else _visible(mask)
        if notes is not None and k.shape[2] < notes.shape[2]:  # a cache that keeps a window of keys
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
    """The factor of q . k that a module gives the attention interface."""
    return q.shape[-1] ** -0.5 if how.get("scaling") is None else how["scaling"]


def _written_on(tensor: Tensor | None, now: Pass | None) -> Pass | None:
    """The pass that a tensor came with first: BLOOM's layers are given no other argument than their own."""
    if tensor is None:
        return now
    if not hasattr(tensor, PASS):
        setattr(tensor, PASS, now)
    return getattr(tensor, PASS)


def _visible(mask: Tensor) -> Tensor:
    """True where a key may be seen. Raises `InputError` for a mask that hides in part."""
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    if not torch.compiler.is_compiling() and bool((~visible & (mask > torch.finfo(mask.dtype).min / 4)).any()):
        raise InputError("attention_mask must have only 0 and the lowest number.")
    return visible


def _texts(mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """Which text each key is of, for what looks at tokens before it: no token sees one before its text begins."""
    if mask is None or mask.shape[-2] != keys:
        return None
    index = torch.arange(keys, device=mask.device)
    first = index.where(mask.any(dim=1), keys).amin(-1)  # the first key that each query sees
    begins = first.flip(-1).cummin(-1).values.flip(-1) >= index
    return begins.long().cumsum(-1).expand(batch, -1)


def _with_what_went(
    k: Tensor, v: Tensor, mask: Tensor | None, queries: int, went: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for keys that are no longer there and are not seen, whose notes still count (a convolution's, a sum's)."""
    if mask is None:
        mask = torch.ones(1, 1, queries, k.shape[2], dtype=torch.bool, device=k.device).tril(k.shape[2] - queries)
    return F.pad(k, (0, 0, went, 0)), F.pad(v, (0, 0, went, 0)), F.pad(mask, (went, 0), value=False)


BEFORE = "toeplens_before"  # where an attention module carries the name of what its attention went by


@dataclass(frozen=True)
class Call:
    """A module asked for attention."""

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
    """Every call of our function, as it comes, for a while."""
    calls: list[Call] = []
    token = _CALLS.set(calls)
    try:
        yield calls
    finally:
        _CALLS.reset(token)


def register() -> None:
    """Make our functions known to transformers, under the name ``toeplens``; masks are those of fused attention."""
    transformers = library()
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    transformers.AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of a module: by its encoding, where it has one that is not done by now, else as it was."""
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
    if calls is not None and (seat is None or BEFORE in vars(module)):  # none that a family's own forward asks
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
    """The module's attention as it was: torch's fused one, or, also for its weights, its own eager one by a mask of
    numbers."""
    if module.__dict__.get(BEFORE) == "sdpa" and not weights:
        return library().AttentionInterface._global_mapping["sdpa"](module, query, key, value, mask, **kwargs)
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", False) if kwargs.get("is_causal") is None else kwargs["is_causal"]
    if mask is None and causal and queries > 1:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)[None, None]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return eager_function(module)(module, query, key, value, mask, **kwargs)
