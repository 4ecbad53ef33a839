"""Claims about heads: is the skill in one head, in which layer, when, and under which encodings?

Each is judged by accuracy at the end of training, as in the papers; claims about the distribution over heads are judged
by loss. For comparison, each is also judged at every other checkpoint and measure of `LOOKS`. `SWEEP` are the claims of
the scale sweep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from toeplens.papers.deposit.claims.common import (
    BOTH,
    BY_ACCURACY,
    BY_LOSS,
    DOUBLINGS,
    FINAL,
    FIRST,
    FIRST_LAYER,
    FULL,
    HALF_A_DOUBLING,
    LARGEST,
    LATER,
    LATER_LAYERS,
    LITTLE,
    MOST,
    SOME,
    SPREAD,
    UNITS,
    V1,
    WHERE,
    At,
    Effect,
    Test,
    core,
    count,
    label_of,
    of_heads,
    partially,
    threshold,
)
from toeplens.papers.deposit.labels import Label, title
from toeplens.papers.deposit.looks import Look, Measure, in_order
from toeplens.studies.kit.claims import MARGIN, STOPPED, Claim, deviation, left_out
from toeplens.studies.kit.results import ACCURACY, Results
from toeplens.studies.kit.verdicts import (
    ENOUGH,
    NONE_COUNTS,
    Finding,
    Verdict,
    above,
    agreed,
    contrast,
    of_one,
    supporting,
    unknown,
)
from toeplens.training.presets import COUNT, DISTANCE

_NON_ROPE = ("nope", "alibi", "relative", "absolute")
_SPREAD = ("relative", "alibi")
_PAIRS = (("nope", "relative"), ("nope", "alibi"), ("relative", "alibi"))
_SOME_HEADS = ("partial-1", "partial-2", "partial-3")
_MAYBE = 0.25  # of the models


def _shallow(look: Look) -> float:
    """The largest ablation effect of a head in the first third of the layers."""
    return look.largest(slice(0, -(-len(look.costs) // 3)))


def _shallow_lead(look: Look) -> float:
    return _shallow(look) - look.largest(slice(-(-len(look.costs) // 3), None))


_TOP = Effect("largest effect as a share of the sum over all heads, ", lambda look: look.top, least=LITTLE)
_HEADS = Effect("effective heads, ", lambda look: look.effective_heads, least=LITTLE)
_SECOND = Effect("second largest ablation effect of any head, ", lambda look: look.second())
_SHALLOW = Effect("largest ablation effect in the first third of the layers, ", _shallow)
_SHALLOW_LEAD = Effect("that effect − the largest after it, ", _shallow_lead)
# two heads with a large and two with a small effect need four heads
_SECOND_FIRST = Effect(
    "second largest ablation effect in the first layer, ", lambda look: look.second(FIRST_LAYER), heads=4
)
_SMALL_FIRST = Effect(
    "second smallest ablation effect in the first layer, ", lambda look: look.second_smallest(FIRST_LAYER), heads=4
)


def _in_second_or_third(look: Look) -> float:
    """1 if the largest effect lies in layer 2 or 3 and exceeds every effect of layer 1, otherwise 0."""
    return float(look.largest(FIRST_LAYER) < look.largest(slice(1, 3)) == look.largest())


def _task_apart(results: Results, at: At) -> list[Finding]:
    """Is RoPE's largest effect larger on Task 1 than on Task 2?"""
    figure = LARGEST.at(at)
    on_distance, on_counting = (figure.by_seed(results.of(task, "rope")) for task in (DISTANCE, COUNT))
    seen = contrast((1, on_distance), (-1, on_counting), grain=figure.grain)
    what = "largest ablation effect of a head of RoPE, Task 1 − Task 2"
    return [supporting(above(what, seen, LITTLE, unit=UNITS[at[1]]))]


def _average(results: Results, at: At) -> list[Finding]:
    """The models whose effects are large enough and all models with any effect have to agree."""
    figures = DOUBLINGS, replace(DOUBLINGS, least=0.0)
    first, second = (Test(figure, "mla", FULL, above=HALF_A_DOUBLING, at=at)(results)[0] for figure in figures)
    return [agreed(first, second, "for all models")]


def _dropped(results: Results, at: At) -> list[Finding]:
    with_it, without = (results.of(DISTANCE, label) for label in ("rope/dropout", "rope"))
    if {cell.run for cell in with_it} & {cell.run for cell in without}:
        return [unknown("RoPE with dropout", "every model of this scale has dropout", "RoPE without dropout")]
    alone, compared = (
        Test(LARGEST, "rope/dropout", above=SOME, at=at),
        Test(LARGEST, "rope/dropout", "rope", above=-LITTLE, at=at),
    )
    return [*alone(results), *compared(results)]


