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
    FINAL,
    V1,
    Check,
    against,
    between,
    both_positions,
    compare,
    has,
    is_released,
    mechanism,
    models,
    on_rope,
    over,
    under,
)
from toeplens.papers.deposit.labels import Label, title
from toeplens.papers.deposit.looks import look_at
from toeplens.studies.grid.measured import LONGER, kept
from toeplens.studies.kit.claims import Claim, as_support, every
from toeplens.studies.kit.results import ONLY_SKILLED, CellResult, Figure, Results
from toeplens.studies.kit.verdicts import ENOUGH, LEVEL, Finding, Verdict, unknown
from toeplens.training.presets import DISTANCE

_FIXED = 1 / 512
_WHY_FIXED = "with the papers' batch of 512, the fixed part is then as large as the noise"
_EXACT = 1e-5  # grain of figures without measurement error
_seeded = has("seed", skill=False)


# ---- gradients at initialisation -------------------------------------------------------------------------------------


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


_DRIFT = Figure(
    "mean positional drift of the first layer's heads, ",
    lambda cell: float(cell.measure("seed").drift.relative[0].mean()),
    _seeded,
    grain=_EXACT,
)


def _trained(cell: CellResult) -> np.ndarray:
    """Signal of the heads after training, [L, H]."""
    return np.asarray(cell.watched[-1]["signal"], dtype=float)


def _finished(cell: CellResult) -> bool:
    return bool(cell.watched) and "signal" in cell.watched[-1] and cell.status != "diverged"


def _amplified(rope: str) -> Check:
    """Check of gamma of every layer, before and after training."""

    def check(results: Results) -> list[Finding]:
        findings: list[Finding] = []
        for when, signal, counts in (("at initialisation", _signal, _seeded), ("after training", _trained, _finished)):
            steps = max((len(signal(cell)) - 1 for cell in results.of(DISTANCE, rope) if counts(cell)), default=1)
            if not steps:
                return [unknown(title(rope), "the model has one layer", "a model with at least two layers")]
            figures = [
                Figure(
                    f"{when}, log2 growth of the best head's lead from layer {step + 2} to layer {step + 1}, ",
                    partial(_gamma, signal, step),
                    counts,
                    grain=0.01,
                )
                for step in range(steps)
            ]
            findings += models(rope, *((figure, over(0.0)) for figure in figures))(results)
        return findings

    return check


def _gamma(signal: Callable[[CellResult], np.ndarray], step: int, cell: CellResult) -> float:
    """log2 growth of the best head's lead over the second, from the next layer to layer ``step`` (from 0)."""
    return float(np.log2(margins(signal(cell)).gamma[step]))


def _early(of: Callable[[np.ndarray, np.ndarray], float], words: str) -> Figure:
    """A figure of the first layer's heads, from their signal at initialisation and their final ablation effect."""

    def number(cell: CellResult) -> float:
        look = look_at(cell)
        assert look is not None
        return of(_signal(cell)[0], look.costs[0])

    def counts(cell: CellResult) -> bool:
        look = look_at(cell)
        return has("seed")(cell) and look is not None and bool(look.costs[0].any()) and _led(_signal(cell)[0])

    return Figure(words, number, counts, "no first-layer head has an effect or leads, or not measured", 0.02)


def _led(signal: np.ndarray) -> bool:
    """Whether exactly one of several heads has the largest signal."""
    return len(signal) > 1 and bool(np.isfinite(signal).all()) and int((signal == signal.max()).sum()) == 1


_POSITION = Figure(
    "share of the initial leader in the summed effects of removing position, ",
    lambda cell: float((work := _work(cell))[0, int(_signal(cell)[0].argmax())] / work.sum()),
    lambda cell: has("seed")(cell) and has("position")(cell) and _works(cell) and _led(_signal(cell)[0]),
    "no position or no leader, or not measured",
    0.02,
)


def _work(cell: CellResult) -> np.ndarray:
    """[L, H] accuracy drop from removing position from each head."""
    return counted_drops(cell.measure("position"))


def _works(cell: CellResult) -> bool:
    """Whether these drops sum to at least 0.1 of the skill."""
    return bool(_work(cell).sum() >= 0.1 * (cell.measure("position").baseline - cell.length_chance))


