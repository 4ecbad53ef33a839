"""Temperatures by position: against the formulas, transformers' Llama 4, and beside a rotation."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from tests.encodings.samples import SIZES, agree, draw, randomised
from tests.encodings.samples import build as samples_build
from torch import nn
from transformers import Llama4TextConfig
from transformers.models.llama4 import modeling_llama4 as llama4

from toeplens import encodings
from toeplens.encodings import attend, attention_weights
from toeplens.encodings.lengths import Tempered

H, D, N = SIZES["num_heads"], SIZES["head_dim"], 9
PLACES = torch.tensor([0, 1, 2, 7, 8, 63, 64, 8191, 1_048_576])

build = partial(samples_build, std=1.0)


def told(encoding: encodings.PositionalEncoding, places: torch.Tensor, **more: Any) -> dict[str, Any]:
    return {"encoding": encoding, "q_positions": places, "k_positions": places, "scale": encoding.scale, **more}


@pytest.mark.parametrize("bias", [False, True])
def test_scalable_softmax_is_the_formula(bias: bool) -> None:
    """n^(s z) over its sum, z = q . k / sqrt(d) and n the number of keys: as the paper writes it, without a bias."""
    encoding = build("scalable-softmax", bias=bias)
    q, k = draw(2, H, N, D), draw(2, H, N, D, seed=2)
    ours = attention_weights(q, k, **told(encoding, torch.arange(N)))
    state = {name: value.tolist() for name, value in encoding.named_parameters()}
    for b in range(2):
        for h in range(H):
            for row in range(N):
                z = [float(q[b, h, row] @ k[b, h, j]) / math.sqrt(D) for j in range(row + 1)]
                if bias:
                    parts = [math.exp((state["slope"][h] * math.log(row + 1) + state["level"][h]) * x) for x in z]
                else:
                    parts = [(row + 1) ** (state["slope"][h] * x) for x in z]
                wanted = torch.tensor([x / sum(parts) for x in parts], dtype=torch.float64)
                agree(ours[b, h, row, : row + 1], wanted, 1e-12)


def test_logits_of_the_usual_length_start_at_their_usual_size() -> None:
    encoding = encodings.build("scalable-softmax", **SIZES)
    assert isinstance(encoding, Tempered)
    assert float(encoding.factor(torch.arange(1024)).detach().mean()) == pytest.approx(1, abs=5e-3)


def test_llama_4s_factors_are_the_formula() -> None:
    encoding = build("llama4-temperature", floor_scale=64, attn_scale=0.3)
    wanted = [1 + 0.3 * math.log(math.floor((i + 1) / 64) + 1) for i in PLACES.tolist()]
    agree(encoding.factor(PLACES)[0], torch.tensor(wanted, dtype=torch.float64), 1e-15)


def test_a_layer_without_rope_is_transformers_llama_4s() -> None:
    """Theirs forms the factor in float32, so that 1e-6 is asked; all else is float64."""
    config = Llama4TextConfig(
        hidden_size=H * D,
        num_attention_heads=H,
        num_key_value_heads=H,
        head_dim=D,
        num_hidden_layers=1,
        no_rope_layers=[0],
        floor_scale=3,
        attn_scale=0.7,
        attn_temperature_tuning=True,
    )
    config._attn_implementation = "eager"
    theirs = randomised(llama4.Llama4TextAttention(config, 0), 0.5).double().eval()
    assert not theirs.use_rope
    x = draw(2, 20, H * D)
    hidden = torch.full((20, 20), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    wanted = theirs(x, (x, x), hidden)[0]

    def heads(layer: nn.Module) -> torch.Tensor:
        return layer(x).unflatten(-1, (H, D)).transpose(1, 2)

    encoding = build("llama4-temperature", floor_scale=3, attn_scale=0.7)
    q, k, v = heads(theirs.q_proj), heads(theirs.k_proj), heads(theirs.v_proj)
    out = attend(q, k, v, **told(encoding, torch.arange(20)))
    agree(theirs.o_proj(out.transpose(1, 2).flatten(-2)), wanted, 1e-6)
    plain = attend(q, k, v, **told(encodings.build("nope", **SIZES), torch.arange(20)))
    assert float((plain - out).detach().abs().max()) > 0.01


def test_the_default_steps_are_llama_4s() -> None:
    config = Llama4TextConfig()
    sizes = {**SIZES, "max_len": config.max_position_embeddings}
    encoding = encodings.build("llama4-temperature", **sizes)
    assert encoding.floor_scale == config.floor_scale == 8192
    assert encoding.attn_scale == config.attn_scale
