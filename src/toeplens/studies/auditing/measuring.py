"""The forward pass of an audit: every attention call is proved and measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

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
from toeplens.sources.huggingface.interventions import with_changed_logits
from toeplens.sources.huggingface.load import Loaded
from toeplens.studies.auditing.kept import Kept
from toeplens.studies.auditing.record import HeadRecord, LayerRecord, Measured, NoSuchLayer
from toeplens.studies.kit.kernels import ROWS, KernelEnds, decays_of, kernel_ends

MEANS = 8  # sequences needed to separate position from content by a mean over them
_SHARES = ("positional", "symbolic", "interaction")
_PATTERNS = [each.name for each in fields(Patterns) if each.name not in ("profile", "eligible")]
Progress = Callable[[str, int, int], None]
Measure = Callable[[AttentionCall, Int[Tensor, "B N"]], Measured]
PASS = "pass"
_LONG = 32  # tokens per head dimension from which on logits by offset are cheaper by Fourier transforms


def measure(
    loaded: Loaded,
    inputs: Mapping[str, Tensor],
    layers: frozenset[int] | None,
    kept: Kept,
    report: Progress,
    changes: Sequence[Change] = (),
    measured_by: Measure | None = None,
) -> tuple[list[Measured], float]:
    """The measured calls in the order of the forward pass, and the difference between the captured and a plain pass.

    Calls with saved measures are proved again but not measured again. If everything is saved, nothing is run.

    Arguments
        layers   layers to measure; all if None
        report   called with the number of finished calls
        changes  interventions on the model; each call is measured on the output of the changed calls before it
        measured_by  function that measures a call, given the tokens of its side (default: `measure_call`)
    """
    done = kept.get(PASS)
    if isinstance(done, dict):
        again = [kept.layer(number) for number in done["calls"]]
        whole = [each for each in again if each is not None]
        if len(whole) == len(again):
            return whole, float(done["whole"])
    by = measured_by or partial(measure_call, changes=changes)
    seen: set[int] = set()
    numbers: list[int] = []
    measured: list[Measured] = []
    names = loaded.attention
    count, calls = sum(not any(other.startswith(f"{name}.") for other in names) for name in names), 0

    def look(call: AttentionCall) -> None:
        nonlocal calls
        loaded.check_attention(call.module)
        seen.add(call.layer)
        number, calls = calls, calls + 1
        if layers is None or call.layer in layers:
            found = kept.layer(number)
            tokens = inputs.get(f"{call.side}_input_ids", inputs["input_ids"])
            if found is None:
                with torch.no_grad():
                    found = by(replace(call, weights=None), tokens)
                kept.put_layer(number, found)
            measured.append(found)
            numbers.append(number)
        report("layers", calls, max(calls, count))  # some modules are called several times

    report("layers", 0, count)
    model = loaded.model
    whole = compared_changed(model, inputs, look, changes) if changes else compared(model, inputs, look)
    if layers is not None and not layers <= seen:
        raise NoSuchLayer(min(layers - seen), max(seen))
    kept.put(PASS, {"calls": numbers, "whole": whole})
    return measured, whole


def measure_call(call: AttentionCall, tokens: Int[Tensor, "B N"], changes: Sequence[Change] = ()) -> Measured:
    """The measures of a call of a transformers model.

    Positional, symbolic and interaction shares are those of `toeplens.lens.behaviour`. If the attention itself does not
    depend on position (no rotation, no bias), position enters the keys through the input or the mask. The mean of the
    keys over sequences at each position is then their positional part.

    Arguments
        tokens   tokens of all sequences, as the encoder or decoder of the call reads them
        changes  interventions on the model; a head with changed logits only has attention patterns
    """
    placed, unknown = _placed(call)
    shares = None if unknown else behaviour(**placed)
    use = offsets = None
    bias = placed.get("bias")
    by_offset = bias if bias is None or bias.ndim < 4 else None
    if not unknown and placed["rotation"] is not None:
        placed.pop("k_position", None)
        use = frequency_use(**{**placed, "bias": by_offset})
        offsets = rotary_offsets(
            placed["q"], placed["k"], len(placed["rotation"]), placed["lengths"], pairing="interleaved", layout="bhnd"
        )
    found = HeadRecord(call.side, call.kind, call.layer, 0)
    record = LayerRecord(
        side=call.side,
        kind=call.kind,
        layer=call.layer,
        module=call.module,
        heads=call.q.shape[1],
        key_heads=call.k.shape[1],
        head_dim=call.q.shape[-1],
        scale=call.scale,
        softcap=call.softcap,
        causal=call.causal,
        window=call.window,
        chunk=call.chunk,
        position=_position(call, placed),
        frequencies=() if call.rotation is None else tuple(call.rotation.frequencies.tolist()),
        dead=() if call.rotation is None else tuple(call.rotation.dead.nonzero().flatten().tolist()),
        tabled=() if call.rotation is None else tuple(call.rotation.tabled.nonzero().flatten().tolist()),
        unknown=unknown,
        weights=call.proof.weights,
        outputs=call.proof.outputs,
        tolerance=call.proof.tolerance,
        used=call.proof.used,
        logit=call.proof.logit,
        undecided=call.proof.undecided,
    )
    sums = sums_of(call, tokens)
    table = None if by_offset is None else by_offset.cpu().numpy()
    heads = head_records(found, sums, shares, use, table, offsets)
    for change in changes:
        if change.output is None and change.meets(call):
            seen = tuple(replace(found, head=head.head) for head in heads)
            if change.attention is None:
                seen = head_records(found, sums_of(with_changed_logits(call, change), tokens), None, None)
            which = change.heads_of(call)
            heads = tuple(seen[head.head] if head.head in which else head for head in heads)
    return Measured(record, heads)


def sums_of(call: AttentionCall, tokens: Int[Tensor, "B N"]) -> PatternSums:
    """The attention patterns of the call, computed in blocks of queries."""
    heads, queries, keys = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    cross = call.kind == "cross" or queries != keys  # otherwise keys are pooled, or have others before them
    known_tokens = tokens if not cross and tokens.shape[1] == queries else None  # not with a prefix of vectors
    plain = call.softcap is None and call.bias is None and call.visible is None
    profile = None
    if not cross and plain and keys >= _LONG * call.q.shape[-1]:
        profile = toeplitz_profile(call.q, call.k, causal=call.causal, scale=call.scale, layout="bhnd").pooled()
    sums = PatternSums(heads=heads, queries=queries, keys=keys, tokens=known_tokens, cross=cross, profile=profile)
    for rows, first, logits, weights in call.blocks():
        seen = call.seen(rows, slice(first, first + logits.shape[-1]))
        sums.add(rows, logits, weights, start=first, visible=seen)
    return sums


def head_records(
    place: HeadRecord,
    sums: PatternSums,
    shares: Behaviour | None,
    use: FrequencyUse | None,
    bias: Float[np.ndarray, "_H _D"] | None = None,
    offsets: RotaryOffsets | None = None,
) -> tuple[HeadRecord, ...]:
    """The records of a layer's heads; None for values that were not measured.

    Arguments
        place  side, kind and layer of all heads
        bias   bias by offset, for 0 .. N-1 if causal, otherwise for -(N-1) .. N-1; per head or one for all
        offsets  angles between queries and keys in the RoPE pairs
    """
    patterns = sums.result()
    columns: dict[str, Any] = {name: getattr(patterns, name) for name in _PATTERNS}
    columns["sink"] = np.clip(columns["sink"], 0, None)  # without a sink it is only rounding
    if shares is not None:
        columns |= {name: getattr(shares, name) for name in _SHARES}
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
    kernels = [None] * sums.heads if bias is None else [_kernel(row, sums.keys) for row in bias]
    made = []
    for head in range(sums.heads):
        found: dict[str, Any] = {name: or_none(values[head]) for name, values in columns.items()}
        for name, values in lists.items():  # empty if unknown
            found[name] = tuple(values[head].tolist()) if np.isfinite(values[head]).all() else ()
        found |= {"decay": decays[head], "kernel": kernels[head if len(kernels) > 1 else 0]}
        made.append(HeadRecord(place.side, place.kind, place.layer, head, **found))
    return tuple(made)


def _kernel(bias: Float[np.ndarray, "D"], tokens: int) -> KernelEnds:
    """The spectrum of an offset bias; a causal bias is 0 after the query."""
    size = min(tokens, ROWS)
    causal = len(bias) == tokens
    after = np.zeros(size - 1) if causal else bias[tokens - size : tokens - 1]
    start = 0 if causal else tokens - 1
    return kernel_ends(np.concatenate((after, bias[start : start + size])))


def _placed(call: AttentionCall) -> tuple[dict[str, Any], str | None]:
    """The arguments of `behaviour` for the call, or why there are none."""
    try:
        placed = call.placed(tables=True)
    except NoForm as error:
        return {}, str(error)
    if placed["rotation"] is None and placed["bias"] is None:
        if placed["lengths"] is not None or len(call.k) < MEANS:
            return {}, (
                f"{call.module}: position is in its keys, so at least {MEANS} sequences are needed, got {len(call.k)}."
            )
        placed["k_position"] = placed["k"].mean(0, keepdim=True)
    return placed, None


def _position(call: AttentionCall, placed: Mapping[str, Any]) -> str:
    """How position enters the call, as text."""
    said = []
    if call.rotation is not None:
        count, width = len(call.rotation.frequencies), call.q.shape[-1]
        said.append(f"rotation of {count} pairs, {2 * count} of {width} dimensions ({call.rotation.pairing})")
        dead = int(call.rotation.dead.sum())
        if dead:
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
