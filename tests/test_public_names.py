"""The names that people may rely on are those written down: none goes, comes or changes its parameters unnoticed."""

from __future__ import annotations

from pathlib import Path

from tests.builders import load_script

import toeplens

ROOT = Path(__file__).resolve().parents[1]


def test_public_names_and_parameters_match_the_list() -> None:
    """What changed on purpose is written down by `python tools/public_names.py`, and told in the CHANGELOG."""
    written = (ROOT / "tests" / "public-names.txt").read_text(encoding="utf-8").splitlines()
    actual = load_script(ROOT / "tools" / "public_names.py").public_names().splitlines()
    assert sorted(set(written) - set(actual)) == [], "gone, or with other parameters"
    assert sorted(set(actual) - set(written)) == [], "new"
    assert written == actual


def test_the_changelog_has_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {toeplens.__version__}" in changelog
