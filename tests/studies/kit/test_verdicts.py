"""Verdicts follow their rule: five seeds decide, fewer lean; intervals are those that scipy has."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from toeplens.studies import MIN_SEEDS, Finding, Verdict, above, below, combine, opposite, supporting, within
from toeplens.studies.kit.verdicts import (
    GRAIN,
    LEVEL,
    MAX_FACTOR,
    OPEN_VERDICTS,
    claim_p_value,
    combine_agreeing,
    contrast,
    difference,
    interval_above,
    mean_contrast,
    one_sided,
    unknown_finding,
)

INDICATIVE: tuple[Verdict, ...] = ("leans to hold", "leans to fail")
NEAR = [0.2, 0.201, 0.199, 0.2, 0.2]  # five seeds that agree on 0.2
value = st.integers(-100, 100).map(lambda n: n / 100)
few = st.lists(value, min_size=1, max_size=MIN_SEEDS - 1)
many = st.lists(value, min_size=MIN_SEEDS, max_size=9)
any_number = st.lists(value, max_size=9)


@pytest.mark.parametrize(
    ("values", "bar", "expected"),
    [
        # fewer than five: on which side of the bar the mean is, however far
        ([0.2], 0.0, "leans to hold"),
        ([0.25, -0.25], 0.0, "undecided"),
        # five and more: the interval of the mean
        (NEAR, 0.0, "holds"),
        (NEAR, 0.5, "fails"),
        (NEAR, 0.2, "undecided"),
        ([0.2] * 5, 0.19, "holds"),
        ([0.2] * 5, 0.195, "undecided"),  # a grain away
        # no value
        ([], 0.0, "undecided"),
        ([*NEAR, math.nan], 0.0, "undecided"),
        ([math.inf] * 5, 0.0, "undecided"),
    ],
)
def test_a_comparison_is_decided_by_the_rule(values: list[float], bar: float, expected: Verdict) -> None:
    assert above("it", values, bar).verdict == expected
    assert above("it", np.array(values), bar).verdict == expected
    assert above("it", dict(enumerate(values)), bar).verdict == expected
    assert below("it", [-v for v in values], -bar).verdict == expected


@given(few, value)
def test_with_few_seeds_verdicts_are_only_indicative(values: list[float], bar: float) -> None:
    finding = above("it", values, bar)
    assert finding.verdict in OPEN_VERDICTS
    assert (finding.holds, finding.fails) == (None, None), "and no correction is asked about it"
    assume(abs(float(np.mean(values)) - bar) > 1e-9)
    assert finding.verdict == INDICATIVE[int(np.mean(values) < bar)]
    assert f"{MIN_SEEDS} seeds" in finding.missing


@given(any_number, value)
def test_below_is_the_mirror_of_above(values: list[float], bar: float) -> None:
    under, over = below("it", values, bar), above("it", values, bar)
    assert under.verdict == above("it", [-v for v in values], -bar).verdict
    assert (under.evidence, under.holds, under.fails) == (over.evidence, over.fails, over.holds)
    turned = opposite(over)
    assert turned == replace(under, comparison=turned.comparison)
    assert opposite(turned) == over


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # between 0 and 0.1
        ([-0.11, -0.2], "leans to fail"),
        ([-0.2, 0.3], "leans to hold"),
        ([0.1], "undecided"),
        ([0.05, 0.051, 0.049, 0.05, 0.05], "holds"),
        (NEAR, "fails"),
        ([v - 0.1 for v in NEAR], "undecided"),
    ],
)
def test_values_are_within_both_thresholds_outside_one_or_undecided(values: list[float], expected: Verdict) -> None:
    assert within("it", values, 0.0, 0.1).verdict == expected
    assert within("it", [-v for v in values], -0.1, 0.0).verdict == expected


@given(many, value, st.integers(1, 200))
def test_within_holds_if_both_thresholds_do_and_fails_if_one_does(values: list[float], low: float, width: int) -> None:
    """Lying outside has two sides, which share the error, so that it takes a little more to fail."""
    high = low + width / 100
    finding, parts = within("it", values, low, high), (above("it", values, low), below("it", values, high))
    assert (finding.verdict == "holds") == (parts[0].verdict == parts[1].verdict == "holds")
    assert (finding.verdict == "fails") == any((part.fails or 0.0) <= LEVEL / 4 for part in parts)


@given(many, value, st.floats(0.001, 0.2), st.floats(0.001, 0.2))
def test_a_smaller_error_never_decides_more(values: list[float], bar: float, first: float, second: float) -> None:
    finding = above("it", values, bar)
    strict, loose = sorted((first, second))
    assert finding.verdict_at(strict) in (finding.verdict_at(loose), "undecided")
    assert finding.verdict_at(LEVEL) == finding.verdict


def test_evidence_states_the_measured_values() -> None:
    assert above("it", [0.25], 0.0).evidence == "it: 0.250 (1 seed), threshold 0"
    evidence = above("skill", [0.25, 0.5, 0.75, 0.5, 0.5], 0.25, unit=" points").evidence
    assert evidence == "skill: 0.500 points [0.281, 0.719] over 5 seeds, threshold 0.25"
    evidence = within("gap", difference([0.25] * 6, [0.5] * 5), -0.1, 0.1).evidence
    assert evidence.startswith("gap: -0.250 [")
    assert evidence.endswith("] over 6 and 5 seeds, thresholds -0.1 to 0.1")


@pytest.mark.parametrize("test", [above, below])
def test_missing_evidence_gives_the_reason(test: Any) -> None:
    for values, reason in (([], "no finished run"), ([*NEAR, math.inf], "diverged")):
        finding = test("it", values, 0)
        assert reason in finding.evidence
        assert reason in finding.missing
        assert not finding.has_data


def test_the_seeds_needed_are_a_number_or_none() -> None:
    wide = above("it", [0.9, 0.1, 0.5, 0.4, 0.6], 0.25)
    assert wide.verdict == "undecided"
    count = difference([0.9, 0.1, 0.5, 0.4, 0.6], [0.25] * 5, 1e-9).seeds_to_decide(0, LEVEL)
    assert wide.missing == f"about {count} seeds if mean and spread stay the same (now 5)"
    assert above("it", NEAR, 0.2).missing.startswith("far more seeds: the mean is 0.000 from the threshold")
    near_high = within("it", [0.9, 0.1, 0.5, 0.4, 0.6], -9.0, 0.75)
    assert near_high.missing == wide.missing, "of two bars the nearer one"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], "undecided"),
        (["holds", "holds"], "holds"),
        (["holds", "fails", "undecided", "leans to hold"], "fails"),
        (["holds", "leans to hold"], "leans to hold"),
        (["holds", "leans to hold", "leans to fail"], "leans to fail"),
        (["holds", "leans to hold", "leans to fail", "undecided"], "undecided"),
    ],
)
def test_a_claim_fails_with_an_essential_part(parts: list[Verdict], expected: Verdict) -> None:
    for order in itertools.permutations(parts):
        assert combine([Finding(part, "") for part in order]) == expected


def with_chances(holds: float, fails: float, *, essential: bool = True) -> Finding:
    finding = Finding("undecided", "", holds, fails, essential)
    return replace(finding, verdict=finding.verdict_at(LEVEL))


def test_a_claim_holds_if_all_parts_hold_and_fails_if_one_fails() -> None:
    parts = [with_chances(0.001, 1.0), with_chances(0.02, 0.98), unknown_finding("it", "why")]
    assert claim_p_value(parts[:2]) == pytest.approx(2 * 0.02)
    assert claim_p_value([with_chances(1.0, 0.004), with_chances(0.3, 0.7)]) == pytest.approx(2 * 2 * 0.004)
    assert claim_p_value(parts) == pytest.approx(min(1.0, 2 * 2 * 0.98)), "it cannot hold while a part is not known"
    assert claim_p_value([with_chances(0.5, 0.5)]) == 1.0
    assert (
        claim_p_value([])
        is claim_p_value([Finding("holds", "")])
        is claim_p_value([unknown_finding("it", "why")])
        is None
    )
    assert claim_p_value([Finding("holds", ""), with_chances(0.001, 1.0)]) == pytest.approx(0.002)
    assert claim_p_value([parts[0], supporting(with_chances(0.0, 1.0))]) == claim_p_value(parts[:1])


def test_several_parts_share_the_error_level() -> None:
    """Of four parts each has a quarter of the error; what seems to fail then leaves the claim open."""
    weak = with_chances(0.99, 0.01)
    assert combine([weak, *[with_chances(0.0, 1.0)] * 3]) == "fails"
    assert combine([weak], 0.05) == "fails"
    assert combine([weak, *[with_chances(0.0, 1.0)] * 3], 0.05) == "undecided"
    support = supporting(weak)
    assert combine([with_chances(0.0, 1.0), support], 0.05) == "holds in part"
    several = [with_chances(0.0, 1.0), support, supporting(support), support]
    assert combine(several, 0.05) == "holds in part", "by its own interval"


def test_joint_checks_are_decided_by_the_weaker_one() -> None:
    strong, weak, against = above("it", NEAR, 0.0), above("it", [0.9, 0.1, 0.5, 0.4, 0.6], 0.25), above("it", NEAR, 0.9)
    assert [each.verdict for each in (strong, weak, against)] == ["holds", "undecided", "fails"]
    for pair, expected in (((strong, strong), "holds"), ((against, against), "fails")):
        assert combine_agreeing(*pair, "again").verdict == expected
    for pair in ((strong, weak), (strong, against), (strong, unknown_finding("it", "why"))):
        for first, second in (pair, pair[::-1]):
            actual = combine_agreeing(first, second, "again")
            assert actual.verdict == "undecided"
            assert actual.evidence.startswith(f"{first.evidence}; again: ")
    both = combine_agreeing(strong, weak, "again")
    assert (both.holds, both.fails) == (weak.holds, strong.fails)
    few = above("it", [0.5, 0.6], 0.2)  # two seeds of one or of both
    for other, expected in ((few, "leans to hold"), (strong, "leans to hold"), (against, "undecided")):
        assert (
            combine_agreeing(few, other, "again").verdict == combine_agreeing(other, few, "again").verdict == expected
        )


def test_a_value_with_an_interval_of_its_own_needs_no_seeds() -> None:
    assert interval_above("it", 0.5, 0.3, 0.7, 0.2) == Finding("holds", "it: 0.500 [0.300, 0.700], threshold 0.2")
    assert [interval_above("it", 0.5, 0.3, 0.7, bar).verdict for bar in (0.3, 0.8)] == ["undecided", "fails"]


@given(any_number, value, st.booleans(), st.booleans())
def test_a_bound_is_decided_one_sided(values: list[float], bar: float, holds: bool, fails: bool) -> None:
    finding = above("it", values, bar)
    bounded = one_sided(finding, holds=holds, fails=fails, cause="of some the least is known")
    sides = {"hold": holds, "fail": fails}
    told = next((may for word, may in sides.items() if word in finding.verdict), True)
    assert bounded.verdict == (finding.verdict if told else "undecided")
    assert (bounded.evidence != finding.evidence) == (finding.has_data and not (holds and fails))
    if finding.holds is not None and finding.fails is not None:
        assert bounded.verdict_at(LEVEL) == bounded.verdict
        assert (bounded.holds, bounded.fails) == (finding.holds if holds else 1.0, finding.fails if fails else 1.0)
        assert (claim_p_value([bounded]) or 0.0) >= (claim_p_value([finding]) or 0.0)


NONE = 1e-12  # a grain that plays no part
several = st.lists(value, min_size=2, max_size=9)


def has_spread(*terms: list[float]) -> None:
    """Only where no term's spread is 0, which scipy leaves undefined."""
    assume(all(np.ptp(term) > 0 for term in terms))


