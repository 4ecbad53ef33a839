"""Figures and tables of a page by one command, and how toeplens is cited."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from tests.builders import tiny
from tests.cli.command import Toeplens
from tests.report.auditing.test_page import random_audit
from tests.report.grid.state import recorded_grid

from toeplens.cli.export import AUTHORS, LICENSE, TITLE
from toeplens.papers.deposit import PAPER as DEPOSIT
from toeplens.papers.positional_symbolic import FOLLOW_UP
from toeplens.papers.positional_symbolic import PAPER as SYMBOLIC
from toeplens.report import PAGE, Figure
from toeplens.studies.auditing import save_audit
from toeplens.training import train
from toeplens.version import __version__


@pytest.fixture
def drawn_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that would be drawn."""
    names: list[str] = []

    def draw(figure: Figure, form: str, columns: int | None) -> bytes:
        names.append(f"{figure.id}.{form}")
        return b""

    monkeypatch.setattr("toeplens.report.exporting.draw_figure", draw)
    return names


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """The record of a study."""
    state = recorded_grid(tmp_path)
    state.write_record()
    return tmp_path


def test_every_figure_is_drawn_and_listed(toeplens: Toeplens, study: Path, drawn_files: list[str]):
    report = toeplens("figures", study, "--format", "svg", "--json").json()
    assert report["directory"] == str(study / "figures")
    assert [each["file"] for each in report["files"]] == drawn_files
    assert len(set(drawn_files)) == len(drawn_files) > 4
    index = json.loads((study / "figures" / "figures.json").read_text("utf-8"))
    assert index["figures"] == report["files"]
    assert {each["inches"] for each in report["files"]} <= {3.25, 6.75}
    assert all(each["number"] and each["title"] for each in report["files"])


def test_figures_are_selected_by_name_or_number_and_written_elsewhere(
    toeplens: Toeplens, study: Path, drawn_files: list[str]
):
    out = study.parent / "paper"
    answer = toeplens("figures", study, "--figure", "accuracy", "--figure", "2", "--columns", "2", "--out", out)
    assert answer.code == 0
    assert len(drawn_files) == 2
    assert drawn_files[0] == "accuracy.pdf"
    assert toeplens("figures", study, "--figure", "3", "--out", out).code == 0, "its own place again"


def test_an_audits_map_is_drawn_from_its_record(toeplens: Toeplens, tmp_path: Path, drawn_files: list[str]):
    save_audit(random_audit(), tmp_path)
    assert toeplens("figures", tmp_path, "--figure", "map").code == 0
    assert drawn_files == ["map.pdf"]
    assert not (tmp_path / PAGE).exists()
    assert toeplens("report", tmp_path).code == 0
    assert (tmp_path / PAGE).exists()


@pytest.mark.parametrize(
    ("form", "endings"),
    [("csv", {".csv"}), ("html", {".html"}), ("both", {".csv", ".tex"}), ("all", {".csv", ".html", ".tex"})],
)
def test_every_table_is_written(toeplens: Toeplens, study: Path, form: str, endings: set[str]):
    made = toeplens("tables", study, "--format", form, "--json").json()
    names = [each["file"] for each in made["files"]]
    assert {Path(name).suffix for name in names} == endings
    assert {"cost-by-encoding", "test-accuracy-by-task-and-encoding", "models"} <= {Path(name).stem for name in names}
    assert {path.name for path in (study / "tables").iterdir()} == {*names, "tables.json", ".lock"}


@pytest.mark.usefixtures("drawn_files")
def test_bad_input_is_one_sentence(toeplens: Toeplens, study: Path):
    refused = toeplens("figures", study, "--figure", "accurac").refusal()
    assert "got 'accurac'; did you mean 'accuracy'" in refused
    assert "--columns must be 1 or 2, got 3." in toeplens("figures", study, "--columns", "3").refusal()
    assert "--format must be one of pdf, png, svg" in toeplens("figures", study, "--format", "gif").refusal()
    assert "contains files that do not belong to the tables" in toeplens("tables", study, "--out", study).refusal()
    (study / "empty").mkdir()
    assert "contains no study, audit, probe" in toeplens("tables", study / "empty").refusal()
    assert "does not exist" in toeplens("figures", study / "x").refusal()


ROOT = Path(__file__).parents[2]


def test_the_citation_file_agrees():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert (citation["title"], citation["authors"], citation["license"]) == (TITLE, [{"name": AUTHORS}], LICENSE)
    assert str(citation["version"]) == __version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (project["name"], project["license"]) == (TITLE, LICENSE)
    for work, reference in zip((DEPOSIT, SYMBOLIC), citation["references"], strict=True):
        assert (work.title, work.year) == (reference["title"], reference["year"])
        assert f"arXiv:{work.arxiv}" == reference["identifiers"][0]["value"]
        names = [f"{each['family-names']}, {each['given-names']}" for each in reference["authors"]]
        assert names == [author.replace("{", "").replace("}", "") for author in work.authors]


def test_the_cited_works(toeplens: Toeplens):
    output = toeplens("cite").out
    assert f"version {__version__}" in output
    assert "arXiv:2505.13027" in output
    assert "arXiv:2511.11579" in output
    entries = re.findall(r"^@(\w+)\{([\w-]+),$", toeplens("cite", "--bibtex").out, re.MULTILINE)
    assert entries == [("software", "toeplens"), ("misc", DEPOSIT.key), ("misc", SYMBOLIC.key), ("misc", FOLLOW_UP.key)]


def test_every_component_of_a_runs_encoding_is_cited(toeplens: Toeplens, tmp_path: Path):
    run = train(tiny("rope + fox"), tmp_path)
    said = toeplens("cite", run.directory)
    assert re.search(r"^  rope: Su et al\. 2021, arXiv 2104\.09864$", said.out, re.MULTILINE)
    assert [work["key"] for work in toeplens("cite", run.directory, "--json").json()["encodings"]] == ["rope", "fox"]


def test_a_recorded_studys_encodings_are_cited(toeplens: Toeplens):
    made = toeplens("cite", ROOT / "results" / "canonical", "--json").json()
    numbers = [re.search(r"arXiv:([\d.]+\d)", work["words"]) for work in made["encodings"]]
    known = [number[1] for number in numbers if number]
    assert "2104.09864" in known
    assert len(known) == len(set(known))
    assert "2505.13027" not in known, "it is among the papers"
