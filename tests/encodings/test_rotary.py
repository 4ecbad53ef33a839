"""Rotations against plain loops, transformers, x-transformers, rotary-embedding-torch and torch.roll."""

from __future__ import annotations

import cmath
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from rotary_embedding_torch import RotaryEmbedding
from tests.encodings.samples import (
    SIZES,
    assert_close,
    build,
    pair_by_pair,
    pairs_of,
    random_tensor,
    rope,
    rotated_logits,
    softplus,
    vectors,
)
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from x_transformers import x_transformers

from toeplens import encodings
from toeplens.encodings import FrequencyMask, PositionalEncoding, attend, attention_logits, with_frequency_mask
from toeplens.utils import InputError

# ---- learned frequencies, learned maps, steps that tokens set -------------------------------------------------------

H, D, N = 3, 8, 6
PLACES = torch.tensor([-5, 0, 1, 9, 300, 12345])
PAIRINGS = pytest.mark.parametrize("pairing", ["interleaved", "half"])


def inputs(dtype: torch.dtype = torch.float64, length: int = N) -> tuple[Tensor, Tensor, Tensor]:
    return *vectors(length, dtype=dtype), random_tensor(2, length, 24, seed=3, dtype=dtype)


def logits(encoding: PositionalEncoding, q: Tensor, k: Tensor, x: Tensor, places: Tensor = PLACES) -> Tensor:
    notes = encoding.key_features(x)
    every = attention_logits(
        q, k, encoding=encoding, q_positions=places, k_positions=places, scale=1.0, key_features=notes, causal=False
    )
    return every.detach()


def reference_logits(q: Tensor, k: Tensor, angle: Any, pairing: str) -> Tensor:
    """Re sum_t q_t conj(k_t) e^(i angle(b, h, row, column, t))."""
    return pair_by_pair(q, k, lambda *at: cmath.exp(1j * angle(*at)), pairing).real


@PAIRINGS
@pytest.mark.parametrize("per_head", [False, True])
def test_learned_frequencies_are_used_for_rotation(per_head: bool, pairing: str) -> None:
    encoding = build("rope-learned", std=0.5, per_head=per_head, pairing=pairing)
    offsets, places = encoding.offset.tolist(), PLACES.tolist()

    def angle(b: int, h: int, row: int, column: int, t: int) -> float:
        return (places[row] - places[column]) * (10000.0 ** (-2 * t / D) + offsets[h if per_head else 0][t])

    q, k, x = inputs()
    assert float((logits(encoding, q, k, x) - reference_logits(q, k, angle, pairing)).abs().max()) < 1e-10


def test_learned_frequencies_and_gradients_match_rotary_embedding_torch() -> None:
    ours, theirs = build("rope-learned", std=0.5).float(), RotaryEmbedding(D, learned_freq=True)
    with torch.no_grad():
        theirs.freqs.copy_((ours.frequencies + ours.offset)[0])
    q, k, _ = inputs(torch.float32, 64)
    places = torch.arange(64)
    turned_q, turned_k = ours.rotate(q, k, places, places)
    their_q, their_k = theirs.rotate_queries_or_keys(q), theirs.rotate_queries_or_keys(k)
    assert float((turned_q - their_q).detach().abs().max()) < 5e-5
    weights = torch.randn(64, 64).tril()
    (gradient,) = torch.autograd.grad((turned_q @ turned_k.mT * weights).sum(), ours.offset)
    (expected,) = torch.autograd.grad((their_q @ their_k.mT * weights).sum(), theirs.freqs)
    torch.testing.assert_close(gradient[0], expected, rtol=1e-4, atol=1e-2)


@PAIRINGS
@pytest.mark.parametrize("name", ["rope-learned", "harope", "carope", "complexformer"])
def test_learned_frequencies_start_as_rope(name: str, pairing: str) -> None:
    q, k, x = inputs()
    places = torch.arange(N) + 3
    ours = logits(build(name, pairing=pairing), q, k, x, places)
    assert float((ours - logits(build("rope", pairing=pairing), q, k, x, places)).abs().max()) < 1e-9


