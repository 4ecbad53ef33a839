"""A decoder carries every encoding, in both protocols: it runs, learns, and both attention paths agree."""

from __future__ import annotations

import pytest
import torch

from toeplens import encodings
from toeplens.model import Decoder, decoder_config

SIZES = {"vocab_size": 11, "d_model": 48, "num_heads": 3, "d_ff": 16, "num_layers": 2, "max_len": 16, "dropout": 0.0}


@pytest.mark.parametrize("protocol", ["paper", "released"])
@pytest.mark.parametrize("encoding", encodings.names())
def test_a_decoder_carries_it(encoding: str, protocol: str) -> None:
    torch.manual_seed(0)
    model = Decoder(decoder_config(encoding=encoding, protocol=protocol, **SIZES))
    tokens, lengths = torch.randint(11, (4, 12)), torch.tensor([12, 9, 12, 5])
    torch.nn.functional.cross_entropy(model(tokens, lengths), torch.tensor([0, 1, 2, 3])).backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    model.double().eval()
    fused, explicit = model(tokens, lengths), model(tokens, lengths, fused=False)
    assert torch.allclose(fused, explicit, rtol=0, atol=1e-9)
    state = Decoder(model.config).double().eval()
    state.load_state_dict(model.state_dict())
    assert torch.equal(state(tokens, lengths), fused)
