"""Made-up grid studies: models with the figures that a claim asks for, and the world as the papers say it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tests.studies import measures

from toeplens.engine import LengthResult
from toeplens.lens import HeadAblation
from toeplens.papers.positional_symbolic.claims import CLAIMS, Evidence
from toeplens.studies import CellResult, Entry, Key, Results, grid, judge_all
from toeplens.studies.grid.measured import relations

CHANCE = 0.1
SCAN = (0.01, 0.1, 0.3, 1.0, 3.0)
TASKS = ("index", "retrieval", "mix")
INTRICATE = ("reverse", "dyck")
SPEC = grid.grid_spec(
    {
        "tasks": dict.fromkeys((*TASKS, *INTRICATE)),
        "encodings": {
            "rope": None,
            "nope": None,
            "alibi": None,
            "t5": None,
            "sinusoidal": None,
            "cope": None,
            "high": {"encoding": "rope-bands"},
            "low": {"encoding": "rope-bands"},
            "turn": {"encoding": "rope-bands", "scan": {"frequencies": list(SCAN)}},
        },
        "claims": "positional-symbolic",
    }
)


@dataclass(frozen=True)
class Model:
    """A made-up model of one layer of two heads, the first of which matters.

    positional, symbolic  shares of the first head; the second head has them the other way round
    before                the share of its kind that the first head has before training
    peak                  accuracy lost without the first head, as a share of the accuracy over chance
    kept                  share of the skill on longer texts, at 1.5 times the length; its square at twice
    scores                sampled scores of the first head, positional and symbolic
    fast                  whether the positional head is the one of high frequencies
    born                  whether its heads follow what their frequencies say before training, too; None: not measured
    bands                 loss without the rotation of the faster and of the slower half
    slowest               the slower one of its two frequencies, radians a token
    settled               whether it has stopped learning
    sure                  whether what is lost without the first head is told from nothing
    """

    accuracy: float = 0.9
    positional: float = 0.9
    symbolic: float = 0.05
    before: float = 0.3
    peak: float = 0.6
    kept: float = 0.5
    scores: tuple[float, float] = (0.9, 0.1)
    fast: bool = True
    born: bool | None = False
    bands: tuple[float, float] = (1.0, 0.1)
    slowest: float = 0.5
    settled: bool = True
    sure: bool = True


def cell(task: str, label: str, seed: int, model: Model) -> CellResult:
    positional = [[model.positional, model.symbolic]]
    symbolic = [[model.symbolic, model.positional]]
    interaction = [[1 - model.positional - model.symbolic] * 2]
    drop = model.peak * (model.accuracy - CHANCE)
    drops = np.array([[drop, 0.0]])
    centres = [[0.0, -5.0]] if model.fast == (model.positional > model.symbolic) else [[-5.0, 0.0]]
    turning = label != "nope"
    symbolic_before = [[0.79, 0.8]] if model.born or task != "index" else [[0.8, 0.79]]
    start = {"positional": [[0.1, 0.1]], "symbolic": symbolic_before, "centre": [[0.0, -5.0]]}
    watched = [
        {"step": 0, "positional": [[model.before, 0.5]], "symbolic": [[model.before, 0.5]], "drops": [[0.0, 0.0]]},
        {"step": 9, "positional": positional, "symbolic": symbolic, "drops": [[drop, 0.0]]},
    ]

    def row(factor: float, kept: float) -> LengthResult:
        accuracy = CHANCE + (1 - CHANCE) * kept * (model.accuracy - CHANCE) / (1 - CHANCE)
        return measures.longer(factor, accuracy, chance=CHANCE, length_chance=CHANCE)

    sides = model.scores if model.positional > model.symbolic else model.scores[::-1]
    found: dict[str, Any] = {
        "behaviour": measures.behaviour(positional, symbolic, interaction),
        "permutations": measures.permutations([[sides[0], 0.1]], [[sides[1], None]]),
        "frequency": measures.frequency([[[1.0, model.slowest]] * 2], centres) if turning else {"why": "no rotation"},
        "beginning": start if turning else {"why": "no rotation"},
        "bands": measures.bands([[model.bands, [None, None]]]) if turning else {"why": "no rotation"},
        "extrapolation": measures.extrapolation(
            [row(1.0, 1.0), row(1.25, model.kept**0.5), row(1.5, model.kept), row(2.0, model.kept**2)]
        ),
    }
    curve = np.array([[model.accuracy, model.accuracy - drop, CHANCE]])
    low = drops if model.sure else np.zeros_like(drops)
    if model.born is None:
        del found["beginning"]
    ablation = HeadAblation(drops, low, drops, model.accuracy, curve, 1000, CHANCE, intervention="zero")
    unknown = np.full_like(curve, np.nan)
    by_loss = HeadAblation(drops, low, drops, 0.5, unknown, 1000, CHANCE, metric="loss", intervention="zero")
    return CellResult(
        key=Key("paper", task, label, seed),
        run=f"{task}-{label}-{seed}",
        status="complete",
        chance=CHANCE,
        length_chance=CHANCE,
        parameters=1,
        epochs=[{"test_accuracy": model.accuracy, "seconds": 1.0}],
        result={"test_accuracy": model.accuracy, "seconds": 1.0, "plateau": 1 if model.settled else None},
        ablation=ablation,
        by_loss=by_loss,
        measures=found,
        watched=watched,
    )


World = dict[tuple[str, str], Model]


def papers() -> World:
    """All as the papers say."""
    position = Model(positional=0.97, symbolic=0.0, kept=0.3, peak=0.9)
    content = Model(positional=0.04, symbolic=0.95, kept=0.9, peak=0.3)
    world: World = {}
    for task, model in (("index", position), ("retrieval", content), ("mix", position)):
        sign = 1 if model is position else -0.5
        for rank, label in enumerate(("rope", "alibi", "t5", "nope", "sinusoidal", "cope", "high", "low")):
            world[task, label] = replace(  # the more positional, deposited and coupled, the less is kept
                model,
                kept=model.kept + 0.01 * rank,
                peak=model.peak - 0.02 * rank,
                positional=model.positional - 0.004 * rank,
                symbolic=model.symbolic + (0.004 + 0.001 * sign) * rank,
            )
        for value in SCAN:
            middle = value == 0.3
            best = middle if task != "retrieval" else not middle
            world[task, f"turn/{value:g}"] = replace(model, accuracy=0.9 if best else 0.4)
    world["index", "low"] = replace(world["index", "low"], accuracy=0.15)
    world["index", "nope"] = replace(world["index", "nope"], accuracy=0.15)
    world["retrieval", "high"] = replace(world["retrieval", "high"], accuracy=0.4)
    for task in INTRICATE:
        for label in ("rope", "nope"):
            world[task, label] = Model(accuracy=0.3, kept=0.1)
    for label in ("high", "low"):
        world["mix", label] = replace(world["mix", label], accuracy=0.5)
    return world


def judged(world: World, seeds: int = 8, only: str = "") -> dict[str, Entry]:
    """All claims, or one; accuracies differ a little from seed to seed, so that intervals have a width."""
    cells = [
        cell(task, label, seed, replace(model, accuracy=model.accuracy + 0.001 * seed * (1 if label < "n" else -1)))
        for (task, label), model in world.items()
        for seed in range(seeds)
    ]
    results = Results(cells)
    related = relations(SPEC, results) if not only or only.endswith("against-length") else []
    claims = [claim for claim in CLAIMS if only in ("", claim.id)]
    entries = judge_all(claims, Evidence(SPEC, results, related))
    return {entry.claim.id: entry for entry in entries}


def changed(*places: tuple[str, str], **fields: Any) -> World:
    """The papers' world with some models changed; a ``*`` stands for all encodings."""
    world = papers()
    for task, label in places:
        for place in world:
            if place[0] == task and label in ("*", place[1]):
                world[place] = replace(world[place], **fields)
    return world


def turned(figure: Callable[[Model], float], **of: Callable[[float], float]) -> World:
    """The papers' world with fields made from a figure of each model."""
    return {
        place: replace(model, **{name: make(figure(model)) for name, make in of.items()})
        for place, model in papers().items()
    }


def scan(task: str, best: float) -> World:
    """Accuracy falls on both sides of the best frequency."""
    world = papers()
    for rank, value in enumerate(SCAN):
        accuracy = 0.9 - 0.1 * abs(rank - SCAN.index(best))
        world[task, f"turn/{value:g}"] = replace(world[task, f"turn/{value:g}"], accuracy=accuracy)
    return world
