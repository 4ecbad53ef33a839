"""Audits of many models: names, requests, processes of their own, failures told apart, gone on with."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.sources.huggingface.models import GPT, GROUPED, tiny
from tests.studies.auditing.writing import full, odd, stamped

from toeplens import report
from toeplens.engine import ClusterOptions
from toeplens.ground import InputError, read_json
from toeplens.studies import auditing
from toeplens.studies.auditing import PARTS, many, open_audit
from toeplens.studies.auditing.many import Audits, Piece, audit_many, audited, digest_of, directories_of
from toeplens.studies.kit.options import AuditOptions

OPTIONS = AuditOptions(sequences=8, max_tokens=12)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of two models, one of them twice, and one of nothing."""
    directory = tmp_path_factory.mktemp("models")
    tiny("GPT2LMHeadModel", **GPT).save_pretrained(directory / "gpt")
    tiny("LlamaForCausalLM", **GROUPED).save_pretrained(directory / "llama")
    shutil.copytree(directory / "gpt", directory / "dies")
    (directory / "nothing").mkdir()
    return directory


def piece(models: Path, name: str, out: Path, **more: Any) -> Piece:
    model = str(models / name)
    given = {"write": None, "there": True, "data": None, "options": OPTIONS} | more
    return Piece(name, model, model, directory=out / name, digest=digest_of(model, None, OPTIONS), **given)


def test_a_model_is_called_by_as_much_as_tells_it_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one/last", "two/last", "two/other", "org"):
        Path(name).mkdir(parents=True)
    Path("two/model.Q4_1.gguf").touch()
    for given, names in (
        (("one/last", "./two/last/", str(tmp_path / "two/other")), ["one--last", "two--last", "other"]),
        (("two/model.Q4_1.gguf", "openai-community/gpt2", "gpt2"), ["model.Q4_1", "openai-community--gpt2", "gpt2"]),
        (("no/such/model", "/no/such/thing", "."), ["model", "thing", tmp_path.name]),
        (("org/last", "one/last"), ["org--last", "last"]),
    ):
        assert directories_of(given) == names


def test_a_request_is_told_by_all_that_decides_its_audits(models: Path, tmp_path: Path) -> None:
    model, ids = str(shutil.copytree(models / "gpt", tmp_path / "gpt")), tmp_path / "ids.json"
    ids.write_text("[[3, 4, 5]]")
    changed = AuditOptions(sequences=8, max_tokens=12, changes=("layers=1 heads=2 output=zero",))
    others: list[Any] = [(data, OPTIONS) for data in (None, {"a": "c"}, ids)]
    others += [(None, changed), (None, replace(OPTIONS, seed=1))]
    digests = [digest_of(model, *each) for each in others]
    assert len(set(digests)) == len(others)
    assert [digest_of(model, *each) for each in others] == digests
    assert digest_of(model, None, replace(OPTIONS, effects="exact")) == digests[0]  # as it is unless given
    assert digest_of("gpt2", None, OPTIONS) != digest_of("gpt3", None, OPTIONS) != digests[0]
    (tmp_path / "gpt" / ".lock").touch()
    assert digest_of(model, None, OPTIONS) == digests[0]
    os.utime(tmp_path / "gpt" / "config.json", ns=(0, 0))
    assert digest_of(model, None, OPTIONS) != digests[0]


