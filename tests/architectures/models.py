"""Each model type of the installed transformers, made small from its configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any

import torch
from tests.architectures.special import EXTRA_INPUTS, LISTS, SIZES_BY_TYPE, SMALL, VARIANTS
from torch import Tensor

from toeplens.utils import InputError

_HEADS = ("FOR_SEQ_TO_SEQ_CAUSAL_LM_", "FOR_MASKED_LM_", "FOR_CAUSAL_LM_", "FOR_TEXT_ENCODING_", "")  # first that is
_SENSES = (
    *("vision", "image", "pixel", "audio", "speech", "acoustic", "vq", "input_features", "input_values", "video"),
    *("visual_feats", "codec"),
)
_LIBRARIES = {"torchaudio", "torchvision", "timm"}  # of sound and images
_FOREIGN = "shared_kv_states"  # an input: keys and values of another model
_CODES = "num_channels"  # a field of a part: how many codes of sound it reads at each place
MAX_PARAMETERS = 50_000_000  # parameters
TOKENS, DECODED, PADDED = 12, 7, 9  # of an input, of what is decoded, of the second sequence without its padding
FIRST_WORD = 16  # tokens before it may have a meaning of their own
_SEED = 7


class NotTextModel(Exception):
    """The model type takes other inputs than text, or is no model that could be loaded by itself."""


def model_types() -> list[str]:
    """The model types that transformers has a model without a task's head or one of language for, and `VARIANTS`."""
    from transformers.models.auto import modeling_auto

    known = {name for head in _HEADS for name in getattr(modeling_auto, f"MODEL_{head}MAPPING_NAMES")}
    return sorted(known | set(VARIANTS))


def model_class(model_type: str) -> Any:
    """The class that has the whole of a model type: encoder and decoder, else a language model, else the bare model.

    Raises `NotTextModel` where transformers names one and has none to load.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    for head in _HEADS:
        names = getattr(modeling_auto, f"MODEL_{head}MAPPING_NAMES").get(model_type)
        if names is not None:
            name = names if isinstance(names, str) else names[0]
            result = getattr(transformers, name, None)
            if result is None:
                raise NotTextModel(f"{name} is not among what transformers loads: it is a part of another model alone.")
            return result
    raise InputError(f"model type: transformers has no model for {model_type!r}.")


def small_config(name: str) -> Any:
    """The configuration of a model type with few and narrow layers, one of each kind that its default has."""
    from transformers import CONFIG_MAPPING

    model_type, more = VARIANTS.get(name, (name, {}))
    if model_type == "encoder-decoder":  # has no sizes of its own
        two = {part: small_config("bert").to_dict() for part in ("encoder", "decoder")}
        two["decoder"] |= {"is_decoder": True, "add_cross_attention": True}
        return CONFIG_MAPPING[model_type](**two)
    return CONFIG_MAPPING[model_type](
        **small_values(CONFIG_MAPPING[model_type]) | SIZES_BY_TYPE.get(model_type, {}) | more
    )


def small_values(config_class: Any) -> dict[str, Any]:
    """Values of the fields of a configuration class that make its model small."""
    names = {each.name for each in dataclasses.fields(config_class)}
    renamed = {config_class.attribute_map.get(name, name): value for name, value in SMALL.items()}
    values = {name: value for name, value in (renamed | SMALL).items() if name in names}
    if "kv_lora_rank" in names and "num_key_value_heads" in names:
        values["num_key_value_heads"] = SMALL["num_attention_heads"]
    for name, inner in config_class.sub_configs.items():
        if dataclasses.is_dataclass(inner) and name in names:
            values[name] = small_values(inner)
    return values | _layers(config_class, values)


def _layers(config_class: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The lists that have an entry a layer, with one layer of each kind, and how many layers that are."""
    default = config_class()
    count = getattr(default, "num_hidden_layers", None)
    lists = {
        name: list(value)
        for name in LISTS
        if isinstance(value := getattr(default, name, None), list | tuple) and len(value) == count
    }
    if not lists:
        return {}
    kinds = list(zip(*lists.values(), strict=True))
    first = [at for at, kind in enumerate(kinds) if kind not in kinds[:at]]
    sizes = sorted(first if len(first) > 1 else [first[0], first[0]])
    counted = config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    fields = {each.name for each in dataclasses.fields(config_class)}
    lists = {name: [value[at] for at in sizes] for name, value in lists.items() if name in fields}
    return lists | ({counted: len(sizes)} if counted in fields else {})


