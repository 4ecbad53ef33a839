"""Ablation in low precision, and on devices whose memory is not known."""

from __future__ import annotations

import pytest
import torch
from tests.lens.models import decoder, examples

from toeplens.lens import ablate_heads
from toeplens.model import Decoder
from toeplens.sources import DecoderSource

SIZES = {"vocab_size": 9, "num_classes": 5, "d_model": 32, "d_ff": 24, "num_layers": 2, "num_heads": 4, "max_len": 8}


def model() -> Decoder:
    """With random weights of bfloat16's precision, so large that every head does something."""
    return decoder(seed=1, noise=0.3, encoding="rope", **SIZES).bfloat16().double()


@pytest.mark.parametrize("intervention", ["zero", "mean", "position"])
def test_a_model_in_half_precision_is_ablated(intervention: str) -> None:
    """To bfloat16's 8 bits of the loss; several heads at once, too."""
    exact, found = (
        ablate_heads(DecoderSource(each), [examples(12, 7, padded=False)], metric="loss", intervention=intervention)  # type: ignore[arg-type]
        for each in (model(), model().bfloat16())
    )
    assert abs(exact.drops).max() > 0.1
    assert abs(found.drops - exact.drops).max() < 0.02
    assert abs(found.cumulative - exact.cumulative).max() < 0.03


def test_gains_that_differ_in_float64_alone_are_different_copies() -> None:
    source, (tokens, _, lengths) = DecoderSource(model()), examples(12, 7, padded=False)
    state = next(iter(source.states(tokens, lengths)))
    gains = torch.ones(2, 4, dtype=torch.float64)
    gains[1, 2] += 1e-9
    one, other = source.replay(state, gains)
    assert 0 < float((one - other).abs().max()) < 1e-8