@PAIRINGS
@pytest.mark.parametrize("kind", ["inverse", "shared"])
def test_harope_logits_match_the_formula(kind: str, pairing: str) -> None:
    encoding = build("harope", std=0.5, map=kind, pairing=pairing)
    encoding = encoding.double()
    q, k, x = inputs()
    mapped_q, mapped_k = torch.empty_like(q), torch.empty_like(k)
    for h in range(H):
        u, v = (
            torch.from_numpy(scipy.linalg.expm(0.5 * (a - a.T)))
            for a in (encoding.left[h].detach().numpy(), encoding.right[h].detach().numpy())
        )
        s = torch.tensor([math.log1p(math.exp(value)) + 1e-6 for value in encoding.sigma[h].tolist()], dtype=u.dtype)
        on_q = u @ torch.diag(s) @ v.T
        on_k = torch.linalg.inv(on_q).T if kind == "inverse" else on_q
        mapped_q[:, h], mapped_k[:, h] = q[:, h] @ on_q.T, k[:, h] @ on_k.T
    places = PLACES.tolist()

    def angle(b: int, h: int, row: int, column: int, t: int) -> float:
        return (places[row] - places[column]) * 10000.0 ** (-2 * t / D)

    ours = logits(encoding, q, k, x)
    assert float((ours - reference_logits(mapped_q, mapped_k, angle, pairing)).abs().max()) < 1e-10
    plain = (q * k).sum(-1)
    same = ours.diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(same, plain, rtol=0, atol=1e-10) == (kind == "inverse")


@PAIRINGS
@pytest.mark.parametrize("start", ["rope", "printed"])
def test_carope_logits_match_the_formula(start: str, pairing: str) -> None:
    encoding = build("carope", std=0.5, start=start, pairing=pairing).double()
    q, k, x = inputs()
    weight = encoding.weight.detach()
    constant = math.log(math.expm1(10000.0 ** (2 / D) - 1)) if start == "rope" else 0.0

    def angle(b: int, h: int, row: int, column: int, t: int) -> float:
        low, high = sorted((row, column))
        total = 0.0
        for m in range(low + 1, high + 1):
            z = sum(float(x[b, m, c]) * float(weight[h, c]) for c in range(24)) + constant
            total += (1 / (math.log1p(math.exp(z)) + 1)) ** t
        return total if row > column else -total

    ours = logits(encoding, q, k, x)
    assert float((ours - reference_logits(q, k, angle, pairing)).abs().max()) < 1e-10


# ---- gains per frequency --------------------------------------------------------------------------------------------

PAIRS = D // 2
PLACES_BANDS = torch.tensor([3, 4, 9, 40, 1000, 12345])
BY_HEAD = [[1.0, 0.5, 0.0, 0.25], [0.0, 0.0, 1.0, 1.0], [1.0, 0.9, 0.1, 0.0]]


def build_bands(name: str, **options: Any) -> PositionalEncoding:
    return encodings.build(name, **SIZES, **json.loads(json.dumps(options)))


def logits_bands(encoding: PositionalEncoding, q: Tensor, k: Tensor) -> Tensor:
    return rotated_logits(encoding, q, k, PLACES_BANDS)


def reference_band_logits(q: Tensor, k: Tensor, gains: list[list[float]], off: str, pairing: str) -> Tensor:
    def factor(b: int, h: int, row: int, column: int, t: int) -> complex:
        g, turn = gains[h][t], rope(int(PLACES_BANDS[row] - PLACES_BANDS[column]), t)
        return g * turn if off == "pair" else 1 - g + g * turn

    return pair_by_pair(q, k, factor, pairing).real


@PAIRINGS
@pytest.mark.parametrize(
    ("gains", "off"),
    [
        *itertools.product((BY_HEAD, [1.0, 0.5, 0.0, 0.25]), ("rotation", "pair")),
        ([3.0, 1.0, 0.0, 1.5], "pair"),  # over one
    ],
)
def test_band_logits_match_the_formulas(gains: list, off: str, pairing: str) -> None:
    q, k = vectors()
    ours = logits_bands(build_bands("rope-bands", gains=gains, off=off, pairing=pairing), q, k)
    expected = reference_band_logits(q, k, gains if isinstance(gains[0], list) else [gains] * H, off, pairing)
    assert float((ours - expected).abs().max()) < 1e-10


