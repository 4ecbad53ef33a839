"""The ladder changes one thing at a time, and its claims and figures read the rung that they name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from toeplens.lens import HeadAblation
from toeplens.papers.deposit import SCALES, grid
from toeplens.papers.deposit.claims.heads import SWEEP as CLAIMS
from toeplens.papers.deposit.labels import BASES, RUNGS
from toeplens.studies import CellResult, Key, Results, judge
from toeplens.training.presets import DISTANCE, PROTOCOLS, task_sizes

DESK = SCALES["desk"]
CHANGED = {
    "tokens": {"model.max_len", "task_options.length", "task_options.max_between"},
    "heads": {"model.num_heads"},
    "layers": {"model.num_layers"},
    "width": {"model.d_model", "model.d_ff"},
    "learning rate": {"lr", "betas", "epochs", "warmup", "plateau.patience", "schedule", "average", "plateau"},
    "regularisation": {"model.dropout", "weight_decay"},
    "training": {"epochs", "warmup", "plateau.beyond"},
}
WORDS = {"model.vocab_size", "model.num_classes", "task_options.vocab_size"}  # of the longest texts


def flat(content: dict[str, Any], before: str = "") -> dict[str, Any]:
    found = {}
    for name, value in content.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_changes_its_axis_and_nothing_else(rung: str) -> None:
    cells = {
        (cell.key.protocol, cell.key.label): cell.job.spec.model_dump(mode="json")
        for cell in grid("desk", PROTOCOLS, 1, ["ladder"])
    }
    for protocol, bases in BASES.items():
        for base in bases:
            plain, changed = (flat(cells[protocol, label]) for label in (base, f"{base}/{rung}"))
            names = {name for name in plain.keys() | changed.keys() if plain.get(name) != changed.get(name)}
            gone = {name for name in names if name.startswith("plateau.") and changed.get("plateau", 0) is None}
            allowed = CHANGED[RUNGS[rung].axis] | (WORDS if rung == "tokens-96" else set())
            rotary = {"model.encoding_options.rotary_dim"}  # of MLA: the dimensions of a head
            assert names - gone - rotary, "it changes something"
            assert names - gone - rotary <= allowed


def test_the_warm_up_of_longer_training_has_as_many_steps() -> None:
    steps = {
        cell.key.label: int(cell.job.spec.warmup * cell.job.spec.total_steps)
        for cell in grid("desk", ["paper"], 1, ["ladder"])
    }
    assert steps["rope"] == steps["rope/longer"] == steps["rope/rate-paper"] > 0


def test_texts_of_another_length_keep_the_room_at_their_sides() -> None:
    sizes = task_sizes(DESK.tasks, 64)[DISTANCE]
    before = DESK.tasks[DISTANCE]
    assert sizes.paper == {"length": 64}
    assert sizes.released["max_side"] == before.released["max_side"]
    room = [size.released["length"] - size.released["max_between"] for size in (sizes, before)]
    assert room[0] == room[1]
    assert (sizes.train_examples, sizes.epochs) == (before.train_examples, before.epochs)


# ---- claims ----------------------------------------------------------------------------------------------------------


def ablation(costs: list[float], unit: float) -> HeadAblation:
    """One layer of heads with these costs, of a model that is right in 9 of 10; the costs are sure."""
    drops = np.array([costs]) * unit
    return HeadAblation(drops, drops * 0.9, drops * 1.1, 0.9, np.full((1, len(costs) + 1), np.nan), 100, 0.1)


def cell(label: str, seed: int, *costs: float, early: tuple[float, ...] = (), plateau: int = 6) -> CellResult:
    """Costs at the end as shares of the skill, and earlier (step 5), when it has just learned."""
    by_loss = replace(ablation([4 * cost for cost in costs], 1.0), metric="loss", baseline=0.3)
    row: dict[str, Any] = {
        "step": 5,
        "seconds": 1.0,
        "accuracy": 0.9,
        "loss": 0.3,
        **{name: [[0.0] * len(costs)] for name in ("drops", "signal", "exponent")},
        "events": ["able"],
    }
    if early:
        row["ablation"] = ablation(list(early), 0.8).to_dict()
    return CellResult(
        key=Key("paper", DISTANCE, label, seed),
        run=f"{label}-{seed}",
        status="complete",
        chance=0.1,
        length_chance=0.1,
        parameters=1,
        epochs=[{"epoch": 1, "step": 9, "train_accuracy": 0.9, "test_accuracy": 0.9}],
        result={"test_accuracy": 0.9, "seconds": 1.0},
        ablation=ablation(list(costs), 0.8),
        by_loss=by_loss,
        watched=[
            row,
            row | {"step": plateau, "events": ["plateau"], "ablation": None},
            row | {"step": 48, "events": ["eight times"], "ablation": None},
        ]
        if early
        else [],
    )


def ledger(**costs: tuple[float, ...]) -> dict[str, str]:
    """Verdicts where RoPE's heads cost this on these rungs, in five seeds; "_" stands for "-"."""
    cells = []
    for name, values in costs.items():
        label = "/".join(["rope", *([] if name == "plain" else [name.replace("_", "-")])])
        for seed in range(5):
            cells.append(cell(label, seed, *(value + 0.001 * seed for value in values)))
    return {entry.claim.id: entry.verdict for entry in judge(CLAIMS, Results(cells), ["paper"])}


