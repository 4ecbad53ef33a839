"""RoPE for longer contexts: the rules in plain loops, transformers own, CLEX, and models configurations."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import pkgutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from tests.encodings.samples import assert_close, by_kernel, rotated_logits, vectors
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    HunYuanMoEV1Config,
    LlamaConfig,
    Ministral3Config,
    ModernBertConfig,
    Olmo3Config,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2VLTextConfig,
    Qwen3VLTextConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1RotaryEmbedding
from transformers.models.llama import modeling_llama as llama
from transformers.models.ministral3 import modeling_ministral3 as ministral3
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding
from transformers.models.qwen2 import modeling_qwen2 as qwen2

from toeplens import encodings
from toeplens.encodings import Rotary, attention_logits, conformance
from toeplens.encodings.rope_scaling import CLEX, ScaledRoPE
from toeplens.utils import InputError

# ---- rules of rope types ---------------------------------------------------------------------------------------------

H, D, MAX_LENGTH = 2, 16, 64
LISTS = {"short_factor": [1.0 + 0.05 * t for t in range(D // 2)], "long_factor": [1.5**t for t in range(D // 2)]}
SAME_BETAS: dict[str, Any] = {"beta_fast": 2.0, "beta_slow": 2.0, "truncate": False}
LATE_END: dict[str, Any] = {"rope_theta": 10.0, "beta_fast": 600.0}  # the ramp would end beyond the dimensions
CASES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 2.5, "partial_rotary_factor": 0.25, "rope_theta": 500.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 500000.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "truncate": False, "rope_theta": 100.0},
    {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, **LATE_END},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **SAME_BETAS},
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


def build(name: str = "scaled-rope", *, head_dim: int = D, max_len: int = MAX_LENGTH, **options: Any) -> Rotary:
    encoding = encodings.build(name, d_model=H * head_dim, num_heads=H, head_dim=head_dim, max_len=max_len, **options)
    assert isinstance(encoding, Rotary)
    return encoding


def at_length(encoding: Rotary, length: int) -> Tensor:
    return encoding.frequencies_at(torch.arange(length))[0]


def max_difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).detach().abs().max())


# ---- against the formulas, in plain loops ---------------------------------------------------------------------------


def reference_frequencies(head_dim: int, longest: int, length: int, p: dict[str, Any]) -> tuple[list[float], float]:
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
def test_the_frequencies_match_the_published_formulas(parameters: dict[str, Any]) -> None:
    encoding = build(**parameters)
    for length in (1, 16, 17, MAX_LENGTH, MAX_LENGTH + 1, 5 * MAX_LENGTH):
        expected, magnitude = reference_frequencies(D, MAX_LENGTH, length, parameters)
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
def test_a_models_config_is_accepted_unchanged(model: str, start: int) -> None:
    config, rotary, head_dim = MODELS[model]
    config = copy.deepcopy(config)
    encoding = build(head_dim=head_dim, max_len=config.max_position_embeddings, **config.rope_parameters)
    positions = torch.arange(start, start + 32)
    q, k = vectors(32, H, head_dim, torch.float32)
    cos, sin = rotary(config)(q, positions.unsqueeze(0))
    if cos.shape[-1] == encoding.frequencies.shape[-1]:  # gpt-oss keeps one of the two halves
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    width = cos.shape[-1]
    theirs = llama.apply_rotary_pos_emb(q[..., :width], k[..., :width], cos, sin)
    for x, a, b in zip((q, k), encoding.rotate(q, k, positions, positions), theirs, strict=True):
        assert torch.equal(a[..., width:], x[..., width:])
        # a float32 phase of 5032 is off by 5032 2^-24 = 3e-4, and by its frequency's error; entries are up to 5
        assert max_difference(a[..., :width], b) <= (2e-5 if start == 0 else 5e-3)


# ---- lengths --------------------------------------------------------------------------------------------------------

DEPENDENT = [case for case in CASES if case["rope_type"] in ("dynamic", "longrope")]
dependent_case = pytest.mark.parametrize("parameters", DEPENDENT, ids=[case["rope_type"] for case in DEPENDENT])


@dependent_case
def test_a_sequences_length_follows_from_its_keys(parameters: dict[str, Any]) -> None:
    encoding = build(**parameters)
    rows = torch.stack([torch.arange(8), torch.arange(8) * 50, torch.arange(8) - 300])
    together = encoding.frequencies_at(rows)
    assert together.shape == (3, 1, D // 2)
    for b, length in enumerate((8, 351, 1)):
        assert torch.equal(together[b, 0], at_length(encoding, length))
    q, k = (x[:1].expand(3, -1, -1, -1) for x in vectors(8, H, D))
    for whole, x in zip(encoding.rotate(q, k, rows, rows), (q, k), strict=True):
        for b, row in enumerate(rows):
            assert max_difference(whole[b : b + 1], encoding.rotate(x[b : b + 1], x[b : b + 1], row, row)[0]) <= 1e-12
    assert encoding.frequencies_at(torch.arange(0)).shape == (1, D // 2)


@pytest.mark.parametrize("parameters", [CASES[3], CASES[5], CASES[10], CASES[13]])
def test_the_kernel_is_that_of_the_longest_text_and_carries_the_squared_factor(parameters: dict[str, Any]) -> None:
    encoding = build(**parameters)
    positions = torch.arange(MAX_LENGTH)
    q, k = vectors(MAX_LENGTH, H, D)
    assert_close(rotated_logits(encoding, q, k, positions), by_kernel(encoding, q, k, positions), 1e-10)
    assert encoding.kernel(torch.tensor([0])).real == pytest.approx(encoding.magnitude**2)


# ---- names, keywords, refusals --------------------------------------------------------------------------------------

ENCODINGS = [n for n in encodings.names() if encodings.get(n).__module__ == ScaledRoPE.__module__]
NAMED = {name: name.removeprefix("rope-") for name in ENCODINGS if name not in ("clex", "scaled-rope")}


@pytest.mark.parametrize("name", list(NAMED))
def test_a_named_type_is_the_general_class_with_its_defaults(name: str) -> None:
    kind = NAMED[name]
    defaults = {n: p.default for n, p in encodings.options(name).items()}
    assert defaults["rope_type"] == kind
    named = build(name)
    options = {n: value for n, value in defaults.items() if value is not None}
    if name in ("rope-yarn", "rope-longrope"):
        options["original_max_position_embeddings"] = MAX_LENGTH // 4
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
    longer = build("rope-ntk", factor=3.0).frequencies[0]
    assert torch.allclose(at_length(build("rope-dynamic"), 3 * MAX_LENGTH), longer, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", ["rope-yarn", "rope-longrope"])
def test_factor_and_original_length_determine_each_other(name: str) -> None:
    for given_ in ({"factor": 8.0}, {"original_max_position_embeddings": 8}):
        both = build(name, factor=8.0, original_max_position_embeddings=8)
        encoding = build(name, **given_)
        assert encoding.magnitude == pytest.approx(both.magnitude)
        assert torch.allclose(at_length(encoding, 9), at_length(both, 9), rtol=1e-14, atol=0)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 16, **LISTS}


def test_defaults_work_for_the_shortest_sequence() -> None:
    for name in ENCODINGS:
        assert bool(at_length(build(name, max_len=1), 40).isfinite().all())


# ---- CLEX ------------------------------------------------------------------------------------------------------------

TRAINED_ON = 32


def build_clex(*, down_std: float = 0.0, head_dim: int = D, max_len: int = TRAINED_ON, **options: Any) -> CLEX:
    torch.manual_seed(0)
    encoding = encodings.build("clex", d_model=H * head_dim, num_heads=H, head_dim=head_dim, max_len=max_len, **options)
    assert isinstance(encoding, CLEX)
    torch.nn.init.normal_(encoding.down, std=down_std)
    return encoding.eval()


def with_other_parameters(name: str, **options: Any) -> Tensor:
    options = {"pairing": "half", **options}
    made = encodings.build(name, d_model=H * D, num_heads=H, head_dim=D, max_len=TRAINED_ON, **options)
    return made.frequencies[0]


# ---- the equation ---------------------------------------------------------------------------------------------------


def published_slope(t: float, z: np.ndarray, up: np.ndarray, down: np.ndarray, act: str, base: float) -> np.ndarray:
    """dz/dt of the log-frequencies z, with the NTK-aware part and its derivative written out."""
    d = 2 * len(z)
    alpha, index = 2 * t - 1, np.arange(0, d, 2)
    theta = (base * alpha ** (d / (d - 2))) ** (-index / d)
    theta_slope = -2 * index / (d - 2) * base ** (-index / d) * alpha ** (-index / (d - 2) - 1)
    x = (z + np.log(theta)) @ up
    return (np.tanh(x) if act == "tanh" else x / (1 + np.exp(-x))) @ down + theta_slope / theta


def solve_frequencies(encoding: CLEX, act: str, base: float, largest: int) -> np.ndarray:
    up, down = (w.detach().double().numpy() for w in (encoding.up, encoding.down))
    d = 2 * up.shape[0]
    solution = solve_ivp(
        published_slope,
        (1, largest),
        -np.arange(0, d, 2) / d * math.log(base),
        t_eval=range(1, largest + 1),
        args=(up, down, act, base),
        method="DOP853",
        rtol=1e-12,
        atol=1e-13,
    )
    return solution.y.T


@pytest.mark.parametrize(
    ("act", "base", "param_factor", "head_dim"),
    [("tanh", 10000.0, 1, 16), ("silu", 10000.0, 1, 16), ("tanh", 500000.0, 2, 64), ("silu", 100.0, 3, 8)],
)
def test_frequencies_solve_the_published_equation(act: str, base: float, param_factor: int, head_dim: int) -> None:
    options = {"act": act, "base": base, "param_factor": param_factor, "head_dim": head_dim}
    std = 0.01 / param_factor
    truth = solve_frequencies(build_clex(down_std=std, **options), act, base, 16)
    moved = np.abs(truth - solve_frequencies(build_clex(**options), act, base, 16)).max()
    assert moved > 0.2
    worst = {}
    for steps in (2, 4, 32):
        ours = build_clex(down_std=std, steps=steps, **options).frequency_table(16).log().detach().numpy()
        worst[steps] = np.abs(ours - truth).max()
    assert worst[2] <= 1e-5
    assert worst[4] <= 1e-6
    assert worst[32] <= 1e-9


def test_clex_starts_as_rope_and_continues_as_ntk_aware_scaling() -> None:
    encoding = build_clex()
    assert torch.equal(at_length(encoding, 1), with_other_parameters("rope"))
    assert torch.equal(at_length(encoding, TRAINED_ON), with_other_parameters("rope"))
    for t in range(2, 17):
        ntk = with_other_parameters("rope-ntk", factor=float(2 * t - 1))
        assert torch.allclose(at_length(encoding, TRAINED_ON * t), ntk, rtol=1e-13, atol=0)
    assert torch.equal(at_length(build_clex(down_std=0.1), TRAINED_ON), with_other_parameters("rope"))
    assert (
        max_difference(at_length(build_clex(down_std=0.1), 2 * TRAINED_ON), at_length(encoding, 2 * TRAINED_ON)) > 1e-3
    )
    fresh = encodings.build("clex", d_model=H * D, num_heads=H, head_dim=D, max_len=TRAINED_ON)
    assert not fresh.down.any()
    assert fresh.up.abs().max() <= 1 / math.sqrt(D)


def test_a_head_of_two_dimensions_has_one_frequency() -> None:
    assert torch.allclose(
        build_clex(head_dim=2).frequency_table(16), torch.ones(16, 1, dtype=torch.float64), rtol=1e-15, atol=0
    )


# ---- lengths --------------------------------------------------------------------------------------------------------


@given(length=st.integers(1, 1000), trained_on=st.integers(1, 100), max_factor=st.integers(1, 20))
def test_the_scale_is_the_length_in_trained_lengths_rounded_up(length: int, trained_on: int, max_factor: int) -> None:
    encoding = build_clex(max_position_embeddings=trained_on, max_factor=max_factor)
    t = min(math.ceil(length / trained_on), max_factor)
    assert torch.equal(at_length(encoding, length), encoding.frequency_table(max_factor)[t - 1])


def test_large_clex_frequencies_keep_exact_phases() -> None:
    """A map that nothing bounds may turn by thousands of radians a position; far positions still agree to rounding."""
    encoding = build_clex(down_std=0.4)
    exact = encoding.frequency_table(16)[-1].detach()
    assert float(exact.max()) > 1e4
    q, k = vectors(6, H, D)
    here, there = (
        attention_logits(q, k, encoding=encoding, q_positions=p, k_positions=p, scale=1.0, causal=False)
        for p in (torch.arange(6) + 10**4, torch.arange(6) + 10**6)
    )
    assert max_difference(here, there) <= 1e-8
    known = exact < 1e7  # of a larger one float64 holds no angle to 1e-9
    assert torch.allclose(at_length(encoding, 10**4).cos()[known], exact.cos()[known], rtol=0, atol=1e-8)


def test_the_kernel_is_that_of_the_longest_text() -> None:
    offsets = torch.arange(-5, 6)
    for encoding in (
        build_clex(down_std=0.1),
        build_clex(down_std=0.1, max_len=4 * TRAINED_ON, max_position_embeddings=TRAINED_ON),
    ):
        phases = at_length(encoding, encoding.max_len).unsqueeze(-1) * offsets
        assert max_difference(encoding.kernel(offsets)[0], torch.polar(torch.ones_like(phases), phases)) <= 1e-14


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 3, 20, TRAINED_ON])
def test_training_positions_simulate_an_integer_multiple_of_the_length(length: int) -> None:
    encoding = build_clex(max_factor=5).train()
    samples = torch.stack([encoding.to_positions(torch.arange(length)) for _ in range(400)])
    assert bool((samples[:, 0] == 0).all())
    assert bool((samples.diff(dim=-1) > 0).all())
    times, rest = (samples[:, -1] + 1).div(length, rounding_mode="floor"), (samples[:, -1] + 1) % length
    assert not rest.any()
    counts = times.bincount(minlength=6)[1:]
    assert counts.sum() == 400
    assert bool((counts > 40).all())  # 80 each; five standard deviations are 40
    if length > 10:  # numbers between are drawn evenly: their mean is the middle
        middle = samples[:, 1:-1].double().mean(-1) / samples[:, -1]
        assert float(middle.mean()) == pytest.approx(0.5, abs=0.02)
    if length == TRAINED_ON:
        for row, t in zip(samples[:10], times[:10].tolist(), strict=True):
            assert torch.equal(encoding.frequencies_at(row)[0], encoding.frequency_table(5)[t - 1])


def test_longer_training_sequences_end_at_multiples_of_the_trained_length() -> None:
    encoding = build_clex(max_factor=4).train()
    ends = {int(encoding.to_positions(torch.arange(50))[-1]) for _ in range(100)}
    assert ends == {49, 2 * TRAINED_ON - 1, 3 * TRAINED_ON - 1, 4 * TRAINED_ON - 1}


# ---- configurations --------------------------------------------------------------------------------------------------

TYPES = {"near": {"rope_theta": 100.0}, "far": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}}


# ---- by layer type --------------------------------------------------------------------------------------------------


def test_each_layer_rotates_by_its_type() -> None:
    encoding = build(layer_types=["near", "far", "near"], **TYPES)
    for layer, kind in enumerate(("near", "far", "near")):
        assert torch.equal(encoding.for_layer(layer).frequencies, build(**TYPES[kind]).frequencies)
    assert encoding.for_layer(0) is encoding.for_layer(2)
    with pytest.raises(
        InputError, match=r"^layer_types must have an entry for layer 3, counted from 0, got 3 entries\.$"
    ):
        encoding.for_layer(3)


def test_a_type_without_parameters_is_not_rotated() -> None:
    encoding = build(layer_types=["off", "near"], off=None, **TYPES)
    assert encoding.for_layer(0).coupling == "none"
    assert encoding.for_layer(1) is encoding
    assert encoding.layers == {1}


# ---- by axes, with a temperature ------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_sections_match_m_rope(interleaved: bool) -> None:
    sections, q_and_k = [4, 2, 2], vectors(9, H, D)
    encoding = build(type="mrope", mrope_section=sections, mrope_interleaved=interleaved, rope_theta=1e6)
    sizes = {"d_model": 2 * D, "num_heads": 2, "head_dim": D, "max_len": 64}
    mrope = encodings.build("mrope", sections=sections, interleaved_sections=interleaved, **sizes)
    scattered = torch.randint(0, 50, (9, 3))
    for places in (scattered, encoding.to_positions(torch.arange(9)), scattered.expand(2, 9, 3)):
        for ours, other in zip(*(x.rotate(*q_and_k, places, places) for x in (encoding, mrope)), strict=True):
            assert torch.equal(ours, other)
    assert torch.equal(encoding.kernel(scattered), mrope.kernel(scattered))


def test_ministral_queries_scale_with_log_position() -> None:
    config = Ministral3Config()
    encoding = build(head_dim=config.head_dim, max_len=config.max_position_embeddings, **config.rope_parameters)
    p = torch.tensor([0, 16383, 16384, 40000, 200_000])
    q, k = vectors(5, H, config.head_dim)
    plain = {name: value for name, value in config.rope_parameters.items() if name != "llama_4_scaling_beta"}
    before = build(head_dim=config.head_dim, max_len=config.max_position_embeddings, **plain).rotate(q, k, p, p)
    after = encoding.rotate(q, k, p, p)
    factor = ministral3.get_llama_4_attn_scale(p.unsqueeze(0), 0.1, 16384).double()
    assert torch.allclose(after[0], before[0] * factor, rtol=1e-6, atol=0)
    assert torch.equal(after[1], before[1])
    assert not encoding.toeplitz
    assert encoding.kernel(p) is None


@pytest.mark.heavy
@pytest.mark.parametrize(
    "options",
    [
        {"layer_types": ["near", "far"], **TYPES},
        {"mrope_section": [2, 1, 1]},
        {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 5, "rope_type": "yarn", "factor": 2.0},
    ],
    ids=["layer types", "sections", "temperature"],
)
def test_config_variants_conform(options: dict[str, Any]) -> None:
    conformance.check("scaled-rope", skip=["compile"], **options)


# ---- transformers' own configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        Gemma3TextConfig(),
        Gemma4TextConfig(),
        ModernBertConfig(),
        Olmo3Config(),
        Ministral3Config(),
        Qwen2VLTextConfig(rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}),
        Qwen3VLTextConfig(
            rope_parameters={"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
        ),
    ],
    ids=lambda config: type(config).__name__,
)
def test_a_config_passes_unchanged(config: PretrainedConfig) -> None:
    assert agrees_with(config)


# Vision models' `axial` has a meaning of each program's own; each of the others has a reason
REFUSED_CONFIG = {
    "DeepseekV4Config": "layer_types",  # its parameters are named by another list than its layer types
    "Lfm3Config": "layer_types",  # a type of layer that is no attention; conv=None lets it pass
    "EfficientLoFTRConfig": "partial_rotary_factor",  # over 1: it turns by two coordinates
    "Glm4MoeConfig": "partial_rotary_factor",  # its default sizes make 21 dimensions to be turned,
    "Glm4vMoeTextConfig": "partial_rotary_factor",
    "Qwen3OmniMoeTextConfig": "head_dim",  # and these, heads of 73
}


@pytest.mark.heavy
def test_every_default_config_of_transformers_passes_or_is_listed() -> None:
    passed, refused = 0, {}
    for name, config in configurations():
        try:
            assert agrees_with(config), name
            passed += 1
        except InputError as error:
            refused[name] = error.name
    axial = {name for name, field in refused.items() if field == "rope_type"}
    assert {name: field for name, field in refused.items() if name not in axial} == REFUSED_CONFIG
    assert passed >= 190
    assert all(
        get(config, "rope_parameters")["rope_type"] == "axial" for name, config in configurations() if name in axial
    )


def configurations() -> Iterator[tuple[str, PretrainedConfig]]:
    """All default configurations of transformers that have rope parameters."""
    (models,) = transformers.models.__path__
    for folder in pkgutil.iter_modules([models]):
        for path in sorted(Path(models, folder.name).glob("configuration_*.py")):
            if "rope_" not in path.read_text():
                continue
            module = importlib.import_module(f"transformers.models.{folder.name}.{path.stem}")
            for name, kind in vars(module).items():
                if inspect.isclass(kind) and issubclass(kind, PretrainedConfig) and kind.__module__ == module.__name__:
                    try:
                        config = kind()
                    except Exception:  # some have no default: transformers refuses them itself
                        continue
                    if get(config, "rope_parameters"):
                        yield name, config


def get(config: PretrainedConfig, *names: str) -> Any:
    """The first of these that the configuration has, and that is the same in all layers or asked of the first."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except Exception:  # transformers' own: it may differ by layer
            value = getattr(config.per_layer_config[0], name, None)
        if value:
            return value
    return None


