"""What another package brings may fail; the study goes on, and says which package failed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.studies.grid.test_study import content
from tests.studies.local_runs import GRID, LocalRuns

from toeplens.encodings import registry
from toeplens.engine import ExecutionOptions
from toeplens.studies import grid

CLAIMS = """
from toeplens.studies import Claim, above
def good(data):
    return [above("RoPE", data.results.accuracy("index", "rope"), 0.0)]
CLAIMS = [
    Claim("good", "me", "s", "r", good, elsewhere={"other": lambda data: data.nothing}),
    Claim("wrong", "me", "s", "r", lambda data: {}["gone"]),
    Claim("empty", "me", "s", "r", lambda data: None),
]
"""
ENCODING = """
from toeplens.encodings.{base} as Base
class Bad(Base):
    def {hook}(self, *given, **more):
        raise KeyError("mine")
"""


@pytest.fixture
def install_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    def put(group: str, source: str) -> None:
        site = tmp_path / "site"
        about = site / "mine-1.dist-info"
        about.mkdir(parents=True)
        (site / "mine_plugin.py").write_text(source)
        (about / "METADATA").write_text("Name: mine\nVersion: 1\n")
        thing = "CLAIMS" if group == "toeplens.claims" else "Bad"
        (about / "entry_points.txt").write_text(f"[{group}]\nmine = mine_plugin:{thing}\n")
        monkeypatch.syspath_prepend(str(site))
        registry._load_encodings.cache_clear()

    monkeypatch.setattr(GRID, "run_jobs", LocalRuns())
    yield put
    monkeypatch.undo()
    sys.modules.pop("mine_plugin", None)
    registry._load_encodings.cache_clear()


def small_study(tmp_path: Path, encoding: str, **changes: object) -> grid.GridStudy:
    tasks = {"index": {"options": {"length": 6, "words": 6}}}
    asked = content(tasks=tasks, encodings={encoding: None}, **changes)
    return grid.run_study(grid.grid_spec(asked), tmp_path / "out", execution=ExecutionOptions(compile="off"))


def test_a_claim_that_raises_is_undecided_and_the_study_goes_on(
    install_plugin: Callable[[str, str], None], tmp_path: Path
) -> None:
    install_plugin("toeplens.claims", CLAIMS)
    state = small_study(tmp_path, "rope", claims="mine")
    good, wrong, empty = state.entries
    assert state.is_complete
    assert (good.verdict, good.alternatives) == ("leans to hold", ())
    assert wrong.verdict == "undecided"
    assert wrong.evidence == ["claim wrong of the package mine: could not be judged: KeyError: 'gone'"]
    assert "of the package mine: could not be judged: TypeError" in empty.evidence[0]
    (tmp_path / "site" / "mine_plugin.py").write_text("raise OSError('no data here')")
    sys.modules.pop("mine_plugin")
    [entry] = grid.gather(tmp_path / "out").entries
    assert entry.evidence == ["claim mine of the package mine: could not be judged: OSError: no data here"]


def test_a_measure_failing_in_an_encoding_is_reported(
    install_plugin: Callable[[str, str], None], tmp_path: Path
) -> None:
    install_plugin("toeplens.encodings", ENCODING.format(base="rotary import RoPE", hook="kernel"))
    state = small_study(tmp_path, "mine", measures=["frequency"])
    assert state.is_complete
    [cell] = state.results.cells
    assert "encoding: 'mine' of the package mine failed (KeyError: 'mine')" in cell.reason("frequency")
