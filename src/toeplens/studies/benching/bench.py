"""The contests, one after another, and their record."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import torch

from toeplens.ground import choose, write_json
from toeplens.ground.machine import within
from toeplens.studies.benching import looking, reading, training
from toeplens.studies.benching.race import matrix_peak
from toeplens.studies.benching.record import BenchRecord, Contest, not_negative
from toeplens.training import environment, plan_execution
from toeplens.training.spec import Precision

RECORD = "bench.json"
CONTESTS = ("training", "ablation", "profile", "audit")
SCALES = ("laptop", "desk", "paper")
SHAPES = (*SCALES, training.LANGUAGE)


def bench(
    audit: reading.Audit,
    *,
    device: str = "auto",
    precision: str = "auto",
    contests: Sequence[str] = CONTESTS,
    scales: Sequence[str] = SHAPES,
    rounds: int = 20,
    seconds: float = 30.0,
    on_contest: Callable[[Contest], None] = lambda contest: None,
) -> BenchRecord:
    """Time our programs against others, on this machine.

    Arguments
        audit       `toeplens.studies.audit`, which takes part: a room of studies knows no other
        device      ``auto``, ``cpu`` or ``cuda``
        precision   of matrix products, for all programs: ``auto`` (bfloat16 on a GPU), ``float32`` or ``bf16``
        contests    of `CONTESTS`
        scales      shapes of the models: ``laptop``, ``desk``, ``paper``; of training also ``language``, whose models
                    are read at each position
        rounds      of each contest, at most
        seconds     after which no further round of a contest is begun, three at least being done
        on_contest  told of each as it ends

    Raises `InputError` for what there is not, and `EnvironmentFailure` where the audit and the reader that was written
    by hand find different numbers.
    """
    chosen = [choose("contest", each, CONTESTS) for each in contests]
    shapes = tuple(choose("scale", each, SHAPES) for each in scales)
    within("rounds", rounds, 3, 1000)
    not_negative("seconds", seconds)
    asked: Precision = choose("precision", precision, get_args(Precision))  # type: ignore[assignment]
    execution = plan_execution(device, "auto", asked)
    there = execution.device
    peak = matrix_peak(there, torch.bfloat16 if execution.bf16 else torch.float32)
    found: list[Contest] = []
    missing: list[str] = []

    def add(contest: Contest) -> None:
        found.append(contest)
        on_contest(contest)

    if "training" in chosen:
        for contest, absent in training.contests(execution, shapes, rounds, seconds):
            missing = absent
            add(contest)
    if "ablation" in chosen:
        for scale in (each for each in shapes if each in SCALES):
            add(looking.ablation(there, scale, rounds, seconds))
    if "profile" in chosen:
        add(looking.profile(there, rounds, seconds))
    if "audit" in chosen:
        if importlib.util.find_spec("transformers") is None:
            missing = [*missing, "transformers (of the audit)"]
        else:
            add(reading.audits(audit, there, rounds, seconds))
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
