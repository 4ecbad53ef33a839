"""Studies by the command line: their tables, claims and pages, and what stops them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders import files_in, wait_until
from tests.cli.command import TINY, TOEPLENS, Toeplens, command_in_process, set_options
from tests.papers.deposit.test_study import use_micro_scale

from toeplens.engine import pool
from toeplens.papers.deposit import claims_of
from toeplens.studies.kit import study
from toeplens.training import Run
from toeplens.training import run as store
from toeplens.utils import read_json
from toeplens.utils.execution import INTERRUPTED_MESSAGE

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture
def micro_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    use_micro_scale(monkeypatch, labels=("rope",))


@pytest.fixture
def local_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies are carried out in this process."""

    monkeypatch.setattr(pool, "plan_workers", lambda *_: (1, torch.get_num_threads()))


@pytest.mark.usefixtures("micro_scale", "local_studies")
def test_a_study_writes_its_claims_and_its_page(toeplens: Toeplens, tmp_path: Path):
    command = ["reproduce", "--scale", "smoke", "--protocol", "paper", "--out", tmp_path / "study"]
    state = toeplens(*command, "--json").json()
    assert (state["finished"], state["total"], state["share"]) == (2, 2, 1.0)
    assert Path(state["page"]).read_text().lstrip().lower().startswith("<!doctype html>")
    assert [claim["id"] for claim in state["claims"]] == [claim.id for claim in claims_of(["core"])]
    assert {row["label"] for row in state["table"]} == {"rope", "nope"}
    assert read_json(tmp_path / "study" / "claims.json")["claims"] == state["claims"]

    assert toeplens("claims", tmp_path / "study", "--json").json() == state["claims"]
    assert "deposit-first-layer, paper: undecided" in toeplens("claims", tmp_path / "study", "--evidence").out
    Path(state["page"]).unlink()
    assert toeplens("report", tmp_path / "study", "--json").json() == {"page": state["page"]}
    assert Path(state["page"]).exists()

    assert "2 models at scale smoke" in toeplens(*command).err
    assert "contains a study at scale 'smoke'" in toeplens(*command, "--scale", "laptop").refusal()


SMALL_STUDY = """
title: Mine
claims: positional-symbolic
seeds: 1
examples: 8
measures: [toeplitz, extrapolation]
model: {d_model: 8, d_ff: 8, num_layers: 1, num_heads: 2}
training: {train_examples: 16, test_examples: 8, batch_size: 16, epochs: 1}
tasks:
  index: {options: {length: 6, words: 6}}
encodings:
  rope: {title: RoPE}
  nope:
"""


