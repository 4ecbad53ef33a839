"""Queries and keys of an attention module that is given one token in every place: what position alone makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.products import Followed, Products, four


class Observer(Protocol):
    """Who is told of what happens in attention modules."""

    @property
    def interface(self) -> Callable[..., Any]:
        """Is called for attention: with the eager function, its module, q, k, v, mask, whether causal, and the rest."""
        ...

    @property
    def rotated(self) -> Callable[[tuple[Any, ...], dict[str, Any], Any], None]:
        """Is called after a function that applies a rotation: what it was given, and what it gave."""
        ...


ACTIVE: ContextVar[Observer | None] = ContextVar("toeplens_watch", default=None)


class _Seen(Exception):
    """Queries and keys are there; no more is needed."""


class _Trial:
    """An observer that keeps queries and keys, of the first sequence, and ends the module there."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.found: tuple[Tensor, Tensor] | None = None

    def interface(self, eager: Any, module: nn.Module, query: Tensor, key: Tensor, *rest: Any) -> Any:
        self._keep(query, key)

    def rotated(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        pass

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
    sequences = 0 if axis else 1

    def replaced(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.shape != states.shape or not x.is_floating_point():
            return x
        if x.shape[sequences] > 1 and bool((x == x.narrow(sequences, 0, 1)).all()):  # not what tokens are made of
            return x
        return x.narrow(axis, x.shape[axis] - 1, 1).expand_as(x).clone()

    def given(x: Any) -> Any:
        if isinstance(x, Tensor | tuple):
            return tree_map(replaced, x)
        return x if isinstance(x, nn.Module) else copy.deepcopy(x)  # a cache that it writes into is the trial's own

    trial = _Trial(batch)
    token = ACTIVE.set(trial)
    try:
        with torch.random.fork_rng(devices=[]), Products(lambda: True, trial.written_out):
            module.forward(*map(given, args), **{name: given(x) for name, x in kwargs.items()})
    except Exception as error:  # whatever a module may raise: it was not seen
        if out_of_memory(error):
            raise
    finally:
        ACTIVE.reset(token)
    return trial.found
