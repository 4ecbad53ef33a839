"""Figures and tables of a page by one command: which page, which files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import Toeplens
from tests.report.auditing.test_page import made_up
from tests.report.grid.state import recorded_grid

from toeplens.report import PAGE
from toeplens.studies.auditing import save


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that would be drawn."""
    names: list[str] = []

    def draw(panels: Mapping[Path, Any], form: str, **_: Any) -> None:
        for path in panels:
            path.write_bytes(b"")
            names.append(path.name)

    monkeypatch.setattr("toeplens.report.exporting.draw", draw)
    return names


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """The record of a study."""
    state = recorded_grid(tmp_path)
    state.write_down()
    return tmp_path


def test_every_figure_is_drawn_and_told(toeplens: Toeplens, study: Path, drawn: list[str]):
    made = toeplens("figures", study, "--format", "svg", "--json").json()
    assert made["directory"] == str(study / "figures")
    assert [each["file"] for each in made["files"]] == drawn
    assert len(set(drawn)) == len(drawn) > 10
    index = json.loads((study / "figures" / "figures.json").read_text("utf-8"))
    assert index["figures"] == made["files"]
    assert {each["inches"][0] for each in made["files"]} == {3.25}
    assert all(each["number"] and each["title"] and each["caption"] for each in made["files"])


def test_some_figures_by_name_or_number_in_another_place(toeplens: Toeplens, study: Path, drawn: list[str]):
    out = study.parent / "paper"
    answer = toeplens("figures", study, "--figure", "plane", "--figure", "2", "--columns", "2", "--out", out)
    assert answer.code == 0
    assert {name.split("-")[0] for name in drawn} == {"plane", "scan"}
    assert all(name.endswith(".pdf") for name in drawn)
    assert toeplens("figures", study, "--figure", "lengths", "--out", out).code == 0, "its own place again"


def test_an_audits_map_is_drawn_from_its_record(toeplens: Toeplens, tmp_path: Path, drawn: list[str]):
    save(made_up(), tmp_path)
    assert toeplens("figures", tmp_path, "--figure", "map-positional").code == 0
    assert drawn == ["map-positional.pdf"]
    assert not (tmp_path / PAGE).exists()
    assert toeplens("report", tmp_path).code == 0
    assert (tmp_path / PAGE).exists()


@pytest.mark.parametrize(("form", "endings"), [("csv", {".csv"}), ("latex", {".tex"}), ("both", {".csv", ".tex"})])
def test_every_table_is_written(toeplens: Toeplens, study: Path, form: str, endings: set[str]):
    made = toeplens("tables", study, "--format", form, "--json").json()
    names = [each["file"] for each in made["files"]]
    assert {Path(name).suffix for name in names} == endings
    assert {"cost-by-encoding", "test-accuracy-by-task-and-encoding", "models"} <= {Path(name).stem for name in names}
    assert {path.name for path in (study / "tables").iterdir()} == {*names, "tables.json", ".lock"}


@pytest.mark.usefixtures("drawn")
def test_bad_input_is_one_sentence(toeplens: Toeplens, study: Path):
    refused = toeplens("figures", study, "--figure", "plan").refusal()
    assert "got 'plan'; did you mean 'plane'" in refused
    assert "--columns must be 1 or 2, got 3." in toeplens("figures", study, "--columns", "3").refusal()
    assert "--format must be one of pdf, png, svg" in toeplens("figures", study, "--format", "gif").refusal()
    assert "contains files that do not belong to the tables" in toeplens("tables", study, "--out", study).refusal()
    (study / "empty").mkdir()
    assert "contains no study, audit, probe" in toeplens("tables", study / "empty").refusal()
    assert "does not exist" in toeplens("figures", study / "x").refusal()