def test_custom_frequencies() -> None:
    """One for all pairs turns the whole vector by one angle; a list is RoPE where it is RoPE's; bands still act."""
    q, k = vectors()
    one = logits_bands(build_bands("rope-bands", frequencies=0.7), q, k)
    expected = pair_by_pair(
        q, k, lambda b, h, row, column, t: cmath.exp(0.7j * int(PLACES_BANDS[row] - PLACES_BANDS[column]))
    )
    assert_close(one, expected.real, 1e-10)
    given = build_bands("rope").frequencies[0].tolist()
    same = build_bands("rope-bands", frequencies=given).rotate(q, k, PLACES_BANDS, PLACES_BANDS)
    assert all(
        torch.equal(a, b)
        for a, b in zip(same, build_bands("rope").rotate(q, k, PLACES_BANDS, PLACES_BANDS), strict=True)
    )
    kept = build_bands("rope-bands", frequencies=0.7, keep=[1]).frequencies[0]
    assert kept.tolist() == [0.0, 0.7, 0.0, 0.0]


def test_the_published_ramp_scales_the_keys_of_each_pair() -> None:
    high, low, beta = 0.4, 1.3, 2.0
    q, k = vectors()
    scales = torch.tensor([high + (low - high) * (t / (PAIRS - 1)) ** beta for t in range(PAIRS)], dtype=torch.float64)
    ours = logits_bands(build_bands("rope-bands", ramp=[high, low, beta], off="pair"), q, k)
    expected = logits_bands(build_bands("rope"), q, k * scales.repeat_interleave(2))
    assert float((ours - expected).abs().max()) < 1e-12


@PAIRINGS
def test_all_pairs_on_is_rope_and_all_off_is_nope(pairing: str) -> None:
    q, k = vectors()
    rope = build_bands("rope", pairing=pairing).rotate(q, k, PLACES_BANDS, PLACES_BANDS)
    for options in ({}, {"gains": [1] * PAIRS}, {"keep": [3, 0, 1, 2]}, {"off": "pair"}, {"ramp": [1, 1, 1]}):
        ours = build_bands("rope-bands", pairing=pairing, **options).rotate(q, k, PLACES_BANDS, PLACES_BANDS)
        assert all(torch.equal(a, b) for a, b in zip(ours, rope, strict=True)), options
    still = build_bands("rope-bands", keep=[], pairing=pairing).rotate(q, k, PLACES_BANDS, PLACES_BANDS)
    assert torch.equal(still[0], q)
    assert torch.equal(still[1], k)
    assert not logits_bands(build_bands("rope-bands", keep=[], off="pair", pairing=pairing), q, k).any()


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 0.75, 0.9, 1.0])
def test_p_rope_matches_proportional_rope_of_transformers(p: float) -> None:
    config = LlamaConfig(
        hidden_size=H * D,
        num_attention_heads=H,
        rope_parameters={"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": p},
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["proportional"](config, torch.device("cpu"))
    ours = build_bands("p-rope", p=p).frequencies[0]
    assert float((ours - theirs).abs().max()) < 1e-7
    assert torch.equal(ours == 0, theirs == 0)


# ---- polar forms ----------------------------------------------------------------------------------------------------


def logits_polar(encoding: PositionalEncoding, q: Tensor, k: Tensor, places: Tensor = PLACES) -> Tensor:
    return rotated_logits(encoding, q, k, places)


def test_pope_logits_match_the_formula() -> None:
    encoding = build("pope")
    with torch.no_grad():
        encoding.delta.normal_(std=5.0, generator=torch.Generator().manual_seed(1))
    q, k = vectors()
    ours = logits_polar(encoding, q, k).detach()
    deltas = encoding.delta.tolist()
    assert ours.shape == (2, H, N, N)
    for b in range(2):
        for h in range(H):
            for (row, i), (column, j) in itertools.product(enumerate(PLACES.tolist()), enumerate(PLACES.tolist())):
                total = 0.0
                for c in range(D):
                    delta = min(0.0, max(-2 * math.pi, deltas[h][c]))
                    size = softplus(float(q[b, h, row, c])) * softplus(float(k[b, h, column, c]))
                    total += size * math.cos((j - i) * 10000.0 ** (-c / D) + delta)
                assert abs(float(ours[b, h, row, column]) - total) < 1e-10


@pytest.mark.parametrize("uniform", [False, True])
def test_pope_matches_x_transformers(uniform: bool) -> None:
    places = torch.arange(128)
    q, k = vectors(128, dtype=torch.float32)
    ours, theirs = build("pope", init="uniform" if uniform else "zero"), x_transformers.PolarEmbedding(D, H)
    with torch.no_grad():
        theirs.learned_bias.copy_(ours.delta.unsqueeze(1))
    freqs, bias = theirs(places)
    their_q = x_transformers.apply_polar_pos_emb(q, freqs)
    their_k = x_transformers.apply_polar_pos_emb(k, freqs + bias)
    for a, b in zip(ours.rotate(q, k, places, places), (their_q, their_k), strict=True):
        assert a.shape == b.shape == (2, H, 128, 2 * D)
        assert float((a - b).detach().abs().max()) < 5e-5  # its phases are formed in float32
    assert float((logits_polar(ours, q, k, places) - their_q @ their_k.mT).detach().abs().max()) < 2e-4


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_complexformer_logits_match_the_formula(pairing: str) -> None:
    encoding = build("complexformer", pairing=pairing)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
    q, k = vectors()
    ours = logits_polar(encoding, q, k)
    factors, offsets = encoding.factor.tolist(), encoding.offset.tolist()
    for b, h, row, column in itertools.product(range(2), range(H), range(N), range(N)):
        pairs, total = zip(pairs_of(q[b, h, row], pairing), pairs_of(k[b, h, column], pairing), strict=True), 0.0
        for t, (x, y) in enumerate(pairs):
            angle = factors[h][t] * (cmath.phase(x) - cmath.phase(y)) + offsets[h][t]
            offset = int(PLACES[row] - PLACES[column])
            total += abs(x) * abs(y) * math.cos(angle + offset * 10000.0 ** (-2 * t / D))
        assert abs(float(ours[b, h, row, column]) - total) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-25, 1e-18])
