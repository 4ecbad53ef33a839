"""docs/claims.md and what the package knows of the records are what `tools/claims.py` writes from the records."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from tests.builders import script

from toeplens.papers.deposit import CLAIMS
from toeplens.papers.deposit.recorded import recorded

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return script(ROOT / "tools" / "claims.py")


def test_the_page_is_written_from_the_records(tool: ModuleType) -> None:
    assert tool.PAGE.read_text() == tool.page() + "\n", "run python tools/claims.py"


def test_the_package_knows_the_records_verdicts(tool: ModuleType) -> None:
    assert tool.KNOWN.read_text() == tool.known(), "run python tools/claims.py"
    for scale in tool.SCALES:
        if record := tool.record_of(scale):
            seeds = {"desk": "up to 80 seeds", "laptop": "5 seeds"}[scale]
            for entry in record["claims"]:
                assert (scale, seeds, entry["verdict"]) in recorded()[entry["id"], entry["protocol"]]


def test_every_claim_has_its_place_on_the_page(tool: ModuleType) -> None:
    text = tool.PAGE.read_text()
    judged = {entry["id"] for name in tool.SCALES if (record := tool.record_of(name)) for entry in record["claims"]}
    for claim in CLAIMS:
        if claim.id in judged:
            assert f"### `{claim.id}`" in text
            assert claim.rule in text


def test_false_verdicts_were_measured_on_the_ledger_as_it_is(tool: ModuleType) -> None:
    content = json.loads(tool.SIMULATED.read_text())
    assert content["worlds"] >= 200
    normal = {row["effect"]: row for row in content["ledgers"] if row["shape"] == "normal"}
    assert normal["nothing there"]["any_wrong"] <= 0.05
    record = tool.record_of(content["record"])
    assert {(row["id"], row["protocol"]) for row in content["rules"]} <= {
        (entry["id"], entry["protocol"]) for entry in record["claims"]
    }