def test_an_audit_among_many_is_the_audit_of_one(models: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    of = piece(models, "llama", tmp_path, write=report.write_report)
    found = audited(of, lambda *what: told.append(what))
    alone = auditing.audit(of.model, sequences=8, max_tokens=12)
    kept = open_audit(of.directory)
    assert (kept.heads, kept.layers) == (alone.heads, alone.layers)
    assert kept.about["request"] == of.digest
    assert (of.directory / report.PAGE).is_file()
    assert {"layers", "heads"} == {what for what, *_ in told}
    top = max(alone.heads, key=lambda head: head.effect or 0.0)
    assert (found.layers, found.heads, found.effect) == (2, 8, top.effect)
    assert found.head == f"L{top.layer + 1} H{top.head + 1}"
    assert (found.why, found.code, found.whole, found.baseline) == (None, 0, alone.whole, alone.baseline)
    assert of.had() == found
    for other in (replace(of, digest="another"), replace(of, directory=tmp_path / "none")):
        assert other.had() is None
    (of.directory / "audit.json").write_text("{")
    assert of.had() is None


@pytest.mark.parametrize(
    ("name", "more", "code", "said"),
    [
        ("nothing", {}, 2, "model must be .* has no config.json"),
        ("gone", {}, 2, "model: machine .* has no .*gone. Use a directory that all machines share."),
        ("gpt", {"write": full}, 3, "Out of memory. Lower --workers or the sizes."),
        ("gpt", {"write": odd}, 2, r"model: the audit failed: 'layer' is missing \(KeyError in writing.py, line "),
    ],
)
def test_what_fails_is_a_sentence(models: Path, tmp_path: Path, name: str, more: Any, code: int, said: str) -> None:
    found = audited(piece(models, name, tmp_path, **more), lambda *_: None)
    assert (found.code, found.name, found.heads) == (code, name, 0)
    assert re.match(said, found.why), found.why


@pytest.mark.heavy
def test_others_go_on_where_one_fails_or_dies_and_the_same_goes_on_with_what_is_there(
    models: Path, tmp_path: Path
) -> None:
    told: list[tuple[str, bool]] = []
    given = [str(models / name) for name in ("dies", "nothing", "llama")]

    def again() -> Audits:
        told.clear()
        options: dict[str, Any] = {"write": stamped, "on_done": lambda each, new: told.append((each.name, new))}
        return audit_many(given, tmp_path / "out", None, OPTIONS, workers=1, **options)

    first = again()
    assert told == [("dies", True), ("nothing", True), ("llama", True)]
    died, refused = first.failed
    assert str(died.why).startswith("The process ended (signal 9). If memory is short, lower --workers")
    assert (died.code, refused.code, first.code) == (3, 2, 3)
    assert [each.name for each in first.done] == ["llama"]
    assert (tmp_path / "out" / "dies" / PARTS).is_dir()
    assert not (tmp_path / "out" / "nothing").exists()
    assert Audits.from_dict(read_json(tmp_path / "out" / "audits.json")) == first
    second = again()
    assert told == [("llama", False), ("dies", True), ("nothing", True)]
    assert [each.name for each in second.found] == ["dies", "nothing", "llama"]
    assert (second.code, [each.name for each in second.failed]) == (2, ["nothing"])
    (one, parts), (other, same) = json.loads((tmp_path / "dies.json").read_text())
    assert one != other
    assert parts == same  # nothing was measured again
    assert len(json.loads((tmp_path / "llama.json").read_text())) == 1
    assert not (tmp_path / "out" / "dies" / PARTS).exists()


@pytest.mark.parametrize(
    ("data", "workers", "said"),
    [
        (Path("no.npy"), 1, "tokens must be a file for several models, but no.npy does not exist."),
        (None, ClusterOptions(engine="ray", address="nowhere"), "^address must be HOST:PORT of the cluster's head"),
    ],
)
def test_what_is_wrong_of_all_is_refused_before_the_work(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Any, workers: Any, said: str
) -> None:
    monkeypatch.setattr(many, "spread", lambda *_, **options: pytest.fail("work was begun"))
    given = [str(models / "gpt"), str(models / "llama")]
    with pytest.raises(InputError, match=said):
        audit_many(given, tmp_path / "out", data, OPTIONS, workers=workers)
    assert list(tmp_path.iterdir()) == []


def test_as_many_at_a_time_as_the_memory_holds(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [piece(models, name, tmp_path) for name in ("gpt", "llama")]
    size = sum(path.stat().st_size for path in (models / "gpt").iterdir())
    for times, count in ((1, 1), (6, 2), (30, 10)):
        monkeypatch.setattr(many, "memory", lambda times=times: times * size)
        assert many._room(pieces) == count
    assert many._room([*pieces, piece(models, "far", tmp_path, there=False)]) == 1
    packed = replace(pieces[0], model=str(tmp_path / "m.gguf"))
    (tmp_path / "m.gguf").write_bytes(bytes(100))
    monkeypatch.setattr(many, "memory", lambda: 1600)
    assert many._room([packed]) == 2


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_audits_by_a_cluster_are_those_of_this_machine(models: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    given = [str(models / name) for name in ("gpt", "nothing", "llama")]
    try:
        workers = ClusterOptions(engine="ray", cpus_per_cell=1.0)
        far = audit_many(given, tmp_path / "far", None, OPTIONS, workers=workers, write=report.write_report)
        again = audit_many(given[::2], tmp_path / "far", None, OPTIONS, workers=workers)
    finally:
        ray.shutdown()
    near = audit_many(given, tmp_path / "near", None, OPTIONS, workers=1)
    assert [each.name for each in far.failed] == [each.name for each in near.failed] == ["nothing"]
    assert again.found == tuple(far.done)
    for name in ("gpt", "llama"):
        one, other = (open_audit(tmp_path / where / name) for where in ("far", "near"))
        assert (one.heads, one.layers) == (other.heads, other.layers)
        assert (tmp_path / "far" / name / report.PAGE).is_file()
