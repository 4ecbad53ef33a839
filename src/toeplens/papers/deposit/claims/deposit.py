"""Claims about heads: is the skill in one head, in which layer, when, and under which encodings?

Each is judged by accuracy at the end of training, as in the papers; claims about the distribution over heads are judged
by loss. For comparison, each is also judged at every other checkpoint and measure of `LOOKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from toeplens.papers.deposit.claims.common import (
    BY_LOSS,
    FINAL,
    HALF_A_DOUBLING,
    SPREAD,
    STOPPED,
    V1,
    WHERE,
    At,
    Check,
    against,
    between,
    both_positions,
    compare,
    core,
    full_rope,
    learned,
    left_out,
    models,
    of_each,
    of_rope,
    on_rope,
    others,
    over,
    partially,
    under,
    watched_claim,
)
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.looks import Look
from toeplens.studies.kit.asking import chance
from toeplens.studies.kit.claims import Claim, as_support, every
from toeplens.studies.kit.contrasts import contrast
from toeplens.studies.kit.results import CellResult, Figure, Results
from toeplens.studies.kit.verdicts import ENOUGH, NONE_COUNTS, Finding, Verdict, above, agreed, supporting, unknown
from toeplens.training.presets import COUNT, DISTANCE

_SEVERAL = 4  # heads
_NON_ROPE = ("nope", "alibi", "relative", "absolute")


def _shallow(look: Look) -> tuple[float, float]:
    """The largest ablation effect of a head in the first third of the layers, and after it."""
    end = -(-len(look.costs) // 3)
    return look.largest(slice(0, end)), look.largest(slice(end, None))


def _needed_by_none(at: At) -> tuple[Figure, Callable[..., Finding]]:
    return at.largest(), at.under(at.bars.some)


def _displaced(at: At) -> Check:
    first, later = at.largest(slice(0, 1), "the first layer"), at.largest(slice(1, None), "a later layer")
    parts = (first, at.under(at.bars.little)), (later, at.over(at.bars.some))
    before = as_support(on_rope(lambda rope: models(rope, (first, at.over(at.bars.some)))))
    return every(lambda results: models(both_positions(results), *parts)(results), before)


def _more_under_rope(at: At) -> Check:
    """RoPE's largest ablation effect is larger than that of each encoding with enough skill."""

    def check(results: Results) -> list[Finding]:
        pairs = against(full_rope(results), *_NON_ROPE)
        top = at.spread("largest effect as a share of the sum over all heads, ", lambda look: look.top)
        asked = every(
            *(learned(pair[1], compare(DISTANCE, [pair], at.largest(), at.over(at.bars.little))) for pair in pairs),
            *(as_support(learned(pair[1], compare(DISTANCE, [pair], top, over(0.1)))) for pair in pairs),
        )
        return asked(results)

    return check


def _of_several(at: At, words: str, of: Callable[[Look], float]) -> Figure:
    """A figure for layers with at least four heads: two with a large and two with a small effect."""
    figure = at.figure(words, of)

    def counts(cell: CellResult) -> bool:
        return figure.counts(cell) and cell.ablation is not None and cell.ablation.drops.shape[1] >= _SEVERAL

    return replace(figure, counts=counts, without=f"{figure.without}, or fewer than {_SEVERAL} heads")


def _not_on_counting(at: At) -> Check:
    def task_apart(results: Results) -> list[Finding]:
        figure = at.largest()
        on_distance, on_counting = (figure.by_seed(results.of(task, "rope")) for task in (DISTANCE, COUNT))
        seen = contrast((1, on_distance), (-1, on_counting), grain=figure.grain)
        what = "largest ablation effect of a head of RoPE, Task 1 − Task 2"
        return [above(what, seen, at.bars.little, unit=at.bars.unit)]

    return every(models("rope", _needed_by_none(at), task=COUNT), as_support(task_apart))


def _alike(at: At) -> Check:
    pairs = (("nope", "relative"), ("nope", "alibi"), ("relative", "alibi"))
    bar = at.bars.little
    return every(
        compare(DISTANCE, pairs, at.doublings(), between(-HALF_A_DOUBLING, HALF_A_DOUBLING)),
        as_support(compare(DISTANCE, pairs, at.largest(), between(-bar, bar, at.bars.unit))),
    )


