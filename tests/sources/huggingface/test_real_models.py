"""The same on trained models, whose weights are not small and even: switched-off pairs, sinks, norms of hundreds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sources.huggingface.models import calls_in
from tests.sources.huggingface.ways import angles, brute_force, logits, near, stopped
from torch import Tensor

from toeplens import hosts
from toeplens.sources.huggingface import Change, intervened, load_model
from toeplens.sources.huggingface.interventions import changed_outputs

MODELS = Path(__file__).parents[3] / "models"
TOKENS = 48

pytestmark = pytest.mark.heavy


def opened(name: str) -> Any:
    path = MODELS / name
    if not path.exists():
        pytest.skip(f"{path} is not there: make real-models fetches it")
    return load_model(str(path), device="cpu").model


def tokens(rows: int, count: int = TOKENS) -> Tensor:
    return torch.randint(100, 40_000, (rows, count), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Any:
    return opened(request.param)


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    return {"input_ids": tokens(2)}


@pytest.fixture(scope="module")
def plain(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return logits(model, inputs)


@pytest.mark.parametrize("layer", [0, 5])
def test_stopped_rotations_are_angles_of_0(model: Any, inputs: dict[str, Tensor], plain: Tensor, layer: int) -> None:
    with angles(model, layer, stopped):
        wanted = logits(model, inputs)
    with intervened(model, Change(layer=layer, speed=0.0)):
        found = logits(model, inputs)
    assert near(found, wanted)
    assert not near(found, plain, 1e-3)


@pytest.mark.parametrize("part", ["positional", "symbolic"])
def test_parts_of_the_logits_are_the_means_of_each_query_s_table(
    model: Any, inputs: dict[str, Tensor], plain: Tensor, part: Any
) -> None:
    """What one head puts out for some queries; in a pass it changes what the model says."""
    call, queries = calls_in(model, inputs)[1], [0, 1, 7, 20, TOKENS - 1]
    found = changed_outputs(call, Change(layer=1, heads=(1,), attention=part))[:, queries, 1]
    assert near(found.double(), brute_force(call, 1, part, queries))
    with intervened(model, Change(layer=1, attention=part)):
        assert not near(logits(model, inputs), plain, 1e-3)


IDS = torch.randint(1000, 20_000, (2, 40), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :7] = 0


def unpadded(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS, attention_mask=MASK).logits[MASK.bool()]


def test_its_own_rotation_out_and_in_again(model: Any) -> None:
    """Float32, 5e-5 of the largest logit: our angles are formed in float64, the model's in float32."""
    plain, options = unpadded(model), dict(model.config.rope_parameters)
    size = float(plain.abs().max())
    with intervened(model, [Change(layer=layer, speed=0.0) for layer in range(model.config.num_hidden_layers)]):
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
