"""The decoder computes what its definition says: both paths, both protocols, every switch, and a plain reference."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.builders import REPRESENTATIVES
from torch import Tensor, nn
from transformers import GPTJConfig, GPTJForCausalLM

from toeplens import encodings
from toeplens.model import Decoder, DecoderConfig, Protocol, decoder_config, without_published_scale
from toeplens.model import protocol_switches as switches_of
from toeplens.model.decoder import apply_frozen_norm
from toeplens.utils import InputError

# ---- the decoder -----------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 11,
    "num_classes": 5,
    "d_model": 16,
    "d_ff": 12,
    "num_layers": 2,
    "num_heads": 2,
    "max_len": 16,
}
B, N = 3, 9
LENGTHS = torch.tensor([4, 9, 6])
PROTOCOLS = get_args(Protocol)

NAMES = ("learned", *(name for name in REPRESENTATIVES if name != "stick-breaking"))  # which never sees later keys
every_case = pytest.mark.parametrize(
    ("encoding", "protocol"),
    [(name, "paper") for name in NAMES]
    + [(name, "released") for name in ("nope", "learned", "rope", "mla", "alibi", "fox")],
)
both_protocols = pytest.mark.parametrize("protocol", PROTOCOLS)


def config(encoding: str, protocol: str = "paper", **fields: Any) -> DecoderConfig:
    return decoder_config(protocol=protocol, encoding=encoding, **{**SMALL, **fields})


def model(encoding: str, protocol: str = "paper", *, dtype: torch.dtype = torch.float64, **fields: Any) -> Decoder:
    """A decoder with no weight left at its start."""
    torch.manual_seed(0)
    return randomized(Decoder(config(encoding, protocol, **fields))).to(dtype).eval()


def randomized(decoder: Decoder) -> Decoder:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.add_(0.2 * noise)
            elif parameter.ndim == 2 and "encoding" not in name and "embedding" not in name:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(noise)
    return decoder


def random_tokens(shape: tuple[int, int] = (B, N), seed: int = 0) -> Tensor:
    return torch.randint(0, SMALL["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def has_different_output(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def latent(encoding: str) -> bool:
    return encodings.get(encoding).coupling == "concatenation"


# ---- the two paths --------------------------------------------------------------------------------------------------


def all_final_states(decoder: Decoder, tokens: Tensor, lengths: Tensor | None, positions: Tensor | None) -> Tensor:
    """The states of all positions after the final norm, by the explicit path."""
    x, context = decoder.start_pass(tokens, lengths, positions)
    for block in decoder.blocks:
        x = block.finish(*block.head_outputs(x, context, read_positions=None, fused=False))
    return decoder.final_norm(x)


@every_case
def test_the_readout_position_matches_a_pass_over_all_positions(encoding: str, protocol: str) -> None:
    tokens, rows = random_tokens(), torch.arange(B)
    # under a causal mask positions only say how far apart; the triangle goes by place in the sequence
    scattered = torch.stack([torch.arange(N), torch.arange(N) + 5, torch.arange(N).flip(0)])
    for causal, pad_mask in itertools.product((True, False), (True, False)):
        decoder = model(encoding, protocol, readout="last", causal=causal, pad_mask=pad_mask)
        for lengths, positions in itertools.product((None, LENGTHS), (None, scattered)):
            everywhere = all_final_states(decoder, tokens, lengths, positions)
            place = torch.full((B,), N - 1) if lengths is None else lengths - 1
            expected = decoder.readout(everywhere[rows, place])
            for fused in (True, False):
                assert has_different_output(decoder(tokens, lengths, positions, fused=fused), expected) <= 1e-10


@every_case
def test_the_mean_readouts_are_means(encoding: str, protocol: str) -> None:
    tokens = random_tokens()
    decoder = model(encoding, protocol, readout="mean")
    states = all_final_states(decoder, tokens, LENGTHS, None)
    assert has_different_output(decoder(tokens, LENGTHS), decoder.readout(states.mean(1))) <= 1e-10
    decoder = model(encoding, protocol, readout="masked-mean")
    states = all_final_states(decoder, tokens, LENGTHS, None)
    by_hand = torch.stack([state[:length].mean(0) for state, length in zip(states, LENGTHS, strict=True)])
    assert has_different_output(decoder(tokens, LENGTHS), decoder.readout(by_hand)) <= 1e-10
    assert has_different_output(decoder(tokens), model(encoding, protocol, readout="mean")(tokens)) <= 1e-10


@every_case
def test_a_pass_can_resume_at_any_layer(encoding: str, protocol: str) -> None:
    tokens = random_tokens()
    decoder = model(encoding, protocol, num_layers=3)
    full = decoder(tokens, LENGTHS)
    x, context = decoder.start_pass(tokens, LENGTHS)
    for layer in range(3):
        assert has_different_output(decoder.run_from_layer(layer, x, context), full) <= 1e-10
        x, z = decoder.layer_heads(layer, x, context)
        x = decoder.blocks[layer].finish(x, z)
    assert has_different_output(decoder.compute_logits(x, context), full) <= 1e-10


@both_protocols
@pytest.mark.parametrize("encoding", ["rope", "alibi", "mla", "learned"])
def test_a_repeated_context_is_the_context_of_the_repeated_batch(encoding: str, protocol: str) -> None:
    tokens = random_tokens()
    decoder = model(encoding, protocol)
    for lengths, positions in itertools.product((None, LENGTHS), (None, torch.arange(B * N).reshape(B, N) % 16)):
        x, context = decoder.start_pass(tokens, lengths, positions)
        repeated = decoder.run_from_layer(0, x.repeat(3, 1, 1), context.repeat(3))
        once = decoder(tokens, lengths, positions)
        assert has_different_output(repeated, once.repeat(3, 1)) <= 1e-12


# ---- what may be seen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["layer", "embeddings"])
@pytest.mark.parametrize("encoding", NAMES)
def test_a_causal_decoder_ignores_later_tokens(encoding: str, source: str) -> None:
    if latent(encoding) and source == "embeddings":
        return  # latent attention takes its keys and values from the layer alone, and says so
    tokens = random_tokens()
    changed = tokens.clone()
    changed[:, 6:] = (tokens[:, 6:] + 1) % SMALL["vocab_size"]
    read_at_5 = torch.full((B,), 6)
    for causal in (True, False):
        decoder = model(
            encoding, causal=causal, key_value_source=source, readout="last", pad_mask=False, input_encoding=None
        )
        difference = has_different_output(decoder(tokens, read_at_5), decoder(changed, read_at_5))
        assert difference == 0.0 if causal else difference > 1e-3
        states, after = (all_final_states(decoder, t, None, None) for t in (tokens, changed))
        assert (has_different_output(states[:, :6], after[:, :6]) == 0.0) == causal


@every_case
def test_padding_tokens_matter_only_without_a_pad_mask(encoding: str, protocol: str) -> None:
    tokens = random_tokens()
    padding = torch.arange(N) >= LENGTHS.unsqueeze(1)
    other_padding = torch.where(padding, (tokens + 3) % SMALL["vocab_size"], tokens)
    padded = [0, 2]  # the second sequence fills its row
    for readout, causal in itertools.product(("last", "masked-mean"), (True, False)):
        decoder = model(encoding, protocol, readout=readout, causal=causal, pad_mask=True)
        assert has_different_output(decoder(tokens, LENGTHS), decoder(other_padding, LENGTHS)) == 0.0
        for row, length in enumerate(LENGTHS.tolist()):
            alone = decoder(tokens[row : row + 1, :length])
            assert has_different_output(decoder(tokens, LENGTHS)[row : row + 1], alone) <= 1e-10
    open_to_padding = model(encoding, protocol, readout="last", causal=False, pad_mask=False)
    difference = (open_to_padding(tokens, LENGTHS) - open_to_padding(other_padding, LENGTHS)).abs().amax(-1)
    assert bool((difference[padded] > 1e-3).all())
    read_as_well = model(encoding, protocol, readout="mean", pad_mask=True)
    difference = (read_as_well(tokens, LENGTHS) - read_as_well(other_padding, LENGTHS)).abs().amax(-1)
    assert bool((difference[padded] > 1e-3).all())


def test_released_nope_is_permutation_invariant_and_causal_nope_is_not() -> None:
    """No mask, no position, a mean: exactly permutation-invariant, so it cannot learn the distance of Task 1."""
    tokens = random_tokens()
    released, causal = model("nope", "released"), model("nope", "paper", readout="mean")
    for seed in range(5):
        order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
        assert has_different_output(released(tokens), released(tokens[:, order])) <= 1e-12
        assert has_different_output(causal(tokens), causal(tokens[:, order])) > 1e-3


# ---- symmetries -----------------------------------------------------------------------------------------------------

shared_model = cache(model)


@both_protocols
@pytest.mark.parametrize("encoding", ["rope", "alibi", "fox", "path"])
@given(order=st.permutations(range(B)), seed=st.integers(0, 99))
def test_sequences_of_a_batch_are_independent(encoding: str, protocol: str, order: list[int], seed: int) -> None:
    decoder, tokens = shared_model(encoding, protocol), random_tokens(seed=seed)
    assert has_different_output(decoder(tokens, LENGTHS)[order], decoder(tokens[order], LENGTHS[order])) <= 1e-12


# ---- an independent reference ---------------------------------------------------------------------------------------


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def rotation(position: int, dimensions: int) -> np.ndarray:
    """The block-diagonal matrix R_i of Su et al. 2021, eq. 15."""
    matrix = np.zeros((dimensions, dimensions))
    for t in range(dimensions // 2):
        angle = position / 10000 ** (2 * t / dimensions)
        block = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        matrix[2 * t : 2 * t + 2, 2 * t : 2 * t + 2] = block
    return matrix


def sinusoid_in_halves(length: int, d_model: int) -> np.ndarray:
    table = np.zeros((length, d_model))
    for i, t in itertools.product(range(length), range(d_model // 2)):
        angle = i / 10000 ** (2 * t / d_model)
        table[i, t], table[i, d_model // 2 + t] = math.sin(angle), math.cos(angle)
    return table


def reference(decoder: Decoder, tokens: Tensor, lengths: Tensor, *, released: bool) -> np.ndarray:
    """RoPE by the text (causal, keys from the layer, last token) or by the program, one sequence and pair at a time."""
    w = {name: value.detach().numpy() for name, value in decoder.state_dict().items()}
    heads, d_model = SMALL["num_heads"], SMALL["d_model"]
    size = d_model // heads
    results = []
    for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
        x = w["embedding.weight"][row]
        if released:
            x = x + sinusoid_in_halves(len(row), d_model)
        raw = x
        for layer in range(SMALL["num_layers"]):
            p = f"blocks.{layer}."
            normed = layer_norm(x, w[p + "norm_attention.weight"], w[p + "norm_attention.bias"])
            source = raw if released else normed
            to_q, to_k, to_v = np.split(w[p + "attention.qkv.weight"], 3)
            plus_q, plus_k, plus_v = np.split(w[p + "attention.qkv.bias"], 3)
            q, k, v = normed @ to_q.T + plus_q, source @ to_k.T + plus_k, source @ to_v.T + plus_v
            outputs = np.zeros_like(x)
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                for i in range(len(row)):
                    visible = range(len(row)) if released else range(min(i + 1, length))
                    rotated = rotation(i, size) @ q[i, part]
                    logits = [rotated @ rotation(j, size) @ k[j, part] / math.sqrt(size) for j in visible]
                    weights = np.exp(logits) / np.exp(logits).sum()
                    outputs[i, part] = sum(weight * v[j, part] for weight, j in zip(weights, visible, strict=True))
            x = x + outputs @ w[p + "attention.out.weight"].T + w[p + "attention.out.bias"]
            normed = layer_norm(x, w[p + "norm_ffn.weight"], w[p + "norm_ffn.bias"])
            hidden = np.maximum(normed @ w[p + "ffn.0.weight"].T + w[p + "ffn.0.bias"], 0)
            x = x + hidden @ w[p + "ffn.3.weight"].T + w[p + "ffn.3.bias"]
        read = x.mean(0) if released else layer_norm(x, w["final_norm.weight"], w["final_norm.bias"])[length - 1]
        results.append(w["readout.weight"] @ read + w["readout.bias"])
    return np.stack(results)


@both_protocols
@pytest.mark.parametrize("fused", [True, False])
def test_the_decoder_matches_the_reference(protocol: str, fused: bool) -> None:
    decoder, tokens = model("rope", protocol), random_tokens()
    ours = decoder(tokens, LENGTHS, fused=fused).detach().numpy()
    assert np.abs(ours - reference(decoder, tokens, LENGTHS, released=protocol == "released")).max() <= 1e-10


@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_a_parallel_decoder_matches_gpt_j(rotary_dim: int) -> None:
    """With transformers' own GPT-J, whose attention has no biases and whose readout is at each token."""
    options = {"rotary_pct": rotary_dim / 8}
    decoder = model(
        "partial-rope", parallel=True, activation="gelu", readout="each", encoding_options=options, num_classes=11
    )
    sizes = {"vocab_size": 11, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 12}
    gptj = GPTJForCausalLM(GPTJConfig(**sizes, rotary_dim=rotary_dim, activation_function="gelu")).double().eval()
    names = {"embedding": "transformer.wte", "final_norm": "transformer.ln_f", "readout": "lm_head"}
    for layer in range(2):
        ours, theirs = f"blocks.{layer}.", f"transformer.h.{layer}."
        names |= {f"{ours}norm_attention": f"{theirs}ln_1", f"{ours}attention.out": f"{theirs}attn.out_proj"}
        names |= {f"{ours}ffn.0": f"{theirs}mlp.fc_in", f"{ours}ffn.3": f"{theirs}mlp.fc_out"}
    with torch.no_grad():
        for ours, theirs in names.items():
            weights = gptj.get_submodule(theirs).state_dict()
            missing, _ = decoder.get_submodule(ours).load_state_dict(weights, strict=False)
            for name in missing:  # the bias of the output projection
                decoder.get_submodule(ours).get_parameter(name).zero_()
        for block, layer in zip(decoder.blocks, gptj.transformer.h, strict=True):
            parts = layer.attn.q_proj, layer.attn.k_proj, layer.attn.v_proj
            block.attention.qkv.weight.copy_(torch.cat([part.weight for part in parts]))
            block.attention.qkv.bias.zero_()
        tokens = random_tokens()
        torch.testing.assert_close(decoder(tokens, fused=True), gptj(tokens).logits, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(decoder(tokens, fused=False), decoder(tokens), rtol=1e-9, atol=1e-9)


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["rope", "learned"])
def test_the_seed_decides_the_model(encoding: str) -> None:
    chosen = config(encoding)
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(Decoder(chosen).state_dict())
    one, same, other = states
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])


