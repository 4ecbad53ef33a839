"""What is measured inside a made-up model, told in a few numbers and written as records of measures."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.studies.measures import extrapolation, longer

from toeplens.engine.measures import Spectra
from toeplens.lens import FrequencyRecord, HeadAblation, HeadSets, PositionalDrift, Representation, SeedStrength
from toeplens.lens.gradients import LevelSignal, Strength
from toeplens.lens.toeplitz.spectrum import BiasSpread

LAYERS, HEADS, PAIRS, CHANCE = 4, 4, 4, 0.1
NAN = float("nan")
RISING, FALLING = (1.5, 2.0, 3.0, 4.0), (4.0, 3.0, 2.0, 1.5)


@dataclass(frozen=True)
class Inside:
    """What is measured inside a made-up model; unless told otherwise, what the papers say of RoPE.

    logits, parameters  fixed share of the positional gradient in the first layer; NaN: there is no gradient
    drift               the mean relative drift of the first layer's heads
    first, last         how far each layer's best head leads, at initialisation and after training
    leader, rest        which head leads, and the signals of the others
    alignment           of the stream's position part with the input's, after layer 2; a tenth of it is chance
    coefficient         of the same on the input's vectors
    deepest             of the same after the last layer
    readable            R2 of reading the position off the stream, after layer 2 and later
    positions           drops by taking position from one head: the largest, in the first layer, and the second
    worked              which head of the first layer that is
    needed, positional  how many heads suffice, and how many have to keep their position
    norm, massive       what the most used pair of the costliest head has of the norms; its largest dimension of energy
    bands               how many pairs the heads of the first layer, and of later ones, use
    kept                share of the skill kept on texts of one and a half times the length
    width               doublings of the first layer's spectral range by position, at initialisation
    bias                spread of a learned bias
    """

    logits: float = 0.5
    parameters: float = 0.5
    drift: float = 1.0
    first: tuple[float, ...] = FALLING
    last: tuple[float, ...] = FALLING
    leader: int = 0
    rest: tuple[float, ...] = (1.0, 1.0, 1.0)
    alignment: float = 0.12
    coefficient: float = 0.02
    deepest: float = 0.0
    readable: float = 0.3
    positions: tuple[float, float] = (0.5, 0.02)
    worked: int = 0
    needed: int = 2
    positional: int = 1
    norm: float = 0.7
    massive: float = 0.7
    bands: tuple[int, int] = (1, 3)
    kept: float = 0.5
    width: float = 0.0
    bias: float = 1.0


def ablation(drops: Any, baseline: float, metric: Any = "accuracy", intervention: Any = "zero") -> HeadAblation:
    """Heads whose harm adds up within a layer; without any head a layer carries nothing. Each drop is certain."""
    lost = np.asarray(drops, dtype=float)
    told = np.cumsum(-np.sort(-lost, axis=1), axis=1)
    curve = np.clip(np.concatenate((np.zeros((len(lost), 1)), told), axis=1), 0, None)
    curve[:, -1] = baseline - CHANCE
    whole = np.clip(baseline - curve, 0, None) if metric == "accuracy" else np.full_like(curve, NAN)
    return HeadAblation(lost, lost, lost, baseline, whole, 1000, CHANCE, metric, intervention)


def signals(inside: Inside, leads: tuple[float, ...], leader: int, noise: float) -> np.ndarray:
    """[L, H] one head leads the rest by these factors; the noise is of another size in each layer."""
    rest = np.tile(inside.rest, (LAYERS, 1))
    return np.insert(rest, leader, np.array(leads) * (1 + noise * np.arange(1, LAYERS + 1)), axis=1)


def level_seed(share: float, signal: np.ndarray) -> LevelSignal:
    """The share is that of the first layer, and of its heads in the mean; one head has no gradient at all."""
    heads, layers = np.full((LAYERS, HEADS), 0.9), np.full(LAYERS, 0.9)
    heads[0], layers[0] = [NAN, 0.5 * share, share, 1.5 * share], share

    def strength(shares: np.ndarray) -> Strength:
        curve = np.stack((shares, shares), axis=-1)
        return Strength(curve, shares, shares, shares, shares, shares, shares)

    return LevelSignal(strength(heads), strength(layers), np.stack((signal, 0 * signal), axis=-1))


@functools.cache
def seed(inside: Inside, noise: float) -> dict[str, Any]:
    signal = signals(inside, inside.first, inside.leader, noise)
    levels = {name: level_seed(getattr(inside, name) * (1 + noise), signal) for name in ("logits", "parameters")}
    drift = np.full((LAYERS, HEADS), 99.0)
    drift[0] = np.array([0.5, 1.0, 2.0, 0.5]) * (inside.drift + noise) / 2
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
        coefficient=np.append(coefficient[:-1], inside.deepest + noise),
        decodability=np.array([1.0, 1.0, inside.readable + noise - 0.1, inside.readable + 0.1]),
        **dict.fromkeys((*rest, "mean_cosine", "cosine"), one),
    ).to_dict()


def head_sets(needed: int, accuracy: float) -> HeadSets:
    order = [[layer, head] for layer in range(LAYERS) for head in range(HEADS)]
    curve = np.linspace(accuracy, CHANCE, len(order) + 1)
    return HeadSets(accuracy, CHANCE, 512, curve, curve, curve[None], order, order[:needed], 0.9, accuracy)


@functools.cache
def frequency(inside: Inside, noise: float) -> dict[str, Any]:
    """A little more of the variance is in the first of the pairs that are used; the first has the norm too."""
    logits = np.zeros((LAYERS, HEADS, PAIRS + 2))
    logits[0, :, 1 : 1 + inside.bands[0]] = 1 / inside.bands[0]
    logits[1:, :, 1 : 1 + inside.bands[1]] = 1 / inside.bands[1]
    logits[..., 1] += 0.001 + abs(noise)
    norms = np.zeros((LAYERS, HEADS, PAIRS + 1))
    norms[..., 1:] = (1 - inside.norm) / (PAIRS - 1)
    norms[..., 1] = inside.norm
    turns = np.broadcast_to(2.0 ** -np.arange(PAIRS), (LAYERS, HEADS, PAIRS))
    massive = np.stack((np.full((LAYERS, HEADS), 0.2), np.full((LAYERS, HEADS), inside.massive)))
    one = np.ones((LAYERS, HEADS))
    softmax = logits[..., ::-1]  # of the weights another pair is the most used
    return FrequencyRecord(tuple(range(LAYERS)), turns, norms, logits, softmax, one, one, massive).to_dict()


def bias(inside: Inside, noise: float) -> dict[str, Any]:
    return BiasSpread(8, np.full((LAYERS, HEADS), inside.bias * 2**noise)).to_dict()


def measured(inside: Inside, accuracy: float, noise: float) -> dict[str, Any]:
    """The measures of Task 1's plain encodings, as a run directory holds them; most are a seed's noise off."""
    positions = np.zeros((LAYERS, HEADS))
    positions[0, inside.worked], positions[3, 0] = np.array(inside.positions) + noise
    guess: dict[str, Any] = {"chance": CHANCE, "length_chance": CHANCE}
    far = CHANCE + inside.kept * (accuracy - CHANCE)
    width = np.full((LAYERS, HEADS), 2.0 ** (inside.width + noise))
    width[1:] = 2.0 ** -(inside.width + noise)  # the first layer's is asked
    return {
        "seed": seed(inside, noise),
        "representation": representation(inside, noise),
        "position": ablation(positions, accuracy, intervention="position").to_dict(),
        "sets": head_sets(inside.needed, accuracy).to_dict(),
        "position-sets": head_sets(inside.positional, accuracy).to_dict(),
        "frequency": frequency(inside, noise),
        "extrapolation": extrapolation([longer(1.0, accuracy, **guess), longer(1.5, far, **guess)]),
        "contraction": Spectra(width, np.ones_like(width)).to_dict(),
    }
