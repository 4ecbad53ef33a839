"""First-order effects are said only where exact ones bear them out; what is in an interval's noise has no shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from toeplens.sources.huggingface import head_effects
from toeplens.studies.auditing import Audit, HeadRecord, LayerRecord, audit, words
from toeplens.studies.auditing.effects import concentration

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(3, 40, (9, 16), generator=torch.Generator().manual_seed(1))


def model_of(weight: float) -> Any:
    """A model whose attention adds little or much to the stream: for little of it first-order estimates are right."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
        for name, x in model.named_parameters():
            if x.ndim > 1:
                x.data = (weight if "o_proj" in name else 0.3) * torch.randn(x.shape)
    return model


def test_estimates_that_hold_are_effects_with_their_check() -> None:
    model = model_of(0.001)
    found, exact = (audit(model, TOKENS, effects=method) for method in ("attribution", "exact"))
    assert found.check.holds
    assert found.check.slope == pytest.approx(1, abs=0.1)
    assert sorted(found.check.exact) == pytest.approx(sorted(head.effect or 0 for head in exact.heads), abs=1e-9)
    calls = [(f"model.layers.{layer}.self_attn", "decoder", "self", layer, 4) for layer in range(2)]
    estimates = head_effects(model, {"input_ids": TOKENS}, calls, method="attribution").effects
    wanted = np.concatenate([each.mean(0) for each in estimates])
    np.testing.assert_allclose([head.effect or 0 for head in found.heads], wanted, atol=1e-12)
    assert exact.check is None
    assert type(found).from_dict(found.to_dict()) == found


def test_estimates_that_do_not_hold_are_no_effects() -> None:
    found = audit(model_of(2.0), TOKENS, effects="attribution")
    assert not found.check.holds
    assert (found.effect, found.method, found.baseline) == (None, None, None)
    assert {head.effect for head in found.heads} == {None}
    assert "do not read the estimates as effects" in found.about["no_effects"]


def test_shares_are_given_of_what_stands_out_of_the_noise() -> None:
    """Helping and harming heads are both counted; a layer of nothing but noise has no largest share."""
    effects = np.array([0.05, -0.02, 0.004, -0.001])
    said = concentration(effects, effects - 0.005, effects + 0.005)
    assert said["helps"] == pytest.approx(0.054)
    assert said["harms"] == pytest.approx(-0.021)
    assert said["top_share"] == pytest.approx(0.05 / 0.054)
    lost = concentration(effects, effects - 0.05, effects + 0.05)
    assert (lost["top_share"], lost["effective_heads"], lost["gini"]) == (None, None, None)
    assert lost["helps"] == said["helps"]
    unknown = np.full(4, np.nan)
    assert concentration(effects, unknown, unknown)["top_share"] is None
    rng, false = np.random.default_rng(0), 0
    for _ in range(500):  # heads without any effect, measured with noise
        noise = rng.normal(0, 0.01, 12)
        false += concentration(noise, noise - 0.0196, noise + 0.0196)["top_share"] is not None
    assert false <= 35


def _made(effects: list[float], half: float, **more: Any) -> Audit:
    """An audit of one layer whose heads have these effects, with intervals of this half width."""
    values = np.array(effects)
    heads = tuple(
        HeadRecord("decoder", "self", 0, place, effect=x, effect_low=x - half, effect_high=x + half)
        for place, x in enumerate(effects)
    )
    layer = LayerRecord(
        *("decoder", "self", 0, "m (M)", len(heads), len(heads), 4, 0.5, None, True, None, "none", (), None, None),
        *(0.0, 1e-4, concentration(values, values - half, values + half)),
    )
    return Audit({"intervals": "over sequences"}, (layer,), heads, "loss", "exact", 2.0, 0.0, **more)


def test_what_harms_is_told_from_what_is_within_its_noise() -> None:
    """Heads whose whole interval is below 0; a layer whose sum is within its noise has no share."""
    found = _made([0.02, -0.03, -0.01, -0.001], 0.002)
    assert [head.head for head in words.harmful(found)] == [1, 2]
    said = " ".join(words.findings(found))
    assert "head 1 holds 100% of the sum of positive effects (1.0 effective heads of 4)" in said
    assert "): L1 H2, L1 H3; " in said
    assert "we would expect about 0 of 4 such heads" in said
    lost = _made([0.02, -0.03, -0.01, -0.001], 0.05)
    assert words.harmful(lost) == []
    assert lost.layers[0].deposit["top_share"] is None
