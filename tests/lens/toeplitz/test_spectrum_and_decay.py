"""Symbols, eigenvalues and spectra of heads are those of the matrices written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import wrong_types
from tests.lens.models import decoder

from toeplens import encodings
from toeplens.backends import DecoderSource
from toeplens.lens import AttentionTrace, LayerTrace, symbol
from toeplens.lens.toeplitz import decay, spectrum
from toeplens.lens.toeplitz.decay import FORMS, DecayFit, Form, fit_decay
from toeplens.lens.toeplitz.spectrum import bias_spread, contraction, hermitian_part, szego
from toeplens.utils import InputError


def reference_symbol(kernel: np.ndarray, angles: np.ndarray) -> np.ndarray:
    half = (kernel.shape[-1] - 1) // 2
    offsets = np.arange(-half, half + 1)
    return np.stack(
        [[sum(a * np.exp(1j * d * phi) for a, d in zip(row, offsets, strict=True)) for phi in angles] for row in kernel]
    )


@given(size=st.integers(1, 9), points=st.integers(1, 30), seed=st.integers(0, 99), complex_=st.booleans())
def test_the_symbol_matches_the_fourier_series(size: int, points: int, seed: int, complex_: bool) -> None:
    rng = np.random.default_rng(seed)
    kernel = rng.normal(size=(2, 2 * size - 1))
    if complex_:
        kernel = kernel + 1j * rng.normal(size=kernel.shape)
    angles, values = symbol(kernel, points)
    assert len(angles) == points
    assert np.all(np.diff(angles) > 0)
    assert angles.min() >= -np.pi
    assert angles.max() < np.pi
    np.testing.assert_allclose(values, reference_symbol(kernel, angles), atol=1e-12)


def test_empty_angles_are_refused() -> None:
    with pytest.raises(InputError, match="points must be at least 1, got 0"):
        symbol(np.ones(5), 0)


def dense(kernel: np.ndarray, size: int) -> np.ndarray:
    """T_ij = a_(i-j), written out; 0 where the kernel has no value."""
    half = len(kernel) // 2
    matrix = np.zeros((size, size), dtype=kernel.dtype)
    for i in range(size):
        for j in range(size):
            if abs(i - j) <= half:
                matrix[i, j] = kernel[half + i - j]
    return matrix


@given(half=st.integers(0, 6), seed=st.integers(0, 99))
def test_the_hermitian_part_matches_the_matrix(half: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kernel = rng.normal(size=2 * half + 1) + 1j * rng.normal(size=2 * half + 1)
    matrix = dense(kernel, half + 1)
    np.testing.assert_allclose(dense(hermitian_part(kernel), half + 1), (matrix + matrix.conj().T) / 2, atol=1e-15)
    np.testing.assert_allclose(symbol(hermitian_part(kernel))[1], np.real(symbol(kernel)[1]), atol=1e-12)


def test_szego_ends_gaps_and_distribution_by_hand() -> None:
    """2 - 2 cos(phi): everything is known in closed form."""
    sizes = [1, 4, 16, 64, 256]
    actual = szego(np.array([-1.0, 2.0, -1.0]), sizes)
    assert (actual.symbol_low, actual.symbol_high) == pytest.approx((0, 4), abs=1e-12)
    assert actual.sizes.tolist() == sizes
    for index, size in enumerate(sizes):
        eigenvalues = 2 - 2 * np.cos(np.pi * np.arange(1, size + 1) / (size + 1))
        assert actual.lowest[index] == pytest.approx(eigenvalues[0], abs=1e-8)
        assert actual.highest[index] == pytest.approx(eigenvalues[-1], abs=1e-8)
        assert actual.gap_low[index] == pytest.approx(eigenvalues[0], abs=1e-8)
        assert actual.gap_high[index] == pytest.approx(4 - eigenvalues[-1], abs=1e-8)
        at_angles = np.sort([2 - 2 * np.cos(2 * np.pi * k / size) for k in range(size)])
        expected = np.abs(eigenvalues - at_angles).max()
        assert actual.distribution_gap[index] == pytest.approx(expected, abs=1e-12)


@given(half=st.integers(0, 6), size=st.integers(1, 9), seed=st.integers(0, 99), complex_=st.booleans())
def test_szego_ends_match_the_matrix(half: int, size: int, seed: int, complex_: bool) -> None:
    rng = np.random.default_rng(seed)
    kernel = hermitian_part(rng.normal(size=2 * half + 1) + complex_ * 1j * rng.normal(size=2 * half + 1))
    eigenvalues = np.linalg.eigvalsh(dense(kernel, size))
    actual = szego(kernel, [size])
    np.testing.assert_allclose((actual.lowest[0], actual.highest[0]), eigenvalues[[0, -1]], atol=1e-12)


def test_symbol_extremes_are_found_between_grid_angles() -> None:
    """2 cos(phi + 0.3) has its ends at angles that no even grid has."""
    actual = szego(np.array([np.exp(-0.3j), 0, np.exp(0.3j)]), [4])
    assert actual.symbol_low == pytest.approx(-2, abs=1e-12)
    assert actual.symbol_high == pytest.approx(2, abs=1e-12)


@given(degree=st.integers(2, 5), seed=st.integers(0, 999))
def test_no_competing_extreme_of_the_symbol_is_missed(degree: int, seed: int) -> None:
    """Close to 2 cos(degree * phi + c), the symbol has as many minima as its degree, of nearly equal depth."""
    rng = np.random.default_rng(seed)
    half = np.exp(2j * np.pi * rng.random(degree)) * [*np.full(degree - 1, 0.003), 1]
    kernel = np.concatenate((half[::-1].conj(), [0], half))
    actual, values = szego(kernel, [4]), np.real(symbol(kernel, 50_001)[1])
    slack = 1e-13 * np.abs(kernel).sum()
    assert actual.symbol_low <= values.min() + slack
    assert actual.symbol_high >= values.max() - slack


@pytest.mark.parametrize(
    ("kernel", "size", "message"),
    [
        (np.array([0.0, 2.0, 1.0]), 5, "kernel must be Hermitian.*hermitian_part"),
        (np.array([1j, 2.0, 1j]), 5, "kernel must be Hermitian"),
        (np.array([1.0, 2.0]), 5, "odd number"),
        (np.array([np.nan, 2.0, np.nan]), 5, "kernel must be finite"),
        (np.array([1.0, 2.0, 1.0]), 0, "must be at least 1, got 0"),
    ],
)
def test_a_symbol_without_extremes_is_refused(kernel: np.ndarray, size: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        szego(kernel, [size])


LENGTHS = torch.tensor([10, 6, 10])


def layer_of(encoding: str, **options: Any) -> LayerTrace:
    sizes = {"vocab_size": 20, "d_model": 32, "d_ff": 24, "num_layers": 1, "num_heads": 4, "max_len": 12}
    model = decoder(seed=3, noise=0.0, **sizes, encoding=encoding, encoding_options=options)
    return AttentionTrace(DecoderSource(model), torch.randint(0, 20, (3, 10)), LENGTHS)[0]


@pytest.mark.parametrize("encoding", ["rope", "alibi", "mla", "partial-rope", "t5"])
def test_spectral_ratios_by_hand(encoding: str) -> None:
    """float64, 1e-9; every head of every sequence by itself."""
    layer = layer_of(encoding)
    actual = contraction(layer, sequences=2)
    q, k = layer.rotated
    bias = layer.encoding.bias(layer.positions, layer.positions)
    for head in range(4):
        widths, norms, grams, bounds = [], [], [], []
        for sequence, size in enumerate((10, 6)):
            logits = layer.q[sequence, head, :size] @ layer.k[sequence, head, :size].T * layer.scale
            products = q[sequence, head, :size] @ k[sequence, head, :size].T * layer.scale
            if bias is not None:
                products = products + bias[head, :size, :size]
            ranges = [torch.linalg.eigvalsh((x + x.T) / 2) for x in (products, logits)]
            widths.append((ranges[0][-1] - ranges[0][0]) / (ranges[1][-1] - ranges[1][0]))
            norms.append(torch.linalg.svdvals(products)[0] / torch.linalg.svdvals(logits)[0])
            keys = [x[sequence, head, :size] for x in (k, layer.k)]
            grams.append(
                torch.linalg.eigvalsh(keys[0] @ keys[0].T)[-1] / torch.linalg.eigvalsh(keys[1] @ keys[1].T)[-1]
            )
            alone = (keys[0][:, [pair, pair + 1]] for pair in range(0, q.shape[-1], 2))
            each = [torch.linalg.eigvalsh(x @ x.T)[-1] for x in (keys[0], *alone)]
            bounds.append(each[0] / sum(each[1:]))
        if encoding == "rope":  # the sum of its frequencies
            torch.testing.assert_close(actual.bound[head], torch.stack(bounds).mean(), rtol=1e-9, atol=0)
        torch.testing.assert_close(actual.width[head], torch.stack(widths).mean(), rtol=1e-9, atol=0)
        torch.testing.assert_close(actual.norm[head], torch.stack(norms).mean(), rtol=1e-9, atol=0)
        if encoding in ("alibi", "t5"):
            assert actual.gram[head].isnan()
        else:
            torch.testing.assert_close(actual.gram[head], torch.stack(grams).mean(), rtol=1e-9, atol=0)


def test_oversized_matrices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectrum, "MAX_DENSE_POSITIONS", 9)
    with pytest.raises(InputError, match="positions must be at most 9, got 10"):
        contraction(layer_of("rope"))


def test_a_one_token_sequence_has_no_spectrum_and_affects_no_other() -> None:
    layer = layer_of("rope")
    short = replace(layer, lengths=torch.tensor([1, 6, 10]))
    rest = replace(layer, lengths=LENGTHS[1:], **{name: getattr(layer, name)[1:] for name in ("q", "k", "v")})
    for actual, expected in zip(
        vars(contraction(short, sequences=2)).values(), vars(contraction(rest)).values(), strict=True
    ):
        assert actual.isfinite().all()
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    with pytest.raises(InputError, match="lengths must include a sequence"):
        contraction(replace(layer, lengths=torch.ones(3, dtype=torch.long)))


def test_an_encoding_without_a_position_spectrum_is_refused() -> None:
    for encoding in ("fox", "shaw", "cope"):
        with pytest.raises(InputError, match=r"encoding must be a rotation, a bias or vectors at the input, got"):
            contraction(layer_of(encoding))


_SIZES = {"d_model": 16, "num_heads": 4, "head_dim": 4, "max_len": 12}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["alibi", "t5", "relative-table"])
def test_bias_spread_is_over_all_distances(name: str, causal: bool) -> None:
    torch.manual_seed(3)
    layers = [encodings.build(name, **_SIZES) for _ in range(2)]
    for layer in layers:
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
    actual = bias_spread(layers, 12, causal=causal)
    positions = torch.arange(12)
    for layer, row in zip(layers, actual.spread, strict=True):
        table = layer.bias(positions, positions)
        assert table is not None
        by_offset = {i - j: table[:, i, j] for i in range(12) for j in range(12) if i >= j or not causal}
        values = torch.stack([by_offset[offset] for offset in sorted(by_offset)], dim=-1).detach().double().numpy()
        centred = values - values.mean(1, keepdims=True)
        np.testing.assert_allclose(row, np.sqrt((centred**2).mean(1)), rtol=1e-6)
    assert actual.log2_spread == pytest.approx(np.log2(np.sqrt((actual.spread**2).mean())))


def test_a_constant_bias_has_no_spread_and_a_rotation_is_refused() -> None:
    relative = encodings.build("relative-table", **_SIZES)
    for parameter in relative.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    assert bias_spread([relative], 12).spread.max() < 1e-6
    with pytest.raises(InputError, match="must add a bias by distance"):
        bias_spread([encodings.build("rope", **_SIZES)], 12)


# ---- planted forms of decay come back, whatever the unit and however many offsets there are --------------------------


PLANTED: dict[Form, dict[str, float]] = {
    "constant": {"a": 0.7},
    "linear": {"a": 1.0, "b": 0.05},
    "exponential": {"a": 2.0, "tau": 15.0, "c": -1.0},
    "power": {"a": 3.0, "p": 0.8, "c": 0.5},
    "logarithmic": {"a": 1.0, "b": 0.4},
}
each_form = pytest.mark.parametrize("form", list(PLANTED))


def planted(form: Form, offsets: np.ndarray, given: Mapping[str, float] | None = None) -> np.ndarray:
    """The forms as `FORMS` writes them, offset by offset."""
    g = given or PLANTED[form]
    formulas: dict[Form, Callable[[float], float]] = {
        "constant": lambda delta: g["a"],
        "linear": lambda delta: g["a"] - g["b"] * delta,
        "exponential": lambda delta: g["a"] * math.exp(-delta / g["tau"]) + g["c"],
        "power": lambda delta: g["a"] * (1 + delta) ** -g["p"] + g["c"],
        "logarithmic": lambda delta: g["a"] - g["b"] * math.log(1 + delta),
    }
    return np.array([formulas[form](delta) for delta in offsets.tolist()])


def causal(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and the entries on each diagonal of a causal matrix."""
    return np.arange(size), np.arange(size, 0, -1)


