"""Seeds of the deposit: what a batch leaves of single examples' positional gradients, and what descent does to P."""

from __future__ import annotations

import copy
import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.builders import wrong_types
from tests.lens import models
from tests.lens.models import SMALL, decoder, split
from torch.nn import functional as F

from toeplens.backends import DecoderSource
from toeplens.backends.decoder.gradients import DecoderGradients
from toeplens.lens import AttentionTrace
from toeplens.lens.ablation import Batch
from toeplens.lens.gradients import (
    GradientPool,
    Strength,
    batch_sizes,
    diagonal_means,
    margins,
    positional_drift,
    seed_strength,
    weight_directions,
)
from toeplens.lens.kit.position import effect_variance, known_key_part
from toeplens.model import Decoder
from toeplens.utils import InputError

LAYERS, HEADS, LENGTH, COUNT = 2, 2, 6, 24
SIZES = {**SMALL, "d_model": 16, "d_ff": 12, "num_heads": HEADS}
WITHOUT_GRADIENTS = ("nope", "alibi", "t5", "relative-table")  # W_Q and W_K of the first layer cannot move P
WITH_GRADIENTS = ("rope", "sinusoidal", "rope-absolute", "mla")


@cache
def model_of(encoding: str = "rope", protocol: str = "paper") -> Decoder:
    return decoder(seed=3, noise=0.3, encoding=encoding, protocol=protocol, **SIZES)


def examples(*, padded: bool = True, ignored: int = 0, count: int = COUNT) -> Batch:
    return models.examples(count, LENGTH, padded=padded, ignored=ignored)


def strength_of(vectors: np.ndarray, *, bootstrap: int = 0, seed: int = 0, pieces: int = 1, **options: Any) -> Strength:
    pool = GradientPool(len(vectors), bootstrap=bootstrap, seed=seed)
    for part in np.array_split(vectors, pieces):
        pool.add(part)
    return pool.strength(options.pop("sizes", batch_sizes(len(vectors))), **options)


# ---- signal to noise by batch size ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [0.0, 0.5])
def test_the_strength_is_the_rms_over_all_batches_of_the_pool(mean: float) -> None:
    """Every subset of 7 examples written out (float64, 1e-12); the share is the mean product of different examples."""
    vectors = np.random.default_rng(0).normal(mean, 1, size=(7, 2, 3))
    sizes = np.arange(1, 8)
    actual = strength_of(vectors, sizes=sizes)
    for index in range(2):
        g = vectors[:, index]
        energy = np.mean([x @ x for x in g])
        for n, strength in zip(sizes, actual.strength[index], strict=True):
            squares = [np.square(g[list(chosen)].mean(0)).sum() for chosen in itertools.combinations(range(7), n)]
            assert strength == pytest.approx((np.mean(squares) / energy) ** 0.5, abs=1e-12)
        products = [g[i] @ g[j] for i, j in itertools.permutations(range(7), 2)]
        assert actual.share[index] == pytest.approx(np.mean(products) / energy, abs=1e-12)
    assert actual.strength[:, -1] == pytest.approx(
        np.linalg.norm(vectors.mean(0), axis=1) / np.sqrt(np.square(vectors).sum(2).mean(0))
    )


def test_the_interval_of_a_share_has_nominal_tails() -> None:
    """Resample by resample, with pairs of one example with itself left out."""
    vectors = np.random.default_rng(0).normal(size=(20, 3)) + 0.3
    pool = GradientPool(20, bootstrap=200, seed=4)
    pool.add(vectors[:, None])
    actual = pool.strength(np.array([8, 16]))
    rng = np.random.Generator(np.random.Philox(4))
    shares = []
    for weights in rng.multinomial(20, np.full(20, 1 / 20), size=200):
        resampled = np.repeat(vectors, weights, axis=0)
        products = resampled @ resampled.T
        which = np.repeat(np.arange(20), weights)
        shares.append(products[which[:, None] != which].mean() / np.diag(products).mean())
    expected = np.quantile(shares, [0.025, 0.975])
    np.testing.assert_allclose([actual.share_low[0], actual.share_high[0]], expected, rtol=1e-9)


def test_zero_gradients_give_undefined_shares() -> None:
    vectors = np.zeros((16, 3, 2))
    vectors[:, 1] = np.nan
    vectors[:, 2] = 1.0
    actual = strength_of(vectors, bootstrap=5)
    assert all(np.isnan(value[:2]).all() and np.isfinite(value[2]).all() for value in vars(actual).values())
    without = strength_of(vectors[:, 2:])
    assert np.isnan([without.share_low, without.share_high, without.exponent_low, without.exponent_high]).all()
    assert np.isnan(strength_of(vectors[:9, 2:]).exponent).all()  # one size has no slope


