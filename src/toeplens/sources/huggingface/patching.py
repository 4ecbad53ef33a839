"""Observers of a pass, and the attention functions that call them.

Whoever patches transformers' attention interface, one function takes the place of each entry. So passes that trace
attention and passes that ablate heads can run in several threads at once, each with its own observer.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import nn

from toeplens.ground import InputError
from toeplens.sources.huggingface.model import configs_of, functions_of, library, namespaces_of

# (mapping, name, value): ``value(before)`` is stored at ``mapping[name]``
Entry = tuple[dict[str, Any], str, Callable[[Any], Any]]

_ABSENT = object()
_LOCK = threading.Lock()


@dataclass
class _Loan:
    mapping: dict[str, Any]  # kept alive, so that its id stays unique
    before: Any
    passes: int = 0


_LOANS: dict[tuple[int, str], _Loan] = {}
_ALONE: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()


@contextmanager
def patched(model: nn.Module, *changes: Iterable[Entry]) -> Iterator[None]:
    """Put a model in evaluation mode without a key cache and apply other changes; restores everything afterwards.

    Only one such pass of a model runs at a time: other threads wait. Passes of other models do not wait, and may change
    what they share with it: the first one makes the change, the last one reverts it. So patched values must work for
    any caller, inside a pass or not.
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
    """Make a model use the attention implementation of this name."""
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
    """Evaluation mode in every module, no cache in any configuration, dict outputs, rotations without history."""
    for module in model.modules():
        yield vars(module), "training", lambda before: False
        yield from _without_history(module)
    for config in configs_of(model):
        if "use_cache" in vars(config):
            yield vars(config), "use_cache", lambda before: False
        if vars(config).get("return_dict") is False:
            yield vars(config), "return_dict", lambda before: True


def _without_history(module: nn.Module) -> Iterator[Entry]:
    """Make a rotation whose frequencies grow with the longest sequence so far treat each sequence as the first.

    This is transformers' `dynamic` scaling, in models with one rotation or one per type of layer. Its previous state is
    restored afterwards.
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


_ORIGINAL = "toeplens_original"  # attribute of a patched function: the original
_EAGER = "eager_attention_forward"  # suffix of the name of a model's own eager attention


class Observer:
    """Is called on events in the passes of its thread; this base class changes nothing.

    pieces  whether several attention calls of a module with the same queries and keys but other values are combined
            into one; if not, they are an error
    skips   whether its passes may leave out modules
    """

    pieces = False
    skips = False
    asked: tuple[weakref.ref[Any], ...] = ()  # a module, queries and keys

    def attend(self, function: Callable[..., Any], from_table: bool, module: nn.Module, *args: Any, **more: Any) -> Any:
        """A module calls attention, through the interface's table or its own eager function."""
        return function(module, *args, **more)

    def rotated(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A function that applies a rotation was called."""

    def visit(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """An observed module is called."""
        return forward(*args, **kwargs)


NOBODY = Observer()
OBSERVER: ContextVar[Observer] = ContextVar("toeplens_observer", default=NOBODY)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Report the passes of this thread to this observer."""
    token = OBSERVER.set(observer)
    try:
        yield
    finally:
        OBSERVER.reset(token)


def visited(modules: Iterable[nn.Module]) -> Iterator[Entry]:
    """Observed modules: their calls go through `Observer.visit`."""
    for module in modules:
        yield vars(module), "forward", partial(_visited, module)


def _visited(module: nn.Module, _before: Any) -> Callable[..., Any]:
    original = module.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return OBSERVER.get().visit(module, original, args, kwargs)

    return forward


def table() -> dict[str, Any]:
    """The attention functions of transformers, by name. Raises `EnvironmentFailure` without transformers."""
    return library().AttentionInterface._global_mapping


def table_entries(names: Iterable[str]) -> Iterator[Entry]:
    """Observed functions for the interface's table."""
    for name in names:
        yield table(), name, partial(_observed, True)


def eager_entries(model: nn.Module) -> Iterator[Entry]:
    """Observed functions for the eager attention in the Python modules that define the model's attention."""
    for space in namespaces_of(model):
        for name in [name for name, value in space.items() if name.endswith(_EAGER) and callable(value)]:
            yield space, name, partial(_observed, False)


def _observed(from_table: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def observed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        observer = OBSERVER.get()
        if observer is NOBODY or observer.pieces:
            return observer.attend(function, from_table, module, *args, **kwargs)
        asked = (module, *args[:2])
        before = [ref() for ref in observer.asked]
        if len(asked) == len(before) == 3 and all(x is y for x, y in zip(before, asked, strict=True)):
            raise InputError(
                f"model: heads of {type(module).__name__} have several products of the same weights, so they have no "
                "single effects."
            )
        made = observer.attend(function, from_table, module, *args, **kwargs)
        observer.asked = tuple(map(weakref.ref, asked))
        return made

    setattr(observed, _ORIGINAL, function)
    return observed


def eager_function(module: nn.Module) -> Callable[..., Any]:
    """The eager attention that a module falls back on."""
    for function in functions_of(module):
        for name in function.__code__.co_names:
            if name.endswith(_EAGER) and name in function.__globals__:
                eager = function.__globals__[name]
                return getattr(eager, _ORIGINAL, eager)  # another pass may have put its own there
    raise InputError(f"model: {type(module).__name__} uses the attention interface but has no eager attention.")
