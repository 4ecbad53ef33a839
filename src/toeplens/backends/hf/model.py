"""Parts of a Hugging Face model, its numerical precision, and patches and observers of its passes.

Whoever patches transformers' attention interface, one function takes the place of each entry. So passes that trace
attention and passes that ablate heads can run in several threads at once, each with its own observer.
"""

from __future__ import annotations

import inspect
import re
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain
from types import FunctionType
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from toeplens.encodings.kit import product_dtype
from toeplens.utils import EnvironmentFailure, InputError, ToeplensError, invalid
from toeplens.utils.machine import is_out_of_memory

_MAX_NAMES = 3  # maximum names in a message
_MAX_MESSAGE = 200  # maximum characters of an error in messages
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# of a configuration's fields
_VALIDATION = re.compile(r"^(class )?validation error for .*?: (\w+Error: )?", re.IGNORECASE)
_LIBRARIES = {"torch", "transformers", "safetensors", "tokenizers", "toeplens"}
_CLEAR_ERRORS = (OSError, ValueError, RuntimeError, ImportError)  # errors whose message is clear without the class name


def error_summary(error: BaseException) -> str:
    """The first line of an error (after a heading also the next), without a final period."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    count = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    text, validated = _VALIDATION.subn("", " ".join(" ".join(lines[:count]).split()))
    if len(text) > _MAX_MESSAGE:
        text = text.partition(". ")[0]
    text = text.rstrip(".: ") if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} ..."
    if isinstance(error, EOFError):
        return "a file ends too early"
    if isinstance(error, KeyError) and text:
        return f"{text} is missing"
    name = type(error).__name__
    return (text if validated or isinstance(error, _CLEAR_ERRORS) else f"{name}: {text}") if text else name


def token_ids(tokenizer: Any, text: str, **options: Any) -> list[Any]:
    """The token ids of a text, or lists of them if the options ask for several."""
    with library_errors("model: its tokenizer fails on a text ({})."):
        return list(tokenizer(text, **options)["input_ids"])


def is_library_error(error: BaseException) -> bool:
    """Whether the error was raised in a library of models or in this one, not by what a caller passed in."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and str(frames[-1][0].f_globals.get("__name__", "")).split(".")[0] in _LIBRARIES


@contextmanager
def library_errors(text: str) -> Iterator[None]:
    """Raise `InputError` with this text and a summary of the error, at its ``{}``, for an error of a library."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ToeplensError) or is_out_of_memory(error) or not is_library_error(error):
            raise
        raise InputError(text.format(error_summary(error))) from error


INSTALLED = "toeplens_seat"  # attribute of an attention module: its installed encoding (`AttentionPatch`)
CONTEXT = "toeplens_pass"  # argument by which layers pass on the context of a pass, and a module to its attention
PREVIOUS = "toeplens_before"  # attribute of an attention module: its previous attention implementation
IMPLEMENTATION = "toeplens"  # name of the attention implementation of a model with an installed encoding
_ATTENTION = re.compile("Attention|Attn|MLA(?![a-z])")
RoundingLevel = Literal["call", "states", "pass", "installed"]
# rounding tolerances: of a call's parts, of states when repeated, of a pass's outputs, and with an encoding installed
_TOLERANCES: dict[torch.dtype, dict[RoundingLevel, float]] = {
    torch.float64: {"call": 1e-4, "states": 1e-6, "pass": 1e-6, "installed": 1e-6},
    torch.float32: {"call": 1e-4, "states": 1e-4, "pass": 1e-3, "installed": 1e-4},
    torch.float16: {"call": 1e-2, "states": 2e-2, "pass": 5e-2, "installed": 2e-2},
    torch.bfloat16: {"call": 5e-2, "states": 1e-1, "pass": 2e-1, "installed": 5e-2},
}


def import_transformers() -> Any:
    """The module transformers. Raises `EnvironmentFailure` if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentFailure("transformers is not installed. Run: pip install 'toeplens[hf]'.") from error
    return transformers


def format_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")


def load_error(name: str, reason: str) -> InputError:
    """The error for a model of this name."""
    return InputError(f"model: {name} could not be loaded: {reason}.")


def attention_error(name: str, reason: str) -> InputError:
    """The error for an attention module of this name."""
    return InputError(f"model: the attention of {name} was not understood: {reason}.")


