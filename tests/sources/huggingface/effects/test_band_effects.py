"""What a band of frequencies is worth, against whole passes in which it alone is gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.sources.huggingface.effects.test_position import MODELS, inputs_of, loss, named
from tests.sources.huggingface.models import BLOOM, GROUPED, INPUTS, calls_in, tiny

from toeplens.encodings import BandControl
from toeplens.ground import InputError
from toeplens.sources.huggingface import Change, NoPosition, band_effects, intervened
from toeplens.sources.huggingface.effects import band_effects as module

pytestmark = pytest.mark.usefixtures("unchecked")
TURNING = ["LlamaForCausalLM", "Gemma3ForCausalLM", "GPTNeoXForCausalLM", "GPTJForCausalLM", "SmolLM3ForCausalLM"]


@pytest.mark.parametrize("off", ["rotation", "pair"])
@pytest.mark.parametrize("kind", TURNING)
def test_the_effects_are_those_of_passes_without_the_band(kind: str, off: Any) -> None:
    model = tiny(kind, **MODELS[kind])
    inputs = inputs_of(model)
    calls = calls_in(model, inputs)
    found = band_effects(model, inputs, [named(call) for call in calls], bands=2, off=off)
    intact, moved = loss(model, inputs), False
    np.testing.assert_allclose(found.baseline, intact, atol=1e-6)
    for call, effects, bands, frequencies in zip(calls, found.effects, found.bands, found.frequencies, strict=True):
        if call.rotation is None:
            assert (effects.shape[1], bands, len(frequencies)) == (0, (), 0)
            continue
        np.testing.assert_array_equal(frequencies, call.rotation.frequencies)
        assert [each for band in bands for each in band] == list(range(len(frequencies)))
        for number, band in enumerate(bands):
            control = BandControl(**{"still" if off == "rotation" else "silent": band})
            with intervened(model, Change(layer=call.layer, bands=control)):
                wanted = loss(model, inputs) - intact
            np.testing.assert_allclose(effects[:, number], wanted, atol=2e-6)
            moved = moved or bool(np.abs(wanted).max() > 1e-4)
    assert moved, "none of them does anything"


def test_layers_may_be_held_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("LlamaForCausalLM", **GROUPED)
    calls = [named(call) for call in calls_in(model)]
    together = band_effects(model, INPUTS, calls, bands=4)
    monkeypatch.setattr(module, "_HELD", 1)
    alone = band_effects(model, INPUTS, calls, bands=4)
    for one, other in zip(together.parts, alone.parts, strict=True):
        np.testing.assert_array_equal(one, other)


def test_more_bands_than_pairs_are_as_many_as_pairs_and_progress_is_told() -> None:
    model = tiny("LlamaForCausalLM", **GROUPED)
    told: list[tuple[int, int]] = []
    calls = [named(call) for call in calls_in(model)]
    found = band_effects(model, INPUTS, calls, bands=99, on_progress=lambda done, total: told.append((done, total)))
    assert [len(bands) for bands in found.bands] == [4, 4]
    assert told[-1] == (8, 8)


def test_what_has_no_bands_is_refused() -> None:
    model = tiny("BloomForCausalLM", **BLOOM)
    calls = [named(call) for call in calls_in(model)]
    with pytest.raises(NoPosition, match=r"^effects: bands was given; no head of these layers has a rotation"):
        band_effects(model, INPUTS, calls)
    with pytest.raises(InputError, match=r"^bands: 0 was given; it must be at least 1"):
        band_effects(model, INPUTS, calls, bands=0)
