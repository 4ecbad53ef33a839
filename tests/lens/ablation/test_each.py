"""Ablation of models that answer at every token: an example is the mean over its tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.lens.models import logits_without
from torch import Tensor
from torch.nn import functional as F

from toeplens.backends import DecoderSource
from toeplens.lens import ablate_heads
from toeplens.lens.kit.interventions import counts, losses, outcomes
from toeplens.model import Decoder, decoder_config


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(1)
    fields = {"vocab_size": 11, "d_model": 16, "d_ff": 16, "num_layers": 3, "num_heads": 2, "max_len": 9}
    made = Decoder(decoder_config(**fields, readout="each", dropout=0.0)).eval().double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return made


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor, None]:
    rng = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 11, (6, 9), generator=rng)
    labels[1, 3:] = -1  # a text of which some tokens do not count, and one of which none does
    labels[4] = -100
    return torch.randint(0, 11, (6, 9), generator=rng), labels, None


def _mean_losses(logits: Tensor, labels: Tensor) -> list[float]:
    each = []
    for row, own in zip(logits, labels, strict=True):
        some = own >= 0
        if some.any():
            each.append(float(F.cross_entropy(row[some], own[some])))
    return each


@pytest.mark.parametrize("metric", ["loss", "accuracy", "kl"])
def test_what_is_lost_is_what_hooks_lose(model: Decoder, batch: tuple[Tensor, Tensor, None], metric: str):
    tokens, labels, _ = batch
    found = ablate_heads(DecoderSource(model), [batch], metric=metric, bootstrap=50)
    assert found.examples == 5
    with torch.no_grad():
        intact = model(tokens)
    some = labels >= 0
    rows = some.any(1)
    for layer in range(3):
        for head in range(2):
            changed = logits_without(model, batch, [(layer, head)])
            if metric == "loss":
                wanted = np.mean(_mean_losses(changed, labels)) - np.mean(_mean_losses(intact, labels))
            else:
                if metric == "accuracy":
                    each = (intact.argmax(-1) == labels).double() - (changed.argmax(-1) == labels).double()
                else:
                    p, q = intact.log_softmax(-1), changed.log_softmax(-1)
                    each = (p.exp() * (p - q)).sum(-1)
                means = torch.where(some, each, 0.0).sum(1)[rows] / some.sum(1)[rows]
                wanted = float(means.mean())
            assert found.drops[layer, head] == pytest.approx(wanted, abs=1e-7)
    right = (intact.argmax(-1) == labels).double()
    baselines = {
        "loss": np.mean(_mean_losses(intact, labels)),
        "accuracy": float((torch.where(some, right, 0.0).sum(1)[rows] / some.sum(1)[rows]).mean()),
        "kl": 0.0,
    }
    assert found.baseline == pytest.approx(baselines[metric], abs=1e-6)


def test_attribution_is_the_slope_of_the_same_loss(model: Decoder, batch: tuple[Tensor, Tensor, None]):
    found = ablate_heads(DecoderSource(model), [batch], metric="loss", method="attribution", bootstrap=0)
    exact = ablate_heads(DecoderSource(model), [batch], metric="loss", bootstrap=0)
    assert found.baseline == pytest.approx(exact.baseline)
    tokens, labels, _ = batch
    step = 1e-5
    gains = torch.ones(3, 6, 2, dtype=torch.float64)
    gains[1, :, 0] -= step
    moved = losses(DecoderSource(model).scaled(tokens, None, gains), labels)
    still = losses(DecoderSource(model).scaled(tokens, None, torch.ones_like(gains)), labels)
    slope = (moved - still)[counts(labels)].mean().detach() / step
    assert found.drops[1, 0] == pytest.approx(float(slope), rel=1e-3)


def test_a_single_label_a_text_is_what_it_was():
    rng = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(4, 5, 7, generator=rng), torch.tensor([1, -1, 3, 0, 6])
    one = outcomes("loss", logits, logits[0], labels)
    same = outcomes("loss", logits.unsqueeze(2), logits[0].unsqueeze(1), labels.unsqueeze(1))
    torch.testing.assert_close(one, same)