def require_pretrained(model: Any) -> Any:
    """The model itself. Raises `InputError` if it is not a transformers model."""
    base = import_transformers().PreTrainedModel
    if not isinstance(model, base):
        inner = getattr(model, "get_base_model", lambda: None)()  # of the package peft
        hint = "; its get_base_model() is one" if isinstance(inner, base) else ""
        raise invalid("model", f"be a transformers.PreTrainedModel{hint}", got=f"a {type(model).__name__}")
    return model


def attention_modules(model: nn.Module) -> dict[nn.Module, str]:
    """The modules whose class is an attention, and their names."""
    return {module: name for name, module in model.named_modules() if _ATTENTION.search(type(module).__name__)}


def functions_of(module: nn.Module) -> list[FunctionType]:
    """The functions that the module's classes define, ``forward`` first, without those of torch."""
    classes = [cls for cls in type(module).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module]
    functions: list[FunctionType] = []
    for cls in classes:
        values = [getattr(value, "__func__", value) for value in vars(cls).values()]
        defined = [inspect.unwrap(value) for value in values if isinstance(value, FunctionType)]
        functions += sorted((f for f in defined if isinstance(f, FunctionType)), key=lambda f: f.__name__ != "forward")
    return functions


def namespaces_of(model: nn.Module) -> list[dict[str, Any]]:
    """The namespaces of the Python modules that define the model's attention."""
    functions = (function for module in attention_modules(model) for function in functions_of(module))
    return list({id(function.__globals__): function.__globals__ for function in functions}.values())


def uses_interface(*modules: nn.Module) -> bool:
    """Whether any of these modules itself uses transformers' attention interface, or an encoding in it does."""
    return any(
        INSTALLED in vars(module) or any("get_interface" in f.__code__.co_names for f in functions_of(module))
        for module in modules
    )


def has_installed_encoding(model: nn.Module) -> bool:
    """Whether an encoding is installed in any of its modules."""
    return any(INSTALLED in vars(module) for module in model.modules())


def configs_of(model: nn.Module) -> list[Any]:
    """The configurations of the model's modules, and those in them."""
    configs: dict[int, Any] = {}
    pending = [getattr(module, "config", None) for module in model.modules()]
    while pending:
        config = pending.pop()
        if config is not None and hasattr(config, "sub_configs") and id(config) not in configs:
            configs[id(config)] = config
            pending += [getattr(config, key, None) for key in config.sub_configs]
    return list(configs.values())


def rope_settings(config: Any) -> list[Mapping[str, Any]]:
    """The rotation settings of a configuration, followed by those of each type of layer."""
    settings = getattr(config, "rope_parameters", None)
    settings = settings if isinstance(settings, Mapping) else {}
    return [settings, *(value for value in settings.values() if isinstance(value, Mapping))]


def device_of(model: Any) -> torch.device:
    """The device of a model's inputs; if its first weights are offloaded, where they are put to be used."""
    device, hook = model.device, getattr(model, "_hf_hook", None)
    return torch.device(hook.execution_device) if device.type == "meta" and hook is not None else device


def input_embedding(model: Any) -> Any:
    """The module that embeds the tokens; None if the model does not say."""
    with suppress(NotImplementedError, AttributeError):
        return model.get_input_embeddings()


