"""Stretched RoPE: the rules written once more in plain loops, transformers' own, and configs as models publish them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DeepseekV3Config, GPTNeoXConfig, GptOssConfig, LlamaConfig, Phi3Config, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2

from toeplens import encodings
from toeplens.encodings import Rotary, attention_logits
from toeplens.encodings.scaled import ScaledRoPE
from toeplens.ground import InputError

B, H, D, LONGEST = 2, 2, 16, 64
LISTS = {"short_factor": [1.0 + 0.05 * t for t in range(D // 2)], "long_factor": [1.5**t for t in range(D // 2)]}
CASES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 2.5, "partial_rotary_factor": 0.25, "rope_theta": 500.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 500000.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "original_max_position_embeddings": 16, "truncate": False, "rope_theta": 100.0},
    {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 0.5},
    {"rope_type": "longrope", "original_max_position_embeddings": 16, **LISTS},
    {"rope_type": "longrope", "original_max_position_embeddings": 16, "factor": 32.0, **LISTS},
    {"rope_type": "longrope", "original_max_position_embeddings": 16, "attention_factor": 1.2, **LISTS},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 100.0,
    },
    {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    {"rope_type": "proportional", "partial_rotary_factor": 0.6, "factor": 3.0},
]
every_case = pytest.mark.parametrize(
    "parameters", CASES, ids=[f"{case['rope_type']}-{n}" for n, case in enumerate(CASES)]
)


def build(name: str = "scaled-rope", *, head_dim: int = D, max_len: int = LONGEST, **options: Any) -> Rotary:
    made = encodings.build(name, d_model=H * head_dim, num_heads=H, head_dim=head_dim, max_len=max_len, **options)
    assert isinstance(made, Rotary)
    return made


def at_length(encoding: Rotary, length: int) -> Tensor:
    return encoding.frequencies_at(torch.arange(length))[0]


def random_heads(length: int, *, head_dim: int = D, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (B, H, length, head_dim)
    q, k = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return q, k


def apart(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours.double() - theirs.double()).abs().max())


# ---- against the formulas, in plain loops ---------------------------------------------------------------------------


def by_hand(head_dim: int, longest: int, length: int, p: dict[str, Any]) -> tuple[list[float], float]:
    """Inverse frequencies and attention factor, pair by pair, from the papers' formulas."""
    kind, base, share = p["rope_type"], p.get("rope_theta", 10000.0), p.get("partial_rotary_factor", 1.0)
    factor, original = p.get("factor"), p.get("original_max_position_embeddings")
    dim = head_dim if kind == "proportional" else int(head_dim * share)
    magnitude, result = 1.0, []
    if kind in ("yarn", "longrope") and factor is None:
        factor = longest / original
    for t in range(dim // 2):
        theta = base ** (-2 * t / dim)
        turns = original * theta / (2 * math.pi) if original else 0.0
        if kind == "linear":
            theta = theta / factor
        elif kind == "dynamic":
            stretch = max(1.0, factor * length / longest - (factor - 1))
            theta = (base * stretch ** (dim / (dim - 2))) ** (-2 * t / dim)
        elif kind == "longrope":
            theta = theta / p["long_factor" if length > original else "short_factor"][t]
        elif kind == "llama3":
            low, high = p["low_freq_factor"], p["high_freq_factor"]
            if turns < low:
                theta = theta / factor
            elif turns <= high:
                kept = (turns - low) / (high - low)
                theta = kept * theta + (1 - kept) * theta / factor
        elif kind == "proportional":
            theta = theta / p.get("factor", 1.0) if t < int(share * head_dim / 2) else 0.0
        elif kind == "yarn":
            ends = []
            for beta, rounded in ((p.get("beta_fast", 32), math.floor), (p.get("beta_slow", 1), math.ceil)):
                pair = dim / 2 * math.log(original / (2 * math.pi * beta)) / math.log(base)
                ends.append(rounded(pair) if p.get("truncate", True) else pair)
            low, high = max(ends[0], 0), min(ends[1], dim - 1)
            slow = min(1, max(0, (t - low) / (high - low if high != low else 0.001)))
            theta = slow * theta / factor + (1 - slow) * theta
        result.append(theta)
    if "attention_factor" in p:
        magnitude = p["attention_factor"]
    elif kind == "longrope":
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original))
    elif kind == "yarn":
        magnitude = 0.1 * math.log(factor) + 1
        if "mscale_all_dim" in p:
            magnitude = (0.1 * p["mscale"] * math.log(factor) + 1) / (0.1 * p["mscale_all_dim"] * math.log(factor) + 1)
    return result, magnitude


