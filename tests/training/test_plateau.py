"""Training ends where the model has stopped learning, by the stated rule, and goes on past it as far as is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.builders import After, Watching, outcome, tiny

from toeplens.training import Run, train
from toeplens.training.spec import Plateau

pytestmark = pytest.mark.usefixtures("no_disk")
SHORT = {"gain": 10.0, "patience": 1, "skill": 0.0}  # reached at the second evaluation, whatever is learned


def rows(*losses: float | None, accuracy: float = 1.0) -> list[dict[str, Any]]:
    return [{"step": 10 * n, "test_loss": loss, "test_accuracy": accuracy} for n, loss in enumerate(losses, 1)]


def by_hand(losses: list[float], gain: float, patience: int) -> int | None:
    for last in range(patience, len(losses)):
        recent, before = losses[last - patience + 1 : last + 1], losses[: last - patience + 1]
        if min(before) - min(recent) < gain:
            return 10 * (last + 1)
    return None


@given(st.lists(st.floats(0, 4), max_size=12), st.floats(0.001, 1), st.integers(1, 4))
@example([2.0, 1.5], 0.5, 1)  # lower by the gain itself
def test_the_rule_is_what_it_says(losses: list[float], gain: float, patience: int) -> None:
    rule = Plateau(gain=gain, patience=patience)
    assert rule.reached(rows(*losses), 0.1, 99) == by_hand(losses, gain, patience)


def test_a_model_that_guesses_has_only_not_begun_unless_it_is_the_end() -> None:
    flat = rows(3.0, 3.0, 3.0, 3.0, accuracy=0.15)
    rule = Plateau(patience=2)
    assert rule.reached(flat, 0.1, 9) is None  # a skill of 0.06
    assert rule.reached(flat, 0.1, 4) == 40
    assert rule.reached(flat, 0.05, 9) == 30  # of 0.105
    assert rule.reached(rows(3.0, 2.0, 1.0, 0.5, accuracy=0.15), 0.1, 4) is None, "still learning at the end"
    assert rule.reached(rows(3.0, None, 3.0, 3.0), 0.1, 9) is None, "nothing is known of a run that diverged"
    assert Plateau(patience=1).reached(rows(1.0, 1.0), 1.0, 9) == 20, "the length alone tells the label"
    assert Plateau(patience=1).reached(rows(1.0, 1.0, accuracy=0.9), 1.0, 9) is None


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


def test_it_goes_on_beyond_and_no_further_than_its_epochs(tmp_path: Path) -> None:
    beyond = train(tiny(epochs=9, plateau=SHORT | {"beyond": 2.0}), tmp_path)
    assert (steps(beyond), beyond.result["plateau"]) == ([3, 6, 9, 12], 6)
    short = train(tiny(epochs=3, plateau=SHORT | {"beyond": 2.0}), tmp_path)
    assert (steps(short), short.result["plateau"]) == ([3, 6, 9], 6)


def test_one_that_is_still_learning_at_the_end_says_so(tmp_path: Path) -> None:
    run = train(tiny(epochs=2, plateau={"patience": 1, "gain": 1e-12, "skill": 1.0}), tmp_path)
    assert (run.status, steps(run), run.result["plateau"]) == ("complete", [3, 6], None)
    assert "plateau" not in train(tiny(epochs=2), tmp_path).result


@pytest.mark.parametrize("units", [1, 4, 7, 11, 17])
def test_stopped_anywhere_it_ends_as_if_it_had_not(tmp_path: Path, units: int) -> None:
    spec = tiny(epochs=9, evaluations=2, schedule="constant", plateau=SHORT | {"beyond": 2.0})
    whole = train(spec, tmp_path / "whole")
    assert train(spec, tmp_path / "stopped", should_stop=After(units)).status == "stopped"
    assert outcome(train(spec, tmp_path / "stopped")) == outcome(whole)


def test_fields_that_came_later_leave_older_names_alone() -> None:
    """Written out at their defaults they are no other run, and no older spec has them."""
    assert tiny().name == tiny(schedule="cosine", evaluations=1, plateau=None).name
    assert not {"schedule", "evaluations", "plateau"} & tiny().content.keys()
    assert tiny(epochs=9, plateau={}).content["plateau"] == {"gain": 0.01, "patience": 4, "skill": 0.1, "beyond": 1.0}
    others = ({}, {"schedule": "constant"}, {"evaluations": 2}, {"plateau": {"patience": 1}})
    assert len({tiny(**changes).name for changes in others}) == 4


def test_a_watcher_of_the_last_step_sees_the_one_where_training_ended(tmp_path: Path) -> None:
    spec = tiny(epochs=9, plateau=SHORT)
    ends = Watching([0, spec.total_steps])
    run = train(spec, tmp_path / "whole", watcher=ends)
    assert [row["step"] for row in run.watched] == [0, 6]
    for units in (1, 4, 9):
        out = tmp_path / str(units)
        train(spec, out, watcher=ends, should_stop=After(units))
        assert [row["step"] for row in train(spec, out, watcher=ends).watched] == [0, 6]
