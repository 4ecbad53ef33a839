"""A run that is gone on with on another set-up says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.builders import After, tiny
from tests.cli.command import Toeplens

from toeplens.training import train


@pytest.mark.usefixtures("threads")
def test_what_a_run_was_carried_out_on_is_told(toeplens: Toeplens, tmp_path: Path):
    torch.set_num_threads(1)
    run = train(tiny(), tmp_path, should_stop=After(2))
    torch.set_num_threads(2)
    said = toeplens("train", run.directory / "spec.json", "--out", tmp_path)
    assert "carried out on more than one set-up: steps 0-2 on cpu" in said.out
    history = toeplens("train", run.directory / "spec.json", "--out", tmp_path, "--json").json()["history"]
    assert [(each["start"], each["end"], each["setup"]["threads"]) for each in history] == [(0, 2, 1), (2, 6, 2)]
