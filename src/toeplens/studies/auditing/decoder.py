"""Audit of a decoder trained with toeplens, with the same measures as for transformers models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.engine import examples_of
from toeplens.engine.measures import replayed_at_once
from toeplens.ground import InputError
from toeplens.ground.words import or_none
from toeplens.lens import AttentionTrace, Behaviour, LayerTrace, PatternSums, ablate_heads, behaviour, frequency_use
from toeplens.sources import DecoderSource
from toeplens.sources.huggingface.interventions import NotThere
from toeplens.studies.auditing.effects import with_effects, without_effects
from toeplens.studies.auditing.inputs import Progress
from toeplens.studies.auditing.measuring import head_records
from toeplens.studies.auditing.record import AuditRecord, Kept, LayerRecord, Measured, files_of
from toeplens.studies.auditing.result import Audit, finished
from toeplens.studies.kit.options import AuditOptions
from toeplens.training import Batches, Run, plan_execution

EXAMPLES = 256  # default number of examples of the test set
_AT_ONCE = 1 << 24  # logits held in memory at once
_ALLOWED = 1e-4
_METHODS = ("attribution", "exact", "none", "position")


def audit_run(model: Run | str | Path, options: AuditOptions, directory: Path | None, report: Progress) -> Audit:
    """Audit a finished run's model on examples of its test set.

    Shares and frequency use only count queries that reach the output: in the last layer of a model with a single
    readout position, the query there. Patterns count all queries. Effects are on the loss (cross-entropy, nats per
    example).

    Raises `InputError` for a run that is not finished, and for layers that it does not have.
    """
    started, method = time.monotonic(), options.effects
    if method not in _METHODS:
        raise InputError(f"effects must be one of {', '.join(_METHODS)} for a run, got {method!r}.")
    run = model if isinstance(model, Run) else Run.open(model)
    place = plan_execution(options.device, "off", "float32").device
    data = Batches.of(examples_of(run.spec, options.sequences or EXAMPLES), place, run.spec.ignore_label)
    decoder = run.model().to(place)
    source = DecoderSource(decoder)
    chosen = sorted({*(range(source.num_layers) if options.layers is None else options.layers)})
    if chosen and not chosen[-1] < source.num_layers:
        raise NotThere("layers", chosen[-1], source.num_layers)
    key = {"run": files_of(run.directory), "sequences": len(data), "method": method, "layers": chosen}
    kept = Kept(directory, {**key, "device": str(place), "seed": options.seed})
    measured = _measured(source, data, chosen, kept, report)
    effects = without_effects(measured)
    if method != "none":
        report("heads", 0, 1)
        batches = list(data.split(replayed_at_once(run.spec, data.tokens.shape[1], place)))
        effects = _effects(source, batches, measured, str(method), kept)
        report("heads", 1, 1)
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
    return finished(effects, about, seed=options.seed, started=started, whole=whole)


def _effects(
    source: DecoderSource, batches: Sequence[Any], measured: Sequence[Measured], method: str, kept: Kept
) -> AuditRecord:
    """The effects of the heads of the measured layers."""
    position = {"method": "exact", "intervention": "position"}
    how: dict[str, Any] = position if method == "position" else {"method": method}
    memory: Any = SimpleNamespace(
        get=lambda key: kept.array(f"heads-{key}"), put=lambda key, found: kept.put_array(f"heads-{key}", found)
    )
    found = ablate_heads(source, batches, metric="loss", cumulative=False, memory=memory, **how)
    if found.check is not None and not found.check.holds:
        return replace(without_effects(measured, no_effects=found.check.words), check=found.check)
    layers = [each.layer.layer for each in measured]
    columns = zip(found.drops[layers], found.low[layers], found.high[layers], strict=True)
    told = {"effect": "loss", "method": method, "baseline": or_none(found.baseline), "check": found.check}
    return with_effects(measured, columns, intervals="over examples", **told)


def _measured(
    source: DecoderSource, data: Batches, chosen: Sequence[int], kept: Kept, report: Callable[[str, int, int], None]
) -> list[Measured]:
    """The measured layers; saved ones are reused."""
    done = [each for number in chosen if (each := kept.layer(number)) is not None]
    if len(done) == len(chosen):
        return done
    trace = AttentionTrace(source, data.tokens, data.lengths, layers=list(chosen))
    shares: list[Behaviour | None] = [None] * len(chosen)
    unknown = None
    try:
        shares = [behaviour(layer, counted="used") for layer in trace]
    except InputError as error:
        unknown = str(error)
    measured: list[Measured] = []
    for number, heads in enumerate(source.outputs(data.tokens, data.lengths)):
        if number in chosen:
            report("layers", len(measured), len(chosen))
            found = _layer(trace[number], data.tokens, heads, shares[len(measured)], unknown)
            kept.put_layer(number, found)
            measured.append(found)
    report("layers", len(chosen), len(chosen))
    return measured


def _layer(
    layer: LayerTrace, tokens: Tensor, heads: Float[Tensor, "B N H dv"], shares: Behaviour | None, unknown: str | None
) -> Measured:
    name, count, length = type(layer.encoding).__name__, *layer.q.shape[1:3]
    sums, missed = _sums(layer, tokens, heads)
    use = None
    with suppress(InputError):  # an encoding without a form
        found = None if unknown else frequency_use(layer, counted="used")
        use = found if found is not None and found.frequencies.shape[-1] else None
    record = LayerRecord(
        side="decoder" if layer.causal else "encoder",
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
    bias = None
    if layer.encoding.coupling == "bias" and layer.whole:  # by offset, if it does not depend on content
        with torch.no_grad():
            kernel = layer.encoding.kernel(torch.arange(0 if layer.causal else 1 - length, length))
        bias = None if kernel is None else kernel.cpu().numpy()
    return Measured(record, head_records(record, sums, shares, use, bias))


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
