"""Audit of a decoder trained with toeplens, with the same measures as for transformers models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.backends import DecoderSource
from toeplens.engine import examples_of
from toeplens.engine.examples import replayed_at_once
from toeplens.ground import InputError
from toeplens.ground.words import or_none
from toeplens.lens import (
    AttentionTrace,
    Behaviour,
    FrequencyUse,
    LayerTrace,
    NoForm,
    PatternSums,
    ablate_heads,
    behaviour,
    frequency_use,
)
from toeplens.studies.auditing.audit import Audit, finished
from toeplens.studies.auditing.effects import not_silenced, silenced
from toeplens.studies.auditing.kept import Kept, files_of
from toeplens.studies.auditing.measuring import head_records
from toeplens.studies.auditing.record import HeadRecord, LayerRecord, Measured, Method, NoSuchLayer
from toeplens.training import Batches, Run, plan_execution

_AT_ONCE = 1 << 24  # logits held in memory at once
_ALLOWED = 1e-4


def is_run(model: Any) -> bool:
    """Whether the argument is a run or a run's directory."""
    try:
        return isinstance(model, Run) or (isinstance(model, str | Path) and (Path(model) / "spec.json").is_file())
    except OSError:  # not a valid file name
        return False


def audit_run(
    model: Run | str | Path,
    layers: frozenset[int] | None,
    sequences: int,
    method: Method | None,
    device: str,
    seed: int,
    directory: Path | None,
    on_progress: Callable[[str, int, int], None],
) -> Audit:
    """Audit a finished run's model on examples of its test set.

    Shares and frequency use only count queries that reach the output: in the last layer of a model with a single
    readout position, the query there. Patterns count all queries. Effects are on the loss (cross-entropy, nats per
    example).

    Raises `InputError` for a run that is not finished, and for layers that it does not have.
    """
    started = time.monotonic()
    run = model if isinstance(model, Run) else Run.open(model)
    place = plan_execution(device, "off", "float32").device
    data = Batches.of(examples_of(run.spec, sequences), place, run.spec.ignore_label)
    decoder = run.model().to(place)
    source = DecoderSource(decoder)
    chosen = sorted(range(source.num_layers) if layers is None else layers)
    if chosen and not chosen[-1] < source.num_layers:
        raise NoSuchLayer(chosen[-1], source.num_layers - 1)
    key = {"run": files_of(run.directory), "sequences": sequences, "method": method, "layers": chosen}
    kept = Kept(directory, {**key, "device": str(place), "seed": seed})
    measured = _measured(source, data, chosen, kept, on_progress)
    changed = not_silenced(measured)
    if method is not None:
        on_progress("heads", 0, 1)
        batches = list(data.split(replayed_at_once(run.spec, data.tokens.shape[1], place)))
        options: dict[str, Any] = {"metric": "loss", "method": method, "cumulative": False}
        if method == "bands":
            raise InputError("effects must be one of attribution, exact, none, position for a run, got 'bands'.")
        if method == "position":
            options |= {"method": "exact", "intervention": "position"}
        memory: Any = SimpleNamespace(
            get=lambda key: kept.array(f"heads-{key}"), put=lambda key, found: kept.put_array(f"heads-{key}", found)
        )
        found = ablate_heads(source, batches, **options, memory=memory)
        on_progress("heads", 1, 1)
        if found.check is not None and not found.check.holds:
            changed = replace(changed, unknown=found.check.words, check=found.check)
        else:
            columns = [(found.drops[layer], found.low[layer], found.high[layer]) for layer in chosen]
            told = {"effect": "loss", "method": method, "baseline": or_none(found.baseline), "check": found.check}
            changed = silenced(measured, columns, intervals="over examples", **told)
    with torch.no_grad():
        logits = [decoder(data.tokens, data.lengths, fused=fused) for fused in (True, False)]
    about = {
        "model": run.spec.name,
        "class": f"{run.spec.model.encoding} ({run.spec.model.protocol} protocol), {run.spec.task}",
        "model_type": "decoder",
        "parameters": sum(weight.numel() for weight in decoder.parameters()),
        "dtype": "float32",
        "device": str(place),
        "text": "examples of the run's test set",
        "sequences": len(data),
        "tokens": data.tokens.shape[1],
    }
    whole = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
    return finished(changed, about, whole=whole, seed=seed, started=started)


