"""Audit of a decoder trained with toeplens, with the same measures as for transformers models."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.backends import DecoderSource
from toeplens.backends.hf.interventions import InvalidTarget
from toeplens.engine import examples_of
from toeplens.engine.measures import ablation_batch_size
from toeplens.lens import AttentionTrace, Behaviour, LayerTrace, PatternSums, ablate_heads, behaviour, frequency_use
from toeplens.studies.auditing.effects import with_effects, without_effects
from toeplens.studies.auditing.inputs import Progress
from toeplens.studies.auditing.measuring import head_records
from toeplens.studies.auditing.record import Audit, AuditCache, CallRecords, LayerRecord, files_of
from toeplens.studies.auditing.result import finish_audit
from toeplens.studies.kit.options import AuditOptions
from toeplens.training import Batches, Run, plan_execution
from toeplens.utils import InputError
from toeplens.utils.formatting import finite_or_none

DEFAULT_EXAMPLES = 256  # default number of examples of the test set
_MAX_LOGITS = 1 << 24  # logits held in memory at once
_TOLERANCE = 1e-4
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
    device = plan_execution(options.device, "off", "float32").device
    data = Batches.of(examples_of(run.spec, options.sequences or DEFAULT_EXAMPLES), device, run.spec.ignore_label)
    decoder = run.model().to(device)
    source = DecoderSource(decoder)
    layers = sorted({*(range(source.num_layers) if options.layers is None else options.layers)})
    if layers and not layers[-1] < source.num_layers:
        raise InvalidTarget("layers", layers[-1], source.num_layers)
    key = {"run": files_of(run.directory), "sequences": len(data), "method": method, "layers": layers}
    cache = AuditCache(directory, {**key, "device": str(device), "seed": options.seed})
    measured = _measure_layers(source, data, layers, cache, report)
    effects = without_effects(measured)
    if method != "none":
        report("heads", 0, 1)
        batches = list(data.split(ablation_batch_size(run.spec, data.tokens.shape[1], device)))
        effects = _measure_effects(source, batches, measured, str(method), cache)
        report("heads", 1, 1)
    with torch.no_grad():
        logits = [decoder(data.tokens, data.lengths, fused=fused) for fused in (True, False)]
    about = {
        "model": run.spec.name,
        "class": f"{run.spec.model.encoding} ({run.spec.model.protocol} protocol), {run.spec.task}",
        "model_type": "decoder",
        "parameters": sum(weight.numel() for weight in decoder.parameters()),
        "dtype": "float32",
        "device": str(device),
        "text": "examples of the run's test set",
        "sequences": len(data),
        "tokens": data.tokens.shape[1],
    }
    difference = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
    return finish_audit(effects, about, seed=options.seed, started=started, max_difference=difference)


def _measure_effects(
    source: DecoderSource, batches: Sequence[Any], measured: Sequence[CallRecords], method: str, cache: AuditCache
) -> Audit:
    """The effects of the heads of the measured layers."""
    layers = [call.layer.layer for call in measured]

    def replay(state: Any, gains: Tensor, replacement: Any = None) -> Tensor:
        """A pass of all copies; without changes in other layers, so that these run only once."""
        gains = gains if state.layer in layers else torch.ones_like(gains)
        return DecoderSource.replay(source, state, gains, replacement)

    if method != "attribution":
        source.replay = replay
    position = {"method": "exact", "intervention": "position"}
    options: dict[str, Any] = position if method == "position" else {"method": method}
    parts: Any = SimpleNamespace(
        get=lambda key: cache.get_array(f"heads-{key}"), put=lambda key, array: cache.put_array(f"heads-{key}", array)
    )
    ablation = ablate_heads(source, batches, metric="loss", cumulative=False, cache=parts, **options)
    if ablation.check is not None and not ablation.check.is_reliable:
        return replace(without_effects(measured, no_effects=ablation.check.summary), check=ablation.check)
    columns = zip(ablation.drops[layers], ablation.low[layers], ablation.high[layers], strict=True)
    fields = {"effect": "loss", "method": method, "check": ablation.check}
    fields["baseline"] = finite_or_none(ablation.baseline)
    return with_effects(measured, columns, intervals="over examples", **fields)


def _measure_layers(
    source: DecoderSource, data: Batches, layers: Sequence[int], cache: AuditCache, report: Progress
) -> list[CallRecords]:
    """The measured layers; saved ones are reused."""
    saved = [record for number in layers if (record := cache.load_layer(number)) is not None]
    if len(saved) == len(layers):
        return saved
    trace = AttentionTrace(source, data.tokens, data.lengths, layers=list(layers))
    shares: list[Behaviour | None] = [None] * len(layers)
    unknown = None
    try:
        shares = [behaviour(layer, counted="used") for layer in trace]
    except InputError as error:
        unknown = str(error)
    measured: list[CallRecords] = []
    for number, heads in enumerate(source.head_outputs(data.tokens, data.lengths)):
        if number in layers:
            report("layers", len(measured), len(layers))
            record = _measure_layer(trace[number], data.tokens, heads, shares[len(measured)], unknown)
            cache.save_layer(number, record)
            measured.append(record)
    report("layers", len(layers), len(layers))
    return measured


def _measure_layer(
    layer: LayerTrace, tokens: Tensor, heads: Float[Tensor, "B N H dv"], shares: Behaviour | None, unknown: str | None
) -> CallRecords:
    name, count, length = type(layer.encoding).__name__, *layer.q.shape[1:3]
    sums, error = _pattern_sums(layer, tokens, heads)
    use = None
    with suppress(InputError):  # an encoding without a form
        frequencies = None if unknown else frequency_use(layer, counted="used")
        use = frequencies if frequencies is not None and frequencies.frequencies.shape[-1] else None
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
        outputs=error,
        tolerance=_TOLERANCE,
    )
    bias = None
    if layer.encoding.coupling == "bias" and layer.has_all_positions:  # by offset, if it does not depend on content
        with torch.no_grad():
            kernel = layer.encoding.kernel(torch.arange(0 if layer.causal else 1 - length, length))
        bias = None if kernel is None else kernel.cpu().numpy()
    return CallRecords(record, head_records(record, sums, shares, use, bias))


def _pattern_sums(layer: LayerTrace, tokens: Tensor, heads: Float[Tensor, "B N H dv"]) -> tuple[PatternSums, float]:
    """The attention patterns, and the difference between weights times values and the heads' outputs."""
    count, length = layer.q.shape[1:3]
    sums = PatternSums(heads=count, queries=length, keys=length, tokens=tokens)
    step, error, size = max(1, _MAX_LOGITS // (count * length**2)), 0.0, 0.0
    for start in range(0, len(tokens), step):
        batch = slice(start, start + step)
        present = layer.present[batch, None, :, None]
        weights = layer.weights(sequences=batch)
        logits = layer.logits(sequences=batch).masked_fill(~present, -torch.inf)  # padding has no queries
        sums.add(layer.rows, logits, weights, sequences=batch)
        outputs = weights @ layer.v[batch].repeat_interleave(count // layer.v.shape[1], 1)
        error = max(error, float(((outputs.transpose(1, 2) - heads[batch]) * present.transpose(1, 2)).abs().max()))
        size = max(size, float(heads[batch].abs().max()))
    return sums, error / (size or 1.0)
