"""What docs/language.md says of the recorded language models is written from the record."""

from __future__ import annotations

from pathlib import Path

from tests.builders import script

ROOT = Path(__file__).parents[2]


def test_the_findings_are_those_of_the_record() -> None:
    tool = script(ROOT / "tools" / "language_findings.py")
    text = tool.PAGE.read_text(encoding="utf-8")
    assert text.count("<!-- found: ") == 6
    assert tool.page(tool.record()) == text, "run python tools/language_findings.py"


def test_sentences_around_them_hold() -> None:
    tool = script(ROOT / "tools" / "language_findings.py")
    rows = {row.label: row for row in tool.language.language_rows(tool.record().spec, tool.record().results)}
    assert min(rows, key=lambda label: rows[label].lost) == "alibi"
