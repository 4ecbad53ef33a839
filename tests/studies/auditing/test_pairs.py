"""Pairs that a model has switched off are in the record of their layer, and in nothing that is measured."""

from __future__ import annotations

import json

import pytest
import torch

from toeplens.studies.auditing import Audit, audit

transformers = pytest.importorskip("transformers")


def test_pairs_that_are_switched_off_are_recorded() -> None:
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        attention = model.model.layers[0].self_attn
        for layer in (attention.q_proj, attention.k_proj):
            layer.weight.view(4, 8, 32)[:, [0, 4]] = 0
    found = audit(model, torch.randint(4, 31, (2, 12)), effects="none")
    first, second = found.layers
    assert (first.dead, first.tabled, second.dead, second.tabled) == ((0,), (0,), (), ())
    assert first.position == "rotation of 4 pairs, 8 of 8 dimensions (half), 1 of the pairs switched off"
    assert first.frequencies == pytest.approx([1, 0.1, 0.01, 0.001], abs=1e-5)
    assert first.unknown is None
    for head in found.of(first):
        assert head.norm_use[1] == 0
        assert head.variance_use[1] == pytest.approx(0, abs=1e-12)
        assert sum(head.norm_use) == pytest.approx(1)
    assert Audit.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    old = found.to_dict()
    for layer in old["layers"]:
        del layer["dead"], layer["tabled"]
    assert Audit.from_dict(old).layers[0].dead == ()