@pytest.mark.parametrize("encoding", ["rope", "mla"])
@pytest.mark.parametrize("place", ["weights", "attention", "ffn-hidden", "ffn"])
def test_dropout_acts_only_where_configured_and_only_in_training(encoding: str, place: str) -> None:
    tokens = random_tokens()
    decoder = model(encoding, dropout=0.5, dropout_on=(place,))
    quiet = model(encoding, dropout=0.5, dropout_on=())
    assert has_different_output(decoder(tokens), quiet(tokens)) == 0.0
    decoder.train()
    quiet.train()
    for fused in (True, False):
        assert has_different_output(decoder(tokens, fused=fused), decoder(tokens, fused=fused)) > 1e-3
    assert has_different_output(quiet(tokens), quiet(tokens)) == 0.0
    rates = {name: module.p for name, module in decoder.blocks[0].named_modules() if isinstance(module, nn.Dropout)}
    rates["weights"] = decoder.blocks[0].attention.dropout
    expected = {"drop_attention": "attention", "ffn.2": "ffn-hidden", "ffn.4": "ffn", "weights": "weights"}
    assert rates == {name: 0.5 if where == place else 0.0 for name, where in expected.items()}


# ---- switches and protocols -----------------------------------------------------------------------------------------

NAMES_OF_SWITCHES = ("causal", "pad_mask", "key_value_source", "readout", "final_norm", "activation", "dropout_on")
HALVES = ("sinusoidal", {"layout": "halves"})
SWITCHES = {  # those above, then the input encoding
    "paper": (True, True, "layer", "last", True, "relu", ("weights", "attention", "ffn"), (None, {})),
    "released": (False, False, "embeddings", "mean", False, "relu", ("weights", "attention", "ffn"), (None, {})),
    "released rope": (False, False, "embeddings", "mean", False, "relu", ("weights", "attention", "ffn"), HALVES),
    "released mla": (
        *(False, True, "layer", "masked-mean", True, "gelu", ("ffn-hidden", "ffn")),
        ("learned", {"init_std": 0.0}),
    ),
}


