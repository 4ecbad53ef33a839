"""Claims about the origin of the deposit: gradient seeds, margins, displaced directions, heads that need position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr

from toeplens.lens import margins
from toeplens.lens.ablation import counted_drops
from toeplens.lens.kit.intervals import spearman
from toeplens.papers.deposit.claims.common import (
    BOTH,
    FINAL,
    FIRST_LAYER,
    FULL,
    LATER_LAYERS,
    V1,
    Test,
    is_released,
    label_of,
    mechanism,
)
from toeplens.papers.deposit.labels import Label, title
from toeplens.papers.deposit.looks import look_at
from toeplens.studies.grid.measured import LONGER, kept
from toeplens.studies.kit.claims import Check, Claim
from toeplens.studies.kit.results import ONLY_SKILLED, CellResult, Figure, Results
from toeplens.studies.kit.verdicts import ENOUGH, GRAIN, LEVEL, Finding, Verdict, supporting, unknown
from toeplens.training.presets import DISTANCE

_FIXED = 1 / 512
_WHY_FIXED = "with the papers' batch of 512, the fixed part is then as large as the noise"
_EXACT = 1e-5  # grain of figures without measurement error
_FEWEST = 5  # minimum number of encodings for a rank correlation
_BAR, _ORDERS = 0.5, 9999
_UNKNOWN = "no skill, or not measured"


def _figure(
    measure: str,
    words: str,
    of: Callable[[CellResult], float],
    counts: Callable[[CellResult], bool] = lambda cell: True,
    without: str = _UNKNOWN,
    grain: float = GRAIN,
) -> Figure:
    """A value of models with skill, an ablation and a measure that also satisfy ``counts``."""

    def known(cell: CellResult) -> bool:
        return cell.measure(measure) is not None and cell.ablation is not None and cell.skilled and counts(cell)

    return Figure(words, of, known, without, grain)


# ---- gradients at initialisation -------------------------------------------------------------------------------------


def _seeded(cell: CellResult) -> bool:
    return cell.measure("seed") is not None


def _share(level: str) -> Figure:
    """Share of the first layer's positional gradient that is the same in every example; NaN without a gradient."""

    def of(cell: CellResult) -> float:
        measured = cell.measure("seed").strength.levels[level]
        heads = np.asarray(measured.heads.share[0], dtype=float)
        if level == "logits":
            return float(np.asarray(measured.layers.share)[0])
        return float(np.nanmean(heads)) if np.isfinite(heads).any() else float("nan")

    return Figure(f"fixed share of the positional gradient at the {level}, ", of, _seeded, grain=_EXACT)


def _signal(cell: CellResult) -> np.ndarray:
    """Signal of the heads at initialisation, [L, H]."""
    return cell.measure("seed").strength.levels["logits"].signal


def _trained(cell: CellResult) -> np.ndarray:
    """Signal of the heads after training, [L, H]."""
    return np.asarray(cell.watched[-1]["signal"], dtype=float)


def _finished(cell: CellResult) -> bool:
    return bool(cell.watched) and "signal" in cell.watched[-1] and cell.status != "diverged"


_DRIFT = Figure(
    "mean positional drift of the first layer's heads, ",
    lambda cell: float(cell.measure("seed").drift.relative[0].mean()),
    _seeded,
    grain=_EXACT,
)


def _amplified(results: Results) -> list[Finding]:
    """Gamma of every layer, before and after training."""
    rope, findings = label_of(results, FULL), []
    for when, signal, counts in (("at initialisation", _signal, _seeded), ("after training", _trained, _finished)):
        steps = max((len(signal(cell)) - 1 for cell in results.of(DISTANCE, rope) if counts(cell)), default=1)
        if not steps:
            return [unknown(title(rope), "the model has one layer", "a model with at least two layers")]
        for step in range(steps):
            words = f"{when}, log2 growth of the best head's lead from layer {step + 2} to layer {step + 1}, "
            figure = Figure(words, partial(_gamma, signal, step), counts, grain=0.01)
            findings += Test(figure, rope, above=0.0)(results)
    return findings


