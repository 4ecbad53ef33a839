"""Biases from functions of the distance, against their formulas written once more in plain loops, and in public."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tests.encodings.samples import SIZES, agree
from tests.encodings.samples import build as samples_build
from torch import Tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from x_transformers import x_transformers

from toeplens import encodings
from toeplens.encodings import PositionalEncoding

H = SIZES["num_heads"]


@pytest.fixture
def _double() -> Iterator[None]:
    """Fixed biases come in torch's default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


build = partial(samples_build, std=1.0)


def by_loops(function: Any, q_positions: list[int], k_positions: list[int]) -> Tensor:
    """function(head, i, j) at every head and pair of positions."""
    rows = [[[function(h, i, j) for j in k_positions] for i in q_positions] for h in range(H)]
    return torch.tensor(rows, dtype=torch.float64)


QUERIES, KEYS = [7, 8, 30, 1000, -3], [0, 5, 9, -20, 999, 1000, 4]


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_kerple_is_its_two_kernels() -> None:
    log, power = build("kerple-log"), build("kerple-power")
    size, rate = ([softplus(x) for x in p.tolist()] for p in (log.size, log.rate))
    wanted = by_loops(lambda h, i, j: -size[h] * math.log(1 + rate[h] * abs(i - j)), QUERIES, KEYS)
    agree(log.bias(torch.tensor(QUERIES), torch.tensor(KEYS)), wanted, 1e-10)
    size = [softplus(x) for x in power.size.tolist()]
    exponent = [2 / (1 + math.exp(-x)) for x in power.power.tolist()]
    wanted = by_loops(lambda h, i, j: -size[h] * abs(i - j) ** exponent[h], QUERIES, KEYS)
    agree(
        power.bias(torch.tensor(QUERIES), torch.tensor(KEYS)) / wanted.abs().max(), wanted / wanted.abs().max(), 1e-14
    )


def test_kerple_starts_where_the_published_program_draws() -> None:
    log = encodings.build("kerple-log", **{**SIZES, "num_heads": 4000})
    size, rate = (torch.nn.functional.softplus(p) for p in (log.size, log.rate))
    power = encodings.build("kerple-power", **{**SIZES, "num_heads": 4000})
    for values, low, high in (
        (size, 0.01, 2),
        (rate, 0.01, 1),
        (torch.nn.functional.softplus(power.size), 0.01, 1),
        (2 * power.power.sigmoid(), 0.01, 2),
    ):
        values = values.detach()
        assert low * 0.99 < float(values.min()) < low + 0.01 * high
        assert high * 0.99 < float(values.max()) < high
        assert abs(float(values.mean()) - (low + high) / 2) < 0.03 * high


