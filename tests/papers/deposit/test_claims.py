"""Every claim reads the models and figures that it names; checks of their own hold and fail in made-up worlds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.papers.deposit.worlds import FAILS, HOLDS, IN_PART, TOLD, World, changed, results, rope

from toeplens.model import Protocol
from toeplens.papers.deposit import CLAIMS as ALL
from toeplens.papers.deposit import PARTS, claims_of
from toeplens.papers.deposit.measured import LOOKS
from toeplens.studies import Entry, Finding, Results, Verdict, judge
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


every_claim = pytest.mark.parametrize("name", BY_ID)


def entry(name: str, found: Results, protocol: Protocol = "paper") -> Entry:
    (only,) = judge([BY_ID[name]], found, [protocol])
    return only


def verdict(name: str, found: Results, protocol: Protocol = "paper") -> Verdict:
    return entry(name, found, protocol).verdict


def world(name: str, expected: Verdict = "holds") -> World:
    return TOLD | HOLDS.get(name, {}) | (FAILS[name] if expected == "fails" else {})


def parts(name: str, found: Results) -> list[Finding]:
    return list(findings(BY_ID[name].check, found))


# ---- each can hold, and checks of their own fail ---------------------------------------------------------------------


def test_who_needs_no_head_is_no_case_of_one_or_two() -> None:
    assert verdict("two-heads-do-it", results(world("two-heads-do-it") | rope(positional=0))) == "fails"


@pytest.mark.parametrize("name", FAILS)
def test_a_claims_verdict_follows_the_data(name: str) -> None:
    assert verdict(name, results(world(name, "fails"))) == "fails"
    assert verdict(name, results(world(name, "fails"), seeds=4)) == "leans to fail"


@every_claim
def test_all_parts_hold_together_and_some_support(name: str) -> None:
    found = parts(name, results(world(name)))
    assert {part.verdict for part in found} == {"holds"}
    assert found[0].essential
    assert any(not part.essential for part in found) == ("upporting" in BY_ID[name].rule)


@pytest.mark.parametrize(("name", "change"), IN_PART.items())
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
        f"{name}, {protocol}": entry(name, results(world(name), protocol=protocol), protocol).evidence
        for name in BY_ID
        for protocol in PROTOCOLS
    }


# ---- what does not count ---------------------------------------------------------------------------------------------


@every_claim
def test_without_results_nothing_is_decided(name: str) -> None:
    for each in judge([BY_ID[name]], Results([]), ["paper", "released"]):
        assert each.verdict == "undecided"
        assert each.evidence
        assert each.wanting
        assert each.asides == ()


@every_claim
def test_the_other_protocols_results_decide_nothing(name: str) -> None:
    assert verdict(name, results(world(name), protocol="released"), "paper") == "undecided"


@every_claim
def test_runs_that_diverged_decide_nothing(name: str) -> None:
    diverged = {place: replace(model, status="diverged") for place, model in world(name).items()}
    assert {part.verdict for part in parts(name, results(diverged))} == {"undecided"}


@every_claim
def test_models_that_are_still_learning_are_left_out_of_accuracies(name: str) -> None:
    learning = {place: replace(model, settled=False) for place, model in world(name).items()}
    found = entry(name, results(learning))
    if name in CURVES - SPEED:
        assert {part.known for part in found.findings} == {False}
        assert found.verdict == "undecided"
    else:
        assert found.verdict == "holds"


@every_claim
def test_cells_without_ablation_and_measures_tell_of_learning_alone(name: str) -> None:
    found = changed(
        results(world(name)), lambda cell: replace(cell, ablation=None, by_loss=None, measures={}, watched=[])
    )
    assert verdict(name, found) == ("holds" if name in CURVES else "undecided")


@pytest.mark.parametrize("name", sorted(BY_HEADS))
def test_models_without_skill_tell_nothing_of_their_heads(name: str) -> None:
    weak = {place: replace(model, accuracy=0.2, gap=0.0) for place, model in world(name).items()}
    assert verdict(name, results(weak)) == "undecided"


# ---- other ways of looking -------------------------------------------------------------------------------------------


_SEEDS = {"partial-moves-deposit": 40}  # a share of models, corrected for eleven asides


@pytest.mark.parametrize("name", [claim.id for claim in WATCHED])
def test_looks_at_other_moments_are_asides(name: str) -> None:
    """What was seen earlier says the same here, and is told beside the verdict, by accuracy and by loss."""
    moments = ("able", "plateau", "twice", "four times", "eight times")
    told = world(name)
    seeds = _SEEDS.get(name, 5)
    seen = entry(name, results({place: model.seen(*moments) for place, model in told.items()}, seeds))
    assert len(seen.asides) == len(LOOKS) - 1 == 11
    first, other = ("loss", "accuracy") if "Measured by loss" in BY_ID[name].rule else ("accuracy", "loss")
    same = [aside.verdict for aside in seen.asides if aside.name.endswith(f"by {first}")]
    assert same == ["holds"] * len(moments)
    plain = entry(name, results(told, seeds))
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
