"""Every claim's verdict follows the data: in made-up worlds of results each can hold, fail, and stay undecided."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.papers.deposit.told import CHANGES, NEAR, ONE_FAILS, SKILLED, TOLD
from tests.papers.deposit.worlds import (
    HEADS,
    LAYERS,
    SINGLE,
    SPREAD,
    Inside,
    Model,
    World,
    count,
    distance,
    made_up,
    measured,
    results,
)

from toeplens.lens import HeadAblation, HeadSets, PositionalDrift, Representation, SeedStrength
from toeplens.model import Protocol
from toeplens.papers.deposit import CLAIMS, PARTS, claims_of
from toeplens.studies import CellResult, Claim, Entry, Key, Results, Verdict, judge
from toeplens.training.presets import COUNT, DISTANCE

VERDICTS: tuple[Verdict, ...] = ("holds", "fails", "holds in part", "undecided")
BY_ID = {claim.id: claim for claim in CLAIMS}
MEASURED = claims_of(["mechanism"])
ACCURACY = {  # the claims that need no more than learning curves
    *(name for name in BY_ID if name.startswith(("task1-", "task2-", "table1-"))),
    *("mla-near-best", "mla-small-cost", "one-or-two-heads-suffice", "partial-below-full", "partial-hurts-count"),
}
CASES = [(name, verdict) for name, changes in CHANGES.items() for verdict in changes]
every_claim = pytest.mark.parametrize("claim", CLAIMS, ids=BY_ID)
measured_claims = pytest.mark.parametrize("claim", MEASURED, ids=lambda claim: claim.id)


def entry(claim: Claim | str, found: Results, protocol: Protocol = "paper") -> Entry:
    (only,) = judge([BY_ID[claim] if isinstance(claim, str) else claim], found, [protocol])
    return only


def verdict(claim: Claim | str, found: Results, protocol: Protocol = "paper") -> Verdict:
    return entry(claim, found, protocol).verdict


def world(claim: Claim | str, expected: Verdict = "holds") -> World:
    return TOLD | CHANGES[claim if isinstance(claim, str) else claim.id][expected]


def changed(found: Results, change: Callable[[CellResult], CellResult]) -> Results:
    return Results(change(cell) for cell in found.cells)


# ---- every claim ----------------------------------------------------------------------------------------------------


def test_every_claim_is_tried_both_ways_and_undecided():
    assert len(BY_ID) == len(CLAIMS)
    assert CHANGES.keys() == BY_ID.keys()
    assert all({"holds", "fails", "undecided"} <= changes.keys() for changes in CHANGES.values())
    assert BY_ID.keys() >= NEAR


@pytest.mark.parametrize(("name", "expected"), CASES)
def test_a_claims_verdict_follows_the_data(name: str, expected: Verdict):
    assert verdict(name, results(world(name, expected))) == expected


@pytest.mark.parametrize("name", CHANGES)
def test_with_two_seeds_a_claim_fails_only_if_it_is_far_off(name: str):
    found = verdict(name, results(world(name, "fails"), seeds=2))
    assert found == ("undecided" if name in NEAR else "fails")


@every_claim
def test_without_results_nothing_is_decided(claim: Claim):
    entries = judge([claim], Results([]), ["paper", "released"])
    assert [each.verdict for each in entries] == ["undecided", "undecided"]
    assert all(each.evidence for each in entries)


@every_claim
def test_the_other_protocols_results_decide_nothing(claim: Claim):
    assert verdict(claim, results(world(claim), protocol="released"), "paper") == "undecided"


@every_claim
def test_runs_that_diverged_decide_nothing(claim: Claim):
    for expected in ("holds", "fails"):
        diverged = {place: replace(model, status="diverged") for place, model in world(claim, expected).items()}
        parts = claim.check(results(diverged))
        assert {part.verdict for part in parts} == {"undecided"}


@every_claim
def test_another_seed_that_diverged_makes_no_other_verdict(claim: Claim):
    """It takes the verdict away where the claim compares accuracies; heads are looked at where there are some."""
    for expected in ("holds", "fails"):
        whole = results(world(claim, expected))
        lost = [made_up(Key("paper", *place, 3), Model(0.5, status="diverged")) for place in world(claim)]
        found = verdict(claim, Results([*whole.cells, *lost]))
        assert found == ("undecided" if claim.id in ACCURACY else expected)


@every_claim
def test_cells_without_ablation_and_measures_tell_of_accuracy_alone(claim: Claim):
    found = changed(results(world(claim)), lambda cell: replace(cell, ablation=None, measures={}, watched=[]))
    assert verdict(claim, found) == ("holds" if claim.id in ACCURACY else "undecided")


@every_claim
def test_a_claim_is_a_statement_with_a_source_and_a_rule(claim: Claim):
    for text in (claim.id, claim.source, claim.statement, claim.rule):
        assert text.strip() == text
        assert text
    record = entry(claim, results(TOLD)).to_dict()
    assert record["id"] == claim.id
    assert record["verdict"] in VERDICTS
    assert record["evidence"]
    assert all(isinstance(line, str) and line for line in record["evidence"])


@given(st.lists(st.sampled_from([*PARTS, "unheard of"])))
def test_parts_of_the_study_decide_their_claims(parts: list[str]):
    """Each claim belongs to one part; the order is that of the ledger whatever the order of the parts."""
    assert claims_of(parts) == tuple(claim for claim in CLAIMS if claim.part in parts)
    assert claims_of(parts) == claims_of([*reversed(parts), *parts])


def test_every_claim_belongs_to_a_part_of_the_study():
    assert claims_of([*PARTS]) == CLAIMS
    assert claims_of([]) == ()
    assert {claim.part for claim in CLAIMS} == {"core", "others", "partial", "mechanism"}
    assert {claim.id for claim in claims_of(["core"])} >= {"task1-rope-best", "deposit-shallow", "mla-near-best"}


@pytest.mark.parametrize("name", ONE_FAILS)
def test_each_part_of_a_claim_can_fail_alone(name: str):
    """In the world in which all hold: so each part looks at what it says, in the right direction."""
    whole = [finding.verdict for finding in BY_ID[name].check(results(world(name)))]
    assert set(whole) == {"holds"}
    for part, change in ONE_FAILS[name].items():
        found = [finding.verdict for finding in BY_ID[name].check(results(world(name) | change))]
        assert found == [*whole[:part], "fails", *whole[part + 1 :]], part


# ---- which results a claim reads ------------------------------------------------------------------------------------


def test_seeds_that_disagree_decide_nothing():
    wild = results(TOLD | distance(rope=0.65, absolute=0.6), spread=0.3)
    assert verdict("task1-alibi-poor", wild) == "undecided"


def test_random_counts_only_where_it_was_run():
    without = {place: model for place, model in TOLD.items() if place != (DISTANCE, "random")}
    assert verdict("task1-rope-best", results(without)) == "holds"
    assert verdict("task1-rope-best", results(without | distance(random=0.2))) == "holds"
    assert verdict("task1-rope-best", results(without | distance(random=0.99))) == "holds in part"


def test_an_encoding_that_is_not_finished_is_waited_for():
    missing = {place: model for place, model in TOLD.items() if place != (DISTANCE, "alibi")}
    for name in ("task1-rope-best", "task1-rope-fastest", "task1-absolute-second"):
        assert verdict(name, results(missing)) == "undecided"


@pytest.mark.parametrize("lost", ["rope", "nope"])
@pytest.mark.parametrize("task", [DISTANCE, COUNT])
def test_no_encoding_is_best_before_the_others_are_finished(task: str, lost: str):
    best = TOLD | distance(mla=0.99) | count(mla=0.99)
    assert verdict("mla-near-best", results(best)) == "holds"
    missing = {place: model for place, model in best.items() if place != (task, lost)}
    assert verdict("mla-near-best", results(missing)) == "undecided"
    diverged = best | {(task, lost): replace(best[task, lost], status="diverged")}
    assert verdict("mla-near-best", results(diverged)) == "undecided"


def test_an_encoding_stays_the_best_though_one_of_its_seeds_diverged():
    """RoPE is far over MLA: that a seed of it is lost must not make a worse encoding the best."""
    found = results(TOLD | distance(mla=0.6), seeds=4)
    assert verdict("mla-near-best", found) == "holds in part"
    broken = changed(
        found,
        lambda cell: replace(cell, status="diverged") if cell.key.seed == 3 and cell.key.label == "rope" else cell,
    )
    (first, _) = entry("mla-near-best", broken).evidence
    assert first == "Task 1: MLA - RoPE, the best: a run diverged or has no value"


def test_the_best_encoding_is_no_variant():
    better = distance(rope__dropout=0.99, partial_1=0.99, partial_2=0.99, partial_3=0.99)
    assert verdict("mla-near-best", results(TOLD | better)) == "holds"


def test_in_the_released_protocol_rope_is_the_one_with_the_sinusoid():
    claim = "rope-absolute-moves-deposit"
    alone = {place: model for place, model in TOLD.items() if place[1] != "rope-absolute"}
    moved = alone | distance(rope=Model(0.93).single(2))
    assert verdict(claim, results(moved, protocol="released"), "released") == "holds"
    assert verdict(claim, results(alone, protocol="released"), "released") == "fails"
    claim = "additive-directions-displaced"
    kept = alone | distance(rope=Model(0.93).within(alignment=0.95, coefficient=1.0))
    assert verdict(claim, results(alone, protocol="released"), "released") == "holds"
    assert verdict(claim, results(kept, protocol="released"), "released") == "fails"


def test_rope_on_few_heads_is_compared_with_rope_alone_where_that_was_run():
    better = TOLD | distance(rope=0.5, rope_alone=0.93)
    worse = TOLD | distance(rope=0.93, rope_alone=0.99, partial_1=0.7, partial_2=0.7)
    assert verdict("one-or-two-heads-suffice", results(better)) == "holds"
    assert verdict("one-or-two-heads-suffice", results(worse)) == "fails"
    assert verdict("partial-below-full", results(better)) == "holds"
    assert verdict("partial-below-full", results(better | distance(rope_alone=0.5))) == "fails"


def test_heads_that_were_drawn_at_random_count_as_partial_rope():
    flat = TOLD | distance(partial_1=0.9)
    assert verdict("partial-moves-deposit", results(flat)) == "fails"
    drawn = distance(partial_2__random=Model(0.9).single(2))
    assert verdict("partial-moves-deposit", results(flat | drawn)) == "holds"


def test_that_something_never_occurs_takes_three_models():
    few = {place: model for place, model in TOLD.items() if not place[1].startswith("partial-")}
    flat = few | distance(partial_1=0.9, partial_2=0.9)
    assert verdict("partial-moves-deposit", results(flat, seeds=1)) == "undecided"
    assert verdict("partial-moves-deposit", results(flat | distance(partial_3=0.9), seeds=1)) == "fails"


def test_seeds_are_compared_in_pairs():
    """Seeds that do well under one encoding do well under the other: the difference is sure, the accuracies are not."""
    rng = np.random.default_rng(3)
    luck = rng.uniform(-0.3, 0.3, 4)
    cells = [
        made_up(Key("paper", COUNT, label, seed), Model(0.5 + luck[seed] + edge))
        for label, edge in (("rope", 0.02), ("nope", 0.0))
        for seed in range(4)
    ]
    cells[0] = replace(cells[0], result={"test_accuracy": cells[0].accuracy + 0.001})
    found = Results(cells)
    assert found.difference(COUNT, "rope", "nope") == pytest.approx({0: 0.021, 1: 0.02, 2: 0.02, 3: 0.02})
    assert verdict("task2-rope-superior", found) == "holds"
    one_only = Results([*cells[:4], *cells[5:6]])
    assert one_only.difference(COUNT, "rope", "nope") == pytest.approx({1: 0.02})


@pytest.mark.parametrize("name", ["task1-rope-smallest-gap", "task1-random-overfits", "task2-random-largest-gap"])
@pytest.mark.parametrize("missing", [{}, {"train_accuracy": None}])
def test_runs_without_train_accuracy_have_no_gap(name: str, missing: dict[str, Any]):
    def without(cell: CellResult) -> CellResult:
        rows = [{"epoch": row["epoch"], "test_accuracy": row["test_accuracy"], **missing} for row in cell.epochs]
        return replace(cell, epochs=rows)

    assert verdict(name, changed(results(world(name)), without)) == "undecided"


# ---- what was measured ----------------------------------------------------------------------------------------------


def test_made_up_measures_are_records_of_measures():
    """They read back, and say of the heads and layers in question what they were told to."""
    content = measured(Inside(logits=-0.1, drift=2.0, positions=(0.4, 0.1), needed=3), 0.9, 0.0)
    strength = SeedStrength.from_dict(content["seed"]["strength"])
    assert strength.to_dict() == content["seed"]["strength"]
    assert strength.levels["logits"].signal[:, 0] == pytest.approx([4, 3, 2, 1.5])
    assert strength.levels["logits"].signal[:, 1:] == pytest.approx(np.ones((LAYERS, HEADS - 1)))
    assert PositionalDrift.from_dict(content["seed"]["drift"]).relative[0].max() == pytest.approx(2.0)
    assert Representation.from_dict(content["representation"]).to_dict() == content["representation"]
    assert HeadAblation.from_dict(content["position"]).to_dict() == content["position"]
    assert len(HeadSets.from_dict(content["sets"]).sufficient) == 3


@measured_claims
def test_a_cell_without_the_measure_counts_nowhere(claim: Claim):
    for expected in ("holds", "fails"):
        whole = results(world(claim, expected))
        bare = changed(
            whole, lambda cell: replace(cell, key=replace(cell.key, seed=cell.key.seed + 3), measures={}, watched=[])
        )
        assert entry(claim, Results([*whole.cells, *bare.cells])) == entry(claim, whole)
        assert entry(claim, whole).verdict == expected
        assert verdict(claim, bare) == "undecided"


def blank(content: Any) -> Any:
    """A record with None for every number that may be undefined."""
    if isinstance(content, dict):
        known = ("loss", "energy", "baseline", "chance", "gradient_norm", "parameter_norm")
        return {key: value if key in known else blank(value) for key, value in content.items()}
    if isinstance(content, list):
        return [blank(value) for value in content]
    return None if isinstance(content, float) else content


@pytest.mark.parametrize(
    "claim", [claim for claim in MEASURED if not claim.id.endswith(("heads", "-do-it"))], ids=lambda claim: claim.id
)
def test_what_is_not_defined_decides_nothing(claim: Claim):
    def undefined(cell: CellResult) -> CellResult:
        return replace(cell, measures=blank(cell.measures), watched=blank(cell.watched))

    assert verdict(claim, changed(results(world(claim)), undefined)) == "undecided"


def test_alibis_gradients_may_cancel_or_not_be_there():
    for parameters in (math.nan, -0.5):
        alibi = Model(0.3).within(logits=-0.5, parameters=parameters, drift=0.0)
        found = entry("alibi-seed-cancels", results(TOLD | distance(alibi=alibi)))
        assert found.verdict == "holds"
        assert ("no gradient moves position there in 3 seeds" in found.evidence[1]) == math.isnan(parameters)


@pytest.mark.parametrize("drift", [5.0, -0.2])
def test_alibis_position_may_move_neither_way(drift: float):
    alibi = Model(0.3).within(logits=-0.5, parameters=math.nan, drift=drift)
    assert verdict("alibi-seed-cancels", results(TOLD | distance(alibi=alibi))) == "holds in part"


def test_where_no_head_leads_there_is_no_rank():
    """All signals, or all drops, are the same: there is nothing to correlate, and numpy and scipy are not asked."""
    alike = TOLD | distance(rope=Model(0.93).within(first=(1.0,) * LAYERS).single(0))
    assert verdict("early-leader-deposits", results(alike, spread=0.0)) == "undecided"
    flat = TOLD | distance(rope=Model(0.93).first_layer(*SPREAD))
    assert verdict("early-leader-deposits", results(flat)) == "undecided"


def test_the_margin_after_training_is_that_of_the_last_row():
    found = results(TOLD)
    begun: Sequence[Any] = np.ones((LAYERS, HEADS)).tolist()
    more = changed(found, lambda cell: replace(cell, watched=[{"step": 0, "signal": begun}, *cell.watched]))
    less = changed(found, lambda cell: replace(cell, watched=[*cell.watched, {"step": 99, "signal": begun}]))
    mute = changed(found, lambda cell: replace(cell, watched=[*cell.watched, {"step": 99}]))
    assert verdict("margin-grows", more) == "holds"
    assert verdict("margin-grows", less) == verdict("margin-grows", mute) == "undecided"


@pytest.mark.parametrize("name", ["one-head-knows-position", "two-heads-do-it", "early-leader-deposits"])
def test_models_without_skill_tell_nothing_of_their_heads(name: str):
    for expected in ("holds", "fails"):
        rope = world(name, expected)[DISTANCE, "rope"]
        unskilled = TOLD | {(DISTANCE, "rope"): replace(rope, accuracy=0.3)}
        assert verdict(name, results(unskilled)) == "undecided"
        assert verdict(name, results(TOLD | {(DISTANCE, "rope"): replace(rope, accuracy=0.4)})) == expected


def test_models_are_compared_where_both_have_skill():
    found = results(TOLD | distance(**SKILLED))
    lost = changed(
        found,
        lambda cell: replace(cell, result={"test_accuracy": 0.2}) if cell.key.label == "nope" else cell,
    )
    for name in ("rope-needs-fewer-heads", "deposit-more-under-rope", "nope-relative-alibi-alike"):
        assert verdict(name, found) == "holds"
        assert verdict(name, lost) == "undecided"


def test_peaks_are_shares_of_the_skill():
    """The same loss is a larger share of a smaller skill: 0.6 of 0.83 under RoPE, of 0.7 with dropout."""
    rope = TOLD | distance(rope__dropout=Model(0.8, drops=(SINGLE, *(SPREAD,) * 3)))
    (_, peaks) = entry("dropout-keeps-deposit", results(rope, seeds=1, spread=0.0)).evidence
    assert peaks == f"peak, RoPE with dropout - RoPE: {0.6 / 0.7 - 0.6 / 0.83:.3f} (1 seed), bar -0.1"
