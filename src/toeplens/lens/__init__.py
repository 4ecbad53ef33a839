"""Measures: on tensors or on sources, so usable without our training."""

from toeplens.lens.ablate import Batch, HeadAblation, Memory, Replayable, ablate_heads
from toeplens.lens.bootstrap import Estimate, bootstrap_means, over_seeds
from toeplens.lens.contraction import Contraction, contraction
from toeplens.lens.decay import DecayFit, fit_decay
from toeplens.lens.decompose import KINDS, LogitParts, NoForm, Shares, decompose
from toeplens.lens.deposit import THRESHOLDS, LayerDeposit, deposit, gini
from toeplens.lens.levinson import Prediction, positions_from, predictor
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
    "Batch",
    "Contraction",
    "CurveDimension",
    "DecayFit",
    "Estimate",
    "HeadAblation",
    "LayerDeposit",
    "LayerTrace",
    "LogitParts",
    "Memory",
    "NoForm",
    "PositionSubspace",
    "Prediction",
    "Replayable",
    "Shares",
    "SinglePhase",
    "Split",
    "Szego",
    "ToeplitzProfile",
    "Traceable",
    "ablate_heads",
    "bootstrap_means",
    "contraction",
    "curve_dimension",
    "decompose",
    "deposit",
    "extreme_eigenvalues",
    "fit_decay",
    "gini",
    "hermitian_part",
    "over_seeds",
    "position_means",
    "position_parts",
    "position_subspace",
    "positions_from",
    "predictor",
    "single_phase",
    "symbol",
    "szego",
    "toeplitz_operator",
    "toeplitz_part",
    "toeplitz_profile",
]
