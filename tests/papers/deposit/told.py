"""The world as the papers tell it, and what to change in it so that each claim holds, fails, or stays undecided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.papers.deposit.insides import NAN
from tests.papers.deposit.worlds import Layers, Model, World, count, distance

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


def _each(
    others: str, model: float | Model, worlds: Callable[..., World] = distance, start: int = 0
) -> dict[int, World]:
    """A world for each of these encodings, in which that one is ``model``; their parts follow each other."""
    return {part: worlds(**{name: model}) for part, name in enumerate(others.split(), start)}


def _even(label: str, heads: int, drop: float = 0.02) -> World:
    """So many heads that cost the same each, and others that cost nothing."""
    costs = [drop] * heads + [0.0] * (16 - heads)
    model = ROPE if label == "rope" else SKILLED[label]
    return distance(**{label: replace(model, drops=tuple(tuple(costs[i : i + 4]) for i in range(0, 16, 4)))})


def _partial(drops: Layers) -> World:
    return distance(**{f"partial_{heads}": Model(0.89, drops=drops) for heads in (1, 2, 3)})


ALONE = Model(0.6, drops=((0.1, 0.0, 0.0, 0.0),) + ((0.0,) * 4,) * 3)  # one head that costs little


_STUMBLING = ((2.5, 3.0, 2.0, 1.5), (4.0, 2.0, 3.0, 1.5), (4.0, 3.0, 1.5, 2.0))  # the lead falls at one layer
_ROUGH = ("absolute", "relative", "alibi", "nope", "random")
ROUGH = Model(0.5, falls=0.1)

# of an essential part: the claim fails
ESSENTIAL: dict[str, dict[int, World]] = {
    "task1-rope-best": _each("absolute relative alibi nope random", 0.99),
    "task1-rope-fastest": _each("absolute relative alibi nope random", Model(0.5, half=0.5)),
    "task1-rope-stable": {
        part: distance(
            rope=replace(ROPE, falls=0.03), **(dict.fromkeys(_ROUGH, ROUGH) | {name: Model(0.5, falls=0.03)})
        )
        for part, name in enumerate(_ROUGH)
    },
    "task1-absolute-second": {0: distance(rope=0.5), **_each("relative alibi nope random", 0.7, start=1)},
    "task1-nope-relative-fail": _each("nope relative", 0.9),
    "task1-alibi-nope-fail": _each("alibi nope", 0.9),
    "task1-alibi-poor": _each("alibi", 0.7),
    "table1-task1-order": {0: distance(mla=0.95), 1: distance(nope=0.9)},
    "table1-task2-order": {0: count(mla=0.75), 1: count(rope=0.8)},
    "table1-levels": _each("mla rope nope", 0.5) | _each("mla rope nope", 0.5, count, 3),
    "task2-rope-superior": _each("absolute", 0.9, count),
    "task1-convergence-order": {0: distance(absolute=Model(0.6, half=0.5)), 1: distance(alibi=Model(0.3, half=2.0))},
    "task1-rope-smallest-gap": _each("rope", Model(0.6, gap=0.3)),
    "mla-near-best": {
        **_each("absolute alibi nope random relative rope rope_absolute", 0.997),
        **{
            part: count(mla=0.8) | world
            for part, world in _each("absolute alibi nope random relative rope", 0.95, count, 7).items()
        },
    },
    "mla-small-cost": _each("mla", 0.7),
    "task1-random-overfits": {0: distance(random=Model(0.3, gap=0.0)), 1: distance(random=Model(0.65, gap=0.05))},
    "task2-positions-cost": _each("nope", 0.5, count),
    "task2-absolute-mild": _each("absolute", 0.9, count),
    "task2-absolute-moderate": {0: count(mla=0.6), 1: count(alibi=0.8)},
    "task2-relative-like-nope": _each("relative", 0.9, count),
    "task2-relative-bias-attenuates": _each("relative", 0.77, count),
    "task2-random-perfect-fit": _each("random", Model(0.6, gap=0.1), count),
    "task2-random-largest-gap": _each("rope absolute relative alibi nope", Model(0.4, gap=0.6), count),
    "task2-alibi-worst": _each("nope rope absolute relative random mla", 0.3, count),
    "deposit-first-layer": {
        0: distance(rope=Model(0.93).first_layer(0.35, 0.02, 0.02, 0.02)),
        1: distance(rope=Model(0.93).first_layer(0.6, 0.15, 0.02, 0.02)),
    },
    "deposit-shallow": {
        0: distance(rope=Model(0.93).first_layer(0.1, 0.02, 0.02, 0.02)),
        1: distance(rope=Model(0.93, drops=((0.3, 0, 0, 0),) * 2 + ((0.4, 0, 0, 0),) * 2)),
    },
    "deposit-only-rope": _each("nope alibi relative absolute", Model(0.6).single(1)),
    "deposit-not-task2": _each("rope", Model(0.69).single(3), count),
    "mla-removes-deposit": _each("mla", Model(0.88).single(3)),
    "rope-absolute-moves-deposit": {0: distance(rope_absolute=Model(0.8).single(0, 2)), 1: distance(rope_absolute=0.8)},
    "one-or-two-heads-suffice": _each("partial_1 partial_2", 0.5),
    "deposit-more-under-rope": _each("nope alibi relative absolute", Model(0.6).single(1)),
    "absolute-uneven": {
        0: distance(absolute=Model(0.6).first_layer(0.3, 0.06, 0.01, 0.01)),
        1: distance(absolute=Model(0.6).first_layer(0.3, 0.2, 0.2, 0.0)),
    },
    "relative-alibi-scattered": _each("relative alibi", ALONE),
    # of three that differ, the one between them is as near to both as may be
    "nope-relative-alibi-alike": {
        0: _even("nope", 16) | _even("relative", 10) | _even("alibi", 13),
        1: _even("nope", 16) | _even("relative", 13) | _even("alibi", 10),
        2: _even("nope", 13) | _even("relative", 16) | _even("alibi", 10),
    },
    "mla-average-deposit": {0: distance(mla=Model(0.88, drops=((0.3, 0.0, 0.0, 0.0),) + ((0.0,) * 4,) * 3))},
    "nonrope-diffuse-task2": _each("nope alibi relative absolute", Model(0.6).single(2), count),
    "dropout-keeps-deposit": {
        0: distance(rope=ROPE.first_layer(0.1, 0, 0, 0), rope__dropout=Model(0.9).first_layer(0.1, 0, 0, 0)),
        1: distance(rope__dropout=Model(0.9).first_layer(0.3, 0.02, 0.02, 0.02)),
    },
    "partial-below-full": _each("partial_1 partial_2 partial_3", 0.5),
    "partial-hurts-count": _each("partial_1 partial_2", 0.9, count),
    "partial-moves-deposit": {0: distance(**{f"partial_{heads}": Model(0.89).single(0) for heads in (1, 2, 3)})},
    "rope-gradient-seed": {0: rope(logits=1e-4), 1: rope(parameters=1e-4)},
    "alibi-seed-cancels": {0: distance(alibi=ALIBI.within(logits=0.1))},
    "margin-grows": {part: rope(first=leads) for part, leads in enumerate(_STUMBLING)}
    | {part: rope(last=leads) for part, leads in enumerate(_STUMBLING, 3)},
    "early-leader-deposits": {0: rope(positions=(0.5, 0.2))},
    "additive-directions-displaced": {
        0: distance(rope_absolute=WITH_SINUSOID.within(alignment=0.5)),
        1: distance(rope_absolute=WITH_SINUSOID.within(coefficient=0.3)),
    },
    "rope-suppresses-implicit-position": {0: rope(readable=0.75)},
    "additive-coupling-persists": {0: distance(absolute=ABSOLUTE.within(deepest=0.2))},
    "nope-position-through-mask": {0: distance(nope__mask=0.55)},
    "one-head-knows-position": {0: rope(positions=(0.1, 0.02)), 1: rope(positions=(0.5, 0.4))},
    "rope-needs-fewer-heads": _each("nope relative", Model(0.6).within(needed=3)),
    "two-heads-do-it": {0: rope(positional=3)},
    "significant-angle-massive": {0: rope(norm=0.4)},
    "few-bands-trained": {0: rope(bands=(3, 4)), 1: rope(bands=(1, 1))},
    "rope-loses-length": {0: rope(kept=0.8)},
    "mla-keeps-length": {0: rope(kept=0.8)},
    "contraction-speeds-learning": {
        0: distance(
            rope=ROPE.within(width=9.0), mla=MLA.within(width=8.0), rope_absolute=WITH_SINUSOID.within(width=7.0)
        )
    },
    "contraction-brings-deposit": {0: peaks(0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)},
}
# of a supporting part: the claim holds in part
SUPPORTING: dict[str, dict[int, World]] = {
    "task2-rope-superior": {1: count(rope=0.75, absolute=0.5, nope=0.9)},
    "task1-rope-smallest-gap": _each("absolute relative alibi nope random", Model(0.6, gap=0.02), start=1),
    "mla-near-best": {13: distance(nope=0.85), 14: count(rope=0.9)},
    "one-or-two-heads-suffice": {2: distance(nope=0.92)},
    "deposit-not-task2": {1: distance(rope=0.93)},
    "mla-removes-deposit": {1: distance(rope=0.93)},
    "deposit-only-rope": {4: distance(rope=0.93)},
    "rope-absolute-moves-deposit": {2: distance(rope=0.93)},
    "mla-average-deposit": {1: distance(mla=Model(0.88, drops=((0.7,) * 4,) * 4))},
    "deposit-more-under-rope": _each("nope alibi relative absolute", ALONE, start=4),
    "relative-alibi-scattered": {
        **_each("relative alibi", Model(0.6, drops=((0.2,) * 4,) * 4), start=2),
        4: _even("rope", 7) | _even("relative", 8) | _even("alibi", 16),
        5: _even("rope", 7) | _even("relative", 16) | _even("alibi", 8),
    },
    "nope-relative-alibi-alike": {
        3: _even("nope", 16, 0.02) | _even("relative", 16, 0.08) | _even("alibi", 16, 0.05),
        4: _even("nope", 16, 0.02) | _even("relative", 16, 0.05) | _even("alibi", 16, 0.08),
        5: _even("nope", 16, 0.05) | _even("relative", 16, 0.02) | _even("alibi", 16, 0.08),  # twice that in nats
    },
    "partial-moves-deposit": {
        1: _partial(((0.3, 0.0, 0.0, 0.0), (0.6, 0.0, 0.0, 0.0), *((0.0,) * 4,) * 2)),
        2: distance(rope=ROPE.single(0, 1), partial_2=Model(0.89).single(1), partial_3=Model(0.89).single(0)),
        3: distance(rope=ROPE.first_layer(0.06, 0, 0, 0)),
    },
    "rope-gradient-seed": {2: rope(drift=-1.0)},
    "early-leader-deposits": {
        1: distance(rope=ROPE.first_layer(0.6, 0.6, 0.6, 0.02)),
        # one of the others costs as much, and has the least signal
        2: distance(rope=ROPE.first_layer(0.6, 0.0, 0.02, 0.6).within(rest=(1.0, 0.9, 0.8))),
    },
    "additive-directions-displaced": {2: distance(absolute=ABSOLUTE.within(alignment=0.1))},
    "one-head-knows-position": {2: rope(positional=2)},
    "significant-angle-massive": {1: rope(massive=0.25)},
}
# what to change in it for each verdict
CHANGES: dict[str, dict[Verdict, World]] = {
    name: {
        "holds": HOLDS.get(name, {}),
        "fails": FAILS.get(name, HOLDS.get(name, {}) | next(iter(parts.values()))),
        "undecided": OPEN.get(name, {}),
    }
    for name, parts in ESSENTIAL.items()
}