@pytest.mark.parametrize("encoding", ["rope", "mla", "alibi"])
def test_the_protocols_set_their_documented_switches(encoding: str) -> None:
    for protocol in PROTOCOLS:
        *values, (name, options) = SWITCHES.get(f"{protocol} {encoding}", SWITCHES[protocol])
        expected = dict(zip(NAMES_OF_SWITCHES, values, strict=True))
        expected |= {"input_encoding": name, "input_encoding_options": options}
        assert switches_of(protocol, encoding) == expected
        chosen = config(encoding, protocol)
        assert {name: getattr(chosen, name) for name in expected} == expected


@both_protocols
@pytest.mark.parametrize("encoding", ["rope", "mla"])
def test_a_configuration_round_trips_through_json_and_is_frozen(encoding: str, protocol: str) -> None:
    chosen = config(encoding, protocol)
    assert DecoderConfig(**chosen.model_dump(mode="json")) == chosen
    assert DecoderConfig.model_validate_json(chosen.model_dump_json()) == chosen
    with pytest.raises(ValidationError, match="frozen"):
        chosen.d_model = 32


def test_mla_can_take_queries_from_the_layers_input() -> None:
    decoder, tokens = model("mla", encoding_options={"q_compress": None}), random_tokens()
    assert not any(name.startswith(("down_q", "norm_q")) for name, _ in decoder.block(0).attention.named_parameters())
    assert has_different_output(decoder(tokens), decoder(tokens, fused=False)) <= 1e-12
    x, attention = decoder.start_pass(tokens)[0], decoder.block(0).attention
    parts = [attention.project_part(part, part, full_inputs=(x, x)) for part in (0.3 * x, 0.7 * x)]
    for whole, first, second in zip(attention.project(x, x)[:2], *parts, strict=True):
        assert has_different_output(first + second, whole) <= 1e-12