@given(several, value)
def test_one_mean_matches_students_t(values: list[float], bar: float) -> None:
    has_spread(values)
    comparison = mean_contrast(values, NONE)
    test: Any = stats.ttest_1samp(values, bar, alternative="greater")
    assert comparison.p_above(bar) == pytest.approx(float(test.pvalue), abs=1e-12)
    assert comparison.p_below(bar) == pytest.approx(1 - float(test.pvalue), abs=1e-12)
    ends = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert comparison.interval(0.05) == pytest.approx((ends.low, ends.high))
    assert comparison.dof == pytest.approx(len(values) - 1)


@given(several, several, st.sampled_from([0.01, 0.05, 0.3]))
def test_a_difference_matches_welchs_t(first: list[float], second: list[float], level: float) -> None:
    has_spread(first, second)
    comparison = difference(first, second, NONE)
    test: Any = stats.ttest_ind(first, second, equal_var=False, alternative="greater")
    assert comparison.p_above(0) == pytest.approx(float(test.pvalue), abs=1e-12)
    assert comparison.p_below(0) == pytest.approx(1 - float(test.pvalue), abs=1e-12)
    assert comparison.dof == pytest.approx(float(test.df))
    ends = stats.ttest_ind(first, second, equal_var=False).confidence_interval(1 - level)
    assert comparison.interval(level) == pytest.approx((ends.low, ends.high))