def agrees_with(config: PretrainedConfig) -> bool:
    """Whether our frequencies are transformers', for each layer type of its own; raises what we refuse."""
    parameters, layer_types = config.rope_parameters, get(config, "layer_types")
    hidden, count = get(config, "hidden_size", "embed_dim") or 512, get(config, "num_attention_heads", "num_heads") or 8
    head_dim = get(config, "qk_rope_head_dim", "head_dim") or hidden // count
    longest = int(get(config, "max_position_embeddings") or 2048)
    encoding = build(head_dim=head_dim, max_len=longest, layer_types=layer_types, **parameters)
    if "rope_type" in parameters:
        return assert_matches_transformers(encoding, parameters, head_dim, longest)
    types = {kind: layer_types.index(kind) for kind in set(layer_types) if parameters[kind]}
    return all(
        assert_matches_transformers(encoding.for_layer(n), parameters[kind], head_dim, longest)
        for kind, n in types.items()
    )


def assert_matches_transformers(ours: Any, parameters: dict[str, Any], head_dim: int, longest: int) -> bool:
    """Against the rule of transformers for this type, on a Llama of the same head."""
    share = parameters.get("partial_rotary_factor", 1.0)
    kind = parameters["rope_type"]
    if kind == "default":
        dim = int(head_dim * share)
        theirs = parameters["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        return torch.allclose(ours.frequencies[0].float(), theirs, rtol=1e-5, atol=0) and ours.magnitude == 1
    llama = LlamaConfig(hidden_size=head_dim * 2, num_attention_heads=2, head_dim=head_dim)
    llama.rope_parameters, llama.max_position_embeddings = {"rope_theta": 10000.0, **parameters}, longest
    theirs, magnitude = ROPE_INIT_FUNCTIONS[kind](llama, "cpu")
    return torch.allclose(ours.frequencies[0].float(), theirs, rtol=1e-5, atol=0) and ours.magnitude == magnitude


LISTS_CONFIG = {"short_factor": [1.1] * 8, "long_factor": [1.5**t for t in range(8)]}
YARN_CONFIG = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
PUBLISHED_PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {  # and the parameters that transformers does not read
    "DeepSeek-R1-0528-Qwen3-8B": (
        {"rope_type": "yarn", **YARN_CONFIG, "attn_factor": 0.8782488562869419},
        "attn_factor",
    ),
    "Yarn-Llama-2": ({"type": "yarn", **YARN_CONFIG, "finetuned": True}, "finetuned"),
    "Phi-3-mini, by its first name": ({"type": "su", "original_max_position_embeddings": 32, **LISTS_CONFIG}, ""),
    "Kimi K2, with zeros and nulls": (
        {"type": "yarn", **YARN_CONFIG, "beta_fast": 0, "beta_slow": None, "mscale": 0, "attention_factor": None},
        "",
    ),
    "a factor that follows": ({"rope_type": "yarn", **YARN_CONFIG, "factor": None}, ""),
    "no original length": ({"rope_type": "yarn", "factor": 4.0}, ""),
    "what other types take": ({"type": "linear", "factor": 2.0, "beta_fast": 32, "mscale": 1.0}, "beta_fast, mscale"),
    "two types": ({"rope_type": "linear", "type": "dynamic", "factor": 2.0}, "type"),
    "one list for both": ({"rope_type": "default", "factor": 2.0, "attention_factor": 1.5}, "factor, attention_factor"),
    **{f"case {n}": (case, "") for n, case in enumerate(CASES) if case["rope_type"] in ROPE_INIT_FUNCTIONS},
}


@pytest.mark.parametrize("name", list(PUBLISHED_PARAMETERS))
def test_published_parameters_match_transformers(name: str) -> None:
    parameters, ignored = PUBLISHED_PARAMETERS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = build(max_len=128, **parameters)
    messages = [str(each.message) for each in caught]
    assert len(messages) == bool(ignored)
    assert all(f": {ignored} " in sentence for sentence in messages)
    llama = LlamaConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=128)
    options = {"rope_theta": 1e4, **parameters}
    llama.rope_parameters = options | ({"rope_type": "longrope"} if options.get("type") == "su" else {})
    llama.standardize_rope_params()
    kind = llama.rope_parameters["rope_type"]
    for length in (8, 100, 300):
        if kind == "default":
            theirs, magnitude = 1e4 ** -(torch.arange(0, 16, 2) / 16), 1.0
        else:
            theirs, magnitude = ROPE_INIT_FUNCTIONS[kind](llama, "cpu", seq_len=length)
        assert torch.allclose(ours.frequencies_at(torch.arange(length))[0].float(), theirs, rtol=1e-5, atol=0)
        assert ours.magnitude == pytest.approx(magnitude, rel=1e-12)


