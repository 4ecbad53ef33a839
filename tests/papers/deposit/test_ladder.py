"""The ladder changes one thing at a time, and its claims and figures read the rung that they name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.papers.deposit.worlds import Layers, Model, changed, distance, results

from toeplens.papers.deposit import claims_of, grid
from toeplens.papers.deposit.spec import BASES, RUNGS
from toeplens.studies import Entry, Results, judge
from toeplens.training.presets import PROTOCOLS

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


# ---- the claim about unfinished learning; tests/papers/test_records.py has the evidence of the others ----------------

ONE, FEW = Model(0.9).single(0).drops, Model(0.9).drops


def unfinished(found: Results) -> Entry:
    return next(each for each in judge(claims_of(["ladder"]), found, ["paper"]) if each.claim.id == "ladder-unfinished")


@pytest.mark.parametrize(("early", "expected"), [(ONE, "holds"), (FEW, "fails")])
def test_unfinished_learning_is_the_first_look_against_the_last(early: Layers, expected: str) -> None:
    model = Model(0.9, looks=(("able", early), ("plateau", early), ("eight times", FEW)))
    found = results(distance(rope__longer=model))
    assert unfinished(found).verdict == expected
    ended = results(distance(rope__longer=replace(model, looks=model.looks[:1])), seeds=3)  # before eight times
    more = changed(ended, lambda cell: replace(cell, key=replace(cell.key, seed=cell.key.seed + 5)))
    seen = unfinished(Results([*found.cells, *more.cells]))
    assert seen.verdict == expected
    assert "(3 of 8 models " in seen.evidence[0]


def test_a_model_that_is_right_only_after_its_plateau_says_nothing_of_unfinished_learning() -> None:
    late = Model(0.9, looks=(("plateau", ONE), ("able", ONE), ("eight times", FEW)))
    seen = unfinished(results(distance(rope__longer=late)))
    assert seen.verdict == "undecided"
    assert "90% accuracy only after the plateau" in seen.evidence[0]
