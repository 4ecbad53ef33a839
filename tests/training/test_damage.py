"""A file of a run is missing, cut short, empty or a pipe: the run ends the same, or one sentence says what to do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.builders import After, outcome, refusal, tiny

from toeplens.training import Run, train

SAME, REFUSED = "same", "refused"
# what becomes of a run that goes on with such a file: (missing, cut short, empty, a pipe)
FINISHED = {
    "environment.json": (SAME, SAME, SAME, SAME),
    "metrics.jsonl": (REFUSED, REFUSED, REFUSED, REFUSED),
    "model.safetensors": (REFUSED, REFUSED, REFUSED, REFUSED),
    "result.json": (SAME, REFUSED, REFUSED, REFUSED),
    "spec.json": (REFUSED, REFUSED, REFUSED, REFUSED),
}
STOPPED = {
    "checkpoint.pt": (SAME, REFUSED, REFUSED, REFUSED),
    "environment.json": (SAME, SAME, SAME, SAME),
    "metrics.jsonl": (SAME, SAME, SAME, SAME),
    "progress.json": (SAME, SAME, SAME, SAME),
    "spec.json": (REFUSED, REFUSED, REFUSED, REFUSED),
}
CASES = [
    (state, name, how, becomes)
    for state, table in (("finished", FINISHED), ("stopped", STOPPED))
    for name, row in table.items()
    for how, becomes in zip(("missing", "short", "empty", "pipe"), row, strict=True)
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    out = tmp_path_factory.mktemp("runs")
    stopped = train(tiny(), out / "stopped", should_stop=After(8))
    return {"finished": train(tiny(), out / "finished"), "stopped": stopped}


def test_every_file_is_tried(runs: dict[str, Run]):
    for state, table in (("finished", FINISHED), ("stopped", STOPPED)):
        assert {path.name for path in runs[state].directory.iterdir()} == {*table, ".lock"}


@pytest.mark.parametrize(("state", "name", "how", "becomes"), CASES)
def test_a_file_that_a_power_cut_took(
    runs: dict[str, Run], tmp_path: Path, state: str, name: str, how: str, becomes: str
):
    directory = tmp_path / runs[state].directory.name
    shutil.copytree(runs[state].directory, directory)
    content = (directory / name).read_bytes()
    if how in ("missing", "pipe"):
        (directory / name).unlink()
        if how == "pipe":
            os.mkfifo(directory / name)
    else:
        (directory / name).write_bytes(content[: len(content) // 2] if how == "short" else b"")
    if becomes == SAME:
        run = train(tiny(), tmp_path)
    else:
        message = refusal(lambda: train(tiny(), tmp_path).model())
        assert "; delete " in message or "; give " in message
        shutil.rmtree(directory) if name == "spec.json" else None
        for each in ("result.json", "checkpoint.pt"):  # as the sentence says
            if each in message:
                (directory / each).unlink()
        run = train(tiny(), tmp_path)
    run.model()
    assert outcome(run) == outcome(runs["finished"])