@pytest.mark.parametrize(
    ("encoding", "options", "scale"),
    [
        ("t5", {}, 1.0),
        ("tupe", {}, 16**-0.5),
        ("deberta", {}, 24**-0.5),
        ("deberta", {"terms": ["c2p"]}, 16**-0.5),
        ("rope", {}, None),
        ("mla", {}, None),
    ],
)
def test_a_configuration_uses_its_encodings_published_scale(
    encoding: str, options: dict[str, Any], scale: float | None
) -> None:
    chosen = config(encoding, encoding_options=options)
    assert chosen.model_dump()["attention_scale"] == scale
    assert config(encoding, encoding_options=options, attention_scale="published") == chosen
    decoder, tokens = model(encoding, encoding_options=options), random_tokens()
    assert [block.attention.scale for block in decoder.blocks] == [decoder.encoding.scale] * 2
    other = model(encoding, encoding_options=options, attention_scale=0.9)
    assert has_different_output(decoder(tokens), other(tokens)) > 1e-3


def test_changing_the_encoding_resets_the_scale() -> None:
    t5, rope = (config(name).model_dump() for name in ("t5", "rope"))
    assert decoder_config(**without_published_scale(t5) | {"encoding": "rope"}) == config("rope")
    assert decoder_config(**without_published_scale(rope) | {"encoding": "t5"}) == config("t5")
    wider = decoder_config(**without_published_scale(config("tupe").model_dump()) | {"d_model": 32})
    assert wider.attention_scale == 32**-0.5
    for chosen in (0.7, None):
        fields = config("t5", attention_scale=chosen).model_dump()
        assert without_published_scale(fields) == fields
    assert without_published_scale({"encoding": "roep", "attention_scale": 1.0}) == {
        "encoding": "roep",
        "attention_scale": 1.0,
    }


