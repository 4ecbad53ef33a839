"""Worlds of made-up results: what a model does and what is measured inside it, told in a few numbers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from toeplens.lens import HeadAblation, HeadSets, PositionalDrift, Representation, SeedStrength
from toeplens.lens.gradients.signal import LevelSignal
from toeplens.lens.gradients.statistics import Strength
from toeplens.model import Protocol
from toeplens.papers.deposit.labels import TITLES
from toeplens.studies import CellResult, Key, Results
from toeplens.training.presets import COUNT, DISTANCE

LAYERS, HEADS, CHANCE = 4, 4, 0.1
Heads = tuple[float, ...]
SINGLE: Heads = (0.6, 0.02, 0.0, 0.01)  # of a skill of at most 0.9
SPREAD: Heads = (0.02, 0.02, 0.02, 0.02)
RISING, FALLING = (1.5, 2.0, 3.0, 4.0), (4.0, 3.0, 2.0, 1.5)


@dataclass(frozen=True)
class Inside:
    """What is measured inside a made-up model; unless told otherwise, what the papers say of RoPE.

    logits, parameters  exponents of SNR_n in the first layer
    drift               the relative drift of Var(P) there of the head whose Var(P) moves most
    first, last         how far each layer's best head leads, at initialisation and after training
    leader              which head leads
    alignment           of the stream's position part with the input's, after layer 2
    coefficient         of the same on the input's vectors
    positions           drops by taking position from one head: the largest and the second
    needed              how many heads suffice
    """

    logits: float = -0.05
    parameters: float = -0.05
    drift: float = 1.0
    first: tuple[float, ...] = FALLING
    last: tuple[float, ...] = FALLING
    leader: int = 0
    alignment: float = 0.1
    coefficient: float = 0.1
    positions: tuple[float, float] = (0.5, 0.02)
    needed: int = 2


@dataclass(frozen=True)
class Model:
    """A made-up cell.

    accuracy  in the end, on the test set
    way       the same after the first of its two epochs; half of it unless given
    gap       train less test accuracy
    drops     what its heads drop, layer by layer
    inside    what is measured of it beside the ablation; None where nothing is
    status    ``complete`` or ``diverged``
    """

    accuracy: float
    way: float | None = None
    gap: float = 0.1
    drops: tuple[Heads, ...] = (SPREAD,) * LAYERS
    inside: Inside | None = Inside()
    status: str = "complete"

    def single(self, *layers: int) -> Model:
        """With one head that carries each of these layers, and none elsewhere."""
        return replace(self, drops=tuple(SINGLE if layer in layers else SPREAD for layer in range(LAYERS)))

    def first_layer(self, *drops: float) -> Model:
        """With these drops in the first layer."""
        return replace(self, drops=(drops, *self.drops[1:]))

    def within(self, **inside: Any) -> Model:
        """With this changed inside."""
        return replace(self, inside=replace(Inside(), **inside))


World = dict[tuple[str, str], Model]

# ---- records of measures --------------------------------------------------------------------------------------------


def ablation(drops: Any, accuracy: float, intervention: str = "zero") -> HeadAblation:
    """Heads whose harm adds up within a layer; without any head a layer carries nothing."""
    drops = np.asarray(drops, dtype=float)
    lost = np.cumsum(-np.sort(-drops, axis=1), axis=1)
    curve = np.clip(np.concatenate((np.zeros((LAYERS, 1)), lost), axis=1), 0, None)
    curve[:, -1] = accuracy - CHANCE
    return HeadAblation(
        drops, drops, drops, accuracy, np.clip(accuracy - curve, 0, None), 1000, CHANCE, intervention=intervention
    )


def signals(leads: tuple[float, ...], leader: int, noise: float) -> np.ndarray:
    """[L, H] all heads alike but one, which leads by these factors; the noise is of another size in each layer."""
    signal = np.ones((LAYERS, HEADS))
    signal[:, leader] = np.array(leads) * (1 + noise * np.arange(1, LAYERS + 1))
    return signal


def level_seed(exponent: float, signal: np.ndarray) -> LevelSignal:
    """The exponent is that of the first layer and of its best head: others' cancel, and one has none."""
    heads, layers = np.full((LAYERS, HEADS), -0.5), np.full(LAYERS, -0.5)
    heads[0], layers[0] = [np.nan, exponent - 0.01, exponent, exponent - 0.02], exponent

    def strength(exponents: np.ndarray) -> Strength:
        share = np.full_like(exponents, 0.5)
        curve = np.stack((share, share), axis=-1)
        return Strength(curve, exponents, exponents, exponents, share, share, share)

    return LevelSignal(strength(heads), strength(layers), np.stack((signal, 0 * signal), axis=-1))


