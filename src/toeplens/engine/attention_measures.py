"""What is measured of a trained model's attention: what its heads follow, which frequencies they use, how Toeplitz."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from toeplens.engine.examples import Split, examples_of, replayed_at_once
from toeplens.engine.kinds import WHY
from toeplens.ground import InputError
from toeplens.lens import (
    AttentionTrace,
    ablate_bands,
    behaviour,
    frequency_use,
    permutation_scores,
)
from toeplens.lens.kit.pieces import written_out_profile
from toeplens.sources import DecoderSource
from toeplens.training import Batches, Run

_TRACED, _PERMUTED, _PERMUTATIONS = 256, 64, 16  # examples at most; queries, and permutations of each

Found = dict[str, Any]


def _where_it_can(measure: Callable[[AttentionTrace], Found]) -> Callable[[Run, int, Split, torch.device], Found]:
    """The measure on a trace of the first examples; where an encoding has no such thing, why."""

    def measured(run: Run, examples: int, split: Split, device: torch.device) -> Found:
        model = run.model().to(device)  # that it is not there is no reason of the encoding's, and is not recorded
        data = Batches.of(examples_of(run.spec, min(examples, _TRACED), split), device)
        try:
            return measure(AttentionTrace(DecoderSource(model), data.tokens, data.lengths))
        except InputError as error:
            return {WHY: str(error)}

    return measured


def _behaviour(trace: AttentionTrace) -> Found:
    """Positional, symbolic and interaction share of each head, over the queries that the model uses."""
    return behaviour(trace, counted="used").to_dict()


def _permutations(trace: AttentionTrace) -> Found:
    """The same by sampled permutations."""
    scores = permutation_scores(trace, counted="used", queries=_PERMUTED, permutations=_PERMUTATIONS)
    return scores.to_dict()


def _frequency(trace: AttentionTrace) -> Found:
    """Use of each frequency, over the queries that the model uses."""
    return frequency_use(trace, counted="used").to_dict()


def _toeplitz(trace: AttentionTrace) -> Found:
    """Toeplitz share of each head's logits."""
    profiles = [written_out_profile(layer) for layer in trace]
    return {
        "share": [profile.share.tolist() for profile in profiles],
        "variance_explained": [profile.variance_explained.tolist() for profile in profiles],
    }


def _bands(run: Run, examples: int, split: Split, device: torch.device) -> Found:
    """What the model loses without each frequency of each head, in nats."""
    model = run.model().to(device)
    chosen = examples_of(run.spec, min(examples, _TRACED), split)
    size = replayed_at_once(run.spec, chosen.tokens.shape[1], device)
    batches = Batches.of(chosen, device, run.spec.ignore_label).split(size)
    try:
        return ablate_bands(DecoderSource(model), batches).to_dict()
    except InputError as error:
        return {WHY: str(error)}


ATTENTION_MEASURES: dict[str, Callable[[Run, int, Split, torch.device], Found]] = {
    "behaviour": _where_it_can(_behaviour),
    "permutations": _where_it_can(_permutations),
    "frequency": _where_it_can(_frequency),
    "toeplitz": _where_it_can(_toeplitz),
    "bands": _bands,
}
