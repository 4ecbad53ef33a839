"""Input vectors and biases from functions of the offset, against plain loops and public implementations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.encodings.samples import SIZES, assert_close, build, randomised, softplus
from tests.encodings.samples import build as samples_build
from torch import Tensor
from x_transformers import x_transformers

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, attend
from toeplens.encodings.additive import TUPE
from toeplens.encodings.conformance import _LargestTensor
from toeplens.utils import InputError

# ---- input vectors and TUPE ------------------------------------------------------------------------------------------

H, D = 3, 8
QUERIES, KEYS = [3, 0, 63], [0, 3, 40, 63, 2]


def embedded(encoding: PositionalEncoding, positions: Tensor, batch: int = 1) -> Tensor:
    x = torch.zeros(batch, positions.shape[-1], 24, dtype=torch.float64)
    return encoding.embed(x, positions).detach()


def positions_of(rows: Tensor, limit: int) -> Tensor:
    """The positions whose sinusoids these rows are."""
    table = embedded(build("sinusoidal"), torch.arange(limit))[0]
    difference = (rows.unsqueeze(-2) - table).abs().amax(-1)
    assert float(difference.min(-1).values.max()) < 1e-12
    return difference.argmin(-1)


# ---- scaled ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "start"), [("halves", None), ("interleaved", 1.0)])
def test_the_scaled_sinusoid_is_a_multiple_of_the_sinusoid(layout: str, start: float | None) -> None:
    encoding = build("scaled-sinusoidal", layout=layout, start=start)
    size = 24**-0.5 if start is None else start
    p = torch.tensor([0, 5, 1000, -3])
    for n, i in enumerate(p.tolist()):
        row = embedded(encoding, p)[0, n]
        for t in range(12):
            phase = i / 10000 ** (2 * t / 24)
            sine, cosine = (t, 12 + t) if layout == "halves" else (2 * t, 2 * t + 1)
            assert abs(float(row[sine]) - size * math.sin(phase)) < 1e-7  # the number is a float32
            assert abs(float(row[cosine]) - size * math.cos(phase)) < 1e-7
    offsets = torch.tensor([0, 3])
    assert_close(encoding.kernel(offsets), size**2 * build("sinusoidal").kernel(offsets), 1e-6)


def test_the_scaled_sinusoid_matches_x_transformers() -> None:
    ours, theirs = build("scaled-sinusoidal"), x_transformers.ScaledSinusoidalEmbedding(24)
    assert_close(ours.learned_scale, theirs.scale[0], 1e-9)
    with torch.no_grad():
        ours.learned_scale.fill_(0.7)
        theirs.scale.fill_(0.7)
    assert_close(ours.embed(torch.zeros(1, 100, 24), torch.arange(100))[0], theirs(torch.empty(1, 100)), 1e-5)


# ---- shifted --------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 20), most=st.integers(0, 9))
def test_shape_shifts_each_sequence_by_one_offset(seed: int, most: int) -> None:
    encoding = build("shape", max_shift=most).train()
    torch.manual_seed(seed)
    positions = torch.tensor([[0, 1, 2, 3, 7], [5, 4, 9, 9, 0]]).repeat(20, 1)
    shifts = positions_of(embedded(encoding, positions, 40), 32) - positions
    assert bool((shifts == shifts[:, :1]).all())
    assert int(shifts.min()) >= 0
    assert int(shifts.max()) <= most
    assert most < 2 or len(shifts[:, 0].unique()) > 1


def test_shifts_and_positions_are_random_only_in_training() -> None:
    p = torch.tensor([3, 1, 900])
    for name in ("shape", "randomized-sinusoidal"):
        assert torch.equal(embedded(build(name).eval(), p), embedded(build("sinusoidal"), p))
    shifts = positions_of(embedded(build("shape", max_shift=4).train(), torch.arange(3), 200), 16)[:, 0]
    assert shifts.unique().tolist() == [0, 1, 2, 3, 4]


# ---- randomized -----------------------------------------------------------------------------------------------------


@given(
    positions=st.lists(st.integers(-50, 50), min_size=1, max_size=12),
    seed=st.integers(0, 100),
)
def test_randomized_positions_keep_the_order_of_positions(positions: list[int], seed: int) -> None:
    encoding = build("randomized-sinusoidal", max_position=64).train()
    torch.manual_seed(seed)
    p = torch.tensor(positions)
    places = positions_of(embedded(encoding, p), 64)[0]
    assert bool(((p.unsqueeze(-1) - p).sign() == (places.unsqueeze(-1) - places).sign()).all())
    rows = torch.stack((p, p.flip(0)))
    both = positions_of(embedded(encoding, rows, 2), 64)
    assert torch.equal(both[0], both[1].flip(0))  # one draw for the batch


def test_randomized_positions_are_uniform() -> None:
    encoding = build("randomized-sinusoidal", max_position=64).train()
    p = torch.arange(16)
    counts = torch.zeros(64)
    for _ in range(400):
        counts[encoding.draw_positions(p)] += 1
    # each place is taken with probability 1/4: 100 +- 8.7; no more than 5 deviations away
    assert float((counts - 100).abs().max()) < 44
    assert torch.equal(encoding.draw_positions(torch.arange(64)), torch.arange(64))


def test_more_tokens_than_positions_are_refused() -> None:
    encoding = build("randomized-sinusoidal", max_position=64).train()
    with pytest.raises(InputError, match=r"^max_position must be at least the number of tokens, 65, got 64\.$"):
        embedded(encoding, torch.arange(65))


def test_older_checkpoints_load_into_the_scaled_sinusoid() -> None:
    """Its number is called ``scale`` in a state dict, whatever the attribute of that name is."""
    encoding = build("scaled-sinusoidal")
    assert list(encoding.state_dict()) == ["scale"]
    encoding.load_state_dict({"scale": torch.tensor(0.25)})
    assert (encoding.learned_scale.item(), encoding.scale) == (0.25, SIZES["head_dim"] ** -0.5)


# ---- TUPE -----------------------------------------------------------------------------------------------------------


def tupe(**options: Any) -> TUPE:
    torch.manual_seed(0)
    encoding = encodings.build("tupe", **SIZES, **options).double().requires_grad_(False)
    assert isinstance(encoding, TUPE)
    return randomised(encoding)


def projected_position(encoding: TUPE, layer: torch.nn.Linear, position: int, head: int) -> Tensor:
    p = encoding.weight[position]
    p = (p - p.mean()) / torch.sqrt(p.var(correction=0) + 1e-5) * encoding.norm.weight + encoding.norm.bias
    rows = slice(head * D, head * D + D)
    return layer.weight[rows] @ p + layer.bias[rows]


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("untied_first", [False, True])
def test_tupe_is_a_product_of_its_own_positions(relative: bool, untied_first: bool) -> None:
    encoding = tupe(relative=relative, untied_first=untied_first)
    for queries in (torch.tensor(QUERIES), torch.tensor([QUERIES, [1, 2, 0]])):
        bias = encoding.bias(queries, torch.tensor(KEYS))
        by_sequence = bias if queries.ndim == 2 else bias.unsqueeze(0)
        for (b, row), h in itertools.product(enumerate(queries.reshape(-1, 3).tolist()), range(H)):
            for (n, i), (m, j) in itertools.product(enumerate(row), enumerate(KEYS)):
                if untied_first and 0 in (i, j):
                    value = 0 if i == 0 else 1
                    expected = float(encoding.first[value, h])
                    expected += float(encoding.relative_first[value, h]) if relative else 0.0
                else:
                    q, k = (
                        projected_position(encoding, encoding.to_q, i, h),
                        projected_position(encoding, encoding.to_k, j, h),
                    )
                    expected = float(q @ k) / math.sqrt(2 * D)
                    expected += float(encoding.relative.kernel(torch.tensor([i - j]))[h, 0]) if relative else 0.0
                assert abs(float(by_sequence[b, h, n, m]) - expected) < 1e-10


# ---- biases of the offset --------------------------------------------------------------------------------------------


@pytest.fixture
def _double() -> Iterator[None]:
    """Fixed biases come in torch's default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


