"""Worlds of made-up results: what a model does and what is measured inside it, told in a few numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tests.papers.deposit.insides import CHANCE, LAYERS, Inside, ablation, bias, measured, signals

from toeplens.engine.head_watch import Watched
from toeplens.model import Protocol
from toeplens.papers.deposit.labels import TITLES
from toeplens.studies import CellResult, Key, Results
from toeplens.training.presets import COUNT, DISTANCE

Heads = tuple[float, ...]
Layers = tuple[Heads, ...]
SINGLE: Heads = (0.6, 0.02, 0.0, 0.01)  # of a skill of at most 0.9
SPREAD: Heads = (0.02, 0.02, 0.02, 0.02)
NATS = 2.0  # what a head costs by loss, for what it costs in accuracy
TOLD_OF_ROPE = Inside()


@dataclass(frozen=True)
class Model:
    """A made-up cell.

    accuracy  in the end, on the test set
    gap       accuracy on training examples less that
    half      epochs until half is learned of the training examples; None: never, in eight
    falls     how much test accuracy is lost on the way
    settled   whether it has stopped learning
    drops     what its heads drop, layer by layer
    looks     the same at moments of training
    inside    what is measured of it beside the ablation; None where nothing is
    status    ``complete`` or ``diverged``
    """

    accuracy: float
    gap: float = 0.1
    half: float | None = 2.0
    falls: float = 0.05
    settled: bool = True
    drops: Layers = (SPREAD,) * LAYERS
    looks: tuple[tuple[str, Layers], ...] = ()
    inside: Inside | None = TOLD_OF_ROPE
    status: Any = "complete"

    def single(self, *layers: int) -> Model:
        """With one head that carries each of these layers, and none elsewhere."""
        return replace(self, drops=tuple(SINGLE if layer in layers else SPREAD for layer in range(LAYERS)))

    def first_layer(self, *drops: float) -> Model:
        """With these drops in the first layer."""
        return replace(self, drops=(drops, *self.drops[1:]))

    def within(self, **inside: Any) -> Model:
        """With this changed inside."""
        return replace(self, inside=replace(self.inside or Inside(), **inside))

    def seen(self, *moments: str) -> Model:
        """With the same seen at these moments of training."""
        return replace(self, looks=tuple((moment, self.drops) for moment in moments))


World = dict[tuple[str, str], Model]


def _rows(model: Model, noise: float) -> list[dict[str, Any]]:
    """Three evaluations: a quarter learned, half of it, and the end; test accuracy falls from the first to the next."""
    half = 4.0 if model.half is None else model.half * 2**noise
    fits = (0.25, 0.3, 0.35) if model.half is None else (0.1 + 0.9 / 4, 0.1 + 0.9 / 2, model.accuracy + model.gap)
    low = model.accuracy / 2
    tests = low + model.falls + noise, low, model.accuracy + noise
    return [
        {"epoch": epoch, "step": n, "train_accuracy": _share(fit), "fit_accuracy": _share(fit), "test_accuracy": test}
        for n, (epoch, fit, test) in enumerate(zip((half / 2, half, 2 * half), fits, tests, strict=True), start=1)
    ]


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _watched(model: Model, inside: Inside, accuracy: float, noise: float) -> list[dict[str, Any]]:
    """What was seen at initialisation, at the moments of the model's looks, and at the end."""
    signal = signals(inside, inside.last, 0, noise)
    row = Watched(0, 1.0, CHANCE, 3.0, 0 * signal, signal, 0 * signal)
    looks = [
        replace(
            row,
            step=step,
            events=(moment,),
            ablation=ablation(drops, accuracy),
            by_loss=ablation(NATS * np.array(drops), 0.5, "loss"),
        )
        for step, (moment, drops) in enumerate(model.looks, start=1)
    ]
    return [each.to_dict() for each in (row, *looks, replace(row, step=99))]


@functools.cache
def made_up(key: Key, model: Model, noise: float = 0.0) -> CellResult:
    """The cell, not to be changed.

    As in the study, plain encodings on Task 1 are watched and measured, and of a run that diverged nothing is measured.
    """
    accuracy = model.accuracy + noise
    inside = model.inside if key.task == DISTANCE and key.label in TITLES else None
    complete = model.status == "complete"
    found = measured(inside, accuracy, noise) if inside else {}
    if key.label == "relative" and model.inside:
        found = found | {"bias": bias(model.inside, noise)}
    return CellResult(
        key=key,
        run=f"{key}",
        status=model.status,
        chance=CHANCE,
        length_chance=CHANCE,
        parameters=1000,
        epochs=_rows(model, noise),
        result={
            "test_accuracy": accuracy,
            "fit_accuracy": _share(accuracy + model.gap),
            "plateau": 2 if model.settled else None,
            "seconds": 1.0,
        },
        ablation=ablation(model.drops, accuracy) if complete else None,
        by_loss=ablation(NATS * np.array(model.drops), 0.5, "loss") if complete else None,
        measures=found if complete else {},
        watched=_watched(model, inside or Inside(), accuracy, noise) if inside or model.looks else [],
    )


def results(world: World, seeds: int = 5, spread: float = 0.002, protocol: Protocol = "paper") -> Results:
    """Each model of the world once a seed; the seeds differ a little around it, each encoding's in its own way."""
    rng = np.random.default_rng(0)
    cells = []
    for (task, label), model in world.items():
        noise = rng.uniform(-spread, spread, seeds)
        for number, shift in enumerate(noise - noise.mean()):
            cells.append(made_up(Key(protocol, task, label, number), model, float(shift)))
    return Results(cells)


def changed(found: Results, change: Callable[[CellResult], CellResult]) -> Results:
    """The same results with every cell changed."""
    return Results(change(cell) for cell in found.cells)


# ---- worlds ---------------------------------------------------------------------------------------------------------


def distance(**models: float | Model) -> World:
    """Models on Task 1, by label; "_" stands for "-", "__" for "/"."""
    return _world(DISTANCE, models)


def count(**models: float | Model) -> World:
    """Models on Task 2."""
    return _world(COUNT, models)


def _world(task: str, models: dict[str, float | Model]) -> World:
    return {
        (task, name.replace("__", "/").replace("_", "-")): model if isinstance(model, Model) else Model(model)
        for name, model in models.items()
    }
