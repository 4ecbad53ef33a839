"""The same on trained models, whose weights are not small and even."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sources.huggingface.test_real_models import opened
from torch import Tensor

from toeplens import hosts
from toeplens.sources.huggingface import Change, intervened

pytestmark = pytest.mark.heavy
IDS = torch.randint(1000, 20_000, (2, 40), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :7] = 0


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Any:
    return opened(request.param)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS, attention_mask=MASK).logits[MASK.bool()]


def test_its_own_rotation_out_and_in_again(model: Any) -> None:
    """Float32, 5e-5 of the largest logit: our angles are formed in float64, the model's in float32."""
    plain, options = logits(model), dict(model.config.rope_parameters)
    size = float(plain.abs().max())
    with intervened(model, [Change(layer=layer, speed=0.0) for layer in range(model.config.num_hidden_layers)]):
        stopped = logits(model)
    hosts.install(model, "nope")
    assert float((logits(model) - stopped).abs().max()) <= 5e-5 * size
    hosts.uninstall(model)
    if any(isinstance(value, dict) for value in options.values()):
        options["layer_types"] = model.config.layer_types
    hosts.install(model, "scaled-rope", **options)
    assert float((logits(model) - plain).abs().max()) <= 5e-5 * size
    hosts.uninstall(model)
    assert logits(model).equal(plain)


@pytest.mark.parametrize("name", ["rope", "alibi", "path", "fox", "rope+fox"])
def test_generation_with_a_cache_is_generation_without(model: Any, name: str) -> None:
    hosts.install(model, name)
    how = {"attention_mask": MASK, "max_new_tokens": 6, "do_sample": False}
    try:
        assert model.generate(IDS, **how).equal(model.generate(IDS, use_cache=False, **how))
    finally:
        hosts.uninstall(model)
