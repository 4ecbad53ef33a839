"""Attribution is the derivative it says it is; ranks are compared as scipy compares them, on heads of every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import linregress, spearmanr
from tests.builders import wrong_types
from tests.lens.models import SMALL, decoder, examples
from torch.nn import functional as F

from toeplens.ground import InputError
from toeplens.lens.ablation import (
    BAR,
    SAMPLE,
    EstimateCheck,
    HeadAblation,
    ablate_heads,
    check_estimates,
    sample_heads,
)
from toeplens.lens.kit.interventions import Batch, Intervention, replacements
from toeplens.sources import DecoderSource

LAYERS, HEADS, LENGTH, CLASSES, COUNT = 3, 4, 7, 5, 12
SIZES = {**SMALL, "d_model": 32, "d_ff": 24, "num_layers": LAYERS, "num_heads": HEADS}
every_intervention = pytest.mark.parametrize("intervention", ["zero", "mean", "resample", "position"])


def source(encoding: str = "rope", protocol: str = "paper", **fields: Any) -> DecoderSource:
    return DecoderSource(decoder(**{**SIZES, "encoding": encoding, "protocol": protocol, **fields}))


def batch(ignored: int = 3) -> Batch:
    return examples(COUNT, LENGTH, ignored=ignored)


def attributed(given: DecoderSource, batches: list[Batch], intervention: Intervention, **options: Any) -> HeadAblation:
    return ablate_heads(given, batches, metric="loss", method="attribution", intervention=intervention, **options)


@pytest.mark.parametrize(
    ("encoding", "protocol", "intervention"),
    [("rope", "paper", way) for way in ("zero", "mean", "resample", "position")]
    + [("rope", "released", "position"), ("fox", "paper", "zero"), ("mla", "paper", "mean")],
)
def test_it_is_the_loss_s_derivative_by_each_head_s_gain(
    encoding: str, protocol: str, intervention: Intervention
) -> None:
    """Against central differences of the exact engine, float64, 1e-5 of the largest."""
    given, one, h = source(encoding, protocol), batch(), 1e-6  # no ReLU turns within it
    tokens, labels, lengths = one
    counted = labels >= 0
    other = replacements(given, [one], intervention, 0)(0)
    slopes = np.empty((LAYERS, HEADS))
    steps = 1 + h * torch.cat((torch.eye(HEADS), -torch.eye(HEADS))).double()
    for layer, state in enumerate(given.states(tokens, lengths)):
        own = [other[layer]] if isinstance(other, list) else other
        logits = given.replay(state, steps, own)[:, counted]
        losses = [F.cross_entropy(row, labels[counted]).item() for row in logits]
        slopes[layer] = (np.array(losses[:HEADS]) - np.array(losses[HEADS:])) / (2 * h)
    found = attributed(given, [one], intervention)
    assert np.abs(slopes).max() > 1e-2
    np.testing.assert_allclose(found.drops, -slopes, rtol=0, atol=1e-5 * np.abs(slopes).max())


@every_intervention
def test_baseline_and_counts_are_those_of_the_exact_ablation(intervention: Intervention) -> None:
    given = source()
    exact = ablate_heads(given, [batch()], metric="loss", intervention=intervention)
    found = attributed(given, [batch()], intervention, chance=0.2)
    assert found.baseline == pytest.approx(exact.baseline, abs=1e-12)
    assert (found.examples, found.chance, found.metric) == (exact.examples, 0.2, "loss")
    assert (found.intervention, found.method) == (intervention, "attribution")
    assert np.isnan(found.cumulative).all()
    assert (found.low <= found.drops).all()
    assert (found.drops <= found.high).all()
    assert HeadAblation.from_dict(found.to_dict()).to_dict() == found.to_dict()


@every_intervention
def test_a_sample_of_heads_is_silenced_exactly_to_check_it(intervention: Intervention) -> None:
    given = source(num_heads=16)  # 11 of the 16 in each layer
    found = attributed(given, [batch()], intervention)
    exact = ablate_heads(given, [batch()], metric="loss", intervention=intervention, cumulative=False).drops
    check = found.check
    assert check is not None
    assert (len(check.heads), check.of) == (33, 48)
    np.testing.assert_allclose(check.exact, exact[check.layers, check.heads], rtol=0, atol=1e-12)
    np.testing.assert_array_equal(check.estimates, found.drops[check.layers, check.heads])
    assert ablate_heads(given, [batch()], metric="loss").check is None


def test_the_model_is_left_as_it_was() -> None:
    given = source()
    before = {name: value.clone() for name, value in given.model.state_dict().items()}
    with torch.no_grad():
        attributed(given, [batch()], "position")
    assert all(torch.equal(value, before[name]) for name, value in given.model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in given.model.parameters())


@pytest.mark.parametrize(("metric", "why"), [("accuracy", "has no derivative"), ("kl", "first-order term is 0")])
def test_other_metrics_are_refused(metric: Any, why: str) -> None:
    with pytest.raises(InputError, match=f"metric must be 'loss' for attribution .*{why}.*, got '{metric}'"):
        ablate_heads(source(), [batch()], metric=metric, method="attribution")


@wrong_types
def test_a_source_without_gradients_is_refused() -> None:
    class Bare:
        num_layers, num_heads = LAYERS, HEADS

    with pytest.raises(InputError, match="method must not be 'attribution' for Bare"):
        ablate_heads(Bare(), [batch()], metric="loss", method="attribution")  # type: ignore[arg-type]


RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("layers", "heads"), [(30, 9), (6, 16), (64, 32), (2, 40), (1, 8), (3, 4)])
def test_each_layer_gives_as_many_heads_and_they_fill_the_ranks(layers: int, heads: int) -> None:
    estimates = np.argsort(RNG.random((layers, heads)), axis=1).astype(float)  # each value is its rank in the layer
    sample = sample_heads(estimates)
    sizes = {len(each) for each in sample}
    assert sizes == {min(heads, -(-SAMPLE // layers))}
    assert all(len(set(each.tolist())) == len(each) for each in sample)
    ranks = np.concatenate([values[each] for values, each in zip(estimates, sample, strict=True)])
    if layers * heads > SAMPLE:  # no quarter of the ranks is left out or preferred
        quarters = np.histogram(ranks, bins=4, range=(-0.5, heads - 0.5))[0] / len(ranks)
        assert (abs(quarters - 0.25) < 0.12).all()
    else:
        assert len(ranks) == layers * heads


def test_layers_may_differ_in_heads_and_what_has_no_estimate_is_not_drawn() -> None:
    estimates = [np.array([np.nan, 2.0, 1.0]), np.arange(5.0), np.array([np.nan])]
    assert [each.tolist() for each in sample_heads(estimates)] == [[1, 2], [0, 1, 2, 3, 4], []]
    assert check_estimates(estimates, [np.ones(2), np.ones(5), np.ones(0)]).of == 7


def test_ranks_and_slope_are_scipy_s() -> None:
    estimates = RNG.normal(size=(6, 16))
    truth = 3 * estimates + RNG.normal(size=(6, 16))
    found = check_estimates(estimates, [truth[i][heads] for i, heads in enumerate(sample_heads(estimates))])
    x, y = estimates[found.layers, found.heads], truth[found.layers, found.heads]
    assert found.estimates == tuple(x)
    assert found.exact == tuple(y)
    assert found.rank_correlation == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    mirrored = linregress(np.concatenate((x, -x)), np.concatenate((y, -y)))  # a line through the origin
    assert found.slope == pytest.approx(mirrored.slope, abs=1e-12)
    assert (len(found.heads), found.of) == (36, 96)


def checked(estimates: Any, exact: Any) -> EstimateCheck:
    estimates = np.array([estimates], dtype=float)
    return check_estimates(estimates, [np.array(exact, dtype=float)], [np.arange(estimates.size)])


def test_the_verdict_names_what_holds() -> None:
    few = checked([1, 2, 3], [1, 2, 3])
    assert not few.holds
    assert "fewer than 4 heads" in few.words
    assert checked([1, 2, 3, 4], [1, 2, 3, 4]).holds
    rising = np.arange(1.0, 11)
    assert checked(rising, 1.2 * rising).words == (
        "10 of 10 heads were also ablated exactly: rank correlation 1.00, exact effects 1.20 times the estimates; "
        "the estimates are confirmed."
    )
    small = checked(rising, 30 * rising)
    assert small.holds
    assert small.words.endswith("30.00 times the estimates; the order of the estimates is right, their size is not.")
    swapped = rising.copy()
    swapped[[0, 4]] = swapped[[4, 0]]
    bad = checked(rising, swapped)
    assert bad.rank_correlation < BAR
    assert not bad.holds
    assert bad.words.endswith("the rank correlation is below 0.9, so do not read the estimates as effects.")


@pytest.mark.parametrize("estimates", [np.zeros(10), np.ones(10)])
def test_equal_estimates_are_no_effects(estimates: np.ndarray) -> None:
    found = checked(estimates, np.arange(10.0))
    assert not found.holds
    assert "rank correlation not defined" in found.words
    assert found.words.endswith("do not read the estimates as effects.")
    assert found.to_dict()["rank_correlation"] is None


def test_exact_effects_of_other_heads_are_refused() -> None:
    with pytest.raises(InputError, match=r"exact must have the lengths of the sample, \[4\], got \[3\]"):
        check_estimates(np.zeros((1, 4)), [np.zeros(3)])
