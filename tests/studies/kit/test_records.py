"""What a study's files may hold: each fault is one sentence that names the file and the field."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.papers.deposit.numbers import reproduced
from tests.report.grid.language_state import language_grid

from toeplens.ground import InputError
from toeplens.papers.deposit import Reproduction
from toeplens.papers.mathematics import Theory
from toeplens.studies import CellResult, grid
from toeplens.studies.grid.spec import spec_from_yaml
from toeplens.studies.kit.study import read_study

ABOUT = {"torch": "2.13", "cores": 2, "gpu": None}
STUDIES: dict[str, dict[str, Any]] = {
    "reproduce": {"scale": "smoke", "protocols": ["paper"], "seeds": 1, "parts": ["core"], "seconds": 1.5},
    "grid": {"spec": "tasks: {index: {}}\nencodings: {nope: {}}\n", "seconds": 1},
    "theory": {"scale": "smoke", "seeds": 1},
}
NAN = float("nan")
RECORDED = Path(__file__).parents[3] / "results"


def written(directory: Path, content: Any) -> Path:
    (directory / "study.json").write_text(json.dumps(content))
    return directory


def refused(call: Any, *names: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert all(name in str(caught.value) for name in names), str(caught.value)


@pytest.mark.parametrize("kind", STUDIES)
def test_a_study_says_what_it_is_in_plain_fields(kind: str, tmp_path: Path) -> None:
    good = {"study": kind, "environment": ABOUT} | STUDIES[kind]
    read = {"reproduce": Reproduction, "grid": grid.Grid, "theory": Theory}[kind].plan_of
    assert read_study(written(tmp_path, good)) == {"seconds": 0.0} | good
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
            refused(lambda v=value, f=field: read(written(tmp_path, good | {f: v})), "study.json", field)
    for field in (STUDIES[kind].keys() | {"environment"}) - {"parts", "seconds"}:
        without = {name: value for name, value in good.items() if name != field}
        refused(lambda c=without: read(written(tmp_path, c)), "study.json", field)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seeds: true", "seeds"),
        (f"examples: {'9' * 5000}", "digits"),
        (f"about: {'[' * 5000}{']' * 5000}", "nested too deep"),
        ("title: .nan", "title"),
        ("encodings: {rope-bands: {scan: {frequencies: [1.0, true]}}}", "scan"),
    ],
)
def test_a_grids_file_is_of_plain_numbers_and_of_some_size(text: str, words: str) -> None:
    rest = {"tasks": "tasks: {index: {options: {length: 10, words: 8}}}\n", "encodings": "encodings: {nope: {}}\n"}
    whole = "".join(line for name, line in rest.items() if not text.startswith(name)) + text
    refused(lambda: grid.cells(spec_from_yaml(whole, "mine.yaml")), words)


def test_a_cell_is_of_plain_fields() -> None:
    good = json.loads(json.dumps(reproduced()[0].to_dict()))
    assert CellResult.from_dict(good).to_dict() == reproduced()[0].to_dict()
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
        "watched": (None, [3]),
        "run": (None, 3),
    }
    for field, values in wrong.items():
        for value in values:
            refused(lambda v=value, f=field: CellResult.from_dict(good | {f: v}, "results.json"), "results.json", field)
        if field not in ("measures", "watched"):  # earlier versions had none
            without = {name: value for name, value in good.items() if name != field}
            refused(lambda c=without: CellResult.from_dict(c, "results.json"), "results.json", field)


# ---- records alone


def test_a_grid_study_is_what_its_record_tells(tmp_path: Path) -> None:
    state = language_grid(tmp_path)
    state.write_down()
    again = grid.gather(tmp_path)
    assert grid.is_grid(tmp_path)
    assert not grid.Grid.holds(tmp_path)
    assert again.spec == state.spec
    assert [entry.to_dict() for entry in again.entries] == [entry.to_dict() for entry in state.entries]
    assert (again.finished, again.total, again.environment) == (state.finished, state.total, state.environment)
    assert [cell.to_dict() for cell in again.results.cells] == [cell.to_dict() for cell in state.results.cells]
    packed = gzip.compress((tmp_path / "results.json").read_bytes())
    (tmp_path / "results.json").unlink()
    (tmp_path / "results.json.gz").write_bytes(packed)
    assert grid.gather(tmp_path).found() == again.found()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["claims.json", "results.json.gz"], "nothing is written"
