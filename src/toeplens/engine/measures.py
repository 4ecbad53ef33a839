"""What is measured of a finished run beside its head ablation; each has its record in the run directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from toeplens.engine.attention_measures import ATTENTION_MEASURES
from toeplens.engine.examples import Split, examples_of, replayed_at_once
from toeplens.engine.extrapolation import extrapolate
from toeplens.engine.records import Asked, read_record, write_record
from toeplens.ground import choose
from toeplens.ground.locks import locked
from toeplens.lens import (
    AttentionTrace,
    Batch,
    ablate_heads,
    head_sets,
    positional_drift,
    representation,
    seed_strength,
)
from toeplens.sources import DecoderGradients, DecoderSource
from toeplens.training import Batches, Run, initial_model, plan_execution

_SETS, _STREAM = 512, 512  # examples that single measures look at, at most
_POOL = 4096  # examples of the gradients' statistics, which need as many whatever else is looked at


def measure_run(run: Run, name: str, *, examples: int, split: Split = "test", device: str = "auto") -> dict[str, Any]:
    """One of `MEASURES` of a finished run, from its record ``NAME.json``, or measured now and written there.

    Arguments
        examples  how many examples the measure may look at; ``seed`` alone asks nothing of the trained model, and looks
                  at 4,096 examples of the training set (at all, if there are fewer) whatever is given
        split     which: of the ``test`` set, or ``train+test`` (70:30); longer texts are always those of the test set
        device    ``auto``, ``cpu``, ``cuda`` or ``cuda:N``

    Raises `InputError` for a run that is not finished or diverged, and for weights that are missing or damaged; of
    these nothing is recorded.
    """
    measure = MEASURES[choose("measure", name, MEASURES)]
    run.must_be_complete()
    asked = Asked(examples, split)
    content = read_record(run.directory, name, asked)
    if content is None:
        with locked(run.directory, "run"):
            content = measure(run, examples, split, plan_execution(device, "off", "float32").device)
            write_record(run.directory, name, asked, content)
    return content


def read_measures(directory: Path, names: Sequence[str], asked: Asked) -> dict[str, dict[str, Any]]:
    """Those of the named measures that the run directory holds of these examples."""
    found = {name: read_record(directory, name, asked) for name in names}
    return {name: content for name, content in found.items() if content is not None}


def _position(run: Run, examples: int, split: Split, device: torch.device) -> dict[str, Any]:
    """What is lost when position alone is taken from a head."""
    source = DecoderSource(run.model().to(device))
    batches = _batches(run, examples, split, device)
    found = ablate_heads(source, batches, chance=run.spec.chance, intervention="position", cumulative=False)
    return found.to_dict()


def _sets(run: Run, examples: int, split: Split, device: torch.device) -> dict[str, Any]:
    """Accuracy against heads removed in the whole model, and a set that suffices."""
    source = DecoderSource(run.model().to(device))
    batches = _batches(run, min(examples, _SETS), split, device)
    return head_sets(source, batches, chance=run.spec.chance).to_dict()


def _representation(run: Run, examples: int, split: Split, device: torch.device) -> dict[str, Any]:
    """The position part of the residual stream, layer by layer."""
    source = DecoderSource(run.model().to(device))
    data = Batches.of(examples_of(run.spec, min(examples, _STREAM), split), device)
    least = max(5, min(16, len(data)))  # its own bars, but for studies of toy size
    return representation(AttentionTrace(source, data.tokens, data.lengths), least=least).to_dict()


def _seed(run: Run, examples: int, split: Split, device: torch.device) -> dict[str, Any]:
    """At initialisation: what a batch leaves of the positional gradient, and where a step would move position."""
    with torch.random.fork_rng(devices=[]):
        source = DecoderGradients(initial_model(run.spec).to(device))
    count = min(_POOL, run.spec.train_examples)
    pool = Batches.of(run.spec.build_task().dataset("train", count, run.spec.data_seed), device, run.spec.ignore_label)
    strength = seed_strength(source, pool.split(_STREAM), bootstrap=200)
    drift = positional_drift(source, pool.slice(0, min(count, _STREAM)))
    return {"strength": strength.to_dict(), "drift": drift.to_dict()}


def _extrapolation(run: Run, examples: int, split: Split, device: torch.device) -> dict[str, Any]:
    """Accuracy on longer texts, always of the test set."""
    return extrapolate(run, examples=examples, device=str(device)).to_dict()


def _batches(run: Run, examples: int, split: Split, device: torch.device) -> list[Batch]:
    chosen = examples_of(run.spec, examples, split)
    size = replayed_at_once(run.spec, chosen.tokens.shape[1], device)
    return list(Batches.of(chosen, device, run.spec.ignore_label).split(size))


Measure = Callable[[Run, int, Split, torch.device], dict[str, Any]]
MEASURES: dict[str, Measure] = {
    "position": _position,
    "sets": _sets,
    "representation": _representation,
    "seed": _seed,
    "extrapolation": _extrapolation,
    **ATTENTION_MEASURES,
}