@pytest.mark.parametrize(
    ("switch", "value"),
    [("final_norm", False), ("activation", "gelu"), ("input_encoding", "sinusoidal"), ("parallel", True)],
)
def test_a_switch_changes_the_function(switch: str, value: Any) -> None:
    assert (
        has_different_output(model("rope")(random_tokens()), model("rope", **{switch: value})(random_tokens())) > 1e-3
    )


def test_layers_have_separate_encodings_where_the_encoding_says_so() -> None:
    decoder = model("partial-rope", encoding_options={"layers": [1]}, num_layers=3)
    assert [block.attention.encoding.coupling for block in decoder.blocks] == ["none", "rotation", "none"]
    separate, shared = (model("relative-table", encoding_options={"shared": s}) for s in (False, True))
    assert separate.blocks[0].attention.encoding.weight is not separate.blocks[1].attention.encoding.weight
    assert shared.blocks[0].attention.encoding.weight is shared.blocks[1].attention.encoding.weight


REFUSED = [
    ({"d_model": 18, "num_heads": 4}, "d_model must be divisible by num_heads (4), got 18."),
    ({"d_model": 6, "num_heads": 2}, "head_dim must be even and at least 2"),
    ({"num_layers": 0}, "num_layers must be at least 1, got 0."),
    ({"dropout": 1.0}, "dropout must be less than 1, got 1.0."),
    ({"dropout_on": ("everywhere",)}, "dropout_on.0 must be 'weights', 'attention', "),
    ({"attention_scale": 0.0}, "attention_scale must be over 0, got 0.0."),
    ({"readout": "first"}, "readout must be 'last', 'mean', 'masked-mean' or 'each', got 'first'."),
    ({"encoding": "roep"}, "encoding must be one of alibi, "),
    (
        {"encoding_options": {"bass": 2.0}},
        "option of encoding 'rope' must be one of base, pairing, got 'bass'; did you mean 'base'?",
    ),
    ({"encoding_options": {"base": -1.0}}, "base must be finite and over 0, got -1.0"),
    ({"layers": 3}, "layers is not a field; did you mean 'num_layers'?"),
    ({"input_encoding": "alibi"}, "input_encoding must be an encoding that is added at the input"),
    (
        {"encoding": "axial-rope", "input_encoding": "sinusoidal"},
        "input_encoding must use the coordinates of encoding 'axial-rope', got 'sinusoidal'.",
    ),
    ({"encoding": "axial-rope", "input_encoding": "bipe"}, "input_encoding must use the coordinates of encoding"),
    (
        {"input_encoding": "learned", "input_encoding_options": {"layout": "halves"}},
        "option of encoding 'learned' must be init_std, got 'layout'.",
    ),
    ({"encoding": "mla", "key_value_source": "embeddings"}, "key_value_source must be 'layer' for latent attention"),
]


