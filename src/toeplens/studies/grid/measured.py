"""What the claims, the relations and the page ask of a grid study's cells: heads, frequencies, longer texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from toeplens.studies.kit.results import CellResult

LONGER = 1.5  # times the training length: where extrapolation is compared
_NEAR = 0.1  # a length is a whole number of tokens, so not always the factor that was asked for
_SHARES = ("positional", "symbolic", "interaction")

Heads = Float[np.ndarray, "L H"]


@dataclass(frozen=True)
class Behaviours:
    """Each head's shares, [L, H]; NaN for a head whose logits do not vary."""

    positional: Heads
    symbolic: Heads
    interaction: Heads


def array(values: Any) -> np.ndarray:
    """Nested lists as numbers, NaN for None."""
    return np.array(values, dtype=float)


def behaviours(cell: CellResult) -> Behaviours | None:
    """The shares of a cell's heads; None where there are none."""
    found = cell.measure("behaviour")
    return None if found is None else Behaviours(*(array(found[name]) for name in _SHARES))


def drops(cell: CellResult) -> Heads | None:
    """Accuracy lost without each head, no less than 0; None without an ablation."""
    return None if cell.ablation is None else np.clip(cell.ablation.drops, 0, None)


def carried(cell: CellResult, share: str) -> float:
    """A share's mean over the heads, each weighed by what is lost without it.

    So this is how positional (symbolic) the part of the model is that its skill depends on; NaN where no head matters.
    """
    found, lost = behaviours(cell), drops(cell)
    if found is None or lost is None:
        return float("nan")
    values = getattr(found, share)
    weights = np.where(np.isnan(values), 0, lost)
    return float((weights * np.nan_to_num(values)).sum() / weights.sum()) if weights.sum() > 0 else float("nan")


def toeplitz(cell: CellResult) -> float:
    """The mean Toeplitz share of a cell's heads; NaN where it was not measured."""
    found = cell.measure("toeplitz")
    shares = np.empty(0) if found is None else array(found["share"])
    return float(np.nanmean(shares)) if np.isfinite(shares).any() else float("nan")


def centres(cell: CellResult) -> Heads | None:
    """Each head's mean log2 frequency, weighed by what makes its logits vary; None without a rotation."""
    found = cell.measure("frequency")
    return None if found is None else array(found["centre"])


def at_length(cell: CellResult, factor: float) -> dict[str, Any] | None:
    """The row of the test texts of so many times the training length; None where there is none that counts."""
    found = cell.measure("extrapolation")
    rows = [] if found is None else found["rows"]
    near = [row for row in rows if row["accuracy"] is not None and abs(row["factor"] - factor) < _NEAR]
    return min(near, key=lambda row: abs(row["factor"] - factor), default=None)


def skill_at(cell: CellResult, factor: float) -> float:
    """Skill on texts of that length: accuracy over the best guess from the length alone, as a share of the rest."""
    row = at_length(cell, factor)
    if row is None:
        return float("nan")
    guess = max(row["chance"], row["length_chance"])
    return (row["accuracy"] - guess) / (1 - guess)


def kept(cell: CellResult, factor: float = LONGER) -> float:
    """Skill on longer texts over skill on texts of the training length; NaN for a model without skill."""
    return skill_at(cell, factor) / skill_at(cell, 1.0) if cell.skilled else float("nan")
