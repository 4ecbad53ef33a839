"""Inputs other than tokens (waveforms, features, vectors), numbered so that code for tokens can use them."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from toeplens.backends.hf.capture import capture_attention
from toeplens.backends.hf.load import LoadedModel, open_model
from toeplens.backends.hf.model import device_of, library_errors
from toeplens.utils import InputError, invalid

_MASKS = "attention_mask"
_NUMBER_BYTES = 6  # bytes of the first frame number


class FrameReader(LoadedModel):
    """A model that reads frame numbers; it has no vocabulary."""

    @cached_property
    def vocabulary(self) -> int | None:
        """None: any number may be a frame's."""
        return None


def as_tokens(model: Any, inputs: Mapping[str, Any]) -> tuple[FrameReader, Int[Tensor, "B N"]]:
    """Wrap a model whose main input is not ``input_ids``, and its inputs, as a model and tokens for an audit.

    A token is a frame here: one of the N query positions of the first attention in a pass, such as those that a model
    forms from a waveform's samples. Each frame has its own number, so no frame is another's copy (there is no
    induction). The first number depends on the inputs, so different inputs get different numbers. The effects of heads
    are measured by how far the last states move. The returned model has the same modules, names and weights, but takes
    ``input_ids``: some of these sequences, complete.

    Arguments
        model   as for `toeplens.backends.hf.load.open_model`
        inputs  arguments of its ``forward`` by name, sequences along the first dimension: ``input_values``
                [B, samples], ``input_features``, ``inputs_embeds``, ...

    Raises `InputError` for inputs that are not whole sequences, for an encoder-decoder model, and as
    `toeplens.backends.hf.capture_attention` does.
    """
    loaded = open_model(model)
    tensors = _check_inputs(loaded.model, inputs)
    count, frames, digest = len(next(iter(tensors.values()))), _count_frames(loaded.model, tensors), hashlib.sha256()
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {list(x.shape)} {x.dtype}".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    first = int.from_bytes(digest.digest()[:_NUMBER_BYTES], "big")
    numbers = first + torch.arange(count * frames).view(count, frames)
    values = {attribute.name: getattr(loaded, attribute.name) for attribute in fields(loaded)}
    return FrameReader(**values | {"model": _frame_model(loaded.model, tensors, first, frames)}), numbers


def _check_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    class_name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"model: {class_name} has an encoder and a decoder. Give only its encoder.")
    if not isinstance(inputs, Mapping) or not inputs:
        raise InputError("inputs must be the tensors that the model's forward takes, by name.")
    tensors = {str(name): x for name, x in inputs.items() if x is not None}
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.ndim < 2 or not x.numel():
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise invalid("inputs", f"have a tensor with the sequences first as {name}", got=str(shape))
        if name not in inspect.signature(model.forward).parameters:
            raise InputError(f"inputs: {class_name} does not take {name}. Its main input is {model.main_input_name}.")
    sizes = {name: len(x) for name, x in tensors.items()}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{size} of {name}" for name, size in sizes.items())
        raise invalid("inputs", "have the same number of sequences", got=counts)
    if any(name.endswith(_MASKS) and not bool(x.bool().all()) for name, x in tensors.items()):
        raise InputError("inputs must be of one length, without masked parts.")
    return tensors


def _count_frames(model: Any, tensors: Mapping[str, Tensor]) -> int:
    """The number of queries of the first attention, from a pass over the first sequence."""
    counts: list[int] = []
    sample = {name: x[:1].to(device_of(model)) for name, x in tensors.items()}
    with library_errors(f"model: {type(model).__name__} does not run on this input: {{}}."):
        capture_attention(model, sample, lambda call: counts.append(call.q.shape[2]))
    if counts[0] < 2:
        raise InputError("inputs must give at least 2 frames, got 1.")
    return counts[0]


def _frame_model(model: Any, tensors: Mapping[str, Tensor], first: int, frames: int) -> Any:
    """A copy of the model that shares its modules, with a ``forward`` that takes frame numbers."""
    kind: Any = type(model)

    def forward(self: Any, input_ids: Int[Tensor, "B N"]) -> Any:
        """A pass over the sequences of these frames."""
        rows, positions = (input_ids - first) // frames, torch.arange(frames, device=input_ids.device)
        is_whole = input_ids.shape[-1] == frames and bool((input_ids == first + rows[:, :1] * frames + positions).all())
        if not is_whole or not 0 <= int(rows.min()) <= int(rows.max()) < len(next(iter(tensors.values()))):
            raise InputError(f"tokens must be whole sequences of {frames} frames. Give shorter inputs for fewer.")
        return kind.forward(self, **{name: x[rows[:, 0].to(x.device)].to(rows.device) for name, x in tensors.items()})

    # frame numbers are not embedded
    methods = {
        "forward": forward,
        **dict.fromkeys(("get_input_embeddings", "get_output_embeddings"), lambda self: None),
    }
    wrapped = copy.copy(model)
    wrapped.__class__ = type(kind.__name__, (kind,), methods | {"__module__": kind.__module__, "__doc__": kind.__doc__})
    return wrapped