def _some(what: str, models: Sequence[Mapping[int, float]]) -> Finding:
    """Is it true of any model? "In some cases" fails only if none of enough models shows it."""
    told = [value for values in models for value in values.values()]
    if not told:
        return unknown(what, NONE_COUNTS)
    count, enough = int(sum(told)), min(map(len, models)) >= ENOUGH
    verdict: Verdict = ("holds" if count else "fails") if enough else "leans to hold" if count else "leans to fail"
    return Finding(verdict, f"{what}: {count} of {len(told)} models", wanting="" if enough else f"{ENOUGH} seeds")


def _partial_moves(results: Results, at: At) -> list[Finding]:
    """Over the models of each number of rotated heads, compared with RoPE on all heads."""

    def spared(look: Look) -> float:
        """1 if a later head has a pronounced effect and no head of the first layer has, otherwise 0."""
        return float(look.largest(FIRST_LAYER) < threshold(SOME, at) <= look.largest(LATER_LAYERS))

    effects = (
        FIRST,
        Effect("", spared),
        Effect("", lambda look: look.layer, LITTLE),
        Effect("", _in_second_or_third, LITTLE),
    )
    first, spare, layer, later = (effect.at(at) for effect in effects)
    labels = [label for label in results.labels(DISTANCE) if (at_ := Label.parse(label)).heads and not at_.variant]
    some = [results.of(DISTANCE, label) for label in labels]
    if not some:
        return [unknown("RoPE on some heads", NONE_COUNTS)]
    whole = results.of(DISTANCE, rope := label_of(results, FULL))
    weight = 1 / len(some)
    share = contrast(*((weight, later.by_seed(cells)) for cells in some), grain=deviation(_MAYBE))
    moved = contrast(*((weight, layer.by_seed(cells)) for cells in some), (-1, layer.by_seed(whole)), grain=0.05)
    left = contrast(*((-weight, first.by_seed(cells)) for cells in some), (1, first.by_seed(whole)))
    without = [left_out(results, figure, DISTANCE, *labels) for figure in (later, spare)]
    beside = [left_out(results, figure, DISTANCE, *labels, rope) for figure in (layer, first)]
    on_some, difference = "RoPE on some heads", "mean of RoPE on some heads − RoPE on all"
    away = f"a deposit in a later layer but not in the first, {on_some}{without[1]}"
    reduced = f"largest ablation effect in the first layer, RoPE on all − mean of RoPE on some heads{beside[1]}"
    support = [
        _some(away, list(map(spare.by_seed, some))),
        above(f"layer of the most important head, {difference}{beside[0]}", moved, 0.5),
        above(reduced, left, LITTLE),
    ]
    what = f"share of models with the most important head in the second or third layer, {on_some}{without[0]}"
    return [above(what, share, _MAYBE), *map(supporting, support)]


