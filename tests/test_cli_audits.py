"""The commands on pretrained models: their files, their JSON, and one line for what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toeplens import cli
from toeplens.studies import survey as survey_of
from toeplens.studies.auditing import open_audit
from toeplens.studies.survey import Survey, Surveyed

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("unchecked")

Toeplens = Callable[..., tuple[int, str, str]]


@pytest.fixture
def toeplens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Toeplens:
    """Run a command in this process: exit code, standard output, standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["toeplens", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        printed = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, printed.out, printed.err

    return run


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


def test_an_audit_is_written_and_compared(toeplens: Toeplens, model: Path, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 40, (9, 20))
    np.save(tmp_path / "ids.npy", ids)
    (tmp_path / "ids.json").write_text(json.dumps(ids.tolist()))
    first = toeplens("audit", model, "--tokens", tmp_path / "ids.npy", "--out", tmp_path / "a", "--json")
    assert first[0] == 0, first
    told: dict[str, Any] = json.loads(first[1])
    assert told == json.loads((tmp_path / "a" / "audit.json").read_text())
    assert told["about"]["model"].endswith("/tiny")
    assert told["about"]["text"].endswith("ids.npy")
    assert (told["about"]["sequences"], told["about"]["tokens"]) == (9, 20)
    assert {each.name for each in (tmp_path / "a").iterdir()} == {
        "audit.json",
        "heads.csv",
        "heads.parquet",
        "report.html",
    }
    second = toeplens(
        "audit", model, "--tokens", tmp_path / "ids.json", "--out", tmp_path / "b", "--layers", "1", "--max-tokens", 10
    )
    assert second[0] == 0, second
    assert "Heads of the largest effect" in second[1]
    assert {head.layer for head in open_audit(tmp_path / "b").heads} == {1}
    compared = toeplens("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "c")
    assert compared[0] == 0, compared
    assert (tmp_path / "c" / "report.html").stat().st_size > 10_000
    replaced = toeplens("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "a")
    assert replaced[0] == 2
    assert "holds an audit, whose page would be replaced" in replaced[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--text", "no.txt"], "text: there is no file no.txt."),
        (["--tokens", "no.npy"], "tokens: there is no file no.npy."),
        (["--tokens", "words.txt"], "tokens: words.txt was given; it must be a .npy or a .json file."),
        (["--tokens", "bad.json"], "tokens: bad.json could not be read"),
        (["--text", "words.txt", "--tokens", "bad.json"], "tokens: it was given beside text"),
        (["--text", "words.txt"], "has no tokenizer that can be read"),
        (["--layers", "a"], "layers: 'a' was given; it must be numbers below 10000 and ranges such as 0,3,8-11."),
        (["--layers", "3-1"], "layers: '3-1' was given"),
        (["--layers", "0-9"], "layers: 2 was given; the model has layers 0 to 1."),
        (["--layers", "0-99999999"], "it must be numbers below 10000"),
        (["--seed", "-1"], "seed: -1 was given; it must be at least 0."),
        (["--max-tokens", "33"], "sequences of 33 tokens were given; the model has positions for 32."),
        (["--effects", "all"], "effects: there is no 'all'"),
        (["--dtype", "int8"], "dtype: there is no 'int8'"),
        (["--device", "tpu"], "device: 'tpu' was given; it must be auto, cpu, cuda or cuda:N."),
    ],
)
def test_errors_are_one_line(
    toeplens: Toeplens, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("some words")
    Path("bad.json").write_text("[1, 2")
    code, out, err = toeplens("audit", model, "--out", "out", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err
    assert not Path("out").exists()


def test_no_audit_no_comparison(toeplens: Toeplens, tmp_path: Path) -> None:
    code, _, err = toeplens("compare", tmp_path, tmp_path, "--out", tmp_path / "c")
    assert code == 2
    assert "holds no audit.json; it must be the directory of an audit." in err
    code, _, err = toeplens("audit", "no/such/model", "--out", tmp_path / "o", "--device", "tpu")
    assert code == 2


def test_the_survey_is_told(toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        Surveyed("llama", "proved", "LlamaForCausalLM", 100, 2, 8, "loss", 2, 1e-7, 2e-7, 3e-7),
        Surveyed("strange", "refused", "StrangeModel", why="model: the attention of x (Y) was not understood."),
    )
    found = Survey({"transformers": "5"}, rows)
    monkeypatch.setattr(survey_of, "survey", lambda out, **options: found)
    code, out, _ = toeplens("survey", "--out", tmp_path)
    assert code == 0
    for word in ("proved", "refused", "3.0e-07", "strange", "was not understood"):
        assert word in out
    assert json.loads(toeplens("survey", "--out", tmp_path, "--json")[1]) == found.to_dict()
    assert found.markdown("proved").splitlines()[2] == (
        "| `llama` | LlamaForCausalLM | 2 | all | loss | 1e-07 | 2e-07 | 3e-07 |"
    )
    assert found.markdown("refused").splitlines()[2].startswith("| `strange` | StrangeModel | model: the attention")