def _standing(signal: np.ndarray, costs: np.ndarray) -> float:
    """The share of the other heads with a smaller effect than the initial leader; ties count half."""
    others = np.delete(costs, signal.argmax())
    leader = costs[signal.argmax()]
    return float((others < leader).mean() + (others == leader).mean() / 2)


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
    return compare(DISTANCE, [("rope", "nope")], _DECODABLE, under(-0.1))(results)


def _through_mask(results: Results) -> list[Finding]:
    """The switch takes the other protocol's mask, so the causal model is on either side, by protocol."""
    pair = ("nope/mask", "nope") if is_released(results) else ("nope", "nope/mask")
    return compare(DISTANCE, [pair], Figure("skill of ", lambda cell: cell.skill), over(0.1))(results)


def _displaced(results: Results) -> list[Finding]:
    both = both_positions(results)
    return [
        *models(both, (_ALIGNMENT, under(0.1)), (_COEFFICIENT, under(0.1)))(results),
        *as_support(compare(DISTANCE, [(both, "absolute")], _ALIGNMENT, under(0.0)))(results),
    ]


# ---- trained heads ---------------------------------------------------------------------------------------------------


def _lost(rank: int, words: str) -> Figure:
    """The ``rank``-th largest effect (from 0) of removing position from one head, as a share of the skill."""

    def of(cell: CellResult) -> float:
        found = cell.measure("position")
        drops = np.sort(counted_drops(found), axis=None)[::-1]
        return float(drops[rank] / (found.baseline - cell.length_chance)) if rank < len(drops) else 0.0

    return Figure(words, of, has("position"))


def _heads_of(measure: str, words: str, of: Callable[[int], float] = float) -> Figure:
    def number(cell: CellResult) -> float:
        return float(of(len(cell.measure(measure).sufficient)))

    return Figure(words, number, has(measure), grain=0.1)


_NEEDED = _heads_of("sets", "log2 of the number of sufficient heads, ", lambda count: float(np.log2(max(1, count))))
_POSITIONAL = _heads_of("position-sets", "number of heads that need position, ")


def _costliest(cell: CellResult) -> tuple[int, int]:
    """Layer and head with the largest effect; the model must have a head with an effect."""
    look = look_at(cell)
    assert look is not None
    layer, head = np.unravel_index(look.costs.argmax(), look.costs.shape)
    return int(layer), int(head)


def _used(words: str, of: Callable[[CellResult], float], grain: float = 0.02) -> Figure:
    return Figure(words, of, lambda cell: has("frequency")(cell) and look_at(cell) is not None, grain=grain)


def _of_costliest(words: str, of: Callable[[CellResult], float]) -> Figure:
    def counts(cell: CellResult) -> bool:
        look = look_at(cell)
        return has("frequency")(cell) and look is not None and look.matter > 0

    return Figure(words, of, counts, "no skill, no head with an effect, or not measured", 0.02)


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


def _breadth(layers: slice) -> Callable[[CellResult], float]:
    """Mean over heads of the effective number of pairs that the logits depend on, as a share of all pairs."""

    def of(cell: CellResult) -> float:
        shares = np.clip(np.asarray(cell.measure("frequency").logits)[layers, :, 1:-1], 0, None)
        total, squares = shares.sum(-1), np.square(shares).sum(-1)
        with np.errstate(invalid="ignore", divide="ignore"):
            effective = total**2 / squares / shares.shape[-1]
        return float(np.nanmean(effective)) if np.isfinite(effective).any() else float("nan")

    return of


_FIRST_BREADTH = _used("share of the frequencies used by the first layer's heads, ", _breadth(slice(0, 1)))
_GROWTH = _used(
    "share used in the later layers − share used in the first, ",
    lambda cell: _breadth(slice(1, None))(cell) - _breadth(slice(0, 1))(cell),
)


_KEPT = Figure(f"share of the skill kept at {LONGER:g} times the length, ", kept, has("extrapolation"))


