"""docs/which-encoding.md is what the records say, and takes a record of language models as it comes."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tests.builders import script
from tests.report.grid.language_state import LOST, language_grid

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return script(ROOT / "tools" / "which_encoding.py")


@pytest.fixture(scope="module")
def text(tool: ModuleType) -> str:
    return tool.page()


def test_the_page_is_written_from_the_records(tool: ModuleType, text: str) -> None:
    assert tool.PAGE.read_text("utf-8") == text, "run python tools/which_encoding.py"


def test_every_part_of_the_page_was_written(text: str) -> None:
    assert "{{" not in text
    assert text.index("## Limits first") < text.index("## In short")


def test_numbers_are_taken_rightly(tool: ModuleType, text: str) -> None:
    """One of them another way, straight from the file."""
    cells = [cell for cell in tool.RECORDS["canonical"].content["cells"] if cell["key"]["task"] == "mix"]
    rope = [cell["result"]["test_accuracy"] for cell in cells if cell["key"]["label"] == "rope"]
    row = re.search(r"^\| RoPE \| (.*) \|$", text, re.M)
    assert row is not None
    assert row[1].split(" | ")[2].startswith(f"{100 * np.mean(rope):.0f} [")


def test_models_that_were_still_learning_do_not_count(tool: ModuleType, text: str) -> None:
    canonical = tool.RECORDS["canonical"].results
    assert not any(cell.settled for cell in canonical.of("index", "sinusoidal"))
    assert "| Sinusoid | – (0 of 5: still learning) |" in text


def test_each_verdict_is_the_ledgers(tool: ModuleType, text: str) -> None:
    """And every claim asked for is in some record, with its verdict behind its id."""
    ledger = {
        (name, each["id"], each["protocol"]): each for name in tool.RECORDS for each in tool.RECORDS[name].entries
    }
    for ids in tool.ASKED.values():
        for claim in ids:
            found = [(key, each) for key, each in ledger.items() if key[1] == claim and key[0] != "language"]
            assert found, claim
            for (name, _, protocol), each in found:
                where = f"`{name}`" + (f", {protocol} protocol" if protocol else "")
                verdict = f"**{each['verdict']}**" if each["verdict"] in tool.DECIDED else each["verdict"]
                told = rf"^    - {where}, (up to )?\d+ seeds: {re.escape(verdict)}\. "
                assert re.search(told, text, re.M), (claim, where)


def test_nothing_is_said_of_language_models_before_they_are_recorded(
    tool: ModuleType, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "language" not in tool.RECORDS:
        assert "is in training. Nothing of it is recorded yet" in text
    grid = language_grid(tmp_path)
    entry = {
        "id": "alibi-extrapolates",
        "statement": "ALiBi extrapolates.",
        "source": "made up",
        "verdict": "leans to hold",
        "protocol": None,
        "parts": [{"essential": True, "verdict": "leans to hold", "evidence": "bits lost: -0.020 (3 seeds), bar 0.01"}],
    }
    made = tool.Recorded("language", {"spec": "", "cells": [cell.to_dict() for cell in grid.results.cells]}, [entry])
    made.__dict__["spec"] = grid.spec
    monkeypatch.setitem(tool.RECORDS, "language", made)
    told = tool.page()
    assert "| `language` | paper | 1 | 3 | 3, 4, 32 |" in told
    assert f"| ALiBi | 3 | 2.080 (2.076 to 2.084) | {LOST['alibi']:.3f} |" in told
    assert "    - `language`, 3 seeds: leans to hold. bits lost: -0.020 (3 seeds), bar 0.01" in told
    assert "is in training" not in told
