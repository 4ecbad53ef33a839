"""A decoder carries every encoding, in both protocols: it runs, learns, and both attention paths agree."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.mark.parametrize(
    "encoding", ["shaw", "transformer-xl", "deberta", "cope", "path", "dape-v2", "urpe", "rope", "t5"]
)
def test_padding_before_a_text_leaves_no_nan(encoding: str) -> None:
    """Queries in it see no key, and what they leave would spread as 0 x NaN from the second layer on."""
    torch.manual_seed(0)
    model = Decoder(decoder_config(encoding=encoding, **SIZES)).eval()
    x, context = model.begin(torch.randint(11, (2, 9)))
    mask = (torch.arange(9) >= torch.tensor([[0], [4]]))[:, None, None, :]
    for fused in (True, False):
        logits = model.replay(0, x, replace(context, key_mask=mask, added=None), fused=fused)
        assert logits.isfinite().all()


@pytest.mark.parametrize("protocol", ["paper", "released"])
@pytest.mark.parametrize("encoding", encodings.names())
def test_vectors_turned_where_they_are_made_are_those_that_the_encoding_turns(encoding: str, protocol: str) -> None:
    """float64, 1e-12: at positions counted from 0, and where each sequence has its own."""
    torch.manual_seed(0)
    model = Decoder(decoder_config(encoding=encoding, protocol=protocol, **SIZES)).double().eval()
    tokens, lengths = torch.randint(11, (3, 8)), torch.tensor([8, 5, 7])
    own = model.encoding.place(torch.arange(8) + torch.tensor([[0], [3], [6]]))
    for positions in (None, own):
        x, context = model.begin(tokens, lengths, positions)
        plain = replace(context, turn=None, turned_by=None)
        found, wanted = model.replay(0, x, context), model.replay(0, x, plain)
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
        for part in (slice(1, 3), slice(0, 1)):
            assert torch.allclose(model.replay(0, x[part], context.part(part)), found[part], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "encoding", ["rope", "partial-rope", "rope-absolute", "rope-linear", "rope-dynamic", "rope-yarn"]
)
def test_rotations_of_whole_heads_are_done_where_vectors_are_made(encoding: str) -> None:
    for pairing, there in (("interleaved", True), ("half", False)):
        config = decoder_config(encoding=encoding, encoding_options={"pairing": pairing}, **SIZES)
        assert (Decoder(config).begin(torch.randint(11, (2, 5)))[1].turn is not None) == there