CLAIMS: tuple[Claim[Results], ...] = (
    of_heads(
        "deposit-first-layer",
        f"{FINAL}: key design 2",
        "Removing one first-layer head of RoPE loses about 60 percentage points on Task 1; other heads have a "
        "negligible effect.",
        "RoPE (without a sinusoid): the largest ablation effect of a first-layer head is above 0.5 of the skill, and "
        "the second largest of any head is below 0.1.",
        [Test(FIRST, FULL, above=MOST), Test(_SECOND, FULL, below=LITTLE)],
    ),
    of_heads(
        "deposit-shallow",
        f"{V1}, 5.1",
        "Under RoPE ablating a single shallow head causes a pronounced loss on Task 1: early layers specialise.",
        "RoPE (without a sinusoid): the largest ablation effect of a head in the first third of the layers is above "
        "0.25 of the skill, and larger than that of any later head.",
        [Test(_SHALLOW, FULL, above=SOME), Test(_SHALLOW_LEAD, FULL, above=0.0)],
    ),
    of_heads(
        "deposit-only-rope",
        f"{V1}, 5.1 and 1",
        "No pronounced deposit appears on Task 1 under NoPE, ALiBi, relative or absolute encodings: their heads are "
        "diffuse or negligible.",
        "For each, the largest ablation effect of a head is below 0.25 of the skill. Supporting (RoPE differs): the "
        "largest effect of RoPE (without a sinusoid) is above 0.25.",
        [Test(LARGEST, _NON_ROPE, below=SOME, learned=True), supporting(Test(LARGEST, FULL, above=SOME))],
    ),
    of_heads(
        "deposit-not-task2",
        f"{V1}, 5.1",
        "RoPE shows no deposit on Task 2.",
        "RoPE on Task 2: the largest ablation effect of a head is below 0.25 of the skill (in the released protocol "
        "RoPE has a sinusoid). Supporting (the task matters): on Task 1 it is larger by more than 0.1.",
        [count(LARGEST, "rope", below=SOME), _task_apart],
    ),
    of_heads(
        "mla-removes-deposit",
        f"{V1}, 5.2",
        "Under MLA no single head is indispensable for Task 1.",
        "MLA: the largest ablation effect of a head is below 0.25 of the skill. Supporting (RoPE has a deposit that "
        "MLA can remove): RoPE's effect (without a sinusoid) is larger by more than 0.1.",
        [Test(LARGEST, "mla", below=SOME, learned=True), supporting(Test(LARGEST, FULL, "mla", above=LITTLE))],
    ),
    of_heads(
        "rope-absolute-moves-deposit",
        f"{V1}, 5.2, Fig. 6",
        "With a sinusoid at the input RoPE's deposit leaves the first layer and reappears from the second on.",
        "RoPE + sinusoid: the largest ablation effect of a first-layer head is below 0.1 of the skill, and that of a "
        "later head is above 0.25. Supporting (RoPE has a first-layer deposit): the largest effect in the first layer "
        "of RoPE without a sinusoid is above 0.25.",
        [
            Test(FIRST, BOTH, below=LITTLE),
            Test(LATER, BOTH, above=SOME),
            supporting(Test(FIRST, FULL, above=SOME)),
        ],
    ),
    of_heads(
        "deposit-more-under-rope",
        f"{V1}, 3.3",
        "The deposit is more prominent under RoPE than under encodings with less structure.",
        "The largest ablation effect of a head of RoPE (without a sinusoid) exceeds that of each of NoPE, ALiBi, "
        "relative and absolute by more than 0.1 of the skill. Supporting: its share of the sum over all heads is also "
        f"larger by more than 0.1. {WHERE}",
        [
            Test(LARGEST, FULL, _NON_ROPE, above=LITTLE, learned=True),
            supporting(Test(_TOP, FULL, _NON_ROPE, above=0.1, learned=True)),
        ],
    ),
    of_heads(
        "absolute-uneven",
        f"{V1}, C.2",
        "Absolute encoding has some significant and some insignificant heads in the shallow layer.",
        "In its first layer the second largest ablation effect is above 0.25 of the skill, and the second smallest "
        "below 0.1, as the source says “heads”. Only layers with at least four heads count.",
        [
            Test(_SECOND_FIRST, "absolute", above=SOME, learned=True),
            Test(_SMALL_FIRST, "absolute", below=LITTLE, learned=True),
        ],
    ),
    of_heads(
        "relative-alibi-scattered",
        f"{V1}, C.2",
        "Under relative encoding and ALiBi position is scattered over the heads.",
        "For each, the whole model has more than four effective heads: a quarter of one of the papers' layers. "
        "Supporting: the largest ablation effect of a head is below 0.35 nats; the model has more effective heads than "
        f"RoPE (without a sinusoid) by more than half a doubling. {SPREAD}",
        [
            Test(_HEADS, _SPREAD, above=4.0, learned=True),
            supporting(Test(LARGEST, _SPREAD, below=SOME, learned=True)),
            supporting(Test(DOUBLINGS, _SPREAD, FULL, above=HALF_A_DOUBLING)),
        ],
        BY_LOSS,
    ),
    of_heads(
        "nope-relative-alibi-alike",
        f"{V1}, C.2",
        "NoPE, relative and ALiBi are similar in how they spread position over their heads.",
        "For each pair, the effective heads of the whole model differ by less than half a doubling. Supporting: the "
        f"largest ablation effects of a head differ by less than 0.1 nats. {SPREAD}",
        [
            *(Test(DOUBLINGS, *pair, above=-HALF_A_DOUBLING, below=HALF_A_DOUBLING) for pair in _PAIRS),
            *(supporting(Test(LARGEST, *pair, above=-LITTLE, below=LITTLE)) for pair in _PAIRS),
        ],
        BY_LOSS,
    ),
    of_heads(
        "mla-average-deposit",
        f"{V1}, 1 and 5.2",
        "MLA has a more distributed, average deposit.",
        "MLA's whole model has more effective heads than RoPE's (without a sinusoid) by more than half a doubling. In "
        "more models of MLA than of RoPE the total effect is too small to count, so the result must be the same for "
        "all models with any effect. Supporting: the largest ablation effect of a head is smaller than RoPE's. "
        f"{SPREAD}",
        [_average, supporting(Test(LARGEST, "mla", FULL, below=0.0))],
        BY_LOSS,
    ),
    of_heads(
        "nonrope-diffuse-task2",
        f"{V1}, 1",
        "NoPE, ALiBi, relative and absolute encodings are diffuse or negligible in their heads on Task 2 too.",
        "For each, the largest ablation effect of a head is below 0.25 of the skill.",
        [count(LARGEST, _NON_ROPE, below=SOME, learned=True)],
        part="others",
    ),
    of_heads(
        "dropout-keeps-deposit",
        f"{V1}, Remark C.1",
        "The deposit is not removed by ordinary dropout.",
        "RoPE trained with dropout 0.1: the largest ablation effect of a head is above 0.25 of the skill, and at most "
        "0.1 lower than without dropout.",
        [_dropped],
        part="others",
    ),
    core(
        "one-or-two-heads-suffice",
        f"{FINAL}: table of RoPE heads",
        "RoPE on one or two heads does about as well on Task 1 as RoPE on all.",
        "Accuracy of RoPE on 1 head, and on 2 heads, minus full RoPE: above −0.05, twice the difference in the source. "
        f"Supporting (rotated heads are needed): NoPE − full RoPE is below −0.05. {STOPPED}",
        [
            Test(ACCURACY, _SOME_HEADS[:2], FULL, above=-0.05),
            supporting(Test(ACCURACY, "nope", FULL, below=-0.05)),
        ],
    ),
    partially(
        "partial-below-full",
        f"{V1}, 5.1, Fig. 5",
        "With only a handful of rotating heads, Task 1 stays a little below what full RoPE reaches.",
        "Accuracy of full RoPE minus each of RoPE on 1, 2 and 3 heads: above 0.02 (otherwise it is not below) and "
        f"below 0.1 (otherwise it is not a little). {STOPPED}",
        [Test(ACCURACY, FULL, _SOME_HEADS, above=0.02, below=0.1)],
    ),
    partially(
        "partial-hurts-count",
        f"{V1}, 5.1, Fig. 5",
        "Partial RoPE harms generalisation on Task 2.",
        f"Accuracy of NoPE minus each of RoPE on 1 and on 2 heads on Task 2: above 0.02. {STOPPED}",
        [count(ACCURACY, "nope", _SOME_HEADS[:2], above=MARGIN)],
    ),
    of_heads(
        "partial-moves-deposit",
        f"{V1}, C.3",
        "Under partial RoPE the largest deposit is not necessarily in the first layer but may be in the second or "
        "third, and in some cases the first has none.",
        "Over all trained numbers of rotated heads, the most important head lies in the second or third layer in more "
        "than a quarter of the models (the spread of this share is at least that of chance at this threshold). "
        "Supporting: in some model a later head has an ablation effect of 0.25 or more of the skill and no first-layer "
        "head has; and, as RoPE on all heads may pass too, compared with it the most important head lies more than "
        "half a layer deeper on average and the first layer's largest effect is lower by more than 0.1. "
        f"{WHERE}",
        [_partial_moves],
        part="partial",
    ),
)


