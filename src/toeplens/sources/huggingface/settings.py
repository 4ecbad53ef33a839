"""The settings of a Hugging Face model for the length of a pass: evaluation mode, no cache of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Entry = tuple[dict[str, Any], str, Callable[[Any], Any]]  # of `toeplens.sources.huggingface.lent.changed`

_ROUNDED_TO = (torch.float64, torch.float16, torch.bfloat16)


def evaluation(model: nn.Module) -> Iterator[Entry]:
    """Evaluation mode in every module, no cache in every configuration, outputs by name."""
    for module in model.modules():
        yield vars(module), "training", lambda before: False
    for config in configs_of(model):
        if "use_cache" in vars(config):
            yield vars(config), "use_cache", lambda before: False
        if vars(config).get("return_dict") is False:
            yield vars(config), "return_dict", lambda before: True


def precision(model: nn.Module) -> torch.dtype:
    """The coarsest dtype of the model's weights: its numbers are rounded to it, whatever they are widened to."""
    found = {weight.dtype if weight.dtype in _ROUNDED_TO else torch.float32 for weight in model.parameters()}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def configs_of(model: nn.Module) -> list[Any]:
    """The configurations of the model's modules, and those in them."""
    found: dict[int, Any] = {}
    waiting = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if config is not None and hasattr(config, "sub_configs") and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, key, None) for key in config.sub_configs]
    return list(found.values())
