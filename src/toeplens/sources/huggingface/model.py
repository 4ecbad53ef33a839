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
from toeplens.ground import EnvironmentFailure, InputError, invalid
from toeplens.ground.machine import out_of_memory

_TOLD = 3  # maximum names in a message
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
    if isinstance(error, EOFError):
        return "a file ends too early"
    if isinstance(error, KeyError) and text:
        return f"{text} is missing"
    name = type(error).__name__
    return (text if checked or isinstance(error, _PLAIN) else f"{name}: {text}") if text else name


def token_ids(tokenizer: Any, text: str, **options: Any) -> list[Any]:
    """The token ids of a text, or lists of them if the options ask for several."""
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
CONTEXT = "toeplens_pass"  # argument by which layers pass on the context of a pass, and a module to its attention
BEFORE = "toeplens_before"  # attribute of an attention module: its previous attention implementation
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


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:_TOLD]) + (f" and {len(names) - _TOLD} more" if len(names) > _TOLD else "")


def not_loaded(name: str, why: str) -> InputError:
    """The error for a model of this name."""
    return InputError(f"model: {name} could not be loaded: {why}.")


def not_understood(name: str, why: str) -> InputError:
    """The error for an attention module of this name."""
    return InputError(f"model: the attention of {name} was not understood: {why}.")


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
    found: list[FunctionType] = []
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
    with suppress(NotImplementedError, AttributeError):
        return model.get_input_embeddings()


def precision(model: nn.Module) -> torch.dtype:
    """The coarsest dtype that the model's numbers are rounded to, even if later converted: that of its weights, or of
    products under autocast."""
    used = {product_dtype(weight) for weight in model.parameters()}
    found = {dtype if dtype in _TOLERANCES else torch.float32 for dtype in used}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def apart(made: Tensor, own: Tensor) -> float:
    """Largest difference, relative to the largest of the second; infinite for other shapes."""
    size = float(own.abs().max())
    return float((made - own).abs().max()) / (size if size > 0 else 1.0) if made.shape == own.shape else torch.inf


def tolerance(dtype: torch.dtype, of: Rounded = "call") -> float:
    """Largest relative difference that rounding explains; models round to float32 inside whatever their dtype is."""
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.float32])[of]


# (mapping, name, value): ``value(before)`` is stored at ``mapping[name]``
Entry = tuple[dict[str, Any], str, Callable[[Any], Any]]

_ABSENT = object()
_LOCK = threading.Lock()


@dataclass
class _Loan:
    mapping: dict[str, Any]  # kept alive, so that its id stays unique
    before: Any
    passes: int = 0


_LOANS: dict[tuple[int, str], _Loan] = {}
_ALONE: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()


@contextmanager
def patched(model: nn.Module, *changes: Iterable[Entry]) -> Iterator[None]:
    """Put a model in evaluation mode without a key cache and apply other changes; restores everything afterwards.

    Only one such pass of a model runs at a time: other threads wait. Passes of other models may change what they share
    with it: the first one makes the change, the last one reverts it. So patched values must work for any caller.
    """
    with _LOCK:
        lock = _ALONE.setdefault(model, threading.RLock())
    taken: list[tuple[int, str]] = []
    with lock:
        try:
            for mapping, name, value in chain(_evaluation(model), *changes):
                key = (id(mapping), name)
                with _LOCK:
                    if key not in _LOANS:
                        before = mapping.get(name, _ABSENT)
                        mapping[name] = value(before)
                        _LOANS[key] = _Loan(mapping, before)
                    _LOANS[key].passes += 1
                taken.append(key)
            yield
        finally:
            for key in reversed(taken):
                with _LOCK:
                    loan = _LOANS[key]
                    loan.passes -= 1
                    if loan.passes == 0:
                        del _LOANS[key]
                        if loan.before is _ABSENT:
                            del loan.mapping[key[1]]
                        else:
                            loan.mapping[key[1]] = loan.before


def asking_for(model: nn.Module, name: str) -> Iterator[Entry]:
    """Make a model use the attention implementation of this name."""
    for config in configs_of(model):
        yield vars(config), "_attn_implementation_internal", lambda before: name


def _evaluation(model: nn.Module) -> Iterator[Entry]:
    """Evaluation mode in every module, no cache in any configuration, dict outputs, rotations without history."""
    for module in model.modules():
        yield vars(module), "training", lambda before: False
        yield from _without_history(module)
    for config in configs_of(model):
        if "use_cache" in vars(config):
            yield vars(config), "use_cache", lambda before: False
        if vars(config).get("return_dict") is False:
            yield vars(config), "return_dict", lambda before: True


