"""Studies whose every number can be reckoned by hand: chance is 10 %, a guess from the length alone 20 %."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from toeplens.lens import HeadAblation
from toeplens.model import Protocol
from toeplens.studies import CellResult, Key
from toeplens.training.presets import DISTANCE

CHANCE, LENGTH = 0.1, 0.2
Rows = Sequence[Sequence[float]]


def ablated(drops: Rows, curves: Rows) -> HeadAblation:
    """Heads that drop this much; the interval reaches from 3 points below to 5 above."""
    lost = np.array(drops)
    return HeadAblation(lost, lost - 0.03, lost + 0.05, curves[0][0], np.array(curves), 400, CHANCE)


def made(key: Key, learned: Sequence[float], ablation: HeadAblation | None, **more: Any) -> CellResult:
    """A model by its test accuracies, epoch by epoch; it is 5 points better on the training set."""
    rows = [{"epoch": n, "train_accuracy": test + 0.05, "test_accuracy": test} for n, test in enumerate(learned, 1)]
    result = {**rows[-1], "seconds": 2.0}
    told = {"status": "complete", "parameters": 1000, "run": f"{key.label}-{key.seed}"} | more
    return CellResult(
        key=key, chance=CHANCE, length_chance=LENGTH, epochs=rows, result=result, ablation=ablation, **told
    )


def reproduced(protocol: Protocol = "paper") -> list[CellResult]:
    """RoPE twice, in the first model with a single head in layer 1, in the second in layer 2; NoPE once, diverged once.

    Their deposits are single-head and redundant; few-head and single-head.
    """
    first = ablated([[0.5, 0.1], [0.05, -0.02]], [[0.9, 0.4, 0.3], [0.9, 0.85, 0.8]])
    second = ablated([[0.2, 0.1], [0.0, 0.3]], [[0.7, 0.5, 0.35], [0.7, 0.4, 0.4]])
    weak = ablated([[0.04, 0.0], [0.0, 0.0]], [[0.28, 0.24, 0.24], [0.28, 0.28, 0.28]])
    rope, nope = ([Key(protocol, DISTANCE, label, seed) for seed in (42, 43)] for label in ("rope", "nope"))
    return [
        made(rope[0], (0.5, 0.8, 0.9), first),
        made(rope[1], (0.3, 0.6, 0.7), second),
        made(nope[0], (0.2, 0.26, 0.28), weak),
        made(nope[1], (0.2, 0.05), None, status="diverged"),
    ]
