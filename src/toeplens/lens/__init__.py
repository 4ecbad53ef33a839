"""Measures: on tensors or on sources, so usable without our training."""

from toeplens.lens.ablate import Batch, HeadAblation, Memory, Replayable, ablate_heads
from toeplens.lens.bootstrap import Estimate, bootstrap_means, over_seeds
from toeplens.lens.deposit import THRESHOLDS, LayerDeposit, deposit, gini
from toeplens.lens.spectrum import symbol
from toeplens.lens.trace import AttentionTrace, LayerTrace, Traceable

__all__ = [
    "THRESHOLDS",
    "AttentionTrace",
    "Batch",
    "Estimate",
    "HeadAblation",
    "LayerDeposit",
    "LayerTrace",
    "Memory",
    "Replayable",
    "Traceable",
    "ablate_heads",
    "bootstrap_means",
    "deposit",
    "gini",
    "over_seeds",
    "symbol",
]