@pytest.mark.parametrize(
    ("claim", "rungs"),
    [
        ("ladder-length", ("tokens_96", "tokens_24")),
        ("ladder-heads", ("heads_4", "plain")),
        ("ladder-layers", ("layers_2", "plain")),
        ("ladder-rate", ("rate_paper", "plain")),
    ],
)
def test_a_claim_about_the_largest_cost_reads_its_two_rungs(claim: str, rungs: tuple[str, str]) -> None:
    more, less = rungs
    assert ledger(**{more: (0.6, 0.1), less: (0.2, 0.1)})[claim] == "holds"
    assert ledger(**{more: (0.2, 0.1), less: (0.6, 0.1)})[claim] == "fails"
    assert ledger(**{more: (0.25, 0.1), less: (0.2, 0.1)})[claim] == "fails", "less than a tenth more"
    assert ledger(**{more: (0.6, 0.1)})[claim] == "undecided"


def test_claims_about_spreading_read_the_effective_heads() -> None:
    one, four = (0.5, 0.01, 0.01, 0.01), (0.2, 0.2, 0.2, 0.2)
    assert ledger(drop=four, plain=one)["ladder-dropout-spreads"] == "holds"
    assert ledger(drop=one, plain=four)["ladder-dropout-spreads"] == "fails"
    assert ledger(decay=one, plain=four)["ladder-decay-gathers"] == "holds"
    assert ledger(decay=four, plain=one)["ladder-decay-gathers"] == "fails"


@pytest.mark.parametrize(("early", "late", "expected"), [(0.7, 0.1, "holds"), (0.1, 0.1, "fails")])
def test_unfinished_learning_is_the_first_look_against_the_last(early: float, late: float, expected: str) -> None:
    cells = [cell("rope/longer", seed, late + 0.001 * seed, early=(early + 0.002 * seed,)) for seed in range(5)]
    entries = {entry.claim.id: entry for entry in judge(CLAIMS, Results(cells), ["paper"])}
    assert entries["ladder-unfinished"].verdict == expected
    for seed in range(5, 8):
        ended = cell("rope/longer", seed, late, early=(early,))  # before eight times its plateau
        cells.append(replace(ended, watched=ended.watched[:1]))
    (entry,) = (each for each in judge(CLAIMS, Results(cells), ["paper"]) if each.claim.id == "ladder-unfinished")
    assert entry.verdict == expected
    assert "(3 of 8 models " in entry.evidence[0]


def test_a_model_that_is_right_only_after_its_plateau_says_nothing_of_unfinished_learning() -> None:
    late = [cell("rope/longer", seed, 0.1, early=(0.7,), plateau=5 - seed % 2) for seed in range(5)]
    (entry,) = (each for each in judge(CLAIMS, Results(late), ["paper"]) if each.claim.id == "ladder-unfinished")
    assert entry.verdict == "undecided"
    assert "90% accuracy only after the plateau" in entry.evidence[0]
