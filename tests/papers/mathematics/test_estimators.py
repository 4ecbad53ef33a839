"""What C.4 says of taking position out: the numbers on planted models, and verdicts that follow their records."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toeplens.ground import read_json
from toeplens.lens import position_subspace
from toeplens.papers.mathematics.c4.estimators import CLAIMS, diagonal_means, estimators, linear_error
from toeplens.studies.kit.verdicts import combine

MEASURED = {
    "c4-not-orthogonal": "holds",
    "c4-no-subspace": "fails",
    "c4-no-subspace-corrected": "holds",
    "c4-levinson": "holds",
    "c4-levinson-corrected": "holds",
    "c4-not-unique": "holds in part",
    "c4-not-unique-corrected": "holds",
}


RECORD = Path(__file__).parents[3] / "results" / "theory" / "results.json"


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """Of the first recorded seed."""
    return read_json(RECORD)["records"]["estimators"][0]


def verdicts(*runs: dict[str, Any]) -> dict[str, str]:
    return {claim.id: combine(claim.check({"estimators": runs})) for claim in CLAIMS}


@pytest.mark.heavy
def test_the_verdicts() -> None:
    found = estimators(0)
    assert verdicts(found) == MEASURED
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_numbers_are_those_of_the_theory(record: dict[str, Any]) -> None:
    for row in record["spans"]:
        assert row["separable"] == (row["rank"] + row["word_rank"] <= row["width"])  # nothing is aligned by design
        assert row["word_rank"] == min(row["vocabulary"] - 1, row["width"])
        if row["vocabulary"] == 574:
            assert row["overlap"] == pytest.approx(row["chance"], rel=0.05)
    for kind in ("own", "shared"):
        errors = record["levinson"][kind]["predictor"]
        assert errors == sorted(errors)


def test_the_papers_own_sizes_cannot_be_separated(record: dict[str, Any]) -> None:
    """574 words in 256 dimensions: full rank, whatever the encoding."""
    rows = [row for row in record["spans"] if row["vocabulary"] == 574 and row["width"] == 256]
    assert len(rows) == 3
    assert all(row["word_rank"] == 256 and row["linear_error"] > 0.3 and row["lookup"] == 1 for row in rows)


@given(seed=st.integers(0, 99), count=st.integers(2, 5), words=st.integers(2, 7))
def test_the_best_linear_map_is_that_of_all_pairs(seed: int, count: int, words: int) -> None:
    """Ordinary least squares on every sum w_v + p_i; no error just where the spans share 0 alone."""
    rng = np.random.Generator(np.random.Philox(seed))
    p, w = rng.normal(size=(count, 6)), rng.normal(size=(words, 6))
    centred, others = p - p.mean(0), w - w.mean(0)
    design = np.array([c + o for c in centred for o in others])
    wanted = np.array([c for c in centred for _ in others])
    rest = design @ np.linalg.pinv(design, rcond=1e-12) @ wanted - wanted
    found = linear_error(p, w)
    np.testing.assert_allclose(found, np.linalg.norm(rest) / np.linalg.norm(wanted), atol=1e-9)
    assert (found < 1e-9) == position_subspace(p, w, energy=1).separable


def test_diagonal_means_are_those_of_loops() -> None:
    logits = np.random.Generator(np.random.Philox(0)).normal(size=(7, 7))
    wanted = [sum(logits[i, i - d] for i in range(d, 7)) / (7 - d) for d in range(7)]
    np.testing.assert_allclose(diagonal_means(logits), wanted, atol=1e-14)


def everywhere(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(run: dict[str, Any]) -> None:
        for row in run["spans"]:
            row[field] = value

    return change


def within(value: Any, *path: Any) -> Callable[[dict[str, Any]], None]:
    def change(run: dict[str, Any]) -> None:
        for key in path[:-1]:
            run = run[key]
        run[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("doctor", "changed"),
    [
        (within(0.0, "spans", 0, "overlap"), {"c4-not-orthogonal": "fails"}),
        (everywhere("overlap", 1e-6), {"c4-not-orthogonal": "fails"}),
        (everywhere("least_angle", 90.0), {"c4-no-subspace": "undecided"}),
        (everywhere("oblique_error", 0.5), {"c4-no-subspace": "holds"}),
        (everywhere("oblique_error", None), {"c4-no-subspace": "holds"}),
        (everywhere("linear_error", 0.5), {"c4-no-subspace-corrected": "fails"}),
        (everywhere("separable", False), {"c4-no-subspace-corrected": "fails"}),
        (within(0.98, "spans", 3, "lookup"), {"c4-no-subspace-corrected": "fails"}),
        (within(0.01, "levinson", "own", "predictor", 0), {"c4-levinson": "fails"}),
        (within(None, "levinson", "shared", "frequencies", 0), {"c4-levinson": "fails"}),
        (within(math.nan, "levinson", "recovered", 2), {"c4-levinson": "fails"}),
        (within(0.2, "levinson", "own", "predictor", 2), {"c4-levinson-corrected": "fails"}),
        (within(0.01, "levinson", "shared", "predictor", 2), {"c4-levinson-corrected": "fails"}),
        (within(0.9, "definite"), {"c4-levinson-corrected": "fails"}),
        (within(0.2, "pair", "single_gap"), {"c4-not-unique": "fails", "c4-not-unique-corrected": "fails"}),
        (within(0.2, "pair", "means_gap"), {"c4-not-unique-corrected": "fails"}),
        (within(0.9, "pair", "content", "stay"), {"c4-not-unique-corrected": "fails"}),
        (within(0.9, "pair", "content", "position_share"), {"c4-not-unique-corrected": "fails"}),
    ],
)
def test_other_numbers_give_other_verdicts(
    record: dict[str, Any], doctor: Callable[[dict[str, Any]], None], changed: dict[str, str]
) -> None:
    doctored = copy.deepcopy(record)
    doctor(doctored)
    assert verdicts(doctored) == MEASURED | changed


def test_what_cannot_be_told_apart_makes_the_papers_statement_hold(record: dict[str, Any]) -> None:
    doctored = copy.deepcopy(record)
    doctored["pair"]["content"] = doctored["pair"]["positional"]
    assert verdicts(doctored)["c4-not-unique"] == "holds"
    doctored["pair"].update(single_gap=1.0, means_gap=1.0, extraction_gap=0.0)
    doctored["pair"]["content"] = record["pair"]["content"]
    assert verdicts(doctored)["c4-not-unique"] == "fails"
