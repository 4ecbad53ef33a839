"""Outputs: tried before the work, and never in place of another file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builders import files
from tests.cli.command import Toeplens

from toeplens.training import Run


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command would compute must not be begun."""

    def begun(*_: object, **__: object) -> None:
        pytest.fail("the work was begun")

    monkeypatch.setattr("toeplens.studies.decomposition.decompose_run", begun)
    monkeypatch.setattr("toeplens.studies.card.make_card", begun)


@pytest.mark.usefixtures("no_work")
def test_a_runs_own_files_are_not_replaced_by_its_page(toeplens: Toeplens, run: Run):
    before = files(run.directory)
    refusal = toeplens("decompose", run.directory, "--out", run.directory / "spec.json").refusal()
    assert "spec.json is not a page that this version's 'toeplens decompose' wrote" in refusal
    assert files(run.directory) == before


@pytest.mark.usefixtures("no_work")
def test_a_card_replaces_nothing_else_and_its_place_is_tried_first(toeplens: Toeplens, tmp_path: Path):
    for name in ("index.html", "rope.html", "plotly.js"):
        (tmp_path / name).write_text("mine")
        assert f"{tmp_path}" in toeplens("card", "--out", tmp_path).refusal()
        (tmp_path / name).unlink()
    (tmp_path / "thesis.txt").write_text("mine")
    assert "thesis.txt" in toeplens("card", "rope", "--out", tmp_path / "thesis.txt").refusal()
    assert "cannot write" in toeplens("card", "rope", "--out", "/proc/page.html").refusal(3)
    assert files(tmp_path) == {"thesis.txt": b"mine"}