def _gamma(signal: Callable[[CellResult], np.ndarray], step: int, cell: CellResult) -> float:
    """log2 growth of the best head's lead over the second, from the next layer to layer ``step`` (from 0)."""
    return float(np.log2(margins(signal(cell)).gamma[step]))


def _costs(cell: CellResult) -> Any:
    """[L, H] ablation effects; None without."""
    look = look_at(cell)
    return None if look is None else look.costs


def _led(cell: CellResult) -> bool:
    """Whether exactly one of several first-layer heads has the largest signal at initialisation."""
    first = _signal(cell)[0]
    return len(first) > 1 and bool(np.isfinite(first).all()) and int((first == first.max()).sum()) == 1


def _early(words: str, of: Callable[[np.ndarray, np.ndarray], float]) -> Figure:
    """A figure of the first layer's heads, from their signal at initialisation and their final ablation effect."""

    def counts(cell: CellResult) -> bool:
        costs = _costs(cell)
        return costs is not None and bool(costs[0].any()) and _led(cell)

    without = "no first-layer head has an effect or leads, or not measured"
    return _figure("seed", words, lambda cell: of(_signal(cell)[0], _costs(cell)[0]), counts, without, 0.02)


def _work(cell: CellResult) -> np.ndarray:
    """[L, H] accuracy drop from removing position from each head."""
    return counted_drops(cell.measure("position"))


def _works(cell: CellResult) -> bool:
    """Whether one head leads, and the drops from removing position sum to at least 0.1 of the skill."""
    found = cell.measure("position")
    return found is not None and _work(cell).sum() >= 0.1 * (found.baseline - cell.length_chance) and _led(cell)


def _standing(signal: np.ndarray, costs: np.ndarray) -> float:
    """The share of the other heads with a smaller effect than the initial leader; ties count half."""
    others = np.delete(costs, signal.argmax())
    leader = costs[signal.argmax()]
    return float((others < leader).mean() + (others == leader).mean() / 2)


_POSITION = _figure(
    "seed",
    "share of the initial leader in the summed effects of removing position, ",
    lambda cell: float((work := _work(cell))[0, int(_signal(cell)[0].argmax())] / work.sum()),
    _works,
    "no position or no leader, or not measured",
    0.02,
)
_STANDING = _early("share of heads with a smaller effect than the initial leader, ", _standing)
_RANKS = _early(
    "rank correlation of initial signal and final effect, ",
    lambda first, last: float(spearman(np.stack((first, last)))),
)


# ---- representations -------------------------------------------------------------------------------------------------


def _deep(cell: CellResult) -> bool:
    """Whether the model has more than two layers."""
    found = cell.measure("representation")
    return found is not None and len(found.alignment) > 2


def _stream(words: str, of: Callable[[Any], float]) -> Figure:
    return Figure(words, lambda cell: float(of(cell.measure("representation"))), _deep, "no layer after layer 2", 0.005)


_ALIGNMENT = _stream(
    "after layer 2, alignment with the input's position vectors − chance, ",
    lambda found: found.alignment[2] - found.chance,
)
_COEFFICIENT = _stream(
    "after layer 2, coefficient on the input's position vectors, ", lambda found: found.coefficient[2]
)
_DECODABLE = _stream(
    "mean R2 of decoding position from the stream after layer 2 and later, ",
    lambda found: np.mean(found.decodability[2:]),
)
_CARRIED = _stream(
    "smallest coefficient on the input's position vectors after layer 2 and later, ",
    lambda found: np.min(found.coefficient[2:]),
)


def _implicit(results: Results) -> list[Finding]:
    if is_released(results):
        return [unknown("NoPE", "cannot see order in the released code", "the paper protocol")]
    return Test(_DECODABLE, "rope", "nope", below=-0.1)(results)


