"""What a band of frequencies is worth, against whole passes in which it alone is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.builders import tiny as run_spec_of
from tests.sources.huggingface.effects.test_position import MODELS, inputs_of, loss, named
from tests.sources.huggingface.models import BLOOM, INPUTS, calls_in, tiny

from toeplens.encodings import BandControl
from toeplens.ground import InputError
from toeplens.sources.huggingface import Change, NoPosition, band_effects, intervened
from toeplens.studies import audit
from toeplens.training import train

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


def test_what_has_no_bands_is_refused() -> None:
    model = tiny("BloomForCausalLM", **BLOOM)
    calls = [named(call) for call in calls_in(model)]
    with pytest.raises(NoPosition, match=r"^effects: 'bands' needs a known rotation"):
        band_effects(model, INPUTS, calls)
    with pytest.raises(InputError, match=r"^bands must be at least 1, got 0"):
        band_effects(model, INPUTS, calls, bands=0)


def test_runs_have_another_way(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"^effects must be one of attribution, exact, none, position for a run, got 'bands'"
    ):
        audit(train(run_spec_of(), tmp_path), effects="bands")