def noise(counts: np.ndarray, level: float, seed: int = 0) -> np.ndarray:
    """As means of ``counts`` entries have it."""
    rng = np.random.Generator(np.random.Philox(seed))
    return level * rng.normal(size=len(counts)) * np.sqrt(counts[0] / counts)


def fit_of(fits: list[DecayFit], form: Form) -> DecayFit:
    return next(fit for fit in fits if fit.form == form)


@each_form
@pytest.mark.parametrize("size", [20, 300, 1_048_576])
def test_a_planted_form_is_recovered(form: Form, size: int) -> None:
    """Without noise: first in rank, parameters to 1e-3 (relative), with blocks and without."""
    offsets, counts = causal(size)
    means = planted(form, offsets)
    fits = fit_decay(offsets, means, counts=counts)
    assert {fit.form for fit in fits} == set(FORMS)
    assert np.all(np.diff([fit.bic for fit in fits]) >= 0)
    assert fits[0].form == form
    assert fits[0].parameters == pytest.approx(PLANTED[form], rel=1e-3)
    expected = np.nan if form == "constant" else 1
    assert fits[0].r2 == pytest.approx(expected, abs=1e-9, nan_ok=True)
    np.testing.assert_allclose(fits[0].evaluate(offsets), means, rtol=1e-3, atol=1e-3)