def small_model(name: str) -> Any:
    """A small model of a type on the CPU, in evaluation mode, with random weights under which attention is not flat.

    Raises `NotTextModel` where its class takes other inputs than text, `InputError` where it would not be small, and
    whatever transformers raises where it cannot build it.
    """
    kind = model_class(VARIANTS.get(name, (name,))[0])
    refuse_other_inputs(kind, VARIANTS.get(name, (name,))[0])
    config = small_config(name)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # as an audit has it; some models hide no key from a query where it is set
    with torch.device("meta"):
        count = sum(weight.numel() for weight in kind(config).parameters())
    if count > MAX_PARAMETERS:
        raise InputError(
            f"model: {kind.__name__} has {count:,} parameters when small; at most {MAX_PARAMETERS:,} are made."
        )
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for weight in filter(lambda each: each.requires_grad, model.parameters()):  # not frozen tables of sines
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(0.15 * noise if weight.ndim > 1 else weight + 0.1 * noise)
    return model


def refuse_other_inputs(kind: Any, model_type: str) -> None:
    """`NotTextModel` where the model takes no tokens, or takes more than text, or its configuration has such a part.

    Likewise where its class is a placeholder for want of a library of sound or images, where it takes what another
    model has computed, and where a part of it reads several codes of sound at each place. What a class says of its
    modalities is no guide: text models inherit it from those that they are parts of.
    """
    from transformers import CONFIG_MAPPING

    missing = sorted(_LIBRARIES & set(getattr(kind, "_backends", ())))
    if missing:
        raise NotTextModel(f"{kind.__name__} is for more than text: it needs {', '.join(missing)}.")
    names = list(signature(kind.forward).parameters)
    config_class: Any = CONFIG_MAPPING[model_type]
    if "input_ids" not in names:
        raise NotTextModel(f"{kind.__name__} takes no token ids but {kind.main_input_name}.")
    for what, given in (("it takes", names), ("its configuration has", config_class.sub_configs)):
        other = [name for name in given if any(word in name for word in _SENSES)]
        if other:
            raise NotTextModel(f"{kind.__name__} is for more than text: {what} {', '.join(other)}.")
    if _FOREIGN in names:
        raise NotTextModel(f"{kind.__name__} reads what another model has computed: it takes {_FOREIGN}.")
    for part, inner in config_class.sub_configs.items():
        if dataclasses.is_dataclass(inner) and _CODES in {each.name for each in dataclasses.fields(inner)}:
            raise NotTextModel(f"{kind.__name__} is for more than text: its {part} reads {_CODES} codes at each place.")


def small_inputs(model: Any, *, padded: bool = True) -> dict[str, Tensor]:
    """Two sequences of random tokens, the second with padding on its right where padding can be told."""
    names = signature(model.forward).parameters
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(FIRST_WORD, SMALL["vocab_size"], (2, TOKENS), generator=generator)
    inputs = {"input_ids": tokens}
    if padded and "attention_mask" in names:
        mask = torch.ones_like(tokens)
        mask[1, PADDED:] = 0
        inputs["attention_mask"] = mask
    if model.config.is_encoder_decoder and "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = tokens[:, :DECODED].flip(1)
    return inputs | extra_inputs(model, tokens)


def extra_inputs(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """What a model that does not run on tokens alone is given with them, by name."""
    make = EXTRA_INPUTS.get(model.config.model_type)
    return {} if make is None else make(tokens)


@contextmanager
def with_extra_inputs(model: Any) -> Iterator[None]:
    """The model in it runs on tokens alone: what it is given beside them is made of them, pass by pass."""
    forward = model.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        return forward(*args, **extra_inputs(model, tokens) | kwargs)

    if model.config.model_type not in EXTRA_INPUTS:
        yield
        return
    model.forward = run
    try:
        yield
    finally:
        del model.forward
