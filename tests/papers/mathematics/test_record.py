"""The committed record of the mathematics says what its own numbers say, and the documentation says the same."""

from __future__ import annotations

import re
from pathlib import Path

from toeplens.ground import read_json
from toeplens.papers.mathematics import CLAIMS, EXPERIMENTS
from toeplens.papers.mathematics.heads import NAME
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


def test_the_documentations_table_is_the_record() -> None:
    page = (ROOT / "docs" / "theory.md").read_text()
    shown = re.findall(r"^\| `([a-z0-9-]+)` \| (.*) \| (.*) \|$", page, re.M)
    recorded = [(c["id"], c["statement"], c["verdict"]) for c in read_json(RECORD / "claims.json")["claims"]]
    assert [(name, says.replace("\\|", "|"), verdict) for name, says, verdict in shown] == recorded