@pytest.mark.usefixtures("local_studies")
def test_a_user_defined_study_runs(toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its table, its claims and its page; in a directory of its name, as none is given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(SMALL_STUDY)
    out = tmp_path / "demo" / "mine"
    command = ["study", tmp_path / "mine.yaml", "--compile", "off"]
    state = toeplens(*command, "--json").json()
    assert (state["finished"], state["total"]) == (2, 2)
    assert [(row["task"], row["label"]) for row in state["table"]] == [("index", "rope"), ("index", "nope")]
    assert Path(state["page"]).read_text().lstrip().lower().startswith("<!doctype html>")
    people = toeplens(*command)
    assert "2 models (Mine)" in people.err
    assert "length-only" in people.out
    assert toeplens("claims", out, "--json").json() == state["claims"]
    assert toeplens("report", out, "--json").json()["page"] == str(Path(state["page"]).resolve())
    more = toeplens(*command, "--seeds", "2", "--time-budget", "0.0001").out
    assert "2 of 4 cells finished" in more
    assert "got 'mine'" in toeplens("study", "mine", "--out", out).refusal()


def test_the_call_stack_from_command_to_optimizer_step_is_short(
    toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """At most eight frames of ours in six files."""
    actual: list[str] = []

    def step(*_: Any, **__: Any) -> None:
        ours = str(Path(study.__file__).parents[2])
        actual.extend(frame.filename for frame in traceback.extract_stack() if frame.filename.startswith(ours))
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    assert toeplens("reproduce", "--scale", "smoke", "--workers", "1", "--out", tmp_path / "out").code == 130
    assert 4 < len(actual) <= 8
    assert len(set(actual)) <= 6


def test_an_unreadable_text_of_a_study_is_named(toeplens: Toeplens, tmp_path: Path):
    study = ["study", "language-smoke", "--out", tmp_path / "study"]
    assert "none.txt does not exist" in toeplens(*study, "--text", tmp_path / "none.txt").refusal()
    (tmp_path / "short.txt").write_text("\n".join(f"{number} words of a short text" for number in range(3000)))
    short = toeplens(*study, "--text", tmp_path / "short.txt").refusal()
    assert "train_examples must be at most" in short
    other = toeplens("study", "canonical-smoke", "--out", tmp_path / "other", "--text", tmp_path / "short.txt")
    assert "--text must be set only for a study with the task language" in other.refusal()


def test_the_theory_study_runs_from_the_command_line(
    toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Stopped before it began, so that it is quick; tests/papers/mathematics/test_study.py carries it out."""
    monkeypatch.setattr("toeplens.utils.execution.parse_duration", lambda text: -1e9)
    command = ["theory", "--scale", "smoke", "--seeds", "1", "--time-budget", "1m", "--out", tmp_path / "theory"]
    state = toeplens(*command, "--json").json()
    assert (state["finished"], state["total"]) == (0, 12)
    assert {claim["verdict"] for claim in state["claims"]} == {"undecided"}
    assert toeplens("claims", tmp_path / "theory", "--json").json() == state["claims"]
    assert "0 of 12 records finished. Run the same command to resume." in toeplens(*command).out
    assert "verdict" in toeplens("claims", tmp_path / "theory").out
    page = Path(toeplens("report", tmp_path / "theory", "--json").json()["page"])
    assert "0 of 12 records" in page.read_text()


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["smollm2", "gemma3", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "minilm"])
def test_a_recorded_pretrained_model_has_its_page_and_its_claims(toeplens: Toeplens, tmp_path: Path, name: str):
    """From results.json.xz and claims.json, which are all that `results/` keeps of it."""
    for file in ("results.json.xz", "claims.json"):
        (tmp_path / file).write_bytes((RESULTS / name / file).read_bytes())
    assert toeplens("report", tmp_path, "--json").json() == {"page": str(tmp_path / "report.html")}
    assert "Map of heads" in (tmp_path / "report.html").read_text()
    assert toeplens("claims", tmp_path, "--json").json() == read_json(tmp_path / "claims.json")["claims"]
    assert set(files_in(tmp_path)) == {"results.json.xz", "claims.json", "report.html"}


@pytest.mark.heavy
def test_a_recorded_study_has_its_page_and_ledger_without_its_runs(toeplens: Toeplens, tmp_path: Path):
    for name in ("results.json", "claims.json"):
        shutil.copy(RESULTS / "theory" / name, tmp_path)
    assert toeplens("report", tmp_path, "--json").json() == {"page": str(tmp_path / "report.html")}
    judged = {claim["id"]: claim["verdict"] for claim in toeplens("claims", tmp_path, "--json").json()}
    assert judged == {claim["id"]: claim["verdict"] for claim in read_json(tmp_path / "claims.json")["claims"]}
    assert "belongs to neither a study nor runs" in toeplens("theory", "--out", tmp_path).refusal()
    (tmp_path / "claims.json").unlink()
    assert "contains no study, audit, probe or record" in toeplens("report", tmp_path).refusal()


@pytest.mark.heavy
def test_sigterm_stops_training_at_a_checkpoint(tmp_path: Path):
    command = ["train", *TINY, *set_options(epochs=100_000), "--out", str(tmp_path), "--json"]
    told = output_after_group_signal(signal.SIGTERM, command, lambda: bool(list(tmp_path.glob("*/metrics.jsonl"))))
    (run,) = map(Run.open, tmp_path.iterdir())
    assert told["status"] == run.status == "stopped"
    assert run.step > 0


def output_after_group_signal(number: signal.Signals, command: list[str], ready: Callable[[], bool]) -> Any:
    """What is printed for a machine after a signal, as a terminal, `timeout` and schedulers send it.

    It goes to the command and all its workers, which have a minute to be gone, however busy the machine is.
    """
    process = subprocess.Popen(
        [*TOEPLENS, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        wait_until(ready, process)
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[-1]) == (130, INTERRUPTED_MESSAGE)
    assert "Traceback" not in err
    return json.loads(out)


@pytest.mark.heavy
def test_ctrl_c_stops_a_study_and_the_same_command_resumes_it(tmp_path: Path):
    command = ["reproduce", "--scale", "smoke", "--protocol", "released", "--out", str(tmp_path / "study"), "--json"]
    runs = tmp_path / "study" / "runs"
    state = output_after_group_signal(signal.SIGINT, command, lambda: len(list(runs.glob("*/metrics.jsonl"))) >= 3)
    assert 0 < state["finished"] < state["total"]
    unfinished = [run for run in map(Run.open, runs.iterdir()) if run.status == "stopped"]
    assert all(store.load_checkpoint(run.directory, run.spec) is not None for run in unfinished)
    assert len(unfinished) <= 2  # no more than there are workers
    done = command_in_process(*command, timeout=600).json()
    assert done["finished"] == done["total"] == state["total"]
    assert done["share"] == 1.0


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_worker_startup_stops_cleanly(tmp_path: Path, number: signal.Signals):
    command = ["reproduce", "--scale", "smoke", "--out", str(tmp_path / "study"), "--json"]
    assert output_after_group_signal(number, command, (tmp_path / "study" / "runs").exists)["finished"] == 0
