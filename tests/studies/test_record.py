"""The committed record of the laptop scale says what its own data say."""

from __future__ import annotations

from pathlib import Path

import pytest

from toeplens.ground import read_json
from toeplens.studies import CellResult, Results, judge
from toeplens.studies.reproduce import CLAIMS, COUNT, DISTANCE, PROTOCOLS, accuracy_table, grid

RECORD = Path(__file__).parents[2] / "results" / "laptop"


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(CellResult.from_dict(cell) for cell in read_json(RECORD / "results.json")["cells"])


def test_the_record_holds_every_cell_of_the_grid_as_it_is_now(results: Results) -> None:
    seeds = read_json(RECORD / "results.json")["seeds"]
    wanted = {(cell.key, cell.job.spec.name) for cell in grid("laptop", PROTOCOLS, seeds)}
    assert {(cell.key, cell.run) for cell in results.cells} == wanted


def test_the_ledger_follows_from_the_cells(results: Results) -> None:
    recorded = [
        (entry["id"], entry["protocol"], entry["verdict"], entry["evidence"])
        for entry in read_json(RECORD / "claims.json")["claims"]
    ]
    judged = [(e.claim.id, e.protocol, e.verdict, e.evidence) for e in judge(CLAIMS, results, PROTOCOLS)]
    assert judged == recorded


def test_the_table_follows_from_the_cells(results: Results) -> None:
    recorded = read_json(RECORD / "results.json")["table"]
    assert [row.to_dict() for row in accuracy_table(results, PROTOCOLS)] == recorded


def test_both_protocols_and_both_tasks_are_there(results: Results) -> None:
    for protocol in PROTOCOLS:
        under = results.under(protocol)
        assert {"rope", "relative", "alibi", "nope", "absolute", "mla"} <= set(under.labels(DISTANCE))
        assert {"rope", "nope", "mla"} <= set(under.labels(COUNT))
