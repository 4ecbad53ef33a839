"""What is released: wheel and source hold what they need, and the wheel works where nothing else is installed."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

import toeplens

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_IMPORTED_AS = {"vl_convert_python": "vl_convert", "pyyaml": "yaml", "mlflow_skinny": "mlflow"}
OPTIONAL = set(PROJECT["optional-dependencies"]) - {"test", "lint", "docs"}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(out)], cwd=ROOT, check=True, timeout=120)
    return out


def required_packages(lines: list[str]) -> set[str]:
    """Names of packages as they are imported."""
    names = {re.split(r"[<>=\[; ]", line)[0].lower().replace("-", "_") for line in lines}
    return {_IMPORTED_AS.get(name, name) for name in names}


def imported_packages(nodes: Iterable[ast.AST]) -> set[str]:
    """The packages that import statements among ``nodes`` name."""
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    from_them = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in plain | from_them}


def test_imported_packages_are_required() -> None:
    """Where a file begins by the package itself; within a function by it or one of its extras."""
    always = {*required_packages(PROJECT["dependencies"]), *sys.stdlib_module_names, "toeplens"}
    always |= {"markupsafe", "typing_extensions"}  # of jinja2 and pydantic
    extras = set().union(*(required_packages(PROJECT["optional-dependencies"][name]) for name in OPTIONAL))
    extras |= {"tokenizers", "huggingface_hub"}  # of transformers
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert imported_packages(tree.body) <= always, path
        assert imported_packages(list(ast.walk(tree))) <= always | extras, path


@pytest.mark.heavy
def test_the_wheel_matches_the_source(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "src/toeplens"], cwd=ROOT, capture_output=True, text=True
    )
    ours = {str(Path(line).relative_to("src")) for line in tracked.stdout.splitlines() if (ROOT / line).exists()}
    assert held == ours
    assert "toeplens/py.typed" in held
    assert wheel.stat().st_size < 4e6


@pytest.mark.heavy
def test_the_source_distribution_makes_the_same_wheel(distributions: Path, tmp_path: Path) -> None:
    (packed,) = distributions.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for name in ("README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "Makefile", "constraints.txt", "tests"):
        assert (source / name).exists(), name
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=source, check=True
    )
    (again,), (first,) = tmp_path.glob("*.whl"), distributions.glob("*.whl")
    assert again.read_bytes() == first.read_bytes()


@pytest.mark.heavy
def test_the_wheel_works_in_a_fresh_environment(distributions: Path, tmp_path: Path) -> None:
    """Installed as a user installs it, with its own dependencies and no others."""
    (wheel,) = distributions.glob("*.whl")
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    pip = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel]
    subprocess.run(pip, check=True, cwd=tmp_path, env=environment, timeout=900)

    def run(*arguments: str) -> str:
        command = [home / "bin" / "toeplens", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("--version") == f"toeplens {toeplens.__version__}\n"
    result = json.loads(run("reproduce", "--scale", "smoke", "--protocol", "paper", "--out", "demo", "--json"))
    assert result["finished"] == result["total"] > 0
    assert (tmp_path / "demo" / "report.html").stat().st_size > 100_000
    assert "alibi" in run("encodings")
    run("tables", "demo", "--out", "tables")
    assert list((tmp_path / "tables").glob("*.csv"))
