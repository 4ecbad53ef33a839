"""On every architecture a change is the same thing done to the model's own angles, positions and outputs."""

from __future__ import annotations

import pytest
import torch
from tests.sources.huggingface.interventions.ways import (
    ALL,
    ROTARY,
    angles,
    apart,
    emptied,
    exchanged,
    logits,
    near,
    of_pairs,
    put_out,
    silenced,
    stopped,
)
from tests.sources.huggingface.models import INPUTS, TOKENS, calls_in, state, tiny

from toeplens.encodings import BandControl
from toeplens.encodings.rotary import swapped
from toeplens.sources.huggingface import Change, intervened

WIDE = {
    "StableLmForCausalLM",
    "GPTNeoXForCausalLM",
}  # whose rotation, of a quarter of the dimensions, has else one pair


@pytest.mark.parametrize("kind", ALL)
def test_with_nothing_changed_the_pass_is_the_plain_one_and_nothing_is_left_behind(kind: str) -> None:
    model = tiny(kind, **ALL[kind][0])
    plain, before = logits(model), state(model)
    with intervened(model, []):
        assert near(logits(model), plain)
    with intervened(model, Change(layer=1, output="zero")):
        assert apart(logits(model), plain)
    assert state(model) == before
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("kind", ALL)
def test_a_silent_head_is_one_whose_place_before_the_projection_is_empty(kind: str) -> None:
    sizes, place = ALL[kind]
    model = tiny(kind, **sizes)
    with put_out(model, place, 1, 4, emptied(2)):
        wanted = logits(model)
    with intervened(model, Change(layer=1, heads=(2,), output="zero")):
        assert near(logits(model), wanted)


@pytest.mark.parametrize("kind", ROTARY)
def test_a_stopped_rotation_is_one_whose_angles_are_all_0(kind: str) -> None:
    model = tiny(kind, **ROTARY[kind][0])
    with angles(model, 1, stopped):
        wanted = logits(model)
    assert apart(wanted, logits(model))
    with intervened(model, Change(layer=1, speed=0.0)):
        assert near(logits(model), wanted)


@pytest.mark.parametrize("kind", ["GPTJForCausalLM", "CodeGenForCausalLM", *ROTARY])
def test_tokens_twice_as_far_apart_are_those_of_twice_the_position(kind: str) -> None:
    model = tiny(kind, **ALL[kind][0])
    wanted = logits(model, INPUTS | {"position_ids": 2 * torch.arange(TOKENS).unsqueeze(0)})
    assert apart(wanted, logits(model))
    with intervened(model, [Change(layer=layer, speed=2.0) for layer in range(2)]):
        assert near(logits(model), wanted)


@pytest.mark.parametrize("kind", ROTARY)
def test_bands_are_columns_of_the_model_s_own_table_of_angles(kind: str) -> None:
    """Still, silent and exchanged pairs, of which the models have 2 or 4."""
    model = tiny(kind, **ROTARY[kind][0] | ({"hidden_size": 64} if kind in WIDE else {}))
    plain, (_, call) = logits(model), calls_in(model)
    pairs = len(call.rotation.frequencies) if call.rotation else 0
    for bands, edited in (
        (BandControl(still=(0,)), of_pairs([0], stopped)),
        (BandControl(silent=(1,)), of_pairs([1], silenced)),
        (BandControl(order=swapped(pairs, [0], [1])), exchanged(0, 1)),
    ):
        with angles(model, 1, edited):
            wanted = logits(model)
        assert apart(wanted, plain), bands
        with intervened(model, Change(layer=1, bands=bands)):
            assert near(logits(model), wanted), bands
