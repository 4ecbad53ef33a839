"""A grid study: what its file may say, the cells it stands for, and that it is carried out and gone on with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.studies.local_runs import GRID, LocalRuns

from toeplens.engine import ExecutionOptions
from toeplens.studies import CellResult, grid
from toeplens.studies.grid.spec import spec_from_yaml
from toeplens.studies.kit.study import jobs_of
from toeplens.training import Run
from toeplens.utils import InputError, read_json

SIZES: dict[str, Any] = {"d_model": 8, "d_ff": 8, "num_layers": 2, "num_heads": 2, "dropout": 0.0}
TRAINING: dict[str, Any] = {"train_examples": 32, "test_examples": 16, "epochs": 1, "batch_size": 16}
TASKS: dict[str, Any] = {
    "index": {"options": {"length": 6, "words": 6}, "watch": True},
    "pairs": {"task": "retrieval", "options": {"length": 6, "keys": 3, "values": 4, "pairs": 2, "distractors": 4}},
}
ENCODINGS: dict[str, Any] = {
    "rope": {"title": "RoPE"},
    "cope": None,
    "turn": {"encoding": "rope-bands", "scan": {"frequencies": [0.1, 2]}, "tasks": ["index"]},
}


def content(**changes: Any) -> dict[str, Any]:
    common = {"tasks": TASKS, "encodings": ENCODINGS, "model": SIZES, "training": TRAINING}
    return common | {"seeds": 1, "examples": 12} | changes


def test_encodings_share_one_scale_unless_their_own_is_requested():
    def scales(**model: Any) -> list[float | None]:
        spec = grid.grid_spec(content(encodings={"rope": None, "t5": None}, tasks={"index": TASKS["index"]}))
        spec = grid.grid_spec({**spec.model_dump(mode="json"), "model": SIZES | model})
        return [cell.job.spec.model.attention_scale for cell in grid.grid_cells(spec)]

    assert scales() == [None, None]
    assert scales(attention_scale="published") == [None, 1.0]
    assert scales(attention_scale=0.5) == [0.5, 0.5]


@pytest.mark.parametrize("name", grid.spec_names())
def test_bundled_studies_are_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()  # an output directory of this name is no study file
    spec = grid.read_spec(name)
    actual = grid.grid_cells(spec)
    assert len({cell.key for cell in actual}) == len(actual) == len(jobs_of(actual))
    assert spec.claims in ("language", "multihop", "positional-symbolic")


def test_a_study_file_is_parsed(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content(title="Mine"), sort_keys=False))
    spec = grid.read_spec(path)
    assert spec == grid.grid_spec(content(title="Mine"))
    assert grid.grid_spec(yaml.safe_load(spec.to_yaml())) == spec
    columns = list(spec.columns())
    assert [column.label for column in columns] == ["rope", "cope", "turn/0.1", "turn/2"]
    assert [column.title for column in columns] == ["RoPE", "cope", "turn, frequencies 0.1", "turn, frequencies 2"]
    assert [column.options for column in columns] == [{}, {}, {"frequencies": 0.1}, {"frequencies": 2.0}]
    assert [column.value for column in columns] == [None, None, 0.1, 2.0]
    assert spec.title_of("index") == "index"


def test_cells_are_runs_of_these_sizes():
    spec = grid.grid_spec(
        content(
            seeds=2,
            first_seed=5,
            tasks={**TASKS, "index": {**TASKS["index"], "training": {"epochs": 3}, "model": {"num_layers": 1}}},
            encodings={**ENCODINGS, "rope": {"model": {"max_len": 40, "input_encoding": "sinusoidal"}}},
        )
    )
    actual = grid.grid_cells(spec)
    assert [(c.key.seed, c.key.task, c.key.label) for c in actual] == [
        (seed, task, label)
        for seed in (5, 6)
        for task, labels in (("index", ("rope", "cope", "turn/0.1", "turn/2")), ("pairs", ("rope", "cope")))
        for label in labels
    ]
    for cell in actual:
        run = cell.job.spec
        task = run.build_task()
        assert (run.seed, run.data_seed, cell.key.protocol) == (cell.key.seed, cell.key.seed, "paper")
        assert (run.model.vocab_size, run.model.num_classes) == (task.vocab_size, max(task.labels) + 1)
        assert run.epochs == (3 if cell.key.task == "index" else 1)
        assert run.model.num_layers == (1 if cell.key.task == "index" else 2)
        assert run.model.max_len == (40 if cell.key.label == "rope" else task.length)
        assert cell.job.probe == (cell.key.task == "index")
        assert (cell.job.examples, cell.job.measures) == (12, spec.measures)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "task": ({"tasks": {"indx": None}}, "got 'indx'; did you mean 'index'"),
    "encoding": ({"encodings": {"a": {"encoding": "ropee"}}}, "got 'ropee'; did you mean 'rope'"),
    "field": ({"task": 1}, "task is not a field; did you mean 'tasks'"),
    "measure": ({"measures": ["behavior"]}, "got 'behavior'; did you mean 'behaviour'"),
    "model": ({"model": {"heads": 2}}, "got 'heads'"),
    "seeds": ({"seeds": 0}, "seeds must be at least 1, got 0"),
    "twice": (
        {"encodings": {"rope": {"scan": {"base": [9.0]}}, "rope/9": {"encoding": "rope"}}},
        "encodings must have different labels, got 'rope/9' twice",
    ),
    "no-name": ({"encodings": {"": {"encoding": "nope"}}}, "encodings must have names that are not empty"),
    "few-examples": ({"measures": ["representation"], "examples": 4}, "examples must be at least"),
    "field-of-a-run": (
        {"model": {**SIZES, "num_heads": 3}},
        "rope on index: d_model must be divisible by num_heads (3), got 8",
    ),
    "number-of-a-run": ({"training": {"lr": -1}}, "rope on index: lr must be over 0, got -1"),
    "truth": ({"seeds": True}, "seeds"),
    "not-a-number": ({"title": float("nan")}, "title"),
    "truth-in-a-scan": ({"encodings": {"rope-bands": {"scan": {"frequencies": [1.0, True]}}}}, "scan"),
    "infinite": ({"training": {**TRAINING, "lr": float("inf")}}, "training.lr must be serializable as JSON, got inf"),
}


def test_scans_round_to_integers_where_needed_and_have_distinct_labels():
    scans = {"heads": [1, 2], "base": [1e4, 3], "rotary_pct": [0.12345671, 0.12345672]}
    for option, values in scans.items():
        part = {"encoding": "partial-rope", "scan": {option: values}}
        columns = list(grid.grid_spec(content(encodings={"some": part})).columns())
        assert [column.options[option] for column in columns] == values
        assert {type(column.options[option]) for column in columns} == {int if option == "heads" else float}
        assert len({column.label for column in columns}) == 2
    assert [column.label for column in columns] == ["some/0.12345671", "some/0.12345672"]


def test_a_duplicate_key_is_refused():
    with pytest.raises(InputError, match=r"^spec: it is not a study .'seeds' is set twice, again in line 3.*\.$"):
        spec_from_yaml("seeds: 1\ntasks: {index: }\nseeds: 2\n")


def test_dates_and_sexagesimals_are_read_as_text():
    text = "tasks: {index: {title: 2026-01-01}}\nencodings: {rope: {title: '1:30'}, alibi: {title: 1:30}}\n"
    spec = spec_from_yaml(text)
    assert [part.title for part in (spec.tasks["index"], *spec.encodings.values())] == ["2026-01-01", "1:30", "1:30"]
    assert spec_from_yaml(spec.to_yaml()) == spec
    with pytest.raises(InputError, match=r"^seeds must .*'1:30'"):
        spec_from_yaml(f"seeds: 1:30\n{text}")


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_study_is_refused_in_one_sentence(case: str):
    changes, words = REFUSED[case]
    with pytest.raises(InputError) as caught:
        grid.grid_cells(grid.grid_spec(content(**changes)))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "- a", "a: [", f"examples: {'9' * 5000}", f"about: {'[' * 5000}{']' * 5000}"], ids=range(5)
)
def test_an_unreadable_study_file_is_refused_in_one_sentence(text: str, tmp_path: Path):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(InputError, match=r"^spec(:| must) ") as caught:
        grid.read_spec(tmp_path / "bad.yaml")
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"none\.yaml does not exist\. Give a YAML file or one of canonical"):
        grid.read_spec(tmp_path / "none.yaml")


@pytest.fixture(scope="module")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished study; not to be changed."""
    out = tmp_path_factory.mktemp("grid") / "study"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRID, "run_jobs", LocalRuns())
        assert grid.run_study(
            grid.grid_spec(content(measures=ALL_MEASURES)), out, execution=ExecutionOptions(compile="off")
        ).is_complete
        yield out