def _scattered(at: At) -> Check:
    spread = "relative", "alibi"
    heads = at.spread("effective heads, ", lambda look: look.effective_heads)
    return every(
        of_each(spread, lambda at: (heads, over(4.0)), task=DISTANCE)(at),
        as_support(of_each(spread, _needed_by_none, task=DISTANCE)(at)),
        as_support(
            on_rope(
                lambda rope: compare(DISTANCE, [(each, rope) for each in spread], at.doublings(), over(HALF_A_DOUBLING))
            )
        ),
    )


def _average(at: At) -> Check:
    def check(results: Results) -> list[Finding]:
        pair = [("mla", full_rope(results))]
        two = (
            compare(DISTANCE, pair, at.doublings(every=every), over(HALF_A_DOUBLING))(results)
            for every in (False, True)
        )
        return [
            *(agreed(first, second, "for all models") for first, second in zip(*two, strict=True)),
            *as_support(compare(DISTANCE, pair, at.largest(), at.under(0.0)))(results),
        ]

    return check


def _dropped(at: At) -> Check:
    def check(results: Results) -> list[Finding]:
        with_it, without = (results.of(DISTANCE, label) for label in ("rope/dropout", "rope"))
        if {cell.run for cell in with_it} & {cell.run for cell in without}:
            return [unknown("RoPE with dropout", "every model of this scale has dropout", "RoPE without dropout")]
        return [
            *models("rope/dropout", (at.largest(), at.over(at.bars.some)))(results),
            *compare(DISTANCE, [("rope/dropout", "rope")], at.largest(), at.over(-at.bars.little))(results),
        ]

    return check


_MAYBE = 0.25  # of the models


def _few_heads_suffice(results: Results) -> list[Finding]:
    # the released code for partial RoPE has no sinusoid, so it is compared with RoPE without one
    rope = full_rope(results)
    return [
        *compare(DISTANCE, [(label, rope) for label in ("partial-1", "partial-2")], test=over(-0.05))(results),
        *as_support(compare(DISTANCE, [("nope", rope)], test=under(-0.05)))(results),
    ]


def _partial_below(results: Results) -> list[Finding]:
    pairs = against(full_rope(results), "partial-1", "partial-2", "partial-3")
    return compare(DISTANCE, pairs, test=between(0.02, 0.1))(results)


def _spared(at: At, look: Look) -> float:
    """1 if a later head has a pronounced effect and no head of the first layer has, otherwise 0."""
    first, later = look.largest(slice(0, 1)), look.largest(slice(1, None))
    return float(first < at.bars.some <= later)


def _in_second_or_third(look: Look) -> float:
    """1 if the largest effect lies in layer 2 or 3 and exceeds every effect of layer 1, otherwise 0."""
    there = look.largest(slice(1, 3))
    return float(look.largest(slice(0, 1)) < there == look.largest())


def _some(what: str, models: Sequence[Mapping[int, float]]) -> Finding:
    """Is it true of any model? "In some cases" fails only if none of enough models shows it."""
    told = [value for values in models for value in values.values()]
    if not told:
        return unknown(what, NONE_COUNTS)
    count, enough = int(sum(told)), min(map(len, models)) >= ENOUGH
    verdict: Verdict = ("holds" if count else "fails") if enough else "leans to hold" if count else "leans to fail"
    return Finding(verdict, f"{what}: {count} of {len(told)} models", wanting="" if enough else f"{ENOUGH} seeds")


def _partial_moves(at: At) -> Check:
    """Over the models of each number of rotated heads, compared with RoPE on all heads."""
    first = at.figure("", lambda look: look.largest(slice(0, 1)))
    layer = at.spread("", lambda look: look.layer)
    later = at.spread("", _in_second_or_third)
    spared = at.figure("", partial(_spared, at))

    def check(results: Results) -> list[Finding]:
        labels = [label for label in results.labels(DISTANCE) if (at_ := Label.parse(label)).heads and not at_.variant]
        some = [results.of(DISTANCE, label) for label in labels]
        if not some:
            return [unknown("RoPE on some heads", NONE_COUNTS)]
        whole = results.of(DISTANCE, rope := full_rope(results))
        weight = 1 / len(some)
        share = contrast(*((weight, later.by_seed(cells)) for cells in some), grain=chance(_MAYBE))
        moved = contrast(*((weight, layer.by_seed(cells)) for cells in some), (-1, layer.by_seed(whole)), grain=0.05)
        left = contrast(*((-weight, first.by_seed(cells)) for cells in some), (1, first.by_seed(whole)))
        without = [left_out(results, figure, DISTANCE, *labels) for figure in (later, spared)]
        beside = [left_out(results, figure, DISTANCE, *labels, rope) for figure in (layer, first)]
        on_some, difference = "RoPE on some heads", "mean of RoPE on some heads − RoPE on all"
        support = [
            _some(
                f"a deposit in a later layer but not in the first, {on_some}{without[1]}",
                list(map(spared.by_seed, some)),
            ),
            above(f"layer of the most important head, {difference}{beside[0]}", moved, 0.5),
            above(
                f"largest ablation effect in the first layer, RoPE on all − mean of RoPE on some heads{beside[1]}",
                left,
                at.bars.little,
            ),
        ]
        what = f"share of models with the most important head in the second or third layer, {on_some}{without[0]}"
        return [above(what, share, _MAYBE), *map(supporting, support)]

    return check


