"""What becomes of a worker that is terminated by itself, and of all of them when Ctrl-C is pressed again."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
from tests.engine.pieces import endless, terminated

from toeplens.engine import ExecutionOptions, spread

pytestmark = pytest.mark.heavy


def test_a_worker_that_is_terminated_ends_its_piece_and_not_itself(tmp_path: Path):
    """Ended itself it would have broken the pool, and the piece beside it would be lost."""
    found: dict[int, Any] = {}
    pieces = [(stays, tmp_path / "begun") for stays in (False, True)]
    spread(terminated, pieces, ExecutionOptions(), 2, on_done=found.__setitem__)
    assert found == {0: None, 1: "whole"}


def test_an_interrupt_ends_work_that_looks_at_no_limits():
    def interrupt(index: int, what: str) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        spread(endless, "ab", ExecutionOptions(), 2, on_done=lambda *what: None, on_told=interrupt)
    assert time.monotonic() - began < 300
    assert not multiprocessing.active_children()
