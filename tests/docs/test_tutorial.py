"""The tutorial is run as it stands: its commands and blocks in their order, in one folder, at toy size."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.command import Toeplens

from toeplens.encodings import registry
from toeplens.studies import grid

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "start" / "tutorial.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(sh|py|yaml)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
TOY = {"train_examples": 64, "test_examples": 32, "epochs": 1, "batch_size": 32}
SLOW = ("conformance.check", "toeplens card")  # they compile, or measure what a pass costs


@pytest.fixture
def tutorial_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which the example's package is known, as if it had been installed there."""
    site, example = tmp_path / "site", ROOT / "examples" / "gaussian-window"
    shutil.copytree(example / "src" / "gaussian_window", site / "gaussian_window")
    project = tomllib.loads((example / "pyproject.toml").read_text("utf-8"))["project"]
    about = site / f"gaussian_window-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n", "utf-8")
    named = "\n".join(f"{name} = {place}" for name, place in project["entry-points"]["toeplens.encodings"].items())
    (about / "entry_points.txt").write_text(f"[toeplens.encodings]\n{named}\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(site))
    registry._load_encodings.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    sys.modules.pop("gaussian_window", None)
    registry._load_encodings.cache_clear()


def commands(block: str) -> list[list[str]]:
    """The calls of toeplens in a block for a shell; setting up is not ours to do again."""
    lines = (shlex.split(line, comments=True) for line in block.splitlines())
    return [words[1:] for words in lines if words[:1] == ["toeplens"]]


def toy_study(block: str) -> str:
    """A study's file with models of a moment."""
    content = yaml.safe_load(block)
    content["training"] |= TOY
    content["model"] |= {"d_model": 16, "d_ff": 16, "num_heads": 2}
    return yaml.safe_dump(content, sort_keys=False)


def test_the_tutorials_study_file_is_valid(tutorial_dir: Path) -> None:
    (block,) = (block for kind, block in BLOCKS if kind == "yaml")
    cells = grid.grid_cells(grid.grid_spec(yaml.safe_load(block)))
    assert [cell.key.label for cell in cells] == ["rope", "nope", "mine"] * 2
    assert tutorial_dir.exists()


@pytest.mark.heavy
@pytest.mark.usefixtures("no_disk")
def test_the_tutorial_runs(toeplens: Toeplens, tutorial_dir: Path) -> None:
    names: dict[str, Any] = {"__name__": "tutorial"}
    for kind, block in BLOCKS:
        if kind == "yaml":
            (tutorial_dir / "mine.yaml").write_text(toy_study(block), "utf-8")
        elif any(slow in block for slow in SLOW):
            continue
        elif kind == "py":
            exec(compile(block, "tutorial", "exec"), names)
        else:
            for words in commands(block):
                extra = ["--workers", "1"] if words[0] == "study" else []
                answer = toeplens(*("2" if word == "5" else word for word in words), *extra)
                assert answer.code == 0, answer.err
    actual = names["mine"]
    assert {cell.key.label for cell in actual.results.cells} == {"rope", "nope", "mine"}
    assert len(actual.results.cells) == 12  # two tasks, three encodings, two seeds
    assert names["finding"].evidence.startswith("accuracy on index, RoPE less my window")
    assert (tutorial_dir / "demo" / "mine" / "report.html").exists()


@pytest.mark.heavy
def test_the_slow_parts_of_the_tutorial_run(tutorial_dir: Path) -> None:
    """In a process of their own, which checks no shapes: they compile."""
    parts = [block for kind, block in BLOCKS if kind == "py" and "conformance.check" in block]
    cards = [words for kind, block in BLOCKS if kind == "sh" for words in commands(block) if words[0] == "card"]
    assert (len(parts), len(cards)) == (1, 1)
    calls = [["-c", parts[0]], ["-m", "toeplens", *cards[0]]]
    environment = {**os.environ, "PYTHONPATH": str(tutorial_dir / "site")}
    for call in calls:
        subprocess.run([sys.executable, *call], check=True, cwd=tutorial_dir, env=environment)
    assert (tutorial_dir / "card.html").exists()
