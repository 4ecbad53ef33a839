"""The forward pass of an audit: every attention call is proved and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.ground import InputError
from toeplens.ground.words import or_none
from toeplens.lens import (
    Behaviour,
    FrequencyUse,
    NoForm,
    Patterns,
    PatternSums,
    RotaryOffsets,
    behaviour,
    frequency_use,
    rotary_offsets,
    toeplitz_profile,
)
from toeplens.sources.huggingface import AttentionCall, Change, compared, compared_changed
from toeplens.sources.huggingface.calls import Place
from toeplens.sources.huggingface.interventions import NotThere, with_changed_logits
from toeplens.sources.huggingface.model import precision, tolerance
from toeplens.studies.auditing.inputs import Work
from toeplens.studies.auditing.record import HeadRecord, LayerRecord, Measured
from toeplens.studies.kit.kernels import ROWS, KernelEnds, decays_of, kernel_ends

MEANS = 8  # sequences needed to separate position from content by a mean over them
_SHARES = ("positional", "symbolic", "interaction")
_PATTERNS = [each.name for each in fields(Patterns) if each.name not in ("profile", "eligible")]
_OF_CALL = ("side", "kind", "layer", "module", "scale", "softcap", "causal", "window", "chunk")
_OF_PROOF = ("weights", "outputs", "tolerance", "used", "logit", "undecided")
_LONG = 32  # tokens per head dimension from which on logits by offset are cheaper by Fourier transforms


def measure(work: Work) -> tuple[list[Measured], float]:
    """The measured calls in the order of the forward pass, and the difference between the captured and a plain pass.

    Calls with saved measures are proved again but not measured again. If everything is saved, nothing is run.
    """
    loaded, kept, layers, changes = work.loaded, work.kept, work.options.layers, work.changes
    if (done := kept.get("pass")) is not None:
        saved = [each for number in done["calls"] if (each := kept.layer(number)) is not None]
        if len(saved) == len(done["calls"]):
            return saved, done["whole"]
    there = work.sequences.there
    if there is not None:
        check_padding(loaded.model, work.inputs, int(there[-1].sum()))
    seen: list[int] = []  # layers of the calls
    measured: dict[int, Measured] = {}  # by index of the call
    names = loaded.attention
    count = sum(not any(other.startswith(f"{name}.") for other in names) for name in names)

    def look(call: AttentionCall) -> None:
        loaded.check_attention(call.module)
        number = len(seen)
        seen.append(call.layer)
        if layers is None or call.layer in layers:
            found = kept.layer(number)
            tokens = work.inputs.get(f"{call.side}_input_ids", work.inputs["input_ids"])
            if found is None:
                with torch.no_grad():
                    found = measure_call(replace(call, weights=None), tokens, changes, there)
                kept.put_layer(number, found)
            measured[number] = found
        work.report("layers", len(seen), max(len(seen), count))  # some modules are called several times

    work.report("layers", 0, count)
    model, inputs = loaded.model, work.inputs
    whole = compared_changed(model, inputs, look, changes) if changes else compared(model, inputs, look)
    if layers is not None and not {*layers} <= {*seen}:
        raise NotThere("layers", min({*layers} - {*seen}), max(seen) + 1)
    kept.put("pass", {"calls": [*measured], "whole": whole})
    return [*measured.values()], whole


def measure_call(
    call: AttentionCall,
    tokens: Int[Tensor, "B N"],
    changes: Sequence[Change] = (),
    there: Bool[Tensor, "B N"] | None = None,
) -> Measured:
    """The measures of a call of a transformers model.

    Positional, symbolic and interaction shares are those of `toeplens.lens.behaviour`. If the attention itself does not
    depend on position (no rotation, no bias), position enters the keys through the input or the mask. The mean of the
    keys over sequences at each position is then their positional part.

    Arguments
        tokens   tokens of all sequences, as the encoder or decoder of the call reads them
        changes  interventions on the model; a head with changed logits only has attention patterns
        there    mask of the tokens that are not padding; queries in the padding are excluded from all measures
    """
    if there is not None:
        seen = there.to(call.q.device)[:, None, :, None].expand(-1, 1, -1, call.k.shape[2])
        call = replace(call, visible=seen if call.visible is None else call.visible & seen)
    placed, unknown = _placed(call, padded=there is not None)
    shares = None if unknown else behaviour(**placed)
    use = offsets = None
    bias = placed.get("bias")
    by_offset = bias if bias is None or bias.ndim < 4 else None
    if not unknown and placed["rotation"] is not None:
        placed.pop("k_position", None)
        for_frequencies: dict[str, Any] = {**placed, "bias": by_offset}
        use = frequency_use(**for_frequencies)
        offsets = rotary_offsets(
            placed["q"], placed["k"], len(placed["rotation"]), placed["lengths"], pairing="interleaved", layout="bhnd"
        )
    pairs: dict[str, Any] = {"frequencies": ()}
    if call.rotation is not None:
        pairs = {name: tuple(getattr(call.rotation, name).nonzero().flatten().tolist()) for name in ("dead", "tabled")}
        pairs["frequencies"] = tuple(call.rotation.frequencies.tolist())
    record = LayerRecord(
        **{name: getattr(call, name) for name in _OF_CALL},
        **{name: getattr(call.proof, name) for name in _OF_PROOF},
        **pairs,
        heads=call.q.shape[1],
        key_heads=call.k.shape[1],
        head_dim=call.q.shape[-1],
        position=_position(call, placed),
        unknown=unknown,
    )
    table = None if by_offset is None else by_offset.cpu().numpy()
    heads = head_records(record, sums_of(call, tokens), shares, use, table, offsets)
    for change in (change for change in changes if change.output is None and change.meets(call)):
        other = tuple(HeadRecord(call.side, call.kind, call.layer, head.head) for head in heads)
        if change.attention is None:
            other = head_records(record, sums_of(with_changed_logits(call, change), tokens), None, None)
        heads = tuple(other[head.head] if head.head in change.heads_of(call) else head for head in heads)
    return Measured(record, heads)


def check_padding(model: Any, inputs: Mapping[str, Tensor], length: int) -> None:
    """Raise `InputError` if padding changes the model's output for the shortest sequence, the last one.

    The head outputs for its last token are compared in every call: without padding, and batched with the longest one.
    """
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

    compared(model, {name: x[-1:, :length] for name, x in inputs.items() if not name.endswith("attention_mask")}, keep)
    compared(model, {name: x[[0, -1]] for name, x in inputs.items()}, keep_padded)
    far = torch.inf
    if {place: x.shape for place, x in alone.items()} == {place: x.shape for place, x in beside.items()}:
        far = max(float((x - beside[place]).abs().max()) / (float(x.abs().max()) or 1.0) for place, x in alone.items())
    if not far <= tolerance(precision(model), "states"):
        raise InputError(
            f"tokens must be sequences of one length: padding changes the outputs of {type(model).__name__} (by "
            f"{far:.1e})."
        )


def sums_of(call: AttentionCall, tokens: Int[Tensor, "B N"]) -> PatternSums:
    """The attention patterns of the call, computed in blocks of queries."""
    heads, queries, keys = *call.q.shape[1:3], call.k.shape[2]
    cross = call.kind == "cross" or queries != keys  # otherwise keys are pooled, or have others before them
    known_tokens = tokens if not cross and tokens.shape[1] == queries else None  # not with a prefix of vectors
    plain = call.softcap is None and call.bias is None and call.visible is None
    profile = None
    if not cross and plain and keys >= _LONG * call.q.shape[-1]:
        profile = toeplitz_profile(call.q, call.k, causal=call.causal, scale=call.scale, layout="bhnd").pooled()
    sums = PatternSums(heads=heads, queries=queries, keys=keys, tokens=known_tokens, cross=cross, profile=profile)
    for rows, first, logits, weights in call.blocks():
        visible = call.seen(rows, slice(first, first + logits.shape[-1]))
        sums.add(rows, logits, weights, start=first, visible=visible)
    return sums


def head_records(
    layer: LayerRecord,
    sums: PatternSums,
    shares: Behaviour | None,
    use: FrequencyUse | None,
    bias: Float[np.ndarray, "_H _D"] | None = None,
    offsets: RotaryOffsets | None = None,
) -> tuple[HeadRecord, ...]:
    """The records of a layer's heads; None for values that were not measured.

    Arguments
        bias     bias by offset, for 0 .. N-1 if causal, otherwise for -(N-1) .. N-1; per head or one for all
        offsets  angles between queries and keys in the RoPE pairs
    """
    patterns = sums.result()
    columns: dict[str, Any] = {name: getattr(patterns, name) for name in _PATTERNS}
    columns["sink"] = np.clip(columns["sink"], 0, None)  # without a sink it is only rounding
    columns |= {} if shares is None else {name: getattr(shares, name) for name in _SHARES}
    lists: dict[str, Float[np.ndarray, "H n"]] = {"profile": patterns.profile}
    if use is not None:
        columns["centre"] = use.centre().tolist()
        columns["massive_q"], columns["massive_k"] = (each.tolist() for each in use.massive())
        turned = use.frequencies.nan_to_num().any(-1, keepdim=True).expand_as(use.norms)  # a head may have no rotation
        lists["norm_use"] = use.norm_shares().masked_fill(~turned, torch.nan).cpu().numpy()
        lists["variance_use"] = use.shares.logits.masked_fill(~turned[:, :1], torch.nan).cpu().numpy()
        if offsets is not None:
            weight = use.norms[:, 1:].to(offsets.strength.device) * offsets.strength.isfinite()
            columns["offset"] = ((weight * offsets.strength.nan_to_num()).sum(-1) / weight.sum(-1)).tolist()
    distances = np.arange(1 - sums.keys, sums.keys)
    decays = [None] * sums.heads if sums.cross else decays_of(distances, *sums.by_offset())
    kernels: list[KernelEnds | None] = [None] * sums.heads
    if bias is not None:
        size, causal = min(sums.keys, ROWS), bias.shape[-1] == sums.keys  # a causal bias is 0 after the query
        start = 0 if causal else sums.keys - 1
        after = np.zeros((len(bias), size - 1)) if causal else bias[:, sums.keys - size : start]
        kernels = [*map(kernel_ends, np.concatenate((after, bias[:, start : start + size]), axis=1))]
    made = []
    for head in range(sums.heads):
        found: dict[str, Any] = {name: or_none(values[head]) for name, values in columns.items()}
        for name, values in lists.items():  # empty if unknown
            found[name] = tuple(values[head].tolist()) if np.isfinite(values[head]).all() else ()
        found |= {"decay": decays[head], "kernel": kernels[head if len(kernels) > 1 else 0]}
        made.append(HeadRecord(*layer.place, head, **found))
    return tuple(made)


def _placed(call: AttentionCall, padded: bool) -> tuple[dict[str, Any], str | None]:
    """The arguments of `behaviour` for the call, or why there are none."""
    try:
        placed = call.placed(tables=True)
    except NoForm as error:
        return {}, str(error)
    if placed["rotation"] is None and placed["bias"] is None:
        if placed["lengths"] is not None or len(call.k) < MEANS:
            needed = f"are needed, got {len(call.k)}"
            if padded and call.rotation is None and call.bias is None:
                needed = "of one length are needed"
            return {}, f"{call.module}: position is in its keys, so at least {MEANS} sequences {needed}."
        placed["k_position"] = placed["k"].mean(0, keepdim=True)
    return placed, None


def _position(call: AttentionCall, placed: Mapping[str, Any]) -> str:
    """How position enters the call, as text."""
    said = []
    if call.rotation is not None:
        count, width = len(call.rotation.frequencies), call.q.shape[-1]
        said.append(f"rotation of {count} pairs, {2 * count} of {width} dimensions ({call.rotation.pairing})")
        if dead := int(call.rotation.dead.sum()):
            said.append(f"{dead} pairs switched off")
    elif call.unknown is not None:
        said.append("unknown rotation" if call.encoding is None else f"encoding {call.encoding}")
    if call.bias is not None and (call.encoding is None or call.unknown is None):
        bias = placed.get("bias")
        said.append("bias" if bias is None else "bias by offset" if bias.ndim < 4 else "bias by query and position")
    if not said:
        said.append("none in the attention" if call.kind == "self" else "none")
    if call.visible is not None and not call.causal and call.window is None:
        said.append("with a mask on keys")
    if call.softcap is not None:
        said.append("shares computed before the softcap")
    return ", ".join(said)
