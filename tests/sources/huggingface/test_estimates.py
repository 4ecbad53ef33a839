"""Estimates of heads' effects are the derivatives that plain passes give, and order trained heads as silencing does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.sources.huggingface.test_effects import MASK, calls_of, inputs_of, labels_of, model_of
from torch import Tensor
from torch.nn import functional as F

from toeplens.ground import InputError
from toeplens.sources.huggingface import effects, replay
from toeplens.sources.huggingface.effects import head_estimates
from toeplens.sources.huggingface.outcome import NONE, Outcome, Readout
from toeplens.sources.huggingface.replay import anatomy_of, observed

NAMES = ["Llama", "GPT2", "Bert-masked", "Gemma2"]  # the last has a cap after its head


@pytest.fixture
def first_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effects, "_DRAWS", 0)


DRAWN = {0: [3, 7, 1, 30, 2, 2, 9, 11, 4, 5, 6, 8], 1: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]}


def given_labels(labels: Tensor, draws: int) -> list[Tensor]:
    """Labels as if drawn: other ones in every draw."""
    own = torch.tensor([DRAWN[0], DRAWN[1]])[:, : labels.shape[1]]
    return [torch.where(labels == NONE, NONE, (own + 5 * draw) % 31) for draw in range(draws)]


def by_hand(name: str, draws: int, span: int) -> list[np.ndarray]:
    """First and second order of each head and position, [B, N, H] a call, from gains on what the projections are fed.

    Sums of products of positions in the same span are written out, pair by pair.
    """
    model = model_of(name, torch.float64)
    inputs, labels = labels_of(name, inputs_of(model))
    assert labels is not None
    rows, tokens = labels.shape
    ends = {"Llama": "self_attn.o_proj", "GPT2": "attn.c_proj", "Bert-masked": "attention.output.dense"}
    ends["Gemma2"] = ends["Llama"]
    projections = [module for place, module in model.named_modules() if place.endswith(ends[name])]
    heads = calls_of(name)[0][4]
    gains = [torch.ones(rows, tokens, heads, dtype=torch.float64, requires_grad=True) for _ in projections]
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, gain=gain: (
                args[0] * gain.repeat_interleave(args[0].shape[-1] // heads, -1).view(args[0].shape),
            )
        )
        for module, gain in zip(projections, gains, strict=True)
    ]
    chances = model(**inputs).logits.log_softmax(-1)
    for handle in handles:
        handle.remove()
    labels = labels.masked_fill(labels < 0, NONE)
    found = []
    for number, each in enumerate([labels, *given_labels(labels, draws)]):
        losses = F.nll_loss(chances.flatten(0, 1), each.flatten(), ignore_index=NONE, reduction="sum")
        slopes = [-x.numpy() for x in torch.autograd.grad(losses, gains, retain_graph=True)]
        for place, slope in enumerate(slopes):
            made = np.zeros_like(slope)
            for row in range(rows):
                count = int((labels[row] != NONE).sum())
                for i in range(tokens):
                    near = [j for j in range(tokens) if j // span == i // span]
                    more = sum(slope[row, i] * slope[row, j] for j in near) / (2 * count * max(draws, 1))
                    made[row, i] = slope[row, i] / count if number == 0 else more
            if number == 0:
                found.append(made)
            else:
                found[place] = found[place] + made
    return found


@pytest.mark.parametrize("whole_head", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_both_orders_are_those_of_gradients_by_hand(
    name: str, whole_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float64; through the head's own product, and as if it were none; in pieces of a few positions."""
    monkeypatch.setattr(effects, "_DRAWS", 3)
    monkeypatch.setattr(effects, "_SPAN", 5)
    monkeypatch.setattr(effects, "_LOGITS", 2 * 31 * 5)
    if not whole_head:
        monkeypatch.setattr(Readout, "of", lambda *_: None)
    at = 0

    def drawn(shares: Tensor, labels: Tensor, random: Any) -> Iterator[Tensor]:
        nonlocal at
        whole = torch.full((2, 12), 0)
        whole[:, places[at : at + labels.shape[1]]] = labels
        own = [each[:, places[at : at + labels.shape[1]]] for each in given_labels(whole, 3)]
        at += labels.shape[1]
        yield from own

    model = model_of(name, torch.float64)
    _, labels = labels_of(name, inputs_of(model))
    assert labels is not None
    places = (labels >= 0).any(0).nonzero()[:, 0]
    monkeypatch.setattr(effects, "_drawn", drawn)
    found = head_estimates(model, inputs_of(model), calls_of(name), mask_token=MASK)
    blocks = found.parts[0].shape[1]
    for ours, each in zip(found.parts, by_hand(name, 3, 5), strict=True):
        theirs = np.zeros_like(ours)
        for i in range(12):
            theirs[:, i * blocks // 12] += blocks * each[:, i]
        np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-12)


