"""Head ablation is the whole model, edited and run anew; attribution is the derivative it says it is."""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import linregress, spearmanr
from tests.builders import wrong_types
from tests.lens import models
from tests.lens.models import (
    logits_with_heads,
    logits_without_heads,
    loud_decoder,
    metric_per_example,
    split,
    with_model_labels,
)
from torch import Tensor
from torch.nn import functional as F

from toeplens.backends import DecoderSource
from toeplens.lens import Batch, HeadAblation, bootstrap_means
from toeplens.lens import ablation as sets
from toeplens.lens.ablation import (
    RANK_THRESHOLD,
    SAMPLE_SIZE,
    EstimateCheck,
    ablate_heads,
    check_estimates,
    cumulative_ablation,
    head_sets,
    sample_heads,
    sufficient_set,
)
from toeplens.lens.kit.interventions import Intervention, donors, is_counted, losses, metric_values, replacements
from toeplens.model import Decoder
from toeplens.utils import InputError

replaying = importlib.import_module("toeplens.backends.decoder.source")

LAYERS, HEADS, LENGTH, COUNT = 2, 3, 6, 9
SIZES = models.SMALL
NAMES = ("nope", "sinusoidal", "t5", "alibi", "rope", "rope-absolute", "mla", "fox", "urpe", "path", "rope-mixed")
# the released phase table is no rotation and the shared query is another projection
VARIANTS: dict[str, dict[str, Any]] = {name: {"encoding": name} for name in NAMES} | {
    "partial-rope": {"encoding": "partial-rope", "encoding_options": {"heads": 1}},
    "mla-released": {
        "encoding": "mla",
        "encoding_options": {"rotary_query": "shared", "latent_norm": False, "phase_table": "released"},
    },
}
INTERVENTIONS = ("zero", "mean", "resample", "position")
both_protocols = pytest.mark.parametrize("protocol", ["paper", "released"])
every_intervention = pytest.mark.parametrize("intervention", INTERVENTIONS)


def decoder(variant: str = "rope", protocol: str = "paper", **fields: Any) -> Decoder:
    return loud_decoder(**{**SIZES, "protocol": protocol, **VARIANTS[variant], **fields})


def examples(*, padded: bool = True, ignored: int = 2) -> Batch:
    return models.examples(COUNT, LENGTH, padded=padded, ignored=ignored)


# ---- the plain program ----------------------------------------------------------------------------------------------


