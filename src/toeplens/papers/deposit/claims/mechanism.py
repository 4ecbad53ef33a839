"""Claims about where the deposit comes from: gradient seeds, margins, displaced directions, who else knows position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from scipy.stats import spearmanr

from toeplens.lens import HeadAblation, HeadSets, PositionalDrift, Representation, SeedStrength, margins
from toeplens.papers.deposit.claims.common import FINAL, V1, skilled
from toeplens.papers.deposit.labels import title
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.results import ONLY_SKILLED, CellResult, Results
from toeplens.studies.kit.verdicts import Finding, above, below, seen
from toeplens.training.presets import DISTANCE

_PART = "mechanism"
_CANCELS = -0.25  # exponents of SNR_n: half way between a fixed signal (0) and noise that cancels (-1/2)
_LEVELS: tuple[Literal["logits", "parameters"], ...] = ("logits", "parameters")


def _having(results: Results, label: str, measure: str) -> list[CellResult]:
    return [cell for cell in results.of(DISTANCE, label) if measure in cell.measures]


def _exponents(results: Results, label: str, level: str) -> list[float]:
    """The first layer's exponent at initialisation, one a seed: of its heads together, or of its best head."""
    found = []
    for cell in _having(results, label, "seed"):
        measured = SeedStrength.from_dict(cell.measures["seed"]["strength"]).levels[level]
        best = measured.heads.exponent[0]
        together = float(measured.layers.exponent[0])
        found.append(together if level == "logits" else float(np.nanmax(best)) if np.isfinite(best).any() else np.nan)
    return found


def _drifts(results: Results, label: str) -> dict[int, np.ndarray]:
    """The relative drifts of Var(P) of the first layer's heads at initialisation, by seed."""
    return {
        cell.key.seed: PositionalDrift.from_dict(cell.measures["seed"]["drift"]).relative[0]
        for cell in _having(results, label, "seed")
    }


def _rope_seed(results: Results) -> list[Finding]:
    levels = [above(f"RoPE: exponent, {level}", _exponents(results, "rope", level), _CANCELS) for level in _LEVELS]
    drift = [float(one.max()) for one in _drifts(results, "rope").values()]
    return [*levels, above("RoPE: largest positional drift of a first-layer head", drift, 0.0)]


def _alibi_cancels(results: Results) -> list[Finding]:
    findings = []
    for level in _LEVELS:
        exponents = _exponents(results, "alibi", level)
        what = f"ALiBi: exponent, {level}"
        if exponents and not np.isfinite(exponents).any():
            findings.append(Finding("holds", f"{what}: no gradient moves position there in {len(exponents)} seeds"))
        else:
            findings.append(below(what, exponents, _CANCELS))
    rope, alibi = _drifts(results, "rope"), _drifts(results, "alibi")
    gap = [float(rope[seed].max() - 10 * np.abs(alibi[seed]).max()) for seed in rope if seed in alibi]
    return [*findings, above("positional drift, RoPE - 10 x ALiBi", gap, 0.0)]


def _gammas(signals: Sequence[np.ndarray]) -> np.ndarray:
    """log gamma_l for each pair of layers, a row a seed."""
    return np.array([np.log(margins(signal).gamma) for signal in signals])


def _initial_signals(results: Results, label: str) -> list[np.ndarray]:
    cells = _having(results, label, "seed")
    return [SeedStrength.from_dict(cell.measures["seed"]["strength"]).levels["logits"].signal for cell in cells]


def _final_signals(results: Results, label: str) -> list[np.ndarray]:
    cells = [cell for cell in results.of(DISTANCE, label) if cell.watched and cell.status != "diverged"]
    rows = [cell.watched[-1].get("signal") for cell in cells]
    return [np.asarray(row, dtype=float) for row in rows if row is not None]


def _margin_grows(results: Results) -> list[Finding]:
    findings = []
    for when, signals in (
        ("at initialisation", _initial_signals(results, "rope")),
        ("after training", _final_signals(results, "rope")),
    ):
        gammas = _gammas(signals)
        if not gammas.size:
            findings.append(Finding("undecided", f"RoPE, {when}: no finished run that counts"))
        findings += [
            above(f"RoPE, {when}: log of gamma from layer {layer + 2} to {layer + 1}", column, 0.0)
            for layer, column in enumerate(gammas.T)
        ]
    return findings


def _leader_stays(results: Results) -> list[Finding]:
    ranks, same = [], []
    for cell in skilled(_having(results, "rope", "seed")):
        assert cell.ablation is not None
        signal = SeedStrength.from_dict(cell.measures["seed"]["strength"]).levels["logits"].signal[0]
        drops = cell.ablation.drops[0]
        ranked = np.ptp(signal) > 0 and np.ptp(drops) > 0
        ranks.append(float(np.asarray(spearmanr(signal, drops))[0]) if ranked else float("nan"))
        same.append(int(signal.argmax()) == int(drops.argmax()))
    return [
        above("RoPE, first layer: rank correlation of a head's first signal and its final drop", ranks, 0.0),
        seen("RoPE, first layer: the head that leads at first ends with the largest drop", same),
    ]


def _alignments(results: Results, label: str, layer: int) -> dict[int, float]:
    """Alignment of the stream that enters ``layer`` (from 0) with the input's vectors, less chance, by seed."""
    found = {}
    for cell in _having(results, label, "representation"):
        measured = Representation.from_dict(cell.measures["representation"])
        if layer < len(measured.alignment):
            found[cell.key.seed] = float(measured.alignment[layer] - measured.chance)
    return found


