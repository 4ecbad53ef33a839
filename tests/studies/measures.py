"""Records of measures made up from the numbers that a test is about; all else in them is 0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from toeplens.engine import Extrapolation, LengthResult
from toeplens.lens import BandAblation, Behaviour, FrequencyRecord, PermutationScores
from toeplens.lens.head_types.behaviour import AgreementScores
from toeplens.lens.kit.toeplitz import ToeplitzShares


def behaviour(positional: Any, symbolic: Any, interaction: Any) -> dict[str, Any]:
    shares = [np.array(share, dtype=float) for share in (positional, symbolic, interaction)]
    return Behaviour(*shares, variance=np.ones(shares[0].shape), flat=np.isnan(shares[0]), queries=1).to_dict()


def permutations(positional: Any, symbolic: Any) -> dict[str, Any]:
    scores = AgreementScores(
        *(np.array(x, dtype=float) for x in (positional, symbolic)), *np.zeros((2, *np.shape(positional)))
    )
    return PermutationScores(scores, scores, queries=1, permutations=1, seed=0).to_dict()


def frequency(frequencies: Any, centre: Any) -> dict[str, Any]:
    turns, centres = np.array(frequencies, dtype=float), np.array(centre, dtype=float)
    norms, logits = (np.zeros((*centres.shape, turns.shape[-1] + more)) for more in (1, 2))
    layers, massive = tuple(range(len(centres))), np.zeros((2, *centres.shape))
    return FrequencyRecord(layers, turns, norms, logits, logits, np.ones(centres.shape), centres, massive).to_dict()


def bands(drops: Any) -> dict[str, Any]:
    lost = np.array(drops, dtype=float)
    return BandAblation(lost, lost, lost, 0.0, 1, "loss", "rotation").to_dict()


def toeplitz(share: Any) -> dict[str, Any]:
    shares = np.array(share, dtype=float)
    return ToeplitzShares(shares, np.zeros(shares.shape)).to_dict()


def length_result(factor: float, accuracy: float | None, **more: Any) -> LengthResult:
    """Texts of one length; where there is no accuracy, ``more`` has but the reason ``why``."""
    figures = {} if accuracy is None else {"examples": 1, "accuracy": accuracy, "low": accuracy, "high": accuracy}
    return LengthResult(round(24 * factor), factor, **figures, **more)


def extrapolation(rows: Iterable[LengthResult]) -> dict[str, Any]:
    return Extrapolation("0" * 16, 24, tuple(rows)).to_dict()