CLAIMS: tuple[Claim[Results], ...] = (
    watched_claim(
        core,
        "deposit-first-layer",
        f"{FINAL}: key design 2",
        "Removing one first-layer head of RoPE loses about 60 percentage points on Task 1; other heads have a "
        "negligible effect.",
        "RoPE (without a sinusoid): the largest ablation effect of a first-layer head is above 0.5 of the skill, and "
        "the second largest of any head is below 0.1.",
        of_rope(
            lambda at: (at.largest(slice(0, 1), "the first layer"), at.over(at.bars.most)),
            lambda at: (
                at.figure("second largest ablation effect of any head, ", lambda look: look.second()),
                at.under(at.bars.little),
            ),
        ),
    ),
    watched_claim(
        core,
        "deposit-shallow",
        f"{V1}, 5.1",
        "Under RoPE ablating a single shallow head causes a pronounced loss on Task 1: early layers specialise.",
        "RoPE (without a sinusoid): the largest ablation effect of a head in the first third of the layers is above "
        "0.25 of the skill, and larger than that of any later head.",
        of_rope(
            lambda at: (
                at.figure("largest ablation effect in the first third of the layers, ", lambda look: _shallow(look)[0]),
                at.over(at.bars.some),
            ),
            lambda at: (
                at.figure("that effect − the largest after it, ", lambda look: (s := _shallow(look))[0] - s[1]),
                at.over(0.0),
            ),
        ),
    ),
    watched_claim(
        core,
        "deposit-only-rope",
        f"{V1}, 5.1 and 1",
        "No pronounced deposit appears on Task 1 under NoPE, ALiBi, relative or absolute encodings: their heads are "
        "diffuse or negligible.",
        "For each, the largest ablation effect of a head is below 0.25 of the skill. Supporting (RoPE differs): the "
        "largest effect of RoPE (without a sinusoid) is above 0.25.",
        lambda at: every(
            of_each(_NON_ROPE, _needed_by_none, task=DISTANCE)(at),
            as_support(on_rope(lambda rope: models(rope, (at.largest(), at.over(at.bars.some))))),
        ),
    ),
    watched_claim(
        core,
        "deposit-not-task2",
        f"{V1}, 5.1",
        "RoPE shows no deposit on Task 2.",
        "RoPE on Task 2: the largest ablation effect of a head is below 0.25 of the skill (in the released protocol "
        "RoPE has a sinusoid). Supporting (the task matters): on Task 1 it is larger by more than 0.1.",
        _not_on_counting,
    ),
    watched_claim(
        core,
        "mla-removes-deposit",
        f"{V1}, 5.2",
        "Under MLA no single head is indispensable for Task 1.",
        "MLA: the largest ablation effect of a head is below 0.25 of the skill. Supporting (RoPE has a deposit that "
        "MLA can remove): RoPE's effect (without a sinusoid) is larger by more than 0.1.",
        lambda at: every(
            of_each(("mla",), _needed_by_none, task=DISTANCE)(at),
            as_support(on_rope(lambda rope: compare(DISTANCE, [(rope, "mla")], at.largest(), at.over(at.bars.little)))),
        ),
    ),
    watched_claim(
        core,
        "rope-absolute-moves-deposit",
        f"{V1}, 5.2, Fig. 6",
        "With a sinusoid at the input RoPE's deposit leaves the first layer and reappears from the second on.",
        "RoPE + sinusoid: the largest ablation effect of a first-layer head is below 0.1 of the skill, and that of a "
        "later head is above 0.25. Supporting (RoPE has a first-layer deposit): the largest effect in the first layer "
        "of RoPE without a sinusoid is above 0.25.",
        _displaced,
    ),
    watched_claim(
        core,
        "deposit-more-under-rope",
        f"{V1}, 3.3",
        "The deposit is more prominent under RoPE than under encodings with less structure.",
        "The largest ablation effect of a head of RoPE (without a sinusoid) exceeds that of each of NoPE, ALiBi, "
        "relative and absolute by more than 0.1 of the skill. Supporting: its share of the sum over all heads is also "
        f"larger by more than 0.1. {WHERE}",
        _more_under_rope,
    ),
    watched_claim(
        core,
        "absolute-uneven",
        f"{V1}, C.2",
        "Absolute encoding has some significant and some insignificant heads in the shallow layer.",
        "In its first layer the second largest ablation effect is above 0.25 of the skill, and the second smallest "
        "below 0.1, as the source says “heads”. Only layers with at least four heads count.",
        of_each(
            ("absolute",),
            lambda at: (
                _of_several(
                    at, "second largest ablation effect in the first layer, ", lambda look: look.second(slice(0, 1))
                ),
                at.over(at.bars.some),
            ),
            lambda at: (
                _of_several(
                    at,
                    "second smallest ablation effect in the first layer, ",
                    lambda look: look.second_smallest(slice(0, 1)),
                ),
                at.under(at.bars.little),
            ),
            task=DISTANCE,
        ),
    ),
    watched_claim(
        core,
        "relative-alibi-scattered",
        f"{V1}, C.2",
        "Under relative encoding and ALiBi position is scattered over the heads.",
        "For each, the whole model has more than four effective heads: a quarter of one of the papers' layers. "
        "Supporting: the largest ablation effect of a head is below 0.35 nats; the model has more effective heads than "
        f"RoPE (without a sinusoid) by more than half a doubling. {SPREAD}",
        _scattered,
        BY_LOSS,
    ),
    watched_claim(
        core,
        "nope-relative-alibi-alike",
        f"{V1}, C.2",
        "NoPE, relative and ALiBi are similar in how they spread position over their heads.",
        "For each pair, the effective heads of the whole model differ by less than half a doubling. Supporting: the "
        f"largest ablation effects of a head differ by less than 0.1 nats. {SPREAD}",
        _alike,
        BY_LOSS,
    ),
    watched_claim(
        core,
        "mla-average-deposit",
        f"{V1}, 1 and 5.2",
        "MLA has a more distributed, average deposit.",
        "MLA's whole model has more effective heads than RoPE's (without a sinusoid) by more than half a doubling. In "
        "more models of MLA than of RoPE the total effect is too small to count, so the result must be the same for "
        "all models with any effect. Supporting: the largest ablation effect of a head is smaller than RoPE's. "
        f"{SPREAD}",
        _average,
        BY_LOSS,
    ),
    watched_claim(
        others,
        "nonrope-diffuse-task2",
        f"{V1}, 1",
        "NoPE, ALiBi, relative and absolute encodings are diffuse or negligible in their heads on Task 2 too.",
        "For each, the largest ablation effect of a head is below 0.25 of the skill.",
        of_each(_NON_ROPE, _needed_by_none, task=COUNT),
    ),
    watched_claim(
        others,
        "dropout-keeps-deposit",
        f"{V1}, Remark C.1",
        "The deposit is not removed by ordinary dropout.",
        "RoPE trained with dropout 0.1: the largest ablation effect of a head is above 0.25 of the skill, and at most "
        "0.1 lower than without dropout.",
        _dropped,
    ),
    core(
        "one-or-two-heads-suffice",
        f"{FINAL}: table of RoPE heads",
        "RoPE on one or two heads does about as well on Task 1 as RoPE on all.",
        "Accuracy of RoPE on 1 head, and on 2 heads, minus full RoPE: above −0.05, twice the difference in the source. "
        f"Supporting (rotated heads are needed): NoPE − full RoPE is below −0.05. {STOPPED}",
        _few_heads_suffice,
    ),
    partially(
        "partial-below-full",
        f"{V1}, 5.1, Fig. 5",
        "With only a handful of rotating heads, Task 1 stays a little below what full RoPE reaches.",
        "Accuracy of full RoPE minus each of RoPE on 1, 2 and 3 heads: above 0.02 (otherwise it is not below) and "
        f"below 0.1 (otherwise it is not a little). {STOPPED}",
        _partial_below,
    ),
    partially(
        "partial-hurts-count",
        f"{V1}, 5.1, Fig. 5",
        "Partial RoPE harms generalisation on Task 2.",
        f"Accuracy of NoPE minus each of RoPE on 1 and on 2 heads on Task 2: above 0.02. {STOPPED}",
        compare(COUNT, against("nope", "partial-1", "partial-2")),
    ),
    watched_claim(
        partially,
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
        _partial_moves,
    ),
)
