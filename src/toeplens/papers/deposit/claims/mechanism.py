"""Claims about where the deposit comes from: gradient seeds, margins, displaced directions, who else knows position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from toeplens.lens import margins
from toeplens.lens.kit.intervals import spearman
from toeplens.papers.deposit.claims.common import (
    FINAL,
    V1,
    against,
    both_positions,
    compare,
    has,
    mechanism,
    models,
    over,
    under,
)
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.results import ONLY_SKILLED, CellResult, Figure, Results
from toeplens.studies.kit.verdicts import Finding, above, below, seen
from toeplens.training.presets import DISTANCE

_CANCELS = -0.25  # exponents of SNR_n: half way between a fixed signal (0) and noise that cancels (-1/2)
_LEVELS: tuple[Literal["logits", "parameters"], ...] = ("logits", "parameters")
_seeded = has("seed", skill=False)


def _exponent(level: str) -> Callable[[CellResult], float]:
    """The first layer's exponent at initialisation: of its heads together, or of its best head."""

    def of(cell: CellResult) -> float:
        measured = cell.measure("seed").strength.levels[level]
        best = measured.heads.exponent[0]
        together = float(measured.layers.exponent[0])
        return together if level == "logits" else float(np.nanmax(best)) if np.isfinite(best).any() else np.nan

    return of


def _signal(cell: CellResult) -> np.ndarray:
    """Of the heads at initialisation, [L, H]."""
    return cell.measure("seed").strength.levels["logits"].signal


def _drift(cell: CellResult) -> np.ndarray:
    """The relative drifts of Var(P) of the first layer's heads at initialisation."""
    return cell.measure("seed").drift.relative[0]


_LARGEST_DRIFT = Figure("", lambda cell: float(_drift(cell).max()), _seeded)
_TENFOLD_DRIFT = Figure("", lambda cell: 10 * float(np.abs(_drift(cell)).max()), _seeded)


def _alibi_cancels(results: Results) -> list[Finding]:
    findings = []
    cells = [cell for cell in results.of(DISTANCE, "alibi") if _seeded(cell)]
    for level in _LEVELS:
        exponents = [_exponent(level)(cell) for cell in cells]
        what = f"ALiBi: exponent, {level}"
        if exponents and not np.isfinite(exponents).any():
            findings.append(Finding("holds", f"{what}: no gradient moves position there in {len(exponents)} seeds"))
        else:
            findings.append(below(what, exponents, _CANCELS))
    gap = _LARGEST_DRIFT.by_seed(results.of(DISTANCE, "rope")) - _TENFOLD_DRIFT.by_seed(cells)
    return [*findings, above("positional drift, RoPE - 10 x ALiBi", gap, 0.0)]


def _margin_grows(results: Results) -> list[Finding]:
    cells = results.of(DISTANCE, "rope")
    last = [cell.watched[-1].get("signal") for cell in cells if cell.watched and cell.status != "diverged"]
    findings = []
    for when, signals in (
        ("at initialisation", [_signal(cell) for cell in cells if _seeded(cell)]),
        ("after training", [np.asarray(signal, dtype=float) for signal in last if signal is not None]),
    ):
        gammas = np.array([np.log(margins(signal).gamma) for signal in signals])  # a row a seed, a column a pair
        if not gammas.size:
            findings.append(Finding("undecided", f"RoPE, {when}: no finished run that counts"))
        findings += [
            above(f"RoPE, {when}: log of gamma from layer {layer + 2} to {layer + 1}", column, 0.0)
            for layer, column in enumerate(gammas.T)
        ]
    return findings


def _rank(cell: CellResult) -> float:
    """Correlation over the first layer's heads of the first signal and the final drop."""
    assert cell.ablation is not None
    return float(spearman(np.stack((_signal(cell)[0], cell.ablation.drops[0]))))


def _stays(cell: CellResult) -> bool:
    assert cell.ablation is not None
    return bool(_signal(cell)[0].argmax() == cell.ablation.drops[0].argmax())


def _deep(cell: CellResult) -> bool:
    """Whether there is a stream after layer 2."""
    found = cell.measure("representation")
    return found is not None and len(found.alignment) > 2


def _aligned(cell: CellResult) -> float:
    """Alignment of the stream after layer 2 with the input's vectors, less chance."""
    found = cell.measure("representation")
    return float(found.alignment[2] - found.chance)


_ALIGNMENT = Figure("", _aligned, _deep)
_COEFFICIENT = Figure("", lambda cell: float(cell.measure("representation").coefficient[2]), _deep)


def _displaced(results: Results) -> list[Finding]:
    both = results.of(DISTANCE, both_positions(results))
    after, alone = _ALIGNMENT.by_seed(both), _ALIGNMENT.by_seed(results.of(DISTANCE, "absolute"))
    left = _COEFFICIENT.by_seed(both)
    return [
        below("RoPE + sinusoid, after layer 2: alignment with the input's positions - chance", after, 0.1),
        below("the same, RoPE + sinusoid - sinusoid alone", after - alone, 0.0),
        below("RoPE + sinusoid, after layer 2: coefficient on the input's position vectors", left, 0.5),
    ]


