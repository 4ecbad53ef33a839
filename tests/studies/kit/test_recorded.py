"""A record, results.json and claims.json alone, is the study that it was written of: its plan, ledger and page."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from tests.report.grid.language_state import language_grid

from toeplens.cli.studies import kind_of
from toeplens.ground import read_json
from toeplens.papers import mathematics
from toeplens.papers.mathematics.page import render_theory
from toeplens.report.grid.page import render_grid
from toeplens.studies import grid
from toeplens.studies.grid.study import KIND as GRID

RESULTS = Path(__file__).parents[3] / "results"


def test_a_grid_study_is_what_its_record_tells(tmp_path: Path) -> None:
    state = language_grid(tmp_path)
    GRID.write_down(state)
    again = grid.gather(tmp_path)
    assert grid.is_grid(tmp_path)
    assert not GRID.holds(tmp_path)
    assert again.spec == state.spec
    assert [entry.to_dict() for entry in again.entries] == [entry.to_dict() for entry in state.entries]
    assert (again.finished, again.total, again.environment) == (state.finished, state.total, state.environment)
    assert [cell.to_dict() for cell in again.results.cells] == [cell.to_dict() for cell in state.results.cells]
    packed = gzip.compress((tmp_path / "results.json").read_bytes())
    (tmp_path / "results.json").unlink()
    (tmp_path / "results.json.gz").write_bytes(packed)
    assert render_grid(grid.gather(tmp_path)) == render_grid(again)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["claims.json", "results.json.gz"], "nothing is written"


@pytest.mark.heavy
def test_the_recorded_mathematics_is_read_and_judged_again() -> None:
    state = mathematics.gather(RESULTS / "theory")
    assert state.complete
    recorded = read_json(RESULTS / "theory" / "claims.json")["claims"]
    assert {entry.claim.id: entry.verdict for entry in state.entries} == {
        entry["id"]: entry["verdict"] for entry in recorded
    }
    assert "Theorem" in render_theory(state)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["laptop", "desk", "canonical", "theory", "smollm2", "gemma3", "minilm"])
def test_every_record_is_known_by_its_kind(name: str) -> None:
    kind, _, _ = kind_of(RESULTS / name)
    study = read_json(RESULTS / name / "claims.json")["study"]
    assert kind.__name__.rpartition(".")[2] == {"reproduce": "deposit", "theory": "mathematics"}.get(study, study)
