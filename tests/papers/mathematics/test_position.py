"""Appendix C.4: the numbers on planted models and drawn tables, and verdicts that follow their records."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toeplens.lens import position_subspace
from toeplens.papers.mathematics import CLAIMS
from toeplens.papers.mathematics.levinson import linear_predictor, prony_frequencies
from toeplens.papers.mathematics.position import (
    ENCODINGS,
    diagonal_means,
    estimators,
    linear_error,
    manifold,
    measure_curve,
)
from toeplens.studies.kit.claims import findings_of
from toeplens.studies.kit.verdicts import combine
from toeplens.utils import InputError, read_json

VERDICTS = {
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
    return {
        claim.id: combine(findings_of(claim.check, {"estimators": runs})) for claim in CLAIMS if claim.id in VERDICTS
    }


@pytest.mark.heavy
def test_verdicts_match_the_record() -> None:
    actual = estimators.run(0)
    assert verdicts(actual) == VERDICTS
    assert json.loads(json.dumps(actual, allow_nan=False)) == actual


def test_diagonal_means_match_loops() -> None:
    logits = np.random.Generator(np.random.Philox(0)).normal(size=(7, 7))
    expected = [sum(logits[i, i - d] for i in range(d, 7)) / (7 - d) for d in range(7)]
    np.testing.assert_allclose(diagonal_means(logits), expected, atol=1e-14)


def set_value(content: Any, value: Any, key: Any, *path: str) -> None:
    """Set the number at a path of a record; * is every row."""
    key = int(key) if key.isdigit() else key
    if not path:
        content[key] = value
    for inner in (content if key == "*" else [content[key]]) if path else ():
        set_value(inner, value, *path)


@pytest.mark.parametrize(
    ("path", "value", "changed"),
    [
        ("spans.*.overlap", 1e-6, {"c4-not-orthogonal": "fails"}),
        ("spans.*.least_angle", 90.0, {"c4-no-subspace": "undecided"}),
        ("spans.*.oblique_error", None, {"c4-no-subspace": "holds"}),
        ("spans.*.linear_error", 0.5, {"c4-no-subspace-corrected": "fails"}),
        ("spans.3.lookup", 0.98, {"c4-no-subspace-corrected": "fails"}),
        ("levinson.shared.frequencies.0", None, {"c4-levinson": "fails"}),
        ("levinson.recovered.2", math.nan, {"c4-levinson": "fails"}),
        ("levinson.shared.predictor.2", 0.01, {"c4-levinson-corrected": "fails"}),
        ("definite", 0.9, {"c4-levinson-corrected": "fails"}),
        ("pair.single_gap", 0.2, {"c4-not-unique": "fails", "c4-not-unique-corrected": "fails"}),
        ("pair.means_gap", 0.2, {"c4-not-unique-corrected": "fails"}),
        ("pair.content.position_share", 0.9, {"c4-not-unique-corrected": "fails"}),
    ],
)
def test_changed_values_change_the_verdicts(
    record: dict[str, Any], path: str, value: Any, changed: dict[str, str]
) -> None:
    doctored = copy.deepcopy(record)
    set_value(doctored, value, *path.split("."))
    assert verdicts(doctored) == VERDICTS | changed


# ---- the curve ------------------------------------------------------------------------------------------------------

WIDTHS, LENGTHS = (16, 64), (24, 128)


@pytest.fixture(scope="module")
def random_tables() -> dict[str, Any]:
    """Of smaller tables than the record's."""
    return manifold.run(0, widths=WIDTHS, lengths=LENGTHS)


def models(trained: float, untrained: float = 1.25, local: float = 3.0) -> list[dict[str, Any]]:
    """The heads' records of five seeds that differ a little."""

    def state(error: float) -> dict[str, Any]:
        return {"curve": {"neighbour_error": error, "local_rank": local, "rank": 18}}

    nudges = np.linspace(-0.01, 0.01, 5)
    return [{"learned trained": state(trained + d), "learned untrained": state(untrained - d)} for d in nudges]


def judged(tables: dict[str, Any] | None, heads: list[dict[str, Any]]) -> list[str]:
    records = {"manifold": [] if tables is None else [tables], "heads": heads}
    return [combine(findings_of(claim.check, records)) for claim in CLAIMS if claim.id.startswith("c4-manifold")]


def with_random_table(record: dict[str, Any], encoding: str, **numbers: float) -> dict[str, Any]:
    return {"tables": [row | numbers if row["encoding"] == encoding else row for row in record["tables"]]}


def test_every_table_counts(random_tables: dict[str, Any]) -> None:
    rows = random_tables["tables"]
    assert len(rows) == len(ENCODINGS) * len(WIDTHS) * len(LENGTHS)
    assert manifold.run(1, widths=WIDTHS, lengths=LENGTHS) != random_tables
    for row in rows:
        assert row["local_rank"] <= min(7, row["rank"])
        is_curve = row["encoding"] == "sinusoidal"
        assert (row["neighbour_error"] < 0.5) == (row["local_rank"] <= 3.5) == is_curve


def test_a_line_is_recognized_by_its_neighbours() -> None:
    actual = measure_curve(np.arange(20.0)[:, None] * np.array([1.0, -2.0, 0.5]))
    assert actual == {"neighbour_error": pytest.approx(0, abs=1e-14), "local_rank": 1.0, "rank": 1}


