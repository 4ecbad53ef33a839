"""The forward pass of an audit: every attention call is proved and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.backends.hf import AttentionCall, Change, capture_and_compare, capture_changed
from toeplens.backends.hf.calls import CallKey
from toeplens.backends.hf.interventions import InvalidTarget, with_changed_logits
from toeplens.backends.hf.model import precision, tolerance
from toeplens.lens import (
    Behaviour,
    FrequencyUse,
    NotSeparable,
    Patterns,
    PatternSums,
    RotaryOffsets,
    behaviour,
    frequency_use,
    rotary_offsets,
    toeplitz_profile,
)
from toeplens.studies.auditing.inputs import AuditContext
from toeplens.studies.auditing.record import CallRecords, HeadRecord, LayerRecord
from toeplens.studies.kit.kernels import MAX_ROWS, SpectrumRange, decays_of, spectrum_range
from toeplens.utils import InputError
from toeplens.utils.formatting import finite_or_none

MIN_SEQUENCES = 8  # sequences needed to separate position from content by a mean over them
_SHARES = ("positional", "symbolic", "interaction")
_PATTERN_FIELDS = [field.name for field in fields(Patterns) if field.name not in ("profile", "eligible")]
_CALL_FIELDS = ("side", "kind", "layer", "module", "scale", "softcap", "causal", "window", "chunk")
_PROOF_FIELDS = ("weights", "outputs", "tolerance", "used", "logit", "undecided")
_FOURIER_FACTOR = 32  # tokens per head dimension from which on logits by offset are cheaper by Fourier transforms


def measure(work: AuditContext) -> tuple[list[CallRecords], float]:
    """The measured calls in the order of the forward pass, and the difference between the captured and a plain pass.

    Calls with saved measures are proved again but not measured again. If everything is saved, nothing is run.
    """
    loaded, cache, layers, changes = work.loaded, work.cache, work.options.layers, work.changes
    if (saved_pass := cache.get("pass")) is not None:
        saved = [record for number in saved_pass["calls"] if (record := cache.load_layer(number)) is not None]
        if len(saved) == len(saved_pass["calls"]):
            return saved, saved_pass["max_difference"]
    mask = work.sequences.token_mask
    if mask is not None:
        check_padding(loaded.model, work.inputs, int(mask[-1].sum()))
    call_layers: list[int] = []  # layers of the calls
    measured: dict[int, CallRecords] = {}  # by index of the call
    names = loaded.attention
    count = sum(not any(other.startswith(f"{name}.") for other in names) for name in names)

    def on_call(call: AttentionCall) -> None:
        loaded.check_attention(call.module)
        number = len(call_layers)
        call_layers.append(call.layer)
        if layers is None or call.layer in layers:
            record = cache.load_layer(number)
            tokens = work.inputs.get(f"{call.side}_input_ids", work.inputs["input_ids"])
            if record is None:
                with torch.no_grad():
                    record = measure_call(replace(call, weights=None), tokens, changes, mask)
                cache.save_layer(number, record)
            measured[number] = record
        work.report("layers", len(call_layers), max(len(call_layers), count))  # some modules are called several times

    work.report("layers", 0, count)
    model, inputs = loaded.model, work.inputs
    arguments = model, inputs, on_call
    difference = capture_changed(*arguments, changes) if changes else capture_and_compare(*arguments)
    if layers is not None and not {*layers} <= {*call_layers}:
        raise InvalidTarget("layers", min({*layers} - {*call_layers}), max(call_layers) + 1)
    cache.put("pass", {"calls": [*measured], "max_difference": difference})
    return [*measured.values()], difference


def measure_call(
    call: AttentionCall,
    tokens: Int[Tensor, "B N"],
    changes: Sequence[Change] = (),
    mask: Bool[Tensor, "B N"] | None = None,
) -> CallRecords:
    """The measures of a call of a transformers model.

    Positional, symbolic and interaction shares are those of `toeplens.lens.behaviour`. If the attention itself does not
    depend on position (no rotation, no bias), position enters the keys through the input or the mask. The mean of the
    keys over sequences at each position is then their positional part.

    Arguments
        tokens   tokens of all sequences, as the encoder or decoder of the call reads them
        changes  interventions on the model; a head with changed logits only has attention patterns
        mask     mask of the tokens that are not padding; queries in the padding are excluded from all measures
    """
    if mask is not None:
        visible = mask.to(call.q.device)[:, None, :, None].expand(-1, 1, -1, call.k.shape[2])
        call = replace(call, visible=visible if call.visible is None else call.visible & visible)
    args, unknown = _behaviour_args(call, padded=mask is not None)
    shares = None if unknown else behaviour(**args)
    use = offsets = None
    bias = args.get("bias")
    offset_bias = bias if bias is None or bias.ndim < 4 else None
    if not unknown and args["rotation"] is not None:
        args.pop("k_position", None)
        for_frequencies: dict[str, Any] = {**args, "bias": offset_bias}
        use = frequency_use(**for_frequencies)
        offsets = rotary_offsets(
            args["q"], args["k"], len(args["rotation"]), args["lengths"], pairing="interleaved", layout="bhnd"
        )
    pairs: dict[str, Any] = {"frequencies": ()}
    if call.rotation is not None:
        pairs = {name: tuple(getattr(call.rotation, name).nonzero().flatten().tolist()) for name in ("dead", "tabled")}
        pairs["frequencies"] = tuple(call.rotation.frequencies.tolist())
    record = LayerRecord(
        **{name: getattr(call, name) for name in _CALL_FIELDS},
        **{name: getattr(call.proof, name) for name in _PROOF_FIELDS},
        **pairs,
        heads=call.q.shape[1],
        key_heads=call.k.shape[1],
        head_dim=call.q.shape[-1],
        position=_position_text(call, args),
        unknown=unknown,
    )
    table = None if offset_bias is None else offset_bias.cpu().numpy()
    heads = head_records(record, sums_of(call, tokens), shares, use, table, offsets)
    for change in (change for change in changes if change.output is None and change.applies_to(call)):
        changed_heads = tuple(HeadRecord(call.side, call.kind, call.layer, head.head) for head in heads)
        if change.attention is None:
            changed_heads = head_records(record, sums_of(with_changed_logits(call, change), tokens), None, None)
        heads = tuple(changed_heads[head.head] if head.head in change.heads_of(call) else head for head in heads)
    return CallRecords(record, heads)


def check_padding(model: Any, inputs: Mapping[str, Tensor], length: int) -> None:
    """Raise `InputError` if padding changes the model's output for the shortest sequence, the last one.

    The head outputs for its last token are compared in every call: without padding, and batched with the longest one.
    """
    alone: dict[CallKey, Float[Tensor, "H d"]] = {}
    padded: dict[CallKey, Float[Tensor, "H d"]] = {}

    def store(call: AttentionCall) -> None:
        alone[call.key] = call.heads[0, -1].clone()

    def store_padded(call: AttentionCall) -> None:
        if call.q.shape[2] != len(inputs["input_ids"][0]):
            raise InputError(
                f"tokens must be sequences of one length: padding among the queries of {call.module} is unknown."
            )
        padded[call.key] = call.heads[-1, length - 1].clone()

    capture_and_compare(
        model, {name: x[-1:, :length] for name, x in inputs.items() if not name.endswith("attention_mask")}, store
    )
    capture_and_compare(model, {name: x[[0, -1]] for name, x in inputs.items()}, store_padded)
    error = torch.inf
    if {key: x.shape for key, x in alone.items()} == {key: x.shape for key, x in padded.items()}:
        error = max(float((x - padded[key]).abs().max()) / (float(x.abs().max()) or 1.0) for key, x in alone.items())
    if not error <= tolerance(precision(model), "states"):
        raise InputError(
            f"tokens must be sequences of one length: padding changes the outputs of {type(model).__name__} (by "
            f"{error:.1e})."
        )


def sums_of(call: AttentionCall, tokens: Int[Tensor, "B N"]) -> PatternSums:
    """The attention patterns of the call, computed in blocks of queries."""
    heads, queries, keys = *call.q.shape[1:3], call.k.shape[2]
    cross = call.kind == "cross" or queries != keys  # otherwise keys are pooled, or have others before them
    known_tokens = tokens if not cross and tokens.shape[1] == queries else None  # not with a prefix of vectors
    plain = call.softcap is None and call.bias is None and call.visible is None
    profile = None
    if not cross and plain and keys >= _FOURIER_FACTOR * call.q.shape[-1]:
        profile = toeplitz_profile(call.q, call.k, causal=call.causal, scale=call.scale, layout="bhnd").pool()
    sums = PatternSums(heads=heads, queries=queries, keys=keys, tokens=known_tokens, cross=cross, profile=profile)
    for rows, first, logits, weights in call.blocks():
        visible = call.is_visible(rows, slice(first, first + logits.shape[-1]))
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
    columns: dict[str, Any] = {name: getattr(patterns, name) for name in _PATTERN_FIELDS}
    columns["sink"] = np.clip(columns["sink"], 0, None)  # without a sink it is only rounding
    columns |= {} if shares is None else {name: getattr(shares, name) for name in _SHARES}
    lists: dict[str, Float[np.ndarray, "H n"]] = {"profile": patterns.profile}
    if use is not None:
        columns["centre"] = use.centre("softmax").tolist()
        columns["massive_q"], columns["massive_k"] = (share.tolist() for share in use.massive())
        rotated = use.frequencies.nan_to_num().any(-1, keepdim=True).expand_as(use.norms)  # a head may have no rotation
        lists["norm_use"] = use.norm_shares().masked_fill(~rotated, torch.nan).cpu().numpy()
        lists["variance_use"] = use.shares.softmax.masked_fill(~rotated[:, :1], torch.nan).cpu().numpy()
        if offsets is not None:
            weight = use.norms[:, 1:].to(offsets.strength.device) * offsets.strength.isfinite()
            columns["offset"] = ((weight * offsets.strength.nan_to_num()).sum(-1) / weight.sum(-1)).tolist()
    distances = np.arange(1 - sums.keys, sums.keys)
    decays = [None] * sums.heads if sums.cross else decays_of(distances, *sums.logits_by_offset())
    kernels: list[SpectrumRange | None] = [None] * sums.heads
    if bias is not None:
        size, causal = min(sums.keys, MAX_ROWS), bias.shape[-1] == sums.keys  # a causal bias is 0 after the query
        start = 0 if causal else sums.keys - 1
        after = np.zeros((len(bias), size - 1)) if causal else bias[:, sums.keys - size : start]
        kernels = [*map(spectrum_range, np.concatenate((after, bias[:, start : start + size]), axis=1))]
    records = []
    for head in range(sums.heads):
        values_of_head: dict[str, Any] = {name: finite_or_none(values[head]) for name, values in columns.items()}
        for name, values in lists.items():  # empty if unknown
            values_of_head[name] = tuple(values[head].tolist()) if np.isfinite(values[head]).all() else ()
        values_of_head |= {"decay": decays[head], "kernel": kernels[head if len(kernels) > 1 else 0]}
        records.append(HeadRecord(*layer.layer_key, head, **values_of_head))
    return tuple(records)


def _behaviour_args(call: AttentionCall, padded: bool) -> tuple[dict[str, Any], str | None]:
    """The arguments of `behaviour` for the call, or why there are none."""
    try:
        args = call.behaviour_arguments(tables=True)
    except NotSeparable as error:
        return {}, str(error)
    if args["rotation"] is None and args["bias"] is None:
        if args["lengths"] is not None or len(call.k) < MIN_SEQUENCES:
            needed = f"are needed, got {len(call.k)}"
            if padded and call.rotation is None and call.bias is None:
                needed = "of one length are needed"
            return {}, f"{call.module}: position is in its keys, so at least {MIN_SEQUENCES} sequences {needed}."
        args["k_position"] = args["k"].mean(0, keepdim=True)
    return args, None


def _position_text(call: AttentionCall, args: Mapping[str, Any]) -> str:
    """How position enters the call, as text."""
    parts = []
    if call.rotation is not None:
        count, width = len(call.rotation.frequencies), call.q.shape[-1]
        parts.append(f"rotation of {count} pairs, {2 * count} of {width} dimensions ({call.rotation.pairing})")
        if dead := int(call.rotation.dead.sum()):
            parts.append(f"{dead} pairs switched off")
    elif call.unknown is not None:
        parts.append("unknown rotation" if call.encoding is None else f"encoding {call.encoding}")
    if call.bias is not None and (call.encoding is None or call.unknown is None):
        bias = args.get("bias")
        parts.append("bias" if bias is None else "bias by offset" if bias.ndim < 4 else "bias by query and position")
    if not parts:
        parts.append("none in the attention" if call.kind == "self" else "none")
    if call.visible is not None and not call.causal and call.window is None:
        parts.append("with a mask on keys")
    if call.softcap is not None:
        parts.append("shares computed before the softcap")
    return ", ".join(parts)
