"""Claims that relate the encodings' spectra to how models learn: the papers' central link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr

from toeplens.lens.kit.intervals import spearman
from toeplens.papers.deposit.claims.common import (
    V1,
    mechanism,
)
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.looks import look_at
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.results import ONLY_SKILLED, CellResult, Figure, Results
from toeplens.studies.kit.verdicts import ENOUGH, LEVEL, Finding, Verdict, unknown
from toeplens.training.presets import DISTANCE

_FEWEST = 5  # encodings that ranks are compared over
_BAR, _ORDERS = 0.5, 9999


# ---- spectra against learning ----------------------------------------------------------------------------------------


def _width(cell: CellResult) -> float:
    widths = np.log2(cell.measure("contraction").width[0])
    return float(np.nanmean(widths)) if np.isfinite(widths).any() else float("nan")


def _ranked(
    words: str, of: Callable[[CellResult], float], counts: Callable[[CellResult], bool], without: str
) -> Figure:
    return Figure(words, of, lambda cell: cell.measure("contraction") is not None and counts(cell), without)


def _goes_with(figure: Figure, sign: int) -> Callable[[Results], list[Finding]]:
    """Does the rank of an encoding's figure go with (sign 1), or against, that of its first layer's spectral range?

    Encodings are the units, each by its mean over seeds: seeds of the same few encodings are no encodings of their own.
    """

    def check(results: Results) -> list[Finding]:
        plain = [results.of(DISTANCE, label) for label in results.labels(DISTANCE) if Label.parse(label).plain]
        seen = [[(_width(cell), figure.of(cell)) for cell in cells if figure.counts(cell)] for cells in plain]
        known = [[pair for pair in pairs if not np.isnan(pair).any()] for pairs in seen]
        count, there = (sum(map(len, each)) for each in (plain, known))
        points = [np.mean(pairs, axis=0) for pairs in known if pairs]
        what = f"over {len(points)} encodings, rank correlation of the first layer's spectral range with {figure.words}"
        if there < count:
            what += f" ({count - there} of {count} models left out: {figure.without})"
        if len(points) < _FEWEST:
            return [
                unknown(
                    what,
                    f"fewer than {_FEWEST} encodings that count",
                    f"{_FEWEST} encodings with models that are not left out",
                )
            ]
        return [_judged(what, np.array(points).T, sign, min(len(pairs) for pairs in known if pairs))]

    return check


def _judged(what: str, pairs: Float[np.ndarray, "2 E"], sign: int, seeds: int) -> Finding:
    """Holds where a random order of the encodings rarely gives as much; fails where `_BAR` rarely gives as little."""
    found = sign * float(spearman(pairs))
    text = f"{what}: {sign * found:.2f}"
    if np.isnan(found):
        return unknown(what, "all ranks are equal")
    if seeds < ENOUGH:
        side: Verdict = "leans to hold" if found > _BAR else "leans to fail" if found < 0 else "undecided"
        return Finding(side, f"{text} ({seeds} seed{'s' if seeds > 1 else ''})", wanting=f"{ENOUGH} seeds")
    rng = np.random.Generator(np.random.Philox(0))
    orders = rng.permuted(np.tile(pairs[1], (_ORDERS, 1)), axis=1)
    by_chance = sign * spearman(np.stack((np.broadcast_to(pairs[0], orders.shape), orders)))
    holds = float((1 + (by_chance >= found - 1e-9).sum()) / (1 + _ORDERS))
    error = np.sqrt(1.06 / max(1, pairs.shape[1] - 3))  # of Fisher's transform of a rank correlation
    fails = float(ndtr((np.arctanh(np.clip(found, -0.999, 0.999)) - np.arctanh(_BAR)) / error))
    finding = Finding("undecided", text, holds, fails, wanting="more encodings, not more seeds")
    return replace(finding, verdict=finding.at(LEVEL))


def _slow(cell: CellResult) -> float:
    """Whoever never learns half comes last, however early its training ended."""
    return cell.half_learned if cell.learned_half else float("inf")


_SLOW = _ranked(
    "how long half takes to learn",
    _slow,
    lambda cell: cell.looked_back and cell.status != "diverged",
    "diverged, not measured, or training examples not looked at after evaluations",
)


def _peak(cell: CellResult) -> float:
    look = look_at(cell)
    return float("nan") if look is None else look.largest()


_PEAK = _ranked(
    "the largest cost of a head", _peak, lambda cell: look_at(cell) is not None, "diverged, not measured, or no skill"
)

CLAIMS: tuple[Claim[Results], ...] = (
    mechanism(
        "contraction-speeds-learning",
        f"{V1}, abstract, 3.3, App. B, 6",
        "Spectral contraction makes learning faster: spectra predict learning dynamics.",
        "Over the encodings (each by its mean over seeds, and last if a model of it never learns half), the first "
        "layer's range of eigenvalues with position over without it, at initialisation, goes with the examples until "
        "half is learned: the rank correlation is more than a random order of the encodings gives. It fails where a "
        "correlation of 0.5, half way to an order that predicts all, would not give so little.",
        _goes_with(_SLOW, 1),
    ),
    mechanism(
        "contraction-brings-deposit",
        f"{V1}, 3.3",
        "Spectral contraction leads to a deposit in single heads.",
        "Over the encodings (each by its mean over seeds), the first layer's range of eigenvalues with position over "
        "without it, at initialisation, goes against the largest cost of a head after training: decided as the link to "
        f"learning is. {ONLY_SKILLED}",
        _goes_with(_PEAK, -1),
    ),
)
