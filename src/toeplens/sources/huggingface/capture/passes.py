"""A pass of a Hugging Face model whose attention is handed over call by call, and its distance from a plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from toeplens.ground import InputError
from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.capture.calls import AttentionCall
from toeplens.sources.huggingface.capture.observer import ROTATIONS, PassObserver, without_softmax
from toeplens.sources.huggingface.interface import (
    OBSERVER,
    Entry,
    asking_for,
    eager_entries,
    patched,
    table,
    table_entries,
)
from toeplens.sources.huggingface.model import (
    NAME,
    asks_interface,
    attention_modules,
    checked_model,
    configs_of,
    input_embedding,
    is_host,
    namespaces_of,
    of_libraries,
    precision,
    tolerance,
    words,
)

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
            raise InputError(f"inputs must contain all tokens of a pass and not {name}.")
    observer = PassObserver(model, inputs, on_layer, instead)
    if not observer.modules:
        raise InputError(f"model: {type(model).__name__} has no module named after attention.")
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
    if not observer.counts:
        raise InputError(f"model: {without_softmax(type(model).__name__, observer.passed)}.")
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


_LAST = 64  # positions of a language model whose logits are formed: those of all may not fit
_ITS_OWN = ("eager", "sdpa")  # transformers' attention that a captured pass is as well
_FIRST = 256  # tokens of a long sequence that a plain pass is of, where what comes later is nothing to them
_ROWS = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask")
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "n_ctx")


def compared(model: Any, inputs: Mapping[str, Any], on_layer: Callable[[AttentionCall], None]) -> float:
    """`captured`, and a plain pass of the model in its own attention: the largest difference of their outputs.

    It is relative to the largest output. The outputs are the model's first, of the first sequence, of a long one of its
    first 256 tokens: last states, or of a language model the logits at the last 64 positions, on which all layers and
    earlier positions have their effect. Where these are not the same, as sequences or positions may have to do with
    others, they are of all; and of all tokens where attention is written by hand, or by somebody else. A model that
    draws at random draws the same in both passes, and the caller's generators stay as they were.

    Raises `InputError` where they are not the same but for rounding, and as `captured`.
    """
    with patched(model, _shortened(model)), torch.no_grad():
        few, own = _own(model, inputs)
        with _drawn_alike(model):
            made = _first(captured(model, inputs, on_layer))
        beside = made[tuple(slice(size) for size in own.shape[:2])]
        far, allowed = _apart(beside, own), tolerance(precision(model), "pass")
        if not far <= allowed and few is not inputs:
            far = _apart(made, _first(_plain(model, inputs)))
    if not far <= allowed:
        dtype = str(precision(model)).removeprefix("torch.")
        coarse = "" if dtype.endswith(("32", "64")) else f" ({dtype} rounds coarsely: use --dtype float32)"
        raise InputError(
            f"model: {type(model).__name__} was not understood: its reproduced outputs differ by {far:.1e} "
            f"(relative), at most {allowed:.0e} is allowed{coarse}."
        )
    return far


def _own(model: Any, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Tensor]:
    """What a plain pass reads, and its output: of a few of the inputs, or of all where these do not go alone."""
    few = _few(inputs, _FIRST if _known(model) and not any(name.startswith("decoder") for name in inputs) else None)
    if few is not inputs:
        with suppress(InputError):
            return few, _first(_plain(model, few))
    return inputs, _first(_plain(model, inputs))


def _known(model: Any) -> bool:
    """Whether all attention is of transformers' interface and its own, which long inputs do not change."""
    names = {getattr(config, "_attn_implementation", None) for config in configs_of(model)}
    return asks_interface(*attention_modules(model)) and names <= {*_ITS_OWN, None}


def _few(inputs: Mapping[str, Any], first: int | None) -> Mapping[str, Any]:
    """The inputs with the first of their sequences alone, if they are tokens and their padding, and with its first
    tokens; where there is no more to leave out, all of them."""
    if any(name not in _ROWS or not isinstance(x, Tensor) or x.ndim != 2 for name, x in inputs.items()):
        return inputs
    few = {name: x[:1, :first] for name, x in inputs.items()}
    return inputs if all(x.shape == inputs[name].shape for name, x in few.items()) else few


def _apart(made: Tensor, own: Tensor) -> float:
    """The largest difference, relative to the largest output."""
    size = float(own.abs().max())
    return float((made - own).abs().max()) / (size if size > 0 else 1.0) if made.shape == own.shape else torch.inf


def _plain(model: Any, inputs: Mapping[str, Any]) -> Any:
    """A pass of the model by itself. Raises `InputError` for whatever goes wrong in it but a full memory."""
    try:
        with _drawn_alike(model):
            return model(**inputs)
    except Exception as error:
        if out_of_memory(error) or not of_libraries(error):
            raise
        why = f"{words(error)}{_longest(model, inputs)}"
        raise InputError(f"model: {type(model).__name__} does not run on this input: {why}.") from error


def _drawn_alike(model: Any) -> AbstractContextManager[None]:
    """What is drawn at random in it leaves the generators of the CPU and of the model's device as they were."""
    return torch.random.fork_rng([model.device] if model.device.type == "cuda" else [])


def _longest(model: Any, inputs: Mapping[str, Any]) -> str:
    """What its configuration says of the longest sequence, where one is longer."""
    length = max((x.shape[1] for x in inputs.values() if isinstance(x, Tensor) and x.ndim > 1), default=0)
    known = {name: getattr(model.config, name, None) for name in _LIMITS}
    said = [f"{name} = {limit}" for name, limit in known.items() if isinstance(limit, int) and 0 < limit < length]
    return f" (a sequence has {length} tokens, and its configuration says {said[0]})" if said else ""


def _shortened(model: Any) -> Iterator[Entry]:
    """The output embedding at the last positions alone, and at those that are the last of the first tokens of more,
    where it is a module of its own."""
    embedding = model.get_output_embeddings()
    if isinstance(embedding, nn.Linear) and embedding is not input_embedding(model):
        forward = embedding.forward

        def last(x: Tensor) -> Tensor:
            if x.ndim != 3:
                return forward(x)
            ends = (x[:, _FIRST - _LAST : _FIRST], x[:, -_LAST:]) if x.shape[1] > _FIRST else (x[:, -_LAST:],)
            return forward(torch.cat(ends, 1))

        yield vars(embedding), "forward", lambda before: last


def _first(output: Any) -> Tensor:
    """The first tensor that a model returns."""
    return output if isinstance(output, Tensor) else next(x for x in output.values() if isinstance(x, Tensor))
