"""The captured pass against a plain one: whether what was taken apart is the model as it runs by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from toeplens.ground import InputError
from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.capture.calls import AttentionCall
from toeplens.sources.huggingface.capture.observed_pass import captured
from toeplens.sources.huggingface.failures import of_libraries, words
from toeplens.sources.huggingface.model import (
    asks_interface,
    attention_modules,
    configs_of,
    input_embedding,
    precision,
    tolerance,
)
from toeplens.sources.huggingface.patches import Entry, patched

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
        coarse = "" if dtype.endswith(("32", "64")) else f"; in {dtype} this may be rounding: use --dtype float32"
        raise InputError(
            f"model: {type(model).__name__} was not understood: taken apart, its outputs differ by "
            f"{far:.1e} (relative) from those of its own pass, where at most {allowed:.0e} is allowed{coarse}."
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
        raise InputError(f"model: {type(model).__name__} does not run on this input by itself: {why}.") from error


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
