"""The committed record of the study of positional and symbolic heads says what its own data say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toeplens.ground import read_json
from toeplens.papers.positional_symbolic.claims import CLAIMS, Evidence
from toeplens.studies import CellResult, Results, grid, judge_all
from toeplens.studies.grid.measured import matrix
from toeplens.studies.grid.relations import relations
from toeplens.studies.grid.spec import spec_from_yaml
from toeplens.studies.kit.recorded import read_record
from toeplens.studies.kit.verdicts import ENOUGH, OPEN
from toeplens.training.watcher import moments

pytestmark = pytest.mark.heavy  # 685 models

RECORD = Path(__file__).parents[3] / "results" / "canonical"


@pytest.fixture(scope="module")
def about() -> Mapping[str, Any]:
    return read_record(RECORD / "results.json.xz").content


@pytest.fixture(scope="module")
def results(about: Mapping[str, Any]) -> Results:
    return Results(CellResult.from_dict(cell) for cell in about["cells"])


def test_the_record_holds_every_cell_of_the_study_as_it_is_now(about: Mapping[str, Any], results: Results) -> None:
    spec = spec_from_yaml(about["spec"])
    assert spec == grid.read_spec("canonical")
    cells = grid.cells(spec)
    assert spec.seeds >= 3
    assert {(cell.key, cell.run) for cell in results.cells} == {(cell.key, cell.job.spec.name) for cell in cells}
    found = {cell.key: cell for cell in results.cells}
    for cell in cells:
        assert found[cell.key].measures.keys() == set(spec.measures)
        expected = moments(cell.job.spec.total_steps) if cell.job.watch else []
        watched = found[cell.key].watched
        assert [row["step"] for row in watched if row["step"] in expected] == expected
        assert all(row["events"] for row in watched if row["step"] not in expected)


def test_the_ledger_the_table_and_the_relations_follow_from_the_cells(
    about: Mapping[str, Any], results: Results
) -> None:
    spec = spec_from_yaml(about["spec"])
    related = relations(spec, results)
    assert len(related) == len(about["relations"])
    for one, recorded in zip(related, about["relations"], strict=True):
        for name, value in one.to_dict().items():  # a last digit may differ between machines
            assert value == pytest.approx(recorded[name], abs=1e-6), name
    rows = [row.to_dict() for row in matrix(spec, results)]
    found = [{name: row[name] for name in recorded} for row, recorded in zip(rows, about["table"], strict=True)]
    assert found == [pytest.approx(row, rel=1e-5) for row in about["table"]]
    entries = judge_all(CLAIMS, Evidence(spec, results, related))
    recorded = read_json(RECORD / "claims.json")["claims"]
    assert [(entry.claim.id, entry.verdict) for entry in entries] == [
        (each["id"], each["verdict"]) for each in recorded
    ]
    assert [entry.evidence for entry in entries] == [each["evidence"] for each in recorded]
    assert [entry.plain for entry in entries] == [each["plain"] for each in recorded]
    assert spec.seeds >= ENOUGH or {entry.verdict for entry in entries} <= set(OPEN), "few seeds only lean"


def test_shares_add_up_in_every_head_that_has_them(results: Results) -> None:
    """To the six digits of a record."""
    count = 0
    for cell in results.cells:
        found = cell.measure("behaviour")
        if found is not None:
            total = found.positional + found.symbolic + found.interaction
            assert np.nanmax(abs(total - 1), initial=0) < 1e-5
            count += int(np.isfinite(total).sum())
    assert count > 2000