_FEWEST = 5  # minimum number of encodings for a rank correlation
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
    """Is an encoding's figure rank-correlated (with this sign) with its first layer's spectral range?

    The units are encodings, each with its mean over seeds, as seeds of one encoding are not independent encodings.
    """

    def check(results: Results) -> list[Finding]:
        plain = [results.of(DISTANCE, label) for label in results.labels(DISTANCE) if Label.parse(label).plain]
        seen = [[(_width(cell), figure.of(cell)) for cell in cells if figure.counts(cell)] for cells in plain]
        known = [[pair for pair in pairs if not np.isnan(pair).any()] for pairs in seen]
        count, there = (sum(map(len, each)) for each in (plain, known))
        points = [np.mean(pairs, axis=0) for pairs in known if pairs]
        what = f"over {len(points)} encodings, rank correlation of the first layer's spectral range with {figure.words}"
        if there < count:
            what += f" ({count - there} of {count} models excluded: {figure.without})"
        if len(points) < _FEWEST:
            return [
                unknown(
                    what,
                    f"fewer than {_FEWEST} encodings qualify",
                    f"{_FEWEST} encodings with models that are not excluded",
                )
            ]
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


def _slow(cell: CellResult) -> float:
    """Time to learn half; infinite for a model that never does."""
    return cell.half_learned if cell.learned_half else float("inf")


_SLOW = _ranked(
    "the time until half is learned",
    _slow,
    lambda cell: cell.looked_back and cell.status != "diverged",
    "diverged, not measured, or accuracy on training examples not evaluated",
)


def _peak(cell: CellResult) -> float:
    look = look_at(cell)
    return float("nan") if look is None else look.largest()


