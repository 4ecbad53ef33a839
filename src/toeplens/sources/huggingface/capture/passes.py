"""A pass of a Hugging Face model with captured attention, and the difference of its output from a plain pass."""

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

_HELD = ("past_key_values", "cache_params")  # inputs that would contain the keys of all layers


@torch.no_grad()
def captured(
    model: Any,
    inputs: Mapping[str, Any],
    on_layer: Callable[[AttentionCall], None],
    instead: Callable[[AttentionCall], Tensor | None] | None = None,
) -> Any:
    """Run a transformers model once and pass each verified attention call to ``on_layer`` before the pass continues.

    The model runs in evaluation mode without a key cache. If it uses transformers' attention interface, its own eager
    attention runs, some queries at a time. Afterwards the model and transformers' tables are restored, even after an
    error. Only one layer's attention is in memory at a time, unless ``on_layer`` keeps it. Passes in other threads are
    not observed. Layers without attention (recurrences, convolutions, linear attention) are ignored; modules that are
    named after attention are only ignored if nothing in them can be a softmax.

    Arguments
        model     a `transformers.PreTrainedModel`
        inputs    arguments of its ``forward`` by name: ``input_ids``, ``attention_mask``, ``decoder_input_ids``, ...
        on_layer  called with each `AttentionCall`, in the order of the pass
        instead   called with each call, too, before the pass continues; returns a replacement of its ``heads``, or
                  None. The call itself is as the model made it. If it consists of several products of the same weights,
                  ``instead`` is called with each of them, all with the same layer

    Returns the model's output. Raises `InputError` that names the module if an attention is not supported: weights and
    outputs formed from the parts differ from the model's own, or no parts were found, or no module is named after
    attention. Raises `EnvironmentFailure` if transformers is not installed.
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
    """Observe attention that uses the interface: its entry in the table, or the model's own eager function.

    Names are not changed, as models depend on them, nor are masks, which for torch's fused attention may be boolean, or
    None if causal.
    """
    if not asks_interface(*attention_modules(model)):
        return
    if is_host(model):  # it uses the attention of toeplens
        yield from table_entries([NAME])
        return
    name = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    yield from asking_for(model, name)
    yield from table_entries([name]) if name in table() else eager_entries(model)


def _rotations(model: nn.Module) -> Iterator[Entry]:
    """Functions that apply rotations: those in the modules that define the attention, and its own methods."""
    for names in namespaces_of(model):
        for name in [name for name, value in names.items() if callable(value) and ROTATIONS.fullmatch(name)]:
            yield names, name, _observed
    for module in attention_modules(model):
        for name in {name for cls in type(module).__mro__ for name in vars(cls) if ROTATIONS.fullmatch(name)}:
            method = getattr(module, name)
            if callable(method):
                yield vars(module), name, lambda before, method=method: _observed(method)


def _observed(rotate: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, with calls reported to the thread's observer."""

    def observed(*args: Any, **kwargs: Any) -> Any:
        output = rotate(*args, **kwargs)
        OBSERVER.get().rotated(args, kwargs, output)
        return output

    return observed


_LAST = 64  # positions of a language model whose logits are computed, as those of all may not fit
_ITS_OWN = ("eager", "sdpa")  # transformers' implementations that a captured pass can be compared with
_FIRST = 256  # tokens of a long sequence in the plain pass, if later tokens do not affect them
_ROWS = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask")
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "n_ctx")


def compared(model: Any, inputs: Mapping[str, Any], on_layer: Callable[[AttentionCall], None]) -> float:
    """Run `captured` and a plain pass of the model in its own attention; returns the largest difference of outputs.

    The difference is relative to the largest output. Outputs are compared for the first sequence, of a long sequence
    only for its first 256 tokens: the last states, or for a language model the logits at the last 64 positions, which
    depend on all layers and earlier positions. If these are not equal, because sequences or positions affect one
    another, all outputs are compared; all tokens are used if the attention is custom code. Both passes draw the same
    random numbers, and the caller's generators are not changed.

    Raises `InputError` if the outputs differ by more than rounding, and as `captured` does.
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
    """The inputs and output of a plain pass: on a few of the inputs, or on all if these cannot be run separately."""
    few = _few(inputs, _FIRST if _known(model) and not any(name.startswith("decoder") for name in inputs) else None)
    if few is not inputs:
        with suppress(InputError):
            return few, _first(_plain(model, few))
    return inputs, _first(_plain(model, inputs))


def _known(model: Any) -> bool:
    """Whether all attention goes through transformers' interface with its own functions, at any input length."""
    names = {getattr(config, "_attn_implementation", None) for config in configs_of(model)}
    return asks_interface(*attention_modules(model)) and names <= {*_ITS_OWN, None}


def _few(inputs: Mapping[str, Any], first: int | None) -> Mapping[str, Any]:
    """The first sequence and its first tokens, if the inputs are only tokens and their padding mask; all inputs if
    there is no more to leave out."""
    if any(name not in _ROWS or not isinstance(x, Tensor) or x.ndim != 2 for name, x in inputs.items()):
        return inputs
    few = {name: x[:1, :first] for name, x in inputs.items()}
    return inputs if all(x.shape == inputs[name].shape for name, x in few.items()) else few


def _apart(made: Tensor, own: Tensor) -> float:
    """The largest difference, relative to the largest output."""
    size = float(own.abs().max())
    return float((made - own).abs().max()) / (size if size > 0 else 1.0) if made.shape == own.shape else torch.inf


def _plain(model: Any, inputs: Mapping[str, Any]) -> Any:
    """A plain pass of the model. Raises `InputError` for any failure except lack of memory."""
    try:
        with _drawn_alike(model):
            return model(**inputs)
    except Exception as error:
        if out_of_memory(error) or not of_libraries(error):
            raise
        why = f"{words(error)}{_longest(model, inputs)}"
        raise InputError(f"model: {type(model).__name__} does not run on this input: {why}.") from error


def _drawn_alike(model: Any) -> AbstractContextManager[None]:
    """Restore the random generators of the CPU and of the model's device afterwards."""
    return torch.random.fork_rng([model.device] if model.device.type == "cuda" else [])


def _longest(model: Any, inputs: Mapping[str, Any]) -> str:
    """The configuration's maximum length, if a sequence is longer."""
    length = max((x.shape[1] for x in inputs.values() if isinstance(x, Tensor) and x.ndim > 1), default=0)
    known = {name: getattr(model.config, name, None) for name in _LIMITS}
    said = [f"{name} = {limit}" for name, limit in known.items() if isinstance(limit, int) and 0 < limit < length]
    return f" (a sequence has {length} tokens, and its configuration says {said[0]})" if said else ""


def _shortened(model: Any) -> Iterator[Entry]:
    """Compute the output embedding only at the last positions, and at the last ones of the first tokens of longer
    inputs, if it is a separate module."""
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
    return output if isinstance(output, Tensor) else next(x for x in output.values() if isinstance(x, Tensor))
