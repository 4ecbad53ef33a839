"""The same on trained models, whose weights are not small and even: switched-off pairs, sinks, norms of hundreds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.hf.manual_changes import edit_angles, freeze, is_close, logits, reference_component
from tests.backends.hf.models import calls_in
from torch import Tensor

from toeplens import hosts
from toeplens.backends.hf import Change, intervene, load_model
from toeplens.backends.hf.interventions import changed_outputs

MODELS = Path(__file__).parents[3] / "models"
TOKENS = 48

pytestmark = pytest.mark.heavy


def open_model(name: str) -> Any:
    path = MODELS / name
    if not path.exists():
        pytest.skip(f"{path} is not there: make real-models fetches it")
    return load_model(str(path), device="cpu").model


def tokens(rows: int, count: int = TOKENS) -> Tensor:
    return torch.randint(100, 40_000, (rows, count), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Any:
    return open_model(request.param)


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    return {"input_ids": tokens(2)}


@pytest.fixture(scope="module")
def plain_logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return logits(model, inputs)


@pytest.mark.parametrize("layer", [0, 5])
def test_frozen_rotations_have_angle_0(model: Any, inputs: dict[str, Tensor], plain_logits: Tensor, layer: int) -> None:
    with edit_angles(model, layer, freeze):
        expected = logits(model, inputs)
    with intervene(model, Change(layer=layer, speed=0.0)):
        actual = logits(model, inputs)
    assert is_close(actual, expected)
    assert not is_close(actual, plain_logits, 1e-3)


@pytest.mark.parametrize("part", ["positional", "symbolic"])
def test_logit_components_are_the_means_of_each_querys_table(
    model: Any, inputs: dict[str, Tensor], plain_logits: Tensor, part: Any
) -> None:
    """What one head puts out for some queries; in a pass it changes what the model says."""
    call, queries = calls_in(model, inputs)[1], [0, 1, 7, 20, TOKENS - 1]
    actual = changed_outputs(call, Change(layer=1, heads=(1,), attention=part))[:, queries, 1]
    assert is_close(actual.double(), reference_component(call, 1, part, queries))
    with intervene(model, Change(layer=1, attention=part)):
        assert not is_close(logits(model, inputs), plain_logits, 1e-3)


IDS = torch.randint(1000, 20_000, (2, 40), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :7] = 0


def unpadded(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS, attention_mask=MASK).logits[MASK.bool()]


def test_reinstalling_the_models_own_rotation_restores_its_output(model: Any) -> None:
    """Float32, 5e-5 of the largest logit: our angles are formed in float64, the model's in float32."""
    plain, options = unpadded(model), dict(model.config.rope_parameters)
    size = float(plain.abs().max())
    with intervene(model, [Change(layer=layer, speed=0.0) for layer in range(model.config.num_hidden_layers)]):
        stopped = unpadded(model)
    hosts.install(model, "nope")
    assert float((unpadded(model) - stopped).abs().max()) <= 5e-5 * size
    hosts.uninstall(model)
    if any(isinstance(value, dict) for value in options.values()):
        options["layer_types"] = model.config.layer_types
    hosts.install(model, "scaled-rope", **options)
    assert float((unpadded(model) - plain).abs().max()) <= 5e-5 * size
    hosts.uninstall(model)
    assert unpadded(model).equal(plain)
