"""The commands that ask pretrained models: their files, their JSON, and one line for what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.cli.command import Toeplens
from tests.studies.probing.models import TEXT, save_model

SMALL_PROBE = ("--lengths", "64,80", "--depths", "0,1", "--repeats", "1", "--sequences", "2", "--lists", "2")
SHORT = ("--sequences", "1", "--tokens", "80", "--effect-tokens", "16", "--probe-tokens", "80")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def test_a_probe_replaces_only_an_older_probe(toeplens: Toeplens, model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for change in ((), ("--change", "layers=all freeze=1", "--change", "layers=2 heads=3 output=zero")):
        answer = toeplens("probe", model, "--text", text, "--out", out, *SMALL_PROBE, *change[:2], "--json")
        actual = answer.json()
        assert actual["page"] == str(out / "report.html")
        assert actual["changes"] == (["layers 1–2: pair 1 frozen"] if change else [])
        assert sorted(path.name for path in out.iterdir()) == [".lock", "probe.json", "report.html"]
    output = toeplens("probe", model, "--text", text, "--out", out, *SMALL_PROBE)
    assert output.code == 0
    assert "needle" in output.out
    other = shutil.copytree(model, tmp_path / "other")
    refused = toeplens("probe", other, "--text", text, "--out", out, *SMALL_PROBE).refusal()
    assert refused.endswith("/tiny'. Choose an empty or new directory.")
    assert refused.startswith(f"error: --out: {out} contains the probe of ")
    twice = ("--text", text, "--text", tmp_path / "none.txt")
    refused = toeplens("probe", model, *twice, "--out", out, *SMALL_PROBE).refusal()
    assert refused == "error: --text must be set only once, got 2 files."


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--lengths", "64,many"), "--lengths must be whole numbers with commas between them, got '64,many'."),
        (("--lengths", "32"), "--lengths must be different numbers from 64 to 1048576, got 32."),
        (("--change", "layers=1 speed=1e300"), "--change: speed must be from -1000000 to 1000000, got 1e+300."),
    ],
)
def test_impossible_probes_are_refused(
    words: tuple[str, ...], sentence: str, toeplens: Toeplens, model: Path, text: Path, tmp_path: Path
) -> None:
    answer = toeplens("probe", model, "--text", text, "--out", tmp_path / "out", *SMALL_PROBE, *words)
    assert answer.refusal().startswith(f"error: {sentence}")
    assert not (tmp_path / "out").exists()


def test_token_ids_can_replace_a_text(toeplens: Toeplens, model: Path, text: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(400) % 20)
    shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    arguments = ("--tokens", tmp_path / "ids.npy", "--out", tmp_path / "out", *SMALL_PROBE)
    answer = toeplens("probe", tmp_path / "bare", *arguments, "--json").json()
    assert {item["behaviour"] for item in answer["items"]} == {"loss", "copying"}
    for wrong in (("--text", text, *arguments), arguments[2:]):
        refused = toeplens("probe", model, *wrong).refusal()
        assert refused == "error: --text or --tokens must be set, but not both."


@pytest.mark.heavy
def test_a_pretrained_study_runs_and_its_claims_are_recomputed(
    toeplens: Toeplens, model: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "study"
    actual = toeplens("pretrained", model, "--text", text, "--out", out, *SHORT, "--json").json()
    assert actual["finished"] == actual["total"] == 27
    assert len(actual["claims"]) == 10
    assert (out / "report.html").exists()
    assert len(toeplens("claims", out, "--json").json()) == 10
    assert Path(toeplens("report", out, "--json").json()["page"]) == out / "report.html"
    refused = toeplens("pretrained", model, "--text", text, "--out", out, *SHORT, "--seed", "3").refusal()
    assert refused.startswith("error: --seed must be 42, as in the study in")
    both = toeplens("pretrained", model, "--text", text, "--text", text, "--out", out, *SHORT).refusal()
    assert both == "error: --text must not name two files with the same file name."
