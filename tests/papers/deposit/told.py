"""The world as the papers tell it, and what to change in it so that each claim holds, fails, or stays undecided."""

from __future__ import annotations

from dataclasses import replace

from tests.papers.deposit.insides import NAN
from tests.papers.deposit.worlds import Model, World, count, distance

from toeplens.studies import Verdict

ROPE = Model(0.93, gap=0.02, half=1.0, falls=0.0).single(0).within(width=-4.0)
MLA = Model(0.88).within(kept=0.8, width=-2.0)
ALIBI = Model(0.3, half=4.0).within(logits=1e-4, parameters=NAN, drift=0.0, width=2.0)
WITH_SINUSOID = Model(0.8).single(1).within(width=-3.0)
ABSOLUTE = Model(0.6).within(alignment=0.7, coefficient=1.0, deepest=0.8)
NOPE = Model(0.12, half=None).within(readable=0.8, width=1.0)
RELATIVE = Model(0.12, half=None).within(width=3.0)

TOLD: World = {
    **distance(
        rope=ROPE,
        absolute=ABSOLUTE,
        relative=RELATIVE,
        alibi=ALIBI,
        nope=NOPE,
        random=Model(0.3, gap=0.4, half=3.0).within(width=0.5),
        mla=MLA,
        rope_absolute=WITH_SINUSOID,
        rope__dropout=Model(0.9).single(0),
        nope__mask=Model(0.1, half=None),
        partial_1=Model(0.89).single(1),
        partial_2=Model(0.89).single(2),
        partial_3=Model(0.89).single(1),
    ),
    **count(
        mla=0.97,
        nope=0.78,
        rope=0.69,
        absolute=0.72,
        relative=Model(0.77).within(bias=0.25),
        alibi=0.4,
        random=Model(0.6, gap=0.4),
        partial_1=0.6,
        partial_2=0.65,
    ),
}
# encodings without a deposit that have learned Task 1
SKILLED = {
    name: replace(TOLD["trigger-distance", name], accuracy=0.6).within(needed=8)
    for name in ("nope", "alibi", "relative", "absolute")
}
DIFFUSE = distance(**SKILLED)


def rope(accuracy: float = 0.93, **inside: object) -> World:
    """RoPE as told, but for this inside."""
    return distance(rope=replace(ROPE, accuracy=accuracy).within(**inside))


def peaks(*drops: float) -> World:
    """Skilled encodings from the narrowest spectrum to the widest, by what one head of each costs."""
    names = ("rope", "rope_absolute", "mla", "absolute", "nope", "alibi", "relative")
    widths = (-4.0, -3.0, -2.0, 0.0, 1.0, 2.0, 3.0)
    return distance(
        **{
            name: Model(0.8).first_layer(drop, 0.0, 0.0, 0.0).within(width=width)
            for name, width, drop in zip(names, widths, drops, strict=True)
        }
    )


