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
from tests.backends.hf.models import GPT, GROUPED, tiny
from tests.studies.auditing.page_writers import raise_out_of_memory, raise_unexpected, write_status

from toeplens import report
from toeplens.engine import ClusterOptions
from toeplens.studies import auditing
from toeplens.studies.auditing import PARTS, many_models, open_audit
from toeplens.studies.auditing.many_models import AuditJob, Audits, audit_job, audit_many, digest_of, directories_of
from toeplens.studies.kit.options import AuditOptions
from toeplens.utils import InputError, read_json

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


def job_for(models: Path, name: str, out: Path, **more: Any) -> AuditJob:
    model = str(models / name)
    given = {"write": None, "on_disk": True, "data": None, "options": OPTIONS} | more
    return AuditJob(name, model, model, directory=out / name, digest=digest_of(model, None, OPTIONS), **given)


def test_models_have_short_unique_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_requests_fingerprint_covers_all_its_options(models: Path, tmp_path: Path) -> None:
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


def test_an_audit_among_many_matches_a_single_audit(models: Path, tmp_path: Path) -> None:
    progress: list[tuple[str, int, int]] = []
    of = job_for(models, "llama", tmp_path, write=report.write_report)
    actual = audit_job(of, lambda *unit: progress.append(unit))
    alone = auditing.audit(of.model, sequences=8, max_tokens=12)
    audit = open_audit(of.directory)
    assert (audit.heads, audit.layers) == (alone.heads, alone.layers)
    assert audit.about["request"] == of.digest
    assert (of.directory / report.PAGE).is_file()
    assert {"layers", "heads"} == {unit for unit, *_ in progress}
    top = max(alone.heads, key=lambda head: head.effect or 0.0)
    assert (actual.layers, actual.heads, actual.effect) == (2, 8, top.effect)
    assert actual.head == f"L{top.layer + 1} H{top.head + 1}"
    assert (actual.reason, actual.code, actual.max_difference, actual.baseline) == (
        None,
        0,
        alone.max_difference,
        alone.baseline,
    )
    assert of.existing_outcome() == actual
    for other in (replace(of, digest="another"), replace(of, directory=tmp_path / "none")):
        assert other.existing_outcome() is None
    (of.directory / "audit.json").write_text("{")
    assert of.existing_outcome() is None


@pytest.mark.parametrize(
    ("name", "more", "code", "said"),
    [
        ("nothing", {}, 2, "model must be .* has no config.json"),
        ("gone", {}, 2, "model: machine .* has no .*gone. Use a directory that all machines share."),
        ("gpt", {"write": raise_out_of_memory}, 3, "Out of memory. Lower --workers or the sizes."),
        (
            "gpt",
            {"write": raise_unexpected},
            2,
            r"model: the audit failed: 'layer' is missing \(KeyError in page_writers.py, line ",
        ),
    ],
)
def test_a_failure_is_reported_in_one_sentence(
    models: Path, tmp_path: Path, name: str, more: Any, code: int, said: str
) -> None:
    actual = audit_job(job_for(models, name, tmp_path, **more), lambda *_: None)
    assert (actual.code, actual.name, actual.heads) == (code, name, 0)
    assert re.match(said, actual.reason), actual.reason


@pytest.mark.heavy
def test_a_failed_model_stops_no_other_and_a_rerun_resumes(models: Path, tmp_path: Path) -> None:
    events: list[tuple[str, bool]] = []
    given = [str(models / name) for name in ("dies", "nothing", "llama")]

    def again() -> Audits:
        events.clear()
        options: dict[str, Any] = {"write": write_status, "on_done": lambda each, new: events.append((each.name, new))}
        return audit_many(given, tmp_path / "out", None, OPTIONS, workers=1, **options)

    first = again()
    assert events == [("dies", True), ("nothing", True), ("llama", True)]
    died, refused = first.failed
    assert str(died.reason).startswith("The process ended (signal 9). If memory is short, lower --workers")
    assert (died.code, refused.code, first.code) == (3, 2, 3)
    assert [each.name for each in first.succeeded] == ["llama"]
    assert (tmp_path / "out" / "dies" / PARTS).is_dir()
    assert not (tmp_path / "out" / "nothing").exists()
    assert Audits.from_dict(read_json(tmp_path / "out" / "audits.json")) == first
    second = again()
    assert events == [("llama", False), ("dies", True), ("nothing", True)]
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
def test_invalid_common_options_are_refused_before_the_work(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Any, workers: Any, said: str
) -> None:
    monkeypatch.setattr(many_models, "run_parallel", lambda *_, **options: pytest.fail("work was begun"))
    given = [str(models / "gpt"), str(models / "llama")]
    with pytest.raises(InputError, match=said):
        audit_many(given, tmp_path / "out", data, OPTIONS, workers=workers)
    assert list(tmp_path.iterdir()) == []


def test_concurrency_is_limited_by_memory(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [job_for(models, name, tmp_path) for name in ("gpt", "llama")]
    size = sum(path.stat().st_size for path in (models / "gpt").iterdir())
    for times, count in ((1, 1), (6, 2), (30, 10)):
        monkeypatch.setattr(many_models, "memory", lambda times=times: times * size)
        assert many_models._memory_limit(pieces) == count
    assert many_models._memory_limit([*pieces, job_for(models, "far", tmp_path, on_disk=False)]) == 1
    bounded = [replace(piece, options=replace(OPTIONS, memory=f"{3 * size}")) for piece in pieces]
    assert many_models._memory_limit(bounded) == 10
    packed = replace(pieces[0], model=str(tmp_path / "m.gguf"))
    (tmp_path / "m.gguf").write_bytes(bytes(100))
    monkeypatch.setattr(many_models, "memory", lambda: 1600)
    assert many_models._memory_limit([packed]) == 2


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_audits_on_a_cluster_match_local_audits(models: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    requests = [str(models / name) for name in ("gpt", "nothing", "llama")]
    try:
        workers = ClusterOptions(engine="ray", cpus_per_cell=1.0)
        far = audit_many(requests, tmp_path / "far", None, OPTIONS, workers=workers, write=report.write_report)
        again = audit_many(requests[::2], tmp_path / "far", None, OPTIONS, workers=workers)
    finally:
        ray.shutdown()
    near = audit_many(requests, tmp_path / "near", None, OPTIONS, workers=1)
    assert [each.name for each in far.failed] == [each.name for each in near.failed] == ["nothing"]
    assert again.found == tuple(far.succeeded)
    for name in ("gpt", "llama"):
        one, other = (open_audit(tmp_path / where / name) for where in ("far", "near"))
        assert (one.heads, one.layers) == (other.heads, other.layers)
        assert (tmp_path / "far" / name / report.PAGE).is_file()
