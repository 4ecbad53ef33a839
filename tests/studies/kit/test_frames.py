"""Frames: tidy tables of every kind of results, with the record's numbers and the columns that are documented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from toeplens.ground import InputError
from toeplens.papers.positional_symbolic import pretrained
from toeplens.studies.auditing import open_audit
from toeplens.studies.decomposition import LayerStructure, Parts, RunStructure
from toeplens.studies.kit.frames import Frames, schema, stacked, table
from toeplens.studies.probing import ProbeRecord
from toeplens.studies.probing.probe import ItemRecord

ROOT = Path(__file__).parents[3]
DOCUMENTED = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "how-to" / "export.md").read_text("utf-8")))


def layer(number: int, parts: bool) -> LayerStructure:
    rng = np.random.default_rng(np.random.Philox(number))
    heads, offsets, shares = 2, 3, {name: rng.random((2, 3)) for name in ("logits", "softmax")}
    found = Parts(
        ("a", "b", "c"), shares, shares, ["positional", "mixed"], shares, rng.random((2, 3)), rng.random(2), 0.0
    )
    kernel, ends = rng.random((heads, offsets)), rng.random(heads)
    rest = (ends, ends, 0.1, np.arange(4.0), rng.random((2, 4)), np.zeros((1, 2, 2)), [0])
    return LayerStructure(number, found if parts else None, "", np.arange(offsets), kernel, *rest)


def probed() -> ProbeRecord:
    common = {"behaviour": "needle", "length": 64, "nats": 1.0, "right": 1.0, "changed_nats": 3.0, "changed_right": 0.0}
    items = [ItemRecord(item=at, depth=depth, **common) for at, depth in enumerate((0.0, 1.0, 1.0))]
    return ProbeRecord({}, ("a change",), tuple(items), ())


def test_a_table_is_made_when_it_is_read_and_an_unknown_name_lists_the_known() -> None:
    made: list[str] = []

    def maker(name: str) -> Any:
        return lambda: made.append(name) or pa.table({"a": [1]})

    frames = Frames({"cells": maker("cells"), "heads": maker("heads")})
    assert (list(frames), len(frames), "heads" in frames, "head" in frames) == (["cells", "heads"], 2, True, False)
    assert made == []
    assert frames["heads"].num_rows == 1
    assert made == ["heads"]
    with pytest.raises(InputError, match=r"^frames must be one of cells, heads, got 'head'; did you mean 'heads'"):
        frames["head"]


def test_what_is_not_known_is_null() -> None:
    rows = table(schema("x n:count t:text"), [{"x": float("nan"), "n": 1, "more": 2}, {"t": "a"}])
    assert rows.to_pydict() == {"x": [None, None], "n": [1, None], "t": [None, "a"]}
    assert stacked("of", {"a": rows, "b": rows})["of"].to_pylist() == ["a", "a", "b", "b"]


RESULTS = {
    "audit": lambda: open_audit(ROOT / "results" / "audit-smollm2"),
    "pretrained": lambda: pretrained.gather(ROOT / "results" / "smollm2"),
    "probe": probed,
    "decomposition": lambda: RunStructure("r", "rope", "paper", "t", "mean", 1, 0.5, [layer(0, True), layer(1, False)]),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_every_column_is_documented(kind: str) -> None:
    frames = RESULTS[kind]().frames()
    columns = {name for rows, each in frames.items() if rows != "heads" for name in each.column_names}
    assert {re.sub("_(low|high)$", "", name) for name in columns} | set(frames) <= DOCUMENTED


def test_an_audits_frequencies_and_distances_are_those_of_its_heads() -> None:
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


def test_a_probes_summaries_are_rows() -> None:
    frames = probed().frames()
    rows = frames["behaviours"].to_pylist()
    assert [(row["length"], row["depth"], row["count"]) for row in rows] == [
        (None, None, 3),
        (64, 0.0, 1),
        (64, 1.0, 2),
    ]
    assert (rows[0]["nats"], rows[0]["more_nats"], rows[0]["changed_right"]) == (1.0, 2.0, 0.0)
    assert (frames["items"].num_rows, frames["heads"].num_rows) == (3, 0)


def test_a_decompositions_shares_are_rows_also_without_parts() -> None:
    structure = RESULTS["decomposition"]()
    frames, parts = structure.frames(), structure.layers[0].parts
    assert frames["parts"]["logits"].to_pylist() == parts.shares["logits"].ravel().tolist()
    assert frames["heads"]["type"].to_pylist() == ["positional", "mixed", None, None]
    assert frames["frequencies"]["pair"].to_pylist() == [None, 0, 1] * 2
    assert frames["offsets"]["kernel"].null_count == 6
    assert frames["symbol"].num_rows == 16
