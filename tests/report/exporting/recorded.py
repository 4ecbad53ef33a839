"""The made-up grid study with all that training leaves of a model, so that it can be written down and read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.report.grid.state import made_up_grid

from toeplens.studies import CellResult, Results
from toeplens.studies.grid import Grid


def _trained(cell: CellResult) -> CellResult:
    accuracy = cell.result["test_accuracy"]
    rows = [{"epoch": n, "step": n, "train_accuracy": accuracy, "test_accuracy": accuracy} for n in (1, 2)]
    return replace(cell, epochs=rows, result={"seconds": 1.0, "steps": 2, "test_loss": 0.5, **cell.result})


def recorded_grid(directory: Path) -> Grid:
    """Its models are trained in two steps."""
    state = made_up_grid(directory)
    return replace(state, results=Results(map(_trained, state.results.cells)))
