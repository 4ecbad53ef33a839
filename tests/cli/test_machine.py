"""Failures of the machine: one sentence, exit code 3, nothing half-written."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders import files
from tests.cli.command import TINY, TOEPLENS, Answer, Toeplens, in_a_process

LONG = {"train": [*TINY], "reproduce": ["--scale", "smoke"], "theory": ["--scale", "smoke", "--seeds", 1]}


@pytest.mark.parametrize("command", [[name, *options] for name, options in LONG.items()], ids=list(LONG))
def test_a_gpu_that_is_not_there(
    toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refusal = toeplens(*command, "--device", "cuda", "--out", tmp_path / "out").refusal(3)
    assert "no usable GPU" in refusal
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_is_not_there(toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    refusal = toeplens("train", *TINY, "--compile", "on", "--out", tmp_path / "out").refusal(3)
    assert "no C++ compiler" in refusal
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limited", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_files_that_may_not_grow_are_the_machines_failure_and_nothing_is_half_written(
    toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limited: bool
):
    """As on a full disk: the spec fits, the weights do not. Refused by the kernel, or (quicker) in its place."""
    command = ["train", *TINY, "--out", tmp_path]
    if limited:
        limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
        refusal = in_a_process(*command, prefix=limit).refusal(3, begun=True)
    else:
        replace_file = os.replace

        def full(temporary: Any, path: Any) -> None:
            if Path(temporary).stat().st_size > 4096:
                raise OSError(errno.ENOSPC, "No space left on device")
            replace_file(temporary, path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            refusal = toeplens(*command).refusal(3, begun=True)
    assert "model.safetensors" in refusal
    assert "nothing was left half-written" in refusal
    (directory,) = tmp_path.iterdir()
    assert not {"model.safetensors", "result.json"} & files(directory).keys()
    assert not [path for path in directory.iterdir() if path.suffix == ".tmp"]
    assert toeplens(*command, "--json").json()["status"] == "complete"


def test_standard_output_that_cannot_be_written(tmp_path: Path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*TOEPLENS, "tasks", "--json"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert Answer(done.returncode, "", done.stderr).refusal(3).startswith("error: standard output: no space left")


@pytest.mark.heavy
def test_a_reader_that_goes_away_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*TOEPLENS, "encodings", "--json"], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.stderr == ""


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), None])
def test_memory_that_is_used_up_is_the_machines_failure(
    toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
):
    def used_up(*_: object, **__: object) -> None:
        raise error or RuntimeError("a mistake of ours")

    monkeypatch.setattr("toeplens.training.train", used_up)
    if error is None:
        with pytest.raises(RuntimeError, match="of ours"):
            toeplens("train", *TINY, "--out", tmp_path)
    else:
        assert "memory is used up" in toeplens("train", *TINY, "--out", tmp_path).refusal(3)
