"""Linear layers by oneDNN, tried on any processor whose torch has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.backends.hf.models import SIZES, calls_in, tiny
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings import cpu_products
from toeplens.encodings.cpu_products import linear

pytestmark = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch without oneDNN")


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """oneDNN is faster here, for products of any size; the shapes that other libraries were given."""
    shapes: list[tuple[int, ...]] = []

    def by_torch(x: Tensor, *others: Any) -> Tensor:
        shapes.append(tuple(x.shape))
        return F.linear(x, *others)

    monkeypatch.setattr(cpu_products, "_mkl_is_slow", lambda: True)
    monkeypatch.setattr(cpu_products, "_MIN_PRODUCT", 0)
    monkeypatch.setattr(linear, "__defaults__", (None, by_torch))
    return shapes


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 5, 7), (2, 1, 3, 300), (0, 7)])
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_the_product_to_the_rounding_of_float32(onednn: list[Any], shape: tuple[int, ...], biased: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape), torch.randn(5, shape[-1]), torch.randn(5)
    out = linear(x, weight, bias if biased else None)
    exact = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    size = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    assert out.shape == exact.shape
    assert not onednn
    assert ((out - exact).abs() <= (shape[-1] + 1) * torch.finfo(torch.float32).eps * size).all()


def test_weights_and_inputs_may_be_views(onednn: list[Any]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(6, 4, 9).transpose(0, 1)[:, ::2], torch.randn(9, 8).t()
    torch.testing.assert_close(linear(x, weight), F.linear(x.contiguous(), weight.contiguous()))
    assert not onednn


def test_what_it_cannot_compute_is_left_to_torch(onednn: list[Any]) -> None:
    x, weight = torch.randn(2, 3), nn.Parameter(torch.randn(4, 3))
    assert linear(x, weight).requires_grad
    with torch.no_grad():
        assert linear(x.double(), weight.double()).dtype == torch.float64
        assert linear(x.bfloat16(), weight.bfloat16()).dtype == torch.bfloat16
        assert linear(x.to("meta"), weight.to("meta")).device.type == "meta"
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x, weight).dtype == torch.bfloat16
        assert torch.vmap(linear, (0, None))(x, weight).shape == (2, 4)
        assert len(onednn) == 6
        linear(x, weight)
    assert len(onednn) == 6


def test_passes_of_a_pretrained_model_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[Tensor] = []

    def ask(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        weights.append(weight)
        return False

    monkeypatch.setattr(cpu_products, "_onednn_is_faster", ask)
    model, before = tiny("LlamaForCausalLM", **SIZES), F.linear
    calls_in(model)
    layers = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    assert all(any(weight is other for other in weights) for weight in layers)
    assert F.linear is before
