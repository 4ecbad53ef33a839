"""A grid study made up for the page's tests: every figure is random, nothing is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.studies import measures

from toeplens.lens import HeadAblation
from toeplens.studies import CellKey, CellResult, Claim, Finding, LedgerEntry, Results
from toeplens.studies.grid import GridSpec, GridStudy, grid_cells, grid_spec
from toeplens.studies.grid.measures import relations

LAYERS, HEADS, SEEDS = 2, 3, 2
FREQUENCIES = (1.0, 0.1, 0.0)  # radians a token; the last never turns
FACTORS = (1.0, 1.25, 1.5, 2.0, 4.0)
HOSTILE_NAME = "<script>alert('x')</script>&"
REASON = "labels: <b>a text so long</b> has other ones."
CHANCE, GUESS = 0.125, 0.2
UNSKILLED, HALF_DIVERGED, WITHOUT_WEIGHTS = ("index", "nope"), ("retrieval", "t5"), ("retrieval", "alibi")


def random_spec(**changes: Any) -> GridSpec:
    """Two tasks by four encodings, one encoding on one task alone, and a scan."""
    content = {
        "title": "Made up",
        "about": "Nothing was trained.",
        "seeds": SEEDS,
        "model": {"d_model": 24, "d_ff": 24, "num_layers": LAYERS, "num_heads": HEADS},
        "training": {"train_examples": 64, "test_examples": 32, "epochs": 1},
        "tasks": {
            "index": {"options": {"length": 10, "words": 8}, "watch": True},
            "retrieval": {"title": "find", "options": {"length": 10, "keys": 4, "values": 4, "pairs": 3}},
        },
        "encodings": {
            "alibi": {"title": "ALiBi"},
            "t5": {},
            "nope": {},
            "rope": {"title": "RoPE"},
            "mine": {"encoding": "rope-bands", "options": {"keep": [0]}, "tasks": ["index"]},
            "turn": {"title": "One turn", "encoding": "rope-bands", "scan": {"frequencies": [3.0, 0.001]}},
        },
    }
    return grid_spec(content | changes)


def _shares(rng: np.random.Generator) -> dict[str, Any]:
    made = rng.dirichlet((1, 1, 1), (LAYERS, HEADS))
    names = ("positional", "symbolic", "interaction")
    return {name: made[..., i].tolist() for i, name in enumerate(names)}


def _extrapolation(rng: np.random.Generator, accuracy: float) -> dict[str, Any]:
    rows = [
        measures.length_result(
            factor,
            accuracy * float(rng.uniform(0.4, 1)) if factor > 1 else accuracy,
            chance=CHANCE,
            length_chance=GUESS,
            baselines={"bag": 0.3, "last": 0.1} if factor == 1 else {},
        )
        for factor in FACTORS[:-1]
    ]
    rng.uniform()
    return measures.extrapolation([*rows, measures.length_result(FACTORS[-1], None, reason=REASON)])


def _cell(key: CellKey, *, accuracy: float, rotates: bool, watched: bool) -> CellResult:
    rng = np.random.default_rng(np.random.Philox(sum(map(ord, f"{key.task}{key.label}{key.seed}"))))
    drops = rng.uniform(-0.02, 0.9, (LAYERS, HEADS))
    curves = np.full((LAYERS, HEADS + 1), accuracy)
    shares = _shares(rng)
    shares["positional"][0][0] = shares["symbolic"][0][0] = shares["interaction"][0][0] = None  # a flat head
    reason = {"reason": "encoding: it does not turn."}
    use = measures.frequency([[list(FREQUENCIES)] * HEADS] * LAYERS, rng.uniform(-8, 0, (LAYERS, HEADS)))
    return CellResult(
        key=key,
        run="0" * 16,
        status="complete",
        chance=CHANCE,
        length_chance=GUESS,
        parameters=1000 + len(key.label),
        epochs=[
            {"seconds": 0.5, "test_accuracy": accuracy - (0.1 if (key.task, key.label) == UNSKILLED else 0)},
            {"seconds": (took := float(rng.uniform(1, 3))), "test_accuracy": accuracy},
        ],
        result={"test_accuracy": accuracy, "seconds": took},
        ablation=HeadAblation(drops, drops, drops, accuracy, curves, 64, CHANCE),
        by_loss=HeadAblation(3 * drops, 3 * drops, 3 * drops, 0.5, np.full_like(curves, np.nan), 64, CHANCE, "loss"),
        measures={
            "behaviour": measures.behaviour(**shares),
            "frequency": use if rotates else reason,
            "bands": measures.bands(rng.uniform(0, 1, (LAYERS, HEADS, len(FREQUENCIES)))) if rotates else reason,
            "toeplitz": measures.toeplitz(rng.uniform(0, 1, (LAYERS, HEADS))),
            "extrapolation": _extrapolation(rng, accuracy),
        },
        probe_rows=[{"step": step, "accuracy": step / 20, **_shares(rng)} for step in (0, 4, 12)] if watched else [],
    )


def _diverged(cell: CellResult) -> CellResult:
    gone = {"test_accuracy": None}
    return replace(cell, status="diverged", result=gone, ablation=None, by_loss=None, measures={}, probe_rows=[])


def random_grid(directory: Path, spec: GridSpec | None = None, finished: int | None = None) -> GridStudy:
    """Its first ``finished`` models (default: all); some of them without skill, some diverged."""
    spec = spec or random_spec()
    places = grid_cells(spec)
    rotating = {column.label for column in spec.columns() if column.encoding.startswith("rope")}
    result = []
    for at, place in enumerate(places[:finished]):
        key, pair = place.key, (place.key.task, place.key.label)
        accuracy = 0.25 if pair == UNSKILLED else 0.5 + 0.01 * (at % 40)
        cell = _cell(
            key,
            accuracy=accuracy,
            rotates=key.label in rotating,
            watched=key.task in spec.tasks and spec.tasks[key.task].watch,
        )
        gone = pair == WITHOUT_WEIGHTS or (pair == HALF_DIVERGED and key.seed == spec.first_seed)
        result.append(_diverged(cell) if gone else cell)
    results = Results(result)
    claim = Claim("all-well", "arXiv <0>", f"All is well, {HOSTILE_NAME}", "A rule & more.", lambda data: ())
    return GridStudy(
        directory=directory,
        spec=spec,
        results=results,
        entries=[LedgerEntry(claim, None, "holds in part", "holds in part", (Finding("holds", "evidence <1>"),))]
        if result
        else [],
        relations=relations(spec, results),
        finished=len(result),
        total=len(places),
        share=len(result) / len(places),
        environment={"command": "made up", "seconds": 12.5, "torch": "2"},
    )


def recorded_grid(directory: Path) -> GridStudy:
    """The same with all that training in two steps leaves of a model, so that it can be written down and read back."""
    state, results = random_grid(directory), []
    for cell in state.results.cells:
        accuracy = cell.result["test_accuracy"]
        rows = [{"epoch": n, "step": n, "train_accuracy": accuracy, "test_accuracy": accuracy} for n in (1, 2)]
        result = {"seconds": 1.0, "steps": 2, "test_loss": 0.5, **cell.result}
        results.append(replace(cell, epochs=rows, result=result))
    return replace(state, results=Results(results))