@each_form
def test_fitted_parameters_are_a_local_minimum(form: Form) -> None:
    """The weighted squares, written out, grow whichever parameter moves."""
    offsets, counts = causal(200)
    means = planted(form, offsets) + noise(counts, 0.01)
    for fit in fit_decay(offsets, means, counts=counts):
        if fit.form == "exponential" and form == "linear":  # its tau is at the end of the search
            continue
        if fit.form == "power" and form in ("logarithmic", "linear", "constant"):  # and so may be p
            continue
        squares = sum(n * (m - v) ** 2 for n, m, v in zip(counts, means, fit.evaluate(offsets), strict=True))
        for name, value in fit.parameters.items():
            for factor in (1 - 1e-3, 1 + 1e-3):
                moved = planted(fit.form, offsets, {**fit.parameters, name: value * factor})
                assert (counts * (means - moved) ** 2).sum() > squares


def test_r2_and_bic_are_their_definitions() -> None:
    offsets, counts = causal(50)
    means = planted("power", offsets) + noise(counts, 0.05)
    level = (counts * means).sum() / counts.sum()
    total = (counts * (means - level) ** 2).sum()
    for fit in fit_decay(offsets, means, counts=counts):
        residual = (counts * (means - fit.evaluate(offsets)) ** 2).sum()
        assert fit.r2 == pytest.approx(1 - residual / total, abs=1e-12)
        bic = 50 * np.log(residual / counts.sum()) + len(PLANTED[fit.form]) * np.log(50)
        assert fit.bic == pytest.approx(bic, abs=1e-9)


