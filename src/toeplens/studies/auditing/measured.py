"""What is read off one attention call of a model: a record of the layer, and one of each of its heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.lens import Behaviour, FrequencyUse, NoForm, Patterns, PatternSums, behaviour, frequency_use
from toeplens.sources.huggingface import AttentionCall
from toeplens.studies.auditing.record import HeadRecord, LayerRecord, known

MEANS = 8  # sequences that a mean over them needs, to tell position from content
_SHARES = ("positional", "symbolic", "interaction")
_PATTERNS = [each.name for each in fields(Patterns) if each.name not in ("profile", "eligible")]


@dataclass(frozen=True)
class Measured:
    """One attention call: its record, and those of its heads, effects apart."""

    layer: LayerRecord
    heads: tuple[HeadRecord, ...]


def measure_call(call: AttentionCall, tokens: Int[Tensor, "B N"]) -> Measured:
    """The measures of a call of a transformers model.

    Positional, symbolic and interaction share are those of `toeplens.lens.behaviour`. Where nothing in the attention
    itself depends on the position (no rotation, no bias), what position is in the keys came in at the input or through
    the mask: the keys' mean over the sequences at each position is then their position part.

    Arguments
        tokens  of all sequences, as the side that the call is on reads them
    """
    placed, unknown = _placed(call)
    shares = None if unknown else behaviour(**placed)
    use = None
    if not unknown and placed["rotation"] is not None:
        placed.pop("k_position", None)
        use = frequency_use(**placed)
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
        position=_position(call, placed),
        frequencies=() if call.rotation is None else tuple(call.rotation.frequencies.tolist()),
        dead=() if call.rotation is None else tuple(call.rotation.dead.nonzero().flatten().tolist()),
        tabled=() if call.rotation is None else tuple(call.rotation.tabled.nonzero().flatten().tolist()),
        unknown=unknown,
        weights=call.proof.weights,
        outputs=call.proof.outputs,
        tolerance=call.proof.tolerance,
    )
    return Measured(record, head_records(found, record.heads, patterns_of(call, tokens), shares, use))


def patterns_of(call: AttentionCall, tokens: Int[Tensor, "B N"]) -> Patterns:
    """What the call's attention looks like, block by block of its queries."""
    heads, queries, keys = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    cross = call.kind == "cross" or queries != keys  # else keys are pooled, or have others before them
    known_tokens = tokens if not cross and tokens.shape[1] == queries else None  # not with a prefix of vectors
    sums = PatternSums(heads=heads, queries=queries, keys=keys, tokens=known_tokens, cross=cross)
    for rows, first, logits, weights in call.blocks():
        sums.add(rows, logits, weights, start=first)
    return sums.result()


def head_records(
    place: HeadRecord, count: int, patterns: Patterns, shares: Behaviour | None, use: FrequencyUse | None
) -> tuple[HeadRecord, ...]:
    """The records of a layer's heads; what was not measured is None.

    Arguments
        place  side, kind and layer of all of them
    """
    columns: dict[str, Any] = {name: getattr(patterns, name) for name in _PATTERNS}
    columns["sink"] = np.clip(columns["sink"], 0, None)  # without a sink it is rounding
    if shares is not None:
        columns |= {name: getattr(shares, name) for name in _SHARES}
    lists: dict[str, Float[np.ndarray, "H n"]] = {"profile": patterns.profile}
    if use is not None:
        columns["centre"] = use.centre().tolist()
        turned = use.frequencies.amax(-1, keepdim=True).expand_as(use.norms) > 0  # a head may turn nothing
        lists["norm_use"] = use.norm_shares().masked_fill(~turned, torch.nan).cpu().numpy()
        lists["variance_use"] = use.shares.logits.masked_fill(~turned[:, :1], torch.nan).cpu().numpy()
    made = []
    for head in range(count):
        found: dict[str, Any] = {name: known(values[head]) for name, values in columns.items()}
        found |= {name: _row(values[head]) for name, values in lists.items()}
        made.append(HeadRecord(place.side, place.kind, place.layer, head, **found))
    return tuple(made)


def _row(values: Float[np.ndarray, "n"]) -> tuple[float, ...]:
    """A row of numbers; none where they are not known."""
    return tuple(values.tolist()) if np.isfinite(values).all() else ()


def _placed(call: AttentionCall) -> tuple[dict[str, Any], str | None]:
    """What `behaviour` takes of the call; or why there is no such thing."""
    try:
        placed = call.placed()
    except NoForm as error:
        return {}, str(error)
    if placed["rotation"] is None and placed["bias"] is None:
        if placed["lengths"] is not None or len(call.k) < MEANS:
            return {}, (
                f"{call.module}: position is in its keys, and their mean over at least {MEANS} sequences is needed to "
                f"tell it from content; {len(call.k)} were given."
            )
        placed["k_position"] = placed["k"].mean(0, keepdim=True)
    return placed, None


def _position(call: AttentionCall, placed: Mapping[str, Any]) -> str:
    """What position does in the call, in words."""
    said = []
    if call.rotation is not None:
        count, width = len(call.rotation.frequencies), call.q.shape[-1]
        said.append(f"rotation of {count} pairs, {2 * count} of {width} dimensions ({call.rotation.pairing})")
        dead = int(call.rotation.dead.sum())
        if dead:
            said.append(f"{dead} of the pairs switched off")
    elif call.unknown is not None:
        said.append("a rotation that is not understood")
    if call.bias is not None:
        said.append("bias by offset" if placed.get("bias") is not None else "bias")
    if not said:
        said.append("none in the attention" if call.kind == "self" else "none")
    if call.visible is not None and not call.causal:
        said.append("a mask hides keys")
    if call.softcap is not None:
        said.append("shares are of the logits before the cap")
    return ", ".join(said)
