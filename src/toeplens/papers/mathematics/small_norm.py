"""Does the initialisation of a learned position table decide its learned geometry? (Ito et al. 2024, by its abstract)

A randomly initialised table has no order of positions: its geometry is learned. Here positions lie on a line or a grid
and hold a smooth random field (Gaussian, correlation exp(-δ²/2l²) at distance δ), quantised into equally likely levels.
A bidirectional one-layer decoder reads all levels but one, in random order and with their positions, and predicts the
missing one. This requires knowledge of the neighbours. The measure is Spearman's correlation, over all pairs of
positions, between the distances of their learned vectors and their true distances.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.special import ndtri
from torch import Tensor

from toeplens.lens.kit.intervals import spearman
from toeplens.model import Decoder, DecoderConfig
from toeplens.papers.mathematics.records import Record, Records, short
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.contrasts import difference, of_one
from toeplens.studies.kit.verdicts import RULE, Finding, above, unknown

NAME = "small_norm"
SIDES = {"line": (25,), "grid": (5, 5)}
STARTS = {"small": 0.1, "large": 1.0}  # standard deviation of the table's first entries
LEVELS, REACH = 8, 1.5
BATCH, STEPS, RATE = 64, 4000, 3e-3
TESTED = 2000
LEARNED = 0.75 * math.log(LEVELS)  # nats; the uniform baseline is ln 8
SOURCE = (
    "Learning interpretable positional encodings in transformers depends on initialization, abstract, among the "
    "related papers listed with arXiv 2511.11579"
)
_MIRRORS, _BETTER = 0.5, 0.2

Batch = tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, "B"]]


def distances(points: Float[np.ndarray, "N d"]) -> Float[np.ndarray, "pairs"]:
    """The distance of each pair of rows, once."""
    first, second = np.triu_indices(len(points), 1)
    return np.linalg.norm(points[first] - points[second], axis=1)


def coordinates(sides: tuple[int, ...]) -> Float[np.ndarray, "N d"]:
    """Coordinates of the positions of a line, a grid, ..."""
    return np.stack(np.meshgrid(*map(np.arange, sides), indexing="ij"), -1).reshape(-1, len(sides)).astype(float)


def fields(rng: np.random.Generator, points: Float[np.ndarray, "N d"], count: int) -> Iterator[Batch]:
    """Endless batches: levels in random order with the last one masked; their positions; the masked level."""
    apart = np.linalg.norm(points[:, None] - points[None], axis=-1)
    root = np.linalg.cholesky(np.exp(-(apart**2) / (2 * REACH**2)) + 1e-9 * np.eye(len(points)))
    cuts = ndtri(np.arange(1, LEVELS) / LEVELS)
    while True:
        levels = np.digitize(rng.normal(size=(count, len(points))) @ root.T, cuts)
        order = rng.permuted(np.tile(np.arange(len(points)), (count, 1)), axis=1)
        levels = np.take_along_axis(levels, order, 1)
        hidden = levels[:, -1].copy()
        levels[:, -1] = LEVELS
        yield torch.from_numpy(levels), torch.from_numpy(order), torch.from_numpy(hidden)


def trained(points: Float[np.ndarray, "N d"], start: float, seed: int, steps: int) -> dict[str, float]:
    """Train one model; returns the correlation of its table with the positions, and its test loss in nats."""
    rng = np.random.Generator(np.random.Philox(seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Decoder(_config(len(points), start))
        optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
        for _, batch in zip(range(steps), fields(rng, points, BATCH), strict=False):
            optimiser.zero_grad()
            _loss(model, batch).backward()
            optimiser.step()
    with torch.no_grad():
        loss = float(_loss(model, next(fields(rng, points, TESTED))))
        table = model.encoding.get_parameter("weight").double().numpy()
    mirrored = spearman(np.stack((distances(table), distances(points))))
    return {"mirrored": short(float(mirrored)), "loss": short(loss)}


def _config(size: int, start: float) -> DecoderConfig:
    sizes = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 4, "max_len": size, "dropout": 0.0}
    classes = {"vocab_size": LEVELS + 1, "num_classes": LEVELS, "readout": "last", "causal": False}
    return DecoderConfig.model_validate(
        sizes | classes | {"encoding": "learned", "encoding_options": {"init_std": start}}
    )


def _loss(model: Decoder, batch: Batch) -> Tensor:
    levels, positions, hidden = batch
    return torch.nn.functional.cross_entropy(model(levels, positions=positions), hidden)


def small_norm(seed: int, *, steps: int = STEPS) -> dict[str, Any]:
    """Train a model of each layout and each initialisation.

    Arguments
        seed   of weights and fields
        steps  of training

    Returns ``models``: the result of `trained` by layout and initialisation.
    """
    return {
        "seed": seed,
        "models": {
            layout: {start: trained(coordinates(sides), std, seed, steps) for start, std in STARTS.items()}
            for layout, sides in SIDES.items()
        },
    }


def _mirrored(records: Records, layout: str, start: str) -> dict[int, float]:
    """The correlation by seed, of the models that have learned."""
    models = {run["seed"]: run["models"][layout][start] for run in records.get(NAME, ())}
    return {seed: model["mirrored"] for seed, model in models.items() if model["loss"] < LEARNED}


def _check(records: Records) -> list[Finding]:
    findings = []
    runs: tuple[Record, ...] = tuple(records.get(NAME, ()))
    for layout in SIDES:
        small, large = (_mirrored(records, layout, start) for start in STARTS)
        away = 2 * len(runs) - len(small) - len(large)
        left_out = f" ({away} of {2 * len(runs)} models excluded: not learned)" if away else ""
        if not small or not large:
            findings.append(unknown(f"{layout}{left_out}", "no model has learned"))
            continue
        words = f"{layout}: rank correlation of learned and true distances, small initialisation"
        findings.append(above(words + left_out, of_one(small, 0.02), _MIRRORS))
        findings.append(above(f"{words} − large{left_out}", difference(small, large, grain=0.02), _BETTER))
    return findings


CLAIMS: tuple[Claim[Records], ...] = (
    Claim(
        "small-norm-interpretable",
        SOURCE,
        "A learned position table that is initialised with a small norm reflects the true positions in one and in "
        "several dimensions; the initialisation decides this.",
        f"With initial standard deviations of {STARTS['small']:g} and {STARTS['large']:g}, on a line and on a grid: "
        f"with the small one, the rank correlation between learned and true distances is above {_MIRRORS:g}, and "
        f"larger than with the large one by more than {_BETTER:g}. Models with a loss of at least {LEARNED:.2f} nats "
        f"do not count. The abstract gives no task; ours was chosen with a seed that is not in the record. {RULE}",
        _check,
    ),
)
