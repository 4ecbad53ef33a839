"""Learned tables of positions: the fields they learn from, the distances they are held against, and the verdict."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from toeplens.papers.mathematics import small_norm
from toeplens.papers.mathematics.small_norm import LEARNED, LEVELS, REACH, SIDES, STARTS, coordinates, distances, fields
from toeplens.studies import judge_all
from toeplens.studies.kit.verdicts import Verdict


def test_distances_in_a_loop() -> None:
    points = coordinates((2, 3))
    assert points.tolist() == [[a, b] for a in range(2) for b in range(3)]
    wanted = [math.dist(points[a], points[b]) for a, b in combinations(range(6), 2)]
    assert distances(points) == pytest.approx(wanted)


def test_fields_are_smooth_even_and_hide_their_last_level() -> None:
    points = coordinates((3, 3))
    levels, order, hidden = (values.numpy() for values in next(fields(np.random.default_rng(0), points, 20_000)))
    assert (levels[:, -1] == LEVELS).all()
    assert (np.sort(order, axis=1) == np.arange(9)).all()
    levels[:, -1] = hidden
    shares = np.bincount(levels.ravel(), minlength=LEVELS) / levels.size
    assert np.abs(shares - 1 / LEVELS).max() < 0.01
    text = np.empty_like(levels)
    np.put_along_axis(text, order, levels, 1)
    found = np.corrcoef(text.T)
    for first, second in combinations(range(9), 2):
        wanted = math.exp(-(math.dist(points[first], points[second]) ** 2) / (2 * REACH**2))
        assert found[first, second] == pytest.approx(wanted, abs=0.06), "levels of equal shares keep most of it"


def test_a_model_of_one_seed_is_always_the_same() -> None:
    points = coordinates((3, 2))
    first, second, other = (small_norm.trained(points, 0.1, seed, 5) for seed in (1, 1, 2))
    assert first == second != other


@pytest.mark.heavy
def test_a_short_training_brings_neighbours_together() -> None:
    points = coordinates((4, 4))
    before, after = (small_norm.trained(points, 0.1, 0, steps) for steps in (1, 1000))
    assert before["mirrored"] < 0.4 < 0.7 < after["mirrored"]
    assert after["loss"] < LEARNED < before["loss"]


def _records(small: float, large: float, loss: float = 1.1, seeds: int = 5) -> dict[str, Any]:
    def model(mirrored: float, seed: int) -> dict[str, float]:
        return {"mirrored": mirrored + 0.01 * (seed - 2), "loss": loss}

    return {
        "small_norm": [
            {
                "seed": seed,
                "models": {
                    layout: {start: model({"small": small, "large": large}[start], seed) for start in STARTS}
                    for layout in SIDES
                },
            }
            for seed in range(seeds)
        ]
    }


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (_records(0.8, 0.1), "holds"),
        (_records(0.8, 0.75), "fails"),
        (_records(0.3, 0.0), "fails"),
        (_records(0.8, 0.6), "undecided"),
        (_records(0.8, 0.1, seeds=3), "leans to hold"),
        (_records(0.8, 0.1, loss=2.0), "undecided"),
        ({}, "undecided"),
    ],
)
def test_the_verdict_follows_the_tables(records: dict[str, Any], expected: Verdict) -> None:
    (entry,) = judge_all(small_norm.CLAIMS, records)
    assert entry.verdict == expected
