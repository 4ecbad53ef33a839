"""Every claim reads the models and figures that it names; checks of their own hold and fail in made-up worlds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.papers.deposit.synthetic_studies import (
    FAILS,
    HOLDS,
    IN_PART,
    PAPER_MODELS,
    SyntheticStudy,
    changed_cells,
    results,
    rope_study,
)

from toeplens.model import Protocol
from toeplens.papers.deposit import CLAIMS as ALL
from toeplens.papers.deposit import PARTS, claims_of
from toeplens.papers.deposit.measures import CHECKPOINT_MEASURES
from toeplens.studies import Finding, LedgerEntry, Results, Verdict, judge
from toeplens.studies.kit.claims import findings_of
from toeplens.training.presets import PROTOCOLS

CLAIMS = tuple(claim for claim in ALL if claim.part != "ladder")  # whose are tried in test_ladder.py
BY_ID = {claim.id: claim for claim in CLAIMS}
MEASURED = claims_of(["mechanism"])
PROBED = [claim for claim in CLAIMS if claim.elsewhere]
FROM_CURVES = {  # the claims that need no more than learning curves
    *(name for name in BY_ID if name.startswith(("task1-", "task2-", "table1-"))),
    *("mla-near-best", "mla-small-cost", "one-or-two-heads-suffice", "partial-below-full", "partial-hurts-count"),
    "nope-position-through-mask",
} - {"task2-relative-bias-attenuates"}
# whatever the final accuracy, or of models that are still learning too
FROM_SPEED = {"task1-rope-fastest", "task1-convergence-order", "task1-rope-stable", "nope-position-through-mask"}
BY_HEADS = {claim.id for claim in (*PROBED, *MEASURED)} - {
    *("rope-gradient-seed", "alibi-seed-cancels", "margin-grows", "rope-suppresses-implicit-position"),
    *("additive-directions-displaced", "additive-coupling-persists", "contraction-speeds-learning"),
}


every_claim = pytest.mark.parametrize("name", BY_ID)


def entry(name: str, found: Results, protocol: Protocol = "paper") -> LedgerEntry:
    (only,) = judge([BY_ID[name]], found, [protocol])
    return only


def verdict(name: str, found: Results, protocol: Protocol = "paper") -> Verdict:
    return entry(name, found, protocol).verdict


def world(name: str, expected: Verdict = "holds") -> SyntheticStudy:
    return PAPER_MODELS | HOLDS.get(name, {}) | (FAILS[name] if expected == "fails" else {})


def parts(name: str, found: Results) -> list[Finding]:
    return list(findings_of(BY_ID[name].check, found))


# ---- each can hold, and checks of their own fail ---------------------------------------------------------------------


def test_models_that_need_no_head_are_not_counted_as_one_or_two() -> None:
    assert verdict("two-heads-do-it", results(world("two-heads-do-it") | rope_study(positional=0))) == "fails"


@pytest.mark.parametrize("name", FAILS)
def test_a_claims_verdict_follows_the_data(name: str) -> None:
    assert verdict(name, results(world(name, "fails"))) == "fails"
    assert verdict(name, results(world(name, "fails"), seeds=4)) == "leans to fail"


@every_claim
def test_all_parts_hold_together_and_some_support(name: str) -> None:
    actual = parts(name, results(world(name)))
    assert {part.verdict for part in actual} == {"holds"}
    assert actual[0].essential
    assert any(not part.essential for part in actual) == ("upporting" in BY_ID[name].rule)


@pytest.mark.parametrize(("name", "change"), IN_PART.items())
def test_a_claim_holds_in_part_without_a_supporting_part(name: str, change: SyntheticStudy) -> None:
    actual = entry(name, results(world(name) | change))
    assert {part.verdict for part in actual.findings if part.essential} == {"holds"}
    assert "fails" in {part.verdict for part in actual.findings if not part.essential}
    assert actual.verdict == "holds in part"


def test_every_part_states_its_comparison() -> None:
    """All evidence where each claim holds, as recorded: the figures, models, thresholds and roles of all tests.

    Written anew by ``python -m tests.papers.deposit.test_claims``.
    """
    assert recorded_evidence() == json.loads(EVIDENCE.read_text("utf-8"))


EVIDENCE = Path(__file__).with_name("evidence.json")


def recorded_evidence() -> dict[str, list[str]]:
    """Evidence of each claim, under the released protocol if it differs from the paper's."""
    found = {(name, p): entry(name, results(world(name), protocol=p), p).evidence for name in BY_ID for p in PROTOCOLS}
    return {
        f"{name}, {p}": lines for (name, p), lines in found.items() if p == "paper" or lines != found[name, "paper"]
    }


