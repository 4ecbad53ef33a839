"""Head ablation is what a plain program finds that silences a head inside the whole model and runs it anew."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.lens.models import logits_without, loud_decoder, split
from torch import Tensor

from toeplens.backends import DecoderSource
from toeplens.ground import InputError
from toeplens.lens import Batch, HeadAblation, ablate_heads, bootstrap_means, deposit
from toeplens.model import Decoder

LAYERS, HEADS, LENGTH, CLASSES = 3, 4, 9, 5
COUNT = 60
SIZES = {
    "vocab_size": 11,
    "num_classes": CLASSES,
    "d_model": 32,
    "d_ff": 24,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "max_len": 12,
}
READOUTS = ("last", "mean", "masked-mean")
# the released phase table is no rotation and the shared query is another projection
NAMES = ("nope", "sinusoidal", "t5", "rope", "mla", "fox", "urpe", "path")
VARIANTS: dict[str, dict[str, Any]] = {name: {"encoding": name} for name in NAMES} | {
    "mla-released": {
        "encoding": "mla",
        "encoding_options": {"rotary_query": "shared", "latent_norm": False, "phase_table": "released"},
    },
    "partial-rope-2": {"encoding": "partial-rope", "encoding_options": {"heads": 2}},
}
RELEASED = ("rope", "mla-released")  # in the released protocol too


def decoder(variant: str = "rope", protocol: str = "paper", seed: int = 0, **fields: Any) -> Decoder:
    """A decoder in float64 with large random weights everywhere, so that every head does something."""
    return loud_decoder(seed=seed, **{**SIZES, "protocol": protocol, **VARIANTS[variant], **fields})


def examples(model: Decoder, *, padded: bool = True, ignored: int = 7, count: int = COUNT, seed: int = 1) -> Batch:
    """Random texts; two labels in three are what the model answers, some do not count."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, SIZES["vocab_size"], (count, LENGTH), generator=draw)
    lengths = torch.randint(2, LENGTH + 1, (count,), generator=draw) if padded else None
    if lengths is not None:
        tokens = tokens.masked_fill(torch.arange(LENGTH) >= lengths[:, None], 0)
    with torch.no_grad():
        labels = model(tokens, lengths).argmax(-1)
    changed = torch.rand(count, generator=draw) < 1 / 3
    labels[changed] = torch.randint(0, CLASSES, (int(changed.sum()),), generator=draw)
    labels[torch.randperm(count, generator=draw)[:ignored]] = -100
    return tokens, labels, lengths


# ---- the plain program ----------------------------------------------------------------------------------------------


def right_without(model: Decoder, batch: Batch, silent: Iterable[tuple[int, int]]) -> np.ndarray:
    return right(logits_without(model, batch, silent), batch[1])


def right(logits: Tensor, labels: Tensor) -> np.ndarray:
    return (logits.argmax(-1) == labels)[labels >= 0].double().numpy()


def check(model: Decoder, batch: Batch) -> HeadAblation:
    """Drops, cumulative accuracies and every logit behind them are those of the whole model run anew."""
    source = DecoderSource(model)
    heads, labels = model.config.num_heads, batch[1]
    found = ablate_heads(source, split(batch, 25), bootstrap=20)
    intact = logits_without(model, batch, [])
    for layer, state in enumerate(source.states(batch[0], batch[2])):
        single = [logits_without(model, batch, [(layer, head)]) for head in range(heads)]
        drops = [(right(intact, labels) - right(logits, labels)).mean() for logits in single]
        order = sorted(range(heads), key=lambda head: -drops[head])
        silent = [[(layer, head) for head in order[:k]] for k in range(2, heads + 1)]
        together = [logits_without(model, batch, places) for places in silent]
        growing = [intact, single[order[0]], *together]
        assert found.drops[layer].tolist() == drops
        assert found.cumulative[layer].tolist() == [right(logits, labels).mean() for logits in growing]
        gains = torch.ones(2 * heads + 1, heads)
        for head in range(heads):
            gains[head, head] = 0
            gains[heads + head + 1, order[: head + 1]] = 0
        replayed = source.replay(state, gains)
        torch.testing.assert_close(replayed, torch.stack([*single, *growing]), rtol=0, atol=1e-10)
    assert found.baseline == right(intact, labels).mean()
    assert found.examples == int((labels >= 0).sum())
    return found


@pytest.mark.parametrize(
    ("variant", "protocol"),
    [(variant, "paper") for variant in VARIANTS] + [(variant, "released") for variant in RELEASED],
)
def test_drops_and_logits_are_what_running_the_whole_model_anew_gives(variant: str, protocol: str):
    model = decoder(variant, protocol)
    found = check(model, examples(model))
    assert len(np.unique(found.drops)) > 3  # else the test could not see anything


@pytest.mark.parametrize("readout", READOUTS)
def test_a_gain_between_scales_the_head(readout: str):
    model = decoder(readout=readout)
    batch = examples(model, count=8)
    gains = torch.tensor([[0.5, 1.0, -2.0, 0.25]])
    with torch.no_grad():
        for layer, state in enumerate(DecoderSource(model).states(batch[0], batch[2])):
            weight = model.block(layer).attention.out.weight
            kept = weight.clone()
            replayed = DecoderSource(model).replay(state, gains)[0]
            weight.mul_(gains[0].repeat_interleave(model.config.head_dim))
            torch.testing.assert_close(replayed, model(batch[0], batch[2]), rtol=0, atol=1e-10)
            weight.copy_(kept)


def test_dropout_is_off():
    model = decoder(dropout=0.5).train()
    batch = examples(decoder(dropout=0.5))
    first, second = (ablate_heads(DecoderSource(model), [batch], bootstrap=5) for _ in range(2))
    assert first.to_dict() == second.to_dict()
    assert not model.training


