"""The same on trained models, whose weights are not small and even: switched-off pairs, sinks, norms of hundreds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sources.huggingface.interventions.test_interventions import angles, logits, near, stopped, without_head
from torch import Tensor

from toeplens.encodings import BandControl
from toeplens.sources.huggingface import Change, intervened, load_model

MODELS = Path(__file__).parents[4] / "models"
PLACE = "model.layers.{}.self_attn.o_proj"

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("unchecked")]


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Any:
    path = MODELS / request.param
    if not path.exists():
        pytest.skip(f"{path} is not there: make real-models fetches it")
    return load_model(str(path), device="cpu").model


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(100, 40_000, (2, 48), generator=torch.Generator().manual_seed(1))}


@pytest.fixture(scope="module")
def plain(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return logits(model, inputs)


def test_with_nothing_changed_it_is_the_plain_pass(model: Any, inputs: dict[str, Tensor], plain: Tensor) -> None:
    with intervened(model, ()):
        assert near(logits(model, inputs), plain)


@pytest.mark.parametrize("layer", [0, 5, 12])
def test_stopped_rotations_are_angles_of_0(model: Any, inputs: dict[str, Tensor], plain: Tensor, layer: int) -> None:
    with angles(model, layer, stopped):
        wanted = logits(model, inputs)
    with intervened(model, Change(layer=layer, speed=0.0)):
        found = logits(model, inputs)
    assert near(found, wanted)
    assert not near(found, plain, 1e-3)


def test_silent_bands_are_columns_of_0_and_exchanged_ones_columns_exchanged(
    model: Any, inputs: dict[str, Tensor]
) -> None:
    pairs = model.config.head_dim // 2
    columns = [4, 4 + pairs]

    def silent(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.clone(), sin.clone()
        cos[..., columns] = sin[..., columns] = 0
        return cos, sin

    def exchanged(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        order = list(range(2 * pairs))
        for half in (0, pairs):
            order[half + 4], order[half + 20] = half + 20, half + 4
        return cos[..., order], sin[..., order]

    order = list(range(pairs))
    order[4], order[20] = 20, 4
    for edited, bands in ((silent, BandControl(silent=(4,))), (exchanged, BandControl(order=tuple(order)))):
        with angles(model, 3, edited):
            wanted = logits(model, inputs)
        with intervened(model, Change(layer=3, bands=bands)):
            assert near(logits(model, inputs), wanted)


def test_a_silent_head_is_an_empty_place(model: Any, inputs: dict[str, Tensor]) -> None:
    wanted = without_head(model, PLACE, 7, 1, model.config.num_attention_heads, inputs)
    with intervened(model, Change(layer=7, heads=(1,), output="zero")):
        assert near(logits(model, inputs), wanted)


@pytest.mark.parametrize("part", ["positional", "symbolic"])
def test_parts_of_the_logits_change_what_the_model_says(
    model: Any, inputs: dict[str, Tensor], plain: Tensor, part: Any
) -> None:
    with intervened(model, Change(layer=1, attention=part)):
        found = logits(model, inputs)
    assert bool(found.isfinite().all())
    assert not near(found, plain, 1e-3)
