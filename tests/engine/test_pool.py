"""What becomes of a worker that is terminated by itself, and of a piece that goes on past its deadline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.builders import tiny
from tests.engine.pieces import LATER, overrun, terminated

from toeplens.engine import Job, Limits, carry_out
from toeplens.engine.pool import in_processes
from toeplens.training import train

pytestmark = pytest.mark.heavy


def test_a_worker_that_is_terminated_ends_its_piece_and_not_itself(tmp_path: Path):
    """Ended itself it would have broken the pool, and the piece beside it would be lost."""
    found: dict[int, Any] = {}
    pieces = [(stays, tmp_path / "begun") for stays in (False, True)]
    in_processes(terminated, pieces, Limits(), count=2, threads=1, on_done=found.__setitem__)
    assert found == {0: None, 1: "whole"}


def test_what_overruns_its_deadline_is_interrupted_and_gone_on_with(tmp_path: Path):
    """Neither a measure nor one batch of an ablation looks at the time by itself."""
    pieces = []
    for seed, name in enumerate(("measure_run", "ablate_run")):
        job = Job(tiny(seed=seed), name, 20, measures=("toeplitz",))
        train(job.spec, tmp_path)
        pieces.append((job, tmp_path, name))
    found: dict[int, Any] = {}
    told: list[tuple[int, str]] = []
    in_processes(
        overrun,
        pieces,
        Limits(deadline=time.time() + LATER / 2),
        count=2,
        threads=1,
        on_done=found.__setitem__,
        on_told=lambda *what: told.append(what),
    )
    assert found == {0: None, 1: None}
    assert sorted(told) == [(0, "measure_run"), (1, "ablate_run")]
    assert [carry_out(job, tmp_path, Limits()).status for job, *_ in pieces] == ["complete", "complete"]
