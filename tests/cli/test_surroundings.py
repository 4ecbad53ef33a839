"""Odd surroundings: locales, widths, paths, several processes at once."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
from tests.builders import held
from tests.cli.command import TINY, TOEPLENS, Toeplens

from toeplens import cli
from toeplens.training import Run


@pytest.mark.parametrize("columns", ["0", "1", "9" * 5000])
def test_a_width_that_cannot_be_is_not_taken_over(toeplens: Toeplens, monkeypatch: pytest.MonkeyPatch, columns: str):
    monkeypatch.setenv("COLUMNS", columns)
    assert "trigger-count" in toeplens("tasks", "--json").out
    assert "COLUMNS" not in os.environ


def test_a_locale_without_signs_gets_tables_too():
    """In a process of its own, whose streams are as the locale has them."""
    locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "0"}
    done = subprocess.run([*TOEPLENS, "tasks", "--full"], capture_output=True, env={**os.environ, **locale})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"trigger-count" in done.stdout


def test_what_a_stream_cannot_write_is_escaped(monkeypatch: pytest.MonkeyPatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["toeplens", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    print("\udcff–")
    assert written.getvalue().endswith(b"\\udcff\\u2013\n")


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["train", "--out"], "'--out'"),
        (["study", "canonical", "--out"], "'--out'"),
        (["card", "rope", "--out"], "'--out'"),
        (["ablate"], "'run'"),
        (["study"], "'spec'"),
        (["audit", "model", "--out"], "'--out'"),
        (["audit", "model", "--text"], "'--text'"),
        (["compare"], "'first'"),
        (["report"], "'directory'"),
    ],
)
def test_paths_that_cannot_be_name_their_option(toeplens: Toeplens, command: list[str], named: str):
    assert f"Invalid value for {named}: it is empty" in toeplens(*command, "").refusal()
    for url in ("s3://bucket/x", "file:///tmp/x"):
        assert f"Invalid value for {named}: {url} is a URL; a path" in toeplens(*command, url).refusal()
    for path in ("x" * 5000, "x" * 256, "x/" * 2500):
        refusal = toeplens(*command, path).refusal()
        assert f"Invalid value for {named}: a path of {len(path)} bytes, or a name in it, is longer" in refusal


def test_a_task_without_sizes_says_what_to_do(toeplens: Toeplens, tmp_path: Path):
    refusal = toeplens("train", "--task", "copy", "--out", tmp_path).refusal()
    assert "'copy' was given; a scale has sizes for trigger-distance and trigger-count alone" in refusal
    assert "did you mean 'copy'" in toeplens("train", "--task", "coppy", "--out", tmp_path).refusal()


def test_weights_that_may_not_be_read_are_not_missing(toeplens: Toeplens, run: Run, monkeypatch: pytest.MonkeyPatch):
    def refused(path: Path) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(safetensors.torch, "load_file", refused)
    assert "model.safetensors cannot be read" in toeplens("ablate", run.directory).refusal()


def test_a_run_that_another_process_begins_is_refused(toeplens: Toeplens, run: Run):
    for path in run.directory.iterdir():
        path.unlink()
    with held(run.directory):
        refusal = toeplens("train", *TINY, "--out", run.directory.parent).refusal()
    assert "is being worked on by another process" in refusal
