"""Claims about where the deposit comes from: gradient seeds, margins, displaced directions, who else knows position."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from toeplens.lens import margins
from toeplens.lens.ablation.deposit import counted_drops
from toeplens.lens.kit.intervals import spearman
from toeplens.papers.deposit.claims.common import (
    FINAL,
    V1,
    Check,
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
from toeplens.papers.deposit.labels import title
from toeplens.papers.deposit.looks import look_at
from toeplens.studies.kit.claims import Claim, as_support, every
from toeplens.studies.kit.results import ONLY_SKILLED, CellResult, Figure, Results
from toeplens.studies.kit.verdicts import Finding, unknown
from toeplens.training.presets import DISTANCE

_FIXED = 1 / 512
_WHY_FIXED = "of the gradient's energy: in the papers' batch of 512 the fixed part is then as large as the noise"
_EXACT = 1e-5  # grain of what has no error but that of its models
_seeded = has("seed", skill=False)


# ---- gradients at initialisation -------------------------------------------------------------------------------------


def _share(level: str) -> Figure:
    """What of the first layer's positional gradient is the same in every example; NaN without a gradient."""

    def of(cell: CellResult) -> float:
        measured = cell.measure("seed").strength.levels[level]
        heads = np.asarray(measured.heads.share[0], dtype=float)
        if level == "logits":
            return float(np.asarray(measured.layers.share)[0])
        return float(np.nanmean(heads)) if np.isfinite(heads).any() else float("nan")

    return Figure(f"fixed share of the positional gradient at the {level}, ", of, _seeded, grain=_EXACT)


def _signal(cell: CellResult) -> np.ndarray:
    """Of the heads at initialisation, [L, H]."""
    return cell.measure("seed").strength.levels["logits"].signal


_DRIFT = Figure(
    "positional drift of the first layer's heads, mean, ",
    lambda cell: float(cell.measure("seed").drift.relative[0].mean()),
    _seeded,
    grain=_EXACT,
)


def _trained(cell: CellResult) -> np.ndarray:
    """The same after training."""
    return np.asarray(cell.watched[-1]["signal"], dtype=float)


def _finished(cell: CellResult) -> bool:
    return bool(cell.watched) and "signal" in cell.watched[-1] and cell.status != "diverged"