ALL_MEASURES = ["behaviour", "permutations", "frequency", "bands", "toeplitz", "extrapolation"]


@pytest.fixture
def local_runs(monkeypatch: pytest.MonkeyPatch) -> LocalRuns:
    runner = LocalRuns()
    monkeypatch.setattr(GRID, "run_jobs", runner)
    return runner


def test_every_cell_is_measured_and_saved(finished_study: Path, tmp_path: Path):
    out = shutil.copytree(finished_study, tmp_path / "copy")
    state = grid.gather(out)
    assert (state.finished, state.total, state.share, state.is_complete) == (6, 6, 1.0, True)
    written = read_json(out / "results.json")
    assert written["study"] == "grid"
    assert grid.grid_spec(yaml.safe_load(written["spec"])) == state.spec
    assert {"torch", "seconds", "execution"} <= written["environment"].keys()
    again = [CellResult.from_dict(cell) for cell in written["cells"]]
    assert [cell.to_dict() for cell in again] == [cell.to_dict() for cell in state.results.cells]
    assert read_json(out / "claims.json")["claims"] == []
    for cell in state.results.cells:
        run = Run.open(out / "runs" / cell.run)
        assert cell.accuracy == run.result["test_accuracy"]
        assert set(cell.measures) == set(ALL_MEASURES)
        assert bool(cell.probe_rows) == (cell.key.task == "index")
        turns = cell.key.label != "cope"
        for name in ("behaviour", "permutations", "frequency", "bands"):
            assert ("reason" not in cell.measures[name]) == turns, (cell.key, name)
        first = cell.measures["extrapolation"]["rows"][0]
        assert (first["factor"], first["examples"]) == (1.0, 12)