def test_nothing_stays_changed_in_the_model():
    model = decoder()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ablate_heads(DecoderSource(model), [examples(model)], bootstrap=5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# ---- which examples, in which order, in which batches ---------------------------------------------------------------


@cache
def standing(variant: str = "rope") -> tuple[Decoder, Batch]:
    model = decoder(variant)
    return model, examples(model)


def test_ignored_labels_count_nowhere():
    model, (tokens, labels, lengths) = standing()
    counted = labels >= 0
    assert 0 < counted.sum() < len(labels)
    alone = (tokens[counted], labels[counted], lengths[counted])
    with_ignored = ablate_heads(DecoderSource(model), [(tokens, labels, lengths)])
    assert with_ignored.to_dict() == ablate_heads(DecoderSource(model), [alone]).to_dict()
    assert with_ignored.examples == counted.sum()
    renamed = (tokens, labels.masked_fill(~counted, -1), lengths)
    assert ablate_heads(DecoderSource(model), [renamed]).to_dict() == with_ignored.to_dict()


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("variant", ["rope", "mla"])
def test_how_the_examples_are_split_does_not_matter(size: int, variant: str):
    model, batch = standing(variant)
    batch = split(batch, 16)[0]
    parts = iter(split(batch, size))
    whole, found = (ablate_heads(DecoderSource(model), given, bootstrap=50) for given in ([batch], parts))
    assert found.to_dict() == whole.to_dict()


# ---- what is known beforehand ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "head", "variant"), [(0, HEADS - 1, "rope"), (LAYERS - 1, 0, "mla")])
def test_a_planted_head_is_found_and_is_a_single_head_deposit(layer: int, head: int, variant: str):
    """All output projections but one head's are nothing, and that head's is loud."""
    model = decoder(variant, readout="mean")
    width = model.config.head_dim
    with torch.no_grad():
        for index in range(LAYERS):
            out = model.block(index).attention.out
            loud = out.weight[:, head * width : (head + 1) * width].clone()
            out.weight.zero_()
            if out.bias is not None:
                out.bias.zero_()
            if index == layer:
                out.weight[:, head * width : (head + 1) * width] = 20 * loud
    with torch.no_grad():
        tokens, _, lengths = examples(model, count=200, ignored=0)
        labels = model(tokens, lengths).argmax(-1)
        found = ablate_heads(DecoderSource(model), [(tokens, labels, lengths)], chance=1 / CLASSES, bootstrap=100)
    assert found.baseline == 1.0
    assert np.flatnonzero(found.drops).tolist() == [layer * HEADS + head]
    assert found.low[layer, head] > 0.3
    others = np.delete(found.low.ravel(), layer * HEADS + head), np.delete(found.high.ravel(), layer * HEADS + head)
    assert not np.any(others)
    assert found.cumulative[layer, 1:] == pytest.approx(np.full(HEADS, 1 - found.drops[layer, head]))
    layers = deposit(found)
    assert [d.kind for d in layers] == ["single-head" if index == layer else "redundant" for index in range(LAYERS)]
    assert layers[layer].head == head
    assert layers[layer].half_at == 1
    assert layers[layer].top_share == layers[layer].effective_heads == 1.0


def test_intervals_are_the_paired_bootstrap_of_the_answers():
    model, batch = standing()
    found = ablate_heads(DecoderSource(model), split(batch, 13), bootstrap=300)
    intact = right_without(model, batch, [])
    paired = [intact - right_without(model, batch, [place]) for place in itertools.product(range(LAYERS), range(HEADS))]
    low, high = bootstrap_means(np.stack(paired, axis=1), samples=300)
    assert np.array_equal(found.low.ravel(), low)
    assert np.array_equal(found.high.ravel(), high)
    assert (found.low <= found.drops).all()
    assert (found.drops <= found.high).all()


# ---- stopped and gone on with ---------------------------------------------------------------------------------------


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
    batches = split(batch, COUNT // BATCHES)
    book, before, after = Book(stop_at), Counting(model), Counting(model)
    whole = ablate_heads(DecoderSource(model), batches)
    if stop_at < 2 * BATCHES:
        with pytest.raises(Stop):
            ablate_heads(before, batches, memory=book)
        assert before.passes == len(book.kept) == stop_at
    book.stop_at = None
    assert ablate_heads(after, batches, memory=book).to_dict() == whole.to_dict()
    assert before.passes + after.passes == 2 * BATCHES


def test_a_memory_that_knows_everything_needs_no_model():
    model, batch = standing()
    book = Book()
    whole = ablate_heads(DecoderSource(model), [batch], memory=book)
    again = Counting(decoder(seed=5))
    assert ablate_heads(again, [batch], memory=book).to_dict() == whole.to_dict()
    assert again.passes == 0
    assert {right.dtype for right in book.kept.values()} == {np.dtype(bool)}


# ---- records and refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "near"),
    [("metric", "acuracy", "accuracy"), ("intervention", "zeros", "zero"), ("method", "exat", "exact")],
)
def test_an_unknown_choice_is_refused_with_the_nearest_named(field: str, value: str, near: str):
    model, batch = standing()
    bare = inspect.unwrap(ablate_heads)  # the tests' type checker would refuse it first
    with pytest.raises(InputError, match=f"^{field} must be .*, got '{value}'; did you mean '{near}'"):
        bare(DecoderSource(model), [batch], **{field: value})


def test_no_examples_are_refused():
    model, (tokens, labels, lengths) = standing()
    with pytest.raises(InputError, match="at least one example that counts"):
        ablate_heads(DecoderSource(model), [(tokens, torch.full_like(labels, -100), lengths)])
    with pytest.raises(InputError, match="at least one example that counts"):
        ablate_heads(DecoderSource(model), [])
