"""Figures and tables of a page by one command: which page, which files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import Toeplens
from tests.report.grid.state import recorded_grid

from toeplens.report import PAGE, Figure
from toeplens.report.page import Page
from toeplens.studies.auditing import open_audit, save

AUDIT = Path(__file__).parents[2] / "results" / "audit-smollm2"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, int | None]]]:
    """Figure, format and columns of the files that would be drawn."""
    made: list[tuple[str, str, int | None]] = []

    def draw(figure: Figure, form: str, columns: int | None = None) -> bytes:
        made.append((figure.id, form, columns))
        return b""

    monkeypatch.setattr("toeplens.report.exporting.draw", draw)
    return made


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """The record of a study."""
    state = recorded_grid(tmp_path)
    state.write_down()
    return tmp_path


@pytest.fixture
def page(study: Path) -> Page:
    from toeplens.cli.studies import page_in

    return page_in(study)


def test_every_figure_is_drawn_and_told(toeplens: Toeplens, study: Path, page: Page, drawn: list[Any]):
    made = toeplens("figures", study, "--format", "svg", "--json").json()
    assert made["directory"] == str(study / "figures")
    assert drawn == [(each.id, "svg", None) for each in page.figures]
    index = json.loads((study / "figures" / "figures.json").read_text("utf-8"))
    assert index["figures"] == made["files"]
    for number, (told, figure) in enumerate(zip(made["files"], page.figures, strict=True), 1):
        assert (told["file"], told["figure"], told["number"]) == (f"{figure.id}.svg", figure.id, number)
        assert (told["title"], told["caption"]) == (figure.title, figure.caption)
        assert told["inches"] in (3.25, 6.75)
        assert (study / "figures" / told["file"]).is_file()


def test_some_figures_by_name_or_number_in_another_place(toeplens: Toeplens, study: Path, page: Page, drawn: list[Any]):
    out, ids = study.parent / "paper", [each.id for each in page.figures]
    assert toeplens("figures", study, "--figure", ids[2], "--figure", "2", "--columns", "2", "--out", out).code == 0
    assert drawn == [(ids[1], "pdf", 2), (ids[2], "pdf", 2)]
    assert toeplens("figures", study, "--figure", ids[0], "--out", out).code == 0, "its own place again"


def test_an_audits_map_is_drawn_from_its_record_without_a_browser(toeplens: Toeplens, tmp_path: Path):
    save(open_audit(AUDIT), tmp_path)
    assert toeplens("figures", tmp_path, "--figure", "map").code == 0
    assert (tmp_path / "figures" / "map.pdf").read_bytes().startswith(b"%PDF")
    assert not (tmp_path / PAGE).exists()


@pytest.mark.parametrize(
    ("form", "endings"),
    [("csv", "csv"), ("latex", "tex"), ("html", "html"), ("both", "csv tex"), ("all", "csv tex html")],
)
def test_every_table_is_written(toeplens: Toeplens, study: Path, page: Page, form: str, endings: str):
    made = toeplens("tables", study, "--format", form, "--json").json()
    names = [each["file"] for each in made["files"]]
    assert {Path(name).suffix[1:] for name in names} == set(endings.split())
    assert {Path(name).stem for name in names} >= {each.file for each in page.tables if each.body}
    assert {path.name for path in (study / "tables").iterdir()} == {*names, "tables.json", ".lock"}


@pytest.mark.usefixtures("drawn")
def test_bad_input_is_one_sentence(toeplens: Toeplens, study: Path, page: Page):
    name = page.figures[0].id
    refused = toeplens("figures", study, "--figure", name[:-1]).refusal()
    assert f"got '{name[:-1]}'; did you mean" in refused
    assert name in refused
    assert "--columns must be 1 or 2, got 3." in toeplens("figures", study, "--columns", "3").refusal()
    assert "--format must be one of pdf, png, svg" in toeplens("figures", study, "--format", "gif").refusal()
    assert "contains files that do not belong to the tables" in toeplens("tables", study, "--out", study).refusal()
    (study / "empty").mkdir()
    assert "contains no study, audit, probe" in toeplens("tables", study / "empty").refusal()
    assert "does not exist" in toeplens("figures", study / "x").refusal()