@torch.no_grad()
def head_inputs_and_outputs(model: Decoder, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """The input [L, b, N, D] and head outputs [b, N, H, d] of each layer, as hooks see them where all is computed."""
    per_position = Decoder(model.config.model_copy(update={"readout": "mean"})).double().eval()
    per_position.load_state_dict(model.state_dict())
    captured: list[Tensor] = []
    inputs: dict[int, Tensor] = {}
    for layer in range(LAYERS):
        block = per_position.block(layer)
        block.norm_attention.register_forward_pre_hook(lambda _, x, layer=layer: inputs.update({layer: x[0].clone()}))
        block.attention.out.register_forward_pre_hook(lambda _, x: captured.append(x[0].unflatten(-1, (HEADS, -1))))
    per_position(batch[0], batch[2])
    return torch.stack([inputs[layer] for layer in range(LAYERS)]), captured


@torch.no_grad()
def without_position(model: Decoder, layer: int, x: Tensor, batch: Batch) -> Tensor:
    """Softmax of q . k alone, query by query and key by key, [b, N, H, d]."""
    block, lengths = model.block(layer), batch[2]
    _, context = model.start_pass(batch[0], lengths)
    q, k, v = block.project(x, context)
    result = torch.zeros_like(v)
    for b in range(len(x)):
        length = LENGTH if lengths is None or not model.config.pad_mask else int(lengths[b])
        for i in range(LENGTH):
            keys = min(i + 1, length) if model.config.causal else length
            logits = torch.einsum("hd,hjd->hj", q[b, :, i], k[b, :, :keys]) * block.attention.scale
            result[b, :, i] = torch.einsum("hj,hjd->hd", logits.softmax(-1), v[b, :, :keys])
    return result.transpose(1, 2)


def means(z: Tensor, batch: Batch) -> Tensor:
    """The mean by position over the sequences that count and have a token there, [b, N, H, d]."""
    _, labels, lengths = batch
    result = torch.zeros_like(z)
    for i in range(LENGTH):
        present = [b for b in range(COUNT) if labels[b] >= 0 and (lengths is None or i < lengths[b])]
        if present:
            result[:, i] = torch.stack([z[b, i] for b in present]).mean(0)
    return result


def replacement_outputs(model: Decoder, batch: Batch, intervention: str, seed: int = 0) -> list[Tensor]:
    """What takes the heads' places in each layer, [b, N, H, d]."""
    inputs, z = head_inputs_and_outputs(model, batch)
    if intervention == "zero":
        return [torch.zeros_like(layer) for layer in z]
    if intervention == "mean":
        return [means(layer, batch) for layer in z]
    if intervention == "position":
        return [without_position(model, layer, inputs[layer], batch) for layer in range(LAYERS)]
    _, labels, lengths = batch
    counted = torch.nonzero(labels >= 0).squeeze(1)
    current = torch.full((COUNT,), LENGTH) if lengths is None else lengths
    donor_index = torch.arange(COUNT)
    donor_index[counted] = counted[torch.from_numpy(donors(current[counted].numpy(), seed))]
    return [layer[donor_index] for layer in z]


def assert_ablation_matches(
    model: Decoder, batch: Batch, intervention: Intervention, metric: Any, cumulative: bool = True
) -> None:
    """Drops, baseline and cumulative values are those of the whole model run anew (float64, 1e-10)."""
    labels = batch[1]
    result = ablate_heads(
        DecoderSource(model),
        split(batch, 5),
        metric=metric,
        intervention=intervention,
        bootstrap=5,
        cumulative=cumulative,
    )
    other = replacement_outputs(model, batch, intervention)
    intact = logits_with_heads(model, batch, {})
    before = metric_per_example(metric, intact, intact, labels).mean()
    sign = 1 if metric == "accuracy" else -1
    assert result.baseline == pytest.approx(before, abs=1e-12)
    for layer in range(LAYERS):

        def value(heads: Any, layer: int = layer) -> float:
            logits = logits_with_heads(model, batch, {(layer, head): other[layer][:, :, head] for head in heads})
            return float(metric_per_example(metric, logits, intact, labels).mean())

        drops = np.array([sign * (before - value([head])) for head in range(HEADS)])
        np.testing.assert_allclose(result.drops[layer], drops, rtol=0, atol=1e-10)
        if cumulative:
            order = np.argsort(-result.drops[layer], kind="stable")
            together = [value(order[:k]) for k in range(HEADS + 1)]
            np.testing.assert_allclose(result.cumulative[layer], together, rtol=0, atol=1e-10)
    if metric == "accuracy":
        assert (result.metric, result.intervention, result.method) == ("accuracy", intervention, "exact")


CASES = (
    [(name, "paper", way, "loss", way == "zero") for name in VARIANTS for way in ("zero", "position")]
    + [(name, "released", way, "loss", way == "zero") for name in ("rope", "mla") for way in INTERVENTIONS]
    + [(name, "paper", way, "loss", False) for name in ("rope", "mla") for way in ("mean", "resample")]
    + [("rope", "paper", way, metric, True) for way in INTERVENTIONS for metric in ("accuracy", "loss", "kl")]
    + [("mla-released", "released", "zero", "loss", True)]
)


def source(variant: str = "rope", protocol: str = "paper", **fields: Any) -> DecoderSource:
    return DecoderSource(decoder(variant, protocol, **fields))


@pytest.mark.parametrize(("variant", "protocol", "intervention", "metric", "cumulative"), CASES)
def test_drops_match_rerunning_the_model(
    variant: str, protocol: str, intervention: Intervention, metric: str, cumulative: bool
) -> None:
    if (variant, intervention) != ("mla-released", "position"):  # its tables cannot be switched off
        assert_ablation_matches(decoder(variant, protocol), examples(), intervention, metric, cumulative=cumulative)


@pytest.mark.parametrize("intervention", ["mean", "resample", "position"])
@pytest.mark.parametrize("readout", ["mean", "masked-mean"])
def test_drops_match_with_every_readout_and_without_padding(intervention: Intervention, readout: str) -> None:
    assert_ablation_matches(decoder("alibi", readout=readout), examples(padded=False), intervention, "loss")


@every_intervention
def test_drops_match_with_parallel_layers(intervention: Intervention) -> None:
    assert_ablation_matches(decoder("rope", parallel=True), examples(), intervention, "loss")


@every_intervention
@both_protocols
@pytest.mark.parametrize("numbers", [2**19, 2 * LENGTH * 24, 4 * LENGTH * 24])
def test_replayed_head_gains_match_a_plain_pass(
    intervention: Intervention, protocol: str, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`replay` of a tree of copies against `scale_heads`, a plain pass a copy; gains of all sizes, any number."""
    source, batch = DecoderSource(decoder("fox" if protocol == "paper" else "rope", protocol)), examples()
    gains = torch.rand(5, LAYERS, HEADS, generator=torch.Generator().manual_seed(2)).double()
    gains[1], gains[2, 0], gains[3] = 1, gains[4, 0], gains[3].round()
    other = replacements(source, [batch], intervention, 0)(0)
    monkeypatch.setitem(replaying.MAX_ELEMENTS, "cpu", numbers)
    actual = source.replay(next(iter(source.states(batch[0], batch[2]))), gains, other)
    for row, logits in zip(gains, actual, strict=True):
        with torch.no_grad():
            plain = source.scale_heads(batch[0], batch[2], row[:, None].expand(-1, COUNT, -1), other)
        torch.testing.assert_close(logits, plain, rtol=0, atol=1e-10)


@given(st.lists(st.integers(1, 5), min_size=2, max_size=30), st.integers(0, 9))
def test_resampling_prefers_donors_of_the_same_length(lengths: list[int], seed: int) -> None:
    actual = donors(np.array(lengths), seed)
    for taker, giver in enumerate(actual):
        assert giver != taker
        if lengths.count(lengths[taker]) > 1:
            assert lengths[giver] == lengths[taker]
        elif lengths[taker] < max(lengths):
            assert lengths[giver] == min(n for n in lengths if n > lengths[taker])
        else:
            assert lengths[giver] == max(n for n in lengths if n < lengths[taker])
    for length in {n for n in lengths if lengths.count(n) > 1}:
        group = [taker for taker, n in enumerate(lengths) if n == length]
        assert sorted(actual[group]) == group  # everyone gives once, within the length
    assert np.array_equal(actual, donors(np.array(lengths), seed))


def test_resampling_refuses_a_single_example() -> None:
    tokens, labels, lengths = examples(ignored=COUNT - 1)
    with pytest.raises(InputError, match="batches must have at least 2"):
        ablate_heads(DecoderSource(decoder()), [(tokens, labels, lengths)], intervention="resample")


@pytest.mark.parametrize("method", ["exact", "attribution"])
def test_dropout_is_off_and_the_model_is_left_unchanged(method: Any) -> None:
    model = decoder(dropout=0.5).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        first, second = (
            ablate_heads(DecoderSource(model), [examples()], metric="loss", method=method, bootstrap=5)
            for _ in range(2)
        )
    assert first.to_dict() == second.to_dict()
    assert not model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("intervention", ["zero", "mean", "position"])
def test_a_model_in_half_precision_is_ablated(intervention: Intervention) -> None:
    """To bfloat16's 8 bits of the loss; several heads at once, too."""
    model, batch = models.decoder(seed=1, noise=0.3, encoding="rope", **SIZES).bfloat16(), examples(padded=False)
    exact, actual = (
        ablate_heads(DecoderSource(each), [batch], metric="loss", intervention=intervention)
        for each in (copy.deepcopy(model).double(), model)
    )
    assert abs(exact.drops).max() > 0.1
    assert abs(actual.drops - exact.drops).max() < 0.02
    assert abs(actual.cumulative - exact.cumulative).max() < 0.03


def test_gains_that_differ_only_in_float64_are_kept_distinct() -> None:
    source_model, (tokens, _, lengths) = source(), examples()
    gains = torch.ones(2, HEADS, dtype=torch.float64)
    gains[1, 2] += 1e-9
    one, other = source_model.replay(next(iter(source_model.states(tokens, lengths))), gains)
    assert 0 < float((one - other).abs().max()) < 1e-7


@cache
def model_and_batch(protocol: str = "paper", seed: int = 0) -> tuple[Decoder, Batch]:
    model = decoder(protocol=protocol, seed=seed)
    return model, with_model_labels(model, models.examples(60, LENGTH), ignored=7)


def test_intervals_match_the_paired_bootstrap():
    model, batch = model_and_batch()
    actual = ablate_heads(DecoderSource(model), split(batch, 13), bootstrap=300)

    def right(silent: list[tuple[int, int]]) -> np.ndarray:
        answers = logits_without_heads(model, batch, silent).argmax(-1)
        return (answers == batch[1])[batch[1] >= 0].double().numpy()

    intact = right([])
    paired = [intact - right([place]) for place in itertools.product(range(LAYERS), range(HEADS))]
    low, high = bootstrap_means(np.stack(paired, axis=1), samples=300)
    assert np.array_equal(actual.low.ravel(), low)
    assert np.array_equal(actual.high.ravel(), high)
    assert (actual.low <= actual.drops).all()
    assert (actual.drops <= actual.high).all()


class Stop(Exception):
    pass


class StoppingCache:
    """A memory that says stop at the ``stop_at``-th question it cannot answer."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.kept: dict[str, np.ndarray] = {}
        self.stop_at = stop_at

    def get(self, key: str) -> np.ndarray | None:
        if key not in self.kept and self.stop_at is not None:
            self.stop_at -= 1
            if self.stop_at < 0:
                raise Stop
        return self.kept.get(key)

    def put(self, key: str, right: np.ndarray) -> None:
        assert key not in self.kept
        self.kept[key] = right.copy()


class CountingSource(DecoderSource):
    """Counts its passes."""

    passes = 0

    def states(self, *given: Any) -> Any:
        self.passes += 1
        return super().states(*given)


BATCHES = 3


@pytest.mark.parametrize("stop_at", range(2 * BATCHES + 1))
def test_an_interrupted_ablation_resumes_to_the_same_result(stop_at: int):
    model, batch = model_and_batch()
    batches = split(batch, 60 // BATCHES)
    book, before, after = StoppingCache(stop_at), CountingSource(model), CountingSource(model)
    uninterrupted = ablate_heads(DecoderSource(model), batches)
    if stop_at < 2 * BATCHES:
        with pytest.raises(Stop):
            ablate_heads(before, batches, cache=book)
        assert before.passes == len(book.kept) == stop_at
    book.stop_at = None
    assert ablate_heads(after, batches, cache=book).to_dict() == uninterrupted.to_dict()
    assert before.passes + after.passes == 2 * BATCHES
    assert {right.dtype for right in book.kept.values()} == {np.dtype(bool)}
    resumed = CountingSource(decoder(seed=5))  # a memory that has everything needs no model
    assert ablate_heads(resumed, batches, cache=book).to_dict() == uninterrupted.to_dict()
    assert resumed.passes == 0


# ---- attribution, and the check of its estimates ---------------------------------------------------------------------


def attribution_of(
    given: DecoderSource, batches: list[Batch], intervention: Intervention, **options: Any
) -> HeadAblation:
    return ablate_heads(given, batches, metric="loss", method="attribution", intervention=intervention, **options)


@pytest.mark.parametrize(
    ("variant", "protocol", "intervention"),
    [("rope", "paper", way) for way in INTERVENTIONS]
    + [("rope", "released", "position"), ("fox", "paper", "zero"), ("mla", "paper", "mean")],
)
def test_attribution_is_the_loss_gradient_of_each_head_gain(
    variant: str, protocol: str, intervention: Intervention
) -> None:
    """Against central differences of the exact engine, float64, 1e-5 of the largest."""
    decoder_source, one, h = source(variant, protocol), examples(), 1e-6  # no ReLU turns within it
    tokens, labels, lengths = one
    counted = labels >= 0
    other = replacements(decoder_source, [one], intervention, 0)(0)
    slopes = np.empty((LAYERS, HEADS))
    steps = 1 + h * torch.cat((torch.eye(HEADS), -torch.eye(HEADS))).double()
    for layer, state in enumerate(decoder_source.states(tokens, lengths)):
        own = [other[layer]] if isinstance(other, list) else other
        logits = decoder_source.replay(state, steps, own)[:, counted]
        losses = [F.cross_entropy(row, labels[counted]).item() for row in logits]
        slopes[layer] = (np.array(losses[:HEADS]) - np.array(losses[HEADS:])) / (2 * h)
    actual = attribution_of(decoder_source, [one], intervention)
    assert np.abs(slopes).max() > 1e-2
    np.testing.assert_allclose(actual.drops, -slopes, rtol=0, atol=1e-5 * np.abs(slopes).max())


@every_intervention
def test_baseline_and_counts_match_the_exact_ablation(intervention: Intervention) -> None:
    decoder_source = source()
    exact = ablate_heads(decoder_source, [examples()], metric="loss", intervention=intervention)
    actual = attribution_of(decoder_source, [examples()], intervention, chance=0.2)
    assert actual.baseline == pytest.approx(exact.baseline, abs=1e-12)
    assert (actual.examples, actual.chance, actual.metric) == (exact.examples, 0.2, "loss")
    assert (actual.intervention, actual.method) == (intervention, "attribution")
    assert np.isnan(actual.cumulative).all()
    assert (actual.low <= actual.drops).all()
    assert (actual.drops <= actual.high).all()
    assert HeadAblation.from_dict(actual.to_dict()).to_dict() == actual.to_dict()


@every_intervention
def test_attribution_is_checked_by_ablating_a_sample_of_heads(intervention: Intervention) -> None:
    decoder_source = source(num_layers=3, num_heads=12)  # 11 of the 12 in each layer
    actual = attribution_of(decoder_source, [examples()], intervention)
    exact = ablate_heads(decoder_source, [examples()], metric="loss", intervention=intervention, cumulative=False).drops
    check = actual.check
    assert check is not None
    assert (len(check.heads), check.of) == (33, 36)
    np.testing.assert_allclose(check.exact, exact[check.layers, check.heads], rtol=0, atol=1e-12)
    np.testing.assert_array_equal(check.estimates, actual.drops[check.layers, check.heads])
    assert ablate_heads(decoder_source, [examples()], metric="loss").check is None


@pytest.mark.parametrize(("metric", "why"), [("accuracy", "has no derivative"), ("kl", "first-order term is 0")])
def test_other_metrics_are_refused(metric: Any, why: str) -> None:
    with pytest.raises(InputError, match=f"metric must be 'loss' for attribution .*{why}.*, got '{metric}'"):
        ablate_heads(source(), [examples()], metric=metric, method="attribution")


@wrong_types
def test_a_source_without_gradients_is_refused() -> None:
    class Bare:
        num_layers, num_heads = LAYERS, HEADS

    with pytest.raises(InputError, match="method must not be 'attribution' for Bare"):
        ablate_heads(Bare(), [examples()], metric="loss", method="attribution")  # type: ignore[arg-type]


RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("layers", "heads"), [(30, 9), (6, 16), (64, 32), (2, 40), (1, 8), (3, 4)])
def test_sampled_heads_are_balanced_over_layers_and_ranks(layers: int, heads: int) -> None:
    estimates = np.argsort(RNG.random((layers, heads)), axis=1).astype(float)  # each value is its rank in the layer
    sample = sample_heads(estimates)
    sizes = {len(each) for each in sample}
    assert sizes == {min(heads, -(-SAMPLE_SIZE // layers))}
    assert all(len(set(each.tolist())) == len(each) for each in sample)
    ranks = np.concatenate([values[each] for values, each in zip(estimates, sample, strict=True)])
    if layers * heads > SAMPLE_SIZE:  # no quarter of the ranks is left out or preferred
        quarters = np.histogram(ranks, bins=4, range=(-0.5, heads - 0.5))[0] / len(ranks)
        assert (abs(quarters - 0.25) < 0.12).all()
    else:
        assert len(ranks) == layers * heads


def test_sampling_allows_unequal_layers_and_skips_missing_estimates() -> None:
    estimates = [np.array([np.nan, 2.0, 1.0]), np.arange(5.0), np.array([np.nan])]
    assert [each.tolist() for each in sample_heads(estimates)] == [[1, 2], [0, 1, 2, 3, 4], []]
    assert check_estimates(estimates, [np.ones(2), np.ones(5), np.ones(0)]).of == 7


def test_rank_correlation_and_slope_match_scipy() -> None:
    estimates = RNG.normal(size=(6, 16))
    truth = 3 * estimates + RNG.normal(size=(6, 16))
    actual = check_estimates(estimates, [truth[i][heads] for i, heads in enumerate(sample_heads(estimates))])
    x, y = estimates[actual.layers, actual.heads], truth[actual.layers, actual.heads]
    assert actual.estimates == tuple(x)
    assert actual.exact == tuple(y)
    assert actual.rank_correlation == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    mirrored = linregress(np.concatenate((x, -x)), np.concatenate((y, -y)))  # a line through the origin
    assert actual.slope == pytest.approx(mirrored.slope, abs=1e-12)
    assert (len(actual.heads), actual.of) == (36, 96)


def agreement_of(estimates: Any, exact: Any) -> EstimateCheck:
    estimates = np.array([estimates], dtype=float)
    return check_estimates(estimates, [np.array(exact, dtype=float)], [np.arange(estimates.size)])


def test_the_verdict_of_a_check_is_correct() -> None:
    few = agreement_of([1, 2, 3], [1, 2, 3])
    assert not few.is_reliable
    assert "fewer than 4 heads" in few.summary
    assert agreement_of([1, 2, 3, 4], [1, 2, 3, 4]).is_reliable
    rising = np.arange(1.0, 11)
    assert agreement_of(rising, 1.2 * rising).summary == (
        "10 of 10 heads were also ablated exactly: rank correlation 1.00, exact effects 1.20 times the estimates; "
        "the estimates are confirmed."
    )
    small = agreement_of(rising, 30 * rising)
    assert small.is_reliable
    assert small.summary.endswith("30.00 times the estimates; the order of the estimates is right, their size is not.")
    swapped = rising.copy()
    swapped[[0, 4]] = swapped[[4, 0]]
    bad = agreement_of(rising, swapped)
    assert bad.rank_correlation < RANK_THRESHOLD
    assert not bad.is_reliable
    assert bad.summary.endswith("the rank correlation is below 0.9, so do not read the estimates as effects.")


@pytest.mark.parametrize("estimates", [np.zeros(10), np.ones(10)])
def test_a_check_with_equal_estimates_does_not_hold(estimates: np.ndarray) -> None:
    actual = agreement_of(estimates, np.arange(10.0))
    assert not actual.is_reliable
    assert "rank correlation not defined" in actual.summary
    assert actual.summary.endswith("do not read the estimates as effects.")
    assert actual.to_dict()["rank_correlation"] is None


def test_exact_effects_must_be_of_the_sampled_heads() -> None:
    with pytest.raises(InputError, match=r"exact must have the lengths of the sample, \[4\], got \[3\]"):
        check_estimates(np.zeros((1, 4)), [np.zeros(3)])


@wrong_types
@pytest.mark.parametrize(
    ("field", "value", "near"),
    [("metric", "acuracy", "accuracy"), ("intervention", "zeros", "zero"), ("method", "exat", "exact")],
)
def test_an_unknown_choice_is_refused_with_the_nearest_named(field: str, value: str, near: str):
    model, batch = model_and_batch()
    with pytest.raises(InputError, match=f"^{field} must be .*, got '{value}'; did you mean '{near}'"):
        ablate_heads(DecoderSource(model), [batch], **{field: value})


def test_no_examples_are_refused():
    model, (tokens, labels, lengths) = model_and_batch()
    with pytest.raises(InputError, match="at least one example that counts"):
        ablate_heads(DecoderSource(model), [(tokens, torch.full_like(labels, -100), lengths)])


# ---- models that answer at every token: an example is the mean over its tokens ---------------------------------------


@pytest.fixture(scope="module")
def answering() -> Decoder:
    sizes = {"vocab_size": 11, "d_model": 16, "d_ff": 16, "num_layers": 3, "num_heads": 2, "max_len": 9}
    return models.decoder(seed=1, noise=0.3, **sizes, readout="each", dropout=0.0)


@pytest.fixture(scope="module")
def labelled() -> tuple[Tensor, Tensor, None]:
    rng = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 11, (6, 9), generator=rng)
    labels[1, 3:] = -1  # a text of which some tokens do not count, and one of which none does
    labels[4] = -100
    return torch.randint(0, 11, (6, 9), generator=rng), labels, None


def test_per_token_drops_match_forward_hooks(answering: Decoder, labelled: tuple[Tensor, Tensor, None]) -> None:
    tokens, labels, _ = labelled
    actual = ablate_heads(DecoderSource(answering), [labelled], metric="loss", bootstrap=50)
    assert actual.examples == 5

    def mean_loss(logits: Tensor) -> float:
        rows = [(row[own >= 0], own[own >= 0]) for row, own in zip(logits, labels, strict=True) if (own >= 0).any()]
        return float(np.mean([float(F.cross_entropy(row, own)) for row, own in rows]))

    with torch.no_grad():
        intact = mean_loss(answering(tokens))
    assert actual.baseline == pytest.approx(intact, abs=1e-6)
    for layer, head in itertools.product(range(3), range(2)):
        changed = logits_without_heads(answering, labelled, [(layer, head)])
        assert actual.drops[layer, head] == pytest.approx(mean_loss(changed) - intact, abs=1e-7)


@pytest.mark.parametrize("metric", ["loss", "accuracy", "kl"])
def test_an_examples_effect_is_the_mean_over_its_labels(metric: Any) -> None:
    """Of each text by itself, its labels as examples of one label each; one text has none."""
    rng = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(4, 5, 6, 7, generator=rng), torch.randint(0, 7, (5, 6), generator=rng)
    labels[1, 3:], labels[4] = -1, -100
    actual = metric_values(metric, logits, logits[0], labels)
    alone = [metric_values(metric, logits[:, b], logits[0, b], labels[b]).double().mean(-1) for b in range(4)]
    torch.testing.assert_close(actual, torch.stack(alone, dim=1))


def test_attribution_is_the_slope_of_the_same_loss(answering: Decoder, labelled: tuple[Tensor, Tensor, None]) -> None:
    actual = ablate_heads(DecoderSource(answering), [labelled], metric="loss", method="attribution", bootstrap=0)
    tokens, labels, _ = labelled
    step = 1e-5
    gains = torch.ones(3, 6, 2, dtype=torch.float64)
    still = losses(DecoderSource(answering).scale_heads(tokens, None, gains.clone()), labels)
    gains[1, :, 0] -= step
    moved = losses(DecoderSource(answering).scale_heads(tokens, None, gains), labels)
    slope = (moved - still)[is_counted(labels)].mean().detach() / step
    assert actual.drops[1, 0] == pytest.approx(float(slope), rel=1e-3)


# ---- sets of heads: every point is the whole model run anew without them ---------------------------------------------


PLACES = list(itertools.product(range(LAYERS), range(HEADS)))


def metric_value(
    model: Decoder, batch: Batch, silent: Iterable[tuple[int, int]], metric: str = "accuracy", most: int | None = None
) -> float:
    """The metric over the first ``most`` examples that count."""
    changed, intact = (logits_without_heads(model, batch, heads) for heads in (silent, ()))
    return float(metric_per_example(metric, changed, intact, batch[1])[:most].mean())


@cache
def accuracy_by_head_set(protocol: str = "paper", seed: int = 0) -> dict[frozenset[tuple[int, int]], float]:
    """The accuracy with each set of heads alone, all 2^6 of them."""
    model, batch = model_and_batch(protocol, seed)
    sets = (frozenset(kept) for size in range(len(PLACES) + 1) for kept in itertools.combinations(PLACES, size))
    return {kept: metric_value(model, batch, set(PLACES) - kept) for kept in sets}


@pytest.mark.parametrize("order", ["greedy", "importance", "random"])
@pytest.mark.parametrize(
    ("protocol", "metric", "points"), [("paper", "accuracy", 2), ("paper", "kl", 12), ("released", "loss", 12)]
)
def test_every_curve_point_matches_the_model_without_these_heads(
    order: Any, protocol: str, metric: Any, points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer points than heads, some are left out."""
    monkeypatch.setattr(sets, "CURVE_POINTS", points)
    model, batch = model_and_batch(protocol)
    actual = cumulative_ablation(DecoderSource(model), split(batch, 17), order=order, metric=metric)
    assert actual.orders.shape == ((3 if order == "random" else 1), len(PLACES), 2)
    for heads, curve in zip(actual.orders, actual.curves, strict=True):
        assert sorted(map(tuple, heads)) == PLACES
        removed = ([tuple(head) for head in heads[:k]] for k in range(len(PLACES) + 1))
        plain = [metric_value(model, batch, each, metric) for each in removed]
        assert np.flatnonzero(~np.isnan(curve)).tolist() == ([0, 3, 6] if points == 2 else list(range(7)))
        np.testing.assert_allclose(curve, np.where(np.isnan(curve), np.nan, plain), rtol=0, atol=1e-10)
    assert actual.baseline == actual.curves[0, 0]
    assert (actual.examples, actual.metric) == (53, metric)


@pytest.mark.parametrize("scored", [64, 7])
def test_the_greedy_order_ablates_the_most_harmful_head_first(scored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal accuracies are ordered by the loss; only the scored examples decide."""
    model, batch = model_and_batch()
    monkeypatch.setattr(sets, "SCORING_EXAMPLES", scored)
    actual = cumulative_ablation(DecoderSource(model), split(batch, 17))
    gone: list[tuple[int, int]] = []
    for head in map(tuple, actual.orders[0]):

        def harm(other: tuple[int, int]) -> tuple[float, float]:
            silent = [*gone, other]
            return -metric_value(model, batch, silent, most=scored), metric_value(model, batch, silent, "loss", scored)

        assert head == max((other for other in PLACES if other not in gone), key=harm)
        gone.append(head)


def test_importance_order_sorts_the_single_head_drops() -> None:
    model, batch = model_and_batch()
    drops = ablate_heads(DecoderSource(model), [batch], metric="loss", cumulative=False, bootstrap=2).drops
    actual = cumulative_ablation(DecoderSource(model), [batch], order="importance", metric="loss")
    assert np.array_equal(drops[tuple(actual.orders[0].T)], np.sort(drops.ravel())[::-1])


def test_random_orders_come_from_the_seed() -> None:
    model, batch = model_and_batch()
    state = torch.get_rng_state()
    first, again, other = (
        cumulative_ablation(DecoderSource(model), [batch], order="random", seed=seed).orders for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[0], first[1])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("keep", [0.5, 0.8, 1.0])
def test_a_sufficient_set_is_sufficient_and_minimal(seed: int, keep: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the accuracy of all 64 sets of heads."""
    model, batch = model_and_batch(seed=seed)
    monkeypatch.setattr(sets, "SCORING_EXAMPLES", 20)
    actual = sufficient_set(DecoderSource(model), split(batch, 17), chance=0.25, keep=keep)
    table = accuracy_by_head_set(seed=seed)
    heads = frozenset((int(layer), int(head)) for layer, head in actual.heads)
    need = 0.25 + keep * (table[frozenset(PLACES)] - 0.25) - 1e-9
    assert actual.target_accuracy == pytest.approx(need + 1e-9)
    assert actual.accuracy == pytest.approx(table[heads], abs=1e-12)
    assert table[heads] >= need
    assert all(table[heads - {head}] < need for head in heads)
    assert len(heads) >= min(len(kept) for kept, accuracy in table.items() if accuracy >= need)


def test_head_sets_match_the_single_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "CURVE_POINTS", 2)
    monkeypatch.setattr(sets, "SCORING_EXAMPLES", 5)
    model, batch = model_and_batch()
    source, batches = DecoderSource(model), split(batch, 17)
    actual = head_sets(source, batches, chance=0.25, keep=0.8)
    for name in ("greedy", "importance", "random"):
        curve = cumulative_ablation(source, batches, order=name)  # type: ignore[arg-type]
        assert np.array_equal(np.atleast_2d(getattr(actual, name)), curve.curves, equal_nan=True)
        if name == "greedy":
            assert actual.order == curve.orders[0].tolist()
    enough = sufficient_set(source, batches, chance=0.25, keep=0.8)
    assert actual.sufficient == enough.heads.tolist()
    assert (actual.kept, actual.baseline, actual.examples) == (enough.accuracy, enough.baseline, enough.examples)
    assert (actual.chance, actual.keep) == (0.25, 0.8)


@wrong_types
def test_invalid_head_set_options_are_refused() -> None:
    model, batch = model_and_batch()
    with pytest.raises(InputError, match=r"keep must be over 0 and at most 1, got 0\.0"):
        sufficient_set(DecoderSource(model), [batch], keep=0.0)
    with pytest.raises(InputError, match="got 'gredy'; did you mean 'greedy'"):
        cumulative_ablation(DecoderSource(model), [batch], order="gredy")  # type: ignore[arg-type]
