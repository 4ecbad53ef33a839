"""What the logit forms can express: exact tests agree with linear programs, searches with both, verdicts with data."""

from __future__ import annotations

import copy
from typing import Any, Literal

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from toeplens.papers.mathematics import CLAIMS
from toeplens.papers.mathematics.expressiveness import (
    additive_form,
    additive_signs,
    best_margins,
    expressiveness,
    is_additive_possible,
    is_rotary_possible,
    is_separable,
    logit_table,
    one_angle_form,
    random_signs,
    rotary_form,
    wanted_signs,
)
from toeplens.studies.kit.claims import findings_of
from toeplens.studies.kit.verdicts import Verdict, combine

KINDS: tuple[Literal["offset", "sum", "decay"], ...] = ("offset", "sum", "decay")


def philox(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


EXCLUSIVE_OR = np.array([[[1, -1], [-1, 1]], [[0, 0], [0, 0]]])  # of key content and offset

# ---- exact tests ----------------------------------------------------------------------------------------------------


def additive_by_linear_program(signs: np.ndarray) -> bool:
    """Is there a table C and a beta with Y (C + beta) >= 1? One linear constraint a sign, written out."""
    pairs, offsets = signs.shape[0] ** 2, signs.shape[2]
    rows = []
    for (a, b, offset), sign in np.ndenumerate(signs):
        if sign:
            row = np.zeros(pairs + offsets)
            row[a * signs.shape[0] + b] = row[pairs + offset] = -sign
            rows.append(row)
    return linprog(np.zeros(pairs + offsets), A_ub=rows, b_ub=-np.ones(len(rows)), bounds=(None, None)).status == 0


@given(seed=st.integers(0, 999), vocabulary=st.integers(2, 4), offsets=st.integers(2, 5), share=st.floats(0.2, 0.8))
def test_the_acyclic_order_test_matches_a_linear_program(
    seed: int, vocabulary: int, offsets: int, share: float
) -> None:
    places = max(1, int(share * vocabulary**2 * offsets))
    for signs in random_signs(philox(seed), 4, places, vocabulary=vocabulary, offsets=offsets):
        assert is_additive_possible(signs) == additive_by_linear_program(signs)
    assert not is_additive_possible(EXCLUSIVE_OR)


@given(seed=st.integers(0, 999), count=st.integers(2, 30), size=st.integers(1, 6))
def test_separable_rows_have_a_normal_and_others_a_certificate(seed: int, count: int, size: int) -> None:
    """Gordan: either rows @ w > 0, or some weights >= 0 that sum to 1 have weights @ rows = 0; float64, to 1e-9."""
    rng = philox(seed)
    rows = rng.normal(size=(count, size)) + rng.normal(size=size)
    sums = np.concatenate((rows.T, np.ones((1, count))))
    certificate = linprog(np.zeros(count), A_eq=sums, b_eq=np.append(np.zeros(size), 1.0))
    assert is_separable(rows) == (certificate.status == 2)
    if certificate.status == 0:
        np.testing.assert_allclose(sums @ certificate.x, np.append(np.zeros(size), 1.0), atol=1e-9)
    planted = rows * np.sign(rows @ rng.normal(size=size))[:, None]
    assert is_separable(planted)
    assert not is_separable(np.concatenate((planted, -planted[:1])))


def test_one_pair_cannot_alternate_over_many_offsets() -> None:
    """cos(delta - phi) + c has at most 2 zeros in 2 pi: at most 6 in 15 steps, where the signs change 15 times."""
    signs = np.broadcast_to((-1) ** np.arange(16), (2, 2, 16)).copy()
    assert is_additive_possible(signs)
    assert not is_rotary_possible(rotary_form(2), signs)
    assert not is_rotary_possible(rotary_form(4), signs)
    assert is_rotary_possible(rotary_form(16), signs)  # 16 waves at 16 offsets
    assert is_rotary_possible(rotary_form(12), signs)  # 12 waves that double precision cannot tell apart: not excluded
    assert is_rotary_possible(rotary_form(2), signs[..., :3])


def test_proofs_do_not_depend_on_wave_precision() -> None:
    """The span of RoPE's 8 waves at 16 offsets, made orthonormal in 50 digits, excludes the same instances."""
    with mpmath.workdps(50):
        angles = [[d * mpmath.mpf(10) ** -t for t in range(4)] for d in range(16)]
        waves = mpmath.matrix([[f(x) for f in (mpmath.cos, mpmath.sin) for x in row] for row in angles])
        exact = np.array(mpmath.qr(waves, mode="skinny")[0].tolist(), dtype=float)
    beta = additive_signs(philox(0), 40, "offset", vocabulary=1, offsets=16)
    actual = [is_rotary_possible(rotary_form(8), signs) for signs in beta]
    with_threshold = np.concatenate((exact, np.ones((16, 1))), axis=1)
    assert actual == [is_separable(with_threshold * signs[0, 0][:, None]) for signs in beta]
    assert 5 < sum(actual) < 35


def random_tables(seed: int, width: int, *, vocabulary: int, offsets: int) -> np.ndarray:
    """The signs of RoPE logits of random vectors, in loops; 0 where they are near 0."""
    rng = philox(seed)
    u, v = rng.normal(size=(2, vocabulary, width // 2)) + 1j * rng.normal(size=(2, vocabulary, width // 2))
    signs = np.zeros((vocabulary, vocabulary, offsets), dtype=int)
    for a, b, offset in np.ndindex(signs.shape):
        turns = (np.exp(1j * offset * 10000 ** (-2 * t / width)) for t in range(width // 2))
        logit = sum((x * y.conjugate() * e).real for x, y, e in zip(u[a], v[b], turns, strict=True))
        signs[a, b, offset] = np.sign(logit) * (abs(logit) > 0.3)
    return signs


@given(seed=st.integers(0, 999), width=st.sampled_from([2, 4, 8]))
def test_signs_of_rope_logits_are_not_excluded(seed: int, width: int) -> None:
    assert is_rotary_possible(rotary_form(width), random_tables(seed, width, vocabulary=3, offsets=12))


# ---- the search -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [additive_form(6), rotary_form(6), one_angle_form(6), rotary_form(2)])
def test_logits_are_the_sum_over_pairs(form) -> None:
    n, offsets = len(form.frequencies), 5
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn(2, 3, 4, form.width, generator=generator, dtype=torch.float64)
    actual = logit_table(form, u, v, offsets)
    assert actual.shape == (3, 4, 4, offsets)
    for i, a, b, offset in np.ndindex(3, 4, 4, offsets):
        logit = sum(
            complex(u[i, a, t], u[i, a, n + t])
            * complex(v[i, b, t], -v[i, b, n + t])
            * np.exp(1j * offset * form.frequencies[t])
            for t in range(n)
        )
        assert float(actual[i, a, b, offset]) == pytest.approx(complex(logit).real, abs=1e-12)


def test_the_search_agrees_with_the_exact_test_at_full_width() -> None:
    sizes = (6, 12, 18, 27)
    signs = np.concatenate([random_signs(philox(0), 8, size, vocabulary=3, offsets=3) for size in sizes])
    possible = np.array([is_additive_possible(instance) for instance in signs])
    assert 5 < possible.sum() < 27
    actual = best_margins(additive_form(4), signs, restarts=2, steps=200, seed=0)
    np.testing.assert_array_equal(actual > 0, possible)
    assert ((actual >= 0) & (actual <= 1)).all()


def test_the_search_finds_planted_rope_logits() -> None:
    signs = np.stack([random_tables(seed, 8, vocabulary=4, offsets=6) for seed in range(8)])
    assert not any(is_additive_possible(instance) for instance in signs)
    assert (best_margins(rotary_form(8), signs, restarts=2, steps=200, seed=0) > 0).mean() >= 0.75
    assert not (best_margins(additive_form(8), signs, restarts=1, steps=50, seed=0) > 0).any()


def test_exclusive_or_needs_a_rotation() -> None:
    signs = EXCLUSIVE_OR[None]
    assert not (best_margins(additive_form(8), signs, restarts=4, steps=100, seed=0) > 0)[0]
    assert (best_margins(rotary_form(2), signs, restarts=4, steps=100, seed=0) > 0)[0]


# ---- the instances --------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 999), pairs=st.integers(1, 6))
def test_target_pairs_have_one_offset_each(seed: int, pairs: int) -> None:
    for signs in wanted_signs(philox(seed), 3, pairs, vocabulary=3, offsets=4):
        expected = (signs == 1).sum(-1)
        assert sorted(expected.ravel())[-pairs:] == [1] * pairs
        assert expected.sum() == pairs
        assert (signs != 0).all()
        different = len(np.unique(np.argwhere(signs == 1)[:, 2])) > 1
        assert is_additive_possible(signs) == (not different)


@given(seed=st.integers(0, 999), kind=st.sampled_from(KINDS))
def test_additive_signs_come_from_an_additive_form(seed: int, kind: Literal["offset", "sum", "decay"]) -> None:
    for signs in additive_signs(philox(seed), 3, kind, vocabulary=3, offsets=9):
        assert is_additive_possible(signs)
        if kind == "offset":
            assert (signs == signs[0, 0]).all()
        if kind == "decay":
            assert (np.diff(signs, axis=-1) <= 0).all()


# ---- the experiment and its claims ----------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"instances": 2, "widths": (2, 4), "restarts": 1, "steps": 40}


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return expressiveness.run(3, **SMALL)


def test_recorded_findings_are_possible(record: dict[str, Any]) -> None:
    assert {(row["family"], row["width"]) for row in record["rows"]} == {
        (family, width) for family in ("random", "wanted", *KINDS) for width in (2, 4)
    }
    for row in record["rows"]:
        means = {name: triple[0] for name, triple in row["means"].items()}
        assert means["additive"] <= means["bound"]
        assert means["rotary"] <= means["possible"]
        assert means["gain"] == means["rotary"] - means["bound"]
        assert row["additive_met"] == 2 * means["additive"]
        assert row["impossible"] + row["open"] <= row["additive_met"]
        assert all(low <= value <= high for value, low, high in row["means"].values())
        if row["family"] in KINDS:
            assert means["bound"] == 1
        if (row["family"], row["size"]) == ("wanted", 1):
            assert means["bound"] == 1


def test_with_given_vectors_a_rotation_changes_nothing(record: dict[str, Any]) -> None:
    fixed = [row for row in record["stated"] if row["test"] == "fixed"]
    assert [row["relative"] for row in fixed] == [row["rotary"] for row in fixed]
    for row in record["stated"]:
        if row["test"] == "draws":  # one of size + 1 alike logits is the greatest; 5 standard errors
            error = 5 * np.sqrt(0.25 / 20000)
            assert abs(row["relative"] - 1 / (row["size"] + 1)) < error
            assert abs(row["rotary"] - 1 / (row["size"] + 1)) < error


def with_values(record: dict[str, Any], numbers: dict[str, float]) -> dict[str, Any]:
    """The record with these means, counts and shares in every row."""
    changed = copy.deepcopy(record)
    for row in changed["rows"]:
        row["means"] |= {name: [value] * 3 for name, value in numbers.items() if name in row["means"]}
        row |= {name: value for name, value in numbers.items() if name in row}
    for row in changed["stated"]:
        row |= {name: value for name, value in numbers.items() if name in row}
    return changed


def verdict(name: str, record: dict[str, Any]) -> Verdict:
    (claim,) = (claim for claim in CLAIMS if claim.id == f"expressiveness-{name}")
    return combine(findings_of(claim.check, {"expressiveness": [record] * 5}))


@pytest.mark.parametrize(
    ("name", "numbers", "expected"),
    [
        ("as-stated", {"relative": 0.6, "rotary": 0.9}, "holds"),
        ("as-stated", {"relative": 0.6, "rotary": 0.2}, "fails"),
        ("task", {"gain": 0.3}, "holds"),
        ("task", {"gain": -0.1}, "fails"),
        ("superset", {"additive_met": 2, "impossible": 1, "open": 1}, "fails"),
        ("superset", {"additive_met": 2, "impossible": 0, "open": 1}, "undecided"),
        ("superset", {"additive_met": 2, "impossible": 0, "open": 0}, "holds"),
        ("one-angle", {"bound": 0.5, "one_angle": 0.9, "rotary": 0.95}, "holds"),
        ("one-angle", {"bound": 0.5, "one_angle": 0.6, "rotary": 0.95}, "fails"),
    ],
)
def test_verdicts_follow_the_numbers(
    record: dict[str, Any], name: str, numbers: dict[str, float], expected: Verdict
) -> None:
    assert verdict(name, with_values(record, numbers)) == expected
