"""One pass of a Hugging Face model, whose attention is handed over call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from toeplens.ground import InputError
from toeplens.sources.huggingface.capture.calls import AttentionCall
from toeplens.sources.huggingface.capture.observer import ROTATIONS, PassObserver
from toeplens.sources.huggingface.interface import OBSERVER, eager_entries, table, table_entries
from toeplens.sources.huggingface.model import (
    NAME,
    asks_interface,
    attention_modules,
    checked_model,
    is_host,
    namespaces_of,
)
from toeplens.sources.huggingface.patches import Entry, asking_for, patched

_HELD = ("past_key_values", "cache_params")  # inputs that would hold the keys of all layers


@torch.no_grad()
def captured(
    model: Any,
    inputs: Mapping[str, Any],
    on_layer: Callable[[AttentionCall], None],
    instead: Callable[[AttentionCall], Tensor | None] | None = None,
) -> Any:
    """Run a transformers model once and hand over each call of its attention, proved, before the pass goes on.

    The model runs in evaluation mode without a cache of keys and, where it asks transformers' attention interface, with
    its own eager attention, some queries at a time; afterwards it is as it was, and so are transformers' tables, an
    error or not. One layer's attention is held at a time, unless ``on_layer`` keeps it. Passes in other threads are not
    observed. Layers that are no attention (recurrences, convolutions, linear attention) are passed by; those that are
    named after attention only where nothing in them can be a softmax, of whatever.

    Arguments
        model     a `transformers.PreTrainedModel`
        inputs    what its ``forward`` takes, by name: ``input_ids``, ``attention_mask``, ``decoder_input_ids``, ...
        on_layer  is called with each `AttentionCall`, in the order of the pass
        instead   is called with each too, before the pass goes on from it, and returns what takes the place of its
                  ``heads``, or None. What is handed over is as the model made it. Of a call that is made of several
                  products of the same weights it is called with each by itself, all of the same layer

    Returns what the model returns. Raises `InputError` that names the module where an attention was not understood: its
    weights and outputs, formed again from the parts, are not the model's own, or no parts were found, or it is in no
    module that is named after attention. Raises
    `EnvironmentFailure` where transformers is not installed.
    """
    checked_model(model)
    for name in _HELD:
        if inputs.get(name) is not None:
            raise InputError(f"inputs: {name} was given; the tokens of a pass must all be in it.")
    observer = PassObserver(model, inputs, on_layer, instead)
    if not observer.modules:
        raise InputError(f"model: {type(model).__name__} has no module that is named after attention.")
    handles = []
    token = OBSERVER.set(observer)
    try:
        with patched(model, _asking(model), _rotations(model)), observer.products, observer.exponentials:
            for module in observer.modules:
                handles.append(module.register_forward_pre_hook(observer.enter, with_kwargs=True))
                handles.append(module.register_forward_hook(observer.leave))
            output = model(**inputs)
    finally:
        OBSERVER.reset(token)
        for handle in handles:
            handle.remove()
    observer.require_any(type(model).__name__)
    return output


def _asking(model: nn.Module) -> Iterator[Entry]:
    """Attention under observation where the model asks the interface: its entry, or the model's own eager function.

    Names stay as they are, as models go by them; and so do the masks, which of torch's fused attention may be truth
    values, and none if it is causal.
    """
    if not asks_interface(*attention_modules(model)):
        return
    if is_host(model):  # which asks for ours
        yield from table_entries([NAME])
        return
    name = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    yield from asking_for(model, name)
    yield from table_entries([name]) if name in table() else eager_entries(model)


def _rotations(model: nn.Module) -> Iterator[Entry]:
    """What applies rotations: functions of the modelling modules of the attention, and methods of its own."""
    for names in namespaces_of(model):
        for name in [name for name, value in names.items() if callable(value) and ROTATIONS.fullmatch(name)]:
            yield names, name, _observed
    for module in attention_modules(model):
        for name in {name for cls in type(module).__mro__ for name in vars(cls) if ROTATIONS.fullmatch(name)}:
            method = getattr(module, name)
            if callable(method):
                yield vars(module), name, lambda before, method=method: _observed(method)


def _observed(rotate: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, whose calls are told to who observes the thread."""

    def observed(*args: Any, **kwargs: Any) -> Any:
        output = rotate(*args, **kwargs)
        OBSERVER.get().rotated(args, kwargs, output)
        return output

    return observed