build_kernel = partial(samples_build, std=1.0)


def bias_by_loops(function: Any, q_positions: list[int], k_positions: list[int]) -> Tensor:
    """function(head, i, j) at every head and pair of positions."""
    rows = [[[function(h, i, j) for j in k_positions] for i in q_positions] for h in range(H)]
    return torch.tensor(rows, dtype=torch.float64)


QUERIES_KERNEL, KEYS_KERNEL = [7, 8, 30, 1000, -3], [0, 5, 9, -20, 999, 1000, 4]


def test_kerple_matches_its_two_kernels() -> None:
    log, power = build_kernel("kerple-log"), build_kernel("kerple-power")
    size, rate = ([softplus(x) for x in p.tolist()] for p in (log.size, log.rate))
    expected = bias_by_loops(lambda h, i, j: -size[h] * math.log(1 + rate[h] * abs(i - j)), QUERIES_KERNEL, KEYS_KERNEL)
    assert_close(log.bias(torch.tensor(QUERIES_KERNEL), torch.tensor(KEYS_KERNEL)), expected, 1e-10)
    size = [softplus(x) for x in power.size.tolist()]
    exponent = [2 / (1 + math.exp(-x)) for x in power.power.tolist()]
    expected = bias_by_loops(lambda h, i, j: -size[h] * abs(i - j) ** exponent[h], QUERIES_KERNEL, KEYS_KERNEL)
    assert_close(
        power.bias(torch.tensor(QUERIES_KERNEL), torch.tensor(KEYS_KERNEL)) / expected.abs().max(),
        expected / expected.abs().max(),
        1e-14,
    )


