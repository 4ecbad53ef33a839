"""The committed records of the reproduction say what their own data say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from toeplens.ground import read_json
from toeplens.papers.deposit import accuracy_table, claims_of, grid
from toeplens.studies import CellResult, Results, judge
from toeplens.studies.kit.recorded import read_record
from toeplens.training.presets import PROTOCOLS
from toeplens.training.watcher import moments

RESULTS = Path(__file__).parents[3] / "results"
LADDER = "ladder"  # a part of desk, of which not every place is trained (docs/decisions/018)
RECORDS = ("desk", "laptop", LADDER)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.heavy if name == "desk" else ()) for name in RECORDS]
)
def record(request: pytest.FixtureRequest) -> Path:
    return RESULTS / request.param


@pytest.fixture(scope="module")
def about(record: Path) -> Mapping[str, Any]:
    return read_record(record / "results.json.xz").content


@pytest.fixture(scope="module")
def results(about: Mapping[str, Any]) -> Results:
    return Results(CellResult.from_dict(cell) for cell in about["cells"])


def test_the_record_holds_every_cell_of_the_grid_as_it_is_now(
    record: Path, about: Mapping[str, Any], results: Results
) -> None:
    assert about["scale"] == ("desk" if record.name == LADDER else record.name)
    cells = grid(about["scale"], PROTOCOLS, about["seeds"], about["parts"])
    if record.name == LADDER:
        assert (about["parts"], about["seeds"]) == ([LADDER], 3)
        places = Counter((cell.key.protocol, cell.key.label) for cell in results.cells)
        assert set(places.values()) == {3}, "a place is there with its three models or not at all"
        cells = [cell for cell in cells if (cell.key.protocol, cell.key.label) in places]
    else:
        assert about["seeds"] >= 5
    assert {(cell.key, cell.run) for cell in results.cells} == {(cell.key, cell.job.spec.name) for cell in cells}
    found = {cell.key: cell for cell in results.cells}
    watched = {cell.job.spec.name for cell in cells if cell.job.watch}  # two places may stand for the same run
    for cell in cells:
        assert found[cell.key].measures.keys() <= set(cell.job.measures)
        steps = [row["step"] for row in found[cell.key].watched]
        due = moments(cell.job.spec.total_steps) if cell.job.spec.name in watched else []
        if cell.job.spec.plateau is None:
            assert steps == due
        else:  # it ends when it has stopped learning, and events are looked at too
            assert steps == sorted(set(steps))
            assert {step for step in due if step <= steps[-1]} <= set(steps)


def test_the_ledger_follows_from_the_cells(record: Path, about: Mapping[str, Any], results: Results) -> None:
    recorded = [
        (entry["id"], entry["protocol"], entry["verdict"], entry["evidence"])
        for entry in read_json(record / "claims.json")["claims"]
    ]
    claims = claims_of(about["parts"])
    judged = [(e.claim.id, e.protocol, e.verdict, e.evidence) for e in judge(claims, results, PROTOCOLS)]
    assert judged == recorded


def test_the_table_follows_from_the_cells(about: Mapping[str, Any], results: Results) -> None:
    """To the seven digits of the record's other numbers."""
    near = [
        {name: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value for name, value in row.items()}
        for row in about["table"]
    ]
    assert [row.to_dict() for row in accuracy_table(results, PROTOCOLS)] == near
