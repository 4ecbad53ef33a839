"""Head ablation, whatever takes a head's place and however harm is counted: the whole model, edited and run anew."""

from __future__ import annotations

import importlib
import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy
from tests.builders import wrong_types
from tests.lens import models
from tests.lens.models import logits_without, loud_decoder, split, with_heads
from torch import Tensor
from torch.nn import functional as F

from toeplens.ground import InputError
from toeplens.lens import Batch, ablate_heads, bootstrap_means
from toeplens.lens.kit.interventions import Intervention, counts, donors, losses, outcomes, replacements
from toeplens.model import Decoder
from toeplens.sources import DecoderSource

replaying = importlib.import_module("toeplens.sources.decoder.source")

LAYERS, HEADS, LENGTH, CLASSES, COUNT = 2, 3, 6, 5, 9
SIZES = models.SMALL
NAMES = ("nope", "sinusoidal", "t5", "alibi", "rope", "rope-absolute", "mla", "fox", "urpe", "path")
# the released phase table is no rotation and the shared query is another projection
VARIANTS: dict[str, dict[str, Any]] = {name: {"encoding": name} for name in NAMES} | {
    "partial-rope": {"encoding": "partial-rope", "encoding_options": {"heads": 1}},
    "mla-released": {
        "encoding": "mla",
        "encoding_options": {"rotary_query": "shared", "latent_norm": False, "phase_table": "released"},
    },
}
both_protocols = pytest.mark.parametrize("protocol", ["paper", "released"])
every_intervention = pytest.mark.parametrize("intervention", ["zero", "mean", "resample", "position"])


def decoder(variant: str = "rope", protocol: str = "paper", **fields: Any) -> Decoder:
    return loud_decoder(**{**SIZES, "protocol": protocol, **VARIANTS[variant], **fields})


def examples(*, padded: bool = True, ignored: int = 2) -> Batch:
    return models.examples(COUNT, LENGTH, padded=padded, ignored=ignored)


# ---- the plain program ----------------------------------------------------------------------------------------------


@torch.no_grad()
def outputs(model: Decoder, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """The input [L, b, N, D] and head outputs [b, N, H, d] of each layer, as hooks see them where all is computed."""
    whole = Decoder(model.config.model_copy(update={"readout": "mean"})).double().eval()
    whole.load_state_dict(model.state_dict())
    seen: list[Tensor] = []
    inputs: list[Tensor] = []
    for layer in range(LAYERS):
        block = whole.block(layer)
        block.norm_attention.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone()))
        block.attention.out.register_forward_pre_hook(lambda _, args: seen.append(args[0].unflatten(-1, (HEADS, -1))))
    whole(batch[0], batch[2])
    return torch.stack(inputs), seen


@torch.no_grad()
def without_position(model: Decoder, layer: int, x: Tensor, batch: Batch) -> Tensor:
    """Softmax of q . k alone, query by query and key by key, [b, N, H, d]."""
    block, lengths = model.block(layer), batch[2]
    _, context = model.begin(batch[0], lengths)
    q, k, v = block.project(x, context)
    found = torch.zeros_like(v)
    for b in range(len(x)):
        length = LENGTH if lengths is None or not model.config.pad_mask else int(lengths[b])
        for i in range(LENGTH):
            keys = min(i + 1, length) if model.config.causal else length
            logits = torch.einsum("hd,hjd->hj", q[b, :, i], k[b, :, :keys]) * block.attention.scale
            found[b, :, i] = torch.einsum("hj,hjd->hd", logits.softmax(-1), v[b, :, :keys])
    return found.transpose(1, 2)


def means(z: Tensor, batch: Batch) -> Tensor:
    """The mean by position over the sequences that count and have a token there, [b, N, H, d]."""
    _, labels, lengths = batch
    found = torch.zeros_like(z)
    for i in range(LENGTH):
        there = [b for b in range(COUNT) if labels[b] >= 0 and (lengths is None or i < lengths[b])]
        if there:
            found[:, i] = torch.stack([z[b, i] for b in there]).mean(0)
    return found


