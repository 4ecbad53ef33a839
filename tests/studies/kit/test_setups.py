"""What a study's runs were carried out on is told of the runs, not of the process that gathers them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from toeplens.studies.kit.cells import carried_out
from toeplens.training import Segment, Setup

HERE = Setup("cpu", None, "float32", False, 1, "0.1.0", "2.13.0", "a processor")
OURS: dict[str, Any] = {"processor": HERE.processor, "gpu": None, "torch": HERE.torch}
THERE = replace(HERE, device="cuda", gpu="a GPU", precision="bfloat16", threads=4)


def test_one_set_up_needs_no_words() -> None:
    assert carried_out([[], []], OURS) == {}, "runs of earlier versions do not say"
    histories = [[Segment(0, 9, HERE)], [Segment(0, 4, HERE), Segment(4, 9, HERE)], []]
    assert carried_out(histories, OURS) == {"threads": 1}
    assert carried_out(histories, {**OURS, "gpu": "a GPU that no run was on"}) == {"threads": 1}


@pytest.mark.parametrize("other", [{"processor": "another"}, {"torch": "2.11.0"}])
def test_one_that_is_not_where_the_study_was_gathered_is_named(other: dict[str, str]) -> None:
    found = carried_out([[Segment(0, 9, HERE)]] * 2, OURS | other)
    assert found["setups"] == f"The 2 runs were carried out on {HERE}, and not where this study was gathered."
    found = carried_out([[Segment(0, 9, replace(HERE, device="cuda", gpu="a GPU"))]], {**OURS, "gpu": "another"})
    assert "on cuda (a GPU)" in found["setups"]


def test_more_than_one_is_one_sentence() -> None:
    alone, moved = [Segment(0, 9, HERE)], [Segment(0, 4, HERE), Segment(4, 9, THERE)]
    found = carried_out([alone, alone, moved], OURS)
    assert found["threads"] is None
    assert found["setups"] == (
        "The 3 runs were carried out on 2 set-ups (1 of them went from one to another), so they are not all what a "
        f"single one would give to the bit: {HERE}: 3 runs; {THERE}: 1 run."
    )