@given(several, several, value)
def test_weights_scale_the_values(first: list[float], second: list[float], bar: float) -> None:
    weighed = contrast((1, first), (-0.5, second), grain=NONE)
    scaled = difference(first, [each / 2 for each in second], NONE)
    assert weighed.value == pytest.approx(scaled.value)
    has_spread(first, second)
    assert weighed.p_above(bar) == pytest.approx(scaled.p_above(bar))
    assert weighed.dof == pytest.approx(scaled.dof)


def test_the_spread_is_at_least_the_resolution() -> None:
    """Five models with one figure have a spread of the grain, not none."""
    alike = mean_contrast([0.9] * 5)
    assert alike.error == pytest.approx(GRAIN / math.sqrt(5))
    assert alike.error == mean_contrast([0.9, 0.9, 0.9, 0.9, 0.9001]).error, "that agree more closely too"
    assert mean_contrast([0.8, 0.85, 0.9, 0.95, 1.0]).error == pytest.approx(
        np.std([0, 1, 2, 3, 4], ddof=1) / 20 / 5**0.5
    )
    assert difference([0.9] * 5, [0.5] * 4).error == pytest.approx(GRAIN * math.sqrt(1 / 5 + 1 / 4))


@given(several, value, st.sampled_from([0.05, 0.2]))
def test_the_seeds_needed_decide_and_one_less_does_not(values: list[float], bar: float, level: float) -> None:
    """Against the interval of so many models with the same mean and spread, written out."""
    seen = mean_contrast(values, 0.01)
    spread = max(float(np.std(values, ddof=1)), 0.01)

    def decides(count: int) -> bool:
        half = float(stats.t.ppf(1 - level / 2, count - 1)) * spread / math.sqrt(count)
        return half < abs(float(np.mean(values)) - bar)

    more = range(len(values) + 1, MAX_FACTOR * len(values) + 1)
    assert seen.seeds_to_decide(bar, level) == next((count for count in more if decides(count)), None)