# ---- the scale sweep -------------------------------------------------------------------------------------------------

_OURS = "ours, from pilots (seeds 3, 7, 42)"
_TOKENS = ("/tokens-24", "/tokens-32", "", "/tokens-48", "/tokens-64", "/tokens-96")


def _of_encoding(results: Results, at: At) -> list[Finding]:
    """RoPE minus absolute, and minus NoPE, averaged over all lengths."""
    rope, figure = label_of(results, FULL), LARGEST.at(at)
    findings = []
    for rival in ("absolute", "nope") if rope == "rope" else ("rope",):
        signed = [(sign, base + tokens) for tokens in _TOKENS for sign, base in ((1.0, rope), (-1.0, rival))]
        terms = [(sign / len(_TOKENS), figure.by_seed(results.of(DISTANCE, label))) for sign, label in signed]
        away = left_out(results, figure, DISTANCE, *(label for _, label in signed))
        what = f"{figure.words}{title(rope)} − {title(rival)}, mean over lengths{away}"
        findings.append(above(what, contrast(*terms, grain=figure.grain), LITTLE, unit=UNITS[at[1]]))
    return findings


def _unfinished(results: Results, measure: Measure) -> list[Finding]:
    """The first checkpoint with over 90 % accuracy minus the one at eight plateaus, in models that have both.

    Models that reached 90 % only after their plateau are excluded.
    """
    early, late = (LARGEST.at((moment, measure)) for moment in ("able", "eight times"))
    learning = "90% accuracy only after the plateau, too little skill, or not measured"
    both = replace(
        early, counts=lambda cell: early.counts(cell) and late.counts(cell) and in_order(cell, "able"), without=learning
    )
    label = label_of(results, f"{FULL}/longer")
    cells = [cell for cell in results.of(DISTANCE, label) if both.counts(cell)]
    lost = early.by_seed(cells) - late.by_seed(cells)
    away = left_out(results, both, DISTANCE, label)
    what = f"largest ablation effect of a head, at 90% accuracy − at 8 times the plateau{away}"
    return [above(what, of_one(lost, early.grain), LITTLE, unit=UNITS[measure])]