@every_case
def test_the_frequencies_are_the_published_ones(parameters: dict[str, Any]) -> None:
    encoding = build(**parameters)
    for length in (1, 16, 17, LONGEST, LONGEST + 1, 5 * LONGEST):
        expected, magnitude = by_hand(D, LONGEST, length, parameters)
        exact = torch.tensor(expected, dtype=torch.float64)
        assert torch.allclose(at_length(encoding, length), exact, rtol=1e-12, atol=0)
        assert encoding.magnitude == pytest.approx(magnitude, rel=1e-14)


@pytest.mark.parametrize("factor", [1.0, 2.0, 7.5])
def test_ntk_aware_scaling_is_rope_with_a_larger_base(factor: float) -> None:
    larger = build("rope", base=10000 * factor ** (D / (D - 2)))
    ours = build("rope-ntk", factor=factor)
    assert torch.allclose(ours.frequencies, larger.frequencies, rtol=1e-14, atol=0)
    assert ours.frequencies[0, -1] * factor == pytest.approx(10000 ** (-(D - 2) / D))
    assert torch.equal(build("rope-ntk", head_dim=2).frequencies, torch.ones(1, 1, dtype=torch.float64))


# ---- against transformers -------------------------------------------------------------------------------------------


def llama_config(head_dim: int, longest: int, parameters: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=H * head_dim,
        num_attention_heads=H,
        max_position_embeddings=longest,
        rope_parameters={"rope_theta": 10000.0, **copy.deepcopy(parameters)},
    )


@st.composite
def drawn_parameters(draw: st.DrawFn) -> tuple[int, int, int, dict[str, Any]]:
    """Head dimensions, the longest text, a text's length, and what a config might say."""
    kind = draw(st.sampled_from(["linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]))
    head_dim, share = draw(st.sampled_from([(8, 1.0), (32, 0.25), (64, 1.0), (80, 0.4), (96, 0.75), (128, 1.0)]))
    original = draw(st.integers(16, 10_000))
    factor = draw(st.floats(1.0, 64.0))
    p: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.floats(100.0, 1e7)), "partial_rotary_factor": share}
    if kind != "longrope" or draw(st.booleans()):
        p["factor"] = factor
    if kind in ("yarn", "longrope", "llama3"):
        p["original_max_position_embeddings"] = original
    if kind in ("yarn", "longrope") and draw(st.booleans()):
        p["attention_factor"] = draw(st.floats(0.5, 2.0))
    if kind == "yarn":
        optional = {
            "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.25, 8.0),
            "mscale": st.floats(0.1, 2.0),
            "mscale_all_dim": st.floats(0.1, 2.0),
            "truncate": st.booleans(),
        }
        p.update({name: draw(values) for name, values in optional.items() if draw(st.booleans())})
    elif kind == "longrope":
        count = int(head_dim * share) // 2
        for name in ("short_factor", "long_factor"):
            p[name] = draw(st.lists(st.floats(1.0, 60.0), min_size=count, max_size=count))
    elif kind == "llama3":
        p["low_freq_factor"] = draw(st.floats(0.5, 2.0))
        p["high_freq_factor"] = p["low_freq_factor"] + draw(st.floats(0.5, 4.0))
    longest = math.ceil(original * factor)
    return head_dim, longest, draw(st.integers(1, 3 * longest)), p


@settings(max_examples=40)
@given(drawn_parameters())
def test_inverse_frequencies_and_attention_factor_are_transformers(
    drawn: tuple[int, int, int, dict[str, Any]],
) -> None:
    """Theirs are float32 throughout: an exponent's rounding alone is 2^-24 ln(10^7) = 1e-6 of a frequency.

    Llama 3's mean between two numbers of turns that are near each other makes up to ten times that of it.
    """
    head_dim, longest, length, parameters = drawn
    config = llama_config(head_dim, longest, parameters)
    theirs, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=length)
    ours = build(head_dim=head_dim, max_len=longest, **parameters)
    frequencies = ours.frequencies_at(torch.tensor([length - 1]))[0]
    assert frequencies.shape == theirs.shape
    assert torch.allclose(frequencies, theirs.double(), rtol=1e-5, atol=0)
    assert ours.magnitude == pytest.approx(factor, rel=1e-12)


