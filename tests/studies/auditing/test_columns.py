"""Columns made of a head's other numbers: pairs that are switched off, the strongest one; and whose measures are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.sources.huggingface.models import GROUPED, SIZES, tiny

from toeplens.studies.auditing import Audit, audit
from toeplens.studies.auditing.audit import csv_of

TOKENS = torch.randint(3, 31, (3, 20), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def found() -> Audit:
    """Of a model in whose layer 2 the queries of head 3 have nothing in pairs 1 and 4, counted from 1."""
    model: Any = copy.deepcopy(tiny("LlamaForCausalLM", **GROUPED))
    width = model.config.hidden_size // model.config.num_attention_heads
    with torch.no_grad():
        for pair in (0, 3):
            for row in (pair, pair + width // 2):
                model.model.layers[1].self_attn.q_proj.weight[2 * width + row] = 0
    return audit(model, TOKENS, effects="none")


def test_dead_pairs_are_counted_head_by_head(found: Audit) -> None:
    """The layer has none: its other heads use these pairs."""
    assert found.layers[1].dead == ()
    assert {(head.layer, head.head): head.dead for head in found.heads if head.dead} == {(1, 2): 2}
    assert found.table()["dead"] == [head.dead for head in found.heads]
    assert b'"dead"' in csv_of(found).splitlines()[0]


def test_the_strongest_pair_has_the_largest_share_of_the_norms(found: Audit) -> None:
    for head in found.heads:
        assert head.norm_top == max(head.norm_use[1:])
        assert head.norm_top == pytest.approx(max(head.norm_use), abs=1e-9), "all dimensions are turned here"
    model = tiny("BertModel", **SIZES)
    unturned = audit(model, TOKENS, effects="none")
    assert {(head.dead, head.norm_top) for head in unturned.heads} == {(None, None)}
