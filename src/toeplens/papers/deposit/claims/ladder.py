"""Claims of the scale sweep: our own hypotheses about when a deposit occurs, from pilots with other seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from toeplens.papers.deposit.claims.common import (
    AS_THE_PAPERS,
    BY_LOSS,
    FINAL,
    HALF_A_DOUBLING,
    SPREAD,
    At,
    Check,
    Way,
    compare,
    full_rope,
    left_out,
    on_rope,
    over,
    watched_claim,
)
from toeplens.papers.deposit.labels import title
from toeplens.papers.deposit.looks import Measure, in_order
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.contrasts import contrast, of_one
from toeplens.studies.kit.results import Results
from toeplens.studies.kit.verdicts import Finding, above
from toeplens.training.presets import DISTANCE

_OURS = "ours, from pilots (seeds 3, 7, 42)"
_TOKENS = ("tokens-24", "tokens-32", "", "tokens-48", "tokens-64", "tokens-96")
_claim = partial(Claim[Results], part="ladder")


def _at_rung(base: str, rung: str) -> str:
    return f"{base}/{rung}" if rung else base


def _rungs(first: str, second: str, *, spread: bool = False) -> Way:
    """RoPE's largest ablation effect (with ``spread``: its effective heads) on one scale variant minus on another.

    An empty variant is the scale itself.
    """

    def way(at: At) -> Check:
        figure, test = (at.doublings(), over(HALF_A_DOUBLING)) if spread else (at.largest(), at.over(at.bars.little))
        return on_rope(lambda rope: compare(DISTANCE, [(_at_rung(rope, first), _at_rung(rope, second))], figure, test))

    return way


def _of_encoding(at: At) -> Check:
    """RoPE minus absolute, and minus NoPE, averaged over all lengths."""

    def check(results: Results) -> list[Finding]:
        rope, figure = full_rope(results), at.largest()
        findings = []
        for rival in ("absolute", "nope") if rope == "rope" else ("rope",):
            pairs: Sequence[tuple[str, str]] = [(_at_rung(rope, rung), _at_rung(rival, rung)) for rung in _TOKENS]
            terms = [
                (weight / len(pairs), figure.by_seed(results.of(DISTANCE, label)))
                for pair in pairs
                for weight, label in zip((1.0, -1.0), pair, strict=True)
            ]
            away = left_out(results, figure, DISTANCE, *(label for pair in pairs for label in pair))
            what = f"{figure.words}{title(rope)} − {title(rival)}, mean over lengths{away}"
            findings.append(above(what, contrast(*terms, grain=figure.grain), at.bars.little, unit=at.bars.unit))
        return findings

    return check


def _unfinished(measure: Measure) -> Check:
    """The first checkpoint with over 90 % accuracy minus the one at eight plateaus, in models that have both.

    Models that reached 90 % only after their plateau are excluded.
    """
    looks = At("able", measure), At("eight times", measure)
    early, late = (at.largest() for at in looks)
    learning = "90% accuracy only after the plateau, too little skill, or not measured"
    both = replace(
        early, counts=lambda cell: early.counts(cell) and late.counts(cell) and in_order(cell, "able"), without=learning
    )

    def check(results: Results) -> list[Finding]:
        label = _at_rung(full_rope(results), "longer")
        cells = [cell for cell in results.of(DISTANCE, label) if both.counts(cell)]
        lost = early.by_seed(cells) - late.by_seed(cells)
        away = left_out(results, both, DISTANCE, label)
        what = f"largest ablation effect of a head, at 90% accuracy − at 8 times the plateau{away}"
        return [looks[0].over(looks[0].bars.little)(what, of_one(lost, early.grain))]

    return check


def _ours(name: str, statement: str, rule: str, way: Way, first: At = AS_THE_PAPERS) -> Claim[Results]:
    return watched_claim(_claim, name, _OURS, statement, rule, way, first)


CLAIMS: tuple[Claim[Results], ...] = (
    _ours(
        "ladder-length",
        "A deposit depends on the task's difficulty: on longer sequences one head has a larger ablation effect.",
        "RoPE: the largest ablation effect of a head with 96 tokens minus that with 24 is above 0.1 of the skill.",
        _rungs("tokens-96", "tokens-24"),
    ),
    _claim(
        "ladder-unfinished",
        f"{_OURS}; against {FINAL}: contribution 3 (no artifact of training)",
        "A deposit depends on unfinished learning: with longer training single heads matter less.",
        "RoPE: the largest ablation effect of a head, as a share of the skill, at the first checkpoint with over 90% "
        "accuracy minus that at 8 times the plateau's steps is above 0.1. Only models count that have both "
        "checkpoints, the first before their plateau, and skill in both.",
        _unfinished("accuracy"),
        elsewhere={"by loss": _unfinished("loss")},
    ),
    _ours(
        "ladder-encoding",
        "A deposit depends on the encoding: at every length one head has a larger ablation effect under RoPE.",
        "The largest ablation effect of a head, mean over lengths from 24 to 96 tokens: RoPE exceeds absolute and NoPE "
        "(in the released protocol: RoPE with its sinusoid) by more than 0.1 of the skill.",
        _of_encoding,
    ),
    _ours(
        "ladder-heads",
        "With fewer heads per layer one head has a larger ablation effect.",
        "RoPE: the largest ablation effect of a head with 4 heads minus that with 16 is above 0.1 of the skill.",
        _rungs("heads-4", ""),
    ),
    _ours(
        "ladder-layers",
        "With fewer layers one head has a larger ablation effect.",
        "RoPE: the largest ablation effect of a head with 2 layers minus that with 6 is above 0.1 of the skill.",
        _rungs("layers-2", ""),
    ),
    _ours(
        "ladder-rate",
        "The papers' low learning rate makes deposits larger.",
        "RoPE: the largest ablation effect of a head at the papers' 1e-4 with their betas minus that at 1e-3 is above "
        "0.1 of the skill.",
        _rungs("rate-paper", ""),
    ),
    _ours(
        "ladder-dropout-spreads",
        "Dropout distributes the skill over more heads.",
        "RoPE: with dropout 0.1 the whole model has more effective heads than without, by more than half a doubling. "
        f"{SPREAD}",
        _rungs("drop", "", spread=True),
        BY_LOSS,
    ),
    _ours(
        "ladder-decay-gathers",
        "Weight decay concentrates the skill in fewer heads.",
        "RoPE: with almost no weight decay (1e-5) the whole model has more effective heads than with 0.1, by more than "
        f"half a doubling. {SPREAD}",
        _rungs("", "decay", spread=True),
        BY_LOSS,
    ),
)