def precision(model: nn.Module) -> torch.dtype:
    """The coarsest dtype that the model's numbers are rounded to, even if later converted: that of its weights, or of
    products under autocast."""
    dtypes = {product_dtype(weight) for weight in model.parameters()}
    known = {dtype if dtype in _TOLERANCES else torch.float32 for dtype in dtypes}
    return max(known, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest of the second; infinite for other shapes."""
    size = float(expected.abs().max())
    difference = float((actual - expected).abs().max()) if actual.shape == expected.shape else torch.inf
    return difference / (size if size > 0 else 1.0)


def tolerance(dtype: torch.dtype, level: RoundingLevel = "call") -> float:
    """Largest relative difference that rounding explains; models round to float32 inside whatever their dtype is."""
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.float32])[level]


# (mapping, name, value): ``value(before)`` is stored at ``mapping[name]``
PatchEntry = tuple[dict[str, Any], str, Callable[[Any], Any]]

_ABSENT = object()
_LOCK = threading.Lock()


@dataclass
class _AppliedPatch:
    mapping: dict[str, Any]  # kept alive, so that its id stays unique
    before: Any
    users: int = 0


_APPLIED: dict[tuple[int, str], _AppliedPatch] = {}
_MODEL_LOCKS: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()


@contextmanager
def apply_patches(model: nn.Module, *changes: Iterable[PatchEntry]) -> Iterator[None]:
    """Put a model in evaluation mode without a key cache and apply other changes; restores everything afterwards.

    Only one such pass of a model runs at a time: other threads wait. Passes of other models may change what they share
    with it: the first one makes the change, the last one reverts it. So patched values must work for any caller.
    """
    with _LOCK:
        lock = _MODEL_LOCKS.setdefault(model, threading.RLock())
    with lock, apply_entries(chain(uncompiled_entries(), _evaluation_entries(model), *changes)):
        yield


@contextmanager
def apply_entries(entries: Iterable[PatchEntry]) -> Iterator[None]:
    """Apply these changes and restore everything afterwards; other threads may apply the same ones."""
    keys: list[tuple[int, str]] = []
    try:
        for mapping, name, value in entries:
            key = (id(mapping), name)
            with _LOCK:
                if key not in _APPLIED:
                    before = mapping.get(name, _ABSENT)
                    mapping[name] = value(before)
                    _APPLIED[key] = _AppliedPatch(mapping, before)
                _APPLIED[key].users += 1
            keys.append(key)
        yield
    finally:
        for key in reversed(keys):
            with _LOCK:
                applied = _APPLIED[key]
                applied.users -= 1
                if applied.users == 0:
                    del _APPLIED[key]
                    if applied.before is _ABSENT:
                        del applied.mapping[key[1]]
                    else:
                        applied.mapping[key[1]] = applied.before


def uncompiled_entries() -> Iterator[PatchEntry]:
    """Run compiled modules and functions as plain Python (`torch.compiler.set_stance`, which threads cannot share)."""
    from torch._dynamo import eval_frame  # slow to import

    yield eval_frame.__dict__, "_stance", lambda before: eval_frame.DynamoStance("force_eager")


def implementation_entries(model: nn.Module, name: str) -> Iterator[PatchEntry]:
    """Make a model use the attention implementation of this name."""
    for config in configs_of(model):
        yield vars(config), "_attn_implementation_internal", lambda before: name


def _evaluation_entries(model: nn.Module) -> Iterator[PatchEntry]:
    """Evaluation mode in every module, no cache or attention weights in any configuration, dict outputs, rotations
    without history."""
    for module in model.modules():
        yield vars(module), "training", lambda before: False
        yield from _dynamic_rope_entries(module)
    for config in configs_of(model):
        for name in {"use_cache", "_output_attentions"} & vars(config).keys():
            yield vars(config), name, lambda before: False
        if vars(config).get("return_dict") is False:
            yield vars(config), "return_dict", lambda before: True


def _dynamic_rope_entries(module: nn.Module) -> Iterator[PatchEntry]:
    """Make a rotation whose frequencies grow with the longest sequence so far (transformers' `dynamic` scaling, one
    rotation or one per type of layer) treat each sequence as the first."""
    kinds: Any = getattr(module, "rope_type", None)
    kinds = kinds if isinstance(kinds, dict) else {"": kinds}
    prefixes = [f"{name}_" if name else "" for name, kind in kinds.items() if "dynamic" in str(kind)]
    if not prefixes or not hasattr(module, "original_max_seq_len"):
        return
    rope, forward = cast("Any", module), module.forward

    def reset_forward(*args: Any, **kwargs: Any) -> Any:
        for prefix in prefixes:
            setattr(rope, f"{prefix}max_seq_len_cached", rope.original_max_seq_len)
            frequencies = getattr(rope, f"{prefix}original_inv_freq").to(getattr(rope, f"{prefix}inv_freq").device)
            rope.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
        return forward(*args, **kwargs)

    for prefix in prefixes:
        yield module._buffers, f"{prefix}inv_freq", lambda before: before
        yield vars(module), f"{prefix}max_seq_len_cached", lambda before: before
    yield vars(module), "attention_scaling", lambda before: before
    yield vars(module), "forward", lambda before: reset_forward


_ORIGINAL = "toeplens_original"  # attribute of a patched function: the original
_EAGER = "eager_attention_forward"  # suffix of the name of a model's own eager attention


@dataclass(frozen=True)
class InterfaceCall:
    """What a module passes to an attention function."""

    function: Callable[..., Any]  # the function that it calls
    from_table: bool  # whether that is an entry of the interface's table, or the model's own eager function
    module: nn.Module
    q: Tensor  # [B, H, Nq, d], [B, G, Nk, d], [B, G, Nk, dv]
    k: Tensor
    v: Tensor
    mask: Tensor | None  # added to the logits, or True where a key is visible
    args: tuple[Any, ...]  # other arguments, without the context of a pass
    options: dict[str, Any]
    context: Any = None  # what an installed encoding passes on (`patches.LayerContext`)

    @property
    def scale(self) -> float:
        """The factor of q . k that is passed on."""
        return self.q.shape[-1] ** -0.5 if self.options.get("scaling") is None else self.options["scaling"]

    def is_causal(self, default: bool) -> bool:
        """Whether the module says that it is causal."""
        value = self.options.get("is_causal")
        return bool(getattr(self.module, "is_causal", default) if value is None else value)

    def run(self) -> tuple[Tensor, Tensor | None]:
        """The function's outputs, [B, Nq, H, dv], and weights."""
        options = self.options if self.context is None else self.options | {CONTEXT: self.context}
        return self.function(self.module, self.q, self.k, self.v, self.mask, *self.args, **options)


def interface_call(function: Any, from_table: bool, module: nn.Module, *args: Any, **options: Any) -> InterfaceCall:
    """The inputs in a call of an attention function."""
    names = ("query", "key", "value", "attention_mask")[len(args) :]
    q, k, v, mask = *args[:4], *(options.pop(name) for name in names)
    return InterfaceCall(function, from_table, module, q, k, v, mask, args[4:], options, options.pop(CONTEXT, None))


class Observer:
    """Is called on events in the passes of its thread; this base class changes nothing."""

    joins_calls = False  # whether several calls of a module with the same queries and keys are one; if not, an error
    may_skip = False  # whether its passes may leave out modules
    last_call: tuple[weakref.ref[Any], ...] = ()  # a module, queries and keys

    def attend(self, call: InterfaceCall) -> Any:
        """A module calls attention, through the interface's table or its own eager function."""
        return call.run()

    def on_rotation(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A function that applies a rotation was called."""

    def run_module(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """An observed module is called."""
        return forward(*args, **kwargs)


NO_OBSERVER = Observer()
OBSERVER: ContextVar[Observer] = ContextVar("toeplens_observer", default=NO_OBSERVER)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Report the passes of this thread to this observer."""
    token = OBSERVER.set(observer)
    try:
        yield
    finally:
        OBSERVER.reset(token)


def module_entries(modules: Iterable[nn.Module]) -> Iterator[PatchEntry]:
    """Observed modules: their calls go through `Observer.run_module`."""

    def observed(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return OBSERVER.get().run_module(module, original, args, kwargs)

        return forward

    for module in modules:
        yield vars(module), "forward", lambda before, module=module: observed(module, module.forward)


def interface_table() -> dict[str, Any]:
    """The attention functions of transformers, by name. Raises `EnvironmentFailure` without transformers."""
    return import_transformers().AttentionInterface._global_mapping


def table_entries(names: Iterable[str]) -> Iterator[PatchEntry]:
    """Observed functions for the interface's table."""
    for name in names:
        yield interface_table(), name, partial(_observe_function, True)


def eager_entries(model: nn.Module) -> Iterator[PatchEntry]:
    """Observed functions for the eager attention in the Python modules that define the model's attention."""
    for namespace in namespaces_of(model):
        for name in [name for name, value in namespace.items() if name.endswith(_EAGER) and callable(value)]:
            yield namespace, name, partial(_observe_function, False)


def _observe_function(from_table: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def observed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        observer = OBSERVER.get()
        if observer is NO_OBSERVER:
            return function(module, *args, **kwargs)
        call = interface_call(function, from_table, module, *args, **kwargs)
        previous = [ref() for ref in observer.last_call]
        current = (module, call.q, call.k)
        if not observer.joins_calls and previous and all(x is y for x, y in zip(previous, current, strict=True)):
            problem = "have several products of the same weights, so they have no single effects"
            raise InputError(f"model: heads of {type(module).__name__} {problem}.")
        output = observer.attend(call)
        observer.last_call = tuple(map(weakref.ref, current))
        return output

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
