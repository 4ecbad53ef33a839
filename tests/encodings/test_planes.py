"""Swin's biases: against transformers' modules with the same weights, and in their own coordinates."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from tests.encodings.samples import SIZES, agree, draw, randomised
from tests.encodings.samples import build as samples_build
from torch import Tensor
from transformers import Swinv2Config
from transformers.models.swin import modeling_swin as swin
from transformers.models.swinv2 import modeling_swinv2 as swinv2

from toeplens import encodings
from toeplens.encodings import attend
from toeplens.ground import InputError

H, D = SIZES["num_heads"], SIZES["head_dim"]
WINDOWS = pytest.mark.parametrize("window", [(7, 7), (3, 5), (1, 4)])

build = partial(samples_build, std=1.0)


def raster(window: tuple[int, int]) -> Tensor:
    return torch.cartesian_prod(torch.arange(window[0]), torch.arange(window[1]))


@WINDOWS
def test_swin_is_transformers_swin(window: tuple[int, int]) -> None:
    theirs = randomised(swin.SwinRelativePositionBias(H, window)).double()
    ours = build("swin", window=window)
    ours.load_state_dict({"weight": theirs.relative_position_bias_table})
    places = raster(window)
    agree(ours.bias(places, places), theirs()[0], 0.0)
    assert torch.equal(ours.place(torch.arange(len(places))), places)
    numbers = torch.arange(len(places))
    agree(ours.bias(numbers, numbers), theirs()[0], 0.0)


@pytest.mark.parametrize("pretrained", [None, (12, 6)])
@pytest.mark.parametrize("window", [(8, 8), (3, 5)])
def test_swin_v2_is_transformers_swin_v2(window: tuple[int, int], pretrained: tuple[int, int] | None) -> None:
    """The whole attention: cosine, factor, bias. They form the table of offsets in float32: 1e-6 is asked."""
    config = Swinv2Config(attention_probs_dropout_prob=0.0, qkv_bias=True)
    theirs = swinv2.Swinv2SelfAttention(config, H * D, H, window, [0, 0] if pretrained is None else list(pretrained))
    theirs = randomised(theirs.double(), 0.2).eval()
    with torch.no_grad():
        theirs.logit_scale.flatten().copy_(torch.tensor([0.0, 2.0, 9.0]))  # the last over the bound, log 100
    ours = build("swin-v2", window=window, pretrained_window=pretrained, cosine=True)
    network = theirs.continuous_position_bias_mlp
    ours.load_state_dict(
        {
            "inward.weight": network[0].weight,
            "inward.bias": network[0].bias,
            "outward.weight": network[2].weight,
            "log_factor": theirs.logit_scale.flatten(),
        }
    )
    places = raster(window)
    x = draw(2, len(places), H * D)
    q, k, v = (layer(x).unflatten(-1, (H, D)).transpose(1, 2) for layer in (theirs.query, theirs.key, theirs.value))
    assert ours.scale == 1
    told = {"q_positions": places, "k_positions": places, "scale": ours.scale, "causal": False}
    for fused in (True, False):
        out = attend(q, k, v, encoding=ours, fused=fused, **told)
        agree(out.transpose(1, 2).flatten(-2), theirs(x)[0], 1e-6)


def test_swin_v2s_bias_is_the_formula() -> None:
    ours = build("swin-v2", window=(4, 9), hidden=5)
    w = {name: value.detach() for name, value in ours.named_parameters()}
    offsets = [(0, 0), (3, -8), (-1, 2), (100, 7), (-5, -300)]
    kernel = ours.kernel(torch.tensor(offsets))
    assert kernel is not None
    for n, offset in enumerate(offsets):
        u = [
            math.copysign(math.log2(1 + 8 * abs(d) / (size - 1)) / 3, d) if d else 0.0
            for d, size in zip(offset, (4, 9), strict=True)
        ]
        hidden = [
            max(0.0, float(w["inward.weight"][m] @ torch.tensor(u, dtype=torch.float64) + w["inward.bias"][m]))
            for m in range(5)
        ]
        for h in range(H):
            out = sum(float(w["outward.weight"][h, m]) * hidden[m] for m in range(5))
            assert float(kernel[h, n].detach()) == pytest.approx(16 / (1 + math.exp(-out)), abs=1e-12)


@pytest.mark.parametrize("name", ["swin", "swin-v2"])
@pytest.mark.parametrize("grid", [(3, 4), (40, 40)])
def test_scattered_places_take_the_same_values_as_a_full_grid(name: str, grid: tuple[int, int]) -> None:
    """Few places far apart are worked pair by pair, many near ones by a table of offsets."""
    encoding = build(name, window=(3, 4))
    places = raster(grid)
    whole = encoding.bias(places, places)
    few = torch.tensor([0, len(places) // 2 + 1, len(places) - 1])
    agree(encoding.bias(places[few], places[few]), whole[:, few][:, :, few], 1e-12)
    each = torch.stack((places[few], places[few.flip(0)]))
    by_row = encoding.bias(each, each)
    agree(by_row[0], encoding.bias(each[0], each[0]), 1e-12)
    agree(by_row[1], encoding.bias(each[1], each[1]), 1e-12)


@pytest.mark.parametrize("name", ["swin", "swin-v2"])
def test_rows_are_no_columns(name: str) -> None:
    encoding = build(name)
    kernel = encoding.kernel(torch.tensor([[1, 0], [0, 1], [-1, 0]]))
    assert kernel is not None
    assert kernel.detach().T.unique(dim=0).shape[0] == 3
    assert encoding.kernel(torch.arange(3)) is None


def test_beyond_swins_window_the_outermost_value_goes_on() -> None:
    encoding = build("swin", window=(3, 4))
    kernel = encoding.kernel(torch.tensor([[2, -3], [7, -3], [2, -100], [9, -9]]))
    assert kernel is not None
    agree(kernel, kernel[:, :1].expand(-1, 4), 0.0)


def test_swin_v2_takes_fractions_and_swin_refuses_them() -> None:
    half = torch.tensor([[0.5, 0.0], [0.0, 2.5]])
    offsets = torch.tensor([[1, 0], [0, 2]])
    wide, twice = build("swin-v2", window=(5, 5)), build("swin-v2", window=(9, 9))
    twice.load_state_dict(wide.state_dict())
    agree(wide.at(*(half * 2).unbind(-1)), twice.at(*(half * 4).long().unbind(-1)), 1e-12)
    assert wide.at(*half.unbind(-1)).shape == wide.at(*offsets.unbind(-1)).shape
    with pytest.raises(InputError, match=r"^positions must be integers"):
        build("swin").bias(half, half)


def test_cosine_attention_is_off_by_default() -> None:
    plain, cosine = build("swin-v2"), build("swin-v2", cosine=True)
    assert not plain.overrides("rotate")
    assert cosine.overrides("rotate")
    assert plain.scale == D**-0.5
    fresh = encodings.build("swin-v2", **SIZES, cosine=True)
    q, k = draw(1, H, 4, D), draw(1, H, 4, D, seed=2)
    turned_q, turned_k = fresh.rotate(q, k, torch.arange(4), torch.arange(4))
    torch.testing.assert_close(turned_q.norm(dim=-1), torch.full((1, H, 4), 10.0).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(turned_k.norm(dim=-1), torch.ones(1, H, 4).double(), rtol=1e-12, atol=0)
