"""Who is told of what happens in a pass, and the functions of attention through which that goes.

One function stands in each place of transformers' attention interface, whoever puts it there: passes that take
attention apart and passes that silence heads may run in several threads at once, each with what is its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

from torch import nn

from toeplens.ground import InputError
from toeplens.sources.huggingface.model import functions_of, library, namespaces_of
from toeplens.sources.huggingface.patches import Entry

_ORIGINAL = "toeplens_original"  # of a function put in another's place: that other
_EAGER = "eager_attention_forward"  # how the name of a model's own eager attention ends


class Observer:
    """Is told of what happens in the passes of its thread; this one lets all of it be.

    pieces  whether it takes attention that a module asks for again, of the same queries and keys with other values, as
            one with what was asked for before; where it does not, that is an error
    """

    pieces = False
    asked: tuple[weakref.ref[Any], ...] = ()  # a module, queries and keys

    def attend(self, function: Callable[..., Any], from_table: bool, module: nn.Module, *args: Any, **more: Any) -> Any:
        """A module asks for attention, by a function of the interface's table or by its own eager one."""
        return function(module, *args, **more)

    def rotated(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A function that applies a rotation was called."""

    def visit(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module whose calls are observed is called."""
        return forward(*args, **kwargs)


NOBODY = Observer()
OBSERVER: ContextVar[Observer] = ContextVar("toeplens_observer", default=NOBODY)


def table() -> dict[str, Any]:
    """The attention functions that transformers knows, by name. Raises `EnvironmentFailure` without transformers."""
    return library().AttentionInterface._global_mapping


def table_entries(names: Iterable[str]) -> Iterator[Entry]:
    """Observed functions in the interface's table."""
    for name in names:
        yield table(), name, partial(_observed, True)


def eager_entries(model: nn.Module) -> Iterator[Entry]:
    """Observed functions in place of the eager attention of the modules in which the model's attention is defined."""
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
        _check_once(observer, asked)
        made = observer.attend(function, from_table, module, *args, **kwargs)
        observer.asked = tuple(map(weakref.ref, asked))
        return made

    setattr(observed, _ORIGINAL, function)
    return observed


def _check_once(observer: Observer, asked: tuple[Any, ...]) -> None:
    """Raise `InputError` where a module asks for attention of the queries and keys that it asked for last."""
    before = [ref() for ref in observer.asked]
    if len(asked) == len(before) == 3 and all(x is y for x, y in zip(before, asked, strict=True)):
        raise InputError(
            f"model: each head of {type(asked[0]).__name__} puts out several products of the same weights, which "
            "cannot be changed as one; its heads have no effects."
        )


def eager_function(module: nn.Module) -> Callable[..., Any]:
    """The function that a module which asks the attention interface falls back on: the model's own eager attention."""
    for function in functions_of(module):
        for name in function.__code__.co_names:
            if name.endswith(_EAGER) and name in function.__globals__:
                eager = function.__globals__[name]
                return getattr(eager, _ORIGINAL, eager)  # another pass may have put its own there
    raise InputError(f"model: {type(module).__name__} asks the attention interface and has no eager attention.")
