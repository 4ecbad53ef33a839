"""Temperatures by position: against the formulas, transformers' Llama 4, and beside a rotation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.encodings.samples import SIZES, agree, draw, randomised
from torch import nn
from transformers import Llama4TextConfig
from transformers.models.llama4 import modeling_llama4 as llama4

from toeplens import encodings
from toeplens.encodings import attend, attention_weights
from toeplens.encodings.conformance import check
from toeplens.encodings.tempered import Tempered
from toeplens.ground import InputError

H, D, N = SIZES["num_heads"], SIZES["head_dim"], 9
PLACES = torch.tensor([0, 1, 2, 7, 8, 63, 64, 8191, 1_048_576])


def build(name: str, **options: Any) -> Tempered:
    encoding = randomised(encodings.build(name, **SIZES, **options)).double()
    assert isinstance(encoding, Tempered)
    return encoding


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


def test_a_number_without_a_slope_is_plain_softmax() -> None:
    encoding = build("scalable-softmax", bias=True)
    with torch.no_grad():
        encoding.get_parameter("slope").zero_()
        encoding.get_parameter("level").fill_(1.0)
    q, k, v = (draw(2, H, N, D, seed=seed) for seed in range(3))
    plain = encodings.build("nope", **SIZES)
    agree(attend(q, k, v, **told(encoding, PLACES)), attend(q, k, v, **told(plain, PLACES)), 1e-14)


def test_each_text_of_a_packed_sequence_counts_for_itself() -> None:
    encoding = build("scalable-softmax")
    q, k, v = (draw(1, H, N, D, seed=seed) for seed in range(3))
    text = torch.tensor([0] * 4 + [1] * 5)
    places = torch.cat((torch.arange(4), torch.arange(5)))
    packed = attend(q, k, v, mask=(text[:, None] == text)[None, None], **told(encoding, places))
    for part in (slice(0, 4), slice(4, 9)):
        alone = attend(*(x[:, :, part] for x in (q, k, v)), **told(encoding, places[part]))
        agree(packed[:, :, part], alone, 1e-13)


def test_padding_before_a_text_is_not_counted_if_positions_start_after_it() -> None:
    encoding = build("scalable-softmax")
    q, k, v = (draw(1, H, N, D, seed=seed) for seed in range(3))
    places = torch.arange(N) - 3
    padded = attend(q, k, v, mask=(places >= 0)[None, None, None], **told(encoding, places))
    alone = attend(*(x[:, :, 3:] for x in (q, k, v)), **told(encoding, places[3:]))
    agree(padded[:, :, 3:], alone, 1e-13)
    assert bool(encoding.factor(places).isfinite().all())


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


@given(st.integers(-(10**6), 10**7), st.sampled_from(["scalable-softmax", "llama4-temperature"]))
def test_after_a_rotation_it_multiplies_the_logit(place: int, name: str) -> None:
    rope, encoding = encodings.build("rope", **SIZES), build(name)
    places = torch.tensor([place, place + 5])
    q, k = draw(1, H, 2, D), draw(1, H, 2, D, seed=2)
    turned_q, turned_k = rope.rotate(q, k, places, places)
    q_both, k_both = encoding.rotate(turned_q, turned_k, places, places)
    assert k_both is turned_k
    wanted = encoding.factor(places).unsqueeze(-1) * (turned_q @ turned_k.mT)
    agree(q_both @ k_both.mT, wanted, 1e-9)


def test_fractions_of_a_position_have_a_factor() -> None:
    half = torch.tensor([0.5, 3.5])
    encoding = build("scalable-softmax")
    slope = encoding.get_parameter("slope")[0].item()
    assert encoding.factor(half)[0, 1].item() == pytest.approx(slope * math.log(4.5))
    assert build("llama4-temperature", floor_scale=1.5).factor(half)[0].tolist() == pytest.approx(
        [1 + 0.1 * math.log(2), 1 + 0.1 * math.log(4)]
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("scalable-softmax", {"bias": True, "shared": True}),
        ("llama4-temperature", {"floor_scale": 2.5, "attn_scale": 1.0}),
    ],
)
def test_they_conform(name: str, options: dict[str, Any]) -> None:
    check(name, skip=["compile"], **options)


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("scalable-softmax", {"start": math.inf}, "start"),
        ("llama4-temperature", {"floor_scale": 0.0}, "floor_scale"),
        ("llama4-temperature", {"floor_scale": math.nan}, "floor_scale"),
        ("llama4-temperature", {"attn_scale": math.inf}, "attn_scale"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=rf"^{field}: .*\.$"):
        encodings.build(name, **SIZES, **options)


def test_layers_have_numbers_of_their_own_unless_shared() -> None:
    own, shared = build("scalable-softmax"), build("scalable-softmax", shared=True)
    assert shared.for_layer(3) is shared
    fresh = own.for_layer(3)
    agree(fresh.get_parameter("slope"), torch.full((H,), 0.168).double(), 1e-6)
