"""Changes are read and told with numbers from 1, and what a model does not have is refused with numbers from 1."""

from __future__ import annotations

import pytest
from tests.sources.huggingface.models import GROUPED, T5, tiny

from toeplens.encodings import BandControl
from toeplens.ground import InputError
from toeplens.sources.huggingface import Change
from toeplens.sources.huggingface.load import Loaded
from toeplens.studies.kit.changes import changes_of, read_change, told


@pytest.fixture(scope="module")
def llama() -> Loaded:
    """2 layers, 4 heads in 2 groups, 4 pairs."""
    return Loaded(tiny("LlamaForCausalLM", **GROUPED))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layers=1 heads=1,4 output=zero", "layer 1, heads 1, 4: zero-ablated"),
        ("layers=all still=1-2 silent=4", "layers 1–2: pairs 1–2 frozen and pair 4 dropped"),
        ("layers=all exchange=1-2:3-4", "layers 1–2: pairs exchanged, 1–2 with 3–4"),
        ("layers=2 still=3 exchange=4:1", "layer 2: pair 3 frozen; pairs exchanged, 1 with 4"),
        ("layers=2 exchange=1:2 speed=0.5", "layer 2: pairs exchanged, 1 with 2; rotation speed × 0.5"),
        ("layers=2 groups=1 speed=0", "layer 2, group 1: rotation frozen"),
        ("layers=1 attention=positional", "layer 1: only the positional part of the logits"),
        ("layers=1 output=resample seed=3", "layer 1: resample-ablated"),
    ],
)
def test_changes_are_read_and_told(llama: Loaded, text: str, words: str) -> None:
    assert told(changes_of(llama, [read_change(text)])) == [words]


def test_an_order_that_is_no_exchange_is_told_too() -> None:
    cycle = BandControl(order=(1, 2, 0, 3))
    assert told([Change(layer=0, bands=cycle)]) == ["layer 1: pairs permuted, 1–2 as 2–3, 3 as 1"]
    turned = BandControl(order=tuple(range(31, -1, -1)))
    (words,) = told([Change(layer=0, bands=turned)])
    assert words.startswith("layer 1: pairs exchanged, 1 with 32, 2 with 31, ")
    assert words.endswith("8 with 25, … (16 in all)")


def test_bands_that_are_exchanged_are_those_of_the_model(llama: Loaded) -> None:
    """Counted from 1, the first for the first, in the layers that are named."""
    (found,) = changes_of(llama, [read_change("layers=2 exchange=1,2:4,3 silent=3")])
    assert found == Change(layer=1, bands=BandControl(order=(3, 2, 1, 0), silent=(2,)))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("heads=1 output=zero", "^change must name layers, .*, got 'heads=1 output=zero'"),
        ("layers=1", "^change must have one of attention, bias"),
        ("layers=0 output=zero", "^change: layers must be .*, got '0'"),
        ("layers=1 still=1-3 silent=3,4", "^change: silent and still must have no pairs in common"),
        ("layers=1 still=1 output=zero", "^change: still and output must not both be set"),
        ("layers=1 layers=2 output=zero", "change must have settings of the form name=value"),
        ("layers=1 exchange=1,1:2,3", "^change: exchange must be two bands .*, got '1,1:2,3'"),
        ("layers=1 exchange=1-4:29-31", "^change: exchange must be two bands .*, got '1-4:29-31'"),
    ],
)
def test_changes_that_cannot_be_read(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read_change(text)


ATTENTION = "model.layers.0.self_attn (LlamaAttention)"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("layers=2-3 output=zero", "layers must be from 1 to 2 in self attention, got 3."),
        ("layers=1 kind=cross output=zero", "layers: the model has no cross attention."),
        ("layers=1 groups=5 speed=0", f"groups must be different numbers from 1 to 2 in {ATTENTION}, got 5."),
        ("layers=1 exchange=1-2:4-5", f"exchange must be different numbers from 1 to 4 in {ATTENTION}, got 5."),
        ("layers=1 bias=off", f"bias: {ATTENTION} adds no bias to its logits."),
    ],
)
def test_what_the_model_does_not_have_is_refused_with_numbers_from_1(llama: Loaded, text: str, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        changes_of(llama, [read_change(text)])
    assert str(caught.value).removeprefix("change: ") == sentence


def test_two_changes_of_one_head_are_refused_together(llama: Loaded) -> None:
    wishes = [read_change("layers=all heads=1,2 output=zero"), read_change("layers=2 heads=2-3 speed=0")]
    with pytest.raises(InputError, match=r"^change must not change head 2 of model.layers.1.self_attn .* twice"):
        changes_of(llama, wishes)
    assert len(changes_of(llama, [wishes[0], read_change("layers=2 heads=3-4 speed=0")])) == 3


def test_all_layers_are_those_of_the_side() -> None:
    made = Loaded(tiny("T5ForConditionalGeneration", **T5 | {"num_decoder_layers": 3}))
    for text, count in (("side=encoder", 2), ("side=decoder", 3), ("kind=cross", 3)):
        wishes = [read_change(f"layers=all heads=1-2 output=zero {text}"), read_change("layers=1 heads=3 output=zero")]
        assert [change.layer for change in changes_of(made, wishes)] == [*range(count), 0]
    with pytest.raises(InputError, match=r"^change: side must be set"):
        changes_of(made, [read_change("layers=all output=zero")])
