"""Every Python example of the documentation runs, and every command it shows exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from toeplens import encodings
from toeplens.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = {
    f"{page.name}-{index}": code
    for page in PAGES
    for index, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
}
# these compile, which what checks our shapes would not let
COMPILING = {name: code for name, code in EXAMPLES.items() if "conformance.check" in code or "make_card" in code}


# they train, load large models, or start processes
SLOW = ("claims.md", "export.md", "real-models.md", "scale.md", "training.md", "watch-training.md")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.heavy if name.startswith(SLOW) else ())
        for name in EXAMPLES
        if name not in COMPILING
    ],
)
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for package in re.findall(r"^from (nnsight|transformer_lens)", EXAMPLES[name], re.M):
        pytest.importorskip(package)
    for model in re.findall(r'"(models/[^"]+)"', EXAMPLES[name]):
        if not (ROOT / model).exists():
            pytest.skip(f"{model} is not there: make real-models fetches it")
        (tmp_path / "models").symlink_to(ROOT / "models")
    file = tmp_path / f"{name}.py"  # nnsight reads the source
    file.write_text(EXAMPLES[name])
    exec(compile(EXAMPLES[name], str(file), "exec"), {"__name__": "__main__"})


@pytest.mark.heavy
def test_the_examples_that_compile_run(tmp_path: Path) -> None:
    """One after another in one process, which takes longer to start than they do."""
    assert len(COMPILING) > 2
    for name, code in COMPILING.items():
        (tmp_path / f"{name}.py").write_text(code)
    command = "import runpy, sys; [runpy.run_path(file, run_name='__main__') for file in sys.argv[1:]]"
    files = [f"{name}.py" for name in COMPILING]
    subprocess.run([sys.executable, "-W", "error", "-c", command, *files], check=True, cwd=tmp_path)


def test_commands_shown_in_the_documentation_exist() -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    shown = {name for page in PAGES for name in re.findall(r"(?:^|`|bin/)toeplens ([a-z]+)", page.read_text(), re.M)}
    assert shown == known


def test_links_between_pages_resolve() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_table_of_encodings_is_complete_and_correct() -> None:
    page = (ROOT / "docs" / "reference" / "encodings.md").read_text()
    actual = re.findall(r"^\| `([a-z0-9-]+)` \| (.*) \|$", page, re.M)
    rows = {name: row.split(" | ") for name, row in actual if row.count(" | ") == 4}
    for name in encodings.names():
        kind = encodings.get(name)
        where, _, toeplitz, content, source = rows[name]
        assert where == ", ".join((kind.coupling, *kind.also_couples)), name
        assert (toeplitz, content) == tuple("yes" if x else "no" for x in (kind.toeplitz, kind.data_dependent)), name
        assert kind.citation.startswith(source.rstrip(")")), name
    checked = (ROOT / "docs" / "reference" / "conformance.md").read_text()
    assert {name for name, _ in re.findall(r"^\| `([a-z0-9-]+)`(.*)\|$", checked, re.M)} <= set(encodings.names())
