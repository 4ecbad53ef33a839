"""RoPE as a model's configuration has it: by layer type, by axes, with a temperature; all that transformers has."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    Gemma3TextConfig,
    Gemma4TextConfig,
    HunYuanMoEV1Config,
    LlamaConfig,
    Ministral3Config,
    ModernBertConfig,
    Olmo3Config,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2VLTextConfig,
    Qwen3VLTextConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1RotaryEmbedding
from transformers.models.ministral3 import modeling_ministral3 as ministral3
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from toeplens import encodings
from toeplens.encodings import Rotary, conformance
from toeplens.ground import InputError

D = 16
TYPES = {"near": {"rope_theta": 100.0}, "far": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}}


def build(head_dim: int = D, max_len: int = 64, **options: Any) -> Rotary:
    sizes = {"d_model": 2 * head_dim, "num_heads": 2, "head_dim": head_dim, "max_len": max_len}
    made = encodings.build("scaled-rope", **sizes, **options)
    assert isinstance(made, Rotary)
    return made


def heads(length: int, head_dim: int = D) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 2, 2, length, head_dim, dtype=torch.float64).unbind(0)


# ---- by layer type --------------------------------------------------------------------------------------------------


def test_each_layer_turns_as_its_type_does() -> None:
    encoding = build(layer_types=["near", "far", "near"], **TYPES)
    for layer, kind in enumerate(("near", "far", "near")):
        assert torch.equal(encoding.for_layer(layer).frequencies, build(**TYPES[kind]).frequencies)
    assert encoding.for_layer(0) is encoding.for_layer(2)
    with pytest.raises(
        InputError, match=r"^layer_types must have an entry for layer 3, counted from 0, got 3 entries\.$"
    ):
        encoding.for_layer(3)


def test_a_type_without_parameters_is_not_turned() -> None:
    encoding = build(layer_types=["off", "near"], off=None, **TYPES)
    assert encoding.for_layer(0).coupling == "none"
    assert encoding.for_layer(1) is encoding
    assert encoding.layers == {1}


def test_gemma_3s_layers_turn_as_transformers_turns_them() -> None:
    config = Gemma3TextConfig()
    encoding = build(config.head_dim, 1000, layer_types=config.layer_types, **config.rope_parameters)
    theirs, p = gemma3.Gemma3RotaryEmbedding(config), torch.arange(50)
    q, k = (x.float() for x in heads(50, config.head_dim))
    for layer in (0, config.layer_types.index("full_attention")):
        cos, sin = theirs(q, p.unsqueeze(0), config.layer_types[layer])
        wanted = gemma3.apply_rotary_pos_emb(q, k, cos, sin)
        for ours, other in zip(encoding.for_layer(layer).rotate(q, k, p, p), wanted, strict=True):
            assert torch.allclose(ours, other, atol=3e-5)


# ---- by axes, with a temperature ------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_sections_are_those_of_mrope(interleaved: bool) -> None:
    sections, q_and_k = [4, 2, 2], heads(9)
    encoding = build(type="mrope", mrope_section=sections, mrope_interleaved=interleaved, rope_theta=1e6)
    sizes = {"d_model": 2 * D, "num_heads": 2, "head_dim": D, "max_len": 64}
    mrope = encodings.build("mrope", sections=sections, interleaved_sections=interleaved, **sizes)
    scattered = torch.randint(0, 50, (9, 3))
    for places in (scattered, encoding.place(torch.arange(9)), scattered.expand(2, 9, 3)):
        for ours, other in zip(*(x.rotate(*q_and_k, places, places) for x in (encoding, mrope)), strict=True):
            assert torch.equal(ours, other)
    assert torch.equal(encoding.kernel(scattered), mrope.kernel(scattered))


def test_ministrals_queries_grow_by_the_logarithm_of_their_place() -> None:
    config = Ministral3Config()
    encoding = build(config.head_dim, config.max_position_embeddings, **config.rope_parameters)
    p = torch.tensor([0, 16383, 16384, 40000, 200_000])
    q, k = heads(5, config.head_dim)
    plain = {name: value for name, value in config.rope_parameters.items() if name != "llama_4_scaling_beta"}
    before = build(config.head_dim, config.max_position_embeddings, **plain).rotate(q, k, p, p)
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
def test_what_a_configuration_may_have_conforms(options: dict[str, Any]) -> None:
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
def test_a_configuration_passes_as_it_is(config: PretrainedConfig) -> None:
    assert agrees_with(config)


# Vision models' `axial` has a meaning of each program's own; each of the others has a reason
REFUSED = {
    "DeepseekV4Config": "layer_types",  # its parameters are named by another list than its layer types
    "Lfm3Config": "layer_types",  # a type of layer that is no attention; conv=None lets it pass
    "EfficientLoFTRConfig": "partial_rotary_factor",  # over 1: it turns by two coordinates
    "Glm4MoeConfig": "partial_rotary_factor",  # its default sizes make 21 dimensions to be turned,
    "Glm4vMoeTextConfig": "partial_rotary_factor",
    "Qwen3OmniMoeTextConfig": "head_dim",  # and these, heads of 73
}


@pytest.mark.heavy
def test_every_default_configuration_of_transformers_passes_or_is_listed() -> None:
    passed, refused = 0, {}
    for name, config in configurations():
        try:
            assert agrees_with(config), name
            passed += 1
        except InputError as error:
            refused[name] = error.name
    axial = {name for name, field in refused.items() if field == "rope_type"}
    assert {name: field for name, field in refused.items() if name not in axial} == REFUSED
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
    encoding = build(head_dim, longest, layer_types=layer_types, **parameters)
    if "rope_type" in parameters:
        return same(encoding, parameters, head_dim, longest)
    types = {kind: layer_types.index(kind) for kind in set(layer_types) if parameters[kind]}
    return all(same(encoding.for_layer(n), parameters[kind], head_dim, longest) for kind, n in types.items())


def same(ours: Any, parameters: dict[str, Any], head_dim: int, longest: int) -> bool:
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


LISTS = {"short_factor": [1.1] * 8, "long_factor": [1.5**t for t in range(8)]}
YARN = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
SHIPPED: dict[str, tuple[dict[str, Any], str]] = {  # and the parameters that transformers does not read
    "DeepSeek-R1-0528-Qwen3-8B": ({"rope_type": "yarn", **YARN, "attn_factor": 0.8782488562869419}, "attn_factor"),
    "Yarn-Llama-2": ({"type": "yarn", **YARN, "finetuned": True}, "finetuned"),
    "Phi-3-mini, by its first name": ({"type": "su", "original_max_position_embeddings": 32, **LISTS}, ""),
    "Kimi K2, with zeros and nulls": (
        {"type": "yarn", **YARN, "beta_fast": 0, "beta_slow": None, "mscale": 0, "attention_factor": None},
        "",
    ),
    "a factor that follows": ({"rope_type": "yarn", **YARN, "factor": None}, ""),
    "no original length": ({"rope_type": "yarn", "factor": 4.0}, ""),
    "what other types take": ({"type": "linear", "factor": 2.0, "beta_fast": 32, "mscale": 1.0}, "beta_fast, mscale"),
    "two types": ({"rope_type": "linear", "type": "dynamic", "factor": 2.0}, "type"),
    "one list for both": ({"rope_type": "default", "factor": 2.0, "attention_factor": 1.5}, "factor, attention_factor"),
}


@pytest.mark.parametrize("name", list(SHIPPED))
def test_parameters_are_taken_as_shipped_and_read_as_transformers_reads_them(name: str) -> None:
    parameters, ignored = SHIPPED[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = build(16, 128, **parameters)
    said = [str(each.message) for each in caught]
    assert len(said) == bool(ignored)
    assert all(f": {ignored} " in sentence for sentence in said)
    llama = LlamaConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=128)
    given = {"rope_theta": 1e4, **parameters}
    llama.rope_parameters = given | ({"rope_type": "longrope"} if given.get("type") == "su" else {})
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
def test_phi_3_5s_factors_go_by_the_length(length: int, factor: float) -> None:
    """Transformers' own program has short_factor's frequencies at all lengths; in its shared rule they change."""
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **LISTS}
    parameters |= {"short_mscale": 1.1, "long_mscale": 1.3}
    ours = build(16, 128, **parameters)
    config = PhimoeConfig(
        hidden_size=32, num_attention_heads=2, max_position_embeddings=128, rope_parameters=parameters
    )
    x, places = torch.randn(1, 2, length, 16), torch.arange(length)
    cos, sin = PhimoeRotaryEmbedding(config)(x, places[None])
    if length > 32:
        divisors = torch.tensor(LISTS["long_factor"])
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
    assert torch.allclose(build(16, 2048, **parameters).frequencies[0].float(), theirs, rtol=1e-5, atol=0)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({**TYPES}, "layer_types must be set with parameters by layer type ('near')."),
        (
            {"layer_types": ["near", "far"], "rope_theta": 5.0, **TYPES},
            "rope_theta must not be set with parameters by layer type",
        ),
        ({"layer_types": ["off"], "off": None}, "layer_types: no layer type has parameters"),
        (
            {"layer_types": ["near", "far"], "near": {"mrope_section": [4, 2, 2]}, "far": {}},
            "mrope_section must be set for all layer types or for none",
        ),
        (
            {"mrope_section": [4, 2]},
            "mrope_section must be the numbers of pairs for time, height and width, 8 in total",
        ),
        (
            {"llama_4_scaling_beta": 0.1},
            "llama_4_scaling_beta needs original_max_position_embeddings",
        ),
        ({"rope_type": "longrope", **LISTS, "short_mscale": 1.2}, "short_mscale and long_mscale must be set together"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        build(**options)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