@pytest.mark.parametrize(("length", "factor"), [(20, 1.1), (100, 1.3)])
def test_phi_3_5_factors_depend_on_the_length(length: int, factor: float) -> None:
    """Transformers' own program has short_factor's frequencies at all lengths; in its shared rule they change."""
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **LISTS_CONFIG}
    parameters |= {"short_mscale": 1.1, "long_mscale": 1.3}
    ours = build(max_len=128, **parameters)
    config = PhimoeConfig(
        hidden_size=32, num_attention_heads=2, max_position_embeddings=128, rope_parameters=parameters
    )
    x, places = torch.randn(1, 2, length, 16), torch.arange(length)
    cos, sin = PhimoeRotaryEmbedding(config)(x, places[None])
    if length > 32:
        divisors = torch.tensor(LISTS_CONFIG["long_factor"])
        phases = places[:, None] * (1e4 ** -(torch.arange(8) / 8) / divisors)
        size = cos.square().add(sin.square()).sqrt()
        cos, sin = (torch.cat((y, y), -1)[None] * size for y in (phases.cos(), phases.sin()))
    a, b = x.chunk(2, -1)
    for turned in ours.rotate(x, x, places, places):
        assert torch.allclose(turned, x * cos + torch.cat((-b, a), -1) * sin, atol=5e-5)
        assert torch.allclose(turned.norm(dim=-1), factor * x.norm(dim=-1))


