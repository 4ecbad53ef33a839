"""The captured pass against a plain one: whether what was taken apart is the model as it runs by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from toeplens.ground import InputError
from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.capture.calls import AttentionCall
from toeplens.sources.huggingface.capture.observed_pass import captured
from toeplens.sources.huggingface.failures import of_libraries, words
from toeplens.sources.huggingface.model import input_embedding, precision, tolerance
from toeplens.sources.huggingface.patches import Entry, patched

_LAST = 64  # positions of a language model whose logits are formed: those of all may not fit
_ROWS = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask")
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "n_ctx")


def compared(model: Any, inputs: Mapping[str, Any], on_layer: Callable[[AttentionCall], None]) -> float:
    """`captured`, and a plain pass of the model in its own attention: the largest difference of their outputs.

    It is relative to the largest output. The outputs are the model's first, of the first sequence: last states, or of a
    language model the logits at the last 64 positions, on which all layers and earlier positions have their effect. A
    model that draws at random draws the same in both passes, and the caller's generators stay as they were.

    Raises `InputError` where they are not the same but for rounding, and as `captured`.
    """
    with patched(model, _shortened(model)), torch.no_grad():
        own = _first(_plain(model, _first_sequence(inputs)))
        with _drawn_alike(model):
            made = _first(captured(model, inputs, on_layer))
        far, allowed = _apart(made[: len(own)], own), tolerance(precision(model), "pass")
        if not far <= allowed and len(own) < len(made):  # sequences may have to do with each other
            far = _apart(made, _first(_plain(model, inputs)))
    if not far <= allowed:
        raise InputError(
            f"model: {type(model).__name__} was not understood: taken apart, its outputs differ by "
            f"{far:.1e} (relative) from those of its own pass, where at most {allowed:.0e} is allowed."
        )
    return far


def _first_sequence(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with the first of their sequences alone, if they are tokens and their padding; else all of them."""
    if any(name not in _ROWS or not isinstance(x, Tensor) or x.ndim != 2 for name, x in inputs.items()):
        return dict(inputs)
    return {name: x[:1] for name, x in inputs.items()}


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
    """The output embedding at the last positions alone, where it is a module of its own."""
    embedding = model.get_output_embeddings()
    if isinstance(embedding, nn.Linear) and embedding is not input_embedding(model):
        forward = embedding.forward

        def last(x: Tensor) -> Tensor:
            return forward(x[:, -_LAST:] if x.ndim == 3 else x)

        yield vars(embedding), "forward", lambda before: last


def _first(output: Any) -> Tensor:
    """The first tensor that a model returns."""
    return output if isinstance(output, Tensor) else next(x for x in output.values() if isinstance(x, Tensor))
