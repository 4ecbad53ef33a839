"""Claims are asked of models of any size: one of one layer or one head is judged without a fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.papers.deposit.insides import ablation
from tests.papers.deposit.test_claims import BY_ID, entry
from tests.papers.deposit.told import SKILLED, TOLD
from tests.papers.deposit.worlds import SPREAD, changed, distance, results

from toeplens.engine.measures import Seed
from toeplens.lens import PositionalDrift, SeedStrength
from toeplens.studies import CellResult, Results


def small(content: Any, layers: int, heads: int) -> np.ndarray:
    return np.array(content, dtype=float)[:layers, :heads]


def small_seed(content: dict[str, Any], layers: int, heads: int) -> dict[str, Any]:
    whole = Seed.from_dict(content)

    def cut(of: Any, *size: slice) -> Any:
        return replace(of, **{name: getattr(of, name)[size] for name in type(of).__dataclass_fields__})

    one, both = (slice(layers),), (slice(layers), slice(heads))
    levels = {
        name: replace(level, heads=cut(level.heads, *both), layers=cut(level.layers, *one), mean=level.mean[both])
        for name, level in whole.strength.levels.items()
    }
    drift = PositionalDrift(whole.drift.effect[both], whole.drift.drift[both], 1.0, 2.0, 16)
    return {"strength": SeedStrength((8, 16), 16, 1.0, levels).to_dict(), "drift": drift.to_dict()}


def small_measures(found: dict[str, Any], layers: int, heads: int) -> dict[str, Any]:
    """What is measured of every layer and head; there is no stream after layer 2."""
    if "seed" not in found:
        return found

    def cut(content: Any) -> Any:
        return small(content, layers, heads).tolist()

    use = {name: cut(table) for name, table in found["frequency"].items() if name not in ("layers", "massive")}
    massive = [cut(table) for table in found["frequency"]["massive"]]
    return {name: record for name, record in found.items() if name != "representation"} | {
        "position": ablation(cut(found["position"]["drops"]), found["position"]["baseline"]).to_dict(),
        "contraction": {name: cut(table) for name, table in found["contraction"].items()},
        "frequency": use | {"massive": massive, "layers": list(range(layers))},
        "seed": small_seed(found["seed"], layers, heads),
    }


def sized(layers: int, heads: int) -> Results:
    def cut(cell: CellResult) -> CellResult:
        assert cell.ablation is not None
        drops = small(cell.ablation.drops, layers, heads)
        return replace(
            cell,
            ablation=ablation(drops, cell.accuracy),
            by_loss=ablation(drops, 0.5, "loss"),
            measures=small_measures(cell.measures, layers, heads),
            watched=[row | {"signal": small(row["signal"], layers, heads).tolist()} for row in cell.watched],
        )

    return changed(results(TOLD | distance(**SKILLED)), cut)


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (1, 3), (2, 1), (2, 2)])
def test_a_small_model_is_judged_without_a_fault(layers: int, heads: int) -> None:
    found = sized(layers, heads)
    verdicts = {}
    for claim in BY_ID.values():
        seen = entry(claim, found)
        assert seen.evidence
        verdicts[claim.id] = seen.verdict
    if heads == 1:
        assert verdicts["early-leader-deposits"] == "undecided", "one head leads nobody"
        assert verdicts["margin-grows"] == "undecided"
    if layers == 1:
        open_ = ("deposit-shallow", "margin-grows", "additive-directions-displaced", "few-bands-trained")
        assert {verdicts[name] for name in open_} <= {"undecided", "holds"}
    assert verdicts["rope-suppresses-implicit-position"] == "undecided", "there is no layer after the second"


def test_the_worlds_first_layer_is_what_is_left() -> None:
    (cell, *_) = [each for each in sized(1, 1).cells if each.key.label == "nope"]
    assert cell.ablation is not None
    assert cell.ablation.drops.tolist() == [[SPREAD[0]]]
