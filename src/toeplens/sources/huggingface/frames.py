"""Inputs that are no tokens (waveforms, features, vectors), as numbers by which whatever reads tokens can read them."""

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
from torch import Tensor, nn

from toeplens.ground import InputError, invalid
from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.capture.calls import AttentionCall
from toeplens.sources.huggingface.capture.passes import captured
from toeplens.sources.huggingface.loading import Loaded, open_model
from toeplens.sources.huggingface.model import of_libraries, words

_MASKS = "attention_mask"
_FIRST = 6  # bytes of the first number


class Numbered(Loaded):
    """A model that reads numbers of frames: it has vectors for none of them, and so no vocabulary."""

    @cached_property
    def vocabulary(self) -> int | None:
        """None: any number may be a frame's."""
        return None


def as_tokens(model: Any, inputs: Mapping[str, Any]) -> tuple[Numbered, Int[Tensor, "B N"]]:
    """A model whose main input is no ``input_ids``, and its inputs, as what an audit takes: a model and tokens.

    A token is a frame here: one of the N places that the first attention of a pass has queries for, as many as the
    model makes of a waveform's samples. Each has a number of its own, so that none is another's copy (there is no
    induction), and the first number is made of the inputs, so that other inputs have others. What is measured of heads'
    effects is how far the last states move. The model is the one that was given, with its modules, their names and
    weights; what differs is that it takes ``input_ids``, some of these sequences, whole.

    Arguments
        model   as `toeplens.sources.huggingface.loading.open_model` takes it
        inputs  what its ``forward`` takes, by name, the sequences first in each tensor: ``input_values`` [B, samples],
                ``input_features``, ``inputs_embeds``, ...

    Raises `InputError` for inputs without a tensor, or of different numbers of sequences, for a mask that hides
    something, for a model with an encoder and a decoder, for one that does not run on them, and as `captured` does.
    """
    loaded = open_model(model)
    given = _checked(loaded.model, inputs)
    count = len(next(iter(given.values())))
    frames = _frames(loaded.model, given)
    first = _first_number(given)
    numbers = first + torch.arange(count * frames).view(count, frames)
    said = {each.name: getattr(loaded, each.name) for each in fields(loaded)}
    return Numbered(**said | {"model": _reading(loaded.model, given, first, frames)}), numbers


def _checked(model: Any, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors among the inputs."""
    kind = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"model: {kind} has an encoder and a decoder. Give only its encoder.")
    if not isinstance(inputs, Mapping) or not inputs:
        raise InputError("inputs must be the tensors that the model's forward takes, by name.")
    given = {str(name): x for name, x in inputs.items() if x is not None}
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.ndim < 2 or not x.numel():
            what = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise invalid("inputs", f"have a tensor with the sequences first as {name}", got=str(what))
        if name not in inspect.signature(model.forward).parameters:
            raise InputError(f"inputs: {kind} does not take {name}. Its main input is {model.main_input_name}.")
    sizes = {name: len(x) for name, x in given.items()}
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{size} of {name}" for name, size in sizes.items())
        raise invalid("inputs", "have the same number of sequences", got=said)
    if any(name.endswith(_MASKS) and not bool(x.bool().all()) for name, x in given.items()):
        raise InputError("inputs must be of one length, without masked parts.")
    return given


def _frames(model: Any, given: Mapping[str, Tensor]) -> int:
    """How many queries the first attention of a pass has, from a pass of the first sequence."""
    found: list[int] = []

    def look(call: AttentionCall) -> None:
        found.append(call.q.shape[2])

    try:
        captured(model, {name: x[:1].to(model.device) for name, x in given.items()}, look)
    except InputError:
        raise
    except Exception as error:
        if out_of_memory(error) or not of_libraries(error):
            raise
        raise InputError(f"model: {type(model).__name__} does not run on this input: {words(error)}.") from error
    if found[0] < 2:
        raise InputError("inputs must give at least 2 frames, got 1.")
    return found[0]


def _first_number(given: Mapping[str, Tensor]) -> int:
    """A number made of all that is in the inputs."""
    digest = hashlib.sha256()
    for name, x in sorted(given.items()):
        digest.update(f"{name} {list(x.shape)} {x.dtype}".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:_FIRST], "big")


def _reading(model: Any, given: Mapping[str, Tensor], first: int, frames: int) -> Any:
    """The model, sharing all that it is made of, as one of the same name whose ``forward`` takes numbers of frames."""
    kind: Any = type(model)

    def forward(self: Any, input_ids: Int[Tensor, "B N"]) -> Any:
        """A pass over the sequences whose frames these are."""
        rows, places = (input_ids - first) // frames, torch.arange(frames, device=input_ids.device)
        whole = input_ids.shape[-1] == frames and bool((input_ids == first + rows[:, :1] * frames + places).all())
        if not whole or not 0 <= int(rows.min()) <= int(rows.max()) < len(next(iter(given.values()))):
            raise InputError(f"tokens must be whole sequences of {frames} frames. Give shorter inputs for fewer.")
        return kind.forward(self, **{name: x[rows[:, 0].to(x.device)].to(rows.device) for name, x in given.items()})

    def none(self: Any) -> nn.Module | None:
        """Nothing embeds a frame's number, or tells one frame from another."""
        return None

    methods = {"forward": forward, "get_input_embeddings": none, "get_output_embeddings": none}
    found = copy.copy(model)
    found.__class__ = type(kind.__name__, (kind,), methods | {"__module__": kind.__module__, "__doc__": kind.__doc__})
    return found
