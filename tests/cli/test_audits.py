"""The commands on pretrained models: their files, their JSON, and one line for what is wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.command import Toeplens
from tests.studies.probing.models import TEXT, save_model

from toeplens.cli import progress as bars
from toeplens.report import Page
from toeplens.studies.auditing import many_models, open_audit, read_text, study

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 on the disk, without a tokenizer."""
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = transformers.GPT2LMHeadModel(config)
    directory = tmp_path_factory.mktemp("models") / "tiny"
    made.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of 96 tokens, with a tokenizer."""
    return save_model(tmp_path_factory.mktemp("models") / "reader", max_position_embeddings=96)


def test_all_given_texts_are_read(toeplens: Toeplens, reader: Path, tmp_path: Path) -> None:
    for name, content in (("a.txt", TEXT), ("b.txt", TEXT[::-1]), ("c.txt", "apple dog river")):
        (tmp_path / name).write_text(content)
    arguments = [part for name in ("a.txt", "b.txt", "c.txt") for part in ("--text", tmp_path / name)]
    options = ["--out", tmp_path / "out", "--max-tokens", 16, "--sequences", 5]
    about = toeplens("audit", reader, *arguments, *options, "--json").json()["about"]
    assert about["text"] == "2 from a.txt, 2 from b.txt and 1 from c.txt"
    assert about["texts"] == ["a.txt", "a.txt", "b.txt", "b.txt", "c.txt"]
    assert about["lengths"] == [16, 16, 16, 16, 4]
    assert about["intervals"] == "over 3 texts"
    page = (tmp_path / "out" / "report.html").read_text()
    refused = toeplens("audit", reader, *arguments[:2], *options, "--json").refusal()
    assert f"contains a finished audit on other tokens (5 x 16 tokens, {about['text']})" in refused
    assert (tmp_path / "out" / "report.html").read_text() == page
    refused = toeplens("audit", reader, *arguments, "--text", tmp_path / "a.txt", *options).refusal()
    assert refused == "error: --text must not name two files with the same file name."


def test_an_audit_is_written_and_compared(toeplens: Toeplens, model: Path, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 40, (9, 20))
    np.save(tmp_path / "ids.npy", ids)
    (tmp_path / "ids.json").write_text(json.dumps(ids.tolist()))
    first = toeplens("audit", model, "--tokens", tmp_path / "ids.npy", "--out", tmp_path / "a", "--json")
    result: dict[str, Any] = first.json()
    record = json.loads((tmp_path / "a" / "audit.json").read_text())
    assert result["about"] == record["about"]
    assert "words" not in result
    assert [head["effect"] for head in result["heads"]] == [head["effect"] for head in record["heads"]]
    named = f"{model.parent.name}/tiny"  # a directory by its last two folders, wherever it lies
    assert (result["about"]["model"], result["about"]["text"]) == (named, "ids.npy")
    written = [(tmp_path / "a" / name).read_text() for name in ("audit.json", "heads.csv", "report.html")]
    assert named in re.findall("<title>(.*?)</title>", written[-1], re.DOTALL)[0]
    assert not [text for text in written if str(model.parent) in text or str(tmp_path) in text]
    assert (result["about"]["sequences"], result["about"]["tokens"]) == (9, 20)
    names = {".lock", "audit.json", "heads.csv", "heads.parquet", "report.html"}
    assert {each.name for each in (tmp_path / "a").iterdir()} == names
    second = toeplens(
        "audit", model, "--tokens", tmp_path / "ids.json", "--out", tmp_path / "b", "--layers", "2", "--max-tokens", 10
    )
    assert second.code == 0, second
    assert "Heads with the largest effect" in second.out
    assert {head.layer for head in open_audit(tmp_path / "b").heads} == {1}
    compared = toeplens("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "c")
    assert compared.code == 0, compared
    page = tmp_path / "c" / "report.html"
    assert page.stat().st_size > 10_000
    assert compared.out == f"page: {page}\n"
    beside = toeplens("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "c", "--json").json()
    assert (beside["page"], [each["name"] for each in beside["audits"]]) == (str(page), ["a", "b"])
    assert {**beside["audits"][0], "page": result["page"]} == {"name": "a", **result}
    assert [each["layer"] for each in beside["audits"][1]["heads"]] == [1, 1]
    replaced = toeplens("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "a")
    assert "contains an audit. Choose an empty or new directory" in replaced.refusal()
    shutil.copytree(model, tmp_path / "other")
    kept = (tmp_path / "a" / "audit.json").read_bytes()
    refused = toeplens("audit", tmp_path / "other", "--tokens", tmp_path / "ids.npy", "--out", tmp_path / "a").refusal()
    assert (
        refused == f"error: --out: {tmp_path / 'a'} contains the audit of {named!r}. Choose an empty or new directory."
    )
    assert (tmp_path / "a" / "audit.json").read_bytes() == kept


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--text", "no.txt"], "--text: file no.txt does not exist."),
        (["--tokens", "words.txt"], "tokens must be a .npy or a .json file, got 'words.txt'."),
        (["--tokens", "bad.json"], "tokens: bad.json could not be read"),
        (["--text", "words.txt", "--tokens", "bad.json"], "--tokens and --text must not both be set."),
        (["--layers", "a"], "layers must be numbers from 1 to 9999 and ranges such as 1,4,9-12, got 'a'."),
        (["--layers", "1-9"], "--layers must be from 1 to 2, got 3."),
        (["--heads", "5"], "--heads must be from 1 to 2, got 5."),
        (["--tokens", "bad.json", "--tokens=no.npy"], "--tokens must be set only once, got 2 files."),
        (["--tokens", "large.npy"], "--tokens must be at most 9223372036854775807, got 18446744073709551615."),
        (
            ["--tokens", "header.npy"],
            "header.npy could not be read (it is not a .npy file, is damaged, or contains objects)",
        ),
        (["--tokens", "folder.npy"], "tokens must be a file or a pipe"),
        (["--tokens", "far.json"], "must be whole numbers"),
        (["--tokens", "n" * 5000], "is longer than the system allows"),
        (["--change", "layers=1 output=zero", "--needles=2"], "--change and --needles must not both be set."),
    ],
)
def test_errors_are_one_line(
    toeplens: Toeplens, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("some words")
    Path("bad.json").write_text("[1, 2")
    np.save("large.npy", np.full((2, 8), 2**64 - 1, dtype=np.uint64))
    Path("header.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00" + b"__import__('os')".ljust(117) + b"\n")
    Path("folder.npy").mkdir()
    Path("far.json").write_text(f"[[{10**30}, 3]]")
    refused = toeplens("audit", model, "--out", "out", *words).refusal()
    assert said in refused
    assert len(refused) < 500
    assert not Path("out").exists()
    assert "got an empty name" in toeplens("audit", "", "--out", tmp_path / "o").refusal()


def test_outputs_replace_only_their_own_kind(
    toeplens: Toeplens, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a run, a study, a stranger's directory; before any work."""
    monkeypatch.setattr(study, "audit_with", lambda *_, **options: pytest.fail("work was begun"))
    monkeypatch.setattr(many_models, "run_parallel", lambda *_, **options: pytest.fail("work was begun"))
    monkeypatch.setattr("toeplens.studies.auditing.open_audit", lambda _: None)
    holds = {"spec.json": "a run", "study.json": "a study", "notes.txt": "files that do not belong to the"}
    commands = (["audit", model], ["audit", model, model.parent, "--workers", 1], ["compare", "a", "b"])
    for number, words in enumerate(commands):
        for name, says in holds.items():
            out = tmp_path / f"{number}-{name}"
            out.mkdir()
            (out / name).write_text("{}")
            assert f"error: --out: {out} contains {says}" in toeplens(*words, "--out", out).refusal()
            assert {path.name for path in out.iterdir()} == {name}
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "report.html").write_text("theirs")
    monkeypatch.setattr("toeplens.report.comparison.comparison_page", lambda *_: Page("compare", "", "", "", None, []))
    refused = toeplens("compare", "a", "b", "--out", tmp_path / "page").refusal()
    assert "was not written by this version of 'toeplens compare'" in refused