def test_kerple_initialization_matches_the_released_code() -> None:
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

    assert_close(
        build_kernel("sandwich").bias(torch.tensor(QUERIES_KERNEL), torch.tensor(KEYS_KERNEL)),
        bias_by_loops(bias, QUERIES_KERNEL, KEYS_KERNEL),
        1e-10,
    )
    table = encodings.build("sinusoidal", **{**SIZES, "d_model": 10}, base=50.0).table(torch.arange(9))
    small = build_kernel("sandwich", width=10, base=50.0).bias(torch.arange(9), torch.arange(9))
    assert_close(small[-1] * 8, table @ table.T, 1e-12)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("log_distance", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_the_dynamic_bias_matches_x_transformers(depth: int, log_distance: bool, norm: bool) -> None:
    """Its LayerNorm in the first block has no bias, and it makes its distances in float32 whatever its weights."""
    ours = build_kernel("dynamic-bias", hidden=6, depth=depth, log_distance=log_distance, norm=norm)
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
        assert_close(ours.bias(positions[-queries:], positions) / size, theirs(queries, 40) / size, 1e-6)


def fire(encoding: PositionalEncoding, start: float) -> Any:
    c, threshold = abs(float(encoding.c)), abs(float(encoding.multiplier) * start)
    inner, outer = encoding.inner, encoding.outer

    def bias(h: int, i: int, j: int) -> float:
        share = math.log(c * abs(i - j) + 1) / (math.log(c * max(i, threshold) + 1) + 1e-6)
        hidden = [max(0.0, float(w) * share + float(b)) for w, b in zip(inner.weight[:, 0], inner.bias, strict=True)]
        return sum(float(w) * x for w, x in zip(outer.weight[h], hidden, strict=True)) + float(outer.bias[h])

    return bias


@pytest.mark.parametrize("name", ["dynamic-bias", "fire", "swin-v2"])
def test_chunks_have_room_for_a_network_over_all_pairs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where it is not computed once per distance: the largest tensor stays below the limit."""
    monkeypatch.setattr("toeplens.encodings.kit.evaluate_distinct", lambda function, *offsets: function(*offsets))
    encoding = build(name, hidden=64)
    q, positions = torch.randn(1, H, 64, D), encoding.to_positions(torch.arange(64))
    with torch.no_grad(), _LargestTensor() as largest:
        attend(
            q, q, q, encoding=encoding, q_positions=positions, k_positions=positions, scale=0.3, pairs_per_chunk=1 << 15
        )
    assert largest.elements <= 1 << 15


@pytest.mark.parametrize("threshold", [512.0, 6.0])
def test_fire_matches_its_formula_before_and_beyond_the_threshold(threshold: float) -> None:
    encoding = build_kernel("fire", threshold=threshold).requires_grad_(False)
    expected = bias_by_loops(fire(encoding, threshold), QUERIES_KERNEL, KEYS_KERNEL)
    assert_close(encoding.bias(torch.tensor(QUERIES_KERNEL), torch.tensor(KEYS_KERNEL)), expected, 1e-10)
    rows = torch.tensor([QUERIES_KERNEL, [1, 2, 3, 4, 2000]])
    both = encoding.bias(rows, torch.tensor(KEYS_KERNEL))
    assert both.shape == (2, H, 5, 7)
    assert_close(both[1], bias_by_loops(fire(encoding, threshold), rows[1].tolist(), KEYS_KERNEL), 1e-10)


def test_fire_starts_from_the_given_c_in_every_layer() -> None:
    encoding = encodings.build("fire", **SIZES, c=0.3, threshold=20.0).requires_grad_(False)
    for layer in (0, 1):
        layer_encoding = encoding.for_layer(layer)
        assert float(layer_encoding.c) == pytest.approx(0.3)
        at_20, at_30 = layer_encoding.bias(torch.tensor([20, 30]), torch.tensor([20, 30])).diagonal(dim1=1, dim2=2).T
        assert_close(at_20, at_30, 1e-6)  # psi(0) is 0
        assert_close(
            layer_encoding.bias(torch.tensor([20]), torch.tensor([15])),
            bias_by_loops(fire(layer_encoding, 20.0), [20], [15]),
            1e-6,
        )