def _measured(
    source: DecoderSource,
    data: Batches,
    chosen: Sequence[int],
    kept: Kept,
    on_progress: Callable[[str, int, int], None],
) -> list[Measured]:
    """The measured layers; saved ones are reused."""
    had = [kept.layer(number) for number in chosen]
    done = [each for each in had if each is not None]
    if len(done) == len(chosen):
        return done
    trace = AttentionTrace(source, data.tokens, data.lengths, layers=list(chosen))
    of_logits: list[tuple[Behaviour | None, FrequencyUse | None]] = [(None, None)] * len(chosen)
    unknown = None
    try:
        of_logits = [(behaviour(layer, counted="used"), _frequency_use(layer)) for layer in trace]
    except InputError as error:
        unknown = str(error)
    measured: list[Measured] = []
    for number, heads in enumerate(source.outputs(data.tokens, data.lengths)):
        place = len(measured)
        if number in chosen:
            on_progress("layers", place, len(chosen))
            found = _layer(trace[number], data.tokens, heads, *of_logits[place], unknown)
            kept.put_layer(number, found)
            measured.append(found)
    on_progress("layers", len(chosen), len(chosen))
    return measured


def _layer(
    layer: LayerTrace,
    tokens: Int[Tensor, "B N"],
    heads: Float[Tensor, "B N H dv"],
    shares: Behaviour | None,
    use: FrequencyUse | None,
    unknown: str | None,
) -> Measured:
    name, count = type(layer.encoding).__name__, layer.q.shape[1]
    place = HeadRecord("decoder" if layer.causal else "encoder", "self", layer.layer, 0)
    sums, missed = _sums(layer, tokens, heads)
    record = LayerRecord(
        side=place.side,
        kind="self",
        layer=layer.layer,
        module=f"blocks.{layer.layer}.attention ({name})",
        heads=count,
        key_heads=layer.k.shape[1],
        head_dim=layer.q.shape[-1],
        scale=layer.scale,
        softcap=None,
        causal=layer.causal,
        window=None,
        position=f"{name}, coupling: {layer.encoding.coupling}",
        frequencies=() if use is None else tuple(use.frequencies.amax(0).tolist()),
        unknown=unknown,
        weights=None,
        outputs=missed,
        tolerance=_ALLOWED,
    )
    return Measured(record, head_records(place, sums, shares, use, _bias(layer)))


def _frequency_use(layer: LayerTrace) -> FrequencyUse | None:
    try:
        found = frequency_use(layer, counted="used")
    except NoForm:
        return None
    return found if found.frequencies.shape[-1] else None


def _bias(layer: LayerTrace) -> Float[np.ndarray, "_H _D"] | None:
    """The layer's bias by offset, if its encoding has one that does not depend on content."""
    if layer.encoding.coupling != "bias" or not layer.whole:
        return None
    length = layer.q.shape[2]
    with torch.no_grad():
        kernel = layer.encoding.kernel(torch.arange(0 if layer.causal else 1 - length, length))
    return None if kernel is None else kernel.cpu().numpy()


def _sums(layer: LayerTrace, tokens: Tensor, heads: Float[Tensor, "B N H dv"]) -> tuple[PatternSums, float]:
    """The attention patterns, and the difference between weights times values and the heads' outputs."""
    count, length = layer.q.shape[1:3]
    sums = PatternSums(heads=count, queries=length, keys=length, tokens=tokens)
    step, missed, size = max(1, _AT_ONCE // (count * length**2)), 0.0, 0.0
    for start in range(0, len(tokens), step):
        some = slice(start, start + step)
        there = layer.present[some, None, :, None]
        weights = layer.weights(sequences=some)
        logits = layer.logits(sequences=some).masked_fill(~there, -torch.inf)  # padding has no queries
        sums.add(layer.rows, logits, weights, sequences=some)
        made = weights @ layer.v[some].repeat_interleave(count // layer.v.shape[1], 1)
        missed = max(missed, float(((made.transpose(1, 2) - heads[some]) * there.transpose(1, 2)).abs().max()))
        size = max(size, float(heads[some].abs().max()))
    return sums, missed / (size or 1.0)
