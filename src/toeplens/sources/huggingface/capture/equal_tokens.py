"""Queries and keys of an attention module given one token in every place: what position alone makes of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.capture.products import Followed, Products, four
from toeplens.sources.huggingface.capture.rotation import Rotation, as_complex, turn
from toeplens.sources.huggingface.interface import OBSERVER, Observer
from toeplens.sources.huggingface.model import tolerance

_ANGLE = 2.0**-23  # models form their angles in float32, whatever their own dtype


class _Seen(Exception):
    """Queries and keys are there; no more is needed."""


class _Trial(Observer):
    """An observer that keeps queries and keys, of the first sequence, and ends the module there."""

    pieces = True

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.found: tuple[Tensor, Tensor] | None = None

    def attend(
        self, function: Any, from_table: bool, module: nn.Module, query: Tensor, key: Tensor, *_: Any, **more: Any
    ) -> Any:
        self._keep(query, key)

    def written_out(self, made: Followed, values: Tensor, out: Tensor) -> None:
        self._keep(four(made.left, self.batch), four(made.right, self.batch).transpose(-2, -1))

    def _keep(self, q: Tensor, k: Tensor) -> None:
        self.found = q[:1].clone(), k[:1].clone()
        raise _Seen


def of_equal_tokens(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], states: Tensor, axis: int, batch: int
) -> tuple[Tensor, Tensor] | None:
    """q [1, H, N, d] and k [1, G, N, d] of the first sequence, as they enter their product; None without one.

    The module is run up to its product before its own call, on the same but for its states: those of the last token are
    in every place. Whatever differs from place to place then is the position's, whoever made it.

    Arguments
        states  what the module is given, with the tokens along ``axis``; all of that shape is changed alike if it is
                made of tokens, and so differs from sequence to sequence
    """
    found = _tried(module, args, kwargs, states, axis, 1)
    return found if found is not None or batch == 1 else _tried(module, args, kwargs, states, axis, batch)


def _tried(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], states: Tensor, axis: int, batch: int
) -> tuple[Tensor, Tensor] | None:
    """`of_equal_tokens`, of the states of so many sequences: with less than all, what else it is given may not fit."""
    sequences = 0 if axis else 1

    def replaced(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.shape != states.shape or not x.is_floating_point():
            return x
        some = x.narrow(sequences, 0, min(batch, x.shape[sequences]))
        if x.shape[sequences] > 1 and bool((x == x.narrow(sequences, 0, 1)).all()):  # not what tokens are made of
            return some
        return some.narrow(axis, x.shape[axis] - 1, 1).expand_as(some).clone()

    def given(x: Any) -> Any:
        if isinstance(x, Tensor | tuple):
            return tree_map(replaced, x)
        return x if isinstance(x, nn.Module) else copy.deepcopy(x)  # a cache that it writes into is the trial's own

    trial = _Trial(batch)
    token = OBSERVER.set(trial)
    try:
        with torch.random.fork_rng(devices=[]), Products(lambda: True, trial.written_out):
            module.forward(*map(given, args), **{name: given(x) for name, x in kwargs.items()})
    except Exception as error:  # whatever a module may raise: it was not seen
        if out_of_memory(error):
            raise
    finally:
        OBSERVER.reset(token)
    return trial.found


def stays(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B G N d"],
    rotation: Rotation | None,
    positions: Int[Tensor, "_B N"],
    rounding: torch.dtype,
) -> bool:
    """Whether queries and keys of equal tokens are the same at every position, but for a rotation.

    A number that a query is multiplied by may depend on its position: it stays where it is, and its logits go with it.
    In their own dtype, float32 at least.
    """
    allowed = max(tolerance(q.dtype), tolerance(rounding))
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    if rotation is not None:
        allowed += _ANGLE * float((positions.max() * rotation.frequencies.abs()).max())
        q, k = (_turned_back(x, rotation, positions[:1]) for x in (q, k))
    q = torch.nn.functional.normalize(q, dim=-1)
    q = torch.where((q == 0).all(-1, keepdim=True), q[:, :, -1:], q)  # multiplied by 0
    return all(bool((x - x[:, :, -1:]).abs().max() <= allowed * x.abs().max()) for x in (q, k) if x.numel())


def _turned_back(x: Float[Tensor, "B H N d"], rotation: Rotation, positions: Int[Tensor, "1 N"]) -> Tensor:
    turns = turn(-positions.unsqueeze(-1) * rotation.frequencies).to(x.dtype.to_complex())
    made, back = x.clone(), as_complex(x, rotation.after) * turns.unsqueeze(1)
    made[..., rotation.after[:, 0]], made[..., rotation.after[:, 1]] = back.real, back.imag
    return made