def instead(model: Decoder, batch: Batch, intervention: str, seed: int = 0) -> list[Tensor]:
    """What takes the heads' places in each layer, [b, N, H, d]."""
    inputs, z = outputs(model, batch)
    if intervention == "zero":
        return [torch.zeros_like(layer) for layer in z]
    if intervention == "mean":
        return [means(layer, batch) for layer in z]
    if intervention == "position":
        return [without_position(model, layer, inputs[layer], batch) for layer in range(LAYERS)]
    _, labels, lengths = batch
    counted = torch.nonzero(labels >= 0).squeeze(1)
    own = torch.full((COUNT,), LENGTH) if lengths is None else lengths
    other = torch.arange(COUNT)
    other[counted] = counted[torch.from_numpy(donors(own[counted].numpy(), seed))]
    return [layer[other] for layer in z]


def per_example(metric: str, logits: Tensor, intact: Tensor, labels: Tensor) -> np.ndarray:
    """The metric of each example that counts, from its definition."""
    rows = [b for b in range(COUNT) if labels[b] >= 0]
    p, q = (np.exp(x.log_softmax(-1).numpy()) for x in (intact, logits))
    if metric == "accuracy":
        return np.array([float(q[b].argmax() == labels[b]) for b in rows])
    return np.array([-np.log(q[b][labels[b]]) if metric == "loss" else entropy(p[b], q[b]) for b in rows])


def check(model: Decoder, batch: Batch, intervention: Intervention, metric: Any, cumulative: bool = True) -> None:
    """Drops, baseline and cumulative values are those of the whole model run anew (float64, 1e-10)."""
    labels = batch[1]
    found = ablate_heads(
        DecoderSource(model),
        split(batch, 5),
        metric=metric,
        intervention=intervention,
        bootstrap=5,
        cumulative=cumulative,
    )
    other = instead(model, batch, intervention)
    intact = with_heads(model, batch, {})
    before = per_example(metric, intact, intact, labels).mean()
    sign = 1 if metric == "accuracy" else -1
    assert found.baseline == pytest.approx(before, abs=1e-12)
    for layer in range(LAYERS):

        def value(heads: Any, layer: int = layer) -> float:
            logits = with_heads(model, batch, {(layer, head): other[layer][:, :, head] for head in heads})
            return float(per_example(metric, logits, intact, labels).mean())

        drops = np.array([sign * (before - value([head])) for head in range(HEADS)])
        np.testing.assert_allclose(found.drops[layer], drops, rtol=0, atol=1e-10)
        if cumulative:
            order = np.argsort(-found.drops[layer], kind="stable")
            together = [value(order[:k]) for k in range(HEADS + 1)]
            np.testing.assert_allclose(found.cumulative[layer], together, rtol=0, atol=1e-10)
    if metric == "accuracy":
        assert (found.metric, found.intervention, found.method) == ("accuracy", intervention, "exact")


EVERY = ("zero", "mean", "resample", "position")
CASES = (
    [(name, "paper", way, "loss", way == "zero") for name in VARIANTS for way in ("zero", "position")]
    + [(name, "released", way, "loss", way == "zero") for name in ("rope", "mla") for way in EVERY]
    + [(name, "paper", way, "loss", False) for name in ("rope", "mla") for way in ("mean", "resample")]
    + [("rope", "paper", way, metric, True) for way in EVERY for metric in ("accuracy", "loss", "kl")]
    + [("mla-released", "released", "zero", "loss", True)]
)


@pytest.mark.parametrize(("variant", "protocol", "intervention", "metric", "cumulative"), CASES)
def test_drops_are_what_running_the_whole_model_anew_gives(
    variant: str, protocol: str, intervention: Intervention, metric: str, cumulative: bool
) -> None:
    if (variant, intervention) != ("mla-released", "position"):  # its tables cannot be switched off
        check(decoder(variant, protocol), examples(), intervention, metric, cumulative=cumulative)


@pytest.mark.parametrize("intervention", ["mean", "resample", "position"])
@pytest.mark.parametrize("readout", ["mean", "masked-mean"])
def test_so_they_are_with_every_readout_and_without_padding(intervention: Intervention, readout: str) -> None:
    check(decoder("alibi", readout=readout), examples(padded=False), intervention, "loss")


