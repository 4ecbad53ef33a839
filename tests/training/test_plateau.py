"""Training ends where the model has stopped learning, by the stated rule, and goes on past it as far as is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.builders import CallbackProbe, StopAfter, results_of, tiny

from toeplens.training import Run, train
from toeplens.training.spec import Plateau

pytestmark = pytest.mark.usefixtures("no_disk")
SHORT = {"gain": 10.0, "patience": 1, "skill": 0.0}  # reached at the second evaluation, whatever is learned


def rows(*losses: float | None, accuracy: float = 1.0) -> list[dict[str, Any]]:
    return [{"step": 10 * n, "test_loss": loss, "test_accuracy": accuracy} for n, loss in enumerate(losses, 1)]


def reference_plateau(losses: list[float], gain: float, patience: int) -> int | None:
    for last in range(patience, len(losses)):
        recent, before = losses[last - patience + 1 : last + 1], losses[: last - patience + 1]
        if min(before) - min(recent) < gain:
            return 10 * (last + 1)
    return None


@given(st.lists(st.floats(0, 4), max_size=12), st.floats(0.001, 1), st.integers(1, 4))
@example([2.0, 1.5], 0.5, 1)  # lower by the gain itself
def test_the_plateau_rule_matches_the_reference(losses: list[float], gain: float, patience: int) -> None:
    rule = Plateau(gain=gain, patience=patience)
    assert rule.find_step(rows(*losses), 0.1, 99) == reference_plateau(losses, gain, patience)


def test_chance_accuracy_is_a_plateau_only_at_the_end() -> None:
    flat = rows(3.0, 3.0, 3.0, 3.0, accuracy=0.15)
    rule = Plateau(patience=2)
    assert rule.find_step(flat, 0.1, 9) is None  # a skill of 0.06
    assert rule.find_step(flat, 0.1, 4) == 40
    assert rule.find_step(flat, 0.05, 9) == 30  # of 0.105
    assert rule.find_step(rows(3.0, 2.0, 1.0, 0.5, accuracy=0.15), 0.1, 4) is None, "still learning at the end"
    assert rule.find_step(rows(3.0, None, 3.0, 3.0), 0.1, 9) is None, "nothing is known of a run that diverged"
    assert Plateau(patience=1).find_step(rows(1.0, 1.0), 1.0, 9) == 20, "the length alone tells the label"
    assert Plateau(patience=1).find_step(rows(1.0, 1.0, accuracy=0.9), 1.0, 9) is None


def steps(run: Run) -> list[int]:
    return [row["step"] for row in run.metrics]


@pytest.mark.parametrize(
    ("changes", "expected"), [({}, [3, 6]), ({"evaluations": 2}, [2, 3]), ({"evaluations": 3}, [1, 2])]
)
def test_a_run_ends_at_its_plateau(tmp_path: Path, changes: dict[str, Any], expected: list[int]) -> None:
    run = train(tiny(epochs=9, plateau=SHORT, **changes), tmp_path)
    assert (run.status, steps(run)) == ("complete", expected)
    assert (run.result["plateau"], run.result["steps"]) == (expected[-1], expected[-1])
    assert [row["epoch"] for row in run.metrics] == pytest.approx([step / 3 for step in expected])
    run.model()


def test_training_continues_past_the_plateau_within_its_epochs(tmp_path: Path) -> None:
    beyond = train(tiny(epochs=9, plateau=SHORT | {"beyond": 2.0}), tmp_path)
    assert (steps(beyond), beyond.result["plateau"]) == ([3, 6, 9, 12], 6)
    short = train(tiny(epochs=3, plateau=SHORT | {"beyond": 2.0}), tmp_path)
    assert (steps(short), short.result["plateau"]) == ([3, 6, 9], 6)


def test_unfinished_learning_is_reported(tmp_path: Path) -> None:
    run = train(tiny(epochs=2, plateau={"patience": 1, "gain": 1e-12, "skill": 1.0}), tmp_path)
    assert (run.status, steps(run), run.result["plateau"]) == ("complete", [3, 6], None)
    assert "plateau" not in train(tiny(epochs=2), tmp_path).result


@pytest.mark.parametrize("units", [1, 4, 7, 11, 17])
def test_an_interrupted_run_resumes_to_the_same_result(tmp_path: Path, units: int) -> None:
    spec = tiny(epochs=9, evaluations=2, schedule="constant", plateau=SHORT | {"beyond": 2.0})
    uninterrupted = train(spec, tmp_path / "whole")
    assert train(spec, tmp_path / "stopped", should_stop=StopAfter(units)).status == "stopped"
    assert results_of(train(spec, tmp_path / "stopped")) == results_of(uninterrupted)


def test_later_fields_do_not_change_older_run_names() -> None:
    """Written out at their defaults they are no other run, and no older spec has them."""
    assert tiny().name == tiny(schedule="cosine", evaluations=1, plateau=None).name
    assert not {"schedule", "evaluations", "plateau"} & tiny().content.keys()
    assert tiny(epochs=9, plateau={}).content["plateau"] == {"gain": 0.01, "patience": 4, "skill": 0.1, "beyond": 1.0}
    others = ({}, {"schedule": "constant"}, {"evaluations": 2}, {"plateau": {"patience": 1}})
    assert len({tiny(**changes).name for changes in others}) == 4


def test_a_probe_of_the_last_step_sees_the_final_model(tmp_path: Path) -> None:
    spec = tiny(epochs=9, plateau=SHORT)
    ends = CallbackProbe([0, spec.total_steps])
    run = train(spec, tmp_path / "whole", probe=ends)
    assert [row["step"] for row in run.probe_rows] == [0, 6]
    for units in (1, 4, 9):
        out = tmp_path / str(units)
        train(spec, out, probe=ends, should_stop=StopAfter(units))
        assert [row["step"] for row in train(spec, out, probe=ends).probe_rows] == [0, 6]
