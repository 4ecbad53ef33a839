"""How the learning rate goes with the steps."""

from __future__ import annotations

import math
from collections.abc import Callable

from toeplens.training.spec import RunSpec


def cosine_with_warmup(warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Learning-rate factor by step: linear from 0 over the warm-up, then a half cosine to 0."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, total_steps - warmup_steps)))

    return factor


def constant_with_warmup(warmup_steps: int) -> Callable[[int], float]:
    """Learning-rate factor by step: linear from 0 over the warm-up, then 1."""
    return lambda step: step / warmup_steps if step < warmup_steps else 1.0


def learning_rate(spec: RunSpec) -> Callable[[int], float]:
    """The run's learning rate by the number of steps done."""
    warmup = int(spec.warmup * spec.total_steps)
    constant = spec.schedule == "constant"
    factor = constant_with_warmup(warmup) if constant else cosine_with_warmup(warmup, spec.total_steps)
    return lambda step: spec.lr * factor(step)
