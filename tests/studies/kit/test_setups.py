"""What a study's runs were carried out on is told of the runs, not of the process that gathers them."""

from __future__ import annotations

from dataclasses import replace

from toeplens.studies.kit.cells import carried_out
from toeplens.training import Segment, Setup

HERE = Setup("cpu", None, "float32", False, 1, "0.1.0", "2.13.0", "a processor")
THERE = replace(HERE, device="cuda", gpu="a GPU", precision="bfloat16", threads=4)


def test_one_set_up_needs_no_words() -> None:
    assert carried_out([[], []]) == {}, "runs of earlier versions do not say"
    assert carried_out([[Segment(0, 9, HERE)], [Segment(0, 4, HERE), Segment(4, 9, HERE)], []]) == {"threads": 1}


def test_more_than_one_is_one_sentence() -> None:
    alone, moved = [Segment(0, 9, HERE)], [Segment(0, 4, HERE), Segment(4, 9, THERE)]
    found = carried_out([alone, alone, moved])
    assert found["threads"] is None
    assert found["setups"] == (
        "The 3 runs were carried out on 2 set-ups (1 of them went from one to another), so they are not all what a "
        f"single one would give to the bit: {HERE}: 3 runs; {THERE}: 1 run."
    )
