"""Measures on plain tensors or on sources (captured or replayable models); none needs toeplens training.

Each folder answers one question; ``kit`` holds what they share. Public names are exported here.
"""

from toeplens.lens.ablation.ablate import HeadAblation, ablate_by, ablate_heads, rank_correlation
from toeplens.lens.ablation.attribution import EstimateCheck, Scalable, check_estimates, sample_heads
from toeplens.lens.ablation.deposit import THRESHOLDS, LayerDeposit, deposit, gini
from toeplens.lens.ablation.head_sets import HeadSets, cumulative_ablation, head_sets, sufficient_set
from toeplens.lens.following.behaviour import Behaviour, PermutationScores, behaviour, permutation_scores
from toeplens.lens.following.patterns import Patterns, PatternSums, Retrieval, retrieval
from toeplens.lens.following.position_effect import PositionEffect, position_effect
from toeplens.lens.frequency.use import (
    BandAblation,
    FrequencyRecord,
    FrequencyUse,
    RotaryOffsets,
    ablate_bands,
    frequency_use,
    rotary_offsets,
)
from toeplens.lens.gradients.descent import Differentiable, PositionalDrift, positional_drift
from toeplens.lens.gradients.signal import Margins, SeedStrength, margins, seed_strength
from toeplens.lens.kit.intervals import Estimate, bootstrap_means, over_seeds
from toeplens.lens.kit.interventions import Batch, Memory, Replayable
from toeplens.lens.kit.position import Split, position_means, position_parts
from toeplens.lens.kit.terms import NoForm, Shares
from toeplens.lens.kit.toeplitz import ToeplitzProfile, toeplitz_part, toeplitz_profile
from toeplens.lens.kit.trace import AttentionTrace, LayerTrace, Traceable
from toeplens.lens.logits.decompose import KINDS, LogitParts, decompose
from toeplens.lens.logits.relevance import Relevance
from toeplens.lens.stream.representation import Representation, representation
from toeplens.lens.stream.subspace import (
    CurveDimension,
    PositionSubspace,
    curve_dimension,
    neighbour_error,
    position_subspace,
)
from toeplens.lens.toeplitz.contraction import Contraction, contraction
from toeplens.lens.toeplitz.decay import DecayFit, fit_decay
from toeplens.lens.toeplitz.levinson import Prediction, predictor
from toeplens.lens.toeplitz.single_phase import SinglePhase, single_phase
from toeplens.lens.toeplitz.spectrum import Szego, extreme_eigenvalues, hermitian_part, symbol, szego, toeplitz_operator

__all__ = [
    "KINDS",
    "THRESHOLDS",
    "AttentionTrace",
    "BandAblation",
    "Batch",
    "Behaviour",
    "Contraction",
    "CurveDimension",
    "DecayFit",
    "Differentiable",
    "Estimate",
    "EstimateCheck",
    "FrequencyRecord",
    "FrequencyUse",
    "HeadAblation",
    "HeadSets",
    "LayerDeposit",
    "LayerTrace",
    "LogitParts",
    "Margins",
    "Memory",
    "NoForm",
    "PatternSums",
    "Patterns",
    "PermutationScores",
    "PositionEffect",
    "PositionSubspace",
    "PositionalDrift",
    "Prediction",
    "Relevance",
    "Replayable",
    "Representation",
    "Retrieval",
    "RotaryOffsets",
    "Scalable",
    "SeedStrength",
    "Shares",
    "SinglePhase",
    "Split",
    "Szego",
    "ToeplitzProfile",
    "Traceable",
    "ablate_bands",
    "ablate_by",
    "ablate_heads",
    "behaviour",
    "bootstrap_means",
    "check_estimates",
    "contraction",
    "cumulative_ablation",
    "curve_dimension",
    "decompose",
    "deposit",
    "extreme_eigenvalues",
    "fit_decay",
    "frequency_use",
    "gini",
    "head_sets",
    "hermitian_part",
    "margins",
    "neighbour_error",
    "over_seeds",
    "permutation_scores",
    "position_effect",
    "position_means",
    "position_parts",
    "position_subspace",
    "positional_drift",
    "predictor",
    "rank_correlation",
    "representation",
    "retrieval",
    "rotary_offsets",
    "sample_heads",
    "seed_strength",
    "single_phase",
    "sufficient_set",
    "symbol",
    "szego",
    "toeplitz_operator",
    "toeplitz_part",
    "toeplitz_profile",
]
