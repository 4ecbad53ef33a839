"""Which results a claim reads: what is waited for, what is left out, and what ties, gaps and odd sizes decide.

Which heads, variants and rungs it reads, the evidence of all records shows (tests/papers/test_records.py).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.papers.deposit.test_claims import BY_ID, MEASURED, entry, parts, verdict, world
from tests.papers.deposit.worlds import HEADS, LAYERS, TOLD, Layers, Model, World, changed, distance, results, rope

from toeplens.lens import HeadAblation
from toeplens.lens.kit.intervals import spearman
from toeplens.papers.deposit.claims import mechanism
from toeplens.studies import ENOUGH, CellResult, Results, Verdict
from toeplens.studies.kit.claims import findings
from toeplens.training.presets import COUNT, DISTANCE


def without(told: World, *places: tuple[str, str]) -> World:
    return {place: model for place, model in told.items() if place not in places}


# ---- what is waited for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["task1-rope-best", "task1-rope-fastest", "task1-absolute-second"])
def test_random_counts_only_where_it_was_run(name: str) -> None:
    bare = without(TOLD, (DISTANCE, "random"))
    assert verdict(name, results(bare)) == "holds"
    assert verdict(name, results(bare | distance(random=Model(0.2, half=4.0)))) == "holds"
    assert verdict(name, results(bare | distance(random=Model(0.99, half=0.5)))) == "fails"


@pytest.mark.parametrize(
    "name", ["task1-rope-best", "task1-rope-fastest", "task1-absolute-second", "task1-rope-stable"]
)
def test_an_encoding_that_is_not_finished_is_waited_for(name: str) -> None:
    assert verdict(name, results(without(TOLD, (DISTANCE, "alibi")))) == "undecided"


@pytest.mark.parametrize("lost", ["rope", "nope"])
@pytest.mark.parametrize("task", [DISTANCE, COUNT])
def test_no_encoding_is_near_the_best_before_the_others_are_finished(task: str, lost: str) -> None:
    assert verdict("mla-near-best", results(without(TOLD, (task, lost)))) == "undecided"
    diverged = TOLD | {(task, lost): replace(TOLD[task, lost], status="diverged")}
    assert verdict("mla-near-best", results(diverged)) == "undecided"


# ---- which models are rungs and which are deposits -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drops", "expected"),
    [
        (((0.0, 0.0), (0.3, 0.0), (0.0, 0.0), (0.0, 0.0)), "holds"),
        (((0.0, 0.0), (0.0, 0.0), (0.3, 0.0), (0.0, 0.0)), "holds"),
        (((0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.3, 0.0)), "fails"),  # the fourth is neither
        (((0.0, 0.3), (0.3, 0.0), (0.0, 0.0), (0.0, 0.0)), "fails"),  # as much in the first
    ],
)
def test_a_deposit_that_moves_lies_in_the_second_layer_or_the_third(drops: Layers, expected: Verdict) -> None:
    moved = {f"partial_{heads}": Model(0.89, drops=drops) for heads in (1, 2, 3)}
    assert parts("partial-moves-deposit", results(TOLD | distance(**moved)))[0].verdict == expected


# ---- how fast --------------------------------------------------------------------------------------------------------


def ended(found: Results, label: str, epochs: float) -> Results:
    """The models of a label never learned half, and were stopped after so many epochs."""
    rows = [{"epoch": epochs, "step": 1, "train_accuracy": 0.3, "fit_accuracy": 0.3, "test_accuracy": 0.3}]
    return changed(found, lambda cell: replace(cell, epochs=rows) if cell.key.label == label else cell)


@pytest.mark.parametrize("name", ["task1-rope-fastest", "task1-convergence-order", "contraction-speeds-learning"])
def test_who_did_not_look_at_training_examples_after_evaluations_cannot_say_how_fast(name: str) -> None:
    """Records from before that was done; what is seen while weights change, with dropout, is not what is learned."""

    def not_looked(cell: CellResult) -> CellResult:
        return replace(cell, epochs=[row | {"fit_accuracy": None} for row in cell.epochs])

    found = entry(name, changed(results(world(name)), not_looked))
    assert found.verdict == "undecided"
    assert not any(part.known for part in found.findings)


def test_who_never_learned_half_is_not_faster_for_having_been_stopped() -> None:
    found = ended(results(TOLD), "nope", 0.5)
    seen = entry("task1-rope-fastest", found)
    assert seen.verdict == "undecided"
    assert "never learned half" in seen.evidence[3]
    assert "longer training" in " ".join(seen.wanting)
    assert verdict("task1-rope-fastest", ended(results(TOLD), "nope", 64.0)) == "holds", "slower is slower"
    assert verdict("task1-rope-fastest", ended(results(TOLD, seeds=4), "nope", 0.5)) == "undecided"


def test_spectra_are_compared_with_never_as_the_slowest() -> None:
    claim = "contraction-speeds-learning"
    assert verdict(claim, ended(results(TOLD), "relative", 0.1)) == "holds", "its spectrum is the widest"
    gone = results(TOLD)
    for label in ("rope", "mla", "rope-absolute"):
        gone = ended(gone, label, 0.1)
    assert verdict(claim, gone) == "undecided", "the narrowest are among the slowest"
    nobody = results(TOLD)
    for label in nobody.labels(DISTANCE):
        nobody = ended(nobody, label, 2.0)
    assert verdict(claim, nobody) == "undecided"


# ---- spectra ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["contraction-speeds-learning", "contraction-brings-deposit"])
def test_spectra_need_five_encodings(name: str) -> None:
    names = ("rope", "absolute", "mla", "relative", "alibi")
    told = {(DISTANCE, label): world(name)[DISTANCE, label] for label in names}
    (finding,) = findings(BY_ID[name].check, results(told))
    assert finding.holds is not None
    (finding,) = findings(BY_ID[name].check, results(without(told, (DISTANCE, "alibi"))))
    assert (finding.holds, finding.verdict) == (None, "undecided")
    gone = told | {(DISTANCE, "alibi"): replace(told[DISTANCE, "alibi"], status="diverged")}
    (finding,) = findings(BY_ID[name].check, results(gone))
    assert (finding.holds, finding.verdict) == (None, "undecided")


def test_a_random_order_of_the_encodings_gives_as_much_as_often_as_is_told() -> None:
    """Against all orders of six encodings, one by one."""
    rng = np.random.default_rng(0)
    pairs = np.stack((np.arange(6.0), rng.permutation(6)))
    finding = mechanism._judged("it", pairs, 1, ENOUGH)
    found = float(spearman(pairs))
    every = [float(spearman(np.stack((pairs[0], order)))) for order in itertools.permutations(pairs[1])]
    assert finding.holds == pytest.approx(np.mean([each >= found - 1e-9 for each in every]), abs=0.02)
    turned = mechanism._judged("it", pairs, -1, ENOUGH)
    assert turned.holds == pytest.approx(np.mean([each <= found + 1e-9 for each in every]), abs=0.02)


# ---- ties, and heads that do not matter ------------------------------------------------------------------------------


def test_among_heads_of_one_signal_none_leads() -> None:
    assert verdict("early-leader-deposits", results(TOLD)) == "holds"
    alike = rope(first=(1.0,) * LAYERS)
    assert verdict("early-leader-deposits", results(TOLD | alike, spread=0.0)) == "undecided"


def test_where_heads_cost_next_to_nothing_together_nobody_asks_how_it_is_spread() -> None:
    silent = Model(0.88, drops=((0.01, 0.0, 0.0, 0.0),) + ((0.0,) * 4,) * 3)
    spread, level = parts("mla-average-deposit", results(TOLD | distance(mla=silent)))
    assert spread.verdict == "undecided"
    assert "(5 of 5 and 0 of 5 models" in spread.evidence
    assert "too small a total ablation effect" in spread.evidence
    assert level.verdict == "holds"


def test_losses_that_are_not_told_from_none_leave_one_head_with_position() -> None:
    """The second largest of many losses is above 0 by chance alone."""
    found = results(TOLD | rope(positions=(0.5, 0.4)))

    def unsure(cell: CellResult) -> CellResult:
        position = HeadAblation.from_dict(cell.measures["position"]) if "position" in cell.measures else None
        if position is None:
            return cell
        low = np.where(position.drops > 0.45, position.drops, -0.1)
        return replace(cell, measures=cell.measures | {"position": replace(position, low=low).to_dict()})

    assert verdict("one-head-knows-position", found) == "fails"
    assert verdict("one-head-knows-position", changed(found, unsure)) == "holds"


@pytest.mark.parametrize("claim", [claim.id for claim in MEASURED])
def test_a_cell_without_the_measure_counts_nowhere(claim: str) -> None:
    whole = results(world(claim))
    bare = changed(
        whole, lambda cell: replace(cell, key=replace(cell.key, seed=cell.key.seed + 9), measures={}, watched=[])
    )
    found = entry(claim, Results([*whole.cells, *bare.cells]))
    assert [part.comparison for part in found.findings] == [part.comparison for part in entry(claim, whole).findings]
    assert found.verdict == "holds"
    assert verdict(claim, bare) == "undecided"


def test_the_lead_after_training_is_that_of_the_last_row() -> None:
    found = results(TOLD)

    def later(row: dict[str, Any]) -> Verdict:
        return verdict("margin-grows", changed(found, lambda cell: replace(cell, watched=[*cell.watched, row])))

    even = np.ones((LAYERS, HEADS)).tolist()
    assert later({"step": 100, "signal": found.of(DISTANCE, "rope")[0].watched[-1]["signal"]}) == "holds"
    assert later({"step": 100, "signal": even}) == "undecided"
    assert later({"step": 100}) == "undecided"


def test_dropout_against_itself_is_no_comparison() -> None:
    found = results(world("dropout-keeps-deposit"))
    same = changed(found, lambda cell: replace(cell, run=f"one-{cell.key.seed}"))
    seen = entry("dropout-keeps-deposit", same)
    assert seen.verdict == "undecided"
    assert "every model of this scale has dropout" in seen.evidence[0]
