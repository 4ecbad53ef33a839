"""Which heads are changed, several changes at once and one in another, biases taken away."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch
from tests.sources.huggingface.interventions.ways import LLAMA, ROTARY, angles, apart, heads_in, logits, near, stopped
from tests.sources.huggingface.models import BLOOM, INPUTS, T5, calls_in, padded_inputs, state, tiny

from toeplens.encodings import BandControl
from toeplens.ground import InputError
from toeplens.sources.huggingface import Change, intervened

PLACE = ROTARY["LlamaForCausalLM"][1]
SEVERAL = [
    Change(layer=0, heads=(1,), output="zero"),
    Change(layer=0, heads=(2, 3), speed=0.0),
    Change(layer=1, bands=BandControl(silent=(3,))),
]


def test_one_head_of_a_group_and_a_whole_group() -> None:
    """Outputs before the projection: of a head that is changed as where all are, of others as they were."""
    model = tiny("LlamaForCausalLM", **LLAMA)
    plain = heads_in(model, PLACE, 1)
    with angles(model, 1, stopped):
        still = heads_in(model, PLACE, 1)
    for change, heads in (
        (Change(layer=1, heads=(3,), speed=0.0), {3}),
        (Change(layer=1, groups=(0,), speed=0.0), {0, 1}),
    ):
        with intervened(model, change):
            found = heads_in(model, PLACE, 1)
        for head in range(4):
            wanted = (still if head in heads else plain)[:, :, head]
            torch.testing.assert_close(found[:, :, head], wanted, atol=1e-5, rtol=1e-5)


# ---- one in another --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_one_in_another_is_one_with_the_changes_of_both(order: list[int]) -> None:
    """To the last bit, and on the way out as on the way in; an empty one is as none."""
    model = tiny("LlamaForCausalLM", **LLAMA)
    before, changes = state(model), [SEVERAL[each] for each in order]
    together = []
    for count in range(4):
        with intervened(model, changes[:count]):
            together.append(logits(model))
    assert all(apart(x, y) for x, y in pairwise(together))
    with intervened(model, ()):
        assert torch.equal(logits(model), together[0])
        with intervened(model, changes[0]):
            assert torch.equal(logits(model), together[1])
            with intervened(model, []), intervened(model, changes[1:]):
                assert torch.equal(logits(model), together[3])
            with intervened(model, changes[1]):
                assert torch.equal(logits(model), together[2])
            assert torch.equal(logits(model), together[1])
        assert torch.equal(logits(model), together[0])
    assert state(model) == before


def test_one_in_another_may_not_change_the_same_head() -> None:
    model = tiny("LlamaForCausalLM", **LLAMA)
    with intervened(model, SEVERAL[1]):
        outer = logits(model)
        inner = Change(layer=0, heads=(0, 3), output="zero")
        with (
            intervened(model, inner),
            pytest.raises(InputError, match=r"^changes must not change head 3 of model.* twice"),
        ):
            logits(model)
        assert torch.equal(logits(model), outer)


def test_a_pass_that_is_taken_apart_is_not_changed_in_silence() -> None:
    """Neither where another takes it apart, nor where the model is a part of one that is changed."""
    model = tiny("LlamaForCausalLM", **LLAMA)
    before = state(model)
    with (
        intervened(model, SEVERAL),
        pytest.raises(InputError, match=r"^model: LlamaForCausalLM must not run with"),
    ):
        calls_in(model)
    inside = r"^model: LlamaModel must not run with `intervened` inside another pass that is analyzed or changed"
    for first, second in ((model, model.model), (model.model, model)):
        with intervened(first, SEVERAL[0]), intervened(second, SEVERAL[1]), pytest.raises(InputError, match=inside):
            logits(model)
    assert state(model) == before


# ---- biases ----------------------------------------------------------------------------------------------------------


def test_alibi_taken_away_is_a_table_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("BloomForCausalLM", **BLOOM)
    with intervened(model, [Change(layer=layer, bias=False) for layer in range(2)]):
        found = logits(model, padded_inputs())
    names, build = vars(sys.modules[type(model).__module__]), "build_alibi_tensor"
    own = names[build]
    monkeypatch.setitem(names, build, lambda *args, **more: 0 * own(*args, **more))
    wanted = logits(model, padded_inputs())
    monkeypatch.undo()
    there = padded_inputs()["attention_mask"].bool()
    assert near(found[there], wanted[there])
    assert apart(wanted[there], logits(model, padded_inputs())[there])


def test_t5s_bias_taken_away_is_a_bias_with_weights_of_zero() -> None:
    model = tiny("T5ForConditionalGeneration", **T5)
    inputs = INPUTS | {"decoder_input_ids": INPUTS["input_ids"].flip(1)}
    changes = [Change(layer=layer, side=side, bias=False) for layer in range(2) for side in ("encoder", "decoder")]
    with intervened(model, changes):
        found = logits(model, inputs)
    plain = logits(model, inputs)
    for name, weight in model.named_parameters():
        if "relative_attention_bias" in name:
            weight.data.zero_()
    assert near(found, logits(model, inputs))
    assert apart(found, plain)
