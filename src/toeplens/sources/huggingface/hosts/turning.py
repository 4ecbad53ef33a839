"""A rotation of ours by the host's own hand: its function that turns queries and keys, given our angles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from toeplens.encodings import PositionalEncoding, Rotary
from toeplens.encodings.base import HOOKS
from toeplens.sources.huggingface.hosts.passes import Pass

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
