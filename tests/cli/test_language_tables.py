"""What the command line prints of a grid study's language models: their bits, and no accuracies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.report.grid.language_state import language_grid
from tests.report.grid.state import made_up_grid

from toeplens.cli import tables


def test_language_models_are_told_by_their_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = language_grid(tmp_path)
    tables.print_study(state, tmp_path / "report.html", tables.matrix_tables(state), as_json=False)
    told = capsys.readouterr().out
    lines = [line for line in told.splitlines() if line.startswith("│")]
    assert [line.split("│")[1].strip() for line in lines] == ["RoPE", "p-RoPE", "T5", "ALiBi", "Sinusoid", "NoPE"]
    cells = [cell.strip() for cell in lines[3].split("│")[2:7]]
    assert cells == ["2.080", "2.076–2.084", "−0.020", "50.0", "35.0"]
    assert "Counting tokens, without a model: 4.600 with 0 before" in told
    assert "accuracy" not in told


def test_their_rows_are_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = language_grid(tmp_path)
    tables.print_study(state, tmp_path / "report.html", rows=state.matrix(), as_json=True)
    content = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in content["language"]][:2] == ["rope", "p-rope"]
    assert content["language"][0]["task"] == "language"
    assert content["language"][0]["bits"] == pytest.approx(2.05)


def test_other_tasks_keep_their_accuracies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = made_up_grid(tmp_path)
    assert [table.title for table in tables.matrix_tables(other)] == ["Test accuracy (%), mean over seeds"]
    tables.print_study(other, tmp_path / "report.html", as_json=True)
    assert "language" not in json.loads(capsys.readouterr().out)
