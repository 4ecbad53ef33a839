"""Measures on plain tensors or on sources (captured or replayable models); none needs toeplens training.

Each module or folder answers one question; ``kit`` holds what they share. Public names are exported here.
"""

from toeplens.lens.ablation import (
    THRESHOLDS,
    EstimateCheck,
    HeadAblation,
    HeadSets,
    LayerDeposit,
    ablate_heads,
    ablate_heads_by_metric,
    check_estimates,
    cumulative_ablation,
    deposit,
    gini,
    head_sets,
    sample_heads,
    sufficient_set,
)
from toeplens.lens.frequency import (
    BandAblation,
    FrequencyRecord,
    FrequencyUse,
    RotaryOffsets,
    ablate_bands,
    frequency_use,
    rotary_offsets,
)
from toeplens.lens.gradients import (
    Differentiable,
    Margins,
    PositionalDrift,
    SeedStrength,
    margins,
    positional_drift,
    seed_strength,
)
from toeplens.lens.head_types.behaviour import Behaviour, PermutationScores, behaviour, permutation_scores
from toeplens.lens.head_types.patterns import Patterns, PatternSums, RetrievalScores, patterns, retrieval
from toeplens.lens.kit.intervals import Estimate, bootstrap_means, mean_over_seeds
from toeplens.lens.kit.interventions import AblationCache, Batch
from toeplens.lens.kit.position import Split, position_means, position_parts
from toeplens.lens.kit.rotation import RotaryPairs, rope, rotation_of
from toeplens.lens.kit.terms import NotSeparable, TermShares
from toeplens.lens.kit.toeplitz import ToeplitzProfile, toeplitz_part, toeplitz_profile
from toeplens.lens.kit.trace import AttentionTrace, LayerTrace, Source
from toeplens.lens.logits import KINDS, LogitParts, Relevance, decompose
from toeplens.lens.stream import (
    CurveDimension,
    PositionSubspace,
    Representation,
    curve_dimension,
    neighbour_error,
    position_subspace,
    representation,
)
from toeplens.lens.toeplitz.decay import DecayFit, fit_decay
from toeplens.lens.toeplitz.spectrum import (
    Contraction,
    Szego,
    contraction,
    hermitian_part,
    symbol,
    szego,
)
from toeplens.utils.renamed import renamed_getattr

__all__ = [
    "KINDS",
    "THRESHOLDS",
    "AblationCache",
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
    "NotSeparable",
    "PatternSums",
    "Patterns",
    "PermutationScores",
    "PositionSubspace",
    "PositionalDrift",
    "Relevance",
    "Representation",
    "RetrievalScores",
    "RotaryOffsets",
    "RotaryPairs",
    "SeedStrength",
    "Source",
    "Split",
    "Szego",
    "TermShares",
    "ToeplitzProfile",
    "ablate_bands",
    "ablate_heads",
    "ablate_heads_by_metric",
    "behaviour",
    "bootstrap_means",
    "check_estimates",
    "contraction",
    "cumulative_ablation",
    "curve_dimension",
    "decompose",
    "deposit",
    "fit_decay",
    "frequency_use",
    "gini",
    "head_sets",
    "hermitian_part",
    "margins",
    "mean_over_seeds",
    "neighbour_error",
    "patterns",
    "permutation_scores",
    "position_means",
    "position_parts",
    "position_subspace",
    "positional_drift",
    "representation",
    "retrieval",
    "rope",
    "rotary_offsets",
    "rotation_of",
    "sample_heads",
    "seed_strength",
    "sufficient_set",
    "symbol",
    "szego",
    "toeplitz_part",
    "toeplitz_profile",
]
__getattr__ = renamed_getattr(__name__)