def _displaced(results: Results) -> list[Finding]:
    # in the released protocol the program's "rope" is RoPE + sinusoid
    both = "rope-absolute" if results.of(DISTANCE, "rope-absolute") else "rope"
    after = _alignments(results, both, 2)
    alone = _alignments(results, "absolute", 2)
    gap = [after[seed] - alone[seed] for seed in after if seed in alone]
    left = [
        float(Representation.from_dict(cell.measures["representation"]).coefficient[2])
        for cell in _having(results, both, "representation")
        if len(cell.measures["representation"]["layers"]) > 2
    ]
    return [
        below("RoPE + sinusoid, after layer 2: alignment with the input's positions - chance", [*after.values()], 0.1),
        below("the same, RoPE + sinusoid - sinusoid alone", gap, 0.0),
        below("RoPE + sinusoid, after layer 2: coefficient on the input's position vectors", left, 0.5),
    ]


def _positions_lost(cell: CellResult) -> np.ndarray:
    """Drops by taking position from one head at a time, the largest first."""
    drops = HeadAblation.from_dict(cell.measures["position"]).drops
    return np.sort(np.clip(drops, 0, None).ravel())[::-1]


def _monopoly(results: Results) -> list[Finding]:
    lost = [_positions_lost(cell) for cell in skilled(_having(results, "rope", "position"))]
    return [
        above("RoPE: largest drop by taking position from one head", [float(one[0]) for one in lost], 0.25),
        below("RoPE: second largest", [float(one[1]) for one in lost], 0.1),
    ]


def _needed(cell: CellResult) -> float:
    return float(len(HeadSets.from_dict(cell.measures["sets"]).sufficient))


def _fewer_heads(results: Results) -> list[Finding]:
    findings = []
    rope = {cell.key.seed: cell for cell in skilled(_having(results, "rope", "sets"))}
    for other in ("nope", "relative"):
        cells = [cell for cell in skilled(_having(results, other, "sets")) if cell.key.seed in rope]
        gap = [_needed(rope[cell.key.seed]) - _needed(cell) for cell in cells]
        findings.append(below(f"heads that suffice, RoPE - {title(other)}", gap, 0.0))
    return findings


def _two_heads(results: Results) -> list[Finding]:
    needed = [_needed(cell) for cell in skilled(_having(results, "rope", "sets"))]
    return [below("RoPE: heads that suffice for 90% of the skill", needed, 2.5)]


def _claim(
    id: str, source: str, statement: str, rule: str, check: Callable[[Results], Sequence[Finding]]
) -> Claim[Results]:
    return Claim(id, source, statement, rule, check, _PART)


CLAIMS: tuple[Claim[Results], ...] = (
    _claim(
        "rope-gradient-seed",
        f"{FINAL}, Proposition 6.1",
        "RoPE gives the positional gradient a deterministic part that batches do not cancel, so that some head always "
        "gets a positive positional signal.",
        f"At initialisation, in RoPE's first layer: the exponent of SNR_n on the batch size n above {_CANCELS:g}, at "
        "the logits (all heads) and at the parameters (best head); and the largest positional drift of a head above 0.",
        _rope_seed,
    ),
    _claim(
        "alibi-seed-cancels",
        f"{FINAL}, Proposition 6.2",
        "ALiBi's positional signal cancels when a batch is aggregated.",
        f"At initialisation, in ALiBi's first layer: the exponent of SNR_n below {_CANCELS:g} at the logits and at the "
        "parameters (or no gradient there at all); and its positional drift under a tenth of RoPE's, paired by seed.",
        _alibi_cancels,
    ),
    _claim(
        "margin-grows",
        f"{FINAL}, Theorem 6.1",
        "Back through the layers the lead of the best head grows: gamma_l > 1.",
        "RoPE: log of gamma_l = M_l / M_{l+1}, M the best head's gradient signal over the second best's, above 0 for "
        "each pair of layers, at initialisation and after training.",
        _margin_grows,
    ),
    _claim(
        "early-leader-deposits",
        f"{FINAL}, Theorem 6.1",
        "The head with the early advantage ends up with all the positional work.",
        "RoPE's first layer: rank correlation over its heads between the signal at initialisation and the final drop "
        f"above 0; and the head that leads at first has the largest drop. {ONLY_SKILLED}",
        _leader_stays,
    ),
    _claim(
        "additive-directions-displaced",
        f"{FINAL}, 5",
        "In RoPE + Absolute the additive positional directions are completely displaced after layer 2.",
        "Share of the position part's variance that lies in the input vectors' subspace, less the share expected by "
        "chance, in the stream after layer 2: below 0.1, and below that of the sinusoid alone, paired by seed; and the "
        "coefficient of the position part on the input vectors (1: carried on, 0: gone) below 0.5.",
        _displaced,
    ),
    _claim(
        "one-head-knows-position",
        f"{V1}, App. D; {FINAL}, 5",
        "Once one head of RoPE has position, the others no longer capture it.",
        "The rotation is taken from one head at a time: the largest drop above 0.25, the second largest of the whole "
        f"model below 0.1. {ONLY_SKILLED}",
        _monopoly,
    ),
    _claim(
        "rope-needs-fewer-heads",
        f"{V1}, App. D",
        "Fewer parameters answer to position under RoPE than under relative encoding or none.",
        "Size of a set of heads that keeps 90% of the skill when all others are silenced, RoPE less NoPE and less "
        f"relative, paired by seed: below 0, each. {ONLY_SKILLED}",
        _fewer_heads,
    ),
    _claim(
        "two-heads-do-it",
        f"{FINAL}, 5",
        "RoPE needs one or two heads for all positional reasoning; the rest are redundant.",
        "Size of a set of RoPE's heads that keeps 90% of the skill when all others are silenced: below 2.5. "
        f"{ONLY_SKILLED}",
        _two_heads,
    ),
)