def _through_mask(results: Results) -> list[Finding]:
    """The switch takes the other protocol's mask, so the causal model is on either side, by protocol."""
    pair = ("nope/mask", "nope") if is_released(results) else ("nope", "nope/mask")
    return Test(Figure("skill of ", lambda cell: cell.skill), *pair, above=0.1)(results)


# ---- trained heads ---------------------------------------------------------------------------------------------------


def _lost(rank: int, words: str) -> Figure:
    """The ``rank``-th largest effect (from 0) of removing position from one head, as a share of the skill."""

    def of(cell: CellResult) -> float:
        drops = np.sort(_work(cell), axis=None)[::-1]
        skill = cell.measure("position").baseline - cell.length_chance
        return float(drops[rank] / skill) if rank < len(drops) else 0.0

    return _figure("position", words, of)


_NEEDED = _figure(
    "sets",
    "log2 of the number of sufficient heads, ",
    lambda cell: float(np.log2(max(1, len(cell.measure("sets").sufficient)))),
    grain=0.1,
)
_POSITIONAL = _figure(
    "position-sets",
    "number of heads that need position, ",
    lambda cell: float(len(cell.measure("position-sets").sufficient)),
    grain=0.1,
)


def _costliest(cell: CellResult) -> tuple[int, int]:
    """Layer and head with the largest effect; the model must have a head with an effect."""
    layer, head = np.unravel_index(_costs(cell).argmax(), _costs(cell).shape)
    return int(layer), int(head)


def _of_costliest(words: str, of: Callable[[CellResult], float]) -> Figure:
    def counts(cell: CellResult) -> bool:
        costs = _costs(cell)
        return costs is not None and bool(costs.any())

    return _figure("frequency", words, of, counts, "no skill, no head with an effect, or not measured", 0.02)


def _norm_of_used(cell: CellResult) -> float:
    """log2 of the norm share of the pair that the most important head's logits depend on most, over an even share."""
    found, (layer, head) = cell.measure("frequency"), _costliest(cell)
    pairs = np.asarray(found.logits)[layer, head, 1:-1]
    norms = np.asarray(found.norms)[layer, head, 1:]
    if not np.isfinite(pairs).any():
        return float("nan")
    with np.errstate(divide="ignore"):
        return float(np.log2(norms[np.nanargmax(pairs)] * len(norms)))


def _massive(cell: CellResult) -> float:
    """log2 of the energy share of the most important head's largest dimension, over an even share."""
    found, (layer, head) = cell.measure("frequency"), _costliest(cell)
    largest = np.asarray(found.massive)[:, layer, head].max()
    return float(np.log2(largest * 2 * (np.asarray(found.norms).shape[-1] - 1)))


def _breadth(cell: CellResult, layers: slice) -> float:
    """Mean over heads of the effective number of pairs that the logits depend on, as a share of all pairs."""
    shares = np.clip(np.asarray(cell.measure("frequency").logits)[layers, :, 1:-1], 0, None)
    total, squares = shares.sum(-1), np.square(shares).sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        effective = total**2 / squares / shares.shape[-1]
    return float(np.nanmean(effective)) if np.isfinite(effective).any() else float("nan")


_NORM = _of_costliest("log2 of the most used pair's norm over an even share, ", _norm_of_used)
_ENERGY = _of_costliest("log2 of the largest dimension's energy over an even share, ", _massive)
_used = partial(_figure, "frequency", counts=lambda cell: look_at(cell) is not None, grain=0.02)
_FIRST_BREADTH = _used(
    "share of the frequencies used by the first layer's heads, ", lambda cell: _breadth(cell, FIRST_LAYER)
)
_GROWTH = _used(
    "share used in the later layers − share used in the first, ",
    lambda cell: _breadth(cell, LATER_LAYERS) - _breadth(cell, FIRST_LAYER),
)
_KEPT = _figure("extrapolation", f"share of the skill kept at {LONGER:g} times the length, ", kept)


