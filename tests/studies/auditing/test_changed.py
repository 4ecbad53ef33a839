"""An audit of a changed model is that of the model whose weights were changed by hand, from the change on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.backends.hf.models import GROUPED, SIZES, tiny

from toeplens.backends.hf import Change
from toeplens.encodings import BandControl
from toeplens.ground import InputError
from toeplens.studies.auditing import Audit, audit
from toeplens.studies.auditing.audit import csv_of
from toeplens.studies.auditing.words import audited

TOKENS = torch.randint(3, 31, (3, 20), generator=torch.Generator().manual_seed(4))
ZERO = Change(layer=0, heads=(2,), output="zero")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("LlamaForCausalLM", **GROUPED)


def numbers(found: Audit, layer: int) -> list[float]:
    heads = [head for head in found.heads if head.layer == layer]
    return [getattr(head, name) for head in heads for name in ("positional", "symbolic", "entropy", "centre", "first")]


def test_later_layers_read_what_is_changed(model: Any) -> None:
    edited = copy.deepcopy(model)
    width = edited.config.hidden_size // edited.config.num_attention_heads
    with torch.no_grad():
        edited.model.layers[0].self_attn.o_proj.weight[:, 2 * width : 3 * width] = 0
    found, wanted, intact = (
        audit(each, TOKENS, effects="none", changes=changes)
        for each, changes in ((model, [ZERO]), (edited, []), (model, []))
    )
    assert numbers(found, 0) == pytest.approx(numbers(intact, 0))
    assert numbers(found, 1) == pytest.approx(numbers(wanted, 1), abs=1e-5)
    assert numbers(found, 1) != pytest.approx(numbers(intact, 1), abs=1e-3)
    assert found.whole == pytest.approx(intact.whole, abs=1e-6)
    assert found.about["changes"] == ["layer 1, head 3: zero-ablated"]
    assert audited(found).endswith("; changed: layer 1, head 3: zero-ablated")
    assert Audit.from_dict(found.to_dict()) == found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"changes": [ZERO]}, "^changes and effects must not both be set"),
        ({"changes": [ZERO], "effects": "none", "needles": 2}, "^changes and needles must not both be set"),
        (
            {"changes": [Change(layer=0, bands=BandControl(still=(99,)))], "effects": "none"},
            r"^still must be .* from 0 to 3 .*, got \[99\]",
        ),
    ],
)
def test_what_cannot_be_changed_is_refused(model: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        audit(model, TOKENS, **options)
    assert "forward" not in vars(model)


def test_a_head_whose_logits_are_changed_shows_the_changed_attention(model: Any) -> None:
    """All heads of a layer without a rotation, against a model of the same weights whose rotation stands still."""
    edited = copy.deepcopy(model)
    edited.model.rotary_emb.inv_freq.zero_()
    names = ("previous", "first", "entropy", "distance", "induction")
    change = Change(layer=0, speed=0.0, heads=(0, 2, 3))
    found, wanted, intact = (
        audit(each, TOKENS, effects="none", changes=changes, layers=[0]).heads
        for each, changes in ((model, [change]), (edited, []), (model, []))
    )
    for own, other in ((found[i], (intact if i == 1 else wanted)[i]) for i in range(4)):
        values = [[getattr(head, name) for name in names] for head in (own, other)]
        assert values[0] == pytest.approx(values[1], abs=1e-5)
    assert found[0].previous != pytest.approx(intact[0].previous, abs=1e-4)
    assert (found[0].positional, found[1].positional) == (None, intact[1].positional)
    part = audit(model, TOKENS, effects="none", changes=[Change(layer=0, heads=(0,), attention="symbolic")])
    assert part.heads[0].previous is None
    assert part.heads[1].previous is not None


# ---- columns made of a head's other numbers


@pytest.fixture(scope="module")
def unused(model: Any) -> Audit:
    """Of a model in whose layer 2 the queries of head 3 have nothing in pairs 1 and 4, counted from 1."""
    model = copy.deepcopy(model)
    width = model.config.hidden_size // model.config.num_attention_heads
    with torch.no_grad():
        for pair in (0, 3):
            for row in (pair, pair + width // 2):
                model.model.layers[1].self_attn.q_proj.weight[2 * width + row] = 0
    return audit(model, TOKENS, effects="none")


def test_dead_pairs_are_counted_head_by_head(unused: Audit) -> None:
    """The layer has none: its other heads use these pairs."""
    assert unused.layers[1].dead == ()
    assert {(head.layer, head.head): head.dead for head in unused.heads if head.dead} == {(1, 2): 2}
    assert unused.table()["dead"] == [head.dead for head in unused.heads]
    assert b'"dead"' in csv_of(unused).splitlines()[0]


def test_the_strongest_pair_has_the_largest_share_of_the_norms(unused: Audit) -> None:
    for head in unused.heads:
        assert head.norm_top == max(head.norm_use[1:])
        assert head.norm_top == pytest.approx(max(head.norm_use), abs=1e-9), "all dimensions are turned here"
    model = tiny("BertModel", **SIZES)
    unturned = audit(model, TOKENS, effects="none")
    assert {(head.dead, head.norm_top) for head in unturned.heads} == {(None, None)}
