"""One attention module of a host, with the encoding that acts in it."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings import PositionalEncoding, attend
from toeplens.hosts.families import forward_of
from toeplens.hosts.passes import Pass
from toeplens.hosts.turning import neutral, our_table, turned_by_host

SEAT = "toeplens_seat"  # where an attention module carries it
PASS = "toeplens_pass"  # the argument in which layers hand a pass on
_HIDDEN = ("hidden_states", "x")


class Side(Protocol):
    """What a seat knows of its stack: the pass at hand, and whether attention is causal where a module does not say."""

    now: Pass | None
    causal: bool


class Seat:
    """Stands between an attention module and attention: position is taken out before, and put in by ours.

    A pass comes to it through the layers' arguments, so that a layer that is worked again in the backward pass
    (gradient checkpointing) finds its own, whatever else was run in between.

    ``turned`` is whether the module's own function has turned queries and keys as the encoding does, which is then all.

    Arguments
        layer    of the stack, from 0
        around   the module itself or one around it, which is given the pass; None if none is
        pairing  how the module's own rotation pairs dimensions; None if it has none
    """

    def __init__(
        self,
        module: nn.Module,
        stack: Side,
        layer: int,
        encoding: PositionalEncoding,
        *,
        around: nn.Module | None,
        pairing: str | None,
    ) -> None:
        self.stack, self.layer, self.encoding = stack, layer, encoding
        self.now: Pass | None = None
        self.notes: Tensor | None = None
        self.pairing = pairing
        self.turned = False
        module.__dict__[SEAT] = self
        self._hooks = [module.register_forward_pre_hook(self._before, with_kwargs=True)]
        self._told = around not in (None, module)
        if around is not None and self._told:
            self._hooks.append(around.register_forward_pre_hook(self._tell, with_kwargs=True))
        if (forward := forward_of(module)) is not None:
            module.forward = partial(forward, module, self)

    def leave(self, module: nn.Module) -> None:
        """Give the module back as it was."""
        del module.__dict__[SEAT]
        module.__dict__.pop("forward", None)
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The content's notes, and a rotation that turns nothing."""
        kwargs = dict(kwargs)
        if not self._told:
            self.now = kwargs.pop(PASS, None) or _written_on(kwargs.get("alibi"), self.stack.now)
        hidden = next((kwargs[name] for name in _HIDDEN if name in kwargs), args[0] if args else None)
        self.notes = self._note(hidden)
        given = kwargs.get("position_embeddings")
        self.turned = self.now is not None and turned_by_host(self.encoding, self.pairing, given)
        if given is not None:
            kwargs["position_embeddings"] = (
                our_table(self.encoding, self.now, given) if self.turned else neutral(given)  # type: ignore[arg-type]
            )
        if (turned := kwargs.get("relative_position_embeddings")) is not None:  # Wav2Vec2-Conformer's
            still = torch.stack((torch.ones_like(turned[0]), torch.zeros_like(turned[0])))
            kwargs["relative_position_embeddings"] = still if _rotates(module) else turned
        return args, kwargs

    def _tell(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.now = kwargs.get(PASS) or self.stack.now

    def _note(self, hidden: Any) -> Tensor | None:
        """The notes of all tokens so far; those of a cache are not added to twice where a layer is worked again."""
        if self.now is None or not isinstance(hidden, Tensor):
            return None
        padding, before = self.now.new_padding, self.now.before.get(self.layer)
        content = hidden if padding is None else hidden.masked_fill(padding.unsqueeze(-1), 0.0)
        notes = self.encoding.note(content, before)
        if notes is None:
            return None
        notes = notes if before is None else torch.cat((before, notes), dim=2)
        self.now.memory.notes[self.layer] = notes.detach()
        return notes

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any
    ) -> tuple[Tensor, None]:
        """What the module asks transformers' attention interface for, [B, N, H, d], by the encoding."""
        assert self.now is not None
        if self.notes is not None and k.shape[2] < self.notes.shape[2]:  # a cache that keeps a window of keys
            k, v, mask = _with_what_went(k, v, mask, q.shape[2], self.notes.shape[2] - k.shape[2])
        count = k.shape[2]
        positions = self.now.positions
        k_positions, texts = self.now.keys(count)
        here = self.encoding.place(positions)
        there = here if k_positions.shape == positions.shape else self.encoding.place(k_positions)
        causal = getattr(module, "is_causal", self.stack.causal) if how.get("is_causal") is None else how["is_causal"]
        out = attend(
            q,
            k,
            v,
            encoding=self.encoding,
            q_positions=here,
            k_positions=there,
            scale=q.shape[-1] ** -0.5 if how.get("scaling") is None else how["scaling"],
            rows=self.now.rows(count),
            notes=self._last(count),
            mask=mask if mask is None or mask.dtype == torch.bool else mask == 0,
            causal=bool(causal),
            texts=texts,
            softcap=how.get("softcap"),
            sinks=how.get("s_aux"),
            dropout=how.get("dropout") or 0.0,
        )
        return out.transpose(1, 2).contiguous(), None

    def _last(self, count: int) -> Tensor | None:
        notes = self.notes
        return notes if notes is None else F.pad(notes, (0, 0, 0, count - notes.shape[2]))


def _rotates(module: Any) -> bool:
    return module.position_embeddings_type == "rotary"


def _written_on(tensor: Tensor | None, now: Pass | None) -> Pass | None:
    """The pass that a tensor came with first: BLOOM's layers are given no other argument than their own."""
    if tensor is None:
        return now
    if not hasattr(tensor, PASS):
        setattr(tensor, PASS, now)
    return getattr(tensor, PASS)


def _with_what_went(
    k: Tensor, v: Tensor, mask: Tensor | None, queries: int, went: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for keys that are no longer there and are not seen, whose notes still count (a convolution's, a sum's)."""
    if mask is None:
        mask = torch.ones(1, 1, queries, k.shape[2], dtype=torch.bool, device=k.device).tril(k.shape[2] - queries)
    mask = mask if mask.dtype == torch.bool else mask == 0
    return F.pad(k, (0, 0, went, 0)), F.pad(v, (0, 0, went, 0)), F.pad(mask, (went, 0), value=False)
