"""Which results a claim reads: what is waited for, what is left out, and what ties, gaps and odd sizes decide.

Which heads, variants and rungs it reads, the evidence of all records shows (tests/papers/test_records.py).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.papers.deposit.synthetic_studies import (
    HEADS,
    LAYERS,
    PAPER_MODELS,
    Layers,
    SyntheticModel,
    SyntheticStudy,
    changed_cells,
    results,
    rope_study,
    task1_models,
)
from tests.papers.deposit.test_claims import BY_ID, MEASURED, entry, parts, verdict, world

from toeplens.lens import HeadAblation
from toeplens.lens.kit.intervals import spearman
from toeplens.papers.deposit.claims import mechanism
from toeplens.studies import MIN_SEEDS, CellResult, Results, Verdict
from toeplens.studies.kit.claims import findings_of
from toeplens.training.presets import COUNT, DISTANCE


def without_models(told: SyntheticStudy, *places: tuple[str, str]) -> SyntheticStudy:
    return {place: model for place, model in told.items() if place not in places}


# ---- what is waited for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["task1-rope-best", "task1-rope-fastest", "task1-absolute-second"])
def test_the_random_encoding_counts_only_where_it_was_run(name: str) -> None:
    bare = without_models(PAPER_MODELS, (DISTANCE, "random"))
    assert verdict(name, results(bare)) == "holds"
    assert verdict(name, results(bare | task1_models(random=SyntheticModel(0.2, half=4.0)))) == "holds"
    assert verdict(name, results(bare | task1_models(random=SyntheticModel(0.99, half=0.5)))) == "fails"


@pytest.mark.parametrize(
    "name", ["task1-rope-best", "task1-rope-fastest", "task1-absolute-second", "task1-rope-stable"]
)
def test_an_unfinished_encoding_leaves_a_claim_undecided(name: str) -> None:
    assert verdict(name, results(without_models(PAPER_MODELS, (DISTANCE, "alibi")))) == "undecided"


@pytest.mark.parametrize("lost", ["rope", "nope"])
@pytest.mark.parametrize("task", [DISTANCE, COUNT])
def test_ties_with_the_best_wait_for_all_encodings(task: str, lost: str) -> None:
    assert verdict("mla-near-best", results(without_models(PAPER_MODELS, (task, lost)))) == "undecided"
    diverged = PAPER_MODELS | {(task, lost): replace(PAPER_MODELS[task, lost], status="diverged")}
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
def test_a_moved_deposit_lies_in_layer_2_or_3(drops: Layers, expected: Verdict) -> None:
    moved = {f"partial_{heads}": SyntheticModel(0.89, drops=drops) for heads in (1, 2, 3)}
    assert parts("partial-moves-deposit", results(PAPER_MODELS | task1_models(**moved)))[0].verdict == expected


# ---- how fast --------------------------------------------------------------------------------------------------------


def stopped_before_half(found: Results, label: str, epochs: float) -> Results:
    """The models of a label never learned half, and were stopped after so many epochs."""
    rows = [{"epoch": epochs, "step": 1, "train_accuracy": 0.3, "fit_accuracy": 0.3, "test_accuracy": 0.3}]
    return changed_cells(found, lambda cell: replace(cell, epochs=rows) if cell.key.label == label else cell)


@pytest.mark.parametrize("name", ["task1-rope-fastest", "task1-convergence-order", "contraction-speeds-learning"])
def test_speed_needs_train_accuracy_measured_in_evaluations(name: str) -> None:
    """Records from before that was done; what is seen while weights change, with dropout, is not what is learned."""

    def not_looked(cell: CellResult) -> CellResult:
        return replace(cell, epochs=[row | {"fit_accuracy": None} for row in cell.epochs])

    actual = entry(name, changed_cells(results(world(name)), not_looked))
    assert actual.verdict == "undecided"
    assert not any(part.has_data for part in actual.findings)


def test_an_early_stop_before_half_does_not_count_as_faster() -> None:
    actual = stopped_before_half(results(PAPER_MODELS), "nope", 0.5)
    finding = entry("task1-rope-fastest", actual)
    assert finding.verdict == "undecided"
    assert "never learned half" in finding.evidence[3]
    assert "longer training" in " ".join(finding.missing)
    assert verdict("task1-rope-fastest", stopped_before_half(results(PAPER_MODELS), "nope", 64.0)) == "holds", (
        "slower is slower"
    )
    assert (
        verdict("task1-rope-fastest", stopped_before_half(results(PAPER_MODELS, seeds=4), "nope", 0.5)) == "undecided"
    )


def test_spectra_are_compared_with_never_as_the_slowest() -> None:
    claim = "contraction-speeds-learning"
    assert verdict(claim, stopped_before_half(results(PAPER_MODELS), "relative", 0.1)) == "holds", (
        "its spectrum is the widest"
    )
    gone = results(PAPER_MODELS)
    for label in ("rope", "mla", "rope-absolute"):
        gone = stopped_before_half(gone, label, 0.1)
    assert verdict(claim, gone) == "undecided", "the narrowest are among the slowest"
    nobody = results(PAPER_MODELS)
    for label in nobody.labels(DISTANCE):
        nobody = stopped_before_half(nobody, label, 2.0)
    assert verdict(claim, nobody) == "undecided"


# ---- spectra ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["contraction-speeds-learning", "contraction-brings-deposit"])
def test_spectra_need_five_encodings(name: str) -> None:
    names = ("rope", "absolute", "mla", "relative", "alibi")
    study = {(DISTANCE, label): world(name)[DISTANCE, label] for label in names}
    (finding,) = findings_of(BY_ID[name].check, results(study))
    assert finding.holds is not None
    (finding,) = findings_of(BY_ID[name].check, results(without_models(study, (DISTANCE, "alibi"))))
    assert (finding.holds, finding.verdict) == (None, "undecided")
    gone = study | {(DISTANCE, "alibi"): replace(study[DISTANCE, "alibi"], status="diverged")}
    (finding,) = findings_of(BY_ID[name].check, results(gone))
    assert (finding.holds, finding.verdict) == (None, "undecided")


def test_the_permutation_p_value_matches_enumeration() -> None:
    """Against all orders of six encodings, one by one."""
    rng = np.random.default_rng(0)
    pairs = np.stack((np.arange(6.0), rng.permutation(6)))
    finding = mechanism._permutation_test("it", pairs, 1, MIN_SEEDS)
    actual = float(spearman(pairs))
    every = [float(spearman(np.stack((pairs[0], order)))) for order in itertools.permutations(pairs[1])]
    assert finding.holds == pytest.approx(np.mean([each >= actual - 1e-9 for each in every]), abs=0.02)
    turned = mechanism._permutation_test("it", pairs, -1, MIN_SEEDS)
    assert turned.holds == pytest.approx(np.mean([each <= actual + 1e-9 for each in every]), abs=0.02)


# ---- ties, and heads that do not matter ------------------------------------------------------------------------------


def test_heads_of_equal_signal_have_no_leader() -> None:
    assert verdict("early-leader-deposits", results(PAPER_MODELS)) == "holds"
    alike = rope_study(first=(1.0,) * LAYERS)
    assert verdict("early-leader-deposits", results(PAPER_MODELS | alike, spread=0.0)) == "undecided"


def test_negligible_head_effects_have_no_spread() -> None:
    silent = SyntheticModel(0.88, drops=((0.01, 0.0, 0.0, 0.0),) + ((0.0,) * 4,) * 3)
    spread, level = parts("mla-average-deposit", results(PAPER_MODELS | task1_models(mla=silent)))
    assert spread.verdict == "undecided"
    assert "(5 of 5 and 0 of 5 models" in spread.evidence
    assert "too small a total ablation effect" in spread.evidence
    assert level.verdict == "holds"


def test_insignificant_losses_leave_one_head_with_position() -> None:
    """The second largest of many losses is above 0 by chance alone."""
    actual = results(PAPER_MODELS | rope_study(positions=(0.5, 0.4)))

    def unsure(cell: CellResult) -> CellResult:
        position = HeadAblation.from_dict(cell.measures["position"]) if "position" in cell.measures else None
        if position is None:
            return cell
        low = np.where(position.drops > 0.45, position.drops, -0.1)
        return replace(cell, measures=cell.measures | {"position": replace(position, low=low).to_dict()})

    assert verdict("one-head-knows-position", actual) == "fails"
    assert verdict("one-head-knows-position", changed_cells(actual, unsure)) == "holds"


@pytest.mark.parametrize("claim", [claim.id for claim in MEASURED])
def test_cells_without_the_measure_are_excluded(claim: str) -> None:
    full = results(world(claim))
    bare = changed_cells(
        full, lambda cell: replace(cell, key=replace(cell.key, seed=cell.key.seed + 9), measures={}, probe_rows=[])
    )
    actual = entry(claim, Results([*full.cells, *bare.cells]))
    assert [part.comparison for part in actual.findings] == [part.comparison for part in entry(claim, full).findings]
    assert actual.verdict == "holds"
    assert verdict(claim, bare) == "undecided"


def test_the_final_lead_is_read_from_the_last_row() -> None:
    actual = results(PAPER_MODELS)

    def later(row: dict[str, Any]) -> Verdict:
        return verdict(
            "margin-grows", changed_cells(actual, lambda cell: replace(cell, probe_rows=[*cell.probe_rows, row]))
        )

    even = np.ones((LAYERS, HEADS)).tolist()
    assert later({"step": 100, "signal": actual.cells_of(DISTANCE, "rope")[0].probe_rows[-1]["signal"]}) == "holds"
    assert later({"step": 100, "signal": even}) == "undecided"
    assert later({"step": 100}) == "undecided"


def test_dropout_is_not_compared_with_itself() -> None:
    actual = results(world("dropout-keeps-deposit"))
    same = changed_cells(actual, lambda cell: replace(cell, run=f"one-{cell.key.seed}"))
    finding = entry("dropout-keeps-deposit", same)
    assert finding.verdict == "undecided"
    assert "every model of this scale has dropout" in finding.evidence[0]
