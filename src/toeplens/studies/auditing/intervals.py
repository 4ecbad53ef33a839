"""Intervals of heads' effects: over sequences, or where these are few over blocks of their tokens."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from scipy import stats

from toeplens.lens import bootstrap_means
from toeplens.sources.huggingface.outcome import ENOUGH

LEVEL = 0.95
WAYS = {"sequences": "over sequences", "blocks": "over blocks of about {} tokens within the sequences"}


def interval_of(
    parts: Float[np.ndarray, "B K H"], seed: int
) -> tuple[Float[np.ndarray, "H"], Float[np.ndarray, "H"], Float[np.ndarray, "H"]]:
    """Mean over sequences and blocks, and the ends of its 95 % interval; NaN where there is one part alone.

    Sequences (and their blocks) are resampled; of fewer than 8 parts in all, whose resamples say little, the interval
    is Student's.

    Arguments
        parts  of each sequence, each block of its tokens, and each head (`toeplens.sources.huggingface.HeadEffects`)
        seed   of the resampling
    """
    rows = parts.reshape(-1, parts.shape[-1])
    count, mean = len(rows), rows.mean(0)
    if count < 2:
        unknown = np.full_like(mean, np.nan)
        return mean, unknown, unknown
    if count >= ENOUGH:
        return mean, *bootstrap_means(rows, level=LEVEL, seed=seed)
    reach = stats.t.ppf((1 + LEVEL) / 2, count - 1) * rows.std(0, ddof=1) / np.sqrt(count)
    return mean, mean - reach, mean + reach


def way_of(parts: Float[np.ndarray, "B K H"], tokens: int) -> str | None:
    """What the intervals are over, in words; None where there are none."""
    sequences, blocks, _ = parts.shape
    if sequences * blocks < 2:
        return None
    return WAYS["sequences"] if blocks == 1 else WAYS["blocks"].format(round(tokens / blocks))
