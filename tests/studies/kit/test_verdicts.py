"""Verdicts follow their rule, and results are found and kept; claims are tried in test_claims.py."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.papers.deposit.told import TOLD
from tests.papers.deposit.worlds import Model, distance, made_up, results

from toeplens.ground import InputError
from toeplens.lens import over_seeds
from toeplens.studies import (
    MIN_SEEDS,
    RULE,
    CellResult,
    Finding,
    Key,
    Results,
    Verdict,
    above,
    below,
    combine,
    found,
    opposite,
    seen,
    within,
)
from toeplens.studies.kit.verdicts import DECISIVE
from toeplens.training.presets import COUNT, DISTANCE

VERDICTS: tuple[Verdict, ...] = ("holds", "fails", "holds in part", "undecided")
value = st.integers(-100, 100).map(lambda n: n / 100)

# ---- the rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "bar", "expected"),
    [
        # one seed: only more than 0.1 away is decisive
        ([0.2], 0.0, "holds"),
        ([-0.2], 0.0, "fails"),
        ([0.05], 0.0, "undecided"),
        ([-0.05], 0.0, "undecided"),
        ([0.5], 0.25, "holds"),
        ([0.3], 0.25, "undecided"),
        ([0.1], 0.25, "fails"),
        # two seeds: each of them must be
        ([0.2, 0.3], 0.0, "holds"),
        ([-0.2, -0.3], 0.0, "fails"),
        ([0.2, 0.05], 0.0, "undecided"),
        ([0.9, -0.9], 0.0, "undecided"),
        ([-0.2, -0.05], 0.0, "undecided"),
        # three and more: the interval of the mean
        ([0.02, 0.021, 0.019], 0.0, "holds"),
        ([-0.02, -0.021, -0.019], 0.0, "fails"),
        ([0.5, 0.4, -0.3], 0.0, "undecided"),
        ([0.2, 0.2, 0.2], 0.0, "holds"),
        ([0.2, 0.2, 0.2], 0.3, "fails"),
        ([0.2, 0.2, 0.2], 0.2, "undecided"),
        ([0.1] * 10 + [0.2], 0.0, "holds"),
        # no value
        ([], 0.0, "undecided"),
        ([math.nan], 0.0, "undecided"),
        ([0.9, 0.9, math.nan], 0.0, "undecided"),
        ([0.9, 0.9, 0.9, -math.inf], 0.0, "undecided"),
        ([math.inf], 0.0, "undecided"),
    ],
)
def test_a_comparison_is_decided_by_the_rule(values: list[float], bar: float, expected: Verdict):
    assert above("it", values, bar).verdict == expected
    assert above("it", np.array(values), bar).verdict == expected
    mirrored = below("it", [-v for v in values], -bar)
    assert mirrored.verdict == expected


@given(st.lists(value, min_size=1, max_size=MIN_SEEDS - 1), value)
def test_with_few_seeds_every_one_must_be_decisive(values: list[float], bar: float):
    expected = "undecided"
    if all(v > bar + DECISIVE for v in values):
        expected = "holds"
    if all(v < bar - DECISIVE for v in values):
        expected = "fails"
    assert above("it", values, bar).verdict == expected


@given(st.lists(value, min_size=MIN_SEEDS, max_size=9), value)
def test_with_more_seeds_the_interval_decides(values: list[float], bar: float):
    interval = over_seeds(np.array(values))
    expected = "holds" if interval.low > bar else "fails" if interval.high < bar else "undecided"
    assert above("it", values, bar).verdict == expected


@given(st.lists(value, max_size=6), value)
def test_below_is_the_mirror_of_above(values: list[float], bar: float):
    assert below("it", values, bar).verdict == above("it", [-v for v in values], -bar).verdict
    assert below("it", values, bar) == opposite(above("it", values, bar))


@given(st.lists(value, min_size=1, max_size=6), st.randoms())
def test_the_order_of_the_seeds_does_not_matter(values: list[float], random: Any):
    shuffled = random.sample(values, len(values))
    assert above("it", shuffled, 0.005).verdict == above("it", values, 0.005).verdict


@given(st.lists(value, min_size=1, max_size=6), st.integers(1, 50))
def test_more_of_it_is_never_less_above(values: list[float], more: int):
    rank = {"fails": 0, "undecided": 1, "holds": 2}
    raised = [v + more / 100 for v in values]
    assert rank[above("it", raised, 0.005).verdict] >= rank[above("it", values, 0.005).verdict]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # between 0 and 0.1, which is too narrow for few seeds to hold
        ([0.05], "undecided"),
        ([0.05, 0.05], "undecided"),
        ([0.21], "fails"),
        ([-0.11, -0.2], "fails"),
        ([0.15], "undecided"),
        ([-0.2, 0.3], "undecided"),
        ([0.05, 0.051, 0.049], "holds"),
        ([0.2, 0.201, 0.199], "fails"),
        ([-0.02, -0.021, -0.019], "fails"),
        ([0.1, 0.101, 0.099], "undecided"),
        ([0.0, 0.001, -0.001], "undecided"),
        ([0.5, -0.4, 0.1], "undecided"),
        ([], "undecided"),
        ([0.05, 0.05, math.nan], "undecided"),
        ([math.inf], "undecided"),
    ],
)
def test_values_are_within_two_bars_outside_one_or_undecided(values: list[float], expected: Verdict):
    assert within("it", values, 0.0, 0.1).verdict == expected
    assert within("it", np.array(values), 0.0, 0.1).verdict == expected
    assert within("it", [-v for v in values], -0.1, 0.0).verdict == expected


@given(st.lists(value, max_size=6), value, st.integers(1, 200))
def test_within_is_above_the_lower_and_below_the_upper_bar(values: list[float], low: float, width: int):
    high = low + width / 100
    parts = {above("it", values, low).verdict, below("it", values, high).verdict}
    expected = "holds" if parts == {"holds"} else "fails" if "fails" in parts else "undecided"
    assert within("it", values, low, high).verdict == expected


@given(st.lists(value, min_size=MIN_SEEDS, max_size=9), value, st.integers(1, 200))
def test_with_more_seeds_the_interval_lies_within_or_outside(values: list[float], low: float, width: int):
    high = low + width / 100
    interval = over_seeds(np.array(values))
    inside = low < interval.low and interval.high < high
    outside = interval.high < low or interval.low > high
    assert within("it", values, low, high).verdict == ("holds" if inside else "fails" if outside else "undecided")


@given(st.lists(value, max_size=6), value, st.integers(1, 100), st.integers(0, 50))
def test_wider_bars_never_make_it_less_within(values: list[float], low: float, width: int, more: int):
    rank = {"fails": 0, "undecided": 1, "holds": 2}
    wide = within("it", values, low - more / 100, low + (width + more) / 100)
    assert rank[wide.verdict] >= rank[within("it", values, low, low + width / 100).verdict]


def test_evidence_says_what_was_seen():
    few = above("RoPE - NoPE", [0.25, 0.5], 0.0).evidence
    assert few == "RoPE - NoPE: 0.250, 0.500 (2 seeds), bar 0"
    many = above("skill", [0.25, 0.5, 0.75], 0.25, unit=" points").evidence
    assert many == "skill: 0.500 points [-0.121, 1.121] over 3 seeds, bar 0.25"
    assert within("gap", [0.25, 0.5], -0.1, 0.1).evidence == "gap: 0.250, 0.500 (2 seeds), bar -0.1 to 0.1"
    for finding in (above("it", [], 0), below("it", [], 0), within("it", [], 0, 1)):
        assert "no finished run" in finding.evidence
    for finding in (above("it", [math.nan], 0), below("it", [math.nan], 0), within("it", [math.nan], 0, 1)):
        assert "diverged" in finding.evidence


@pytest.mark.parametrize(
    ("yes", "expected"),
    [
        ([], "undecided"),
        ([True], "holds"),
        ([False], "fails"),
        ([True] * 3, "holds"),
        ([False] * 3, "fails"),
        ([True, False], "holds in part"),
    ],
)
def test_a_property_is_seen_in_all_in_none_or_in_some(yes: list[bool], expected: Verdict):
    finding = seen("it", yes)
    assert finding.verdict == expected
    assert not yes or f"in {sum(yes)} of {len(yes)} seed" in finding.evidence


@given(st.lists(st.booleans(), max_size=6), st.randoms())
def test_a_property_is_found_in_one_model_or_not_in_enough_of_them(yes: list[bool], random: Any):
    finding = found("it", yes)
    expected = "holds" if True in yes else "fails" if len(yes) >= MIN_SEEDS else "undecided"
    assert finding.verdict == expected
    assert found("it", random.sample(yes, len(yes))) == finding
    models = f"{len(yes)} model{'' if len(yes) == 1 else 's'}"
    assert finding.evidence == f"it: {f'in {sum(yes)} of {models}' if yes else 'no finished run that counts'}"


@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_what_is_seen_in_all_is_found(yes: list[bool]):
    if seen("it", yes).verdict in ("holds", "holds in part"):
        assert found("it", yes).verdict == "holds"
    if found("it", yes).verdict == "fails":
        assert seen("it", yes).verdict == "fails"


@pytest.mark.parametrize(
    ("verdict", "expected"), list(zip(VERDICTS, ("fails", "holds", "holds in part", "undecided"), strict=True))
)
def test_the_opposite_of_a_finding_rests_on_the_same_evidence(verdict: Verdict, expected: Verdict):
    assert opposite(Finding(verdict, "this")) == Finding(expected, "this")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], "undecided"),
        (["holds"], "holds"),
        (["holds", "holds"], "holds"),
        (["fails", "fails"], "fails"),
        (["undecided", "undecided"], "undecided"),
        (["holds", "fails"], "holds in part"),
        (["holds", "undecided"], "undecided"),
        (["fails", "undecided"], "undecided"),
        (["holds", "fails", "undecided"], "holds in part"),
        (["holds in part"], "holds in part"),
        (["holds in part", "holds"], "holds in part"),
        (["holds in part", "undecided"], "holds in part"),
    ],
)
def test_a_claim_is_decided_from_its_parts(parts: list[Verdict], expected: Verdict):
    for order in itertools.permutations(parts):
        assert combine([Finding(part, "") for part in order]) == expected


def test_the_rule_names_its_numbers():
    assert f"{MIN_SEEDS} or more seeds" in RULE
    assert f"more than {DECISIVE:g}" in RULE
    assert "95%" in RULE


# ---- results --------------------------------------------------------------------------------------------------------


def test_results_are_found_by_task_label_seed_and_protocol():
    both = Results([*results(TOLD, protocol="released").cells, *results(TOLD).cells])
    assert [cell.key.protocol for cell in both.cells] == ["paper"] * 3 * len(TOLD) + ["released"] * 3 * len(TOLD)
    assert both.under("paper").labels(COUNT) == sorted(label for task, label in TOLD if task == COUNT)
    assert {"rope/dropout", "partial-1"} <= {*both.labels(DISTANCE)}
    assert [cell.key.seed for cell in both.under("released").of(DISTANCE, "rope")] == [0, 1, 2]
    assert both.of(DISTANCE, "unheard of") == []
    assert len(both.accuracy(COUNT, "unheard of")) == 0


@pytest.mark.parametrize("status", ["complete", "diverged"])
def test_a_cell_reads_back_as_it_was(status: str):
    for cell in results(distance(rope=Model(0.8, status=status).single(0)), seeds=2).cells:
        again = CellResult.from_dict(cell.to_dict())
        assert again.to_dict() == cell.to_dict()
        assert again.key == cell.key
        assert again.deposits() == cell.deposits()
        assert (again.measures, again.watched) == (cell.measures, cell.watched)
        assert bool(cell.measures) == (status == "complete")


def test_a_record_from_before_there_were_measures_has_none():
    (cell,) = results(distance(rope=0.9), seeds=1).cells
    content = {key: value for key, value in cell.to_dict().items() if key not in ("measures", "watched")}
    assert CellResult.from_dict(content).to_dict() == replace(cell, measures={}, watched=[]).to_dict()


@given(st.dictionaries(st.integers(0, 5), value), st.dictionaries(st.integers(0, 5), value))
def test_a_figure_is_paired_by_seed(first: dict[int, float], second: dict[int, float]):
    cells = [
        made_up(Key("paper", COUNT, label, seed), Model(figure))
        for label, figures in (("rope", first), ("nope", second))
        for seed, figure in figures.items()
    ]
    expected = {seed: first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())}
    assert Results(cells).difference(COUNT, "rope", "nope") == pytest.approx(expected)


@pytest.mark.parametrize(
    "damage", [lambda c: c.pop("key"), lambda c: c.update(key={"task": 1}), lambda c: c.pop("run")]
)
def test_a_damaged_cell_is_one_sentence(damage: Any):
    content = results(distance(rope=0.9), seeds=1).cells[0].to_dict()
    damage(content)
    with pytest.raises(InputError, match=r"^results: the record is damaged: "):
        CellResult.from_dict(content)