def test_random_and_unused_weights_are_reported(toeplens: Toeplens, model: Path, tmp_path: Path) -> None:
    holed = tmp_path / "holed"
    shutil.copytree(model, holed)
    weights = {name: x for name, x in load_file(model / "model.safetensors").items() if ".mlp." not in name}
    save_file(weights | {"strange.weight": torch.zeros(2)}, holed / "model.safetensors", {"format": "pt"})
    options = ["--effects", "none", "--max-tokens", 12, "--sequences", 8]
    actual = toeplens("audit", holed, "--out", tmp_path / "a", *options)
    assert actual.code == 0, actual
    result = " ".join(actual.out.split())
    assert "random weights, missing from the checkpoint: 8 (transformer.h.0.mlp.c_fc.bias, " in result
    assert "unused weights of the checkpoint: 1 (strange.weight)" in result
    assert "initialised randomly (8)" in (tmp_path / "a" / "report.html").read_text()


def test_a_text_may_be_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text("handed over"))
    writer.start()
    assert read_text(tmp_path / "pipe") == "handed over"
    writer.join()


def test_config_tokens_may_lie_outside_the_vocabulary(toeplens: Toeplens, reader: Path, tmp_path: Path) -> None:
    shutil.copytree(reader, tmp_path / "m")
    config = json.loads((reader / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "eos_token_id": 2**70}))
    options = ["--max-tokens", 16, "--sequences", 1, "--effects", "none", "--out", tmp_path / "out"]
    assert toeplens("audit", tmp_path / "m", *options).code == 0


