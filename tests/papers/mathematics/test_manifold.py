"""C.4's curve: tables as they are drawn, and verdicts that follow the records of tables that were learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from toeplens.papers.mathematics.c4 import manifold as module
from toeplens.papers.mathematics.c4.manifold import CLAIMS, ENCODINGS, curve, manifold
from toeplens.studies import combine

WIDTHS, LENGTHS = (16, 64), (24, 128)


@pytest.fixture(scope="module")
def record() -> Iterator[dict[str, Any]]:
    """Of smaller tables than the record's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WIDTHS", WIDTHS)
        patch.setattr(module, "LENGTHS", LENGTHS)
        yield manifold(0)


def models(trained: float, untrained: float = 1.25, local: float = 3.0) -> list[dict[str, Any]]:
    """The heads' records of five seeds that differ a little."""

    def state(error: float) -> dict[str, Any]:
        return {"curve": {"neighbour_error": error, "local_rank": local, "rank": 18}}

    nudges = np.linspace(-0.01, 0.01, 5)
    return [{"learned trained": state(trained + d), "learned untrained": state(untrained - d)} for d in nudges]


def verdicts(tables: dict[str, Any] | None, heads: list[dict[str, Any]]) -> list[str]:
    runs = [] if tables is None else [tables]
    return [combine(claim.check({"manifold": runs, "heads": heads})) for claim in CLAIMS]


def doctored(record: dict[str, Any], encoding: str, **numbers: float) -> dict[str, Any]:
    return {"tables": [row | numbers if row["encoding"] == encoding else row for row in record["tables"]]}


def test_every_table_is_asked(record: dict[str, Any]) -> None:
    rows = record["tables"]
    assert len(rows) == len(ENCODINGS) * len(WIDTHS) * len(LENGTHS)
    assert manifold(0) == record != manifold(1)
    for row in rows:
        assert row["local_rank"] <= min(7, row["rank"])
        drawn = 1 if row["encoding"] == "sinusoidal" else 0
        assert (row["neighbour_error"] < 0.5) == (row["local_rank"] <= 3.5) == drawn


def test_a_line_is_told_by_neighbours_and_is_its_own_subspace() -> None:
    found = curve(np.arange(20.0)[:, None] * np.array([1.0, -2.0, 0.5]))
    assert found == {"neighbour_error": pytest.approx(0, abs=1e-14), "local_rank": 1.0, "rank": 1}


def test_verdicts_follow_what_was_learned(record: dict[str, Any]) -> None:
    """Random vectors are no curve, which a supporting part says: so it holds in part at best."""
    assert verdicts(record, models(0.3)) == ["holds in part", "holds"]
    assert verdicts(record, models(0.7)) == ["fails", "holds"]
    assert verdicts(record, models(1.1)) == ["fails", "fails"]
    assert verdicts(record, models(0.5)) == ["undecided", "holds"]
    assert verdicts(record, models(0.3, untrained=0.2)) == ["holds in part", "fails"]
    assert verdicts(record, models(0.7)[:3]) == ["leans to fail", "leans to hold"]
    assert verdicts(record, []) == verdicts(None, []) == ["undecided", "undecided"]


def test_verdicts_follow_the_tables(record: dict[str, Any]) -> None:
    curves = doctored(record, "random-fixed", neighbour_error=0.3)
    assert verdicts(curves, models(0.3)) == ["holds", "fails"]
    assert verdicts(doctored(record, "sinusoidal", neighbour_error=0.6), models(0.3)) == ["fails", "fails"]
    assert verdicts(doctored(record, "sinusoidal", local_rank=4.0), models(0.3)) == ["fails", "fails"]
    flat = doctored(record, "sinusoidal", local_rank=3.0, rank=3)
    assert verdicts(flat, models(0.3)) == ["fails", "fails"]
    assert verdicts(doctored(record, "learned", neighbour_error=0.9), models(0.7)) == ["fails", "fails"]
