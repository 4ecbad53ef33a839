"""Is position out of a host, and is everything else as it was? Run on a few tokens, without position, and looked at."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from toeplens.ground import InputError
from toeplens.sources.huggingface.hosts.anatomy import Anatomy, run, trial
from toeplens.sources.huggingface.hosts.interface import Call, plain, recorded

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_ELSEWHERE = ("position_bias", "position_embeddings")


def prove_host(host: Any, anatomy: Anatomy) -> None:
    """Raise `InputError` unless the model without position is blind to positions, and its attention what it was.

    With no encoding in any layer: each layer's attention, formed by ours, is what the module's own gives for the same
    queries, keys and mask; with other position ids the model says the same; and with one token in all places it says
    the same in all of them (whatever a table adds at the input shows there).
    """
    model, kind = host.model, type(host.model).__name__
    with host.without_position(), trial(model), recorded() as calls:
        inputs = anatomy.example()
        first = run(model, inputs)
        worst = max((_apart(call.out, _own(call)) for call in calls), default=0.0)
        moved = run(model, inputs | _spread(inputs)) if _takes_positions(model) else first
        even = _reads_tokens(model) and all(call.kwargs.get("s_aux") is None for call in calls)  # sinks count the keys
        alike = run(model, {name: torch.full_like(x, 3) for name, x in inputs.items()}) if even else None
    allowed = TOLERANCES.get(first.dtype, 5e-2)
    if worst > allowed:
        raise InputError(
            f"model: attention of {kind} does more than its queries, keys and mask say (apart by {worst:.1e} of the "
            f"largest output, allowed {allowed:.0e}); an encoding cannot be installed in it."
        )
    if host.layers is not None:
        return
    told = _apart(moved, first)
    if alike is not None and alike.ndim == 3:  # one token in all places
        told = max(told, _apart(alike, alike[:, :1].expand_as(alike)))
    if told > allowed:
        raise InputError(
            f"model: {kind} still tells positions apart with its own out of the way (by {told:.1e} of the largest "
            f"output); an encoding cannot be installed in it."
        )


def _own(call: Call) -> Tensor:
    """The module's own attention of the same, without what position adds."""
    kwargs = {name: value for name, value in call.kwargs.items() if name not in _ELSEWHERE}
    return plain(call.module, call.q, call.k, call.v, call.mask, **kwargs)[0]


def _spread(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other positions, in the same order; a mask says that they are of one text."""
    tokens = inputs["input_ids"]
    positions = 2 * torch.arange(tokens.shape[1], device=tokens.device)[None] + 1
    return {"position_ids": positions, "attention_mask": torch.ones_like(tokens)}


def _reads_tokens(model: Any) -> bool:
    return model.main_input_name == "input_ids"


def _takes_positions(model: Any) -> bool:
    return _reads_tokens(model) and "position_ids" in inspect.signature(model.forward).parameters


def _apart(a: Tensor, b: Tensor) -> float:
    size = float(b.detach().double().abs().max())
    difference = float((a.detach().double() - b.detach().double()).abs().max())
    return difference / size if size else difference
