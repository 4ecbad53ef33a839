"""The example package is installed as a user would install it, is known to the commands, conforms, and trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toeplens import encodings
from toeplens.encodings import conformance, registry

EXAMPLE = Path(__file__).parents[2] / "examples" / "gaussian-window"


@pytest.fixture(scope="module")
def plugin_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that sees the installed package; nothing of ours is changed."""
    site = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "gaussian-window"
    subprocess.run(["cp", "-r", str(EXAMPLE), str(source)], check=True)  # a build writes beside its source
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--no-build-isolation", "--target", str(site), str(source)], check=True)
    return {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"}


def toeplens(environment: dict[str, str], *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "toeplens", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_plugin_is_registered_and_conforms(plugin_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which need not start: found by its entry point and checked, but for its compilation."""
    monkeypatch.syspath_prepend(plugin_env["PYTHONPATH"])
    registry._load_encodings.cache_clear()
    try:
        assert encodings.get("gaussian-window").coupling == "bias"
        options = encodings.options("gaussian-window")
        assert {name: option.default for name, option in options.items()} == {"widest": 32.0}
        for widest in (32.0, 4.0):
            conformance.check("gaussian-window", skip=["compile"], widest=widest)
    finally:
        monkeypatch.undo()
        sys.modules.pop("gaussian_window")
        registry._load_encodings.cache_clear()


@pytest.mark.heavy
def test_the_plugin_trains(plugin_env: dict[str, str], tmp_path: Path) -> None:
    common = ["--scale", "smoke", "--out", str(tmp_path), "--json"]
    changes = ["epochs=1", "train_examples=64", "test_examples=32", "model.encoding_options.widest=8"]
    option = [part for change in changes for part in ("--set", change)]
    result = json.loads(toeplens(plugin_env, "train", "--encoding", "gaussian-window", *option, *common))
    assert result["status"] == "complete"
    spec = json.loads((Path(result["directory"]) / "spec.json").read_text())
    assert spec["model"]["encoding"] == "gaussian-window"
    assert spec["model"]["encoding_options"] == {"widest": 8}


@pytest.mark.heavy
def test_the_plugins_own_tests_pass(plugin_env: dict[str, str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", str(EXAMPLE / "tests")],
        env=plugin_env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed" in run.stdout
