"""Claims about RoPE on some of the heads: what is learned with few, and where the work goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from toeplens.papers.deposit.claims.common import (
    FINAL,
    STOPPED,
    V1,
    Check,
    against,
    between,
    compare,
    core,
    full_rope,
    left_out,
    over,
    partially,
    under,
)
from toeplens.papers.deposit.claims.looking import WHERE, At, watched_claim
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.looks import Look
from toeplens.studies.kit.asking import chance
from toeplens.studies.kit.claims import Claim, as_support
from toeplens.studies.kit.contrasts import contrast
from toeplens.studies.kit.results import Results
from toeplens.studies.kit.verdicts import ENOUGH, Finding, Verdict, above, supporting, unknown
from toeplens.training.presets import COUNT, DISTANCE

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