# ---- spectra against learning ----------------------------------------------------------------------------------------


def _width(cell: CellResult) -> float:
    widths = np.log2(cell.measure("contraction").width[0])
    return float(np.nanmean(widths)) if np.isfinite(widths).any() else float("nan")


def _goes_with(
    words: str, of: Callable[[CellResult], float], counts: Callable[[CellResult], bool], without: str, sign: int
) -> Check[Results]:
    """Is an encoding's value rank-correlated (with this sign) with its first layer's spectral range?

    The units are encodings, each with its mean over seeds, as seeds of one encoding are not independent encodings.
    """

    def check(results: Results) -> list[Finding]:
        plain = [results.of(DISTANCE, label) for label in results.labels(DISTANCE) if Label.parse(label).plain]
        seen = [
            [(_width(cell), of(cell)) for cell in cells if cell.measure("contraction") is not None and counts(cell)]
            for cells in plain
        ]
        known = [[pair for pair in pairs if not np.isnan(pair).any()] for pairs in seen]
        count, there = (sum(map(len, each)) for each in (plain, known))
        points = [np.mean(pairs, axis=0) for pairs in known if pairs]
        what = f"over {len(points)} encodings, rank correlation of the first layer's spectral range with {words}"
        if there < count:
            what += f" ({count - there} of {count} models excluded: {without})"
        if len(points) < _FEWEST:
            wanted = f"{_FEWEST} encodings with models that are not excluded"
            return [unknown(what, f"fewer than {_FEWEST} encodings qualify", wanted)]
        return [_judged(what, np.array(points).T, sign, min(len(pairs) for pairs in known if pairs))]

    return check


def _judged(what: str, pairs: Float[np.ndarray, "2 E"], sign: int, seeds: int) -> Finding:
    """Permutation test: holds if the correlation exceeds chance; fails if it is below a true one of `_BAR`."""
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


_SPEED = _goes_with(
    "the time until half is learned",
    lambda cell: cell.half_learned if cell.learned_half else float("inf"),
    lambda cell: cell.looked_back and cell.status != "diverged",
    "diverged, not measured, or accuracy on training examples not evaluated",
    1,
)
_PEAK = _goes_with(
    "the largest ablation effect of a head",
    lambda cell: float(_costs(cell).max(initial=0.0)),
    lambda cell: look_at(cell) is not None,
    "diverged, not measured, or no skill",
    -1,
)