def test_labels_are_drawn_as_often_as_the_model_expects_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effects, "_DRAWS", 4000)
    shares = torch.tensor([[[0.5, 0.0, 0.3, 0.2], [0.0, 0.0, 1.0, 0.0]], [[0.1, 0.2, 0.3, 0.4], [0.25] * 4]])
    labels = torch.tensor([[1, 2], [0, NONE]])

    def draw(seed: int) -> Tensor:
        return torch.stack(list(effects._drawn(shares, labels, torch.Generator().manual_seed(seed))))

    found = draw(0)
    assert found.shape == (4000, 2, 2)
    assert (found[:, 1, 1] == NONE).all(), "where there is no label none is drawn"
    for row, place in ((0, 0), (0, 1), (1, 0)):
        counts, expected = np.bincount(found[:, row, place], minlength=4), 4000 * shares[row, place].numpy()
        assert (counts[expected == 0] == 0).all()
        there = expected > 0
        if there.sum() > 1:
            assert stats.chisquare(counts[there], expected[there] * counts.sum() / expected.sum()).pvalue > 1e-4
    assert torch.equal(found, draw(0))
    assert not torch.equal(found, draw(1))


def position_outputs(name: str) -> list[Tensor | None]:
    """What heads put out without position, but of the second layer nothing is known."""
    model = model_of(name, torch.float64)
    found = effects._without_position(model, inputs_of(model), calls_of(name))
    return [None if number == 1 else each for number, each in enumerate(found)]


@pytest.mark.usefixtures("first_order")
def test_estimates_of_taking_position_are_derivatives_on_the_way_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against central differences of passes in which a head is moved by a step, norms being float32 inside; NaN where a
    head has no position."""
    name, step = "Llama", 1e-2
    model, calls, instead = model_of(name, torch.float64), calls_of(name), position_outputs(name)
    monkeypatch.setattr(effects, "_without_position", lambda *_: instead)
    found = head_estimates(model, inputs_of(model), calls, of="position")
    anatomy = anatomy_of(model)
    inputs = inputs_of(model)
    with observed(model, anatomy):
        passes = replay.Passes(model, anatomy, Outcome.of(model, inputs, {"decoder"}, None, 0))
        places = [effects.place_of(model, call, passes.order) for call in calls]
        for call, put in enumerate(instead):
            if put is None:
                assert np.isnan(found.effects[call]).all()
                continue
            for head in range(calls[call][4]):

                def moved(by: float, head: int = head, call: int = call, put: Tensor = put) -> np.ndarray:
                    def change(heads: Tensor) -> Tensor:
                        heads = heads.clone()
                        heads[:, :, head] += by * (put[:, :, head] - heads[:, :, head])
                        return heads

                    with torch.no_grad():
                        return passes.losses(passes.run(changes={places[call]: change})).mean(1).numpy()

                np.testing.assert_allclose(
                    found.effects[call][:, head], (moved(step) - moved(-step)) / (2 * step), rtol=2e-3, atol=5e-5
                )


def test_what_cannot_be_estimated_is_refused() -> None:
    model = model_of("Llama")
    with pytest.raises(InputError, match=r"of must be .*, got 'bands'"):
        head_estimates(model, inputs_of(model), calls_of("Llama"), of="bands")  # type: ignore[arg-type]
    bert = model_of("Bert")
    with pytest.raises(effects.NoGradient, match="method must be exact for last hidden states"):
        head_estimates(bert, inputs_of(bert), calls_of("Bert"))
