"""One pass of a Hugging Face model, whose attention is handed over call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from toeplens.ground import EnvironmentFailure, InputError
from toeplens.sources.huggingface.calls import AttentionCall
from toeplens.sources.huggingface.lent import changed
from toeplens.sources.huggingface.watch import (
    ACTIVE,
    ROTATIONS,
    Watch,
    asks_interface,
    attention_modules,
    eager_function,
    functions_of,
)

_NAME = "toeplens"  # of our entry in transformers' attention interface
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
        from transformers.masking_utils import AttentionMaskInterface, eager_mask
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
    tables = [
        (AttentionInterface._global_mapping, _NAME, lambda before: _attend),
        (AttentionMaskInterface._global_mapping, _NAME, lambda before: eager_mask),
    ]
    handles = []
    token = ACTIVE.set(watch)
    try:
        with changed([*tables, *_settings(model), *_rotations(model)]), watch.products:
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
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Our entry in the attention interface: the module's own eager attention, observed if this thread observes."""
    watch = ACTIVE.get()
    if watch is None:
        return eager_function(module)(module, query, key, value, mask, *args, **kwargs)
    return watch.interface(module, query, key, value, mask, *args, **kwargs)


def _settings(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Callable[[Any], Any]]]:
    """Evaluation mode in every module; our attention, if it is asked for, and no cache in every configuration."""
    asks = asks_interface(model)
    configs: dict[int, Any] = {}
    for module in model.modules():
        yield vars(module), "training", lambda before: False
        waiting = [getattr(module, "config", None)]
        while waiting:
            config = waiting.pop()
            if config is not None and hasattr(config, "sub_configs") and id(config) not in configs:
                configs[id(config)] = config
                waiting += [getattr(config, key, None) for key in config.sub_configs]
    for config in configs.values():
        if asks:
            yield vars(config), "_attn_implementation_internal", lambda before: _NAME
        if "use_cache" in vars(config):
            yield vars(config), "use_cache", lambda before: False


def _rotations(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Callable[[Any], Any]]]:
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
