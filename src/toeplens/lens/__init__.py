"""Measures: on tensors or on sources, so usable without our training."""

from toeplens.lens.ablate import Memory, ablate_heads
from toeplens.lens.attribution import Scalable, rank_correlation
from toeplens.lens.bands import BandAblation, ablate_bands
from toeplens.lens.behaviour import Behaviour, behaviour
from toeplens.lens.bootstrap import Estimate, bootstrap_means, over_seeds
from toeplens.lens.contraction import Contraction, contraction
from toeplens.lens.decay import DecayFit, fit_decay
from toeplens.lens.decompose import LogitParts, NoForm, decompose
from toeplens.lens.deposit import THRESHOLDS, LayerDeposit, deposit, gini
from toeplens.lens.estimate_check import EstimateCheck, check_estimates, sample_heads
from toeplens.lens.frequency import FrequencyUse, frequency_use
from toeplens.lens.gradient_seed import SeedStrength, seed_strength
from toeplens.lens.gradients import Differentiable
from toeplens.lens.head_ablation import HeadAblation
from toeplens.lens.head_sets import HeadSets, cumulative_ablation, head_sets, sufficient_set
from toeplens.lens.interventions import Batch, Replayable
from toeplens.lens.kinds import KINDS
from toeplens.lens.levinson import Prediction, positions_from, predictor
from toeplens.lens.margins import Margins, margins
from toeplens.lens.patterns import Patterns, PatternSums
from toeplens.lens.permutation import PermutationScores, permutation_scores
from toeplens.lens.position_effect import PositionEffect, position_effect
from toeplens.lens.positional_drift import PositionalDrift, positional_drift
from toeplens.lens.relevance import Relevance
from toeplens.lens.representation import Representation, representation
from toeplens.lens.shares import Shares
from toeplens.lens.single_phase import SinglePhase, single_phase
from toeplens.lens.spectrum import Szego, extreme_eigenvalues, hermitian_part, symbol, szego, toeplitz_operator
from toeplens.lens.splits import Split, position_parts
from toeplens.lens.subspace import CurveDimension, PositionSubspace, curve_dimension, position_means, position_subspace
from toeplens.lens.toeplitz import ToeplitzProfile, toeplitz_part, toeplitz_profile
from toeplens.lens.trace import AttentionTrace, LayerTrace, Traceable

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
    "Scalable",
    "SeedStrength",
    "Shares",
    "SinglePhase",
    "Split",
    "Szego",
    "ToeplitzProfile",
    "Traceable",
    "ablate_bands",
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
    "over_seeds",
    "permutation_scores",
    "position_effect",
    "position_means",
    "position_parts",
    "position_subspace",
    "positional_drift",
    "positions_from",
    "predictor",
    "rank_correlation",
    "representation",
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
