"""Entries of dictionaries that are changed for the length of a pass, and put back after the last such pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import nn

from toeplens.sources.huggingface.model import configs_of

# (mapping, name, value): ``value(before)`` is put at ``mapping[name]``
Entry = tuple[dict[str, Any], str, Callable[[Any], Any]]

_ABSENT = object()
_LOCK = threading.Lock()


@dataclass
class _Loan:
    mapping: dict[str, Any]  # held, so that its id stays its own
    before: Any
    passes: int = 0


_LOANS: dict[tuple[int, str], _Loan] = {}
_ALONE: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()


@contextmanager
def patched(model: nn.Module, *changes: Iterable[Entry]) -> Iterator[None]:
    """A model in evaluation mode without a cache of keys, and what else is changed; afterwards all is as it was.

    One such pass of a model runs at a time: those of other threads wait. Passes of other models do not, and may change
    what they share with it: the first makes the change, the last takes it back. What is put there must therefore serve
    whoever comes by, inside a pass or not.
    """
    with _LOCK:
        lock = _ALONE.setdefault(model, threading.RLock())
    taken: list[tuple[int, str]] = []
    with lock:
        try:
            for mapping, name, value in chain(_evaluation(model), *changes):
                key = (id(mapping), name)
                with _LOCK:
                    if key not in _LOANS:
                        before = mapping.get(name, _ABSENT)
                        mapping[name] = value(before)
                        _LOANS[key] = _Loan(mapping, before)
                    _LOANS[key].passes += 1
                taken.append(key)
            yield
        finally:
            for key in reversed(taken):
                _give_back(key)


def asking_for(model: nn.Module, name: str) -> Iterator[Entry]:
    """What makes a model ask for its attention by this name."""
    for config in configs_of(model):
        yield vars(config), "_attn_implementation_internal", lambda before: name


def _give_back(key: tuple[int, str]) -> None:
    with _LOCK:
        loan = _LOANS[key]
        loan.passes -= 1
        if loan.passes == 0:
            del _LOANS[key]
            if loan.before is _ABSENT:
                del loan.mapping[key[1]]
            else:
                loan.mapping[key[1]] = loan.before


def _evaluation(model: nn.Module) -> Iterator[Entry]:
    """Evaluation mode in every module, no cache in every configuration, outputs by name, rotations without history."""
    for module in model.modules():
        yield vars(module), "training", lambda before: False
        yield from _without_history(module)
    for config in configs_of(model):
        if "use_cache" in vars(config):
            yield vars(config), "use_cache", lambda before: False
        if vars(config).get("return_dict") is False:
            yield vars(config), "return_dict", lambda before: True


def _without_history(module: nn.Module) -> Iterator[Entry]:
    """A rotation whose frequencies grow with the longest sequence read so far reads each as the first one.

    That is transformers' `dynamic` scaling, in models with one rotation or one for each type of layer. What it held
    before is put back afterwards.
    """
    kinds: Any = getattr(module, "rope_type", None)
    kinds = kinds if isinstance(kinds, dict) else {"": kinds}
    prefixes = [f"{name}_" if name else "" for name, kind in kinds.items() if "dynamic" in str(kind)]
    if not prefixes or not hasattr(module, "original_max_seq_len"):
        return
    own, forward = cast("Any", module), module.forward

    def fresh(*args: Any, **kwargs: Any) -> Any:
        for prefix in prefixes:
            setattr(own, f"{prefix}max_seq_len_cached", own.original_max_seq_len)
            frequencies = getattr(own, f"{prefix}original_inv_freq").to(getattr(own, f"{prefix}inv_freq").device)
            own.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
        return forward(*args, **kwargs)

    for prefix in prefixes:
        yield module._buffers, f"{prefix}inv_freq", lambda before: before
        yield vars(module), f"{prefix}max_seq_len_cached", lambda before: before
    yield vars(module), "attention_scaling", lambda before: before
    yield vars(module), "forward", lambda before: fresh
