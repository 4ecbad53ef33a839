"""Is position out of a host, and is everything else as it was? Run on a few tokens, without position, and looked at."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from toeplens.ground import InputError
from toeplens.hosts.anatomy import Anatomy, run, trial
from toeplens.hosts.interface import Call, plain, recorded

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_ELSEWHERE = ("position_bias", "position_embeddings")


def prove_host(host: Any, anatomy: Anatomy) -> None:
    """Raise `InputError` unless the model without position is blind to positions, and its attention what it was.

    With no encoding in any layer: each layer's attention, formed by ours, is what the module's own gives for the same
    queries, keys and mask; and with other position ids the model says the same. What is held only where a model takes
    position ids (T5 and BLOOM take none) is looked at in the tests for each family.
    """
    model, kind = host.model, type(host.model).__name__
    with host.without_position(), trial(model), recorded() as calls:
        inputs = anatomy.example()
        first = run(model, inputs)
        worst = max((_apart(call.out, _own(call)) for call in calls), default=0.0)
        moved = run(model, inputs | _spread(inputs)) if _takes_positions(model) else first
    allowed = TOLERANCES.get(first.dtype, 5e-2)
    if worst > allowed:
        raise InputError(
            f"model: attention of {kind} does more than its queries, keys and mask say (apart by {worst:.1e} of the "
            f"largest output, allowed {allowed:.0e}); an encoding cannot be installed in it."
        )
    if host.layers is None and _apart(moved, first) > allowed:
        raise InputError(
            f"model: {kind} still tells positions apart with its own out of the way (by {_apart(moved, first):.1e} of "
            f"the largest output); an encoding cannot be installed in it."
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


def _takes_positions(model: Any) -> bool:
    return model.main_input_name == "input_ids" and "position_ids" in inspect.signature(model.forward).parameters


def _apart(a: Tensor, b: Tensor) -> float:
    size = float(b.detach().double().abs().max())
    difference = float((a.detach().double() - b.detach().double()).abs().max())
    return difference / size if size else difference
