"""Changes are read and told with numbers from 1, and what a model does not have is refused with numbers from 1."""

from __future__ import annotations

import pytest
from tests.backends.hf.models import GROUPED, T5, tiny

from toeplens.backends.hf import Change
from toeplens.backends.hf.load import LoadedModel
from toeplens.encodings import FrequencyMask
from toeplens.studies.kit.changes import changes_text, parse_change, resolve_changes
from toeplens.utils import InputError


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    """2 layers, 4 heads in 2 groups, 4 pairs."""
    return LoadedModel(tiny("LlamaForCausalLM", **GROUPED))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layers=1 heads=1,4 output=zero", "layer 1, heads 1, 4: zero-ablated"),
        ("layers=all freeze=1-2 drop=4", "layers 1–2: pairs 1–2 frozen and pair 4 dropped"),
        ("layers=all still=1-2 silent=4", "layers 1–2: pairs 1–2 frozen and pair 4 dropped"),  # as written for 0.2
        ("layers=all exchange=1-2:3-4", "layers 1–2: pairs exchanged, 1–2 with 3–4"),
        ("layers=2 freeze=3 exchange=4:1", "layer 2: pair 3 frozen; pairs exchanged, 1 with 4"),
        ("layers=2 exchange=1:2 speed=0.5", "layer 2: pairs exchanged, 1 with 2; rotation speed × 0.5"),
        ("layers=2 groups=1 speed=0", "layer 2, group 1: rotation frozen"),
        ("layers=1 attention=positional", "layer 1: only the positional part of the logits"),
        ("layers=1 output=resample seed=3", "layer 1: resample-ablated"),
    ],
)
def test_changes_are_parsed_and_described(llama: LoadedModel, text: str, words: str) -> None:
    assert changes_text(resolve_changes(llama, [parse_change(text)])) == [words]


def test_any_permutation_of_frequencies_is_described() -> None:
    cycle = FrequencyMask(permute=(1, 2, 0, 3))
    assert changes_text([Change(layer=0, bands=cycle)]) == ["layer 1: pairs permuted, 1–2 as 2–3, 3 as 1"]
    turned = FrequencyMask(permute=tuple(range(31, -1, -1)))
    (words,) = changes_text([Change(layer=0, bands=turned)])
    assert words.startswith("layer 1: pairs exchanged, 1 with 32, 2 with 31, ")
    assert words.endswith("8 with 25, … (16 in all)")


def test_swapped_bands_are_resolved_against_the_model(llama: LoadedModel) -> None:
    """Counted from 1, the first for the first, in the layers that are named."""
    (actual,) = resolve_changes(llama, [parse_change("layers=2 exchange=1,2:4,3 drop=3")])
    assert actual == Change(layer=1, bands=FrequencyMask(permute=(3, 2, 1, 0), drop=(2,)))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("heads=1 output=zero", "^change must name layers, .*, got 'heads=1 output=zero'"),
        ("layers=1", "^change must have one of attention, bias"),
        ("layers=0 output=zero", "^change: layers must be .*, got '0'"),
        ("layers=1 freeze=1-3 drop=3,4", "^change: freeze and drop must have no pairs in common"),
        ("layers=1 freeze=1 output=zero", "^change: freeze and output must not both be set"),
        ("layers=1 layers=2 output=zero", "change must have settings of the form name=value"),
        ("layers=1 exchange=1,1:2,3", "^change: exchange must be two bands .*, got '1,1:2,3'"),
        ("layers=1 exchange=1-4:29-31", "^change: exchange must be two bands .*, got '1-4:29-31'"),
    ],
)
def test_unparsable_changes_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        parse_change(text)


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
def test_missing_layers_and_heads_are_refused_with_1_based_numbers(
    llama: LoadedModel, text: str, sentence: str
) -> None:
    with pytest.raises(InputError) as caught:
        resolve_changes(llama, [parse_change(text)])
    assert str(caught.value).removeprefix("change: ") == sentence


def test_two_changes_of_one_head_are_refused_together(llama: LoadedModel) -> None:
    wishes = [parse_change("layers=all heads=1,2 output=zero"), parse_change("layers=2 heads=2-3 speed=0")]
    with pytest.raises(InputError, match=r"^change must not change head 2 of model.layers.1.self_attn .* twice"):
        resolve_changes(llama, wishes)
    assert len(resolve_changes(llama, [wishes[0], parse_change("layers=2 heads=3-4 speed=0")])) == 3


def test_all_layers_means_the_layers_of_the_stack() -> None:
    loaded = LoadedModel(tiny("T5ForConditionalGeneration", **T5 | {"num_decoder_layers": 3}))
    for text, count in (("side=encoder", 2), ("side=decoder", 3), ("kind=cross", 3)):
        wishes = [
            parse_change(f"layers=all heads=1-2 output=zero {text}"),
            parse_change("layers=1 heads=3 output=zero"),
        ]
        assert [change.layer for change in resolve_changes(loaded, wishes)] == [*range(count), 0]
    with pytest.raises(InputError, match=r"^change: side must be set"):
        resolve_changes(loaded, [parse_change("layers=all output=zero")])