@functools.cache
def seed(inside: Inside, noise: float) -> dict[str, Any]:
    signal = signals(inside.first, inside.leader, noise)
    levels = {name: level_seed(getattr(inside, name) + noise, signal) for name in ("logits", "parameters")}
    drift = np.full((LAYERS, HEADS), 99.0)
    drift[0] = np.array([0.3, 0.5, 1.0, 0.7]) * (inside.drift + noise) / 2
    return {
        "strength": SeedStrength((8, 16), 16, 1.0, levels).to_dict(),
        "drift": PositionalDrift(np.ones_like(drift), drift, 1.0, 2.0, 16).to_dict(),
    }


@functools.cache
def representation(inside: Inside, noise: float) -> dict[str, Any]:
    """Of 10 directions in 100: a tenth of what is known is chance. Before layers 0 and 1 all is as at the input."""
    one = np.ones(LAYERS)
    alignment, coefficient = (
        np.array([1.0, 1.0, value + noise, 0.0]) for value in (inside.alignment, inside.coefficient)
    )
    rest = ("variance", "variance_share", "low", "high", "alignment_low", "alignment_high", "displaced")
    return Representation(
        layers=np.arange(LAYERS),
        sequences=64,
        positions=np.arange(8),
        energy=0.99,
        reference_rank=10,
        chance=0.1,
        rank=np.full(LAYERS, 1),
        angles=(np.array([0.0]),) * LAYERS,
        alignment=alignment,
        coefficient=coefficient,
        **dict.fromkeys((*rest, "mean_cosine", "cosine", "decodability"), one),
    ).to_dict()


def head_sets(inside: Inside, accuracy: float) -> HeadSets:
    order = [[layer, head] for layer in range(LAYERS) for head in range(HEADS)]
    curve = np.linspace(accuracy, CHANCE, len(order) + 1)
    return HeadSets(accuracy, CHANCE, 512, curve, curve, curve[None], order, order[: inside.needed], 0.9, accuracy)


def measured(inside: Inside, accuracy: float, noise: float) -> dict[str, Any]:
    """The four measures, as a run directory holds them; each number is a little off, by the seed's noise."""
    positions = np.zeros((LAYERS, HEADS))
    positions[1, 3], positions[3, 0] = np.array(inside.positions) + noise
    return {
        "seed": seed(inside, noise),
        "representation": representation(inside, noise),
        "position": ablation(positions, accuracy, "position").to_dict(),
        "sets": head_sets(inside, accuracy).to_dict(),
    }


@functools.cache
def made_up(key: Key, model: Model, noise: float = 0.0) -> CellResult:
    """The cell, not to be changed.

    As in the study, plain encodings on Task 1 are watched and measured, and of a run that diverged nothing is measured.
    """
    accuracy, gap = model.accuracy + noise, model.gap + noise
    inside = model.inside if key.task == DISTANCE and key.label in TITLES else None
    way = accuracy / 2 if model.way is None else model.way + noise
    complete = model.status == "complete"
    rows = [] if inside is None else [{"step": n, "signal": signals(inside.last, 0, noise).tolist()} for n in (0, 9)]
    return CellResult(
        key=key,
        run=f"{key}",
        status=model.status,
        chance=CHANCE,
        length_chance=CHANCE,
        parameters=1000,
        epochs=[
            {"epoch": n, "step": n, "train_accuracy": test + gap, "test_accuracy": test}
            for n, test in enumerate((way, accuracy), start=1)
        ],
        result={"test_accuracy": accuracy, "seconds": 1.0},
        ablation=ablation(model.drops, accuracy) if complete else None,
        measures=measured(inside, accuracy, noise) if complete and inside else {},
        watched=rows,
    )


def results(world: World, seeds: int = 3, spread: float = 0.002, protocol: Protocol = "paper") -> Results:
    """Each model of the world once a seed; the seeds differ a little around it, each encoding's in its own way."""
    rng = np.random.default_rng(0)
    cells = []
    for (task, label), model in world.items():
        noise = rng.uniform(-spread, spread, seeds)
        for number, shift in enumerate(noise - noise.mean()):
            cells.append(made_up(Key(protocol, task, label, number), model, float(shift)))
    return Results(cells)


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