@pytest.mark.parametrize("protocol", ["paper", "released"])
@pytest.mark.parametrize("padded", [True, False])
def test_diagonal_means_match_loops(protocol: str, padded: bool) -> None:
    """float64, 1e-14, for offsets of a longer text as well."""
    tokens, labels, lengths = examples(padded=padded, count=5)
    source = DecoderGradients(model_of("alibi", protocol))
    hidden = protocol == "paper" and lengths is not None
    for layer in source.gradients(tokens, labels, lengths)[1]:
        actual = diagonal_means(layer, LENGTH + 2)
        first = 0 if protocol == "paper" else -LENGTH - 1
        assert actual.shape[-1] == LENGTH + 2 - first
        for b, head, column in itertools.product(range(5), range(HEADS), range(actual.shape[-1])):
            size = int(lengths[b]) if hidden else LENGTH
            last_only = protocol == "paper" and layer.layer == LAYERS - 1
            values = []
            for i in [(int(lengths[b]) if padded else LENGTH) - 1] if last_only else range(size):
                j = i - (column + first)
                if 0 <= j < size and (protocol == "released" or j <= i):
                    values.append(float(layer.logits[b, head, 0 if last_only else i, j]))
            assert float(actual[b, head, column]) == pytest.approx(sum(values) / max(1, len(values)), abs=1e-14)
        assert actual.abs().sum() > 1e-3


# ---- what moves P ---------------------------------------------------------------------------------------------------


def variance_of(model: Decoder, batch: Batch, layer: int) -> np.ndarray:
    """Var(P) of a layer's heads at the queries that the model computes."""
    read = batch[2].unsqueeze(1) - 1 if model.config.readout == "last" and layer == LAYERS - 1 else None
    trace = AttentionTrace(DecoderSource(model), batch[0], batch[2])[layer]
    return effect_variance(trace, trace.q, trace.k, known_key_part(trace), read).detach().numpy()


def position_gradients_of(model: Decoder, batch: Batch) -> np.ndarray:
    """Each example's number at the parameters, [L, H, n], from passes of one example."""
    source = DecoderGradients(model)
    _, layers = source.gradients(*batch)
    pairs = zip(weight_directions(source, batch), layers, strict=True)
    return torch.stack([direction(layer)[..., 0].T for direction, layer in pairs]).numpy()


@pytest.mark.parametrize(
    ("encoding", "protocol", "layer"),
    [("rope", "paper", 1), ("sinusoidal", "paper", 0), ("rope", "released", 1), ("alibi", "paper", 1)],
)
def test_values_are_gradients_along_the_gradient_of_var_p(encoding: str, protocol: str, layer: int) -> None:
    """Steps of W_Q and W_K along it change Var(P) fastest, across it not at all; each example's number is its own
    backward pass's gradient along it (float64, 1e-6)."""
    model, batch = model_of(encoding, protocol), examples()
    direction = weight_directions(DecoderGradients(model), batch)[layer]
    numbers = position_gradients_of(model, batch)[layer]
    weight = model.block(layer).attention.qkv.weight
    draw = torch.Generator().manual_seed(0)
    for head in range(HEADS):
        along = torch.zeros(3, HEADS, *direction.to_q.shape[1:]).double()
        along[0, head], along[1, head] = direction.to_q[head], direction.to_k[head]
        assert float(along.norm()) == pytest.approx(1)
        orthogonal = torch.zeros_like(along)
        orthogonal[:2, head] = torch.randn(along[:2, head].shape, generator=draw)
        across = orthogonal / orthogonal.norm()
        slopes = []
        for way in (along, across):
            values = []
            for sign in (1, -1):
                twin = copy.deepcopy(model)
                with torch.no_grad():
                    twin.block(layer).attention.qkv.weight.add_(sign * 1e-5 * way.flatten(0, 2))
                values.append(variance_of(twin, batch, layer)[head])
            slopes.append((values[0] - values[1]) / 2e-5)
        assert slopes[0] > 1e-3
        assert slopes[1] == pytest.approx(slopes[0] * float((across * along).sum()), abs=1e-6 * max(1, slopes[0]))
        for b in (0, 5):
            alone = [part[b : b + 1] for part in batch]
            loss = F.cross_entropy(model(alone[0], alone[2]), alone[1])
            (gradient,) = torch.autograd.grad(loss, weight)
            assert numbers[head, b] == pytest.approx(-float((gradient * along.flatten(0, 2)).sum()), abs=1e-10)


@pytest.mark.parametrize("encoding", [*WITHOUT_GRADIENTS, *WITH_GRADIENTS])
def test_no_value_where_first_layer_weights_cannot_change_var_p(encoding: str) -> None:
    """In float32, as models are."""
    model = copy.deepcopy(model_of(encoding)).float()
    actual = seed_strength(DecoderGradients(model), [examples()], bootstrap=0)
    number = actual.levels["parameters"].mean[..., 0]
    assert np.isnan(number[0]).all() == (encoding in WITHOUT_GRADIENTS)
    assert np.isfinite(number[1]).all()
    assert np.isfinite(actual.levels["parameters"].heads.share[1]).all()
    assert np.isfinite(actual.levels["logits"].mean).all()