# ---- what does not count ---------------------------------------------------------------------------------------------


@every_claim
def test_without_results_all_claims_are_undecided(name: str) -> None:
    for ledger_entry in judge([BY_ID[name]], Results([]), ["paper", "released"]):
        assert ledger_entry.verdict == "undecided"
        assert ledger_entry.evidence
        assert ledger_entry.missing
        assert ledger_entry.alternatives == ()


@every_claim
def test_results_of_the_other_protocol_are_not_used(name: str) -> None:
    assert verdict(name, results(world(name), protocol="released"), "paper") == "undecided"


@every_claim
def test_diverged_runs_are_not_used(name: str) -> None:
    diverged = {place: replace(model, status="diverged") for place, model in world(name).items()}
    assert {part.verdict for part in parts(name, results(diverged))} == {"undecided"}


@every_claim
def test_unfinished_models_are_excluded_from_accuracies(name: str) -> None:
    learning = {place: replace(model, settled=False) for place, model in world(name).items()}
    actual = entry(name, results(learning))
    if name in FROM_CURVES - FROM_SPEED:
        assert {part.has_data for part in actual.findings} == {False}
        assert actual.verdict == "undecided"
        assert actual.extremes is not None
        assert actual.extremes[1] in ("holds", "holds in part")
    else:
        assert actual.verdict == "holds"
        assert actual.extremes is None


@every_claim
def test_cells_without_measures_count_only_for_learning(name: str) -> None:
    actual = changed_cells(
        results(world(name)), lambda cell: replace(cell, ablation=None, by_loss=None, measures={}, probe_rows=[])
    )
    assert verdict(name, actual) == ("holds" if name in FROM_CURVES else "undecided")


@pytest.mark.parametrize("name", sorted(BY_HEADS))
def test_heads_of_unskilled_models_are_not_used(name: str) -> None:
    weak = {place: replace(model, accuracy=0.2, gap=0.0) for place, model in world(name).items()}
    assert verdict(name, results(weak)) == "undecided"


# ---- other ways of looking -------------------------------------------------------------------------------------------


_SEEDS = {"partial-moves-deposit": 40}  # a share of models, corrected for eleven asides


@pytest.mark.parametrize("name", [claim.id for claim in PROBED])
def test_probes_at_other_steps_are_alternative_checks(name: str) -> None:
    """An earlier finding agrees here and is reported next to the verdict, by accuracy and by loss."""
    moments = ("able", "plateau", "twice", "four times", "eight times")
    study = world(name)
    seeds = _SEEDS.get(name, 5)
    later = entry(name, results({place: model.with_probes(*moments) for place, model in study.items()}, seeds))
    assert len(later.alternatives) == len(CHECKPOINT_MEASURES) - 1 == 11
    first, other = ("loss", "accuracy") if "Measured by loss" in BY_ID[name].rule else ("accuracy", "loss")
    same = [aside.verdict for aside in later.alternatives if aside.name.endswith(f"by {first}")]
    assert same == ["holds"] * len(moments)
    plain = entry(name, results(study, seeds))
    assert [aside.name for aside in plain.alternatives] == [f"at the end, by {other}"]
    assert (later.verdict, later.evidence, later.error) == (plain.verdict, plain.evidence, plain.error)


# ---- the list --------------------------------------------------------------------------------------------------------


def test_every_claim_belongs_to_a_part_of_the_study() -> None:
    assert claims_of([*PARTS]) == ALL
    assert claims_of([]) == ()
    assert {claim.part for claim in ALL} == {"core", "others", "partial", "factors", "mechanism", "ladder"}
    assert {claim.id for claim in claims_of(["core"])} >= {"task1-rope-best", "deposit-shallow", "mla-near-best"}


if __name__ == "__main__":
    EVIDENCE.write_text(json.dumps(recorded_evidence(), indent=1, ensure_ascii=False) + "\n", "utf-8")