def phi3_config() -> Phi3Config:
    """As published for Phi-3-mini-128k: the original length beside the lists, and the older name of the type."""
    lists = {
        "short_factor": [1.0 + 0.04 * t for t in range(48)],
        "long_factor": [min(64.0, 1.08**t + t / 3) for t in range(48)],
    }
    return Phi3Config(
        hidden_size=192,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters={"type": "longrope", "rope_theta": 10000.0, **lists},
    )


LLAMA_3_1 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
DEEPSEEK_V3 = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
MODELS = {
    "Llama 3.1": (
        LlamaConfig(
            hidden_size=256,
            num_attention_heads=2,
            max_position_embeddings=131072,
            rope_parameters={"rope_theta": 500000.0, **LLAMA_3_1},
        ),
        llama.LlamaRotaryEmbedding,
        128,
    ),
    "Qwen 2.5, long texts": (
        Qwen2Config(
            hidden_size=256,
            num_attention_heads=2,
            max_position_embeddings=32768,
            rope_parameters={
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "rope_theta": 1000000.0,
                "type": "yarn",
            },
        ),
        qwen2.Qwen2RotaryEmbedding,
        128,
    ),
    "Phi-3": (phi3_config(), phi3.Phi3RotaryEmbedding, 96),
    "DeepSeek-V3": (
        DeepseekV3Config(max_position_embeddings=163840, rope_parameters={"rope_theta": 10000.0, **DEEPSEEK_V3}),
        deepseek_v3.DeepseekV3RotaryEmbedding,
        64,
    ),
    "gpt-oss": (GptOssConfig(), gpt_oss.GptOssRotaryEmbedding, 64),
    "GPT-NeoX": (
        GPTNeoXConfig(hidden_size=192, num_attention_heads=2, rotary_pct=0.25),
        gpt_neox.GPTNeoXRotaryEmbedding,
        96,
    ),
}


@pytest.mark.parametrize("start", [0, 5000])
@pytest.mark.parametrize("model", list(MODELS))
def test_a_models_config_is_taken_as_it_is(model: str, start: int) -> None:
    config, rotary, head_dim = MODELS[model]
    config = copy.deepcopy(config)
    encoding = build(head_dim=head_dim, max_len=config.max_position_embeddings, **config.rope_parameters)
    positions = torch.arange(start, start + 32)
    q, k = random_heads(32, head_dim=head_dim, dtype=torch.float32)
    cos, sin = rotary(config)(q, positions.unsqueeze(0))
    if cos.shape[-1] == encoding.frequencies.shape[-1]:  # gpt-oss keeps one of the two halves
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    width = cos.shape[-1]
    theirs = llama.apply_rotary_pos_emb(q[..., :width], k[..., :width], cos, sin)
    for x, a, b in zip((q, k), encoding.rotate(q, k, positions, positions), theirs, strict=True):
        assert torch.equal(a[..., width:], x[..., width:])
        # a float32 phase of 5032 is off by 5032 2^-24 = 3e-4, and by its frequency's error; entries are up to 5
        assert apart(a[..., :width], b) <= (2e-5 if start == 0 else 5e-3)


