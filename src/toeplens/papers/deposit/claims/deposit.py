"""Claims about heads: is the work deposited in one head, where, when, and under which encodings?

Each is judged as the papers looked, by accuracy at the end of training, those that ask how the work is spread by loss,
and beside that at every other moment of `LOOKS` that was watched, by accuracy and by loss.
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
from toeplens.studies.kit.verdicts import ENOUGH, Finding, Verdict, above, agreed, supporting, unknown
from toeplens.training.presets import COUNT, DISTANCE

_SEVERAL = 4  # heads
_NON_ROPE = ("nope", "alibi", "relative", "absolute")


def _shallow(look: Look) -> tuple[float, float]:
    """The largest cost of a head in the first third of the layers, and after it."""
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
    """RoPE's costliest head costs more than another encoding's; of those that learn enough."""

    def check(results: Results) -> list[Finding]:
        pairs = against(full_rope(results), *_NON_ROPE)
        top = at.spread("share of all costs that the costliest head has, ", lambda look: look.top)
        asked = every(
            *(learned(pair[1], compare(DISTANCE, [pair], at.largest(), at.over(at.bars.little))) for pair in pairs),
            *(as_support(learned(pair[1], compare(DISTANCE, [pair], top, over(0.1)))) for pair in pairs),
        )
        return asked(results)

    return check


def _of_several(at: At, words: str, of: Callable[[Look], float]) -> Figure:
    """Of layers in which two heads may cost much and two others little."""
    figure = at.figure(words, of)

    def counts(cell: CellResult) -> bool:
        return figure.counts(cell) and cell.ablation is not None and cell.ablation.drops.shape[1] >= _SEVERAL

    return replace(figure, counts=counts, without=f"{figure.without}, or fewer than {_SEVERAL} heads")


def _not_on_counting(at: At) -> Check:
    def task_apart(results: Results) -> list[Finding]:
        figure = at.largest()
        on_distance, on_counting = (figure.by_seed(results.of(task, "rope")) for task in (DISTANCE, COUNT))
        seen = contrast((1, on_distance), (-1, on_counting), grain=figure.grain)
        return [above("largest cost of a head of RoPE, Task 1 - Task 2", seen, at.bars.little, unit=at.bars.unit)]

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
            *(agreed(first, second, "of every model") for first, second in zip(*two, strict=True)),
            *as_support(compare(DISTANCE, pair, at.largest(), at.under(0.0)))(results),
        ]

    return check


def _dropped(at: At) -> Check:
    def check(results: Results) -> list[Finding]:
        with_it, without = (results.of(DISTANCE, label) for label in ("rope/dropout", "rope"))
        if {cell.run for cell in with_it} & {cell.run for cell in without}:
            return [unknown("RoPE with dropout", "at this scale every model has dropout", "RoPE without dropout")]
        return [
            *models("rope/dropout", (at.largest(), at.over(at.bars.some)))(results),
            *compare(DISTANCE, [("rope/dropout", "rope")], at.largest(), at.over(-at.bars.little))(results),
        ]

    return check


_MAYBE = 0.25  # of the models


def _few_heads_suffice(results: Results) -> list[Finding]:
    # the partial-RoPE program has no sinusoid, so it is compared with RoPE alone
    rope = full_rope(results)
    return [
        *compare(DISTANCE, [(label, rope) for label in ("partial-1", "partial-2")], test=over(-0.05))(results),
        *as_support(compare(DISTANCE, [("nope", rope)], test=under(-0.05)))(results),
    ]


def _partial_below(results: Results) -> list[Finding]:
    pairs = against(full_rope(results), "partial-1", "partial-2", "partial-3")
    return compare(DISTANCE, pairs, test=between(0.02, 0.1))(results)


def _spared(at: At, look: Look) -> float:
    """1 where a later head costs much and none of the first layer does, else 0."""
    first, later = look.largest(slice(0, 1)), look.largest(slice(1, None))
    return float(first < at.bars.some <= later)


def _in_second_or_third(look: Look) -> float:
    """1 where a head there costs more than any of the first layer, and as much as any at all, else 0."""
    there = look.largest(slice(1, 3))
    return float(look.largest(slice(0, 1)) < there == look.largest())


def _some(what: str, models: Sequence[Mapping[int, float]]) -> Finding:
    """Is it so of any model? What is said of "some cases" is refuted by none of many alone."""
    told = [value for values in models for value in values.values()]
    if not told:
        return unknown(what, "no finished run that counts")
    count, enough = int(sum(told)), min(map(len, models)) >= ENOUGH
    verdict: Verdict = ("holds" if count else "fails") if enough else "leans to hold" if count else "leans to fail"
    return Finding(verdict, f"{what}: {count} of {len(told)} models", wanting="" if enough else f"{ENOUGH} seeds")


def _partial_moves(at: At) -> Check:
    """Over the models of each number of rotating heads, and those of RoPE on all."""
    first = at.figure("", lambda look: look.largest(slice(0, 1)))
    layer = at.spread("", lambda look: look.layer)
    later = at.spread("", _in_second_or_third)
    spared = at.figure("", partial(_spared, at))

    def check(results: Results) -> list[Finding]:
        labels = [label for label in results.labels(DISTANCE) if (at_ := Label.parse(label)).heads and not at_.variant]
        some = [results.of(DISTANCE, label) for label in labels]
        if not some:
            return [unknown("RoPE on some heads", "no finished run that counts")]
        whole = results.of(DISTANCE, rope := full_rope(results))
        weight = 1 / len(some)
        share = contrast(*((weight, later.by_seed(cells)) for cells in some), grain=chance(_MAYBE))
        moved = contrast(*((weight, layer.by_seed(cells)) for cells in some), (-1, layer.by_seed(whole)), grain=0.05)
        left = contrast(*((-weight, first.by_seed(cells)) for cells in some), (1, first.by_seed(whole)))
        without = [left_out(results, figure, DISTANCE, *labels) for figure in (later, spared)]
        beside = [left_out(results, figure, DISTANCE, *labels, rope) for figure in (layer, first)]
        on_some, difference = "RoPE on some heads", "mean of RoPE on some heads - RoPE on all"
        support = [
            _some(
                f"no deposit in the first layer but a later one, {on_some}{without[1]}", list(map(spared.by_seed, some))
            ),
            above(f"layer of the costliest head, {difference}{beside[0]}", moved, 0.5),
            above(
                f"largest cost in the first layer, RoPE on all - mean of RoPE on some heads{beside[1]}",
                left,
                at.bars.little,
            ),
        ]
        what = f"share of models whose costliest head lies in the second or third layer, {on_some}{without[0]}"
        return [above(what, share, _MAYBE), *map(supporting, support)]

    return check


CLAIMS: tuple[Claim[Results], ...] = (
    watched_claim(
        core,
        "deposit-first-layer",
        f"{FINAL}: key design 2",
        "Removing one first-layer head of RoPE costs about 60 points on Task 1; other heads have negligible effect.",
        "RoPE (without a sinusoid): the largest cost of a first-layer head over half of the skill, and the second "
        "largest of any head under a tenth: the source calls the others' effect negligible.",
        of_rope(
            lambda at: (at.largest(slice(0, 1), "the first layer"), at.over(at.bars.most)),
            lambda at: (
                at.figure("second largest cost of any head, ", lambda look: look.second()),
                at.under(at.bars.little),
            ),
        ),
    ),
    watched_claim(
        core,
        "deposit-shallow",
        f"{V1}, 5.1",
        "Under RoPE ablating a single shallow head causes a pronounced loss on Task 1: early layers specialise.",
        "RoPE (without a sinusoid): the largest cost of a head in the first third of the layers over a quarter of the "
        "skill, and larger than that of any head after them.",
        of_rope(
            lambda at: (
                at.figure("largest cost in the first third, ", lambda look: _shallow(look)[0]),
                at.over(at.bars.some),
            ),
            lambda at: (
                at.figure("the same less the largest after it, ", lambda look: (s := _shallow(look))[0] - s[1]),
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
        "The largest cost of a head under a quarter of the skill, for each. Supporting, that RoPE (without a sinusoid) "
        "is another case: its largest over a quarter.",
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
        "The largest cost of a head of RoPE on Task 2 under a quarter of the skill (released: of the program's RoPE, "
        "which has a sinusoid). Supporting, that it is the task: the same model's on Task 1 larger by a tenth.",
        _not_on_counting,
    ),
    watched_claim(
        core,
        "mla-removes-deposit",
        f"{V1}, 5.2",
        "Under MLA no single head is indispensable for Task 1.",
        "The largest cost of a head of MLA under a quarter of the skill. Supporting, that there was something to "
        "remove: RoPE's (without a sinusoid) larger by a tenth.",
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
        "RoPE + sinusoid: the largest cost of a first-layer head under a tenth of the skill, and of a later one over a "
        "quarter. Supporting, that there was one to leave it: RoPE's (without a sinusoid) in the first layer over a "
        "quarter.",
        _displaced,
    ),
    watched_claim(
        core,
        "deposit-more-under-rope",
        f"{V1}, 3.3",
        "The deposit is more prominent under RoPE than under encodings with less structure.",
        "The largest cost of a head, RoPE (without a sinusoid) less NoPE, ALiBi, relative and absolute: over a tenth "
        "of the skill, each. Supporting: its share of the costs of all heads together is larger, too, by a tenth of "
        "them, for the same reason. "
        f"{WHERE}",
        _more_under_rope,
    ),
    watched_claim(
        core,
        "absolute-uneven",
        f"{V1}, C.2",
        "Absolute encoding has some significant and some insignificant heads in the shallow layer.",
        "In its first layer the second largest cost over a quarter of the skill and the second smallest under a tenth, "
        "for the source speaks of heads; asked of layers of four or more.",
        of_each(
            ("absolute",),
            lambda at: (
                _of_several(at, "second largest cost in the first layer, ", lambda look: look.second(slice(0, 1))),
                at.over(at.bars.some),
            ),
            lambda at: (
                _of_several(at, "second smallest, ", lambda look: look.second_smallest(slice(0, 1))),
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
        "For each, more than four effective heads of the whole model: a quarter of one of the papers' layers. "
        "Supporting: the largest cost of a head under 0.35 nats; and, that it is more than elsewhere, more effective "
        f"heads than RoPE (without a sinusoid) has by more than half a doubling. {SPREAD}",
        _scattered,
        BY_LOSS,
    ),
    watched_claim(
        core,
        "nope-relative-alibi-alike",
        f"{V1}, C.2",
        "NoPE, relative and ALiBi are similar in how they spread position over their heads.",
        "Effective heads of the whole model differ, pair by pair, by less than half a doubling. Supporting: the "
        f"largest costs of a head by less than 0.1 nats. {SPREAD}",
        _alike,
        BY_LOSS,
    ),
    watched_claim(
        core,
        "mla-average-deposit",
        f"{V1}, 1 and 5.2",
        "MLA has a more distributed, average deposit.",
        "MLA less RoPE (without a sinusoid): effective heads of the whole model by more than half a doubling. More "
        "models of MLA than of RoPE have heads that cost next to nothing together, so that it has to come out alike "
        "when every model counts in which a head costs anything. "
        f"Supporting: the largest cost of a head below 0. {SPREAD}",
        _average,
        BY_LOSS,
    ),
    watched_claim(
        others,
        "nonrope-diffuse-task2",
        f"{V1}, 1",
        "NoPE, ALiBi, relative and absolute encodings are diffuse or negligible in their heads on Task 2 too.",
        "The largest cost of a head under a quarter of the skill, for each.",
        of_each(_NON_ROPE, _needed_by_none, task=COUNT),
    ),
    watched_claim(
        others,
        "dropout-keeps-deposit",
        f"{V1}, Remark C.1",
        "The deposit is not removed by ordinary dropout.",
        "RoPE trained with dropout 0.1: the largest cost of a head over a quarter of the skill, and not lower than "
        "that without dropout by a tenth.",
        _dropped,
    ),
    core(
        "one-or-two-heads-suffice",
        f"{FINAL}: table of RoPE heads",
        "RoPE on one or two heads does about as well on Task 1 as RoPE on all.",
        "Accuracy of RoPE on 1 head, and on 2 heads, less full RoPE: above -0.05, twice what the source's numbers "
        "differ by. Supporting, that rotating heads are needed at all: NoPE less full RoPE below -0.05. "
        f"{STOPPED}",
        _few_heads_suffice,
    ),
    partially(
        "partial-below-full",
        f"{V1}, 5.1, Fig. 5",
        "With only a handful of rotating heads, Task 1 stays a little below what full RoPE reaches.",
        "Accuracy of full RoPE less RoPE on 1, 2 and 3 heads: over 0.02, or it is not below, and under 0.1, or it is "
        f"not a little; each. {STOPPED}",
        _partial_below,
    ),
    partially(
        "partial-hurts-count",
        f"{V1}, 5.1, Fig. 5",
        "Partial RoPE harms generalisation on Task 2.",
        "Accuracy of NoPE less RoPE on 1 and on 2 heads on Task 2: over 0.02, each, less than which would be no harm. "
        f"{STOPPED}",
        compare(COUNT, against("nope", "partial-1", "partial-2")),
    ),
    watched_claim(
        partially,
        "partial-moves-deposit",
        f"{V1}, C.3",
        "Under partial RoPE the largest deposit is not necessarily in the first layer but may be in the second or "
        "third, and in some cases the first has none.",
        "Over all numbers of rotating heads that were trained: the costliest head lies in the second or third layer in "
        "over a quarter of the models, fewer of which would be exceptions to “may be” (the spread of a share is taken "
        "to be no less than chance gives at this bar; RoPE on all heads may pass it as well, which is what the "
        "comparison is for). Supporting: in some model a later head costs a quarter of the skill and none of "
        "the first layer does; and, that this is an effect of partial RoPE, the costliest head lies deeper than in "
        "RoPE on all heads by half a layer in the mean, and the first layer's largest cost is lower by a tenth. "
        f"{WHERE}",
        _partial_moves,
    ),
)
