"""How cost grows: the simulation by hand, and a small run of everything that is measured."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from tests.builders import load_script

from toeplens.utils import InputError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    return load_script(ROOT / "benchmarks" / "scaling.py")


def test_free_workers_take_the_next_cell(scaling: ModuleType):
    assert scaling.simulate([10.0], 8, 4, 0.0) == 20
    assert scaling.simulate([10.0, 20.0], 4, 2, 0.0) == 40  # the third behind the first, the last then behind it
    assert scaling.simulate([1.0], 6, 2, 0.0) == 3
    assert scaling.simulate([1.0], 10, 10, 5.0) == 5 * 10 + 1 + 5  # a driver gives out one after another
    took = {"write 10 MB": 10.0, "read 10 MB": 100.0}
    assert scaling.store_overhead(5.0, took) == 110
    assert scaling.store_overhead(65.0, took) == 30 + 100, "a store is asked more often the longer a cell takes"


def test_nodes_are_simulated_from_the_measured_cells_and_stores(scaling: ModuleType):
    took = {"write 10 MB": 0.0, "read 10 MB": 0.0}
    rows = scaling.simulated_hours([3.6, 3.6], {"near": took, "far": took | {"read 10 MB": 3.6}}, 0.0)
    assert [row["nodes"] for row in rows] == [4, 8, 16, 32, 64] * 2
    assert rows[0]["hours"] == pytest.approx(0.25)  # 1,000 cells of a thousandth of an hour on 4 nodes
    assert rows[0]["of_the_ideal"] == pytest.approx(1)
    assert rows[5]["hours"] == pytest.approx(0.5)
    assert rows[5]["of_the_ideal"] == pytest.approx(0.5)


@pytest.mark.heavy
def test_all_measurements_are_recorded(scaling: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    @contextmanager
    def stores():
        yield {"disk": f"file://{tmp_path}/store"}

    monkeypatch.setattr(scaling, "stores_to_measure", stores)
    monkeypatch.setattr(scaling, "driver_seconds", lambda: None)  # it needs Ray
    path = tmp_path / "scaling.json"
    options = ("--cells", "2", "--seconds", "0", "--lengths", "32", "--tokens", "16", "32", "--minutes", "1")
    scaling.main([*options, "--record", str(path)])
    actual = json.loads(path.read_text(encoding="utf-8"))
    assert set(actual["stores"]["disk"]) == {"write 10 MB", "read 10 MB"}
    assert set(actual["by_workers"]) == {"1", "2"}
    assert len(actual["cell_seconds"]) == 1
    assert [row["tokens"] for row in actual["audits"]] == [16, 32]
    assert [row["length"] for row in actual["training"]] == [32]
    assert [row["nodes"] for row in actual["simulated"]] == [4, 8, 16, 32, 64]
    assert {row["minutes"] for row in actual["assumed"]} == {1}
    assert actual["environment"]["torch"]


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--minutes", "-1", "minutes must be .*, got -1"),
        ("--cells", "1", "cells must be from 2 to 1000, got 1"),
    ],
)
def test_unmeasurable_options_are_named(scaling: ModuleType, option: str, value: str, says: str):
    with pytest.raises(InputError, match=says):
        scaling.main([option, value])