# ---- lengths --------------------------------------------------------------------------------------------------------

DEPENDENT = [case for case in CASES if case["rope_type"] in ("dynamic", "longrope")]
dependent_case = pytest.mark.parametrize("parameters", DEPENDENT, ids=[case["rope_type"] for case in DEPENDENT])


@dependent_case
def test_a_sequence_is_as_long_as_its_own_keys_say(parameters: dict[str, Any]) -> None:
    encoding = build(**parameters)
    rows = torch.stack([torch.arange(8), torch.arange(8) * 50, torch.arange(8) - 300])
    together = encoding.frequencies_at(rows)
    assert together.shape == (3, 1, D // 2)
    for b, length in enumerate((8, 351, 1)):
        assert torch.equal(together[b, 0], at_length(encoding, length))
    q, k = (x[:1].expand(3, -1, -1, -1) for x in random_heads(8))
    for whole, x in zip(encoding.rotate(q, k, rows, rows), (q, k), strict=True):
        for b, row in enumerate(rows):
            assert apart(whole[b : b + 1], encoding.rotate(x[b : b + 1], x[b : b + 1], row, row)[0]) <= 1e-12
    assert encoding.frequencies_at(torch.arange(0)).shape == (1, D // 2)


@dependent_case
def test_a_query_turns_by_the_frequencies_of_the_text_it_stands_in(parameters: dict[str, Any]) -> None:
    """Not by those of a text that ends with it: it meets later keys, and other queries meet its key."""
    encoding, length = build(**parameters), 90
    q, k = random_heads(length)
    positions = torch.arange(length)
    whole = encoding.rotate(q, k, positions, positions)[0]
    for n in (0, 7):
        one = encoding.rotate(q[:, :, n : n + 1], k, positions[n : n + 1], positions)[0]
        assert apart(one, whole[:, :, n : n + 1]) <= 1e-12


@pytest.mark.parametrize("parameters", [CASES[3], CASES[5], CASES[10], CASES[13]])
def test_the_kernel_is_that_of_the_longest_text_and_carries_the_squared_factor(parameters: dict[str, Any]) -> None:
    encoding = build(**parameters)
    positions = torch.arange(LONGEST)
    q, k = random_heads(LONGEST)
    kernel = encoding.kernel((positions.unsqueeze(-1) - positions).flatten()).unflatten(-1, (LONGEST, LONGEST))[0]
    n = kernel.shape[0]
    pairs_q, pairs_k = (torch.complex(x[..., :n], x[..., n : 2 * n]) for x in (q, k))
    expected = torch.einsum("bhit,bhjt,tij->bhij", pairs_q, pairs_k.conj(), kernel).real
    expected = expected + q[..., 2 * n :] @ k[..., 2 * n :].transpose(-1, -2)
    ours = attention_logits(
        q, k, encoding=encoding, q_positions=positions, k_positions=positions, scale=1.0, causal=False
    )
    assert apart(ours, expected) <= 1e-10
    assert encoding.kernel(torch.tensor([0])).real == pytest.approx(encoding.magnitude**2)


# ---- names, keywords, refusals --------------------------------------------------------------------------------------

ENCODINGS = [n for n in encodings.names() if encodings.get(n).__module__ == ScaledRoPE.__module__]
NAMED = {name: name.removeprefix("rope-") for name in ENCODINGS if name not in ("clex", "scaled-rope")}


@pytest.mark.parametrize("name", list(NAMED))
def test_a_named_type_is_the_general_class_with_its_defaults(name: str) -> None:
    kind = NAMED[name]
    defaults = {n: p.default for n, p in encodings.options(name).items()}
    assert defaults["rope_type"] == kind
    assert defaults["pairing"] == "half"
    named = build(name)
    options = {n: value for n, value in defaults.items() if value is not None}
    if name in ("rope-yarn", "rope-longrope"):
        options["original_max_position_embeddings"] = LONGEST // 4
    if name == "rope-longrope":
        options |= {"short_factor": [1.0] * 8, "long_factor": [4 ** (t / 7) for t in range(8)]}
    general = build(**options)
    assert isinstance(general, ScaledRoPE)
    assert isinstance(named, ScaledRoPE)
    assert named.magnitude == general.magnitude
    assert named.length_dependent == general.length_dependent == type(named).length_dependent
    for length in (1, 16, 17, 64, 300):
        assert torch.allclose(at_length(named, length), at_length(general, length), rtol=1e-15, atol=0)
    for spelling in ({"rope_type": kind}, {"type": kind}, {"rope_type": kind, "type": kind}, {"rope_type": None}):
        assert torch.equal(build(name, **spelling).frequencies, named.frequencies)


def test_the_published_defaults_are_these() -> None:
    llama3, gemma = build("rope-llama3"), build("rope-proportional")
    assert torch.equal(llama3.frequencies, build(**LLAMA_3_1, rope_theta=500000.0).frequencies)
    assert torch.equal(gemma.frequencies != 0, torch.arange(8).unsqueeze(0) < 2)
    assert gemma.frequencies[0, 1] == pytest.approx(1e6 ** (-2 / D))
    assert torch.allclose(build("rope-linear").frequencies * 4, build("rope").frequencies, rtol=1e-15, atol=0)
    assert build("rope-yarn").magnitude == pytest.approx(0.1 * math.log(4) + 1)
    assert build("rope-longrope").magnitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))
    longer = build("rope-ntk", factor=3.0).frequencies[0]
    assert torch.allclose(at_length(build("rope-dynamic"), 3 * LONGEST), longer, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", ["rope-yarn", "rope-longrope"])
def test_of_factor_and_original_length_one_follows_from_the_other(name: str) -> None:
    for given_ in ({"factor": 8.0}, {"original_max_position_embeddings": 8}):
        both = build(name, factor=8.0, original_max_position_embeddings=8)
        one = build(name, **given_)
        assert one.magnitude == pytest.approx(both.magnitude)
        assert torch.allclose(at_length(one, 9), at_length(both, 9), rtol=1e-14, atol=0)


def test_none_is_the_same_as_not_given() -> None:
    parameters = {"rope_type": "linear", "factor": 4.0, "beta_fast": None, "short_factor": None, "rope_theta": None}
    assert torch.equal(build(**parameters).frequencies, build(rope_type="linear", factor=4.0).frequencies)
    assert torch.equal(build().frequencies, build("rope", pairing="half").frequencies)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 16, **LISTS}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("scaled-rope", {"rope_type": "stretched"}, "rope_type must be one of default, "),
    (
        "rope-linear",
        {"rope_type": "linear", "type": "yarn", "factor": 2.0},
        "type must be the same as rope_type, 'linear', got 'yarn'",
    ),
    ("scaled-rope", {**LONG, "long_factor": None}, "long_factor must be set for rope type 'longrope'"),
    ("scaled-rope", {**LONG, "short_factor": [1.0]}, "short_factor must be 8 positive numbers"),
    ("scaled-rope", {**LONG, "original_max_position_embeddings": 1}, "original_max_position_embeddings must be"),
    ("scaled-rope", {**YARN, "beta_fast": 0.5}, "beta_fast must be"),
    ("scaled-rope", {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be"),
    ("rope-llama3", {"high_freq_factor": 1.0}, "high_freq_factor must be"),
    ("rope-yarn", {"rope_type": "linear"}, "rope_type must be 'yarn' for this encoding, got 'linear'"),
]


@pytest.mark.parametrize(("name", "options", "sentence"), REFUSED)
def test_what_cannot_be_built_is_refused_in_one_sentence(name: str, options: dict, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        build(name, **options)
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_a_shortest_text_is_enough_for_the_defaults() -> None:
    for name in ENCODINGS:
        assert bool(at_length(build(name, max_len=1), 40).isfinite().all())