def test_half_distances_are_where_half_remains() -> None:
    offsets = np.arange(400)
    limits: dict[Form, float] = {"exponential": -1.0, "power": 0.5}
    for form, limit in limits.items():
        fit = fit_decay(offsets, planted(form, offsets))[0]
        assert fit.form == form
        here, half = fit.evaluate(np.array([0.0, fit.half_distance]))
        assert half - limit == pytest.approx((here - limit) / 2, rel=1e-5)
    for fit in fit_decay(offsets, planted("power", offsets)):
        assert np.isnan(fit.half_distance) == (fit.form not in limits)


def test_offsets_without_mean_or_count_are_omitted() -> None:
    offsets, counts = causal(100)
    means = planted("power", offsets) + noise(counts, 0.05)
    measured = offsets % 3 > 0
    expected = fit_decay(offsets[measured], means[measured], counts=counts[measured])
    assert fit_decay(offsets, np.where(measured, means, np.nan), counts=counts) == expected
    assert fit_decay(offsets, np.where(measured, means, 1e9), counts=np.where(measured, counts, 0)) == expected


@pytest.mark.parametrize("form", ["linear", "power"])
def test_blocking_changes_a_fit_little(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets, counts = causal(20_000)
    means = planted(form, offsets) + noise(counts, 0.01)
    thinned = fit_of(fit_decay(offsets, means, counts=counts), form)
    monkeypatch.setattr(decay, "_BLOCKS", 20_000)
    single_block = fit_of(fit_decay(offsets, means, counts=counts), form)
    assert thinned.parameters == pytest.approx(dict(single_block.parameters), rel=1e-4)
    assert thinned.r2 == pytest.approx(single_block.r2, abs=1e-6)


ONES = np.ones(5)


@pytest.mark.parametrize(
    ("offsets", "means", "counts", "message"),
    [
        pytest.param(
            np.arange(4), ONES, None, r"offsets must have shape \[5\], as means, got shape \[4\]", marks=wrong_types
        ),
        pytest.param(np.arange(5), ONES, ONES[1:], r"counts must have shape \[5\]", marks=wrong_types),
        (np.arange(-1, 4), ONES, None, "offsets must be finite and at least 0"),
        (np.array([0, 1, 1, 2, 3]), ONES, None, "offsets must be unique, got 1 more than once"),
        (np.arange(5), np.array([1, 2, np.nan, np.nan, 3]), None, "means must have at least 4 .*, got 3"),
        (np.arange(5), np.array([1, 2, 3, 4, np.inf]), None, "means must be finite"),
        (np.arange(5), ONES, np.array([1, 1, 1, 1, -1]), "counts must be finite and at least 0"),
    ],
)
def test_unfittable_input_is_refused(
    offsets: np.ndarray, means: np.ndarray, counts: np.ndarray | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        fit_decay(offsets, means, counts=counts)
