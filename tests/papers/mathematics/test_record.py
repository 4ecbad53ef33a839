"""The committed record of the mathematics says what its own numbers say, and a damaged one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toeplens.ground import InputError, read_json, write_json
from toeplens.papers.mathematics import CLAIMS, EXPERIMENTS
from toeplens.papers.mathematics.heads import NAME
from toeplens.papers.mathematics.study import KIND
from toeplens.studies import judge_all

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "results" / "theory"


def test_the_ledger_follows_from_the_records() -> None:
    records = read_json(RECORD / "results.json")["records"]
    judged = [entry.to_dict() for entry in judge_all(CLAIMS, records)]
    assert judged == read_json(RECORD / "claims.json")["claims"]
    assert {entry["verdict"] for entry in judged} >= {"holds", "holds in part", "fails"}


def test_every_experiment_is_there_under_every_seed() -> None:
    content = read_json(RECORD / "results.json")
    assert content["finished"] == content["total"] == content["seeds"] * (len(EXPERIMENTS) + 1)
    assert set(content["records"]) == {*EXPERIMENTS, NAME}
    assert content["seeds"] >= 5


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("phases", {"ranges": {}}),  # unlike the record of the first seed
        ("filling", {"tallies": 3}),
        (NAME, {"rope trained": {"width": "wide"}}),
        ("small_norm", {"models": None}),
    ],
)
def test_a_damaged_record_is_refused(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    content = read_json(RECORD / "results.json")
    content["records"][name][1] |= change
    write_json(tmp_path / "results.json", content)
    with pytest.raises(InputError, match="damaged"):
        KIND.open_record(tmp_path / "results.json")
