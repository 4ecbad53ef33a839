"""The examples of a run for evaluation during or after training, and their batches."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from toeplens.backends import DecoderSource
from toeplens.ground import choose
from toeplens.lens import AttentionTrace, Batch
from toeplens.model import Decoder
from toeplens.tasks import TEST_SHARE, Examples
from toeplens.training import Batches, RunSpec
from toeplens.training.session import ANSWERS_AT_ONCE

DataSplit = Literal["test", "train+test"]  # the set that examples are taken from
_REPLAYED_TOKENS = {"cpu": 2**16, "cuda": 2**20}


def examples_of(spec: RunSpec, examples: int, split: DataSplit = "test") -> Examples:
    """At most ``examples`` examples of a run: from the test set, or from both sets in the proportion 70:30.

    If one set is too small, fewer examples are taken from both, in the same proportion.
    """
    task = spec.build_task()
    if choose("split", split, get_args(DataSplit)) == "test":
        return task.dataset("test", min(examples, spec.test_examples), spec.data_seed)
    most = min(int(spec.test_examples / TEST_SHARE), int(spec.train_examples / (1 - TEST_SHARE)))
    examples = min(examples, most)
    test = max(1, round(TEST_SHARE * examples))
    train = max(1, examples - test)
    parts = [task.dataset("train", train, spec.data_seed), task.dataset("test", test, spec.data_seed)]
    return Examples.join(parts)


def replayed_at_once(spec: RunSpec, length: int, device: torch.device) -> int:
    """The number of sequences per batch for ablating every head of a layer at once."""
    tokens = _REPLAYED_TOKENS[device.type]
    if spec.model.readout == "each":
        tokens = min(tokens, ANSWERS_AT_ONCE[device.type] // spec.model.num_classes)
    return max(1, tokens // (spec.model.num_heads + 1) // length)


def batches_of(spec: RunSpec, examples: Examples, device: torch.device) -> list[Batch]:
    """Batches on which every head of a layer can be ablated at once."""
    size = replayed_at_once(spec, examples.tokens.shape[1], device)
    return list(Batches.of(examples, device, spec.ignore_label).split(size))


def trace_of(model: Decoder, examples: Examples) -> AttentionTrace:
    """The attention trace of the model on the examples."""
    data = Batches.of(examples, model.readout.weight.device)
    return AttentionTrace(DecoderSource(model), data.tokens, data.lengths)