_PEAK = _ranked(
    "the largest ablation effect of a head",
    _peak,
    lambda cell: look_at(cell) is not None,
    "diverged, not measured, or no skill",
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
        every(
            on_rope(lambda rope: models(rope, (_share("logits"), over(_FIXED)), (_share("parameters"), over(_FIXED)))),
            as_support(on_rope(lambda rope: models(rope, (_DRIFT, over(0.0))))),
        ),
    ),
    mechanism(
        "alibi-seed-cancels",
        f"{FINAL}: Proposition 6.2",
        "ALiBi's positional signal cancels when a batch is aggregated.",
        "At initialisation, in ALiBi's first layer: the share of the positional gradient's energy at the logits that "
        f"is the same in every example is below 1/512; {_WHY_FIXED}. The parameters are not tested, as those of "
        "ALiBi's first layer cannot affect position.",
        models("alibi", (_share("logits"), under(_FIXED))),
    ),
    mechanism(
        "margin-grows",
        f"{FINAL}: Theorem 6.1",
        "Back through the layers the lead of the best head is amplified exponentially: every gamma_l > 1.",
        "RoPE: the ratio of the best head's gradient signal to the second best's is larger in each layer than in the "
        "next (log2 of their quotient above 0), at initialisation and after training.",
        on_rope(_amplified),
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
        every(
            on_rope(lambda rope: models(rope, (_POSITION, over(0.9)))),
            as_support(
                on_rope(
                    lambda rope: models(
                        rope,
                        (
                            _early(_standing, "share of heads with a smaller effect than the initial leader, "),
                            over(0.75),
                        ),
                        (
                            _early(
                                lambda first, last: float(spearman(np.stack((first, last)))),
                                "rank correlation of initial signal and final effect, ",
                            ),
                            over(0.0),
                        ),
                    )
                )
            ),
        ),
    ),
    mechanism(
        "additive-directions-displaced",
        f"{FINAL}: key findings",
        "In RoPE + Absolute the additive positional directions are completely displaced after layer 2.",
        "In the residual stream after layer 2: the share of the positional part's variance in the input vectors' "
        "subspace, minus the share expected by chance, is below 0.1. The coefficient of the positional part on the "
        "input vectors (1: kept, 0: removed) is below 0.1. Supporting: the share is below that of the sinusoid without "
        "RoPE.",
        _displaced,
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
        models("absolute", (_CARRIED, over(0.5))),
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
        on_rope(
            lambda rope: every(
                models(
                    rope,
                    (_lost(0, "largest effect of removing position from one head, "), over(0.25)),
                    (_lost(1, "second largest effect of removing position from one head, "), under(0.1)),
                ),
                as_support(models(rope, (_POSITIONAL, between(0.5, 1.5)))),
            )
        ),
    ),
    mechanism(
        "rope-needs-fewer-heads",
        f"{V1}, App. D",
        "Much fewer parameters answer to position under RoPE than under relative encoding or none.",
        "Size of a set of heads that keeps 90% of the skill when all others are ablated: RoPE needs fewer than half as "
        "many as each of NoPE and relative (difference of log2 below −1). The sets include heads that process content, "
        f"as position cannot be removed from NoPE. {ONLY_SKILLED}",
        on_rope(lambda rope: compare(DISTANCE, against(rope, "nope", "relative"), _NEEDED, under(-1.0))),
    ),
    mechanism(
        "two-heads-do-it",
        f"{FINAL}: key findings",
        "RoPE needs one or two heads for all positional reasoning; the rest are redundant.",
        "Size of a set of RoPE's heads that keeps 90% of the skill when the rotation of all other heads is removed and "
        f"their content is kept: the mean is between 0.5 and 2.5, so closer to one or two than to none or three. "
        f"{ONLY_SKILLED}",
        on_rope(lambda rope: models(rope, (_POSITIONAL, between(0.5, 2.5)))),
    ),
    mechanism(
        "significant-angle-massive",
        f"{V1}, B.2",
        "RoPE needs one significant angle, which corresponds to massive values.",
        "In RoPE's most important head: the pair of dimensions that its logits depend on most has more than twice an "
        "even share of the norms. Supporting: its largest dimension has more than four times an even share of the "
        f"energy of queries or keys (twice the norm is four times the energy). {ONLY_SKILLED}",
        on_rope(
            lambda rope: every(
                models(
                    rope,
                    (
                        _of_costliest("log2 of the most used pair's norm over an even share, ", _norm_of_used),
                        over(1.0),
                    ),
                ),
                as_support(
                    models(
                        rope,
                        (
                            _of_costliest("log2 of the largest dimension's energy over an even share, ", _massive),
                            over(2.0),
                        ),
                    )
                ),
            )
        ),
    ),
    mechanism(
        "few-bands-trained",
        f"{V1}, App. D",
        "Only some frequency bands are fully trained, and their influence spreads to most bands in deep layers.",
        "RoPE: the heads of the first layer use less than half of the frequencies (effective number by the variance "
        "of the logits, mean over heads). Those of later layers use more, by more than a tenth of all frequencies. "
        f"{ONLY_SKILLED}",
        on_rope(lambda rope: models(rope, (_FIRST_BREADTH, under(0.5)), (_GROWTH, over(0.1)))),
    ),
    mechanism(
        "rope-loses-length",
        f"{V1}, App. D and 5.2",
        "RoPE's length generalisation is drastically affected: it falls short of what it was designed for.",
        f"RoPE keeps less than half of its skill on sequences of {LONGER:g} times the training length. {ONLY_SKILLED}",
        on_rope(lambda rope: models(rope, (_KEPT, under(0.5)))),
    ),
    mechanism(
        "mla-keeps-length",
        f"{V1}, 5.2",
        "MLA, by diffusing positional responsibility, points toward a remedy for length generalisation.",
        f"Share of the skill kept on sequences of {LONGER:g} times the training length: MLA − RoPE is above 0.05. "
        f"{ONLY_SKILLED}",
        on_rope(lambda rope: compare(DISTANCE, [("mla", rope)], _KEPT, over(0.05))),
    ),
    mechanism(
        "contraction-speeds-learning",
        f"{V1}, abstract, 3.3, App. B, 6",
        "Spectral contraction makes learning faster: spectra predict learning dynamics.",
        "Spectral range: the first layer's range of eigenvalues with position, divided by that without it, at "
        "initialisation. Over the encodings (mean over seeds; last if a model never learns half), the rank correlation "
        "of this range with the number of examples until half is learned exceeds that of random orders. It fails if "
        "the correlation is significantly below 0.5.",
        _goes_with(_SLOW, 1),
    ),
    mechanism(
        "contraction-brings-deposit",
        f"{V1}, 3.3",
        "Spectral contraction leads to a deposit in single heads.",
        "Over the encodings (mean over seeds), the first layer's spectral range at initialisation is negatively "
        "rank-correlated with the largest ablation effect of a head after training, decided as in "
        f"contraction-speeds-learning. {ONLY_SKILLED}",
        _goes_with(_PEAK, -1),
    ),
)
