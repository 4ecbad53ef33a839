"""Ablation in low precision, and on devices whose memory is not known."""

from __future__ import annotations

import pytest
import torch

from toeplens.backends import DecoderSource
from toeplens.lens import Batch, ablate_heads
from toeplens.model import Decoder, decoder_config

SIZES = {"vocab_size": 9, "num_classes": 5, "d_model": 32, "d_ff": 24, "num_layers": 2, "num_heads": 4, "max_len": 8}


def model() -> Decoder:
    """With random weights of bfloat16's precision, so large that every head does something."""
    torch.manual_seed(0)
    made = Decoder(decoder_config(**SIZES, encoding="rope"))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made.bfloat16().double()


def batch() -> Batch:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(1, 9, (12, 7), generator=draw), torch.randint(0, 5, (12,), generator=draw), None


@pytest.mark.parametrize("intervention", ["zero", "mean", "position"])
def test_a_model_in_half_precision_is_ablated(intervention: str) -> None:
    """To bfloat16's 8 bits of the loss; several heads at once, too."""
    exact, found = (
        ablate_heads(DecoderSource(each), [batch()], metric="loss", intervention=intervention)  # type: ignore[arg-type]
        for each in (model(), model().bfloat16())
    )
    assert abs(exact.drops).max() > 0.1
    assert abs(found.drops - exact.drops).max() < 0.02
    assert abs(found.cumulative - exact.cumulative).max() < 0.03


def test_gains_that_differ_in_float64_alone_are_different_copies() -> None:
    source, (tokens, _, lengths) = DecoderSource(model()), batch()
    state = next(iter(source.states(tokens, lengths)))
    gains = torch.ones(2, 4, dtype=torch.float64)
    gains[1, 2] += 1e-9
    one, other = source.replay(state, gains)
    assert 0 < float((one - other).abs().max()) < 1e-8
