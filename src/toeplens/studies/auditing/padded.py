"""Audits of sequences of different lengths; padding is excluded from all measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from toeplens.ground import InputError
from toeplens.lens import NoForm
from toeplens.sources.huggingface import AttentionCall, Change, compared
from toeplens.sources.huggingface.calls import Place
from toeplens.sources.huggingface.load import Loaded
from toeplens.sources.huggingface.model import precision, tolerance
from toeplens.studies.auditing import measuring
from toeplens.studies.auditing.kept import Kept
from toeplens.studies.auditing.record import Measured


@torch.no_grad()
def measure_padded(
    loaded: Loaded,
    inputs: Mapping[str, Tensor],
    there: Bool[Tensor, "B N"],
    layers: frozenset[int] | None,
    kept: Kept,
    report: measuring.Progress,
    changes: Sequence[Change] = (),
) -> tuple[list[Measured], float]:
    """`measuring.measure` for sequences with padding on the right, the longest first and the shortest last.

    Queries in the padding are excluded from all measures.

    Arguments
        there  mask of the tokens that are not padding

    Also raises `InputError` if padding changes the model's output for the tokens before it.
    """
    if kept.get(measuring.PASS) is None:
        check_padding(loaded, inputs, int(there[-1].sum()))

    def own(call: AttentionCall, tokens: Tensor) -> Measured:
        seen = there.to(call.q.device)[:, None, :, None]  # queries in the padding see nothing
        visible = seen.expand(-1, 1, -1, call.k.shape[2]) if call.visible is None else call.visible & seen
        masked = replace(call, visible=visible)
        found = measuring.measure_call(masked, tokens, changes)
        return replace(found, layer=replace(found.layer, unknown=_why(masked, found.layer.unknown)))

    return measuring.measure(loaded, inputs, layers, kept, report, changes, own)


def check_padding(loaded: Loaded, inputs: Mapping[str, Tensor], length: int) -> None:
    """Raise `InputError` if padding changes the model's output for the shortest sequence, the last one.

    The head outputs for its last token are compared in every call: without padding, and batched with the longest one.
    """
    model = loaded.model
    alone: dict[Place, Float[Tensor, "H d"]] = {}
    beside: dict[Place, Float[Tensor, "H d"]] = {}

    def keep(call: AttentionCall) -> None:
        alone[call.place] = call.heads[0, -1].clone()

    def keep_padded(call: AttentionCall) -> None:
        if call.q.shape[2] != len(inputs["input_ids"][0]):
            raise InputError(
                f"tokens must be sequences of one length: padding among the queries of {call.module} is unknown."
            )
        beside[call.place] = call.heads[-1, length - 1].clone()

    masks = [name for name in inputs if name.endswith("attention_mask")]
    compared(model, {name: x[-1:, :length] for name, x in inputs.items() if name not in masks}, keep)
    compared(model, {name: x[[0, -1]] for name, x in inputs.items()}, keep_padded)
    same = alone.keys() == beside.keys()
    far = max(_apart(alone[place], beside[place]) for place in alone) if same else torch.inf
    if not far <= tolerance(precision(model), "states"):
        raise InputError(
            f"tokens must be sequences of one length: padding changes the outputs of {type(model).__name__} (by "
            f"{far:.1e})."
        )


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    size = float(one.abs().max())
    return float((one - other).abs().max()) / (size if size > 0 else 1.0) if one.shape == other.shape else torch.inf


def _why(call: AttentionCall, unknown: str | None) -> str | None:
    """Why there are no shares: position in the keys can only be separated for sequences of one length."""
    if unknown is None or call.rotation is not None or call.bias is not None:
        return unknown
    try:
        call.placed()
    except NoForm:
        return unknown
    return f"{call.module}: position is in its keys, so at least {measuring.MEANS} sequences of one length are needed."