# what to change in it so that a claim holds, where something has to be
HOLDS: dict[str, World] = {
    "task2-rope-superior": count(rope=0.8),
    "task1-rope-smallest-gap": DIFFUSE,
    "deposit-shallow": distance(rope=Model(0.93).single(1)),
    "deposit-only-rope": DIFFUSE,
    "deposit-more-under-rope": DIFFUSE,
    "absolute-uneven": distance(absolute=Model(0.6).first_layer(0.3, 0.2, 0.01, 0.0)),
    "relative-alibi-scattered": DIFFUSE,
    "nope-relative-alibi-alike": DIFFUSE,
    "nope-position-through-mask": distance(nope=0.6, nope__mask=0.2),
    "rope-needs-fewer-heads": DIFFUSE,
    "rope-loses-length": rope(kept=0.3),
    "contraction-brings-deposit": peaks(0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05),
}
# so that it stays undecided, where it does not as it is
OPEN: dict[str, World] = {
    "task1-rope-best": distance(rope=0.62),
    "task1-rope-fastest": distance(absolute=Model(0.6, half=2**0.25)),
    "task1-rope-stable": distance(rope=replace(ROPE, falls=0.03)),
    "task1-absolute-second": distance(absolute=0.91),
    "task1-nope-relative-fail": distance(nope=0.25 * 0.9 + 0.1),
    "task1-alibi-nope-fail": distance(alibi=0.25 * 0.9 + 0.1),
    "task1-alibi-poor": distance(alibi=0.1 + 0.83 / 2),
    "table1-task1-order": distance(mla=0.91),
    "table1-task2-order": count(rope=0.76),
    "table1-levels": count(mla=0.88646),
    "task2-rope-superior": count(rope=0.74),
    "task1-convergence-order": distance(absolute=Model(0.6, half=2**0.25)),
    "task1-rope-smallest-gap": distance(rope=Model(0.9, gap=0.05)),
    "mla-near-best": distance(mla=0.83),
    "mla-small-cost": distance(mla=0.83),
    "task1-random-overfits": distance(random=Model(0.58, gap=0.1)),
    "task2-positions-cost": count(nope=0.636 + 0.02),
    "task2-absolute-mild": count(absolute=0.68),
    "task2-absolute-moderate": count(absolute=0.95),
    "task2-relative-like-nope": count(relative=0.73),
    "task2-relative-bias-attenuates": count(relative=Model(0.77).within(bias=0.5)),
    "task2-random-perfect-fit": count(random=Model(0.6, gap=0.38)),
    "task2-random-largest-gap": count(rope=Model(0.5, gap=0.38)),
    "task2-alibi-worst": count(alibi=0.58),
    "deposit-first-layer": distance(rope=Model(0.93).first_layer(0.83 / 2, 0, 0, 0)),
    "deposit-shallow": distance(rope=Model(0.93).single(1, 2)),
    "deposit-not-task2": count(rope=Model(0.9).first_layer(0.2, 0, 0, 0)),
    "mla-removes-deposit": distance(mla=0.2),
    "rope-absolute-moves-deposit": distance(rope_absolute=Model(0.8).single(2).first_layer(0.07, 0, 0, 0)),
    "one-or-two-heads-suffice": distance(partial_1=0.88),
    "absolute-uneven": distance(absolute=Model(0.2).first_layer(0.3, 0.2, 0.01, 0.0)),
    "mla-average-deposit": distance(mla=0.2),
    "nonrope-diffuse-task2": count(alibi=0.2),
    "dropout-keeps-deposit": distance(rope__dropout=Model(0.2).single(0)),
    "partial-below-full": distance(partial_3=0.91),
    "partial-hurts-count": count(partial_1=0.76),
    "partial-moves-deposit": distance(partial_1=0.2),
    "rope-gradient-seed": rope(parameters=1 / 512),
    "alibi-seed-cancels": distance(alibi=ALIBI.within(logits=1 / 512)),
    "margin-grows": rope(last=(2.0,) * 4),
    "early-leader-deposits": rope(0.2),
    "additive-directions-displaced": distance(rope_absolute=WITH_SINUSOID.within(alignment=0.2)),
    "rope-suppresses-implicit-position": rope(readable=0.7),
    "additive-coupling-persists": distance(absolute=ABSOLUTE.within(deepest=0.5)),
    "nope-position-through-mask": distance(nope=0.3, nope__mask=0.21),
    "one-head-knows-position": rope(0.2),
    "two-heads-do-it": rope(0.2),
    "significant-angle-massive": rope(norm=0.5),
    "few-bands-trained": rope(bands=(2, 4)),
    "mla-keeps-length": distance(mla=MLA.within(kept=0.55)),
    "contraction-speeds-learning": distance(rope=ROPE.within(width=1.5), mla=MLA.within(width=2.5)),
}


def _alone(**drops: tuple[float, ...]) -> World:
    """RoPE with these drops in its first layer, and none that count elsewhere."""
    return distance(**{label: Model(0.93).first_layer(*each) for label, each in drops.items()})


def _even(label: str, heads: int, drop: float = 0.02) -> World:
    """So many heads that cost the same each, and others that cost nothing."""
    costs = [drop] * heads + [0.0] * (16 - heads)
    return distance(**{label: replace(SKILLED[label], drops=tuple(tuple(costs[i : i + 4]) for i in range(0, 16, 4)))})