def test_complexformer_gradients_are_finite_for_zero_queries(size: float, dtype: torch.dtype) -> None:
    encoding = build("complexformer")
    q, k = vectors(dtype=dtype)
    q = (q * size).requires_grad_()
    turned_q, turned_k = encoding.rotate(q, k, PLACES, PLACES)
    out = turned_q @ turned_k.mT
    assert bool(out.isfinite().all())
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out.sum(), (q, *encoding.parameters())))


# ---- Fourier series of angles ---------------------------------------------------------------------------------------

D_FOPE = 16
SIZES_FOPE = {"d_model": 48, "num_heads": H, "head_dim": D_FOPE, "max_len": 512}
PLACES_FOPE = torch.tensor([0, 1, 9, 40, 300, 12345])


def build_fope(seed: int = 0, **options: Any) -> PositionalEncoding:
    torch.manual_seed(seed)
    return encodings.build("fope", **SIZES_FOPE, **options)


@pytest.mark.parametrize("padding", ["identity", "ones"])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_fope_rotation_matches_the_formula(pairing: str, padding: str) -> None:
    encoding = build_fope(pairing=pairing, padding=padding)
    frequencies = [
        10000.0 ** (-2 * t / D_FOPE) for t in range(D_FOPE // 2) if 10000.0 ** (-2 * t / D_FOPE) >= 2 * math.pi / 512
    ]
    assert len(frequencies) == 4
    x = random_tensor(2, H, N, D_FOPE)
    ours = encoding.rotate(x, x, PLACES_FOPE, PLACES_FOPE)[0]
    for h, (row, i), t in itertools.product(range(H), enumerate(PLACES_FOPE.tolist()), range(D_FOPE // 2)):
        cosine, sine = 1.0, 1.0 if padding == "ones" else 0.0
        if t < min(len(frequencies), D_FOPE // 4):
            cosine = sum(
                float(encoding.cosines[h, f, t]) * math.cos(i * frequencies[f]) for f in range(len(frequencies))
            )
            sine = sum(float(encoding.sines[h, f, t]) * math.sin(i * frequencies[f]) for f in range(len(frequencies)))
        a, b = (t, t + D_FOPE // 2) if pairing == "half" else (2 * t, 2 * t + 1)
        real, imaginary = float(x[1, h, row, a]), float(x[1, h, row, b])
        assert abs(float(ours[1, h, row, a]) - (real * cosine - imaginary * sine)) < 1e-10
        assert abs(float(ours[1, h, row, b]) - (imaginary * cosine + real * sine)) < 1e-10


def test_without_noise_fope_is_rope_on_the_kept_frequencies() -> None:
    encoding = build_fope(gain=0.0)
    x = random_tensor(2, H, N, D_FOPE)
    ours = encoding.rotate(x, x, PLACES_FOPE, PLACES_FOPE)[0]
    bands = encodings.build("rope-bands", keep=[0, 1, 2, 3], pairing="half", **SIZES_FOPE)
    torch.testing.assert_close(ours, bands.rotate(x, x, PLACES_FOPE, PLACES_FOPE)[0], rtol=1e-12, atol=1e-12)


def test_fope_with_more_frequencies_than_series_starts_evenly_spaced() -> None:
    encoding = build_fope(gain=0.0, base=100.0)
    assert len(encoding.frequencies) == 8
    for matrix in (encoding.cosines, encoding.sines):
        assert matrix.shape == (H, 8, 4)
        assert matrix[1].nonzero().tolist() == [[0, 0], [2, 1], [4, 2], [6, 3]]


# ---- circular shifts and headings -----------------------------------------------------------------------------------

H_ROLLED = 2
PLACES_ROLLED = torch.tensor([-7, 0, 1, 9, 300, 1_048_576])


def build_rolled(name: str, head_dim: int = 8, **options: Any) -> PositionalEncoding:
    return encodings.build(name, d_model=2 * head_dim, num_heads=H_ROLLED, head_dim=head_dim, max_len=64, **options)


@pytest.mark.parametrize("head_dim", [3, 4, 7, 8, 64])
@pytest.mark.parametrize("speed", [1.0, 2.0, 3.0])
def test_an_integer_speed_matches_torch_roll(speed: float, head_dim: int) -> None:
    q, k = vectors(N, H_ROLLED, head_dim)
    ours = build_rolled("rollpe", head_dim, speed=speed).rotate(q, k, PLACES_ROLLED, PLACES_ROLLED)
    for (a, x), (n, i) in itertools.product(zip(ours, (q, k), strict=True), enumerate(PLACES_ROLLED.tolist())):
        assert float((a[:, :, n] - torch.roll(x[:, :, n], int(speed) * i, -1)).abs().max()) < 1e-7


@pytest.mark.parametrize("head_dim", [7, 8])
@pytest.mark.parametrize("speed", [0.25, 0.7, 1.6])
def test_a_fraction_is_a_phase_in_the_fourier_transform(speed: float, head_dim: int) -> None:
    q, k = vectors(N, H_ROLLED, head_dim)
    ours = build_rolled("rollpe", head_dim, speed=speed).rotate(q, k, PLACES_ROLLED, PLACES_ROLLED)[0]
    for n, i in enumerate(PLACES_ROLLED.tolist()):
        spectrum = np.fft.rfft(q[:, :, n].numpy(), axis=-1)
        component = np.arange(spectrum.shape[-1])
        phases = np.exp(-2j * np.pi * component * speed * i / head_dim)
        if head_dim % 2 == 0:
            phases[-1] = (-1) ** (i * round(speed) % 2)
        expected = np.fft.irfft(spectrum * phases, n=head_dim, axis=-1)
        assert float((ours[:, :, n] - torch.from_numpy(expected)).abs().max()) < 1e-8


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_headings_rotate_every_pair_equally(pairing: str) -> None:
    q, k = vectors(N, H_ROLLED)
    ours = rotated_logits(build_rolled("drope", step=0.1, pairing=pairing), q, k, PLACES_ROLLED)
    expected = pair_by_pair(
        q, k, lambda b, h, i, j, t: cmath.exp(0.1j * int(PLACES_ROLLED[i] - PLACES_ROLLED[j])), pairing
    )
    assert_close(ours, expected.real, 1e-9)


# ---- frequency masks ------------------------------------------------------------------------------------------------

MASKS = [FrequencyMask(freeze=(1,)), FrequencyMask(drop=(2,)), FrequencyMask(permute=(1, 0, 3, 2), heads=(0, 2))]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("xpos", {"scale_base": 20.0}),
        ("rope-bands", {"keep": [0, 2]}),
        ("rope-bands", {"gains": [1, 0.5, 0, 0.25]}),
        ("rope-bands", {"gains": [1, 0.5, 2, 0.25], "off": "pair"}),
    ],
)
def test_a_frequency_mask_leaves_decays_and_gains(name: str, options: dict[str, Any], mask: FrequencyMask) -> None:
    """Each pair's kernel is the masked rotation times the decay, or with the gain, of that pair; so are the logits."""
    plain, places = build(name, **options), torch.arange(5)
    offsets = (places[:, None] - places).flatten()
    rotation = mask.mask_kernel(torch.polar(torch.ones(4, 25).double(), plain.frequencies.T * offsets), H)
    if name == "xpos":
        expected = rotation * (plain.log_decay[:, None] * offsets).exp()
    else:
        gains = torch.tensor(options.get("gains", [1, 0, 1, 0])).double()[:, None]
        gains = gains if options.get("off") == "pair" else torch.where(gains == 0, 1.0, gains)  # whose frequency is 0
        expected = gains * rotation + (0 if options.get("off") == "pair" else 1 - gains)
    masked = with_frequency_mask(plain, mask)
    assert_close(masked.kernel(offsets).expand(H, -1, -1), expected.expand(H, -1, -1), 1e-12)
    q, k = vectors(5)
    factors = expected.expand(H, -1, -1).unflatten(-1, (5, 5))
    by_hand = pair_by_pair(q, k, lambda b, h, row, column, t: complex(factors[h, t, row, column]))
    assert_close(rotated_logits(masked, q, k, places), by_hand.real, 1e-10)


def test_a_frequency_mask_acts_on_the_released_phase_table() -> None:
    plain = build("mla", rotary_dim=8, phase_table="released")
    q, k = vectors(5, width=plain.query_dim)
    places = torch.arange(5)
    expected = plain.rotate(q, k, places, places)[0].clone()
    expected[..., D + 2 : D + 4] = 0
    masked = with_frequency_mask(plain, FrequencyMask(drop=(1,)))
    assert_close(masked.rotate(q, k, places, places)[0], expected, 1e-14)


@pytest.mark.parametrize("name", ["pope", "grape", "rope+alibi"])
def test_encodings_other_than_rotary_take_no_frequency_mask(name: str) -> None:
    with pytest.raises(InputError, match=r"^encoding must be a Rotary encoding, .*, got \w+\.$"):
        with_frequency_mask(build(name), FrequencyMask(drop=(0,)))


# ---- xPos -----------------------------------------------------------------------------------------------------------

H_XPOS = 2
SIZES_XPOS = {"d_model": 16, "num_heads": H_XPOS, "head_dim": D, "max_len": 64}


def build_xpos(**options: Any) -> PositionalEncoding:
    return encodings.build("xpos", **SIZES_XPOS, **options)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize(("gamma", "scale_base"), [(0.4, 512.0), (1.0, 50.0)])
def test_xpos_logits_match_the_formula(gamma: float, scale_base: float, pairing: str) -> None:
    places = torch.tensor([0, 1, 7, 100, 2345])
    q, k = vectors(len(places), H_XPOS)

    def factor(b: int, h: int, row: int, column: int, t: int) -> complex:
        offset = int(places[row] - places[column])
        return ((2 * t / D + gamma) / (1 + gamma)) ** (offset / scale_base) * rope(offset, t)

    ours = rotated_logits(build_xpos(gamma=gamma, scale_base=scale_base, pairing=pairing), q, k, places)
    assert_close(ours.tril(), pair_by_pair(q, k, factor, pairing).real.tril(), 1e-10)


def test_xpos_matches_x_transformers() -> None:
    places = torch.arange(128)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-12)):
        theirs = x_transformers.RotaryEmbedding(D, use_xpos=True)
        ours = build_xpos()
        if dtype == torch.float64:  # its tables are made in float32: give it ours
            theirs.inv_freq, theirs.scale = ours.frequencies[0], (ours.log_decay * 512).exp()
        freqs, scale = theirs(places)
        q, k = vectors(128, H_XPOS, dtype=dtype)
        their_q = x_transformers.apply_rotary_pos_emb(q, freqs, scale)
        their_k = x_transformers.apply_rotary_pos_emb(k, freqs, scale**-1)
        difference = (rotated_logits(ours, q, k, places) - their_q @ their_k.mT).tril().abs().max()
        assert float(difference) <= tolerance


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float16, 2000), (torch.bfloat16, 18_000), (torch.float32, 18_000), (torch.float64, 140_000)],
)
def test_the_widest_span_is_finite_and_a_wider_one_refused(dtype: torch.dtype, limit: int) -> None:
    q, k = vectors(64, H_XPOS, dtype=dtype)
    q, k = 3 * q, 3 * k
    q, k = q.requires_grad_(), k.requires_grad_()
    encoding = build_xpos()
    for start in (0, 1_000_000):
        places = torch.linspace(0, limit, 64).long() + start
        for fused in (True, False):
            out = attend(q, k, k, encoding=encoding, q_positions=places, k_positions=places, scale=0.3, fused=fused)
            grads = torch.autograd.grad(out.sum(), (q, k))
            assert all(bool(x.isfinite().all()) for x in (out, *grads))
        with pytest.raises(InputError, match=r"^positions must be within \d+ of .*\.$"):
            encoding.rotate(q, k, places * 2, places * 2)
