"""The command on several models: directories of their own, a line of each, what failed at the end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.command import Toeplens
from tests.sources.huggingface.models import GPT, tiny
from tests.studies.probing.models import TEXT, saved

from toeplens.studies.auditing import many, open_audit


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 on the disk, without a tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny("GPT2LMHeadModel", **GPT).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of 96 tokens, with a tokenizer."""
    return saved(tmp_path_factory.mktemp("models") / "reader", max_position_embeddings=96)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many models one after another, without processes of their own."""

    def one_by_one(work: Any, pieces: Any, limits: Any, workers: Any, *, on_done: Any, on_told: Any) -> None:
        for index, piece in enumerate(pieces):
            on_done(index, many._audited(piece, lambda *what, index=index: on_told(index, what)))

    monkeypatch.setattr(many, "spread", one_by_one)


@pytest.mark.usefixtures("here")
def test_several_models_are_audited_into_directories_of_their_own(
    toeplens: Toeplens, model: Path, reader: Path, tmp_path: Path
) -> None:
    """A line of each; of the same request the numbers of one that is audited alone."""
    (tmp_path / "ids.json").write_text(json.dumps(np.random.default_rng(0).integers(0, 31, (8, 12)).tolist()))
    options = ["--tokens", tmp_path / "ids.json"]
    told = toeplens("audit", model, reader, *options, "--out", tmp_path / "out")
    assert told.code == 0, told
    rows = [line.split() for line in told.out.splitlines() if "│" in line]
    assert [[row[1], row[3], row[5]] for row in rows] == [["tiny", "2", "8"], ["reader", "2", "8"]]
    assert f"pages: {tmp_path / 'out' / '*' / 'report.html'}" in told.out
    assert [line.partition(" in ")[0] for line in told.err.splitlines()] == [
        "[1/2] tiny: 8 heads",
        "[2/2] reader: 8 heads",
    ]
    alone = toeplens("audit", model, *options, "--out", tmp_path / "alone", "--json").json()
    among = open_audit(tmp_path / "out" / "tiny")
    assert among.summary()["heads"] == alone["heads"]
    unlike = ("request", "seconds")
    assert {name: value for name, value in among.about.items() if name not in unlike} == {
        name: value for name, value in alone["about"].items() if name not in unlike
    }
    assert "request" not in alone["about"]
    again = toeplens("audit", model, reader, *options, "--out", tmp_path / "out", "--json")
    assert again.err.splitlines() == ["[1/2] tiny: 8 heads, as it was", "[2/2] reader: 8 heads, as it was"]
    assert again.json()["pages"]["tiny"] == str(tmp_path / "out" / "tiny" / "report.html")


@pytest.mark.usefixtures("here")
def test_models_that_fail_are_told_at_the_end(toeplens: Toeplens, model: Path, reader: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    options = ["--text", tmp_path / "a.txt", "--max-tokens", 12, "--effects", "none", "--out", tmp_path / "out"]
    told = toeplens("audit", model, "no/such/model", reader, *options)  # tiny has no tokenizer
    assert told.code == 2
    asked, *lines, first, second = told.err.splitlines()
    assert asked == "model: there is no directory no/such/model; the hub is asked for it."
    assert lines[:2] == ["[1/3] tiny: failed", "[2/3] model: failed"]
    assert first.startswith("error: tiny: model: ")
    assert "has no tokenizer that can be read" in first
    assert second.startswith("error: model: model: no/such/model could not be loaded: there is no such file")
    assert "reader" in told.out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".lock", "audits.json", "reader"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny", "--workers", 2], "workers: 2 was given with one model; it is of several."),
        (["tiny", "--engine", "ray"], "engine: 'ray' was given with one model; it is of several."),
        (["tiny", "./tiny"], "model: ./tiny was given twice; each model has one audit."),
        (["tiny", "run", "--max-tokens", 8], "max_tokens: it was given; a run is audited on examples of its own"),
    ],
)
def test_what_does_not_go_with_several_or_with_one_is_refused(
    toeplens: Toeplens, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "tiny")
    shutil.copytree(model, "other")
    Path("run").mkdir()
    Path("run/spec.json").write_text("{}")
    assert toeplens("audit", *words, "--out", "out").refusal().startswith(f"error: {said}")
    assert not Path("out").exists()
