"""Tables of a study: the record's numbers under names that stay, null where nothing is known, for other programs."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.report.grid.state import HEADS, LAYERS, NASTY, recorded_grid

from toeplens.ground import InputError
from toeplens.studies.grid import Grid
from toeplens.studies.kit.results import CELLS, CLAIMS, EPOCHS, LENGTHS
from toeplens.studies.kit.results import HEADS as OF_HEADS

RESULTS = Path(__file__).parents[3] / "results"
PLACE = ["protocol", "task", "encoding", "seed"]
KINDS = {"cells": CELLS, "heads": OF_HEADS, "epochs": EPOCHS, "lengths": LENGTHS, "claims": CLAIMS}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    return recorded_grid(tmp_path_factory.mktemp("grid"))


@pytest.mark.parametrize("rows", KINDS)
def test_columns_are_those_that_are_documented_whatever_was_measured(state: Grid, rows: str):
    text = (RESULTS.parent / "docs" / "how-to" / "export.md").read_text("utf-8")
    assert state.frame(rows).schema == KINDS[rows]
    assert [name for name in KINDS[rows].names if f"`{name}`" not in text] == []
    assert rows == "claims" or KINDS[rows].names[:4] == PLACE


def test_cells_have_the_numbers_of_the_record(state: Grid):
    cells = [cell for cell in state.results.cells if cell.status == "complete"]
    rows = [row for row in state.frame("cells").to_pylist() if row["status"] == "complete"]
    for row, cell in zip(rows, cells, strict=True):
        assert [row[name] for name in PLACE] == [cell.key.protocol, cell.key.task, cell.key.label, cell.key.seed]
        assert (row["accuracy"], row["loss"]) == (cell.result["test_accuracy"], cell.result["test_loss"])
        assert (row["skill"], row["guess"], row["steps"]) == (cell.skill, cell.length_chance, cell.result["steps"])
        place = cell.deposits()[row["peak_layer"]]
        assert (place.peak, place.head) == (row["peak"], row["peak_head"])
        assert row["peak"] == max(layer.peak for layer in cell.deposits())


def test_heads_are_a_row_a_layer_and_head(state: Grid):
    cell = state.results.of("index", "rope")[0]
    rows = [row for row in state.frame("heads").to_pylist() if tuple(row[name] for name in PLACE) == _key(cell)]
    assert [(row["layer"], row["head"]) for row in rows] == [(i, j) for i in range(LAYERS) for j in range(HEADS)]
    for name, values in (("drop", cell.ablation.drops), ("positional", cell.measure("behaviour").positional)):
        np.testing.assert_array_equal(np.array([row[name] for row in rows], dtype=float), values.ravel())


def _key(cell) -> tuple:
    return cell.key.protocol, cell.key.task, cell.key.label, cell.key.seed


def test_epochs_and_lengths_are_rows_of_what_was_evaluated(state: Grid):
    assert state.frame("epochs").num_rows == sum(len(cell.epochs) for cell in state.results.cells)
    cell = next(cell for cell in state.results.cells if cell.measure("extrapolation") is not None)
    rows = [row for row in state.frame("lengths").to_pylist() if tuple(row[name] for name in PLACE) == _key(cell)]
    wanted = [(row.length, row.accuracy) for row in cell.measure("extrapolation").rows if row.examples]
    assert [(row["length"], row["accuracy"]) for row in rows] == wanted


def test_a_diverged_model_has_no_accuracy(state: Grid):
    gone = [row for row in state.frame("cells").to_pylist() if row["status"] == "diverged"]
    assert gone
    assert all(row["accuracy"] is row["loss"] is row["skill"] is row["peak"] is None for row in gone)
    frame = state.frame("cells")
    floats = [column for column in frame.columns if pa.types.is_floating(column.type)]
    assert not any(isnan(value) for column in floats for value in column.drop_null().to_pylist())


def test_claims_are_a_row_a_verdict(state: Grid):
    rows = state.frame("claims").to_pylist()
    assert [(row["claim"], row["protocol"], row["verdict"]) for row in rows] == [
        (entry.claim.id, entry.protocol, entry.verdict) for entry in state.entries
    ]
    assert any(NASTY in row["statement"] + row["evidence"] for row in rows)


def test_rows_that_there_are_not_are_refused(state: Grid):
    with pytest.raises(InputError, match=r"^rows must be .*, got 'head'; did you mean 'heads'\?"):
        state.results.frame("head")
