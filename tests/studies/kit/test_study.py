"""What a study's files may hold, who writes them, and what is read of its cells."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders import locked_elsewhere, tiny
from tests.papers.deposit.synthetic_studies import reproduction_results
from tests.report.grid.language_state import language_grid

from toeplens.engine import ExecutionOptions, Job, run_job
from toeplens.papers.deposit import Reproduction
from toeplens.papers.mathematics import Theory
from toeplens.studies import CellResult, grid
from toeplens.studies.kit.results import CellKey
from toeplens.studies.kit.study import RUNS, Cell, describe_setups, gather_cells, jobs_of, read_study
from toeplens.training import Segment, Setup
from toeplens.utils import EnvironmentFailure, InputError

ABOUT = {"torch": "2.13", "cores": 2, "gpu": None}
STUDIES: dict[str, dict[str, Any]] = {
    "reproduce": {"scale": "smoke", "protocols": ["paper"], "seeds": 1, "parts": ["core"], "seconds": 1.5},
    "grid": {"spec": "tasks: {index: {}}\nencodings: {nope: {}}\n", "seconds": 1},
    "theory": {"scale": "smoke", "seeds": 1},
}
NAN = float("nan")


def write_file(directory: Path, content: Any) -> Path:
    (directory / "study.json").write_text(json.dumps(content))
    return directory


def refusal_of(call: Any, *names: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert all(name in str(caught.value) for name in names), str(caught.value)


@pytest.mark.parametrize("kind", STUDIES)
def test_a_study_header_has_plain_fields(kind: str, tmp_path: Path) -> None:
    good = {"study": kind, "environment": ABOUT} | STUDIES[kind]
    read = {"reproduce": Reproduction, "grid": grid.GridStudy, "theory": Theory}[kind].read_plan
    assert read_study(write_file(tmp_path, good)) == {"seconds": 0.0} | good
    read(tmp_path)
    wrong: dict[str, tuple[Any, ...]] = {
        "environment": ([], {"torch": [2]}),
        "scale": (None, ["smoke"]),
        "protocols": ([], ["papr"]),
        "seeds": (0, 1.0, "1", True),
        "parts": ("core", [3]),
        "seconds": (-1, "1"),
        "spec": (None, {}),
    }
    for field, values in wrong.items():
        for value in values if field in good else ():
            refusal_of(lambda v=value, f=field: read(write_file(tmp_path, good | {f: v})), "study.json", field)
    for field in (STUDIES[kind].keys() | {"environment"}) - {"parts", "seconds"}:
        without = {name: value for name, value in good.items() if name != field}
        refusal_of(lambda c=without: read(write_file(tmp_path, c)), "study.json", field)


def test_a_cell_has_plain_fields() -> None:
    good = json.loads(json.dumps(reproduction_results()[0].to_dict()))
    assert CellResult.from_dict(good).to_dict() == reproduction_results()[0].to_dict()
    wrong: dict[str, tuple[Any, ...]] = {
        "key": (None, {}, {"protocol": "papr", "task": "t", "label": "l", "seed": 1}),
        "status": ("stopped", None),
        "chance": (None, "0.1", -0.1, 1.5, NAN, True),
        "length_chance": (None, 1.0, NAN),
        "parameters": (None, 1.5, -1, True),
        "epochs": (None, [3], [{"train_accuracy": 99.0, "test_accuracy": 0.5}], [{"train_accuracy": 0.5}]),
        "result": (None, {}, {"test_accuracy": 1e300, "seconds": 1.0}, {"test_accuracy": 0.5, "seconds": -1}),
        "ablation": ("none", 3, []),
        "measures": (None, [], {"behaviour": 3}),
        "probe_rows": (None, [3]),
        "run": (None, 3),
    }
    for field, values in wrong.items():
        for value in values:
            refusal_of(
                lambda v=value, f=field: CellResult.from_dict(good | {f: v}, "results.json"), "results.json", field
            )
        if field not in ("measures", "probe_rows"):  # earlier versions had none
            without = {name: value for name, value in good.items() if name != field}
            refusal_of(lambda c=without: CellResult.from_dict(c, "results.json"), "results.json", field)


def test_a_grid_study_is_restored_from_its_record(tmp_path: Path) -> None:
    state = language_grid(tmp_path)
    state.write_record()
    restored = grid.gather(tmp_path)
    assert grid.is_grid(tmp_path)
    assert not grid.GridStudy.is_study_directory(tmp_path)
    assert restored.spec == state.spec
    assert [entry.to_dict() for entry in restored.entries] == [entry.to_dict() for entry in state.entries]
    assert (restored.finished, restored.total, restored.environment) == (state.finished, state.total, state.environment)
    assert [cell.to_dict() for cell in restored.results.cells] == [cell.to_dict() for cell in state.results.cells]
    packed = gzip.compress((tmp_path / "results.json").read_bytes())
    (tmp_path / "results.json").unlink()
    (tmp_path / "results.json.gz").write_bytes(packed)
    assert grid.gather(tmp_path).result_fields() == restored.result_fields()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["claims.json", "results.json.gz"], "nothing is written"


EXPIRED = ExecutionOptions(device="cpu", deadline=0.0)


def test_a_study_without_write_permission_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    grid.run_study(grid.read_spec("canonical-smoke"), tmp_path, execution=EXPIRED)

    def refuse(*_: object) -> None:
        raise EnvironmentFailure("Cannot write .lock: this user may not write there.")

    monkeypatch.setattr("toeplens.studies.kit.study.lock_directory", refuse)
    assert grid.gather(tmp_path).finished == 0


def test_a_locked_study_is_read_only(tmp_path: Path):
    def made() -> grid.GridStudy:
        return grid.run_study(grid.read_spec("canonical-smoke"), tmp_path, execution=EXPIRED)

    made()
    before = (tmp_path / "study.json").read_bytes()
    (tmp_path / "results.json").write_text("the other process's")
    with locked_elsewhere(tmp_path):
        with pytest.raises(InputError, match=r"^study: .* is in use by another process"):
            made()
        assert grid.gather(tmp_path).finished == 0
    assert (tmp_path / "results.json").read_text() == "the other process's"
    assert json.loads((tmp_path / "study.json").read_text()) == json.loads(before)
    made()


RELEASED = {"form": "released", "length": 8, "vocab_size": 12, "max_between": 3, "max_side": 2}


def test_a_run_shared_by_two_cells_gets_the_measures_of_both() -> None:
    first = Job(tiny(), "first", 4, measures=("toeplitz", "position"))
    second = Job(tiny(), "second", 4, measures=("position", "bias"), probe=True)
    other = Job(tiny(seed=3), "other", 4)
    jobs = {"a": first, "b": other, "c": second}
    cells = [Cell(CellKey("paper", "trigger-distance", label, 1), job) for label, job in jobs.items()]
    job, alone = jobs_of(cells)
    assert job == Job(tiny(), "first", 4, measures=("toeplitz", "position", "bias"), probe=True)
    assert alone == other


@pytest.mark.parametrize(
    ("ignored", "chance", "by_length"),
    [(None, 1 / 3, 8 / 12), (3, 1 / 2, 7 / 8)],  # 1, 2 or 3 words between, 1 or 2 on either side, cut at 8 tokens
    ids=["all labels count", "one is ignored"],
)
def test_the_length_only_baseline_counts_only_counted_labels(
    tmp_path: Path, ignored: int | None, chance: float, by_length: float
):
    job = Job(tiny(task_options=RELEASED, epochs=1, ignore_label=ignored), "a cell", 20)
    run = run_job(job, tmp_path / RUNS, ExecutionOptions(device="cpu"))
    cell = Cell(CellKey("released", "trigger-distance", "rope", 42), job)
    (actual,) = gather_cells(tmp_path, [cell], {})["results"].cells
    assert (actual.chance, actual.length_chance) == (pytest.approx(chance), pytest.approx(by_length))
    assert actual.skill == pytest.approx((run.result["test_accuracy"] - by_length) / (1 - by_length))


THIS_SETUP = Setup("cpu", None, "float32", False, 1, "0.1.0", "2.13.0", "a processor")
THIS_ENVIRONMENT: dict[str, Any] = {"processor": THIS_SETUP.processor, "gpu": None, "torch": THIS_SETUP.torch}
OTHER_SETUP = replace(THIS_SETUP, device="cuda", gpu="a GPU", precision="bfloat16", threads=4)


def test_a_single_setup_is_not_described() -> None:
    assert describe_setups([[], []], THIS_ENVIRONMENT) == {}, "runs of earlier versions do not say"
    histories = [[Segment(0, 9, THIS_SETUP)], [Segment(0, 4, THIS_SETUP), Segment(4, 9, THIS_SETUP)], []]
    assert describe_setups(histories, THIS_ENVIRONMENT) == {"threads": 1}
    assert describe_setups(histories, {**THIS_ENVIRONMENT, "gpu": "a GPU that no run was on"}) == {"threads": 1}
    actual = describe_setups([[Segment(0, 9, THIS_SETUP)]] * 2, THIS_ENVIRONMENT | {"processor": "another"})
    assert actual["setups"] == f"The 2 runs were trained on {THIS_SETUP}, not on the machine that gathered the study."


def test_several_setups_are_one_sentence() -> None:
    alone, moved = [Segment(0, 9, THIS_SETUP)], [Segment(0, 4, THIS_SETUP), Segment(4, 9, OTHER_SETUP)]
    actual = describe_setups([alone, alone, moved], THIS_ENVIRONMENT)
    assert actual["threads"] is None
    assert actual["setups"] == (
        "The 3 runs were trained on 2 set-ups (1 of them moved between set-ups), so the results may not be "
        f"bit-identical to those of a single one: {THIS_SETUP}: 3 runs; {OTHER_SETUP}: 1 run."
    )
