"""The committed record of encodings in language models says what its own data say."""

from __future__ import annotations

from pathlib import Path

import pytest

from toeplens.engine.language import Bits
from toeplens.ground import read_json
from toeplens.studies import grid
from toeplens.studies.grid import Grid, language
from toeplens.studies.grid.study import KIND
from toeplens.studies.kit.verdicts import OPEN

RECORD = Path(__file__).parents[3] / "results" / "language"


@pytest.fixture(scope="module")
def state() -> Grid:
    return KIND.open_record(RECORD / "results.json.xz")


def test_the_record_holds_every_cell_of_the_study_as_it_is_now(state: Grid) -> None:
    """But for the text, which the record knows by its hash and this machine may not have."""
    asked = grid.read_spec("language")
    text = state.spec.tasks["language"].options["sha256"]
    assert isinstance(text, str)
    assert len(text) == 64
    ours = state.spec.model_dump(mode="json")
    del ours["tasks"]["language"]["options"]["sha256"]
    assert ours == asked.model_dump(mode="json")
    assert state.complete
    assert state.spec.seeds >= 3
    cells = grid.cells(state.spec)
    assert {(cell.key, cell.job.spec.name) for cell in cells} == {(cell.key, cell.run) for cell in state.results.cells}
    steps = {cell.key: cell.job.spec.total_steps for cell in cells}
    for found in state.results.cells:
        assert found.measures.keys() == set(state.spec.measures)
        assert found.epochs[-1]["step"] == steps[found.key]


def test_the_ledger_follows_from_the_cells(state: Grid) -> None:
    recorded = read_json(RECORD / "claims.json")["claims"]
    assert [(entry.claim.id, entry.verdict, entry.evidence) for entry in state.entries] == [
        (entry["id"], entry["verdict"], entry["evidence"]) for entry in recorded
    ]
    assert all(entry["verdict"] in OPEN for entry in recorded), "three seeds decide nothing"


def test_the_table_follows_from_the_cells(state: Grid) -> None:
    rows = language.language_rows(state.spec, state.results)
    assert len(rows) == 8
    for row in rows:
        cells = [cell for cell in state.results.of("language", row.label) if cell.status == "complete"]
        assert row.bits is not None
        assert row.bits == pytest.approx(sum(language.bits(cell) for cell in cells) / len(cells), abs=1e-9)


def test_models_are_better_than_counting(state: Grid) -> None:
    """Than the best of the tables of up to three tokens before, on the same texts."""
    for cell in state.results.of("language", "rope"):
        found = cell.measure("bits")
        assert isinstance(found, Bits)
        assert language.bits(cell) < min(found.ngrams.values())