@pytest.mark.parametrize(("fields", "start"), REFUSED)
def test_an_invalid_configuration_is_refused_in_one_sentence(fields: dict, start: str) -> None:
    with pytest.raises(InputError) as caught:
        decoder_config(**fields)
    message = str(caught.value)
    assert message.startswith(start)
    assert "\n" not in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("encoding", ["rope", "alibi", "sinusoidal"])
def test_without_a_position_table_a_sequence_may_exceed_max_len(encoding: str) -> None:
    decoder, tokens = model(encoding), random_tokens((2, 24))
    assert decoder(tokens).shape == (2, 5)
    assert torch.equal(decoder(tokens), decoder(tokens, positions=torch.arange(24)))


def test_a_sequence_longer_than_the_position_table_is_refused() -> None:
    for fields in ({"encoding": "learned"}, {"encoding": "rope", "input_encoding": "learned"}):
        decoder = model(**fields)
        assert decoder(random_tokens((1, 16))).shape == (1, 5)
        with pytest.raises(
            InputError, match=r"^max_len must be at least the number of tokens, 17, with Learned\w*, got 16\.$"
        ):
            decoder(random_tokens((1, 17)))
    with pytest.raises(InputError, match=r"^positions must be from 0 to 15 .*, got 16"):
        model("learned")(random_tokens((1, 17)), positions=torch.arange(17))


# ---- frozen norms ----------------------------------------------------------------------------------------------------

NORMS = {
    "LayerNorm": lambda width: nn.LayerNorm(width),
    "LayerNorm without scale": lambda width: nn.LayerNorm(width, elementwise_affine=False),
    "RMSNorm": lambda width: nn.RMSNorm(width),
    "RMSNorm with eps": lambda width: nn.RMSNorm(width, eps=1e-3),
    "none": lambda width: nn.Identity(),
}


@given(name=st.sampled_from(sorted(NORMS)), width=st.integers(2, 9), seed=st.integers(0, 999))
def test_norm_parts_sum_to_the_norm(name: str, width: int, seed: int) -> None:
    """float64, 1e-12."""
    torch.manual_seed(seed)
    norm = NORMS[name](width).double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x, part = torch.randn(2, 3, 5, width, dtype=torch.float64)
    shift = getattr(norm, "bias", None)
    with torch.no_grad():
        summed = apply_frozen_norm(norm, part, x) + apply_frozen_norm(norm, x - part, x)
        expected = norm(x) - (0 if shift is None else shift)
        torch.testing.assert_close(summed, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            apply_frozen_norm(norm, 3 * part, x), 3 * apply_frozen_norm(norm, part, x), rtol=0, atol=1e-12
        )


def test_a_module_that_is_not_a_norm_is_refused() -> None:
    with pytest.raises(TypeError, match="Linear"):
        apply_frozen_norm(nn.Linear(2, 2), torch.ones(1, 2), torch.ones(1, 2))
