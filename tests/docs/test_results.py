"""results/README.md names what is there: a folder a row, and the tests that hold the records."""

from __future__ import annotations

import gzip
import json
import re
import tarfile
from pathlib import Path

import pytest

from toeplens.papers.deposit.study import grid
from toeplens.training import Run
from toeplens.training.presets import PROTOCOLS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "results" / "README.md").read_text()


ARCHIVES = sorted((ROOT / "results" / "desk").glob("runs-*.tar.xz"))
WHOLE = ("ablation-loss.json", "ablation.json", "environment.json", "metrics.jsonl", "result.json", "spec.json")


def finished(archive: Path) -> set[str]:
    with tarfile.open(archive) as packed:
        return {Path(name).parent.name for name in packed.getnames() if Path(name).name == "result.json"}


@pytest.mark.parametrize("archive", [path.name for path in ARCHIVES])
def test_a_run_that_is_kept_is_whole(archive: str, tmp_path: Path) -> None:
    with tarfile.open(ROOT / "results" / "desk" / archive) as packed:
        packed.extractall(tmp_path, filter="data")
    for directory in (tmp_path / "runs").iterdir():
        run = Run.open(directory)  # which refuses one whose lines do not lead to its end
        assert (run.status, run.spec.name) == ("complete", directory.name)
        assert set(WHOLE) <= {path.name for path in directory.iterdir()}


def test_every_folder_has_a_row_and_every_row_a_folder() -> None:
    rows = set(re.findall(r"^\| `([\w-]+)/` \|", TEXT, re.MULTILINE))
    assert rows == {path.name for path in (ROOT / "results").iterdir() if path.is_dir()}


def test_the_runs_of_desk_that_are_kept() -> None:
    kept = {name for archive in ARCHIVES for name in finished(archive)}
    judged = {cell.job.spec.name for cell in grid("desk", PROTOCOLS, 80)}
    ladder = {cell.job.spec.name for cell in grid("desk", PROTOCOLS, 3, ("core", "ladder"))} - judged
    others = kept - judged
    assert judged <= kept
    counted = (
        f"hold {len(kept)} finished runs without weights, so that other parts go on from them: these {len(judged)}"
    )
    climbed = f"{len(others & ladder)} of the {len(ladder)} that the ladder (`--part ladder --seeds 3`) adds"
    assert f"{counted}, {climbed}, and {len(others - ladder)} others: " in TEXT
    ladders = json.loads(gzip.decompress((ROOT / "results" / "ladder" / "results.json.gz").read_bytes()))
    used = others & {cell["run"] for cell in ladders["cells"]}
    assert f"the ledger of `ladder/` uses {len(used)} of these {len(others)} |" in TEXT


def test_the_tests_that_it_names_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", TEXT)
    assert len(named) == 7
    assert [name for name in named if not (ROOT / name).is_file()] == []
