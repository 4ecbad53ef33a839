"""Bad input, numbers out of range, work that cannot end or fit, damaged files: one line, exit code 2, nothing left."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from tests.builders import files
from tests.cli.command import TINY, Toeplens, changes, in_a_process

from toeplens.training import Run, train
from toeplens.training import run as store

HUGE, MANY = "9" * 23, "9" * 300
REFUSED = {  # TINY stands for the options of a tiny run; fields of a spec are wrong in more ways in test_spec.py
    # names: the nearest is named
    "train --encoding rop": "there is no 'rop'; did you mean 'rope'",
    "train --task triger-distance": "there is no 'triger-distance'; did you mean 'trigger-distance'",
    "train --scale labtop": "scale: there is no 'labtop'; did you mean 'laptop'",
    "train --protocol papr": "protocol: there is no 'papr'; did you mean 'paper'",
    "train --encoding nothing-like-it": "known: ",
    "reproduce --scale smok": "scale: there is no 'smok'; did you mean 'smoke'",
    "reproduce --protocol realeased": "protocol: there is no 'realeased'; did you mean 'released'",
    "reproduce --scale smoke --part factor": "part: there is no 'factor'; did you mean 'factors'",
    "card roep": "encoding: there is no 'roep'; did you mean 'rope'",
    "card rope --set d_model=3": "option of encoding 'rope': there is no 'd_model'",
    "card rope --set name=3": "option of encoding 'rope': there is no 'name'",
    # sizes that don't fit
    "train TINY --set model.d_model=20 --set model.num_heads=4": "head_dim: 5 was given",
    "train TINY --encoding mla --set model.encoding_options.rotary_dim=3": "rotary_dim: 3 was given",
    "train TINY --protocol released --set task_options.length=8": "the triggers don't fit",
    "train TINY --task trigger-count --set task_options.max_count=13": "max_count: 13 was given",
    "train TINY --set task_options.vocab_size=4 --set task_options.length=3": "train_examples: 32 was given, but trigg",
    # fields
    "train TINY --set epoch=3": "epoch: no such field; did you mean 'epochs'? Known: average, batch_size, ",
    "train TINY --set x=3": "x: no such field; known: average, batch_size, ",
    "train TINY --set model.num_layer=3": "model.num_layer: no such field; did you mean 'num_layers'",
    "train TINY --set task_options.ordered=x": "ordered: 'x' was given; it must be true or false.",
    "train TINY --set epochs": "'epochs' was given; it must be of the form field=value",
    "train TINY --set =3": "'=3' was given",
    "train TINY --set epochs.x=3": "epochs has no fields",
    "train TINY --set epochs=many": "epochs: ",
    "train TINY --set lr=Infinity": "lr: ",
    "train TINY --set batch_size=null": "batch_size: ",
    "train TINY --set lr=true": "lr: true was given; it must be a number.",
    "train TINY --set model.num_layers=false": "model: num_layers: false was given; it must be a number.",
    "train TINY --set betas=0.9": "betas: it must be a list (given: 0.9)",
    "train nothing-there.json": "spec: there is no file ",
    "train TINY --set model.encoding=[1]": "model.encoding: ",
    "train TINY --protocol released --set model.encoding=[1]": "model.encoding: ",
    "train TINY --set task_options=3": "task_options: ",
    "train TINY --set model.encoding_options.base=big": "base: 'big' was given; it must be a number.",
    "card rope --set base=x": "base: 'x' was given; it must be a number.",
    "card --set base=3": "set: an option was given, but no encoding",
    "card rope --set base=-3": "base: -3 was given",
    "card rope --length 3": "length: 3 was given",
    # machines
    "train TINY --device tpu": "device: ",
    "train TINY --device cuda:x": "device: 'cuda:x' was given",
    "train TINY --compile yes": "compile: there is no 'yes'",
    "reproduce --device tpu": "device: ",
    "theory --device x": "device: 'x' was given; it must be auto, cpu, cuda or cuda:N",
    "theory --scale smoke --device mps": "device: there is no 'mps'; known: cpu, cuda",
    # counts and times
    "reproduce --scale smoke --seeds 0": "seeds: 0 was given",
    "reproduce --seeds 99999999": "seeds: 99999999 was given; it must be from 1 to 100",
    "theory --seeds 99999999": "seeds: 99999999 was given; it must be from 1 to 100",
    "study canonical --seeds 99999999": "seeds: ",
    "reproduce --scale smoke --workers 0": "workers: 0 was given",
    "reproduce --scale smoke --workers 100000": "workers: 100000 was given",
    **{
        f"{command} --time-budget {budget!r}": f"time_budget: {budget!r} was given"
        for command in ("train TINY", "reproduce --scale smoke")
        for budget in ("soon", "0s", "-5m", "5 minutes", "", "1e3")
    },
    # out of range
    "train TINY --seed -1": "seed: ",
    "train TINY --seed 18446744073709551616": "seed: ",
    "train TINY --set train_examples=1000000000": "its model and its examples need at least",
    "train TINY --set model.d_model=1000000000": "a model of these sizes needs at least",
    "card rope --length 9999999999999": "length: 9999999999999 was given",
    "card rope --length 1000000": "length: 1000000 was given",
    "train TINY --set task_options.length=9999999999": "max_len: 12 was given",
    f"train TINY --set task_options.length={MANY}": "max_len: 12 was given",
    f"train TINY --set ignore_label={HUGE}": "ignore_label: ",
    f"train TINY --set model.encoding_options.base={MANY}": "base",
    f"card rope --set base={MANY}": "base",
    f"train TINY --set task_options.cut={MANY}9": "set: task_options.cut=",
    f"train TINY --set lr={MANY * 2}": "set: lr=",
    f"train TINY --set epochs={MANY * 20}": "set: epochs=",
    f"train TINY --set epochs={'[' * 5000}": "set: epochs=",
    # the shell's own
    "train --epochs 3": "No such option: --epochs",
    "reproduce --seeds three": "Invalid value for '--seeds'",
}


@pytest.mark.parametrize("command", REFUSED, ids=lambda command: command[:60])
def test_bad_input_is_one_line_and_leaves_nothing_behind(toeplens: Toeplens, tmp_path: Path, command: str):
    arguments = shlex.split(command.replace("TINY", shlex.join(TINY)))
    assert REFUSED[command] in toeplens(*arguments, "--json", "--out", tmp_path / "out").refusal()
    assert not [path for path in files(tmp_path) if not path.endswith((".lock", "spec.json"))]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("trian", "Did you mean 'train'?"),
        ("train --out", "--out"),
        ("tasks all", "all"),
        *((command, "Missing option '--out'") for command in ("train", "reproduce")),
        *((command, "Missing argument") for command in ("ablate", "report", "claims")),
    ],
)
def test_what_the_shell_gives_wrongly_is_named(toeplens: Toeplens, command: str, words: str):
    assert words in toeplens(*command.split()).refusal()


@pytest.mark.heavy
def test_a_bad_input_in_a_process_of_its_own(tmp_path: Path):
    answer = in_a_process("train", "--encoding", "rop", "--out", tmp_path / "out")
    assert len(answer.err.splitlines()) == 1
    assert "did you mean 'rope'" in answer.refusal()
    assert list(tmp_path.iterdir()) == []


def test_other_peoples_files_are_left_alone(toeplens: Toeplens, tmp_path: Path):
    mine = tmp_path / "thesis.txt"
    mine.write_text("mine")
    for command in (["train", *TINY], ["reproduce", "--scale", "smoke"]):
        for place in (mine, mine / "below"):
            refusal = toeplens(*command, "--out", place).refusal()
            assert "(or lies under) a file; a directory is needed" in refusal
    assert "not a study's" in toeplens("reproduce", "--scale", "smoke", "--out", tmp_path).refusal()
    for command in ("ablate", "report", "claims"):
        toeplens(command, tmp_path).refusal()
    assert files(tmp_path) == {"thesis.txt": b"mine"}


@pytest.mark.parametrize("content", [None, b"epochs: 3", b"[]", b"3", b"\xff"])
def test_a_spec_that_is_none_is_refused(toeplens: Toeplens, tmp_path: Path, content: bytes | None):
    spec = tmp_path / "spec.json"
    if content is not None:
        spec.write_bytes(content)
    assert str(spec) in toeplens("train", spec, "--out", tmp_path / "out").refusal()
    assert "cannot be read" in toeplens("train", tmp_path, "--out", tmp_path / "out").refusal()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["ablate", "decompose", "report", "claims"])
def test_what_is_no_run_and_no_study_is_refused(toeplens: Toeplens, tmp_path: Path, command: str):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for name in ("missing", "empty", "file"):
        assert str(tmp_path / name) in toeplens(command, tmp_path / name, "--json").refusal()
    assert sorted(tmp_path.rglob("*")) == before


# ---- of a run -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_asked_of_a_run_is_refused(toeplens: Toeplens, run: Run):
    before = files(run.directory)
    for command, option, value, words in (
        ("ablate", "--examples", 0, "examples: 0 was given"),
        ("ablate", "--split", "tset", "split: there is no 'tset'; did you mean 'test'"),
        ("ablate", "--device", "tpu", "device: "),
        ("decompose", "--layer", 0, "layer: 0 was given; this model has layers 1 to"),
        ("decompose", "--layer", 99, "layer: 99 was given"),
        ("decompose", "--split", "means", "split: there is no 'means'; did you mean 'mean'"),
        ("decompose", "--examples", 0, "examples: 0 was given"),
        ("extrapolate", "--length", 0, "lengths: 0 was given"),
        ("extrapolate", "--examples", 99999999999, "99999999999 was given; it must be from 1 to"),
        ("extrapolate", "--length", 10**30, f"{10**30} was given; it must be from 1 to"),
        ("extrapolate", "--length", 10**6, f"{10**6} was given; it must be from 1 to"),
    ):
        assert words in toeplens(command, run.directory, option, value).refusal()
    refusal = toeplens("decompose", run.directory, "--split", "input", "--layer", 2).refusal()
    assert "split: 'input' was given; layer 2 reads no bare input" in refusal
    assert files(run.directory) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("spec.json", b"{}"),
        ("result.json", b'{"status": "fine"}'),
        ("metrics.jsonl", b"3\n"),
        ("model.safetensors", b"not weights"),
        ("model.safetensors", None),
    ],
)
def test_a_damaged_run_is_one_line(toeplens: Toeplens, run: Run, name: str, content: bytes | None):
    (run.directory / name).unlink() if content is None else (run.directory / name).write_bytes(content)
    assert name in toeplens("ablate", run.directory).refusal()
    assert not (run.directory / "ablation.json").exists()


def test_an_unfinished_run_is_not_ablated_and_its_damaged_checkpoint_is_one_line(toeplens: Toeplens, tmp_path: Path):
    command = ["train", *TINY, *changes(epochs=5), "--out", tmp_path / "out", "--json"]
    spec = Run.open(toeplens(*command).json()["directory"]).spec
    shutil.rmtree(tmp_path / "out")
    run = train(spec, tmp_path / "out", deadline=0.0)
    assert "is not finished; run the same command again" in toeplens("ablate", run.directory).refusal()
    checkpoint = run.directory / store.CHECKPOINT
    checkpoint.write_bytes(b"PK not a checkpoint")
    before = files(run.directory)
    assert re.search(f"{checkpoint} .*delete it to start this run over", toeplens(*command).refusal())
    assert files(run.directory) == before
    checkpoint.unlink()
    assert toeplens(*command).json()["status"] == "complete"