def _amplified(rope: str) -> Check:
    """Gamma of every layer, before and after training."""

    def check(results: Results) -> list[Finding]:
        findings: list[Finding] = []
        for when, signal, counts in (("at initialisation", _signal, _seeded), ("after training", _trained, _finished)):
            steps = max((len(signal(cell)) - 1 for cell in results.of(DISTANCE, rope) if counts(cell)), default=1)
            if not steps:
                return [unknown(title(rope), "one layer amplifies nothing", "a model of two layers or more")]
            figures = [
                Figure(
                    f"{when}, doublings of the best head's lead from layer {step + 2} to layer {step + 1}, ",
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
    """Doublings of the best head's lead over the second from the next layer to layer ``step``, from 0."""
    return float(np.log2(margins(signal(cell)).gamma[step]))


def _early(of: Callable[[np.ndarray, np.ndarray], float], words: str) -> Figure:
    """Of the first layer's heads: the signal at initialisation, and what silencing each costs in the end."""

    def number(cell: CellResult) -> float:
        look = look_at(cell)
        assert look is not None
        return of(_signal(cell)[0], look.costs[0])

    def counts(cell: CellResult) -> bool:
        look = look_at(cell)
        return has("seed")(cell) and look is not None and bool(look.costs[0].any()) and _led(_signal(cell)[0])

    return Figure(words, number, counts, "no head of the first layer matters or leads, or not measured", 0.02)


def _led(signal: np.ndarray) -> bool:
    """Whether one of several heads leads; among equal ones, or with one unknown, none does."""
    return len(signal) > 1 and bool(np.isfinite(signal).all()) and int((signal == signal.max()).sum()) == 1


_POSITION = Figure(
    "share of all that taking position costs, head by head, that the first leader has, ",
    lambda cell: float((work := _work(cell))[0, int(_signal(cell)[0].argmax())] / work.sum()),
    lambda cell: has("seed")(cell) and has("position")(cell) and _works(cell) and _led(_signal(cell)[0]),
    "no position or no leader, or not measured",
    0.02,
)


def _work(cell: CellResult) -> np.ndarray:
    """[L, H] what is lost by taking position from each head."""
    return counted_drops(cell.measure("position"))


def _works(cell: CellResult) -> bool:
    """Whether these add up to a tenth of the skill."""
    skill = cell.measure("position").baseline - cell.length_chance
    return bool(_work(cell).sum() >= 0.1 * skill)


def _standing(signal: np.ndarray, costs: np.ndarray) -> float:
    """The share of the other heads that cost less than the one that led at first, ties counting half."""
    others = np.delete(costs, signal.argmax())
    leader = costs[signal.argmax()]
    return float((others < leader).mean() + (others == leader).mean() / 2)


# ---- representations -------------------------------------------------------------------------------------------------


def _deep(cell: CellResult) -> bool:
    """Whether there is a stream after layer 2."""
    found = cell.measure("representation")
    return found is not None and len(found.alignment) > 2


def _stream(words: str, of: Callable[[Any], float]) -> Figure:
    return Figure(
        words, lambda cell: float(of(cell.measure("representation"))), _deep, "no stream after layer 2", 0.005
    )


_ALIGNMENT = _stream(
    "after layer 2: alignment with the input's positions - chance, ",
    lambda found: found.alignment[2] - found.chance,
)
_COEFFICIENT = _stream(
    "after layer 2: coefficient on the input's position vectors, ",
    lambda found: found.coefficient[2],
)
_DECODABLE = _stream(
    "R2 of reading the position off the stream after layer 2 and later, mean, ",
    lambda found: np.mean(found.decodability[2:]),
)


_CARRIED = _stream(
    "coefficient on the input's position vectors after layer 2 and later, the least, ",
    lambda found: np.min(found.coefficient[2:]),
)


def _implicit(results: Results) -> list[Finding]:
    if is_released(results):
        return [unknown("NoPE", "can tell no order in the released program", "nothing there: the paper's protocol")]
    return compare(DISTANCE, [("rope", "nope")], _DECODABLE, under(-0.1))(results)


def _through_mask(results: Results) -> list[Finding]:
    """The switch is set as in the other protocol, so that the mask is causal on one side of it or on the other."""
    pair = ("nope/mask", "nope") if is_released(results) else ("nope", "nope/mask")
    return compare(DISTANCE, [pair], Figure("skill of ", lambda cell: cell.skill), over(0.1))(results)


def _displaced(results: Results) -> list[Finding]:
    both = both_positions(results)
    return [
        *models(both, (_ALIGNMENT, under(0.1)), (_COEFFICIENT, under(0.1)))(results),
        *as_support(compare(DISTANCE, [(both, "absolute")], _ALIGNMENT, under(0.0)))(results),
    ]


CLAIMS: tuple[Claim[Results], ...] = (
    mechanism(
        "rope-gradient-seed",
        f"{FINAL}: Proposition 6.1",
        "RoPE gives the positional gradient a deterministic part that batches do not cancel, so that some head always "
        "gets a positive positional signal.",
        "At initialisation, in RoPE's first layer: the share of the positional gradient's energy that is the same in "
        "every example, at the logits (all heads) and at the parameters (mean over heads), over 1/512 "
        f"({_WHY_FIXED}). Supporting: the heads' mean positional drift above 0.",
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
        f"is the same in every example under 1/512 ({_WHY_FIXED}). At the parameters there is nothing to ask: in "
        "ALiBi's first layer they cannot move position at all.",
        models("alibi", (_share("logits"), under(_FIXED))),
    ),
    mechanism(
        "margin-grows",
        f"{FINAL}: Theorem 6.1",
        "Back through the layers the lead of the best head is amplified exponentially: every gamma_l > 1.",
        "RoPE: the best head's gradient signal over the second best's is larger in each layer than in the one after "
        "it, in doublings above 0, at initialisation and after training.",
        on_rope(_amplified),
    ),
    mechanism(
        "early-leader-deposits",
        f"{FINAL}: Theorem 6.1",
        "The head with the early advantage ends up with all the positional work.",
        "RoPE: the head of the first layer whose signal leads at initialisation has over nine tenths of what is lost "
        "when position is taken from one head of the model at a time, added up. Supporting: of the layer's other heads "
        "over three quarters cost less in the end, silenced (by chance: half); rank correlation of first signal and "
        f"final cost above 0. {ONLY_SKILLED} So do only those in whose first layer one head leads, and whose heads "
        "lose a tenth of the skill together; for the supporting parts, those in which some head of the first layer "
        "costs anything.",
        every(
            on_rope(lambda rope: models(rope, (_POSITION, over(0.9)))),
            as_support(
                on_rope(
                    lambda rope: models(
                        rope,
                        (_early(_standing, "heads that the first leader surpasses, "), over(0.75)),
                        (
                            _early(lambda first, last: float(spearman(np.stack((first, last)))), "rank correlation, "),
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
        "In the stream after layer 2: the share of the position part's variance that lies in the input vectors' "
        "subspace, less the share expected by chance, below 0.1; and the coefficient of the position part on the "
        "input vectors (1: carried on, 0: gone) below 0.1, as they are to be displaced completely. Supporting: the "
        "share below that of the sinusoid alone.",
        _displaced,
    ),
    mechanism(
        "rope-suppresses-implicit-position",
        f"{FINAL}: key findings",
        "RoPE suppresses the formation of implicit positional representations.",
        "How well the position can be read off the stream after layer 2 and later (R2 of a ridge regression): RoPE "
        "less NoPE below -0.1, a tenth of what there is to read; NoPE has no representation but an implicit one. In "
        "the released program it has not even that: attention sees both ways there, NoPE can tell no order, and what "
        "is read is the texts' lengths.",
        _implicit,
    ),
    mechanism(
        "additive-coupling-persists",
        f"{V1}, 3.1",
        "The residual connections carry the absolute encoding's positions to deeper levels, so that their coupling "
        "with content persists there.",
        "Absolute: the coefficient of the position part on the input vectors (1: carried on, 0: gone) over a half in "
        "each of the streams after layer 2 and later, the least of them: what has lost more than it has kept does not "
        "persist. Of the coupling this is what the residual connections are said to do.",
        models("absolute", (_CARRIED, over(0.5))),
    ),
    Claim[Results](
        "nope-position-through-mask",
        f"{V1}, C.2",
        "NoPE obtains position through the causal mask.",
        "Skill on Task 1: of NoPE with the causal mask less that without, all else equal, over a tenth, less than "
        "which would not be what it knows order by. Models that are still learning count on both sides: one that "
        "cannot learn it never stops guessing.",
        _through_mask,
        part="factors",
    ),
)
