"""The factor study: effects are paired differences at either end, and single effects are held against the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.papers.deposit import worlds
from tests.papers.deposit.worlds import ablated

from toeplens.lens import over_seeds
from toeplens.model import Protocol
from toeplens.papers.deposit.measured import (
    FactorRow,
    concentrated,
    factor_table,
    factor_wholes,
    kinds,
    left_over,
    strongest,
)
from toeplens.papers.deposit.spec import switches_of
from toeplens.studies import CellResult, Key, Results
from toeplens.training.presets import DISTANCE

SEEDS = (42, 43, 44)


def made(
    protocol: Protocol, label: str, seed: int, accuracy: float, drop: float = 0.0, task: str = DISTANCE
) -> CellResult:
    """A model with one head in layer 2 of 2 that is worth ``drop``; the others are worth nothing."""
    ablation = ablated([[0.0, 0.0], [0.0, drop]], [[accuracy] * 3, [accuracy, accuracy - drop, accuracy - drop]])
    return worlds.made(Key(protocol, task, label, seed), (accuracy,), ablation)


def diverged(protocol: Protocol, label: str, seed: int) -> CellResult:
    """Its heads may have been silenced all the same: what is found of NaN weights counts nowhere."""
    return replace(made(protocol, label, seed, 0.5, 0.4), status="diverged", result={"test_accuracy": None})


def row_of(rows: list[FactorRow], base: str, switch: str, end: Protocol, task: str = DISTANCE) -> FactorRow:
    (found,) = (r for r in rows if (r.task, r.base, r.switch, r.end) == (task, base, switch, end))
    return found


RELEASED, MASKED = (0.18, 0.25, 0.20), (0.55, 0.85, 0.70)
PAPER, UNMASKED = (0.90, 0.95, 0.88), (0.30, 0.20, 0.25)


@pytest.fixture
def results() -> Results:
    cells = []
    for seed, released, masked, paper, unmasked in zip(SEEDS, RELEASED, MASKED, PAPER, UNMASKED, strict=True):
        cells += [made("released", "nope", seed, released), made("released", "nope/mask", seed, masked, 0.4)]
        cells += [made("paper", "nope", seed, paper, 0.6), made("paper", "nope/mask", seed, unmasked)]
    return Results(cells)


def test_an_effect_is_the_papers_setting_less_the_programs_at_either_end(results: Results) -> None:
    rows = factor_table(results, ("paper", "released"))
    ends: tuple[tuple[Protocol, tuple[float, ...], tuple[float, ...]], ...]
    ends = (("released", MASKED, RELEASED), ("paper", PAPER, UNMASKED))
    for end, after, before in ends:
        row = row_of(rows, "nope", "mask", end)
        assert row.values["accuracy"] == pytest.approx(dict(zip(SEEDS, np.subtract(after, before), strict=True)))
        assert row.effect("accuracy") == over_seeds(np.array(list(row.values["accuracy"].values())))
        skill = (np.array(after) - 0.2) / 0.8 - (np.array(before) - 0.2) / 0.8
        np.testing.assert_allclose(list(row.values["skill"].values()), skill)


def test_the_deposits_effect_has_its_kinds_before_and_after(results: Results) -> None:
    row = row_of(factor_table(results, ("paper", "released")), "nope", "mask", "released")
    assert row.values["drop"] == pytest.approx(dict.fromkeys(SEEDS, 0.4))
    assert row.before == {"no-skill": 3}, "what is reached there is the guess from the length"
    assert row.after == {"single-head": 3}
    assert row.values["peak"] == {}, "a model without skill has no share of it"


def test_a_model_without_skill_has_no_share_of_it() -> None:
    able, unable = made("released", "nope", 42, 0.5, 0.3), made("released", "nope", 43, 0.12, 0.02)
    found = concentrated(able)
    assert found is not None
    assert (found[0], found[1].head) == (1, 1)
    assert concentrated(unable) is None
    assert concentrated(diverged("released", "nope", 44)) is None
    assert kinds([able, unable, diverged("released", "nope", 44)]) == {"single-head": 1, "no-skill": 1}


def test_a_switch_that_is_absent_is_no_part_of_the_sum() -> None:
    """At the paper's end padding cannot be switched, and the other switches add up without it."""
    ends = [made("released", "nope", 42, 0.2), made("paper", "nope", 42, 0.9)]
    switches = [row.switch for row in factor_table(Results([]), ("paper",)) if row.base == "nope" and not row.absent]
    assert "padding" not in switches
    changed = [made("paper", f"nope/{switch}", 42, 0.9 - 0.01 * n) for n, switch in enumerate(switches, 1)]
    rows = [row for row in factor_table(Results([*ends, *changed]), ("paper", "released")) if row.base == "nope"]
    at_the_paper = [row for row in rows if (row.task, row.end) == (DISTANCE, "paper")]
    assert "padding" in [row.switch for row in at_the_paper]
    (whole,) = (
        whole
        for whole in factor_wholes(Results(ends), ("paper", "released"))
        if (whole.task, whole.base) == (DISTANCE, "nope")
    )
    total, left = left_over(whole, at_the_paper, "accuracy")
    wanted = 0.01 * sum(range(1, len(switches) + 1))
    assert total == pytest.approx({42: wanted})
    assert left == pytest.approx({42: 0.7 - wanted})


@pytest.mark.parametrize("together", [0.0, 0.25])
def test_what_single_effects_leave_is_what_switches_do_together(together: float) -> None:
    """An additive model leaves nothing; what is planted beside it comes back, whatever the seed."""
    switches = switches_of("nope")
    size = {switch: 0.02 * (index + 1) for index, switch in enumerate(switches)}
    cells = []
    for seed in SEEDS:
        start = 0.2 + 0.01 * (seed - 42)
        cells += [made("released", "nope", seed, start)]
        cells += [made("released", f"nope/{switch}", seed, start + size[switch]) for switch in switches]
        cells += [made("paper", "nope", seed, start + sum(size.values()) + together)]
    results = Results(cells)
    rows = [r for r in factor_table(results, ("paper", "released")) if (r.base, r.end) == ("nope", "released")]
    rows = [row for row in rows if row.task == DISTANCE]
    (whole,) = (w for w in factor_wholes(results, ("paper", "released")) if (w.task, w.base) == (DISTANCE, "nope"))
    total, left = left_over(whole, rows, "accuracy")
    assert total == pytest.approx(dict.fromkeys(SEEDS, sum(size.values())))
    assert left == pytest.approx(dict.fromkeys(SEEDS, together), abs=1e-12)
    most = strongest(rows, "accuracy")
    assert most is not None
    assert most.switch == switches[-1]
