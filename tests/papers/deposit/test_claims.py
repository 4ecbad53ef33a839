"""Every claim's verdict follows the data: in made-up worlds of results each can hold, fail, and stay undecided."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.papers.deposit.told import CHANGES, IN_PART, TOLD, rope
from tests.papers.deposit.worlds import World, changed, results

from toeplens.model import Protocol
from toeplens.papers.deposit import CLAIMS as ALL
from toeplens.papers.deposit import PARTS, claims_of
from toeplens.papers.deposit.looks import LOOKS
from toeplens.studies import Claim, Entry, Finding, Results, Verdict, judge
from toeplens.studies.kit.claims import findings
from toeplens.training.presets import PROTOCOLS

CLAIMS = tuple(claim for claim in ALL if claim.part != "ladder")  # whose are tried in test_ladder.py
BY_ID = {claim.id: claim for claim in CLAIMS}
MEASURED = claims_of(["mechanism"])
WATCHED = [claim for claim in CLAIMS if claim.elsewhere]
CURVES = {  # the claims that need no more than learning curves
    *(name for name in BY_ID if name.startswith(("task1-", "task2-", "table1-"))),
    *("mla-near-best", "mla-small-cost", "one-or-two-heads-suffice", "partial-below-full", "partial-hurts-count"),
    "nope-position-through-mask",
} - {"task2-relative-bias-attenuates"}
# whatever the final accuracy, or of models that are still learning too
SPEED = {"task1-rope-fastest", "task1-convergence-order", "task1-rope-stable", "nope-position-through-mask"}
BY_HEADS = {claim.id for claim in (*WATCHED, *MEASURED)} - {
    *("rope-gradient-seed", "alibi-seed-cancels", "margin-grows", "rope-suppresses-implicit-position"),
    *("additive-directions-displaced", "additive-coupling-persists", "contraction-speeds-learning"),
}
CASES = [(name, verdict) for name, changes in CHANGES.items() for verdict in changes]
LEANING: dict[Verdict, Verdict] = {"holds": "leans to hold", "fails": "leans to fail"}


def each_of(*cases: tuple[Any, ...]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """One test over all cases; a failure names its case."""

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        def over_all() -> None:
            for case in cases:
                try:
                    test(*case)
                except AssertionError as error:
                    error.add_note(", ".join(each.id if isinstance(each, Claim) else str(each) for each in case))
                    raise

        over_all.__name__, over_all.__doc__ = test.__name__, test.__doc__
        return over_all

    return decorate


every_claim = each_of(*((claim,) for claim in CLAIMS))
watched_claims = each_of(*((claim,) for claim in WATCHED))


def entry(claim: Claim[Results] | str, found: Results, protocol: Protocol = "paper") -> Entry:
    (only,) = judge([BY_ID[claim] if isinstance(claim, str) else claim], found, [protocol])
    return only


def verdict(claim: Claim[Results] | str, found: Results, protocol: Protocol = "paper") -> Verdict:
    return entry(claim, found, protocol).verdict


def world(claim: Claim[Results] | str, expected: Verdict = "holds") -> World:
    return TOLD | CHANGES[claim if isinstance(claim, str) else claim.id][expected]


def parts(claim: Claim[Results] | str, found: Results) -> list[Finding]:
    return list(findings((BY_ID[claim] if isinstance(claim, str) else claim).check, found))


# ---- each can hold, fail, and stay open ------------------------------------------------------------------------------


def test_every_claim_is_tried_both_ways_and_undecided() -> None:
    assert len({claim.id for claim in ALL}) == len(ALL)
    assert CHANGES.keys() == BY_ID.keys()
    assert all(changes.keys() == {"holds", "fails", "undecided"} for changes in CHANGES.values())


def test_who_needs_no_head_is_no_case_of_one_or_two() -> None:
    assert verdict("two-heads-do-it", results(world("two-heads-do-it", "holds") | rope(positional=0))) == "fails"


@each_of(*CASES)
def test_a_claims_verdict_follows_the_data(name: str, expected: Verdict) -> None:
    assert verdict(name, results(world(name, expected))) == expected


@every_claim
def test_with_four_seeds_it_leans_the_same_way(claim: Claim[Results]) -> None:
    """A claim that fails by one part leans to fail by it."""
    for expected in ("holds", "fails"):
        found = entry(claim, results(world(claim, expected), seeds=4))
        assert found.verdict == found.plain == LEANING[expected]
        assert found.wanting


@every_claim
def test_all_parts_hold_together_and_some_support(claim: Claim[Results]) -> None:
    found = parts(claim, results(world(claim)))
    assert {part.verdict for part in found} == {"holds"}
    assert found[0].essential
    assert any(not part.essential for part in found) == ("upporting" in claim.rule)


@each_of(*IN_PART.items())
def test_a_claim_holds_in_part_without_a_supporting_part(name: str, change: World) -> None:
    found = entry(name, results(world(name) | change))
    assert {part.verdict for part in found.findings if part.essential} == {"holds"}
    assert "fails" in {part.verdict for part in found.findings if not part.essential}
    assert found.verdict == "holds in part"


def test_every_part_says_what_it_compares_with_what() -> None:
    """All evidence where each claim holds, as recorded: the figures, models, thresholds and roles of all tests.

    Written anew by ``python -m tests.papers.deposit.test_claims``.
    """
    assert told() == json.loads(EVIDENCE.read_text("utf-8"))


EVIDENCE = Path(__file__).with_name("evidence.json")


def told() -> dict[str, list[str]]:
    """Evidence of each claim, under both protocols."""
    return {
        f"{claim.id}, {protocol}": entry(claim, results(world(claim), protocol=protocol), protocol).evidence
        for claim in CLAIMS
        for protocol in PROTOCOLS
    }


# ---- what does not count ---------------------------------------------------------------------------------------------


@every_claim
def test_without_results_nothing_is_decided(claim: Claim[Results]) -> None:
    for each in judge([claim], Results([]), ["paper", "released"]):
        assert each.verdict == "undecided"
        assert each.evidence
        assert each.wanting
        assert each.asides == ()


@every_claim
def test_the_other_protocols_results_decide_nothing(claim: Claim[Results]) -> None:
    assert verdict(claim, results(world(claim), protocol="released"), "paper") == "undecided"


@every_claim
def test_runs_that_diverged_decide_nothing(claim: Claim[Results]) -> None:
    for expected in ("holds", "fails"):
        diverged = {place: replace(model, status="diverged") for place, model in world(claim, expected).items()}
        assert {part.verdict for part in parts(claim, results(diverged))} == {"undecided"}


@every_claim
def test_models_that_are_still_learning_are_left_out_of_accuracies(claim: Claim[Results]) -> None:
    for expected in ("holds", "fails"):
        learning = {place: replace(model, settled=False) for place, model in world(claim, expected).items()}
        found = entry(claim, results(learning))
        if claim.id in CURVES - SPEED:
            assert {part.known for part in found.findings} == {False}
            assert found.verdict == "undecided"
        else:
            assert found.verdict == expected


@every_claim
def test_cells_without_ablation_and_measures_tell_of_learning_alone(claim: Claim[Results]) -> None:
    found = changed(
        results(world(claim)), lambda cell: replace(cell, ablation=None, by_loss=None, measures={}, watched=[])
    )
    assert verdict(claim, found) == ("holds" if claim.id in CURVES else "undecided")


@each_of(*((name,) for name in sorted(BY_HEADS)))
def test_models_without_skill_tell_nothing_of_their_heads(name: str) -> None:
    for expected in ("holds", "fails"):
        weak = {place: replace(model, accuracy=0.2, gap=0.0) for place, model in world(name, expected).items()}
        assert verdict(name, results(weak)) == "undecided"


# ---- other ways of looking -------------------------------------------------------------------------------------------


_SEEDS = {"partial-moves-deposit": 40}  # a share of models, corrected for eleven asides


@watched_claims
def test_looks_at_other_moments_are_asides(claim: Claim[Results]) -> None:
    """What was seen earlier says the same here, and is told beside the verdict, by accuracy and by loss."""
    moments = ("able", "plateau", "twice", "four times", "eight times")
    for expected in ("holds", "fails"):
        told = world(claim, expected)
        seeds = _SEEDS.get(claim.id, 5)
        seen = entry(claim, results({place: model.seen(*moments) for place, model in told.items()}, seeds))
        assert len(seen.asides) == len(LOOKS) - 1 == 11
        first, other = ("loss", "accuracy") if "Measured by loss" in claim.rule else ("accuracy", "loss")
        same = [aside.verdict for aside in seen.asides if aside.name.endswith(f"by {first}")]
        assert same == [expected] * len(moments)
        plain = entry(claim, results(told, seeds))
        assert [aside.name for aside in plain.asides] == [f"at the end, by {other}"]
        assert (seen.verdict, seen.evidence, seen.error) == (plain.verdict, plain.evidence, plain.error)


# ---- the list --------------------------------------------------------------------------------------------------------


def test_every_claim_belongs_to_a_part_of_the_study() -> None:
    assert claims_of([*PARTS]) == ALL
    assert claims_of([]) == ()
    assert {claim.part for claim in ALL} == {"core", "others", "partial", "factors", "mechanism", "ladder"}
    assert {claim.id for claim in claims_of(["core"])} >= {"task1-rope-best", "deposit-shallow", "mla-near-best"}


if __name__ == "__main__":
    EVIDENCE.write_text(json.dumps(told(), indent=1, ensure_ascii=False) + "\n", "utf-8")