def _lost(rank: int) -> Callable[[CellResult], float]:
    """What is lost by taking position from one head, the ``rank``th from the most on."""
    return lambda cell: float(np.sort(np.clip(cell.measure("position").drops, 0, None).ravel())[::-1][rank])


_NEEDED = Figure("heads that suffice, ", lambda cell: float(len(cell.measure("sets").sufficient)), has("sets"))


CLAIMS: tuple[Claim[Results], ...] = (
    mechanism(
        "rope-gradient-seed",
        f"{FINAL}, Proposition 6.1",
        "RoPE gives the positional gradient a deterministic part that batches do not cancel, so that some head always "
        "gets a positive positional signal.",
        f"At initialisation, in RoPE's first layer: the exponent of SNR_n on the batch size n above {_CANCELS:g}, at "
        "the logits (all heads) and at the parameters (best head); and the largest positional drift of a head above 0.",
        models(
            "rope",
            *((f"RoPE: exponent, {level}", _exponent(level), over(_CANCELS)) for level in _LEVELS),
            ("RoPE: largest positional drift of a first-layer head", _LARGEST_DRIFT.of, over(0.0)),
            counts=_seeded,
        ),
    ),
    mechanism(
        "alibi-seed-cancels",
        f"{FINAL}, Proposition 6.2",
        "ALiBi's positional signal cancels when a batch is aggregated.",
        f"At initialisation, in ALiBi's first layer: the exponent of SNR_n below {_CANCELS:g} at the logits and at the "
        "parameters (or no gradient there at all); and its positional drift under a tenth of RoPE's, paired by seed.",
        _alibi_cancels,
    ),
    mechanism(
        "margin-grows",
        f"{FINAL}, Theorem 6.1",
        "Back through the layers the lead of the best head grows: gamma_l > 1.",
        "RoPE: log of gamma_l = M_l / M_{l+1}, M the best head's gradient signal over the second best's, above 0 for "
        "each pair of layers, at initialisation and after training.",
        _margin_grows,
    ),
    mechanism(
        "early-leader-deposits",
        f"{FINAL}, Theorem 6.1",
        "The head with the early advantage ends up with all the positional work.",
        "RoPE's first layer: rank correlation over its heads between the signal at initialisation and the final drop "
        f"above 0; and the head that leads at first has the largest drop. {ONLY_SKILLED}",
        models(
            "rope",
            ("RoPE, first layer: rank correlation of a head's first signal and its final drop", _rank, over(0.0)),
            ("RoPE, first layer: the head that leads at first ends with the largest drop", _stays, seen),
            counts=has("seed"),
        ),
    ),
    mechanism(
        "additive-directions-displaced",
        f"{FINAL}, 5",
        "In RoPE + Absolute the additive positional directions are completely displaced after layer 2.",
        "Share of the position part's variance that lies in the input vectors' subspace, less the share expected by "
        "chance, in the stream after layer 2: below 0.1, and below that of the sinusoid alone, paired by seed; and the "
        "coefficient of the position part on the input vectors (1: carried on, 0: gone) below 0.5.",
        _displaced,
    ),
    mechanism(
        "one-head-knows-position",
        f"{V1}, App. D; {FINAL}, 5",
        "Once one head of RoPE has position, the others no longer capture it.",
        "The rotation is taken from one head at a time: the largest drop above 0.25, the second largest of the whole "
        f"model below 0.1. {ONLY_SKILLED}",
        models(
            "rope",
            ("RoPE: largest drop by taking position from one head", _lost(0), over(0.25)),
            ("RoPE: second largest", _lost(1), under(0.1)),
            counts=has("position"),
        ),
    ),
    mechanism(
        "rope-needs-fewer-heads",
        f"{V1}, App. D",
        "Fewer parameters answer to position under RoPE than under relative encoding or none.",
        "Size of a set of heads that keeps 90% of the skill when all others are silenced, RoPE less NoPE and less "
        f"relative, paired by seed: below 0, each. {ONLY_SKILLED}",
        compare(DISTANCE, against("rope", "nope", "relative"), _NEEDED, under(0.0)),
    ),
    mechanism(
        "two-heads-do-it",
        f"{FINAL}, 5",
        "RoPE needs one or two heads for all positional reasoning; the rest are redundant.",
        "Size of a set of RoPE's heads that keeps 90% of the skill when all others are silenced: below 2.5. "
        f"{ONLY_SKILLED}",
        models(
            "rope",
            ("RoPE: heads that suffice for 90% of the skill", _NEEDED.of, under(2.5)),
            counts=has("sets"),
        ),
    ),
)
