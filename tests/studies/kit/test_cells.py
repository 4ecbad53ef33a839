"""What a study reads of a cell is about the labels that its run counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders import tiny

from toeplens.engine import Job, Limits, run_job
from toeplens.studies.kit.cells import Cell, carried_out, gather_cells, jobs_of
from toeplens.studies.kit.results import Key
from toeplens.studies.kit.study import RUNS
from toeplens.training import Segment, Setup

RELEASED = {"form": "released", "length": 8, "vocab_size": 12, "max_between": 3, "max_side": 2}


def test_a_run_that_stands_in_two_places_is_asked_what_both_ask() -> None:
    first = Job(tiny(), "first", 4, measures=("toeplitz", "position"))
    second = Job(tiny(), "second", 4, measures=("position", "bias"), watch=True)
    other = Job(tiny(seed=3), "other", 4)
    jobs = {"a": first, "b": other, "c": second}
    cells = [Cell(Key("paper", "trigger-distance", label, 1), job) for label, job in jobs.items()]
    job, alone = jobs_of(cells)
    assert job == Job(tiny(), "first", 4, measures=("toeplitz", "position", "bias"), watch=True)
    assert alone == other


@pytest.mark.parametrize(
    ("ignored", "chance", "by_length"),
    [(None, 1 / 3, 8 / 12), (3, 1 / 2, 7 / 8)],  # 1, 2 or 3 words between, 1 or 2 on either side, cut at 8 tokens
    ids=["all labels count", "one is ignored"],
)
def test_the_guess_from_the_length_is_of_the_labels_that_count(
    tmp_path: Path, ignored: int | None, chance: float, by_length: float
):
    job = Job(tiny(task_options=RELEASED, epochs=1, ignore_label=ignored), "a cell", 20)
    run = run_job(job, tmp_path / RUNS, Limits(device="cpu"))
    cell = Cell(Key("released", "trigger-distance", "rope", 42), job)
    (found,) = gather_cells(tmp_path, [cell], {})["results"].cells
    assert (found.chance, found.length_chance) == (pytest.approx(chance), pytest.approx(by_length))
    assert found.skill == pytest.approx((run.result["test_accuracy"] - by_length) / (1 - by_length))


# ---- what runs were carried out on

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
    assert found["setups"] == f"The 2 runs were trained on {HERE}, not on the machine that gathered the study."
    found = carried_out([[Segment(0, 9, replace(HERE, device="cuda", gpu="a GPU"))]], {**OURS, "gpu": "another"})
    assert "on cuda (a GPU)" in found["setups"]


def test_more_than_one_is_one_sentence() -> None:
    alone, moved = [Segment(0, 9, HERE)], [Segment(0, 4, HERE), Segment(4, 9, THERE)]
    found = carried_out([alone, alone, moved], OURS)
    assert found["threads"] is None
    assert found["setups"] == (
        "The 3 runs were trained on 2 set-ups (1 of them moved between set-ups), so the results may not be "
        f"bit-identical to those of a single one: {HERE}: 3 runs; {THERE}: 1 run."
    )
