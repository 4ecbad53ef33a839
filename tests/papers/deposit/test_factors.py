"""The factor study: effects are paired differences at either end, and single effects are held against the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.papers.deposit import synthetic_studies
from tests.papers.deposit.synthetic_studies import ablation_from_drops

from toeplens.lens import mean_over_seeds
from toeplens.model import Protocol
from toeplens.papers.deposit.measures import (
    SwitchEffect,
    count_kinds,
    end_values,
    peak_layer,
    strongest_switch,
    sum_and_remainder,
    switch_effects,
)
from toeplens.papers.deposit.spec import switches_of
from toeplens.studies import CellKey, CellResult, Results
from toeplens.studies.kit.results import SeedValues
from toeplens.training.presets import DISTANCE

SEEDS = (42, 43, 44)


def make_cell(
    protocol: Protocol, label: str, seed: int, accuracy: float, drop: float = 0.0, task: str = DISTANCE
) -> CellResult:
    """A model with one head in layer 2 of 2 that is worth ``drop``; the others are worth nothing."""
    ablation = ablation_from_drops(
        [[0.0, 0.0], [0.0, drop]], [[accuracy] * 3, [accuracy, accuracy - drop, accuracy - drop]]
    )
    return synthetic_studies.model_from_curve(CellKey(protocol, task, label, seed), (accuracy,), ablation)


def diverged_cell(protocol: Protocol, label: str, seed: int) -> CellResult:
    """Its heads may have been silenced all the same: what is found of NaN weights counts nowhere."""
    return replace(make_cell(protocol, label, seed, 0.5, 0.4), status="diverged", result={"test_accuracy": None})


def row_of(rows: list[SwitchEffect], base: str, switch: str, end: Protocol, task: str = DISTANCE) -> SwitchEffect:
    (result,) = (r for r in rows if (r.task, r.base, r.switch, r.end) == (task, base, switch, end))
    return result


RELEASED, RELEASED_MASKED = (0.18, 0.25, 0.20), (0.55, 0.85, 0.70)
PAPER, PAPER_UNMASKED = (0.90, 0.95, 0.88), (0.30, 0.20, 0.25)


@pytest.fixture
def results() -> Results:
    cells = []
    for seed, released, masked, paper, unmasked in zip(
        SEEDS, RELEASED, RELEASED_MASKED, PAPER, PAPER_UNMASKED, strict=True
    ):
        cells += [make_cell("released", "nope", seed, released), make_cell("released", "nope/mask", seed, masked, 0.4)]
        cells += [make_cell("paper", "nope", seed, paper, 0.6), make_cell("paper", "nope/mask", seed, unmasked)]
    return Results(cells)


def test_an_effect_is_the_papers_setting_minus_the_released_codes(results: Results) -> None:
    rows = switch_effects(results, ("paper", "released"))
    ends: tuple[tuple[Protocol, tuple[float, ...], tuple[float, ...]], ...]
    ends = (("released", RELEASED_MASKED, RELEASED), ("paper", PAPER, PAPER_UNMASKED))
    for end, after, before in ends:
        row = row_of(rows, "nope", "mask", end)
        assert row.values["accuracy"] == pytest.approx(dict(zip(SEEDS, np.subtract(after, before), strict=True)))
        assert row.effect("accuracy") == mean_over_seeds(np.array(list(row.values["accuracy"].values())))
        skill = (np.array(after) - 0.2) / 0.8 - (np.array(before) - 0.2) / 0.8
        np.testing.assert_allclose(list(row.values["skill"].values()), skill)


def test_the_effect_on_the_deposit_states_both_kinds(results: Results) -> None:
    row = row_of(switch_effects(results, ("paper", "released")), "nope", "mask", "released")
    assert row.values["drop"] == pytest.approx(dict.fromkeys(SEEDS, 0.4))
    assert row.before == {"no-skill": 3}, "what is reached there is the guess from the length"
    assert row.after == {"single-head": 3}
    assert row.values["peak"] == {}, "a model without skill has no share of it"


def test_a_model_without_skill_has_no_share_of_it() -> None:
    able, unable = make_cell("released", "nope", 42, 0.5, 0.3), make_cell("released", "nope", 43, 0.12, 0.02)
    actual = peak_layer(able)
    assert actual is not None
    assert (actual[0], actual[1].head) == (1, 1)
    assert peak_layer(unable) is None
    assert peak_layer(diverged_cell("released", "nope", 44)) is None
    assert count_kinds([able, unable, diverged_cell("released", "nope", 44)]) == {"single-head": 1, "no-skill": 1}


def difference(results: Results) -> SeedValues:
    """NoPE's accuracy under the paper's protocol minus that under the released one."""
    ends = end_values(results, DISTANCE, "nope")
    return ends["paper"]["accuracy"] - ends["released"]["accuracy"]


def test_an_absent_switch_is_excluded_from_the_sum() -> None:
    """At the paper's end padding cannot be switched, and the other switches add up without it."""
    ends = [make_cell("released", "nope", 42, 0.2), make_cell("paper", "nope", 42, 0.9)]
    switches = [
        row.switch for row in switch_effects(Results([]), ("paper",)) if row.base == "nope" and not row.no_effect_reason
    ]
    assert "padding" not in switches
    changed = [make_cell("paper", f"nope/{switch}", 42, 0.9 - 0.01 * n) for n, switch in enumerate(switches, 1)]
    rows = [row for row in switch_effects(Results([*ends, *changed]), ("paper", "released")) if row.base == "nope"]
    at_the_paper = [row for row in rows if (row.task, row.end) == (DISTANCE, "paper")]
    assert "padding" in [row.switch for row in at_the_paper]
    total, left = sum_and_remainder(difference(Results(ends)), at_the_paper, "accuracy")
    expected = 0.01 * sum(range(1, len(switches) + 1))
    assert total == pytest.approx({42: expected})
    assert left == pytest.approx({42: 0.7 - expected})


@pytest.mark.parametrize("together", [0.0, 0.25])
def test_the_interaction_is_what_single_effects_leave(together: float) -> None:
    """An additive model leaves nothing; what is planted beside it comes back, whatever the seed."""
    switches = switches_of("nope")
    size = {switch: 0.02 * (index + 1) for index, switch in enumerate(switches)}
    cells = []
    for seed in SEEDS:
        start = 0.2 + 0.01 * (seed - 42)
        cells += [make_cell("released", "nope", seed, start)]
        cells += [make_cell("released", f"nope/{switch}", seed, start + size[switch]) for switch in switches]
        cells += [make_cell("paper", "nope", seed, start + sum(size.values()) + together)]
    results = Results(cells)
    rows = [r for r in switch_effects(results, ("paper", "released")) if (r.base, r.end) == ("nope", "released")]
    rows = [row for row in rows if row.task == DISTANCE]
    total, left = sum_and_remainder(difference(results), rows, "accuracy")
    assert total == pytest.approx(dict.fromkeys(SEEDS, sum(size.values())))
    assert left == pytest.approx(dict.fromkeys(SEEDS, together), abs=1e-12)
    most = strongest_switch(rows, "accuracy")
    assert most is not None
    assert most.switch == switches[-1]
