"""Tables as wide as the terminal: a line a row, several tables where columns have no room, and all of it in full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.cells import cell_len
from tests.cli.command import Toeplens
from tests.report.grid.language_state import language_grid

from toeplens import encodings, tasks
from toeplens.cli import console, tables


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.out, "_width", 80)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("command", ["encodings", "tasks"])
def test_what_there_is_has_a_line_each_and_all_in_full(toeplens: Toeplens, command: str):
    names = (encodings if command == "encodings" else tasks).names()
    answers = [toeplens(command), toeplens(command, "--full")]
    assert [(answer.code, answer.err) for answer in answers] == [(0, "")] * 2
    short, full = (answer.out for answer in answers)
    lines = short.splitlines()
    assert [sum(f"│ {name} " in line for line in lines) for name in names] == [1] * len(names)
    assert max(map(cell_len, (*lines, *full.splitlines()))) <= 80
    assert "…" in short
    assert "…" not in full


@pytest.mark.usefixtures("narrow")
def test_columns_without_room_go_to_another_table(capsys: pytest.CaptureFixture[str]):
    columns = ["task", *(f"encoding {n}" for n in range(12))]
    rows = [["a [bold]長い[/] name\x1b[2J", *(f"{n}.5" for n in range(12))]]
    console.print_table("Accuracy", columns, rows)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    lines = [line for line in printed.splitlines() if "│" in line]
    assert [line.split("│")[1].strip().partition(" name")[0] for line in lines] == ["a [bold]長い[/]"] * len(lines)
    assert [cell.strip() for line in lines for cell in line.split("│")[2:-1]] == rows[0][1:]
    assert max(map(cell_len, printed.splitlines())) <= 80
    console.print_table("Accuracy", columns[:3], [row[:3] for row in rows])
    assert capsys.readouterr().out.count("a [bold]") == 1


def test_language_models_are_told_by_their_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = language_grid(tmp_path)
    tables.print_study(state, tmp_path / "report.html", as_json=False)
    told = capsys.readouterr().out
    assert "1.655–1.661" in told
    assert "n-gram baselines by context length: 4.644 (context 0)" in told
    assert "accuracy" not in told
    tables.print_study(state, tmp_path / "report.html", as_json=True)
    (row, *_) = json.loads(capsys.readouterr().out)["language"]
    assert (row["label"], row["task"], row["bits"]) == ("fire", "language", pytest.approx(1.651, abs=1e-3))