def test_hunyuans_alpha_is_a_larger_base() -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0}
    config = HunYuanMoEV1Config(hidden_size=32, num_attention_heads=2, head_dim=16, rope_parameters=parameters)
    theirs = HunYuanMoEV1RotaryEmbedding(config).inv_freq
    assert torch.allclose(build(max_len=2048, **parameters).frequencies[0].float(), theirs, rtol=1e-5, atol=0)


# ---- refusals -------------------------------------------------------------------------------------------------------

LAYER_TYPES = {"layer_types": ["near", "far"]}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("scaled-rope", {"rope_type": "stretched"}, "rope_type must be one of default, "),
    (
        "rope-linear",
        {"rope_type": "linear", "type": "yarn"},
        "type must be the same as rope_type, 'linear', got 'yarn'",
    ),
    ("scaled-rope", {**LONG, "long_factor": None}, "long_factor must be set for rope type 'longrope'"),
    ("scaled-rope", {**LONG, "short_factor": [1.0]}, "short_factor must be 8 positive numbers"),
    ("scaled-rope", {**LONG, "original_max_position_embeddings": 1}, "original_max_position_embeddings must be"),
    ("scaled-rope", {**YARN, "beta_fast": 0.5}, "beta_fast must be"),
    ("scaled-rope", {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be"),
    ("rope-llama3", {"high_freq_factor": 1.0}, "high_freq_factor must be"),
    ("rope-yarn", {"rope_type": "linear"}, "rope_type must be 'yarn' for this encoding, got 'linear'"),
    ("scaled-rope", TYPES, "layer_types must be set with parameters by layer type ('near')."),
    (
        "scaled-rope",
        {**LAYER_TYPES, "rope_theta": 5.0, **TYPES},
        "rope_theta must not be set with parameters by layer type",
    ),
    ("scaled-rope", {"layer_types": ["off"], "off": None}, "layer_types: no layer type has parameters"),
    ("scaled-rope", {"layer_types": 5}, "layer_types must be a list of strings or None, got 5"),
    ("rope", {"layer_types": 5}, "option of encoding 'rope' must be one of base, pairing, got 'layer_types'"),
    (
        "scaled-rope",
        {**LAYER_TYPES, "near": {"mrope_section": [4, 2, 2]}, "far": {}},
        "mrope_section must be set for all layer types or for none",
    ),
    (
        "scaled-rope",
        {"mrope_section": [4, 2]},
        "mrope_section must be the numbers of pairs for time, height and width, 8 ",
    ),
    ("scaled-rope", {"llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta needs original_max_position_embeddings"),
    ("scaled-rope", {**LONG, "short_mscale": 1.2}, "short_mscale and long_mscale must be set together"),
]


@pytest.mark.parametrize(("name", "options", "sentence"), REFUSED)
def test_invalid_options_are_refused_in_one_sentence(name: str, options: dict, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        build(name, **options)
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
