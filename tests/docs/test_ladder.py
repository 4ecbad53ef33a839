"""What docs/ladder.md says is written from the record of the ladder."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.builders import script

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "results" / "ladder" / "results.json.gz"
pytestmark = pytest.mark.skipif(not RECORD.exists(), reason="the ladder is not recorded yet (docs/decisions/018)")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return script(ROOT / "tools" / "ladder_findings.py")


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(RECORD.read_bytes()))["cells"]


def test_its_numbers_are_the_records(tool: ModuleType) -> None:
    text = tool.PAGE.read_text(encoding="utf-8")
    assert text.count("<!-- found: ") == 6
    assert tool.page(tool.record()) == text, "run python tools/ladder_findings.py"


def _cost(cell: dict[str, Any]) -> float:
    """The largest cost of a head as a share of the skill, by the z of its examples."""
    counts = cell["ablation"]
    right, drops = counts["baseline"], np.array(counts["drops"])
    told = np.array(counts["counted"]) if "counted" in counts else drops > 0
    return float(np.where(told, drops, 0).max()) / (right - cell["length_chance"])


def test_numbers_are_taken_rightly(tool: ModuleType, cells: list[dict[str, Any]]) -> None:
    """Some of them another way."""
    text = tool.PAGE.read_text(encoding="utf-8")
    long = [c for c in cells if (c["key"]["protocol"], c["key"]["label"]) == ("paper", "rope/tokens-96")]
    assert len(long) == 3
    right = [100 * cell["result"]["test_accuracy"] for cell in long]
    assert f"| {np.mean(right):.0f}% ({min(right):.0f} to {max(right):.0f}) |" in text
