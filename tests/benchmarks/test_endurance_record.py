"""What the recorded endurance says: nothing lost, done twice or different after two hundred kills."""

from __future__ import annotations

import json
from pathlib import Path

RECORD = Path(__file__).parents[2] / "results" / "endurance" / "endurance.json"


def test_nothing_was_lost_done_twice_or_different():
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert record["kills"] == sum(record["by"].values()) >= 200
    assert all(record["by"].values())
    assert (record["lost"], record["twice"], record["different"]) == (0, 0, 0)
    assert record["cells"] > 100
    assert record["cut"] > 10  # kills that found a cell at work
    assert record["environment"]["torch"]
