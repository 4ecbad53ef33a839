"""The claims about language models on the recorded models, with measures left out or changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from toeplens.papers.language.claims import CLAIMS
from toeplens.studies import LedgerEntry, Results, grid, judge_all
from toeplens.studies.grid import language
from toeplens.studies.grid.study import ClaimData

RECORD = Path(__file__).parents[3] / "results" / "language"
# of each claim, the measures without which nothing can be said
NEEDED = {
    "language-needs-position": ["bits"],
    "rope-over-absolute": ["bits"],
    "alibi-extrapolates": ["bits"],
    "rope-fails-beyond": ["bits"],
    "nope-extrapolates": ["bits"],
    "long-context-helps": ["bits"],
    "interpolation-helps": ["extension", "extension-tuned"],
    "previous-heads-positional": ["patterns", "behaviour"],
    "induction-heads-symbolic": ["patterns", "behaviour"],
    "positional-by-frequency": ["behaviour", "frequency"],
    "language-deposit": ["position-loss"],
    "needles-end-at-the-training-length": ["needles"],
}
Change = Callable[[dict[str, Any]], Any]


@cache
def record() -> grid.GridStudy:
    return grid.GridStudy.gather(RECORD)


def judged(measure: str, change: Change | None) -> dict[str, LedgerEntry]:
    """The ledger with one measure of all models changed in place, or left out."""
    cells = []
    for cell in record().results.cells:
        measures = {
            name: copy.deepcopy(content) for name, content in cell.measures.items() if name != measure or change
        }
        if change and measure in measures and "reason" not in measures[measure]:
            change(measures[measure])
        cells.append(replace(cell, measures=measures))
    return {entry.claim.id: entry for entry in judge_all(CLAIMS, ClaimData(record().spec, Results(cells), []))}


@pytest.mark.parametrize("measure", sorted({measure for needed in NEEDED.values() for measure in needed}))
def test_missing_measures_leave_only_their_claims_undecided(measure: str) -> None:
    actual, whole = judged(measure, None), {entry.claim.id: entry for entry in record().entries}
    assert actual.keys() == NEEDED.keys()
    for name, entry in actual.items():
        if measure in NEEDED[name]:
            assert entry.verdict == "undecided"
            assert entry.missing
        else:
            assert entry.findings[0] == whole[name].findings[0]


@pytest.mark.parametrize(
    ("measure", "method", "parts"),
    [
        ("extension", "ntk", {0, 2}),
        ("extension-tuned", "interpolation", {1, 3}),
        ("extension", "yarn", {4}),
    ],
)
def test_an_extension_is_compared_with_none_and_with_the_training_length(
    measure: str, method: str, parts: set[int]
) -> None:
    for shift, verdict in ((-9.0, "leans to hold"), (9.0, "leans to fail")):

        def change(content: dict[str, Any], shift: float = shift) -> None:
            for row in content["rows"]:
                if (row["method"], row["factor"]) == (method, language.LONG_FACTOR):
                    row["bits"]["value"] += shift

        actual = judged(measure, change)["interpolation-helps"].findings
        same = record().entries[[claim.id for claim in CLAIMS].index("interpolation-helps")].findings
        assert {place for place, pair in enumerate(zip(actual, same, strict=True)) if pair[0] != pair[1]} == parts
        assert {actual[place].verdict for place in parts} == {verdict}


def needles(near: float, far: float) -> LedgerEntry:
    def change(content: dict[str, Any]) -> None:
        for row in content["rows"]:
            if row["factor"] in (1.0, language.LONG_FACTOR):
                row["accuracy"]["value"] = near if row["factor"] == 1.0 else far

    return judged("needles", change)["needles-end-at-the-training-length"]


def test_needle_claims_use_models_that_find_them_at_training_length() -> None:
    """Models that find none lose none, which says nothing."""
    assert [part.verdict for part in needles(0.9, 0.1).findings] == ["leans to hold", "leans to hold"]
    assert [part.verdict for part in needles(0.9, 0.5).findings] == ["leans to hold", "leans to fail"]
    assert [part.verdict for part in needles(0.25, 0.1).findings] == ["leans to fail", "leans to hold"]
    entry = needles(0.15, 0.1)
    assert (entry.verdict, entry.missing) == ("undecided", ["longer training"])
    assert entry.evidence[0].endswith("the models find less than 20% at the training length")


def test_heads_with_negligible_attention_have_no_kind() -> None:
    def change(content: dict[str, Any]) -> None:
        for kind in ("previous", "induction"):
            content[kind] = [[0.1 * weight for weight in row] for row in content[kind]]

    actual = judged("patterns", change)
    for name in ("previous-heads-positional", "induction-heads-symbolic"):
        assert not any(part.has_data for part in actual[name].findings)
