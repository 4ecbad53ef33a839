"""Results are found and kept, learning curves are read as a hand reckons, and tables hold the record's numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st
from tests.papers.deposit.synthetic_studies import SyntheticModel, make_cell, results, task1_models
from tests.report.grid.state import HEADS, HOSTILE_NAME, LAYERS, recorded_grid

from toeplens.studies import CellKey, CellResult, Results
from toeplens.studies.grid import GridStudy
from toeplens.studies.kit.results import ACCURACY, CELLS, CHECKPOINTS, CLAIMS, EPOCHS, FREQUENCIES, LENGTHS
from toeplens.studies.kit.results import HEADS as OF_HEADS
from toeplens.studies.kit.verdicts import above
from toeplens.training.presets import COUNT, DISTANCE
from toeplens.utils import InputError

value = st.integers(-100, 100).map(lambda n: n / 100)
KEY = CellKey("paper", DISTANCE, "rope", 0)


def curve(*rows: tuple[float, float], result: dict[str, Any] | None = None, **columns: Sequence[float]) -> CellResult:
    """A model whose guess from the length is 20 %, by train and test accuracy after each epoch."""
    told = [
        {"epoch": n, "train_accuracy": train, "test_accuracy": test, **{k: more[n - 1] for k, more in columns.items()}}
        for n, (train, test) in enumerate(rows, start=1)
    ]
    last = {"test_accuracy": rows[-1][1], "seconds": 1.0, **(result or {})}
    return replace(make_cell(KEY, SyntheticModel(0.5)), length_chance=0.2, epochs=told, result=last)


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ([0.6 + 1e-9], 1.0),  # half of what is over 20 % is learned at 60 %
        ([1.0], 0.5),  # in a straight line from the guess
        ([0.4, 0.8], 1.5),  # skill 0.25, then 0.75
        ([0.1, 0.2, 1.0], 2.5),  # what is under the guess is no skill either
        ([0.5, 0.3, 0.9], 2 + (0.5 - 0.125) / (0.875 - 0.125)),  # from where it fell to
        ([0.9, 0.1, 0.1], 0.5 / 0.875),  # the first time
        ([0.2, 0.3, 0.4, 0.5], 4.0),  # never: all its epochs
    ],
)
def test_the_half_learned_epoch_is_interpolated_linearly(train: list[float], expected: float) -> None:
    cell = curve(*((each, 0.5) for each in train))
    assert cell.half_learned == pytest.approx(math.log2(expected), abs=1e-8)
    assert cell.has_learned_half == (max(train) > 0.59)


def test_the_half_learned_epoch_uses_post_epoch_accuracy_if_recorded() -> None:
    rows = ((0.4, 0.5), (0.5, 0.6))
    assert curve(*rows, fit_accuracy=[0.6, 0.9]).half_learned == pytest.approx(0.0)
    partly = curve(*rows, fit_accuracy=[None, 0.8])  # type: ignore[list-item]
    assert partly.half_learned == pytest.approx(math.log2(1.5)), "where no example counted, the running one"


@pytest.mark.parametrize(
    ("test", "expected"),
    [([0.5], 0.0), ([0.3, 0.5, 0.9], 0.0), ([0.5, 0.4, 0.6, 0.3], 0.4), ([0.9, 0.8, 0.79], 0.1), ([0.5, 0.5], 0.0)],
)
def test_setbacks_are_the_significant_falls_in_accuracy(test: list[float], expected: float) -> None:
    assert curve(*((0.5, each) for each in test)).setbacks == pytest.approx(expected)


@pytest.mark.parametrize(
    ("test", "result", "expected"),
    [
        # without a rule of its run: under two points in the last epoch
        ([0.1, 0.5, 0.519], {}, True),
        ([0.5, 0.521], {}, False),
        ([0.9], {}, False),
        # by the run's rule, whatever the curve
        ([0.5, 0.5], {"plateau": None}, False),
        ([0.5, 0.9], {"plateau": 3}, True),
    ],
)
def test_learning_has_ended_by_the_runs_rule_or_two_points(
    test: list[float], result: dict[str, Any], expected: bool
) -> None:
    cell = curve(*((0.5, each) for each in test), result=result)
    assert cell.settled == expected
    assert not replace(cell, status="diverged").settled
    assert ACCURACY.is_defined(cell) == expected
    assert ACCURACY.is_defined(replace(cell, status="diverged")), "it is known to have no accuracy"


def test_skill_is_relative_to_the_length_only_baseline() -> None:
    assert curve((0.5, 0.6)).skill == pytest.approx(0.5)
    assert curve((0.5, 0.1)).skill == pytest.approx(-0.125)
    assert [curve((0.5, test)).is_skilled for test in (0.39, 0.41)] == [False, True]


@pytest.mark.parametrize("status", ["complete", "diverged"])
def test_a_cell_round_trips(status: str) -> None:
    for cell in results(task1_models(rope=SyntheticModel(0.8, status=status).single_head(0)), seeds=2).cells:
        restored = CellResult.from_dict(cell.to_dict())
        assert restored.to_dict() == cell.to_dict()
        assert restored.key == cell.key
        assert bool(cell.measures) == bool(cell.by_loss) == (status == "complete")


def test_a_comparison_without_models_gives_the_reason() -> None:
    rising, settled = SyntheticModel(0.9, settled=False), SyntheticModel(0.5)
    comparison = Results(results({(COUNT, "rope"): rising}, 3).cells + results({(COUNT, "nope"): settled}, 1).cells)
    actual = above("RoPE less NoPE", comparison.difference(COUNT, "rope", "nope"), 0.0)
    words = "no finished run that counts (3 of 3 and 0 of 1 models excluded: still learning)"
    assert actual.evidence == f"RoPE less NoPE: {words}"
    none = above("RoPE less ALiBi", comparison.difference(COUNT, "rope", "alibi"), 0.0)
    assert none.evidence.endswith(f"(no finished model of alibi on {COUNT})")


RESULTS = Path(__file__).parents[3] / "results"
CELL_COLUMNS = ["protocol", "task", "encoding", "seed"]
KINDS = {"cells": CELLS, "heads": OF_HEADS, "epochs": EPOCHS, "lengths": LENGTHS, "frequencies": FREQUENCIES}
KINDS |= {"checkpoints": CHECKPOINTS, "claims": CLAIMS}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> GridStudy:
    return recorded_grid(tmp_path_factory.mktemp("grid"))


@pytest.mark.parametrize("rows", KINDS)
def test_columns_are_the_documented_ones_whatever_was_measured(state: GridStudy, rows: str):
    text = (RESULTS.parent / "docs" / "how-to" / "export.md").read_text("utf-8")
    assert list(state.frames()) == list(KINDS)
    assert state.frames()[rows].schema == KINDS[rows]
    assert state.frame(rows) == state.frames()[rows]
    assert [name for name in KINDS[rows].names if f"`{name}`" not in text] == []
    assert rows == "claims" or KINDS[rows].names[:4] == CELL_COLUMNS


def test_cells_have_the_numbers_of_the_record(state: GridStudy):
    cells = [cell for cell in state.results.cells if cell.status == "complete"]
    rows = [row for row in state.frame("cells").to_pylist() if row["status"] == "complete"]
    for row, cell in zip(rows, cells, strict=True):
        assert tuple(row[name] for name in CELL_COLUMNS) == _key(cell)
        assert (row["accuracy"], row["loss"]) == (cell.result["test_accuracy"], cell.result["test_loss"])
        assert (row["skill"], row["guess"], row["steps"]) == (cell.skill, cell.length_chance, cell.result["steps"])
        place = cell.deposits()[row["peak_layer"]]
        assert (place.peak, place.head) == (row["peak"], row["peak_head"])
        assert row["peak"] == max(layer.peak for layer in cell.deposits())


def test_heads_have_one_row_per_layer_and_head(state: GridStudy):
    cell = state.results.cells_of("index", "rope")[0]
    rows = [row for row in state.frame("heads").to_pylist() if tuple(row[name] for name in CELL_COLUMNS) == _key(cell)]
    assert [(row["layer"], row["head"]) for row in rows] == [(i, j) for i in range(LAYERS) for j in range(HEADS)]
    for name, values in (("drop", cell.ablation.drops), ("positional", cell.measure("behaviour").positional)):
        np.testing.assert_array_equal(np.array([row[name] for row in rows], dtype=float), values.ravel())


def _key(cell) -> tuple:
    return cell.key.protocol, cell.key.task, cell.key.label, cell.key.seed


def test_other_frames_have_one_row_per_recorded_value(state: GridStudy):
    assert state.frame("epochs").num_rows == sum(len(cell.epochs) for cell in state.results.cells)
    cell = next(cell for cell in state.results.cells if cell.measure("extrapolation") is not None)
    rows = [
        row for row in state.frame("lengths").to_pylist() if tuple(row[name] for name in CELL_COLUMNS) == _key(cell)
    ]
    expected = [(row.length, row.accuracy) for row in cell.measure("extrapolation").rows if row.examples]
    assert [(row["length"], row["accuracy"]) for row in rows] == expected
    rows = state.frame("claims").to_pylist()
    verdicts = [(entry.claim.id, entry.protocol, entry.verdict) for entry in state.entries]
    assert [(row["claim"], row["protocol"], row["verdict"]) for row in rows] == verdicts
    assert any(HOSTILE_NAME in row["statement"] + row["evidence"] for row in rows)


def test_a_diverged_model_has_no_accuracy(state: GridStudy):
    cell = replace(curve((0.9, 0.9)), status="diverged")
    assert np.isnan([cell.accuracy, cell.skill, cell.half_learned, cell.setbacks, cell.fit_accuracy]).all()
    assert not cell.is_skilled
    assert not cell.has_learned_half
    gone = [row for row in state.frame("cells").to_pylist() if row["status"] == "diverged"]
    assert gone
    assert all(row["accuracy"] is row["loss"] is row["skill"] is row["peak"] is None for row in gone)
    frame = state.frame("cells")
    floats = [column for column in frame.columns if pa.types.is_floating(column.type)]
    assert not any(isnan(value) for column in floats for value in column.drop_null().to_pylist())


def test_missing_rows_are_refused(state: GridStudy):
    with pytest.raises(InputError, match=r"^rows must be .*, got 'head'; did you mean 'heads'\?"):
        state.results.frame("head")
