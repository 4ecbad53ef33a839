"""Every Python example of the documentation runs, and every command it shows exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.command import Toeplens, changes

from toeplens import encodings
from toeplens.cli import app
from toeplens.ground import machine

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = {
    f"{page.name}-{index}": code
    for page in PAGES
    for index, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
}
# these compile, which what checks our shapes would not let
COMPILING = {name: code for name, code in EXAMPLES.items() if "conformance.check" in code or "make_card" in code}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in COMPILING])
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[name], name, "exec"), {"__name__": "example"})


@pytest.mark.heavy
def test_the_examples_that_compile_run(tmp_path: Path) -> None:
    """One after another in one process, which takes longer to start than they do."""
    assert len(COMPILING) > 2
    for name, code in COMPILING.items():
        (tmp_path / f"{name}.py").write_text(code)
    command = "import runpy, sys; [runpy.run_path(file, run_name='__main__') for file in sys.argv[1:]]"
    files = [f"{name}.py" for name in COMPILING]
    subprocess.run([sys.executable, "-W", "error", "-c", command, *files], check=True, cwd=tmp_path)


def test_there_is_an_example_on_every_page_of_a_capability() -> None:
    pages = "index reproduce protocols encodings conformance tasks training ablation mechanism gradients representation"
    pages += " decomposition toeplitz theory claims behaviour frequency relevance study audit intervene export"
    for name in pages.split():
        assert "```python" in (ROOT / "docs" / f"{name}.md").read_text(), name


def test_commands_shown_in_the_documentation_exist() -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    shown = {name for page in PAGES for name in re.findall(r"(?:^|`|bin/)toeplens ([a-z]+)", page.read_text(), re.M)}
    assert shown == known


def test_the_errors_shown_are_what_is_said(toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine with 25.3 GB; a long list is cut short."""
    monkeypatch.setattr(machine, "memory", lambda: 25_300_000_000)
    shown = re.findall(r"^error: .*$", (ROOT / "docs" / "cli.md").read_text(), re.MULTILINE)
    given = [["--encoding", "rop"], ["--encoding", "rope", *changes(model__max_len=10**9)]]
    for words, line in zip(given, shown, strict=True):
        said = toeplens("train", "--scale", "smoke", *words, "--out", tmp_path).refusal()
        assert said.startswith(line.removesuffix("...")), said
        assert line.endswith("...") or said == line


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, *(ROOT / "docs" / "decisions").glob("*.md"), ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_table_of_encodings_is_complete_and_true() -> None:
    page = (ROOT / "docs" / "encodings.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z0-9-]+)` \| (.*) \|$", page, re.M))
    for name in encodings.names():
        kind = encodings.get(name)
        where, _, toeplitz, content, source = rows[name].split(" | ")
        assert where == ", ".join((kind.coupling, *kind.also_couples)), name
        assert (toeplitz, content) == tuple("yes" if x else "no" for x in (kind.toeplitz, kind.data_dependent)), name
        assert kind.citation.startswith(source.rstrip(")")), name
    checked = (ROOT / "docs" / "conformance.md").read_text()
    assert {name for name, _ in re.findall(r"^\| `([a-z0-9-]+)`(.*)\|$", checked, re.M)} <= set(encodings.names())


NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "reliability.md").read_text("utf-8"))))


def test_the_page_on_faults_names_tests() -> None:
    assert len(NAMED) > 20


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_the_page_on_faults_names_is_there(file: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE)
