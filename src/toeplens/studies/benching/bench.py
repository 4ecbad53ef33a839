"""The contests, one after another, and their record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from toeplens.ground import choose, write_json
from toeplens.ground.machine import within
from toeplens.studies.benching import looking, training
from toeplens.studies.benching.race import matrix_peak
from toeplens.studies.benching.record import BenchRecord, Contest
from toeplens.training import environment, plan_execution

RECORD = "bench.json"
CONTESTS = ("training", "ablation", "profile")
SCALES = ("laptop", "desk", "paper")


def bench(
    *,
    device: str = "auto",
    contests: Sequence[str] = CONTESTS,
    scales: Sequence[str] = SCALES,
    rounds: int = 20,
    seconds: float = 30.0,
    on_contest: Callable[[Contest], None] = lambda contest: None,
) -> BenchRecord:
    """Time our programs against others, on this machine.

    Arguments
        device      ``auto``, ``cpu`` or ``cuda``
        contests    of `CONTESTS`
        scales      shapes of the models: ``laptop``, ``desk``, ``paper``
        rounds      of each contest, at most
        seconds     after which no further round of a contest is begun, three at least being done
        on_contest  told of each as it ends
    """
    chosen = [choose("contest", each, CONTESTS) for each in contests]
    shapes = tuple(choose("scale", each, SCALES) for each in scales)
    within("rounds", rounds, 3, 1000)
    execution = plan_execution(device, "off", "float32")
    there = execution.device
    peak = matrix_peak(there, torch.bfloat16 if there.type == "cuda" else torch.float32)
    found: list[Contest] = []
    missing: list[str] = []

    def add(contest: Contest) -> None:
        found.append(contest)
        on_contest(contest)

    if "training" in chosen:
        for contest, absent in training.contests(there, shapes, rounds, seconds):
            missing = absent
            add(contest)
    if "ablation" in chosen:
        for scale in shapes:
            add(looking.ablation(there, scale, rounds, seconds))
    if "profile" in chosen:
        add(looking.profile(there, rounds, seconds))
    return BenchRecord(
        environment=environment(execution),
        device=there.type,
        peak=peak,
        missing=tuple(missing),
        contests=tuple(found),
    )


def save_bench(record: BenchRecord, directory: Path) -> Path:
    """Write ``bench.json`` in a directory; returns its path."""
    path = directory / RECORD
    write_json(path, record.to_dict())
    return path
