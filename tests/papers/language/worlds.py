"""Made-up language models in which every claim holds, and what to change so that one fails, or stays undecided."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tests.studies import measures

from toeplens.engine.language import AtLength, Bits, Extended, Extension, HeadPatterns, Needle, Needles
from toeplens.engine.language.bits import Interval
from toeplens.engine.measures import Beginning
from toeplens.lens import HeadAblation
from toeplens.papers.language.claims import CLAIMS
from toeplens.studies import CellResult, Entry, Key, Results, Verdict, grid, judge_all
from toeplens.studies.grid.study import Evidence

SPEC = grid.read_spec("language")
LENGTH, TARGET = 256, 4  # tokens of training, and how many times as many claims on longer texts are about
SHAPE = (3, 3)  # of each layer one head looks at the token before, one at what followed a copy, and one at neither
WEIGHT = 0.05  # that a head gives where it does not look
NEARLY = np.array([0.01, 0.0, -0.01])  # heads of a kind differ by so much, in the mean by nothing
# squares of differences from 0, 1, ... sum up to 18, 60 and 120: rank correlations of 0.85, 0.5 and 0
NEARLY_SORTED, HALFWAY = (2, 0, 1, 5, 3, 4, 8, 6, 7), (5, 3, 2, 1, 4, 0, 7, 6, 8)
SHUFFLED = (7, 5, 0, 3, 1, 8, 4, 2, 6)


@dataclass(frozen=True)
class Model:
    """A made-up model of three layers of three heads; bits are bits a byte.

    bits         at the training length
    lost         at the end of longer texts, against reading one training length
    found, beyond  accuracy on needles at the training length, and on longer texts
    short, left  at the end of texts of the training length, and of longer ones, the rotation as it is
    ntk, yarn    of longer texts with the rotation changed
    tuned_short, tuned_left, tuned_interpolation  after tuning
    previous     positional share of the heads that look at the token before, whose symbolic share is 0.1
    induction    symbolic share of the heads that look at what followed a copy, whose positional share is 0.1
    others       positional and symbolic share of the others
    looks        weight that the heads of a kind give
    fast         the place of each head's frequencies, slowest first, from the least positional head on
    born         the same before training
    first, second  nats lost when position is taken from one head of the first layer, and of the second
    """

    bits: float
    lost: float
    found: float = 0.9
    beyond: float = 0.1
    short: float = 2.05
    left: float = 2.4
    ntk: float = 2.02
    yarn: float = 2.0
    tuned_short: float = 2.04
    tuned_left: float = 2.2
    tuned_interpolation: float = 2.01
    previous: float = 0.6
    induction: float = 0.6
    others: tuple[float, float] = (0.2, 0.2)
    looks: float = 0.6
    fast: tuple[int, ...] = NEARLY_SORTED
    born: tuple[int, ...] = SHUFFLED
    first: float = 0.3
    second: float = 0.05


World = dict[str, Model]
HELD: World = {
    "nope": Model(bits=2.16, lost=0.0),
    "sinusoidal": Model(bits=2.13, lost=0.9),
    "alibi": Model(bits=2.08, lost=-0.03),
    "rope": Model(bits=2.05, lost=0.4),
}


def changed(label: str, **figure: Any) -> World:
    """The world in which all holds, but for one figure of one encoding."""
    assert len(figure) == 1
    return HELD | {label: replace(HELD[label], **figure)}


CHANGES: dict[str, dict[Verdict, World]] = {
    "language-needs-position": {"fails": changed("nope", bits=2.05), "undecided": changed("nope", bits=2.06)},
    "rope-over-absolute": {"fails": changed("sinusoidal", bits=2.05), "undecided": changed("sinusoidal", bits=2.06)},
    "alibi-extrapolates": {"fails": changed("alibi", lost=0.02), "undecided": changed("alibi", lost=0.01)},
    "rope-fails-beyond": {"fails": changed("rope", lost=0.04), "undecided": changed("rope", lost=0.05)},
    "nope-extrapolates": {"fails": changed("nope", lost=0.02), "undecided": changed("nope", lost=0.01)},
    "long-context-helps": {"fails": changed("alibi", lost=0.0), "undecided": changed("alibi", lost=-0.01)},
    "interpolation-helps": {"fails": changed("rope", ntk=2.4), "undecided": changed("rope", ntk=2.06)},
    "previous-heads-positional": {"fails": changed("rope", previous=0.4), "undecided": changed("rope", previous=0.5)},
    "induction-heads-symbolic": {"fails": changed("rope", induction=0.4), "undecided": changed("rope", induction=0.5)},
    "positional-by-frequency": {
        "fails": changed("rope", fast=tuple(reversed(range(9)))),
        "undecided": changed("rope", fast=HALFWAY),
    },
    "language-deposit": {"fails": changed("rope", first=0.05), "undecided": changed("rope", first=0.1)},
    "needles-end-at-the-training-length": {
        "fails": changed("rope", beyond=0.8),
        "undecided": changed("rope", beyond=0.2),
    },
}
# so that a supporting part fails alone; a deposit in the first layer is one somewhere, so that it has none
IN_PART: dict[str, World] = {
    "nope-extrapolates": changed("rope", lost=-0.02),
    "interpolation-helps": changed("rope", yarn=2.4),
    "previous-heads-positional": changed("rope", others=(0.98, 0.0)),
    "induction-heads-symbolic": changed("rope", others=(0.0, 0.98)),
    "positional-by-frequency": changed("rope", born=tuple(range(9))),
}


def _at(value: float) -> Interval:
    return Interval(value, None, None)


def _bits(model: Model) -> Bits:
    def row(factor: int, gain: float) -> AtLength:
        seen = _at(model.bits + gain)
        return AtLength(factor * LENGTH, float(factor), 2, 2, seen, seen, seen, _at(gain))

    rows = (row(1, 0.0), row(TARGET, model.lost))
    return Bits(_at(model.bits), 0.5, 2, 2, np.array([0, 1]), [_at(model.bits)], rows)


def _needles(model: Model) -> Needles:
    """The deeper the better, in the mean as said."""
    return Needles(
        1 / 26,
        tuple(
            Needle(factor * LENGTH, float(factor), depth, 2, _at(accuracy + 0.2 * (depth - 0.5)), _at(1.0))
            for factor, accuracy in ((1, model.found), (TARGET, model.beyond))
            for depth in (0.0, 0.5, 1.0)
        ),
    )


def _extension(methods: dict[str, float], short: float, *, tuned: bool) -> Extension:
    rows = [("none", 1, short), *((method, TARGET, bits) for method, bits in methods.items())]
    return Extension(
        TARGET,
        int(tuned),
        tuple(
            Extended(method, tuned, factor * LENGTH, float(factor), 2, _at(bits), _at(0.0))
            for method, factor, bits in rows
        ),
    )


def _heads(previous: Any, induction: Any, others: Any) -> np.ndarray:
    """A figure of all heads, by their kinds."""
    return np.stack([np.broadcast_to(kind, SHAPE[0]) for kind in (previous, induction, others)], axis=1)


def _position_loss(model: Model) -> HeadAblation:
    """Beside the two heads one that costs 0.05, one that helps when it is gone, and one whose cost is not sure."""
    drops = np.array([[model.first, 0.05, -0.5], [model.second, 0.0, 0.0], [0.0, 0.0, 0.7]])
    low = drops - np.array([[0.01, 0.01, 0.01], [0.01, 0.01, 0.01], [0.01, 0.01, 0.8]])
    nothing = np.full((SHAPE[0], SHAPE[1] + 1), np.nan)
    return HeadAblation(drops, low, drops, 1.4, nothing, 64, 0.2, metric="loss", intervention="position")


def cell(label: str, seed: int, model: Model) -> CellResult:
    positional = _heads(model.previous + NEARLY, 0.1 + NEARLY, model.others[0] + NEARLY / 2)
    symbolic = _heads(0.1 + NEARLY, model.induction + NEARLY, model.others[1] + NEARLY / 2)
    positional, symbolic = (np.clip(share, 0, 1) for share in (positional, symbolic))
    centre = np.empty(positional.size)
    centre[np.argsort(positional, axis=None)] = model.fast
    found: dict[str, Any] = {
        "bits": _bits(model).to_dict(),
        "needles": _needles(model).to_dict(),
        "patterns": HeadPatterns(
            _heads(model.looks, WEIGHT, WEIGHT), np.full(SHAPE, 0.9), _heads(WEIGHT, model.looks, WEIGHT), 2
        ).to_dict(),
        "behaviour": measures.behaviour(positional, symbolic, 1 - positional - symbolic),
    }
    if label == "rope":
        rising = np.arange(9).reshape(SHAPE) / 10
        untuned = {"none": model.left, "ntk": model.ntk, "yarn": model.yarn}
        tuned = {"none": model.tuned_left, "interpolation": model.tuned_interpolation}
        found |= {
            "extension": _extension(untuned, model.short, tuned=False).to_dict(),
            "extension-tuned": _extension(tuned, model.tuned_short, tuned=True).to_dict(),
            "beginning": Beginning(rising, rising, np.array(model.born).reshape(SHAPE)).to_dict(),
            "frequency": measures.frequency(np.ones((*SHAPE, 2)), centre.reshape(SHAPE)),
            "position-loss": _position_loss(model).to_dict(),
        }
    return CellResult(
        key=Key("paper", "language", label, seed),
        run=f"{label}-{seed}",
        status="complete",
        chance=0.2,
        length_chance=0.2,
        parameters=1,
        epochs=[{"test_accuracy": 0.5, "seconds": 1.0}],
        result={"test_accuracy": 0.5, "seconds": 1.0},
        ablation=None,
        measures=found,
    )


def judged(world: World, seeds: int = 8, without: str = "") -> dict[str, Entry]:
    """The ledger of so many models of each encoding, which agree, so that they spread as the figures' grain says.

    ``without`` is a measure that was not made.
    """
    cells = [cell(label, seed, model) for label, model in world.items() for seed in range(seeds)]
    for each in cells:
        each.measures.pop(without, None)
    return {entry.claim.id: entry for entry in judge_all(CLAIMS, Evidence(SPEC, Results(cells), []))}
