"""Frames: tidy tables of every kind of results, with the record's numbers and the columns that are documented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from toeplens.papers.positional_symbolic import pretrained
from toeplens.studies.auditing import open_audit
from toeplens.studies.decomposition import LayerShares, LayerStructure, RunStructure
from toeplens.studies.kit.frames import Frames, schema, stack_tables, table
from toeplens.studies.probing import ProbeRecord
from toeplens.studies.probing.probe import ItemRecord
from toeplens.utils import InputError

ROOT = Path(__file__).parents[3]
DOCUMENTED = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "how-to" / "export.md").read_text("utf-8")))


def layer_shares(number: int, parts: bool) -> LayerStructure:
    rng = np.random.default_rng(np.random.Philox(number))
    heads, offsets, shares = 2, 3, {name: rng.random((2, 3)) for name in ("logits", "softmax")}
    result = LayerShares(
        ("a", "b", "c"), shares, shares, ["positional", "mixed"], shares, rng.random((2, 3)), rng.random(2), 0.0
    )
    kernel, ends = rng.random((heads, offsets)), rng.random(heads)
    rest = (ends, ends, 0.1, np.arange(4.0), rng.random((2, 4)), np.zeros((1, 2, 2)), [0])
    return LayerStructure(number, result if parts else None, "", np.arange(offsets), kernel, *rest)


def probe_result() -> ProbeRecord:
    common = {"behaviour": "needle", "length": 64, "nats": 1.0, "right": 1.0, "changed_nats": 3.0, "changed_right": 0.0}
    items = [ItemRecord(item=at, depth=depth, **common) for at, depth in enumerate((0.0, 1.0, 1.0))]
    return ProbeRecord({}, ("a change",), tuple(items), ())


def test_tables_are_built_lazily_and_an_unknown_name_lists_the_known() -> None:
    built: list[str] = []

    def maker(name: str) -> Any:
        return lambda: built.append(name) or pa.table({"a": [1]})

    frames = Frames({"cells": maker("cells"), "heads": maker("heads")})
    assert (list(frames), len(frames), "heads" in frames, "head" in frames) == (["cells", "heads"], 2, True, False)
    assert built == []
    assert frames["heads"].num_rows == 1
    assert built == ["heads"]
    with pytest.raises(InputError, match=r"^frames must be one of cells, heads, got 'head'; did you mean 'heads'"):
        frames["head"]


def test_unknown_values_are_null() -> None:
    rows = table(schema("x n:count t:text"), [{"x": float("nan"), "n": 1, "more": 2}, {"t": "a"}])
    assert rows.to_pydict() == {"x": [None, None], "n": [1, None], "t": [None, "a"]}
    assert stack_tables("of", {"a": rows, "b": rows})["of"].to_pylist() == ["a", "a", "b", "b"]


RESULTS = {
    "audit": lambda: open_audit(ROOT / "results" / "audit-smollm2"),
    "pretrained": lambda: pretrained.gather(ROOT / "results" / "smollm2"),
    "probe": probe_result,
    "decomposition": lambda: RunStructure(
        "r", "rope", "paper", "t", "mean", 1, 0.5, [layer_shares(0, True), layer_shares(1, False)]
    ),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_every_column_is_documented(kind: str) -> None:
    frames = RESULTS[kind]().frames()
    columns = {name for rows, each in frames.items() if rows != "heads" for name in each.column_names}
    assert {re.sub("_(low|high)$", "", name) for name in columns} | set(frames) <= DOCUMENTED


def test_frequencies_and_distances_of_an_audit_match_its_heads() -> None:
    audit = open_audit(ROOT / "results" / "audit-smollm2")
    frames = audit.frames()
    assert frames["heads"] == audit.frame()
    head = audit.heads[13]
    rows = [row for row in frames["frequencies"].to_pylist() if (row["layer"], row["head"]) == (head.layer, head.head)]
    assert [row["norm"] for row in rows] == list(head.norm_use[1:])
    rows = [row for row in frames["distances"].to_pylist() if (row["layer"], row["head"]) == (head.layer, head.head)]
    assert [(row["nearest"], row["farthest"]) for row in rows[:4]] == [(0, 0), (1, 1), (2, 3), (4, 7)]
    assert [row["attention"] for row in rows] == list(head.profile)
    assert frames["layers"]["heads"].to_pylist() == [layer.heads for layer in audit.layers]


def test_summaries_of_a_probe_are_rows() -> None:
    frames = probe_result().frames()
    rows = frames["behaviours"].to_pylist()
    assert [(row["length"], row["depth"], row["count"]) for row in rows] == [
        (None, None, 3),
        (64, 0.0, 1),
        (64, 1.0, 2),
    ]
    assert (rows[0]["nats"], rows[0]["more_nats"], rows[0]["changed_right"]) == (1.0, 2.0, 0.0)
    assert (frames["items"].num_rows, frames["heads"].num_rows) == (3, 0)


def test_shares_of_a_decomposition_are_rows_also_without_terms() -> None:
    structure = RESULTS["decomposition"]()
    frames, parts = structure.frames(), structure.layers[0].parts
    assert frames["parts"]["logits"].to_pylist() == parts.shares["logits"].ravel().tolist()
    assert frames["heads"]["type"].to_pylist() == ["positional", "mixed", None, None]
    assert frames["frequencies"]["pair"].to_pylist() == [None, 0, 1] * 2
    assert frames["offsets"]["kernel"].null_count == 6
    assert frames["symbol"].num_rows == 16