@every_intervention
@both_protocols
@pytest.mark.parametrize("numbers", [2**19, 2 * LENGTH * 24, 4 * LENGTH * 24])
def test_heads_of_several_layers_change_as_in_one_pass_with_gains(
    intervention: Intervention, protocol: str, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`replay` of a tree of copies against `scaled`, a plain pass a copy; gains of all sizes, any number at once."""
    source, batch = DecoderSource(decoder("fox" if protocol == "paper" else "rope", protocol)), examples()
    gains = torch.rand(5, LAYERS, HEADS, generator=torch.Generator().manual_seed(2)).double()
    gains[1], gains[2, 0], gains[3] = 1, gains[4, 0], gains[3].round()
    other = replacements(source, [batch], intervention, 0)(0)
    monkeypatch.setitem(replaying.AT_ONCE, "cpu", numbers)
    found = source.replay(next(iter(source.states(batch[0], batch[2]))), gains, other)
    for row, logits in zip(gains, found, strict=True):
        with torch.no_grad():
            plain = source.scaled(batch[0], batch[2], row[:, None].expand(-1, COUNT, -1), other)
        torch.testing.assert_close(logits, plain, rtol=0, atol=1e-10)


# ---- donors ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), min_size=2, max_size=30), st.integers(0, 9))
def test_everyone_has_a_donor_of_the_same_length_where_there_is_one(lengths: list[int], seed: int) -> None:
    found = donors(np.array(lengths), seed)
    for taker, giver in enumerate(found):
        assert giver != taker
        if lengths.count(lengths[taker]) > 1:
            assert lengths[giver] == lengths[taker]
        elif lengths[taker] < max(lengths):
            assert lengths[giver] == min(n for n in lengths if n > lengths[taker])
        else:
            assert lengths[giver] == max(n for n in lengths if n < lengths[taker])
    for length in {n for n in lengths if lengths.count(n) > 1}:
        group = [taker for taker, n in enumerate(lengths) if n == length]
        assert sorted(found[group]) == group  # everyone gives once, within the length
    assert np.array_equal(found, donors(np.array(lengths), seed))


def test_one_example_has_no_donor() -> None:
    tokens, labels, lengths = examples(ignored=COUNT - 1)
    with pytest.raises(InputError, match="batches must have at least 2"):
        ablate_heads(DecoderSource(decoder()), [(tokens, labels, lengths)], intervention="resample")


# ---- gains, examples, and what is known beforehand -------------------------------------------------------------------


def test_dropout_is_off_and_nothing_stays_changed_in_the_model() -> None:
    model = decoder(dropout=0.5).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, second = (ablate_heads(DecoderSource(model), [examples()], bootstrap=5) for _ in range(2))
    assert first.to_dict() == second.to_dict()
    assert not model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@cache
def standing() -> tuple[Decoder, Batch]:
    """A model, and texts of which two labels in three are what it answers."""
    model, (tokens, _, lengths) = decoder(), models.examples(60, LENGTH)
    with torch.no_grad():
        labels = model(tokens, lengths).argmax(-1)
    draw = torch.Generator().manual_seed(1)
    labels[::3] = torch.randint(0, CLASSES, (20,), generator=draw)
    labels[torch.randperm(60, generator=draw)[:7]] = -100
    return model, (tokens, labels, lengths)


def test_intervals_are_the_paired_bootstrap_of_the_answers():
    model, batch = standing()
    found = ablate_heads(DecoderSource(model), split(batch, 13), bootstrap=300)

    def right(silent: list[tuple[int, int]]) -> np.ndarray:
        answers = logits_without(model, batch, silent).argmax(-1)
        return (answers == batch[1])[batch[1] >= 0].double().numpy()

    intact = right([])
    paired = [intact - right([place]) for place in itertools.product(range(LAYERS), range(HEADS))]
    low, high = bootstrap_means(np.stack(paired, axis=1), samples=300)
    assert np.array_equal(found.low.ravel(), low)
    assert np.array_equal(found.high.ravel(), high)
    assert (found.low <= found.drops).all()
    assert (found.drops <= found.high).all()


# ---- interrupted and resumed -----------------------------------------------------------------------------------------


class Stop(Exception):
    pass


class Book:
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


class Counting(DecoderSource):
    """Counts its passes."""

    passes = 0

    def states(self, *given: Any) -> Any:
        self.passes += 1
        return super().states(*given)


BATCHES = 3


@pytest.mark.parametrize("stop_at", range(2 * BATCHES + 1))
def test_stopped_between_two_batches_and_gone_on_with_it_ends_the_same(stop_at: int):
    model, batch = standing()
    batches = split(batch, 60 // BATCHES)
    book, before, after = Book(stop_at), Counting(model), Counting(model)
    whole = ablate_heads(DecoderSource(model), batches)
    if stop_at < 2 * BATCHES:
        with pytest.raises(Stop):
            ablate_heads(before, batches, memory=book)
        assert before.passes == len(book.kept) == stop_at
    book.stop_at = None
    assert ablate_heads(after, batches, memory=book).to_dict() == whole.to_dict()
    assert before.passes + after.passes == 2 * BATCHES
    assert {right.dtype for right in book.kept.values()} == {np.dtype(bool)}
    again = Counting(decoder(seed=5))  # a memory that has everything needs no model
    assert ablate_heads(again, batches, memory=book).to_dict() == whole.to_dict()
    assert again.passes == 0


# ---- records and refusals -------------------------------------------------------------------------------------------


@wrong_types
@pytest.mark.parametrize(
    ("field", "value", "near"),
    [("metric", "acuracy", "accuracy"), ("intervention", "zeros", "zero"), ("method", "exat", "exact")],
)
def test_an_unknown_choice_is_refused_with_the_nearest_named(field: str, value: str, near: str):
    model, batch = standing()
    with pytest.raises(InputError, match=f"^{field} must be .*, got '{value}'; did you mean '{near}'"):
        ablate_heads(DecoderSource(model), [batch], **{field: value})


def test_no_examples_are_refused():
    model, (tokens, labels, lengths) = standing()
    with pytest.raises(InputError, match="at least one example that counts"):
        ablate_heads(DecoderSource(model), [(tokens, torch.full_like(labels, -100), lengths)])
    with pytest.raises(InputError, match="at least one example that counts"):
        ablate_heads(DecoderSource(model), [])


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


def test_what_is_lost_is_what_hooks_lose(answering: Decoder, labelled: tuple[Tensor, Tensor, None]) -> None:
    tokens, labels, _ = labelled
    found = ablate_heads(DecoderSource(answering), [labelled], metric="loss", bootstrap=50)
    assert found.examples == 5

    def mean_loss(logits: Tensor) -> float:
        rows = [(row[own >= 0], own[own >= 0]) for row, own in zip(logits, labels, strict=True) if (own >= 0).any()]
        return float(np.mean([float(F.cross_entropy(row, own)) for row, own in rows]))

    with torch.no_grad():
        intact = mean_loss(answering(tokens))
    assert found.baseline == pytest.approx(intact, abs=1e-6)
    for layer, head in itertools.product(range(3), range(2)):
        changed = logits_without(answering, labelled, [(layer, head)])
        assert found.drops[layer, head] == pytest.approx(mean_loss(changed) - intact, abs=1e-7)


@pytest.mark.parametrize("metric", ["loss", "accuracy", "kl"])
def test_an_example_is_the_mean_over_its_labels(metric: Any) -> None:
    """Of each text by itself, its labels as examples of one label each; one text has none."""
    rng = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(4, 5, 6, 7, generator=rng), torch.randint(0, 7, (5, 6), generator=rng)
    labels[1, 3:], labels[4] = -1, -100
    found = outcomes(metric, logits, logits[0], labels)
    alone = [outcomes(metric, logits[:, b], logits[0, b], labels[b]).double().mean(-1) for b in range(4)]
    torch.testing.assert_close(found, torch.stack(alone, dim=1))


def test_attribution_is_the_slope_of_the_same_loss(answering: Decoder, labelled: tuple[Tensor, Tensor, None]) -> None:
    found = ablate_heads(DecoderSource(answering), [labelled], metric="loss", method="attribution", bootstrap=0)
    tokens, labels, _ = labelled
    step = 1e-5
    gains = torch.ones(3, 6, 2, dtype=torch.float64)
    still = losses(DecoderSource(answering).scaled(tokens, None, gains.clone()), labels)
    gains[1, :, 0] -= step
    moved = losses(DecoderSource(answering).scaled(tokens, None, gains), labels)
    slope = (moved - still)[counts(labels)].mean().detach() / step
    assert found.drops[1, 0] == pytest.approx(float(slope), rel=1e-3)
