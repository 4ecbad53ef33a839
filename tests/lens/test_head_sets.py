"""Sets of heads: every point is the whole model run anew without them, and no head of a sufficient set can go."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.builders import wrong_types
from tests.lens.models import SMALL, answered, decoder, examples, logits_without, per_example, split

from toeplens.ground import InputError
from toeplens.lens import ablation as sets
from toeplens.lens.ablation import ablate_heads, cumulative_ablation, head_sets, sufficient_set
from toeplens.lens.kit.interventions import Batch
from toeplens.model import Decoder
from toeplens.sources import DecoderSource

LAYERS, HEADS, LENGTH, CLASSES, COUNT = 2, 3, 5, 4, 30
EVERY = list(itertools.product(range(LAYERS), range(HEADS)))
SIZES = {**SMALL, "num_classes": CLASSES}


@cache
def standing(protocol: str = "paper", seed: int = 0) -> tuple[Decoder, Batch]:
    model = decoder(seed=seed, noise=0.3, protocol=protocol, **SIZES)
    return model, answered(model, examples(COUNT, LENGTH, classes=CLASSES), ignored=4)


def value(
    model: Decoder, batch: Batch, silent: Iterable[tuple[int, int]], metric: str = "accuracy", most: int = COUNT
) -> float:
    """The metric over the first ``most`` examples that count."""
    changed, intact = (logits_without(model, batch, heads) for heads in (silent, ()))
    return float(per_example(metric, changed, intact, batch[1])[:most].mean())


@cache
def by_set(protocol: str = "paper", seed: int = 0) -> dict[frozenset[tuple[int, int]], float]:
    """The accuracy with each set of heads alone, all 2^6 of them."""
    model, batch = standing(protocol, seed)
    sets = (frozenset(kept) for size in range(len(EVERY) + 1) for kept in itertools.combinations(EVERY, size))
    return {kept: value(model, batch, set(EVERY) - kept) for kept in sets}


# ---- cumulative ablation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["greedy", "importance", "random"])
@pytest.mark.parametrize(
    ("protocol", "metric", "points"), [("paper", "accuracy", 2), ("paper", "kl", 12), ("released", "loss", 12)]
)
def test_every_point_is_the_whole_model_without_these_heads(
    order: Any, protocol: str, metric: Any, points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer points than heads, some are left out."""
    monkeypatch.setattr(sets, "POINTS", points)
    model, batch = standing(protocol)
    found = cumulative_ablation(DecoderSource(model), split(batch, 17), order=order, metric=metric)
    assert found.orders.shape == ((3 if order == "random" else 1), len(EVERY), 2)
    for heads, curve in zip(found.orders, found.curves, strict=True):
        assert sorted(map(tuple, heads)) == EVERY
        plain = [value(model, batch, [tuple(head) for head in heads[:k]], metric) for k in range(len(EVERY) + 1)]
        assert np.flatnonzero(~np.isnan(curve)).tolist() == ([0, 3, 6] if points == 2 else list(range(7)))
        np.testing.assert_allclose(curve, np.where(np.isnan(curve), np.nan, plain), rtol=0, atol=1e-10)
    assert found.baseline == found.curves[0, 0]
    assert (found.examples, found.metric) == (COUNT - 4, metric)


@pytest.mark.parametrize("scored", [64, 7])
def test_the_greedy_order_takes_the_most_harmful_head_each_time(scored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal accuracies are told apart by the loss; only the scored examples decide."""
    model, batch = standing()
    monkeypatch.setattr(sets, "SCORED", scored)
    found = cumulative_ablation(DecoderSource(model), split(batch, 17))
    gone: list[tuple[int, int]] = []
    for head in map(tuple, found.orders[0]):

        def harm(other: tuple[int, int]) -> tuple[float, float]:
            silent = [*gone, other]
            return -value(model, batch, silent, most=scored), value(model, batch, silent, "loss", scored)

        assert head == max((other for other in EVERY if other not in gone), key=harm)
        gone.append(head)


def test_the_order_of_importance_is_that_of_the_single_drops() -> None:
    model, batch = standing()
    drops = ablate_heads(DecoderSource(model), [batch], metric="loss", cumulative=False, bootstrap=2).drops
    found = cumulative_ablation(DecoderSource(model), [batch], order="importance", metric="loss")
    assert np.array_equal(drops[tuple(found.orders[0].T)], np.sort(drops.ravel())[::-1])


def test_random_orders_come_from_the_seed() -> None:
    model, batch = standing()
    state = torch.get_rng_state()
    first, again, other = (
        cumulative_ablation(DecoderSource(model), [batch], order="random", seed=seed).orders for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[0], first[1])
    assert torch.equal(torch.get_rng_state(), state)


# ---- sufficient sets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("keep", [0.5, 0.8, 1.0])
def test_a_sufficient_set_is_enough_and_none_of_it_can_go(
    seed: int, keep: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the accuracy of all 64 sets of heads."""
    model, batch = standing(seed=seed)
    monkeypatch.setattr(sets, "SCORED", 20)
    found = sufficient_set(DecoderSource(model), split(batch, 17), chance=0.25, keep=keep)
    table = by_set(seed=seed)
    heads = frozenset((int(layer), int(head)) for layer, head in found.heads)
    need = 0.25 + keep * (table[frozenset(EVERY)] - 0.25) - 1e-9
    assert found.needed == pytest.approx(need + 1e-9)
    assert found.accuracy == pytest.approx(table[heads], abs=1e-12)
    assert table[heads] >= need
    assert all(table[heads - {head}] < need for head in heads)
    assert len(heads) >= min(len(kept) for kept, accuracy in table.items() if accuracy >= need)


# ---- all together ---------------------------------------------------------------------------------------------------


def test_head_sets_hold_what_the_single_functions_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "POINTS", 2)
    monkeypatch.setattr(sets, "SCORED", 5)
    model, batch = standing()
    source, batches = DecoderSource(model), split(batch, 17)
    found = head_sets(source, batches, chance=0.25, keep=0.8)
    for name in ("greedy", "importance", "random"):
        one = cumulative_ablation(source, batches, order=name)  # type: ignore[arg-type]
        assert np.array_equal(np.atleast_2d(getattr(found, name)), one.curves, equal_nan=True)
        if name == "greedy":
            assert found.order == one.orders[0].tolist()
    enough = sufficient_set(source, batches, chance=0.25, keep=0.8)
    assert found.sufficient == enough.heads.tolist()
    assert (found.kept, found.baseline, found.examples) == (enough.accuracy, enough.baseline, enough.examples)
    assert (found.chance, found.keep) == (0.25, 0.8)


@wrong_types
@pytest.mark.parametrize(
    ("call", "options", "words"),
    [
        (cumulative_ablation, {"order": "gredy"}, "got 'gredy'; did you mean 'greedy'"),
        (sufficient_set, {"keep": 0.0}, "keep must be over 0 and at most 1, got 0.0"),
    ],
)
def test_wrong_choices_are_refused(call: Any, options: dict[str, Any], words: str) -> None:
    model, batch = standing()
    with pytest.raises(InputError, match=words):
        call(DecoderSource(model), [batch], **options)
