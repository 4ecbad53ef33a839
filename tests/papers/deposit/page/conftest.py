"""Studies made up for the report's tests: every figure is random, nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.papers.deposit.worlds import Inside
from tests.papers.deposit.worlds import measured as measured_inside

from toeplens.lens import HeadAblation
from toeplens.model import Protocol
from toeplens.papers.deposit import Plan, Reproduction, accuracy_table, chosen_parts, claims_of
from toeplens.papers.deposit.spec import Label
from toeplens.studies import Cell, CellResult, Key, Results, judge
from toeplens.training.presets import DISTANCE, PROTOCOLS

ENVIRONMENT = {
    "command": "toeplens reproduce --scale smoke --out study",
    "cores": 2,
    "execution": "cpu, float32, eager (asked for)",
    "gpu": None,
    "numpy": "2",
    "platform": "Linux",
    "processor": "a processor",
    "python": "3.11",
    "torch": "2.13",
    "toeplens": "0.1.0",
    "seconds": 12.5,
}


def ablation(rng: np.random.Generator, layers: int, heads: int, accuracy: float, chance: float) -> HeadAblation:
    """An ablation with a few heads that matter."""
    drops = accuracy * rng.beta(0.4, 1.5, size=(layers, heads)) - 0.01
    falls = np.sort(drops, axis=1)[:, ::-1].cumsum(axis=1)
    curves = np.clip(accuracy - np.pad(falls, ((0, 0), (1, 0))), chance, None)
    return HeadAblation(drops, drops - 0.02, drops + 0.02, accuracy, curves, 512, chance)


def watched(found: HeadAblation) -> list[dict[str, Any]]:
    """Drops that grow to what they are in the end."""
    return [
        {
            "step": round(80 * share),
            "seconds": 0.1,
            "accuracy": found.baseline * share,
            "loss": 1.0,
            "drops": (found.drops * share**2).tolist(),
            "exponent": (found.drops * share - 0.5).tolist(),
        }
        for share in (0.0, 0.25, 0.5, 1.0)
    ]


def cell_result(cell: Cell, *, diverged: bool = False, measured: bool = False) -> CellResult:
    """A finished cell, with numbers drawn from its name; ``measured`` adds measures and what was watched."""
    spec, rng = cell.job.spec, np.random.default_rng(int(cell.job.spec.name, 16))
    chance, accuracy = spec.chance, float(rng.uniform(0.1, 1))
    curve = accuracy * np.linspace(0.3, 1, spec.epochs)
    epochs: list[dict[str, Any]] = [
        {"epoch": i + 1, "train_accuracy": float(value) * 0.95, "test_accuracy": float(value)}
        for i, value in enumerate(curve)
    ]
    result = {"test_accuracy": accuracy, "train_accuracy": accuracy * 0.95, "seconds": 1.5, "status": "complete"}
    if diverged:
        epochs = [{"epoch": 1, "train_accuracy": 0.1, "test_accuracy": 0.05}]
        result = {"status": "diverged", "seconds": 1.5, "test_accuracy": None, "train_accuracy": None}
    layers, heads = spec.model.num_layers, spec.model.num_heads
    found = None if diverged else ablation(rng, layers, heads, accuracy, chance)
    measures = {}
    if measured and found:
        made = measured_inside(Inside(), accuracy, noise=float(rng.normal(0, 0.01)))
        measures = {name: made[name] for name in ("position", "representation", "sets", "seed")}
    return CellResult(
        key=cell.key,
        run=spec.name,
        status="diverged" if diverged else "complete",
        chance=chance,
        length_chance=max(spec.build_task().length_chance(), chance),
        parameters=12345,
        epochs=epochs,
        result=result,
        ablation=found,
        measures=measures,
        watched=watched(found) if measured and found else [],
    )


def synthetic(
    directory: Path,
    *,
    scale: str = "smoke",
    protocols: Sequence[Protocol] = PROTOCOLS,
    seeds: int = 1,
    finished: int | None = None,
    diverged: Collection[Key] = (),
    parts: Sequence[str] = ("core",),
    measured: bool = False,
) -> Reproduction:
    """A study's state: the first ``finished`` cells of its grid (all unless given), some of them diverged.

    ``measured`` adds measures and what was watched to the plain encodings of Task 1.
    """
    plan = Plan(scale, tuple(protocols), seeds, chosen_parts(parts))
    cells = plan.cells()
    shown = cells[:finished]
    results = Results(
        cell_result(
            cell,
            diverged=cell.key in diverged,
            measured=measured and cell.key.task == DISTANCE and not Label.parse(cell.key.label).variant,
        )
        for cell in shown
    )
    return Reproduction(
        directory=directory,
        plan=plan,
        results=results,
        entries=judge(claims_of(plan.parts), results, plan.protocols),
        table=accuracy_table(results, plan.protocols),
        finished=len(shown),
        total=len(cells),
        share=len(shown) / len(cells),
        environment=dict(ENVIRONMENT),
    )


@pytest.fixture(scope="session")
def make_study() -> Callable[..., Reproduction]:
    """Makes synthetic studies; see `synthetic`."""
    return synthetic
