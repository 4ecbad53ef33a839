"""The experiments that are tallied: plain records, the same each time, and verdicts that follow the tallies."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import pytest

from toeplens.ground import InputError
from toeplens.papers.mathematics import contraction, filling, latent, normalising, phases, related
from toeplens.papers.mathematics.records import tally
from toeplens.studies import combine

EXPERIMENTS: dict[str, Any] = {
    "normalising": normalising,
    "filling": filling,
    "latent": latent,
    "contraction": contraction,
    "phases": phases,
    "related": related,
}
EXPECTED = {
    "normalising": "fails",
    "normalising-corrected": "holds",
    "szego": "holds",
    "mla-logits": "fails",
    "mla-logits-ones": "fails",
    "mla-logits-corrected": "holds",
    "contraction": "fails",
    "contraction-modulus": "holds in part",
    "contraction-condition": "fails",
    "contraction-same": "holds",
    "contraction-free": "holds",
    "contraction-schur": "holds",
    "contraction-corrected": "holds",
    "contraction-strict": "holds",
    "contraction-condition-corrected": "holds",
    "contraction-against-additive": "fails",
    "lemma-b1-bound": "holds",
    "lemma-b1-equality": "fails",
    "lemma-b1-equality-corrected": "holds",
    "lemma-b1-proof": "fails",
    "lemma-b1-range": "fails",
    "lemma-b1-range-corrected": "holds",
    "lemma-b1-szego": "fails",
    "rollpe-is-rope": "holds in part",
    "relative-bias-limits": "holds",
    "urpe-can": "holds",
}
CASES = [(name, claim) for name, module in EXPERIMENTS.items() for claim in module.CLAIMS]


def made(name: str) -> dict[str, Any]:
    return getattr(EXPERIMENTS[name], name)(0, tries=20)


recorded = cache(made)
every_experiment = pytest.mark.parametrize("name", EXPERIMENTS)


@every_experiment
@pytest.mark.heavy
def test_the_record_is_repeatable(name: str) -> None:
    assert recorded(name) == made(name)


@every_experiment
def test_the_record_is_plain(name: str) -> None:
    assert json.loads(json.dumps(recorded(name), allow_nan=False)) == recorded(name)
    assert recorded(name)["tallies"].keys() == EXPERIMENTS[name].TALLIES.keys()
    with pytest.raises(InputError, match="tries must be at least 20, got 19"):
        getattr(EXPERIMENTS[name], name)(0, tries=19)


def test_verdicts_are_as_the_mathematics_says() -> None:
    assert {claim.id: combine(claim.check({name: [recorded(name)]})) for name, claim in CASES} == EXPECTED
    undecided = {claim.id: combine(claim.check({name: []})) for name, claim in CASES}
    assert undecided == dict.fromkeys(EXPECTED, "undecided")
    assert all(claim.source and claim.statement and claim.rule for _, claim in CASES)


@every_experiment
def test_every_verdict_follows_its_record(name: str) -> None:
    """With every tally turned round, what held fails and what failed holds, part by part; one bad seed is enough."""
    doctored = copy.deepcopy(recorded(name))
    for each in doctored["tallies"].values():
        each["violations"] = 0 if each["violations"] else 1
    swap = {"holds": "fails", "fails": "holds"}
    for claim in EXPERIMENTS[name].CLAIMS:
        before, after = (claim.check({name: [each]}) for each in (recorded(name), doctored))
        assert [part.verdict for part in after] == [swap[part.verdict] for part in before], claim.id
        for part in claim.check({name: [recorded(name), doctored]}):
            assert part.verdict == ("holds" if part.evidence.startswith("not: ") else "fails"), claim.id


def test_a_margin_that_is_no_number_counts_against_the_statement() -> None:
    assert tally([0.0, float("nan")])["violations"] == 1
    assert tally([-1e-12], beyond=-1e-9)["violations"] == 1
    assert tally([-1e-3, 1e-12]) == {"tried": 2, "violations": 0, "worst": 1e-12}