def _ours(id: str, statement: str, rule: str, check: Sequence[Any], at: At = BY_ACCURACY) -> Claim[Results]:
    return of_heads(id, _OURS, statement, rule, check, at, part="ladder")


# our own hypotheses about when a deposit occurs, from pilots with other seeds
SWEEP: tuple[Claim[Results], ...] = (
    _ours(
        "ladder-length",
        "A deposit depends on the task's difficulty: on longer sequences one head has a larger ablation effect.",
        "RoPE: the largest ablation effect of a head with 96 tokens minus that with 24 is above 0.1 of the skill.",
        [Test(LARGEST, f"{FULL}/tokens-96", f"{FULL}/tokens-24", above=LITTLE)],
    ),
    Claim(
        "ladder-unfinished",
        f"{_OURS}; against {FINAL}: contribution 3 (no artifact of training)",
        "A deposit depends on unfinished learning: with longer training single heads matter less.",
        "RoPE: the largest ablation effect of a head, as a share of the skill, at the first checkpoint with over 90% "
        "accuracy minus that at 8 times the plateau's steps is above 0.1. Only models count that have both "
        "checkpoints, the first before their plateau, and skill in both.",
        partial(_unfinished, measure="accuracy"),
        "ladder",
        {"by loss": partial(_unfinished, measure="loss")},
    ),
    _ours(
        "ladder-encoding",
        "A deposit depends on the encoding: at every length one head has a larger ablation effect under RoPE.",
        "The largest ablation effect of a head, mean over lengths from 24 to 96 tokens: RoPE exceeds absolute and NoPE "
        "(in the released protocol: RoPE with its sinusoid) by more than 0.1 of the skill.",
        [_of_encoding],
    ),
    _ours(
        "ladder-heads",
        "With fewer heads per layer one head has a larger ablation effect.",
        "RoPE: the largest ablation effect of a head with 4 heads minus that with 16 is above 0.1 of the skill.",
        [Test(LARGEST, f"{FULL}/heads-4", FULL, above=LITTLE)],
    ),
    _ours(
        "ladder-layers",
        "With fewer layers one head has a larger ablation effect.",
        "RoPE: the largest ablation effect of a head with 2 layers minus that with 6 is above 0.1 of the skill.",
        [Test(LARGEST, f"{FULL}/layers-2", FULL, above=LITTLE)],
    ),
    _ours(
        "ladder-rate",
        "The papers' low learning rate makes deposits larger.",
        "RoPE: the largest ablation effect of a head at the papers' 1e-4 with their betas minus that at 1e-3 is above "
        "0.1 of the skill.",
        [Test(LARGEST, f"{FULL}/rate-paper", FULL, above=LITTLE)],
    ),
    _ours(
        "ladder-dropout-spreads",
        "Dropout distributes the skill over more heads.",
        "RoPE: with dropout 0.1 the whole model has more effective heads than without, by more than half a doubling. "
        f"{SPREAD}",
        [Test(DOUBLINGS, f"{FULL}/drop", FULL, above=HALF_A_DOUBLING)],
        BY_LOSS,
    ),
    _ours(
        "ladder-decay-gathers",
        "Weight decay concentrates the skill in fewer heads.",
        "RoPE: with almost no weight decay (1e-5) the whole model has more effective heads than with 0.1, by more than "
        f"half a doubling. {SPREAD}",
        [Test(DOUBLINGS, FULL, f"{FULL}/decay", above=HALF_A_DOUBLING)],
        BY_LOSS,
    ),
)
