"""Parts of a Hugging Face model: its attention, configurations, embeddings, numerical precision."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Mapping
from types import FunctionType
from typing import Any, Literal

import torch
from torch import nn

from toeplens.encodings.kit import product_dtype
from toeplens.ground import EnvironmentFailure, InputError, invalid
from toeplens.ground.machine import out_of_memory

_LONGEST = 200  # maximum characters of an error in messages
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CHECKED = re.compile(
    r"^(class )?validation error for .*?: (\w+Error: )?", re.IGNORECASE
)  # of a configuration's fields
_LIBRARIES = {"torch", "transformers", "safetensors", "tokenizers", "toeplens"}
_PLAIN = (OSError, ValueError, RuntimeError, ImportError)  # errors whose message is clear without the class name


def words(error: BaseException) -> str:
    """The first line of an error (after a heading also the next), without a final period."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    count = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    text, checked = _CHECKED.subn("", " ".join(" ".join(lines[:count]).split()))
    if len(text) > _LONGEST:
        text = text.partition(". ")[0]
    text = text.rstrip(".: ") if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    if isinstance(error, EOFError) or not text:
        return "a file ends too early" if isinstance(error, EOFError) else type(error).__name__
    if isinstance(error, KeyError):
        return f"{text} is missing"
    return text if checked or isinstance(error, _PLAIN) else f"{type(error).__name__}: {text}"


def token_ids(tokenizer: Any, text: str, **options: Any) -> list[Any]:
    """The token ids of a text, or lists of them if the options ask for several.

    Raises `InputError` if the tokenizer fails.
    """
    try:
        return list(tokenizer(text, **options)["input_ids"])
    except Exception as error:  # a tokenizer may fail in any way
        if out_of_memory(error) or not of_libraries(error):
            raise
        raise InputError(f"model: its tokenizer fails on a text ({words(error)}).") from None


def of_libraries(error: BaseException) -> bool:
    """Whether the error was raised in a library of models or in this one, not by what a caller passed in."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and str(frames[-1][0].f_globals.get("__name__", "")).split(".")[0] in _LIBRARIES


INSTALLED = "toeplens_seat"  # attribute of an attention module: its installed encoding (`AttentionPatch`)
NAME = "toeplens"  # name of the attention implementation of a model with an installed encoding
_ATTENTION = re.compile("Attention|Attn|MLA(?![a-z])")
Rounded = Literal["call", "states", "pass", "installed"]
# rounding tolerances: of a call's parts, of states when repeated, of a pass's outputs, and with an encoding installed
_TOLERANCES: dict[torch.dtype, dict[Rounded, float]] = {
    torch.float64: {"call": 1e-4, "states": 1e-6, "pass": 1e-6, "installed": 1e-6},
    torch.float32: {"call": 1e-4, "states": 1e-4, "pass": 1e-3, "installed": 1e-4},
    torch.float16: {"call": 1e-2, "states": 2e-2, "pass": 5e-2, "installed": 2e-2},
    torch.bfloat16: {"call": 5e-2, "states": 1e-1, "pass": 2e-1, "installed": 5e-2},
}


def library() -> Any:
    """The module transformers. Raises `EnvironmentFailure` if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentFailure("transformers is not installed. Run: pip install 'toeplens[hf]'.") from error
    return transformers


def checked_model(model: Any) -> Any:
    """The model itself. Raises `InputError` if it is not a transformers model."""
    wanted = library().PreTrainedModel
    if not isinstance(model, wanted):
        inner = getattr(getattr(model, "base_model", None), "model", None)  # of the package peft
        inside = "; its base_model.model is one" if isinstance(inner, wanted) else ""
        raise invalid("model", f"be a transformers.PreTrainedModel{inside}", got=f"a {type(model).__name__}")
    return model


def attention_modules(model: nn.Module) -> dict[nn.Module, str]:
    """The modules whose class is an attention, and their names."""
    return {module: name for name, module in model.named_modules() if _ATTENTION.search(type(module).__name__)}


def functions_of(module: nn.Module) -> list[FunctionType]:
    """The functions that the module's classes define, ``forward`` first, without those of torch."""
    classes = [cls for cls in type(module).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module]
    found = []
    for cls in classes:
        values = [getattr(value, "__func__", value) for value in vars(cls).values()]
        own = [inspect.unwrap(value) for value in values if isinstance(value, FunctionType)]
        found += sorted((each for each in own if isinstance(each, FunctionType)), key=lambda f: f.__name__ != "forward")
    return found


def namespaces_of(model: nn.Module) -> list[dict[str, Any]]:
    """The namespaces of the Python modules that define the model's attention."""
    functions = (each for module in attention_modules(model) for each in functions_of(module))
    return list({id(each.__globals__): each.__globals__ for each in functions}.values())


def asks_interface(*modules: nn.Module) -> bool:
    """Whether any of these modules itself uses transformers' attention interface, or an encoding in it does."""
    return any(
        INSTALLED in vars(module) or any("get_interface" in each.__code__.co_names for each in functions_of(module))
        for module in modules
    )


def is_host(model: nn.Module) -> bool:
    """Whether an encoding is installed in any of its modules."""
    return any(INSTALLED in vars(module) for module in model.modules())


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


def rotations_of(config: Any) -> list[Mapping[str, Any]]:
    """The rotation settings of a configuration, followed by those of each type of layer."""
    settings = getattr(config, "rope_parameters", None)
    settings = settings if isinstance(settings, Mapping) else {}
    return [settings, *(each for each in settings.values() if isinstance(each, Mapping))]


def input_embedding(model: Any) -> Any:
    """The module that embeds the tokens; None if the model does not say."""
    try:
        return model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None


def precision(model: nn.Module) -> torch.dtype:
    """The coarsest dtype that the model's numbers are rounded to, even if later converted: that of its weights, or of
    products under autocast."""
    used = {product_dtype(weight) for weight in model.parameters()}
    found = {dtype if dtype in _TOLERANCES else torch.float32 for dtype in used}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def tolerance(dtype: torch.dtype, of: Rounded = "call") -> float:
    """Largest relative difference that rounding explains; models round to float32 inside whatever their dtype is."""
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.float32])[of]
