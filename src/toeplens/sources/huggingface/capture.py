"""One pass of a Hugging Face model, whose attention is handed over call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from toeplens.ground import EnvironmentFailure, InputError
from toeplens.sources.huggingface.asking import eager_entries, table_entries
from toeplens.sources.huggingface.calls import AttentionCall
from toeplens.sources.huggingface.equal_tokens import ACTIVE
from toeplens.sources.huggingface.lent import alone, changed
from toeplens.sources.huggingface.settings import Entry, configs_of, evaluation
from toeplens.sources.huggingface.watch import (
    ROTATIONS,
    Watch,
    asks_interface,
    attention_modules,
    functions_of,
    fused,
)

_NAMES = {True: "sdpa", False: "eager"}  # of the attention that a model is asked for, by `fused`
_HELD = ("past_key_values", "cache_params")  # inputs that would hold the keys of all layers


@torch.no_grad()
def captured(model: Any, inputs: Mapping[str, Any], on_layer: Callable[[AttentionCall], None]) -> Any:
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

    Returns what the model returns. Raises `InputError` that names the module where an attention was not understood: its
    weights and outputs, formed again from the parts, are not the model's own, or no parts were found, or it is in no
    module that is named after attention. Raises
    `EnvironmentFailure` where transformers is not installed.
    """
    try:
        from transformers import AttentionInterface, PreTrainedModel
    except ImportError as error:
        raise EnvironmentFailure("transformers: it is missing; pip install 'toeplens[hf]' installs it.") from error
    if not isinstance(model, PreTrainedModel):
        raise InputError(f"model: a {type(model).__name__} was given; it must be a transformers.PreTrainedModel.")
    for name in _HELD:
        if inputs.get(name) is not None:
            raise InputError(f"inputs: {name} was given; the tokens of a pass must all be in it.")
    watch = Watch(model, inputs, on_layer)
    if not watch.modules:
        raise InputError(f"model: {type(model).__name__} has no module that is named after attention.")
    lent = [*evaluation(model), *_asking(model, AttentionInterface._global_mapping), *_rotations(model)]
    handles = []
    token = ACTIVE.set(watch)
    try:
        with alone(model), changed(lent), watch.products, watch.exponentials:
            for module in watch.modules:
                handles.append(module.register_forward_pre_hook(watch.enter, with_kwargs=True))
                handles.append(module.register_forward_hook(watch.leave))
            output = model(**inputs)
    finally:
        ACTIVE.reset(token)
        for handle in handles:
            handle.remove()
    if not watch.counts:
        raise InputError(f"model: no attention was called in the pass of {type(model).__name__}.")
    return output


def _asking(model: nn.Module, table: dict[str, Any]) -> Iterator[Entry]:
    """Attention under observation where the model asks the interface: its entry, or the model's own eager function.

    Names stay as they are, as models go by them; and so do the masks of the fused attention, which may be none.
    """
    if not asks_interface(model):
        return
    name = _NAMES[fused(model)]
    for config in configs_of(model):
        yield vars(config), "_attn_implementation_internal", lambda before: name
    yield from table_entries(table, [name]) if name in table else eager_entries(model)


def _rotations(model: nn.Module) -> Iterator[Entry]:
    """What applies rotations: functions of the modelling modules of the attention, and methods of its own."""
    found = {id(each.__globals__): each.__globals__ for m in attention_modules(model) for each in functions_of(m)}
    for names in found.values():
        for name in [name for name, value in names.items() if callable(value) and ROTATIONS.fullmatch(name)]:
            yield names, name, _observed
    for module in attention_modules(model):
        for name in {name for cls in type(module).__mro__ for name in vars(cls) if ROTATIONS.fullmatch(name)}:
            method = getattr(module, name)
            if callable(method):
                yield vars(module), name, lambda before, method=method: _observed(method)


def _observed(rotate: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, whose calls are noted in the threads that observe."""

    def observed(*args: Any, **kwargs: Any) -> Any:
        output = rotate(*args, **kwargs)
        watch = ACTIVE.get()
        if watch is not None:
            watch.rotated(args, kwargs, output)
        return output

    return observed
