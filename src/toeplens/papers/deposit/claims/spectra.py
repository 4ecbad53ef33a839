"""Claims that relate the encodings' spectra to how models learn: the papers' central link."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from toeplens.lens.kit.intervals import spearman
from toeplens.papers.deposit.claims.common import (
    V1,
    mechanism,
)
from toeplens.papers.deposit.labels import Label
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.contrasts import of_one
from toeplens.studies.kit.looks import look_at
from toeplens.studies.kit.results import ONLY_SKILLED, CellResult, Figure, Results
from toeplens.studies.kit.verdicts import Finding, above, below, unknown
from toeplens.training.presets import DISTANCE

_FEWEST = 5  # encodings that ranks are compared over


# ---- spectra against learning ----------------------------------------------------------------------------------------


def _width(cell: CellResult) -> float:
    widths = np.log2(cell.measure("contraction").width[0])
    return float(np.nanmean(widths)) if np.isfinite(widths).any() else float("nan")


def _ranked(words: str, of: Callable[[CellResult], float], counts: Callable[[CellResult], bool]) -> Figure:
    return Figure(words, of, lambda cell: cell.measure("contraction") is not None and counts(cell))


def _goes_with(figure: Figure, sign: int) -> Callable[[Results], list[Finding]]:
    """Over a seed's encodings: does the rank of the figure go with that of the first layer's spectral range?"""

    def check(results: Results) -> list[Finding]:
        by_seed: dict[int, list[tuple[float, float]]] = {}
        for cell in results.cells:
            if cell.key.task == DISTANCE and Label.parse(cell.key.label).plain and figure.counts(cell):
                by_seed.setdefault(cell.key.seed, []).append((_width(cell), figure.of(cell)))
        values = [float(spearman(np.array(pairs).T)) for pairs in by_seed.values() if len(pairs) >= _FEWEST]
        what = f"over encodings, rank correlation of the first layer's spectral range with {figure.words}"
        if not values:
            return [unknown(what, f"no seed has {_FEWEST} encodings that count")]
        seen = of_one(values, 0.02)
        return [above(what, seen, 0.5) if sign > 0 else below(what, seen, -0.5)]

    return check


def _slow(cell: CellResult) -> float:
    """Whoever never learns half comes last, however early its training ended."""
    return cell.half_learned if cell.learned_half else float("inf")


_SLOW = _ranked("how long half takes to learn", _slow, lambda cell: cell.status != "diverged")


def _peak(cell: CellResult) -> float:
    look = look_at(cell)
    return float("nan") if look is None else look.largest()


_PEAK = _ranked("the largest cost of a head", _peak, lambda cell: look_at(cell) is not None)

CLAIMS: tuple[Claim[Results], ...] = (
    mechanism(
        "contraction-speeds-learning",
        f"{V1}, abstract, 3.3, App. B, 6",
        "Spectral contraction makes learning faster: spectra predict learning dynamics.",
        "Over the encodings of a seed, the first layer's range of eigenvalues with position over without it, at "
        "initialisation, goes with the examples until half is learned: rank correlation above 0.5, half way to an "
        "order that predicts all.",
        _goes_with(_SLOW, 1),
    ),
    mechanism(
        "contraction-brings-deposit",
        f"{V1}, 3.3",
        "Spectral contraction leads to a deposit in single heads.",
        "Over the encodings of a seed, the first layer's range of eigenvalues with position over without it, at "
        "initialisation, goes against the largest cost of a head after training: rank correlation below -0.5. "
        f"{ONLY_SKILLED}",
        _goes_with(_PEAK, -1),
    ),
)
