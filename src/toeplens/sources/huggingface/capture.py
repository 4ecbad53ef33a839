"""One pass of a Hugging Face model, whose attention is handed over call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from toeplens.ground import EnvironmentFailure, InputError
from toeplens.sources.huggingface.calls import AttentionCall
from toeplens.sources.huggingface.eager import run_eager
from toeplens.sources.huggingface.lent import changed
from toeplens.sources.huggingface.settings import Entry, configs_of, evaluation
from toeplens.sources.huggingface.watch import (
    ACTIVE,
    ROTATIONS,
    Watch,
    asks_interface,
    attention_modules,
    eager_function,
    functions_of,
    fused,
)

_ENTRIES = {True: "toeplens", False: "toeplens_added"}  # in transformers' attention interface, by `fused`
_HELD = ("past_key_values", "cache_params")  # inputs that would hold the keys of all layers


@torch.no_grad()
def captured(model: Any, inputs: Mapping[str, Any], on_layer: Callable[[AttentionCall], None]) -> Any:
    """Run a transformers model once and hand over each call of its attention, proved, before the pass goes on.

    The model runs in evaluation mode without a cache of keys and, where it asks transformers' attention interface, with
    its own eager attention; afterwards it is as it was, and so are transformers' tables, an error or not. One layer's
    attention is held at a time, unless ``on_layer`` keeps it. Passes in other threads are not observed; while this one
    runs, those of the same model are eager too. Layers that are no attention (recurrences, convolutions) are passed by.

    Arguments
        model     a `transformers.PreTrainedModel`
        inputs    what its ``forward`` takes, by name: ``input_ids``, ``attention_mask``, ``decoder_input_ids``, ...
        on_layer  is called with each `AttentionCall`, in the order of the pass

    Returns what the model returns. Raises `InputError` that names the module where an attention was not understood: its
    weights and outputs, formed again from the parts, are not the model's own, or no parts were found. Raises
    `EnvironmentFailure` where transformers is not installed.
    """
    try:
        from transformers import AttentionInterface, PreTrainedModel
        from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
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
    entry, masks = _ENTRIES[fused(model)], sdpa_mask if fused(model) else eager_mask
    tables = [
        (AttentionInterface._global_mapping, entry, lambda before: partial(_attend, fused(model))),
        (AttentionMaskInterface._global_mapping, entry, lambda before: masks),
    ]
    handles = []
    token = ACTIVE.set(watch)
    try:
        with changed([*tables, *evaluation(model), *_asking(model), *_rotations(model)]), watch.products:
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


def _attend(
    fused: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Our entry in the attention interface: the module's own eager attention, observed if this thread observes."""
    mask = None if mask is None else mask[..., : key.shape[2]]  # a cache of fixed size has more
    causal = False
    if fused and mask is None and query.shape[2] > 1:  # as torch's fused attention has it
        told = kwargs.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if told is None else told)
    watch, eager = ACTIVE.get(), eager_function(module)
    if watch is not None:
        return watch.interface(eager, module, query, key, value, mask, causal, args, kwargs)
    made = run_eager(eager, module, query, key, value, mask, causal, args, kwargs)
    return made.heads, made.weights


def _asking(model: nn.Module) -> Iterator[Entry]:
    """Our attention, if the model asks for any."""
    if asks_interface(model):
        for config in configs_of(model):
            yield vars(config), "_attn_implementation_internal", lambda before: _ENTRIES[fused(model)]


def _rotations(model: nn.Module) -> Iterator[Entry]:
    """The functions that apply rotations, in the modelling modules of the model's attention."""
    found = {id(each.__globals__): each.__globals__ for m in attention_modules(model) for each in functions_of(m)}
    for names in found.values():
        for name in [name for name, value in names.items() if callable(value) and ROTATIONS.fullmatch(name)]:
            yield names, name, _observed


def _observed(rotate: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, whose calls are noted in the threads that observe."""

    def observed(*args: Any, **kwargs: Any) -> Any:
        output = rotate(*args, **kwargs)
        watch = ACTIVE.get()
        if watch is not None:
            watch.rotated(args, kwargs, output)
        return output

    return observed