def test_verdicts_follow_what_was_learned(random_tables: dict[str, Any]) -> None:
    """Random vectors are no curve, which a supporting part says: so it holds in part at best."""
    assert judged(random_tables, models(0.3)) == ["holds in part", "holds"]
    assert judged(random_tables, models(0.7)) == ["fails", "holds"]
    assert judged(random_tables, models(1.1)) == ["fails", "fails"]
    assert judged(random_tables, models(0.3, untrained=0.2)) == ["holds in part", "fails"]
    assert judged(random_tables, []) == judged(None, []) == ["undecided", "undecided"]


def test_verdicts_follow_the_tables(random_tables: dict[str, Any]) -> None:
    curves = with_random_table(random_tables, "random-fixed", neighbour_error=0.3)
    assert judged(curves, models(0.3)) == ["holds", "fails"]
    assert judged(with_random_table(random_tables, "sinusoidal", neighbour_error=0.6), models(0.3)) == [
        "fails",
        "fails",
    ]
    assert judged(with_random_table(random_tables, "sinusoidal", local_rank=4.0), models(0.3)) == ["fails", "fails"]


@given(seed=st.integers(0, 99), count=st.integers(2, 5), words=st.integers(2, 7))
def test_the_best_linear_map_matches_least_squares_on_all_pairs(seed: int, count: int, words: int) -> None:
    """Ordinary least squares on every sum w_v + p_i; no error just where the spans share 0 alone."""
    rng = np.random.Generator(np.random.Philox(seed))
    p, w = rng.normal(size=(count, 6)), rng.normal(size=(words, 6))
    centred, others = p - p.mean(0), w - w.mean(0)
    design = np.array([c + o for c in centred for o in others])
    expected = np.array([c for c in centred for _ in others])
    rest = design @ np.linalg.pinv(design, rcond=1e-12) @ expected - expected
    actual = linear_error(p, w)
    np.testing.assert_allclose(actual, np.linalg.norm(rest) / np.linalg.norm(expected), atol=1e-9)
    assert (actual < 1e-9) == position_subspace(p, w, energy=1).separable


# ---- Levinson-Durbin: what it gives back of planted processes and sinusoids, and where it stops ----------------------

THETA = np.array([0.3, 1.1, 2.0, 2.9])
WEIGHTS = np.array([1.0, 0.5, 2.0, 0.7])


def cosines(theta: np.ndarray, weights: np.ndarray, length: int) -> np.ndarray:
    return np.array(
        [sum(w * np.cos(delta * t) for t, w in zip(theta, weights, strict=True)) for delta in range(length)]
    )


def autoregressive_process(poles: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients c of p_i = sum c_k p_(i-k) + e_i, |e| = 1, with these poles, and its autocorrelation.

    From the impulse response h, run long enough to end below rounding: r_delta = sum over i of h_i h_(i+delta).
    """
    coefficients = -np.real(np.poly(poles))[1:]
    response = [1.0]
    while len(response) < 4000:
        past = response[: -len(coefficients) - 1 : -1]
        response.append(sum(c * p for c, p in zip(coefficients, past, strict=False)))
    h = np.array(response)
    return coefficients, np.array([h[: len(h) - delta] @ h[delta:] for delta in range(length)])


@given(seed=st.integers(0, 999), real=st.integers(0, 2), pairs=st.integers(0, 2))
def test_a_planted_process_is_recovered(seed: int, real: int, pairs: int) -> None:
    """Exact autocorrelation, float64: coefficients and error variance to 1e-10."""
    rng = np.random.default_rng(seed)
    turning = rng.uniform(0.2, 0.8, pairs) * np.exp(1j * rng.uniform(0.3, 2.8, pairs))
    poles = np.concatenate((rng.uniform(-0.8, 0.8, real), turning, turning.conj()))
    if not len(poles):
        return
    coefficients, r = autoregressive_process(poles, len(poles) + 3)
    actual = linear_predictor(r, len(poles))
    np.testing.assert_allclose(actual.coefficients, coefficients, atol=1e-10)
    assert actual.variance == pytest.approx(1, abs=1e-10)
    longer = linear_predictor(r, len(poles) + 2)
    np.testing.assert_allclose(longer.coefficients, np.concatenate((coefficients, [0, 0])), atol=1e-10)


def test_the_predictor_is_optimal() -> None:
    """Its normal equations, dense; any other predictor misses more."""
    rng = np.random.default_rng(0)
    r = autoregressive_process(np.array([0.9, -0.5, 0.3]), 3)[1]
    matrix = np.array([[r[abs(i - j)] for j in range(2)] for i in range(2)])
    actual = linear_predictor(r, 2)
    np.testing.assert_allclose(actual.coefficients, np.linalg.solve(matrix, r[1:]), atol=1e-12)
    for _ in range(20):
        other = actual.coefficients + rng.normal(size=2)
        assert r[0] - 2 * other @ r[1:] + other @ matrix @ other > actual.variance


@pytest.mark.parametrize("count", [1, 2, 4])
def test_planted_frequencies_are_recovered(count: int) -> None:
    """Exact values, well separated: to 1e-6, with either sign of weight and whatever else is given."""
    for sign in (1, -1):
        r = cosines(THETA[:count], sign * WEIGHTS[:count], 2 * count + 5)
        np.testing.assert_allclose(prony_frequencies(r, count), THETA[:count], atol=1e-6)
        assert linear_predictor(r, 2 * count).variance == pytest.approx(0, abs=1e-10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: linear_predictor(r, 9), "order: a predictor of lower order than 9 is already exact"),
        (lambda r: prony_frequencies(r, 5), "count: the values have fewer than 5 sinusoids"),
    ],
)
def test_unrecoverable_input_is_refused(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(cosines(THETA, WEIGHTS, 12))
