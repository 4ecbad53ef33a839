"""An audit of a changed model is that of the model whose weights were changed by hand, from the change on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.backends.hf.models import GROUPED, tiny

from toeplens.backends.hf import Change
from toeplens.encodings import FrequencyMask
from toeplens.studies.auditing import Audit, audit
from toeplens.studies.auditing.sentences import input_text
from toeplens.utils import InputError

TOKENS = torch.randint(3, 31, (3, 20), generator=torch.Generator().manual_seed(4))
ZERO = Change(layer=0, heads=(2,), output="zero")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("LlamaForCausalLM", **GROUPED)


def measured_values(found: Audit, layer: int) -> list[float]:
    heads = [head for head in found.heads if head.layer == layer]
    return [getattr(head, name) for head in heads for name in ("positional", "symbolic", "entropy", "centre", "first")]


def test_later_layers_read_the_changed_output(model: Any) -> None:
    edited = copy.deepcopy(model)
    width = edited.config.hidden_size // edited.config.num_attention_heads
    with torch.no_grad():
        edited.model.layers[0].self_attn.o_proj.weight[:, 2 * width : 3 * width] = 0
    actual, expected, intact = (
        audit(each, TOKENS, effects="none", changes=changes)
        for each, changes in ((model, ZERO), (edited, []), (model, []))
    )
    assert measured_values(actual, 0) == pytest.approx(measured_values(intact, 0))
    assert measured_values(actual, 1) == pytest.approx(measured_values(expected, 1), abs=1e-5)
    assert measured_values(actual, 1) != pytest.approx(measured_values(intact, 1), abs=1e-3)
    assert actual.max_difference == pytest.approx(intact.max_difference, abs=1e-6)
    assert actual.about["changes"] == ["layer 1, head 3: zero-ablated"]
    assert input_text(actual).endswith("; changed: layer 1, head 3: zero-ablated")
    assert Audit.from_dict(actual.to_dict()) == actual


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"changes": [ZERO], "effects": "exact"}, "^changes and effects must not both be set"),
        ({"changes": [3]}, "^changes must be Change objects or texts, got 3"),
        ({"changes": [Change(layer=7, output="zero")], "effects": "none"}, "^layer must be from 0 to "),
        (
            {"changes": [Change(layer=0, bands=FrequencyMask(freeze=(99,)))], "effects": "none"},
            r"^freeze must be .* from 0 to 3 .*, got \[99\]",
        ),
    ],
)
def test_impossible_changes_are_refused(model: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        audit(model, TOKENS, **options)
    assert "forward" not in vars(model)


def test_a_head_with_changed_logits_shows_the_changed_attention(model: Any) -> None:
    """All heads of a layer without a rotation, against a model of the same weights whose rotation stands still."""
    edited = copy.deepcopy(model)
    edited.model.rotary_emb.inv_freq.zero_()
    names = ("previous", "first", "entropy", "distance", "induction")
    change = Change(layer=0, speed=0.0, heads=(0, 2, 3))
    actual, expected, intact = (
        audit(each, TOKENS, effects="none", changes=changes, layers=[0]).heads
        for each, changes in ((model, [change]), (edited, []), (model, []))
    )
    for own, other in ((actual[i], (intact if i == 1 else expected)[i]) for i in range(4)):
        values = [[getattr(head, name) for name in names] for head in (own, other)]
        assert values[0] == pytest.approx(values[1], abs=1e-5)
    assert actual[0].previous != pytest.approx(intact[0].previous, abs=1e-4)
    assert (actual[0].positional, actual[1].positional) == (None, intact[1].positional)
    part = audit(model, TOKENS, effects="none", changes=[Change(layer=0, heads=(0,), attention="symbolic")])
    assert part.heads[0].previous is None
    assert part.heads[1].previous is not None


@pytest.fixture(scope="module")
def model_with_unused_pairs(model: Any) -> Audit:
    """Pair 1 of layer 1 is switched off; in layer 2 the queries of head 3 have nothing in pairs 1 and 4."""
    model = copy.deepcopy(model)
    first, second = (layer.self_attn for layer in model.model.layers)
    with torch.no_grad():
        for projection in (first.q_proj, first.k_proj):
            projection.weight.view(-1, 8, 32)[:, [0, 4]] = 0
        second.q_proj.weight.view(4, 8, 32)[2, [0, 3, 4, 7]] = 0
    return audit(model, TOKENS, effects="none")


def test_dead_pairs_are_counted_layer_by_layer_and_head_by_head(model_with_unused_pairs: Audit) -> None:
    """In the record of their layer, if no head uses them, and in nothing that is measured."""
    first, second = model_with_unused_pairs.layers
    assert (first.dead, first.tabled, second.dead, second.tabled) == ((0,), (0,), (), ())
    assert first.position == "rotation of 4 pairs, 8 of 8 dimensions (half), 1 pairs switched off"
    assert first.frequencies == pytest.approx([1, 0.1, 0.01, 0.001], abs=1e-5)
    for head in model_with_unused_pairs.heads_of(first):
        assert head.norm_use[1] == 0
        assert head.variance_use[1] == pytest.approx(0, abs=1e-12)
        assert sum(head.norm_use) == pytest.approx(1)
    dead = {(head.layer, head.head): head.dead for head in model_with_unused_pairs.heads if head.dead}
    assert dead == {**{(0, head): 1 for head in range(4)}, (1, 2): 2}
    assert model_with_unused_pairs.table()["dead"] == [head.dead for head in model_with_unused_pairs.heads]
