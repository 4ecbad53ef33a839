"""The ladder changes one thing at a time, and its claims and figures read the rung that they name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.papers.deposit.synthetic_studies import Layers, SyntheticModel, changed_cells, results, task1_models

from toeplens.papers.deposit import SCALES, claims_of, grid
from toeplens.papers.deposit.spec import SCALE_VARIANTS, SWEEP_BASES
from toeplens.studies import LedgerEntry, Results, judge
from toeplens.training.presets import PROTOCOLS

CHANGED_FIELDS = {
    "tokens": {"model.max_len", "task_options.length", "task_options.max_between"},
    "largest distance": {"task_options.max_distance"},
    "length and largest distance": {"model.max_len", "task_options.length", "task_options.max_distance"},
    "heads": {"model.num_heads"},
    "layers": {"model.num_layers"},
    "width": {"model.d_model", "model.d_ff"},
    "learning rate": {"lr", "betas", "epochs", "warmup", "plateau.patience", "schedule", "average", "plateau"},
    "regularisation": {"model.dropout", "weight_decay"},
    "training": {"epochs", "warmup", "plateau.beyond"},
}
WORDS = {"model.vocab_size", "model.num_classes", "task_options.vocab_size"}  # of the longest texts


def changed_fields(content: dict[str, Any], before: str = "") -> dict[str, Any]:
    result = {}
    for name, value in content.items():
        result |= changed_fields(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return result


@pytest.mark.parametrize("rung", SCALE_VARIANTS)
def test_a_scale_variant_changes_only_its_axis(rung: str) -> None:
    scale = "desk" if rung in SCALES["desk"].scale_variants else "full"
    cells = {
        (cell.key.protocol, cell.key.label): cell.job.spec.model_dump(mode="json")
        for cell in grid(scale, PROTOCOLS, 1, ["ladder"])
    }
    for protocol, bases in SWEEP_BASES.items():
        for base in bases if protocol == "paper" or not SCALE_VARIANTS[rung].distance else ():
            plain, changed = (changed_fields(cells[protocol, label]) for label in (base, f"{base}/{rung}"))
            names = {name for name in plain.keys() | changed.keys() if plain.get(name) != changed.get(name)}
            gone = {name for name in names if name.startswith("plateau.") and changed.get("plateau", 0) is None}
            allowed = CHANGED_FIELDS[SCALE_VARIANTS[rung].axis] | (WORDS if rung == "tokens-96" else set())
            rotary = {"model.encoding_options.rotary_dim"}  # of MLA: the dimensions of a head
            assert names - gone - rotary, "it changes something"
            assert names - gone - rotary <= allowed


# ---- the claim about unfinished learning; tests/papers/test_records.py has the evidence of the others ----------------

ONE_HEAD, FEW_HEADS = SyntheticModel(0.9).single_head(0).drops, SyntheticModel(0.9).drops


def unfinished(found: Results) -> LedgerEntry:
    return next(each for each in judge(claims_of(["ladder"]), found, ["paper"]) if each.claim.id == "ladder-unfinished")


@pytest.mark.parametrize(("early", "expected"), [(ONE_HEAD, "holds"), (FEW_HEADS, "fails")])
def test_unfinished_learning_compares_the_first_probe_with_the_last(early: Layers, expected: str) -> None:
    model = SyntheticModel(0.9, looks=(("able", early), ("plateau", early), ("eight times", FEW_HEADS)))
    actual = results(task1_models(rope__longer=model))
    assert unfinished(actual).verdict == expected
    ended = results(task1_models(rope__longer=replace(model, looks=model.looks[:1])), seeds=3)  # before eight times
    more = changed_cells(ended, lambda cell: replace(cell, key=replace(cell.key, seed=cell.key.seed + 5)))
    rows = unfinished(Results([*actual.cells, *more.cells]))
    assert rows.verdict == expected
    assert "(3 of 8 models " in rows.evidence[0]


def test_models_skilled_only_after_the_plateau_are_excluded_from_unfinished_learning() -> None:
    late = SyntheticModel(0.9, looks=(("plateau", ONE_HEAD), ("able", ONE_HEAD), ("eight times", FEW_HEADS)))
    rows = unfinished(results(task1_models(rope__longer=late)))
    assert rows.verdict == "undecided"
    assert "90% accuracy only after the plateau" in rows.evidence[0]
