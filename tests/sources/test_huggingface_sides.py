"""Each call of a model with an encoder and a decoder is on the side that its tokens are on."""

from __future__ import annotations

import pytest

from toeplens.sources.huggingface import AttentionCall, captured
from toeplens.studies.survey.models import DECODED, TOKENS, small_inputs, small_model

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["encoder-decoder", "seamless_m4t"])
def test_sides_are_told_by_the_outermost_name(name: str) -> None:
    """A decoder's layers may lie in a list that is called its encoder, and an encoder be one of text."""
    model, calls = small_model(name), list[AttentionCall]()
    captured(model, small_inputs(model), calls.append)
    assert [(call.side, call.kind, call.layer, call.causal, call.q.shape[2]) for call in calls] == [
        *(("encoder", "self", layer, False, TOKENS) for layer in range(2)),
        *(("decoder", kind, layer, kind == "self", DECODED) for layer in range(2) for kind in ("self", "cross")),
    ]
