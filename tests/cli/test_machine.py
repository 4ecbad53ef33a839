"""Failures of the machine: one sentence, exit code 3, nothing half-written."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.builders import files_in
from tests.cli.command import TINY, TOEPLENS, CommandResult, Toeplens, command_in_process

from toeplens.__main__ import main


def test_a_missing_gpu_or_compiler_is_a_machine_error(
    toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("shutil.which", lambda _: None)
    for command, missing in (
        (("train", *TINY, "--device", "cuda"), "no usable GPU"),
        (("reproduce", "--scale", "smoke", "--device", "cuda"), "no usable GPU"),
        (("train", *TINY, "--compile", "on"), "no C++ compiler"),
    ):
        assert missing in toeplens(*command, "--out", tmp_path / "out").refusal(3)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.heavy
def test_a_file_size_limit_is_a_machine_error_without_partial_files(toeplens: Toeplens, tmp_path: Path):
    """As on a full disk: the spec fits, the weights do not."""
    command = ["train", *TINY, "--out", tmp_path]
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    refusal = command_in_process(*command, prefix=limit).refusal(3, begun=True)
    assert "model.safetensors" in refusal
    assert "no file is incomplete" in refusal
    (directory,) = tmp_path.iterdir()
    assert not {"model.safetensors", "result.json"} & files_in(directory).keys()
    assert not [path for path in directory.iterdir() if path.suffix == ".tmp"]
    assert toeplens(*command, "--json").json()["status"] == "complete"


@pytest.mark.heavy
def test_unwritable_standard_output_is_a_machine_error(tmp_path: Path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*TOEPLENS, "tasks", "--json"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (
        CommandResult(done.returncode, "", done.stderr).refusal(3).startswith("error: standard output: no space left")
    )


@pytest.mark.heavy
@pytest.mark.parametrize("command", [("encodings", "--json"), ("encodings",), ("--help",)])
def test_a_closed_pipe_is_not_an_error(command: tuple[str, ...]):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*TOEPLENS, *command], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("error", [MemoryError(), None])
def test_out_of_memory_is_a_machine_error(
    toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
):
    def used_up(*_: object, **__: object) -> None:
        raise error or RuntimeError("a mistake of ours")

    monkeypatch.setattr("toeplens.training.train", used_up)
    if error is None:
        with pytest.raises(RuntimeError, match="of ours"):
            toeplens("train", *TINY, "--out", tmp_path)
    else:
        assert "Out of memory. Lower --workers" in toeplens("train", *TINY, "--out", tmp_path).refusal(3)


def test_unencodable_characters_are_escaped(monkeypatch: pytest.MonkeyPatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["toeplens", "--version"])
    with pytest.raises(SystemExit):
        main()
    print("\udcff–")
    assert written.getvalue().endswith(b"\\udcff\\u2013\n")
