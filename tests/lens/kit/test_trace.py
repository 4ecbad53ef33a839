"""A trace holds what the model itself works on, and one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.builders import REPRESENTATIVES
from tests.lens.models import decoder
from torch import Tensor

from toeplens.backends import DecoderSource
from toeplens.lens import AttentionTrace, LayerTrace
from toeplens.model import Decoder
from toeplens.utils import InputError

SIZES = {"vocab_size": 20, "d_model": 32, "d_ff": 24, "num_layers": 3, "num_heads": 4, "max_len": 16}
LENGTHS = torch.tensor([12, 7, 1, 12])


def model_of(encoding: str, protocol: str = "paper", **options: Any) -> Decoder:
    return decoder(seed=1, noise=0.1, encoding=encoding, protocol=protocol, encoding_options=options, **SIZES)


def tokens() -> Tensor:
    return torch.randint(0, 20, (4, 12), generator=torch.Generator().manual_seed(2))


def trace_of(model: Decoder, **options: Any) -> AttentionTrace:
    return AttentionTrace(DecoderSource(model), tokens(), LENGTHS, **options)


@pytest.mark.parametrize("protocol", ["paper", "released"])
@pytest.mark.parametrize("encoding", REPRESENTATIVES)
def test_head_outputs_follow_from_the_trace(encoding: str, protocol: str) -> None:
    """softmax(logits) v is what the model's layer computes (float64, 1e-10), whatever the encoding."""
    model = model_of(encoding, protocol)
    x, context = model.start_pass(tokens(), LENGTHS)
    for layer in trace_of(model):
        block = model.block(layer.layer)
        torch.testing.assert_close(layer.inputs, x)
        residual, heads = block.head_outputs(x, context, read_positions=None, fused=False)
        if not (layer.encoding.overrides("transform_weights") or layer.encoding.overrides("add_values")):
            ours = (layer.logits().softmax(-1) @ layer.v).transpose(1, 2)
            present = layer.present
            torch.testing.assert_close(ours[present], heads[present], rtol=0, atol=1e-10)
        x = block.finish(residual, heads)


@pytest.mark.parametrize("encoding", ["rope", "sinusoidal", "alibi", "fire", "mla", "shaw"])
@pytest.mark.parametrize("kept", [[0, 1, 2, 3], [4, 5, 6], [1, 5, 11]])
def test_selected_positions_give_a_slice_of_the_logits(encoding: str, kept: list[int]) -> None:
    model = model_of(encoding)
    for layer, whole in zip(trace_of(model, positions=kept), trace_of(model), strict=True):
        if layer.encoding._inputs_argument:  # it may want tokens that are not here
            continue
        places = torch.tensor(kept)
        torch.testing.assert_close(layer.logits(), whole.logits()[..., places, :][..., places])
        assert layer.inputs.shape[1] == layer.q.shape[2] == layer.v.shape[2] == len(kept)
        assert layer.is_consecutive == (kept != [1, 5, 11])


def test_contextual_encodings_need_all_positions() -> None:
    layer = trace_of(model_of("fox"), positions=[3, 4])[0]
    with pytest.raises(InputError, match="positions must not be set for FoX"):
        layer.logits()


def test_logits_of_selected_queries_and_sequences() -> None:
    for encoding in ("rope", "fire", "fox", "cope", "path"):
        layer = trace_of(model_of(encoding))[0]
        rows = torch.tensor([2, 9])
        part = layer.logits(sequences=slice(1, 3), queries=rows)
        torch.testing.assert_close(part, layer.logits()[1:3, :, rows])


class CountingSource:
    """A source that counts its passes."""

    def __init__(self, model: Decoder) -> None:
        self.source, self.num_layers, self.passes, self.alive = DecoderSource(model), model.config.num_layers, 0, 0

    def attention(self, tokens: Tensor, lengths: Tensor | None, **options: Any) -> Iterator[LayerTrace]:
        self.passes += 1
        return self.source.attention(tokens, lengths, **options)


def test_layers_in_order_take_one_pass_and_going_back_takes_another() -> None:
    source = CountingSource(model_of("rope"))
    trace = AttentionTrace(source, tokens(), LENGTHS)
    assert [layer.layer for layer in trace] == [0, 1, 2]
    assert source.passes == 1
    assert trace[2].layer == trace[2].layer == 2
    assert source.passes == 1
    assert trace[0].layer == 0
    assert trace[2].layer == 2
    assert source.passes == 2


def test_only_selected_layers_are_computed() -> None:
    trace = trace_of(model_of("rope"), layers=[2, 0])
    assert [layer.layer for layer in trace] == [0, 2]
    assert len(trace) == 2
    with pytest.raises(InputError, match="layer must be one of the traced layers 0, 2, got 1"):
        trace[1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"layers": [3]}, r"layers must be from 0 to 2, got \[3\]"),
        ({"positions": [2, 1]}, r"positions must increase and lie from 0 to 11, got \[2, 1\]"),
    ],
)
def test_unknown_layers_and_positions_are_refused(options: dict[str, Sequence[int]], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        trace_of(model_of("rope"), **options)
