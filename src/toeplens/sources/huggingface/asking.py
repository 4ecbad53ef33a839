"""The functions that modules which ask transformers' attention interface are given, lent for a pass.

One function stands in each place, whoever lends it: passes that take attention apart and passes that silence heads may
run in several threads at once, each with what is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn

from toeplens.sources.huggingface.equal_tokens import ACTIVE
from toeplens.sources.huggingface.replays import RUN
from toeplens.sources.huggingface.settings import Entry
from toeplens.sources.huggingface.watch import EAGER, ORIGINAL, attention_modules, eager_function, functions_of


def table_entries(table: dict[str, Any], names: Iterable[str]) -> Iterator[Entry]:
    """Entries of the interface's table."""
    for name in names:
        yield table, name, partial(_asked, True)


def eager_entries(model: nn.Module) -> Iterator[Entry]:
    """The eager attention of the modules in which the model's attention is defined."""
    spaces = {id(each.__globals__): each.__globals__ for m in attention_modules(model) for each in functions_of(m)}
    for space in spaces.values():
        for name in [name for name, value in space.items() if name.endswith(EAGER) and callable(value)]:
            yield space, name, partial(_asked, False)


def _asked(from_table: bool, attend: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself; in a thread that observes or replays, for it."""

    @wraps(attend)
    def asked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if ACTIVE.get() is not None:
            return _observed(from_table, attend, module, *args, **kwargs)
        run = RUN.get()
        return attend(module, *args, **kwargs) if run is None else run.interface(attend, module, *args, **kwargs)

    setattr(asked, ORIGINAL, attend)
    return asked


def _observed(
    from_table: bool,
    attend: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The module's own eager attention, observed."""
    watch, mask = ACTIVE.get(), attention_mask
    assert watch is not None
    mask = None if mask is None else mask[..., : key.shape[2]]  # a cache of fixed size has more
    causal = False
    if from_table and mask is None and query.shape[2] > 1:  # as torch's fused attention has it
        told = kwargs.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if told is None else told)
    eager = eager_function(module) if from_table else attend
    return watch.interface(eager, module, query, key, value, mask, causal, args, kwargs)