@pytest.mark.usefixtures("_double")
def test_sandwich_is_the_inner_product_of_sinusoids() -> None:
    def bias(h: int, i: int, j: int) -> float:
        product = sum(math.cos((i - j) / 10000 ** (2 * t / 128)) for t in range(64))
        return product / (8 * (h + 1) / H)

    agree(build("sandwich").bias(torch.tensor(QUERIES), torch.tensor(KEYS)), by_loops(bias, QUERIES, KEYS), 1e-10)
    table = encodings.build("sinusoidal", **{**SIZES, "d_model": 10}, base=50.0).table(torch.arange(9))
    small = build("sandwich", width=10, base=50.0).bias(torch.arange(9), torch.arange(9))
    agree(small[-1] * 8, table @ table.T, 1e-12)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("log_distance", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_the_dynamic_bias_is_x_transformers(depth: int, log_distance: bool, norm: bool) -> None:
    """Its LayerNorm in the first block has no bias, and it makes its distances in float32 whatever its weights."""
    ours = build("dynamic-bias", hidden=6, depth=depth, log_distance=log_distance, norm=norm)
    ours = ours.float()
    theirs = x_transformers.DynamicPositionBias(6, heads=H, depth=depth, log_distance=log_distance, norm=norm)
    with torch.no_grad():
        for block, layer, scale in zip(theirs.mlp, ours.layers_in, ours.norms, strict=False):
            block[0].load_state_dict(layer.state_dict())
            if isinstance(block[1], x_transformers.LayerNorm):
                scale.bias.zero_()
                block[1].gamma.copy_(scale.weight)
            elif norm:
                block[1].load_state_dict(scale.state_dict())
        theirs.mlp[-1].load_state_dict(ours.layer_out.state_dict())
    size = float(ours.bias(torch.arange(40), torch.arange(40)).detach().abs().max())
    for queries in (40, 3):
        positions = torch.arange(40)
        agree(ours.bias(positions[-queries:], positions) / size, theirs(queries, 40) / size, 1e-6)


def test_the_dynamic_bias_tells_sides_apart_and_is_a_quarter_as_wide_as_the_model() -> None:
    encoding = build("dynamic-bias")
    assert encoding.layer_out.in_features == 6
    left, right = encoding.kernel(torch.tensor([3, -3])).T
    assert not torch.allclose(left, right)
    assert encoding.for_layer(3) is encoding
    own = encodings.build("dynamic-bias", **SIZES, shared=False, norm=True)
    assert not torch.equal(own.for_layer(1).layer_out.weight, own.layer_out.weight)


def fire(encoding: PositionalEncoding, start: float) -> Any:
    c, threshold = abs(float(encoding.c)), abs(float(encoding.multiplier) * start)
    inner, outer = encoding.inner, encoding.outer

    def bias(h: int, i: int, j: int) -> float:
        share = math.log(c * abs(i - j) + 1) / (math.log(c * max(i, threshold) + 1) + 1e-6)
        hidden = [max(0.0, float(w) * share + float(b)) for w, b in zip(inner.weight[:, 0], inner.bias, strict=True)]
        return sum(float(w) * x for w, x in zip(outer.weight[h], hidden, strict=True)) + float(outer.bias[h])

    return bias


@pytest.mark.parametrize("threshold", [512.0, 6.0])
def test_fire_is_its_formula_before_and_beyond_the_threshold(threshold: float) -> None:
    encoding = build("fire", threshold=threshold).requires_grad_(False)
    wanted = by_loops(fire(encoding, threshold), QUERIES, KEYS)
    agree(encoding.bias(torch.tensor(QUERIES), torch.tensor(KEYS)), wanted, 1e-10)
    rows = torch.tensor([QUERIES, [1, 2, 3, 4, 2000]])
    both = encoding.bias(rows, torch.tensor(KEYS))
    assert both.shape == (2, H, 5, 7)
    agree(both[1], by_loops(fire(encoding, threshold), rows[1].tolist(), KEYS), 1e-10)


def test_fire_starts_as_published_and_gives_the_first_key_one_bias_beyond_the_threshold() -> None:
    encoding = encodings.build("fire", **SIZES).requires_grad_(False)
    assert float(encoding.c) == pytest.approx(0.1)
    assert float(encoding.multiplier) == 1.0
    assert encoding.inner.out_features == 32
    far = encoding.bias(torch.tensor([600, 5000, 10**6]), torch.tensor([0]))
    agree(far[:, :1].expand_as(far), far, 1e-6)  # i psi / psi(i) is 1, but for the 10^-6 in the denominator
    near = encoding.bias(torch.tensor([6, 50, 500]), torch.tensor([0]))
    assert float((near[:, 0] - near[:, 2]).abs().max()) > 1e-3


def test_fire_starts_from_the_c_that_is_given_in_every_layer() -> None:
    encoding = encodings.build("fire", **SIZES, c=0.3, threshold=20.0).requires_grad_(False)
    for layer in (0, 1):
        own = encoding.for_layer(layer)
        assert float(own.c) == pytest.approx(0.3)
        at_20, at_30 = own.bias(torch.tensor([20, 30]), torch.tensor([20, 30])).diagonal(dim1=1, dim2=2).T
        agree(at_20, at_30, 1e-6)  # psi(0) is 0
        agree(own.bias(torch.tensor([20]), torch.tensor([15])), by_loops(fire(own, 20.0), [20], [15]), 1e-6)


@pytest.mark.parametrize("num_heads", [4, 6, 8, 12])
def test_alibi_is_mpts(num_heads: int) -> None:
    """MPT adds m_h (j - (N - 1)), which a softmax over keys cannot tell from -m_h (i - j)."""
    length = 50
    theirs = build_mpt_alibi_tensor(num_heads, length).double()
    positions = torch.arange(length)
    ours = encodings.build("alibi", **{**SIZES, "num_heads": num_heads}).bias(positions, positions).double()
    causal = torch.ones(length, length).tril()
    agree(ours * causal, (theirs - theirs.transpose(-2, -1)) * causal, 1e-5)
