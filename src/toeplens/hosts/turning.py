"""A rotation of ours by the host's own hand: its function that turns queries and keys, given our angles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from toeplens.encodings import PositionalEncoding, Rotary
from toeplens.encodings.base import HOOKS
from toeplens.hosts.passes import Pass

Table = tuple[Tensor, Tensor]  # cosines and sines, as transformers hands them to its layers


def turned_by_host(encoding: PositionalEncoding, turns: str | None, given: Any) -> bool:
    """Whether the host's function, given our cosines and sines, does all that this encoding does to queries and keys.

    Then its keys are cached turned, and each is turned once. The function must pair halves (``turns``), and be given
    both halves' angles, as many as the encoding has; the encoding must turn all heads alike, by angles that the length
    of a text does not change.
    """
    if not (isinstance(encoding, Rotary) and encoding.turns_alike and not encoding.length_dependent):
        return False
    if any(encoding.overrides(hook) for hook in HOOKS if hook not in ("embed", "rotate")) or encoding.axes > 1:
        return False
    if turns != "half" or encoding.pairing != "half" or encoding.first or not isinstance(given, tuple):
        return False
    cos = given[0]
    half = cos.shape[-1] // 2
    return half == encoding.frequencies.shape[-1] and cos.shape[-1] == 2 * half


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
