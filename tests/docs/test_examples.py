"""Every Python example of the documentation runs, and every command it shows exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from toeplens.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(code, id=f"{page.name}-{index}")
    for page in PAGES
    for index, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_example_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_there_is_an_example_on_every_page_of_a_capability() -> None:
    for name in ("index", "reproduce", "protocols", "encodings", "tasks", "training", "ablation", "claims"):
        assert "```python" in (ROOT / "docs" / f"{name}.md").read_text(), name


def test_commands_shown_in_the_documentation_exist() -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    shown = {name for page in PAGES for name in re.findall(r"(?:^|`|bin/)toeplens ([a-z]+)", page.read_text(), re.M)}
    assert shown == known


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, *(ROOT / "docs" / "decisions").glob("*.md"), ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
