"""The world as the papers tell it; what to change so that each claim holds, and so that a check of its own fails."""

from __future__ import annotations

from dataclasses import replace

from tests.papers.deposit.worlds import NAN, Model, World, count, distance

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


def _alone(**drops: tuple[float, ...]) -> World:
    """RoPE with these drops in its first layer, and none that count elsewhere."""
    return distance(**{label: Model(0.93).first_layer(*each) for label, each in drops.items()})


ONE_LITTLE = ((0.1, 0.0, 0.0, 0.0),) + ((0.0,) * 4,) * 3  # one head that costs little
_ROUGH = {name: Model(0.5, falls=0.1) for name in ("relative", "alibi", "nope", "random")}
# so that an essential part of a claim fails, and the claim with it: of claims with checks and figures of their own that
# fail in no record
FAILS: dict[str, World] = {
    "task1-rope-fastest": distance(absolute=Model(0.5, half=0.5)),
    "task1-rope-stable": distance(rope=replace(ROPE, falls=0.03), absolute=Model(0.5, falls=0.03), **_ROUGH),
    "mla-near-best": distance(absolute=0.997),
    "task2-relative-bias-attenuates": count(relative=0.77),
    "dropout-keeps-deposit": _alone(rope=(0.1, 0, 0, 0), rope__dropout=(0.1, 0, 0, 0)),
    "partial-moves-deposit": distance(**{f"partial_{heads}": Model(0.89).single(0) for heads in (1, 2, 3)}),
    "rope-gradient-seed": rope(logits=1e-4),
    "margin-grows": rope(first=(2.5, 3.0, 2.0, 1.5)),
    "rope-suppresses-implicit-position": rope(readable=0.75),
    "nope-position-through-mask": distance(nope=NOPE, nope__mask=Model(0.1, half=None)),
    "significant-angle-massive": rope(norm=0.4),
    "few-bands-trained": rope(bands=(3, 4)),
    "contraction-speeds-learning": distance(
        rope=ROPE.within(width=9.0), mla=MLA.within(width=8.0), rope_absolute=WITH_SINUSOID.within(width=7.0)
    ),
    "contraction-brings-deposit": peaks(0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
}
# so that a supporting check fails, and the claim holds in part, as no record has it
IN_PART: dict[str, World] = {
    "early-leader-deposits": distance(rope=ROPE.first_layer(0.6, 0.6, 0.6, 0.02)),
}
