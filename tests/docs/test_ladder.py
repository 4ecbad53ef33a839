"""What docs/ladder.md says is written from the record of the ladder."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.builders import script

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "results" / "ladder" / "results.json.xz"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return script(ROOT / "tools" / "ladder_findings.py")


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    return json.loads(lzma.decompress(RECORD.read_bytes()))["cells"]


def test_its_numbers_are_the_records(tool: ModuleType) -> None:
    text = tool.PAGE.read_text(encoding="utf-8")
    assert text.count("<!-- found: ") == 6
    assert tool.page(tool.record()) == text, "run python tools/ladder_findings.py"


def _told(cell: dict[str, Any]) -> np.ndarray:
    """Which heads' costs are told from none: by those of its examples that it loses or wins."""
    counts = cell["ablation"]
    drops, low = np.array(counts["drops"]), np.array(counts["low"])
    return np.where(low > 0, drops, 0.0)


def _row(text: str, head: str, what: str) -> list[str]:
    table = text[text.index(f"\n{head}:\n") :]
    return next(line for line in table.splitlines() if line.startswith(f"| {what} |")).strip("| ").split(" | ")


@pytest.mark.parametrize(
    ("protocol", "base", "head"),
    [("paper", "rope", "RoPE, paper protocol"), ("released", "rope-alone", "RoPE, no sinusoid, released protocol")],
)
@pytest.mark.parametrize(
    ("rung", "what"),
    [("tokens-96", "tokens: 96, of 128 words"), ("", "nothing: the scale as it is"), ("heads-4", "heads: 4")],
)
def test_numbers_are_taken_rightly(
    tool: ModuleType, cells: list[dict[str, Any]], protocol: str, base: str, head: str, rung: str, what: str
) -> None:
    """The tables' first ones another way: from the record's own numbers."""
    label = f"{base}/{rung}".rstrip("/")
    three = [cell for cell in cells if (cell["key"]["protocol"], cell["key"]["label"]) == (protocol, label)]
    assert len(three) == 3
    costs = [_told(cell).max() / (cell["ablation"]["baseline"] - cell["length_chance"]) for cell in three]
    figures = {
        "right": [100 * cell["result"]["test_accuracy"] for cell in three],
        "cost": [100 * cost for cost in costs],
        "heads": [(_told(cell) > 0).sum() for cell in three],
    }
    row = _row(tool.PAGE.read_text(encoding="utf-8"), head, what)
    right, cost, heads = row[2], row[3], row[5]
    assert right == _spread(figures["right"], "%")
    assert cost == _spread(figures["cost"], "%")
    assert heads == _spread(figures["heads"])


def _spread(values: list[float], unit: str = "") -> str:
    return f"{np.mean(values):.0f}{unit} ({min(values):.0f} to {max(values):.0f})"
