"""The world as the papers tell it, and what to change in it so that each claim holds, fails, or stays undecided."""

from __future__ import annotations

from dataclasses import replace

from tests.papers.deposit.insides import NAN
from tests.papers.deposit.worlds import Model, World, count, distance

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
PRONOUNCED = distance(**{name: model.single(3) for name, model in SKILLED.items()})


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
# so that it fails, where its first essential part alone is not enough
FAILS: dict[str, World] = {"task2-rope-superior": {}, "nope-position-through-mask": {}}