def test_a_failing_tokenizer_is_one_sentence(toeplens: Toeplens, reader: Path, tmp_path: Path) -> None:
    shutil.copytree(reader, tmp_path / "m")
    config = json.loads((reader / "tokenizer.json").read_text())
    config["model"] = {"type": "WordLevel", "vocab": {"<s>": 0, "a": 1, "so": 2}, "unk_token": "[UNK]"}
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(config))
    (tmp_path / "a.txt").write_text(TEXT)
    refused = toeplens("audit", tmp_path / "m", "--text", tmp_path / "a.txt", "--out", tmp_path / "o").refusal()
    assert refused.startswith("error: MODEL: its tokenizer fails on a text (Exception: WordLevel error: Missing")


@pytest.mark.parametrize(("apart", "shorter"), [(1.0, True), (0.5, False)])
def test_slow_effects_suggest_a_faster_option_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], apart: float, shorter: bool
) -> None:
    """270 heads, the first of which take a second each: 270 seconds; at half a second each 135."""
    now = [0.0]
    monkeypatch.setattr(bars, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with bars.ProgressBars(advice="--first 10 does.") as progress:
        for done in range(9):
            now[0] = 50 + apart * done
            for what in ("layers", "heads"):
                progress(what, done, 270)
    message = capsys.readouterr().err
    assert message.count("--first 10 does.") == shorter
    assert not shorter or re.search(r"^heads: about 4\.\d minutes left; --first 10 does\.$", message, re.MULTILINE)


@pytest.fixture
def local_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many models one after another, without processes of their own."""

    def one_by_one(work: Any, items: Any, execution: Any, workers: Any, *, on_done: Any, on_message: Any) -> None:
        for index, item in enumerate(items):
            on_done(index, many_models.audit_job(item, lambda *report, index=index: on_message(index, *report)))

    monkeypatch.setattr(many_models, "run_parallel", one_by_one)


@pytest.mark.usefixtures("local_audits")
def test_several_models_are_audited_into_separate_directories(
    toeplens: Toeplens, model: Path, reader: Path, tmp_path: Path
) -> None:
    """A line of each; their numbers are those of one alone: tests/studies/auditing/test_audit_many.py."""
    (tmp_path / "ids.json").write_text(json.dumps(np.random.default_rng(0).integers(0, 31, (8, 12)).tolist()))
    options = ["--tokens", tmp_path / "ids.json"]
    result = toeplens("audit", model, reader, *options, "--out", tmp_path / "out")
    assert result.code == 0, result
    rows = [line.split() for line in result.out.splitlines() if "│" in line]
    assert [[row[1], row[3], row[5]] for row in rows] == [["tiny", "2", "4"], ["reader", "2", "8"]]
    assert f"pages: {tmp_path / 'out' / '*' / 'report.html'}" in result.out
    lines = [line.partition(" in ")[0] for line in result.err.splitlines()]
    assert lines == ["[1/2] tiny: 4 heads", "[2/2] reader: 8 heads"]
    rerun = toeplens("audit", model, reader, *options, "--out", tmp_path / "out", "--json")
    assert rerun.err.splitlines() == ["[1/2] tiny: 4 heads, already done", "[2/2] reader: 8 heads, already done"]
    assert rerun.json()["pages"]["tiny"] == str(tmp_path / "out" / "tiny" / "report.html")


@pytest.mark.usefixtures("local_audits")
def test_failed_models_are_listed_at_the_end(toeplens: Toeplens, model: Path, reader: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    options = ["--text", tmp_path / "a.txt", "--max-tokens", 12, "--effects", "none", "--out", tmp_path / "out"]
    result = toeplens("audit", model, "no/such/model", reader, *options)  # tiny has no tokenizer
    assert result.code == 2
    asked, *lines, first, second = result.err.splitlines()
    assert asked == "model: no/such/model is not a local directory; looking it up on the hub."
    assert lines[:2] == ["[1/3] tiny: failed", "[2/3] model: failed"]
    assert first.startswith("error: tiny: model: ")
    assert "has no readable tokenizer" in first
    assert second.startswith("error: model: model: no/such/model could not be loaded: file or directory does not exist")
    assert "reader" in result.out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".lock", "audits.json", "reader"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny", "--workers", 2], "--workers must not be set for a single model, got 2."),
        (["tiny", "--engine", "ray"], "--engine must not be set for a single model, got 'ray'."),
        (["tiny", "./tiny"], "MODEL must not name ./tiny twice."),
        (["tiny", "run", "--max-tokens", 8], "--max-tokens must not be set for a run."),
    ],
)
def test_options_for_the_wrong_number_of_models_are_refused(
    toeplens: Toeplens, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "tiny")
    shutil.copytree(model, "other")
    Path("run").mkdir()
    Path("run/spec.json").write_text("{}")
    assert toeplens("audit", *words, "--out", "out").refusal().startswith(f"error: {said}")
    assert not Path("out").exists()