def _without_history(module: nn.Module) -> Iterator[Entry]:
    """Make a rotation whose frequencies grow with the longest sequence so far (transformers' `dynamic` scaling, one
    rotation or one per type of layer) treat each sequence as the first."""
    kinds: Any = getattr(module, "rope_type", None)
    kinds = kinds if isinstance(kinds, dict) else {"": kinds}
    prefixes = [f"{name}_" if name else "" for name, kind in kinds.items() if "dynamic" in str(kind)]
    if not prefixes or not hasattr(module, "original_max_seq_len"):
        return
    own, forward = cast("Any", module), module.forward

    def fresh(*args: Any, **kwargs: Any) -> Any:
        for prefix in prefixes:
            setattr(own, f"{prefix}max_seq_len_cached", own.original_max_seq_len)
            frequencies = getattr(own, f"{prefix}original_inv_freq").to(getattr(own, f"{prefix}inv_freq").device)
            own.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
        return forward(*args, **kwargs)

    for prefix in prefixes:
        yield module._buffers, f"{prefix}inv_freq", lambda before: before
        yield vars(module), f"{prefix}max_seq_len_cached", lambda before: before
    yield vars(module), "attention_scaling", lambda before: before
    yield vars(module), "forward", lambda before: fresh


_ORIGINAL = "toeplens_original"  # attribute of a patched function: the original
_EAGER = "eager_attention_forward"  # suffix of the name of a model's own eager attention


@dataclass(frozen=True)
class AttentionInputs:
    """What a module passes to an attention function."""

    function: Callable[..., Any]  # the function that it calls
    from_table: bool  # whether that is an entry of the interface's table, or the model's own eager function
    module: nn.Module
    q: Tensor  # [B, H, Nq, d], [B, G, Nk, d], [B, G, Nk, dv]
    k: Tensor
    v: Tensor
    mask: Tensor | None  # added to the logits, or True where a key is visible
    args: tuple[Any, ...]  # other arguments, without the context of a pass
    how: dict[str, Any]
    context: Any = None  # what an installed encoding passes on (`installed.LayerContext`)

    @property
    def scale(self) -> float:
        """The factor of q . k that is passed on."""
        return self.q.shape[-1] ** -0.5 if self.how.get("scaling") is None else self.how["scaling"]

    def causal(self, default: bool) -> bool:
        """Whether the module says that it is causal."""
        said = self.how.get("is_causal")
        return bool(getattr(self.module, "is_causal", default) if said is None else said)

    def run(self) -> tuple[Tensor, Tensor | None]:
        """The function's outputs, [B, Nq, H, dv], and weights."""
        more = self.how if self.context is None else self.how | {CONTEXT: self.context}
        return self.function(self.module, self.q, self.k, self.v, self.mask, *self.args, **more)


def inputs_of(function: Any, from_table: bool, module: nn.Module, *args: Any, **how: Any) -> AttentionInputs:
    """The inputs in a call of an attention function."""
    names = ("query", "key", "value", "attention_mask")[len(args) :]
    q, k, v, mask = *args[:4], *(how.pop(name) for name in names)
    return AttentionInputs(function, from_table, module, q, k, v, mask, args[4:], how, how.pop(CONTEXT, None))


class Observer:
    """Is called on events in the passes of its thread; this base class changes nothing."""

    pieces = False  # whether several calls of a module with the same queries and keys are one; if not, an error
    skips = False  # whether its passes may leave out modules
    asked: tuple[weakref.ref[Any], ...] = ()  # a module, queries and keys

    def attend(self, call: AttentionInputs) -> Any:
        """A module calls attention, through the interface's table or its own eager function."""
        return call.run()

    def rotated(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A function that applies a rotation was called."""

    def visit(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """An observed module is called."""
        return forward(*args, **kwargs)


NOBODY = Observer()
OBSERVER: ContextVar[Observer] = ContextVar("toeplens_observer", default=NOBODY)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Report the passes of this thread to this observer."""
    token = OBSERVER.set(observer)
    try:
        yield
    finally:
        OBSERVER.reset(token)


def visited(modules: Iterable[nn.Module]) -> Iterator[Entry]:
    """Observed modules: their calls go through `Observer.visit`."""

    def observed(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return OBSERVER.get().visit(module, original, args, kwargs)

        return forward

    for module in modules:
        yield vars(module), "forward", lambda before, module=module: observed(module, module.forward)


def table() -> dict[str, Any]:
    """The attention functions of transformers, by name. Raises `EnvironmentFailure` without transformers."""
    return library().AttentionInterface._global_mapping


def table_entries(names: Iterable[str]) -> Iterator[Entry]:
    """Observed functions for the interface's table."""
    for name in names:
        yield table(), name, partial(_observed, True)


def eager_entries(model: nn.Module) -> Iterator[Entry]:
    """Observed functions for the eager attention in the Python modules that define the model's attention."""
    for space in namespaces_of(model):
        for name in [name for name, value in space.items() if name.endswith(_EAGER) and callable(value)]:
            yield space, name, partial(_observed, False)


def _observed(from_table: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def observed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        observer = OBSERVER.get()
        if observer is NOBODY:
            return function(module, *args, **kwargs)
        call = inputs_of(function, from_table, module, *args, **kwargs)
        before = [ref() for ref in observer.asked]
        asked = (module, call.q, call.k)
        if not observer.pieces and before and all(x is y for x, y in zip(before, asked, strict=True)):
            several = "have several products of the same weights, so they have no single effects"
            raise InputError(f"model: heads of {type(module).__name__} {several}.")
        made = observer.attend(call)
        observer.asked = tuple(map(weakref.ref, asked))
        return made

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