ONE_LITTLE = ((0.1, 0.0, 0.0, 0.0),) + ((0.0,) * 4,) * 3  # one head that costs little
_ROUGH = {name: Model(0.5, falls=0.1) for name in ("relative", "alibi", "nope", "random")}
# so that an essential part fails, and the claim with it
FAILS: dict[str, World] = {
    "task1-rope-best": distance(absolute=0.99),
    "task1-rope-fastest": distance(absolute=Model(0.5, half=0.5)),
    "task1-rope-stable": distance(rope=replace(ROPE, falls=0.03), absolute=Model(0.5, falls=0.03), **_ROUGH),
    "task1-absolute-second": distance(rope=0.5),
    "task1-nope-relative-fail": distance(nope=0.9),
    "task1-alibi-nope-fail": distance(alibi=0.9),
    "task1-alibi-poor": distance(alibi=0.7),
    "table1-task1-order": distance(mla=0.95),
    "table1-task2-order": count(mla=0.75),
    "table1-levels": distance(mla=0.5),
    "task2-rope-superior": {},
    "task1-convergence-order": distance(absolute=Model(0.6, half=0.5)),
    "task1-rope-smallest-gap": distance(rope=Model(0.6, gap=0.3)),
    "mla-near-best": distance(absolute=0.997),
    "mla-small-cost": distance(mla=0.7),
    "task1-random-overfits": distance(random=Model(0.3, gap=0.0)),
    "task2-positions-cost": count(nope=0.5),
    "task2-absolute-mild": count(absolute=0.9),
    "task2-absolute-moderate": count(mla=0.6),
    "task2-relative-like-nope": count(relative=0.9),
    "task2-relative-bias-attenuates": count(relative=0.77),
    "task2-random-perfect-fit": count(random=Model(0.6, gap=0.1)),
    "task2-random-largest-gap": count(rope=Model(0.4, gap=0.6)),
    "task2-alibi-worst": count(nope=0.3),
    "deposit-first-layer": _alone(rope=(0.35, 0.02, 0.02, 0.02)),
    "deposit-shallow": _alone(rope=(0.1, 0.02, 0.02, 0.02)),
    "deposit-only-rope": distance(nope=Model(0.6).single(1)),
    "deposit-not-task2": count(rope=Model(0.69).single(3)),
    "mla-removes-deposit": distance(mla=Model(0.88).single(3)),
    "rope-absolute-moves-deposit": distance(rope_absolute=Model(0.8).single(0, 2)),
    "one-or-two-heads-suffice": distance(partial_1=0.5),
    "deposit-more-under-rope": distance(nope=Model(0.6).single(1)),
    "absolute-uneven": distance(absolute=Model(0.6).first_layer(0.3, 0.06, 0.01, 0.01)),
    "relative-alibi-scattered": distance(relative=Model(0.6, drops=ONE_LITTLE)),
    "nope-relative-alibi-alike": _even("nope", 16) | _even("relative", 10) | _even("alibi", 13),
    "mla-average-deposit": distance(mla=Model(0.88, drops=((0.3, 0.0, 0.0, 0.0),) + ((0.0,) * 4,) * 3)),
    "nonrope-diffuse-task2": count(nope=Model(0.6).single(2)),
    "dropout-keeps-deposit": _alone(rope=(0.1, 0, 0, 0), rope__dropout=(0.1, 0, 0, 0)),
    "partial-below-full": distance(partial_1=0.5),
    "partial-hurts-count": count(partial_1=0.9),
    "partial-moves-deposit": distance(**{f"partial_{heads}": Model(0.89).single(0) for heads in (1, 2, 3)}),
    "rope-gradient-seed": rope(logits=1e-4),
    "alibi-seed-cancels": distance(alibi=ALIBI.within(logits=0.1)),
    "margin-grows": rope(first=(2.5, 3.0, 2.0, 1.5)),
    "early-leader-deposits": rope(positions=(0.5, 0.2)),
    "additive-directions-displaced": distance(rope_absolute=WITH_SINUSOID.within(alignment=0.5)),
    "rope-suppresses-implicit-position": rope(readable=0.75),
    "additive-coupling-persists": distance(absolute=ABSOLUTE.within(deepest=0.2)),
    "nope-position-through-mask": {},
    "one-head-knows-position": rope(positions=(0.1, 0.02)),
    "rope-needs-fewer-heads": distance(nope=Model(0.6).within(needed=3)),
    "two-heads-do-it": rope(positional=3),
    "significant-angle-massive": rope(norm=0.4),
    "few-bands-trained": rope(bands=(3, 4)),
    "rope-loses-length": rope(kept=0.8),
    "mla-keeps-length": rope(kept=0.8),
    "contraction-speeds-learning": distance(
        rope=ROPE.within(width=9.0), mla=MLA.within(width=8.0), rope_absolute=WITH_SINUSOID.within(width=7.0)
    ),
    "contraction-brings-deposit": peaks(0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
}
# so that a supporting part fails, and the claim holds in part: one of each way to compare
IN_PART: dict[str, World] = {
    "task2-rope-superior": count(rope=0.75, absolute=0.5, nope=0.9),
    "task1-rope-smallest-gap": distance(random=Model(0.6, gap=0.02)),
    "mla-near-best": count(rope=0.9),
    "deposit-only-rope": distance(rope=0.93),
    "deposit-more-under-rope": distance(absolute=Model(0.6, drops=ONE_LITTLE)),
    "mla-average-deposit": distance(mla=Model(0.88, drops=((0.7,) * 4,) * 4)),
    "partial-moves-deposit": distance(rope=ROPE.first_layer(0.06, 0, 0, 0)),
    "early-leader-deposits": distance(rope=ROPE.first_layer(0.6, 0.6, 0.6, 0.02)),
    "significant-angle-massive": rope(massive=0.25),
}
# what to change in it for each verdict
CHANGES: dict[str, dict[Verdict, World]] = {
    name: {
        "holds": HOLDS.get(name, {}),
        "fails": HOLDS.get(name, {}) | world if world else {},
        "undecided": OPEN.get(name, {}),
    }
    for name, world in FAILS.items()
}
