"""What the heads of a Hugging Face model put out when position is taken from them, on the inputs that they have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from toeplens.sources.huggingface.capture.calls import AttentionCall, Place
from toeplens.sources.huggingface.capture.observed_pass import captured
from toeplens.sources.huggingface.interventions.change import Change
from toeplens.sources.huggingface.interventions.outputs import changed_outputs


def without_position(
    model: Any, inputs: Mapping[str, Any], places: Collection[Place]
) -> dict[Place, Float[Tensor, "B Nq H dv"]]:
    """All heads' outputs with their rotation stopped (E_t becomes J) and their bias left out, layers before untouched.

    Arguments
        inputs  what ``forward`` takes
        places  side, kind and layer of the calls that are wanted

    A call without rotation and bias, or whose rotation is not known, is left out. What is added at the input stays: it
    belongs to no head. Raises `InputError` as `captured` does.
    """
    found: dict[Place, Tensor] = {}

    def keep(call: AttentionCall) -> None:
        if call.place in places and call.unknown is None and (call.rotation is not None or call.bias is not None):
            change = Change(
                layer=call.layer,
                kind=call.kind,
                side=call.side,
                speed=1.0 if call.rotation is None else 0.0,
                bias=call.bias is None,
            )
            found[call.place] = changed_outputs(call, change).to(call.heads.dtype)

    captured(model, inputs, keep)
    return found
