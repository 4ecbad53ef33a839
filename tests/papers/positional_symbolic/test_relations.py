"""What goes with keeping skill on longer texts: a rank correlation, with families of encodings as what is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr
from tests.papers.positional_symbolic.worlds import SPEC, Model, cell

from toeplens.studies import Results, grid
from toeplens.studies.grid import measured as heads
from toeplens.studies.grid.relations import family, relations


def related(points: dict[tuple[str, str], tuple[float, float]], seeds: int = 2) -> list[grid.Relation]:
    """Relations of models by their deposit and what they keep."""
    rng = np.random.Generator(np.random.Philox(3))
    cells = [
        cell(task, label, seed, Model(peak=float(peak + 0.01 * rng.random()), kept=float(kept + 0.01 * rng.random())))
        for (task, label), (peak, kept) in points.items()
        for seed in range(seeds)
    ]
    return [each for each in relations(SPEC, Results(cells)) if each.figure == "deposit"]


def interval(relation: grid.Relation) -> tuple[float, float]:
    assert relation.low is not None
    assert relation.high is not None
    return relation.low, relation.high


LABELS = ("rope", "nope", "alibi", "t5", "sinusoidal", "cope")


def test_on_one_task_it_is_spearmans_correlation():
    """To 1e-12; the interval holds it."""
    drawn = np.random.Generator(np.random.Philox(1)).random((6, 2)).tolist()
    points = {("index", label): (peak, kept) for label, (peak, kept) in zip(LABELS, drawn, strict=True)}
    found = related(points)
    assert found == related(points)
    one = next(each for each in found if each.task == "index")
    expected: Any = spearmanr([p.figure for p in one.points], [p.kept for p in one.points])
    assert one.value == pytest.approx(expected.statistic, abs=1e-12)
    low, high = interval(one)
    assert -1 <= low <= expected.statistic <= high <= 1
    assert (one.encodings, len(one.points), one.factor) == (6, 12, heads.LONGER)
    assert one.families == ("bias", "input", "logits", "none", "rotation")
    assert one.chance is not None
    assert (one.chance < 0.025, one.chance > 0.975) == (low > 0, high < 0)
    together = next(each for each in found if each.task is None and each.factor == heads.LONGER)
    assert together.value == pytest.approx(one.value)
    assert one.to_dict()["points"] == 12


def test_tasks_are_compared_within_themselves():
    """Two tasks, each with a falling relation, the second higher in both: together it is falling, not rising."""
    points = {("index", label): (0.1 + 0.02 * rank, 0.3 - 0.03 * rank) for rank, label in enumerate(LABELS)}
    points |= {("mix", label): (0.7 + 0.02 * rank, 0.9 - 0.03 * rank) for rank, label in enumerate(LABELS)}
    found = related(points)
    together = next(each for each in found if each.task is None and each.factor == heads.LONGER)
    assert together.value == pytest.approx(-0.97, abs=0.03)
    assert interval(together)[1] < 0


def test_seeds_are_no_models_of_their_own():
    """Twenty seeds of five encodings make no narrower interval than two, where seeds of an encoding are alike."""
    points = {
        ("index", label): pair
        for label, pair in zip(LABELS[:5], [(0.1, 0.2), (0.3, 0.9), (0.5, 0.4), (0.7, 0.5), (0.9, 0.6)], strict=True)
    }
    few, many = (next(each for each in related(points, seeds) if each.task == "index") for seeds in (2, 20))
    assert np.diff(interval(many)) > 0.8 * np.diff(interval(few))


def test_relatives_are_no_witnesses_of_their_own():
    """Two more encodings of RoPE's family, just like RoPE, make no narrower interval."""
    pairs = [(0.1, 0.9), (0.3, 0.5), (0.5, 0.7), (0.6, 0.6), (0.7, 0.2), (0.8, 0.4)]
    points = {("index", label): pair for label, pair in zip(LABELS, pairs, strict=True)}
    more = points | {("index", label): points["index", "rope"] for label in ("high", "low")}
    few, many = (next(each for each in related(these) if each.task == "index") for these in (points, more))
    assert (few.encodings, many.encodings) == (6, 8)
    assert few.families == many.families
    assert np.diff(interval(many)) > 0.8 * np.diff(interval(few))


def test_families_are_told_by_where_position_enters():
    columns = grid.read_spec("canonical").columns()
    assert {column.label: family(column) for column in columns if not column.scan} == {
        "nope": "none",
        "sinusoidal": "input",
        "alibi": "bias",
        "t5": "bias",
        **dict.fromkeys(("rope", "p-rope", "rope-absolute", "mla", "high", "low"), "rotation"),
    }


@pytest.mark.parametrize("more", [{"t5": 0.4}, {"t5": 0.4, "sinusoidal": 0.35}])
def test_two_or_three_families_give_no_interval(more: dict[str, float]):
    """Three leave out one third of them at a time, and miss too often."""
    points = {("index", label): (0.1 * rank, 0.9 - 0.1 * rank) for rank, label in enumerate(("rope", "high", "alibi"))}
    some = {("index", label): (value, 0.3) for label, value in more.items()}
    found = next(each for each in related(points | some) if each.task == "index")
    assert found.value is not None
    assert (found.low, found.high, found.chance) == (None, None, None)


def test_few_encodings_or_no_difference_give_no_figure():
    few = related({("index", label): (0.1 * rank, 0.5) for rank, label in enumerate(LABELS[:3])})
    assert {(each.value, each.low, each.high) for each in few} == {(None, None, None)}
    cells = [cell("index", label, 0, Model()) for label in LABELS]
    assert {each.value for each in relations(SPEC, Results(cells))} == {None}
