"""Figures and tables of a page by one command: which page, which files, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import Toeplens
from tests.report.auditing.test_page import made_up
from tests.report.exporting.recorded import recorded_grid

from toeplens.report import PAGE, write_audit, write_grid
from toeplens.report.kit.packing import MADE_BY
from toeplens.studies.auditing import save
from toeplens.studies.grid.study import KIND


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that would be drawn."""
    names: list[str] = []

    def draw(panels: Mapping[Path, Any], form: str, **_: Any) -> None:
        for path in panels:
            path.write_bytes(b"")
            names.append(path.name)

    monkeypatch.setattr("toeplens.report.exporting.drawing.draw", draw)
    return names


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """The record of a study, with its page."""
    state = recorded_grid(tmp_path)
    KIND.write_down(state)
    write_grid(state)
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


def test_without_what_draws_them_no_page_is_made_first(
    toeplens: Toeplens, study: Path, monkeypatch: pytest.MonkeyPatch
):
    (study / PAGE).unlink()
    monkeypatch.setitem(sys.modules, "kaleido", None)
    answer = toeplens("figures", study)
    assert answer.code == 3
    assert "pip install 'toeplens[figures]'" in answer.err
    assert not (study / PAGE).exists()


def test_some_figures_by_name_or_number_in_another_place(toeplens: Toeplens, study: Path, drawn: list[str]):
    out = study.parent / "paper"
    answer = toeplens("figures", study, "--figure", "plane", "--figure", "2", "--columns", "2", "--out", out)
    assert answer.code == 0
    assert {name.split("-")[0] for name in drawn} == {"plane", "scan"}
    assert all(name.endswith(".pdf") for name in drawn)
    assert toeplens("figures", study / PAGE, "--figure", "lengths", "--out", out).code == 0, "its own place again"


def test_a_page_of_an_older_version_is_made_again(toeplens: Toeplens, study: Path, drawn: list[str]):
    page = study / PAGE
    page.write_text(page.read_text("utf-8").replace(MADE_BY, "format 1, toeplens 0.1.0"), encoding="utf-8")
    assert toeplens("figures", study).err == f"page: {page} is of an older version; it is made again.\n"
    assert MADE_BY in page.read_text("utf-8")
    assert toeplens("figures", study).err == ""
    page.unlink()
    assert toeplens("tables", study).err == f"page: {page} is not there; it is made.\n"


def test_an_audits_page_is_made_again_from_its_record(toeplens: Toeplens, tmp_path: Path, drawn: list[str]):
    audit = made_up()
    save(audit, tmp_path)
    assert toeplens("figures", tmp_path, "--figure", "map-positional").code == 0
    assert drawn == ["map-positional.pdf"]
    (tmp_path / PAGE).unlink()
    assert toeplens("report", tmp_path).code == 0
    assert (tmp_path / PAGE).exists()
    write_audit(audit, tmp_path / "figures")
    alone = tmp_path / "figures" / PAGE
    alone.write_text(alone.read_text("utf-8").replace("watcher.unobserve", "watcher.forget"), encoding="utf-8")
    assert toeplens("figures", alone.parent, "--out", tmp_path / "more").code == 0, (
        "of a page alone what it holds is read"
    )


@pytest.mark.parametrize(("form", "endings"), [("csv", {".csv"}), ("latex", {".tex"}), ("both", {".csv", ".tex"})])
def test_every_table_is_written(toeplens: Toeplens, study: Path, form: str, endings: set[str]):
    made = toeplens("tables", study, "--format", form, "--json").json()
    names = [each["file"] for each in made["files"]]
    assert {Path(name).suffix for name in names} == endings
    assert {"claims-ledger", "test-accuracy-by-task-and-encoding", "models"} <= {Path(name).stem for name in names}
    assert {path.name for path in (study / "tables").iterdir()} == {*names, "tables.json", ".lock"}


@pytest.mark.usefixtures("drawn")
def test_bad_input_is_one_sentence(toeplens: Toeplens, study: Path):
    assert (
        "figure: there is no 'plan'; did you mean 'plane'" in toeplens("figures", study, "--figure", "plan").refusal()
    )
    assert "columns: 3 was given; it must be 1 or 2." in toeplens("figures", study, "--columns", "3").refusal()
    assert "format: there is no 'gif'; known: pdf, png, svg." in toeplens("figures", study, "--format", "gif").refusal()
    assert (
        "format: there is no 'word'; known: both, csv, latex."
        in toeplens("tables", study, "--format", "word").refusal()
    )
    assert "holds files that are not the tables's" in toeplens("tables", study, "--out", study).refusal()
    assert "page: there is no" in toeplens("figures", study / "x").refusal()
    (study / "empty").mkdir()
    assert "and no study, audit or probe to make one of" in toeplens("tables", study / "empty").refusal()
    mark = f'<meta name="toeplens-page" content="{MADE_BY}">'
    for html, words in (
        ("<table><tr><td>1</table></html>", "a.html is no page of toeplens"),
        (f"{mark}<p>nothing</p></html>", "a.html has none."),
        (f"{mark}<table><tr><td>1", "a.html is damaged or cut short; make it again"),
        (f"{mark}{'<!--' * 100_000}</html>", "a.html is damaged or cut short"),
        (
            f'{mark}<table id="table"></table><script type="application/json" id="sheets">{{}}</script></html>',
            "damaged",
        ),
    ):
        (study / "a.html").write_text(html, encoding="utf-8")
        assert words in toeplens("figures", study / "a.html").refusal()
        assert words in toeplens("tables", study / "a.html").refusal()