CLAIMS: tuple[Claim[Results], ...] = (
    mechanism(
        "rope-gradient-seed",
        f"{FINAL}: Proposition 6.1",
        "RoPE gives the positional gradient a deterministic part that batches do not cancel, so that some head always "
        "gets a positive positional signal.",
        "At initialisation, in RoPE's first layer: the share of the positional gradient's energy that is the same in "
        "every example is above 1/512, at the logits (all heads) and at the parameters (mean over heads); "
        f"{_WHY_FIXED}. Supporting: the heads' mean positional drift is above 0.",
        [
            Test(_share("logits"), FULL, above=_FIXED),
            Test(_share("parameters"), FULL, above=_FIXED),
            supporting(Test(_DRIFT, FULL, above=0.0)),
        ],
    ),
    mechanism(
        "alibi-seed-cancels",
        f"{FINAL}: Proposition 6.2",
        "ALiBi's positional signal cancels when a batch is aggregated.",
        "At initialisation, in ALiBi's first layer: the share of the positional gradient's energy at the logits that "
        f"is the same in every example is below 1/512; {_WHY_FIXED}. The parameters are not tested, as those of "
        "ALiBi's first layer cannot affect position.",
        [Test(_share("logits"), "alibi", below=_FIXED)],
    ),
    mechanism(
        "margin-grows",
        f"{FINAL}: Theorem 6.1",
        "Back through the layers the lead of the best head is amplified exponentially: every gamma_l > 1.",
        "RoPE: the ratio of the best head's gradient signal to the second best's is larger in each layer than in the "
        "next (log2 of their quotient above 0), at initialisation and after training.",
        _amplified,
    ),
    mechanism(
        "early-leader-deposits",
        f"{FINAL}: Theorem 6.1",
        "The head with the early advantage ends up with all the positional work.",
        "RoPE: position is removed from one head of the model at a time, and the accuracy drops are summed. The "
        "first-layer head with the largest signal at initialisation has more than 0.9 of this sum. Supporting: it has "
        "a larger final ablation effect than more than three quarters of the layer's other heads (chance: half); the "
        f"rank correlation of initial signal and final effect is above 0. {ONLY_SKILLED} They also need one head that "
        "leads in the first layer and a sum of at least 0.1 of the skill; for the supporting parts, a first-layer head "
        "with an effect.",
        [
            Test(_POSITION, FULL, above=0.9),
            supporting(Test(_STANDING, FULL, above=0.75)),
            supporting(Test(_RANKS, FULL, above=0.0)),
        ],
    ),
    mechanism(
        "additive-directions-displaced",
        f"{FINAL}: key findings",
        "In RoPE + Absolute the additive positional directions are completely displaced after layer 2.",
        "In the residual stream after layer 2: the share of the positional part's variance in the input vectors' "
        "subspace, minus the share expected by chance, is below 0.1. The coefficient of the positional part on the "
        "input vectors (1: kept, 0: removed) is below 0.1. Supporting: the share is below that of the sinusoid without "
        "RoPE.",
        [
            Test(_ALIGNMENT, BOTH, below=0.1),
            Test(_COEFFICIENT, BOTH, below=0.1),
            supporting(Test(_ALIGNMENT, BOTH, "absolute", below=0.0)),
        ],
    ),
    mechanism(
        "rope-suppresses-implicit-position",
        f"{FINAL}: key findings",
        "RoPE suppresses the formation of implicit positional representations.",
        "R2 of a ridge regression that decodes position from the stream after layer 2 and later: RoPE − NoPE is below "
        "−0.1. NoPE has only an implicit representation. Not tested in the released protocol: without a causal mask "
        "NoPE cannot see order, and a probe decodes only the sequences' lengths.",
        _implicit,
    ),
    mechanism(
        "additive-coupling-persists",
        f"{V1}, 3.1",
        "The residual connections carry the absolute encoding's positions to deeper levels, so that their coupling "
        "with content persists there.",
        "Absolute: the coefficient of the positional part on the input vectors (1: kept, 0: removed) is above 0.5 in "
        "the residual stream after layer 2 and after every later layer. This tests the part of the claim about "
        "residual connections.",
        [Test(_CARRIED, "absolute", above=0.5)],
    ),
    Claim[Results](
        "nope-position-through-mask",
        f"{V1}, C.2",
        "NoPE obtains position through the causal mask.",
        "Skill of NoPE on Task 1 with the causal mask minus the skill without it, everything else equal, is above 0.1. "
        "Models that are still learning count too, as a model that cannot learn the task never stops learning.",
        _through_mask,
        part="factors",
    ),
    mechanism(
        "one-head-knows-position",
        f"{V1}, App. D",
        "Once one head of RoPE has position, the others no longer capture it.",
        "The rotation is removed from one head at a time: the largest accuracy drop is above 0.25 of the skill, and "
        "the second largest of the whole model is below 0.1. Supporting: rotation in one head (mean between 0.5 and "
        f"1.5) keeps 90% of the skill. {ONLY_SKILLED}",
        [
            Test(_lost(0, "largest effect of removing position from one head, "), FULL, above=0.25),
            Test(_lost(1, "second largest effect of removing position from one head, "), FULL, below=0.1),
            supporting(Test(_POSITIONAL, FULL, above=0.5, below=1.5)),
        ],
    ),
    mechanism(
        "rope-needs-fewer-heads",
        f"{V1}, App. D",
        "Much fewer parameters answer to position under RoPE than under relative encoding or none.",
        "Size of a set of heads that keeps 90% of the skill when all others are ablated: RoPE needs fewer than half as "
        "many as each of NoPE and relative (difference of log2 below −1). The sets include heads that process content, "
        f"as position cannot be removed from NoPE. {ONLY_SKILLED}",
        [Test(_NEEDED, FULL, ("nope", "relative"), below=-1.0)],
    ),
    mechanism(
        "two-heads-do-it",
        f"{FINAL}: key findings",
        "RoPE needs one or two heads for all positional reasoning; the rest are redundant.",
        "Size of a set of RoPE's heads that keeps 90% of the skill when the rotation of all other heads is removed and "
        f"their content is kept: the mean is between 0.5 and 2.5, so closer to one or two than to none or three. "
        f"{ONLY_SKILLED}",
        [Test(_POSITIONAL, FULL, above=0.5, below=2.5)],
    ),
    mechanism(
        "significant-angle-massive",
        f"{V1}, B.2",
        "RoPE needs one significant angle, which corresponds to massive values.",
        "In RoPE's most important head: the pair of dimensions that its logits depend on most has more than twice an "
        "even share of the norms. Supporting: its largest dimension has more than four times an even share of the "
        f"energy of queries or keys (twice the norm is four times the energy). {ONLY_SKILLED}",
        [Test(_NORM, FULL, above=1.0), supporting(Test(_ENERGY, FULL, above=2.0))],
    ),
    mechanism(
        "few-bands-trained",
        f"{V1}, App. D",
        "Only some frequency bands are fully trained, and their influence spreads to most bands in deep layers.",
        "RoPE: the heads of the first layer use less than half of the frequencies (effective number by the variance "
        "of the logits, mean over heads). Those of later layers use more, by more than a tenth of all frequencies. "
        f"{ONLY_SKILLED}",
        [Test(_FIRST_BREADTH, FULL, below=0.5), Test(_GROWTH, FULL, above=0.1)],
    ),
    mechanism(
        "rope-loses-length",
        f"{V1}, App. D and 5.2",
        "RoPE's length generalisation is drastically affected: it falls short of what it was designed for.",
        f"RoPE keeps less than half of its skill on sequences of {LONGER:g} times the training length. {ONLY_SKILLED}",
        [Test(_KEPT, FULL, below=0.5)],
    ),
    mechanism(
        "mla-keeps-length",
        f"{V1}, 5.2",
        "MLA, by diffusing positional responsibility, points toward a remedy for length generalisation.",
        f"Share of the skill kept on sequences of {LONGER:g} times the training length: MLA − RoPE is above 0.05. "
        f"{ONLY_SKILLED}",
        [Test(_KEPT, "mla", FULL, above=0.05)],
    ),
    mechanism(
        "contraction-speeds-learning",
        f"{V1}, abstract, 3.3, App. B, 6",
        "Spectral contraction makes learning faster: spectra predict learning dynamics.",
        "Spectral range: the first layer's range of eigenvalues with position, divided by that without it, at "
        "initialisation. Over the encodings (mean over seeds; last if a model never learns half), the rank correlation "
        "of this range with the number of examples until half is learned exceeds that of random orders. It fails if "
        "the correlation is significantly below 0.5.",
        _SPEED,
    ),
    mechanism(
        "contraction-brings-deposit",
        f"{V1}, 3.3",
        "Spectral contraction leads to a deposit in single heads.",
        "Over the encodings (mean over seeds), the first layer's spectral range at initialisation is negatively "
        "rank-correlated with the largest ablation effect of a head after training, decided as in "
        f"contraction-speeds-learning. {ONLY_SKILLED}",
        _PEAK,
    ),
)