def test_a_study_can_grow_without_repeating_work(finished_study: Path, tmp_path: Path, local_runs: LocalRuns):
    out = shutil.copytree(finished_study, tmp_path / "copy")
    weights = {path: path.read_bytes() for path in out.glob("runs/*/model.safetensors")}
    more = {**ENCODINGS, "nope": {"tasks": ["pairs"]}}
    state = grid.run_study(grid.grid_spec(content(encodings=more, measures=ALL_MEASURES)), out)
    assert (state.finished, state.total, len(local_runs.done)) == (7, 7, 1)
    assert {path: path.read_bytes() for path in weights} == weights
    less = grid.run_study(grid.grid_spec(content(encodings={"rope": None}, measures=["toeplitz"])), out)
    assert (less.finished, less.total, len(local_runs.done)) == (2, 2, 1)
    assert {tuple(cell.measures) for cell in less.results.cells} == {("toeplitz",)}


def test_a_study_of_too_many_models_is_refused():
    spec = grid.grid_spec(content(seeds=100, encodings={f"e{i}": {"encoding": "rope"} for i in range(60)}))
    with pytest.raises(InputError, match=r"tasks and encodings must give at most 10,000 models, got \d+,\d+"):
        grid.grid_cells(spec)


def test_another_studys_directory_is_left_unchanged(tmp_path: Path, local_runs: LocalRuns):
    theory = {"study": "theory", "scale": "smoke", "seeds": 1, "environment": {}, "seconds": 0.0}
    (tmp_path / "study.json").write_text(json.dumps(theory))
    with pytest.raises(InputError, match="contains another study"):
        grid.run_study(grid.grid_spec(content()), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"study.json", ".lock"}