def test_seeds_are_strengths_of_diagonal_means_and_gradients() -> None:
    model, batch = model_of(), examples(ignored=5)
    actual = seed_strength(DecoderGradients(model), split(batch, 7), bootstrap=30)
    counted = tuple(part[batch[1] >= 0] for part in batch)
    losses, layers = DecoderGradients(model).gradients(*counted)
    vectors = torch.stack([diagonal_means(layer, LENGTH) for layer in layers], dim=1).numpy()
    numbers = position_gradients_of(model, counted).transpose(2, 0, 1)[..., None]
    assert (actual.sizes, actual.examples) == ((8, 16), COUNT - 5)
    assert actual.loss == pytest.approx(float(losses.mean()))
    for name, values in (("logits", vectors), ("parameters", numbers)):
        level = actual.levels[name]
        np.testing.assert_allclose(level.mean, values.mean(0), rtol=0, atol=1e-12)
        np.testing.assert_allclose(level.signal, np.linalg.norm(values.mean(0), axis=-1), rtol=0, atol=1e-12)
        for strength, options in ((level.heads, {}), (level.layers, {"concatenate": True})):
            expected = strength_of(values, bootstrap=30, **options)
            for key, value in vars(strength).items():
                np.testing.assert_allclose(value, getattr(expected, key), rtol=1e-6, atol=1e-9)


# ---- positional drift ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "protocol"), [("rope", "paper"), ("sinusoidal", "paper"), ("mla", "paper"), ("t5", "released")]
)
def test_the_drift_is_the_change_over_a_small_step_against_the_gradient(encoding: str, protocol: str) -> None:
    """Central difference of Var(P) as `effect_variance` has it (float64, 1e-6 of the largest)."""
    model, batch = model_of(encoding, protocol), examples(ignored=3)
    actual = positional_drift(DecoderGradients(model), batch)
    tokens, labels, lengths = batch
    parameters = list(model.parameters())
    loss = F.cross_entropy(model(tokens, lengths), labels, ignore_index=-100)
    gradient = torch.autograd.grad(loss, parameters)
    values = []
    with torch.no_grad():
        for step in (1e-6, -1e-6, 0):
            twin = copy.deepcopy(model)
            for parameter, along in zip(twin.parameters(), gradient, strict=True):
                parameter.sub_(step * along)
            values.append(np.stack([variance_of(twin, batch, layer) for layer in range(LAYERS)]))
    slope = (values[0] - values[1]) / 2e-6
    np.testing.assert_allclose(actual.drift, slope, rtol=0, atol=1e-6 * np.abs(slope).max())
    np.testing.assert_allclose(actual.effect, values[2], rtol=0, atol=1e-12)
    norms = [float(torch.cat([x.detach().flatten() for x in part]).norm()) for part in (gradient, parameters)]
    assert (actual.gradient_norm, actual.parameter_norm) == (pytest.approx(norms[0]), pytest.approx(norms[1]))
    np.testing.assert_allclose(actual.relative, actual.drift * norms[1] / norms[0])
    assert actual.examples == COUNT - 3


def test_margins_by_hand() -> None:
    actual = margins(np.array([[1.0, 6.0, 3.0], [2.0, 0.5, 1.0], [4.0, 4.0, 1.0]]))
    assert actual.ratio.tolist() == [2.0, 2.0, 1.0]
    assert actual.gamma.tolist() == [1.0, 2.0]


def test_heads_without_a_signal_have_no_margin() -> None:
    actual = margins(np.array([[np.nan, np.nan], [np.nan, 3.0], [2.0, 1.0], [1.0, 0.0]]))
    assert np.isnan(actual.ratio).tolist() == [True, True, False, True]
    assert np.isnan(actual.gamma).tolist() == [True, True, True]
    one = margins(np.array([[2.0], [3.0]]))
    assert np.isnan(one.ratio).all()
    still = margins(np.array([[0.0, 0.0], [0.0, np.nan], [0.0, 2.0]]))
    assert np.isnan(still.ratio).all()
    with pytest.raises(InputError, match="signal must be at least 0, got -1"):
        margins(np.array([[-1.0, 2.0]]))


def test_the_strength_does_not_depend_on_a_small_first_batch() -> None:
    tokens, labels, lengths = examples()
    short = tokens[:2, :-1], labels[:2], lengths[:2].clamp(max=LENGTH - 1)
    pools = ([short, examples()], [examples(), short])
    first, last = (seed_strength(DecoderGradients(model_of()), pool, bootstrap=0) for pool in pools)
    for name, level in first.levels.items():
        np.testing.assert_allclose(level.mean, last.levels[name].mean, rtol=0, atol=1e-12)


@wrong_types
def test_no_examples_and_unknown_levels_are_refused() -> None:
    tokens, labels, lengths = examples()
    source = DecoderGradients(model_of())
    with pytest.raises(InputError, match="batches must have at least one example that counts"):
        seed_strength(source, [(tokens, torch.full_like(labels, -100), lengths)])
    with pytest.raises(InputError, match="levels must include 'logits' or 'parameters', got none"):
        seed_strength(source, [examples()], levels=())
    with pytest.raises(InputError, match=r"^levels must be .*, got 'logit'; did you mean 'logits'"):
        seed_strength(source, [examples()], levels=("logit",))  # type: ignore[arg-type]
