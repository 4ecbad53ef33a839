"""The same numbers as public implementations: transformers, x-transformers, rotary-embedding-torch.

Where a public implementation forms its phases in float32, its own error at position i is i times 2^-24 of each factor
and product, so agreement is asked to 2e-5 at positions under 128; where it can be given float64 tables, to 1e-12.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from tests.encodings.samples import assert_close, vectors
from tests.encodings.samples import build as samples_build
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GPTNeoXConfig,
    LlamaConfig,
    T5Config,
)
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.fsmt.modeling_fsmt import SinusoidalPositionalEmbedding as FSMTSinusoidal
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.roformer.modeling_roformer import RoFormerSinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.xlm.modeling_xlm import create_sinusoidal_embeddings
from x_transformers import x_transformers

from toeplens.model import DecoderConfig, LatentAttention

B, H, D, N = 2, 4, 16, 128
POSITIONS = torch.arange(N)

build = partial(samples_build, d_model=H * D, num_heads=H, head_dim=D, max_len=512)


def angles(rotary_dim: int = D, base: float = 10000.0) -> np.ndarray:
    """i base^(-2t/d), written once more without torch."""
    return np.outer(np.arange(N), base ** -(np.arange(0, rotary_dim, 2) / rotary_dim))


# ---- rotary ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [D, D // 4])
def test_half_layout_rope_matches_llama_and_partial_rope_gpt_neox(width: int) -> None:
    """In float32 with their tables; in float64 with tables of our own."""
    sizes = {"hidden_size": H * D, "num_attention_heads": H}
    q, k = vectors(N, H, D, torch.float32)
    if width == D:
        ours, apply = build("rope", pairing="half"), llama.apply_rotary_pos_emb
        cos, sin = llama.LlamaRotaryEmbedding(LlamaConfig(**sizes))(q, POSITIONS.unsqueeze(0))
    else:
        ours, apply = build("partial-rope", rotary_pct=0.25, pairing="half"), gpt_neox.apply_rotary_pos_emb
        config = GPTNeoXConfig(**sizes, rotary_pct=0.25)
        cos, sin = gpt_neox.GPTNeoXRotaryEmbedding(config)(q, POSITIONS.unsqueeze(0))
    assert cos.shape[-1] == width
    for a, b in zip(ours.rotate(q, k, POSITIONS, POSITIONS), apply(q, k, cos, sin), strict=True):
        assert_close(a, b, 2e-5)
    q, k = vectors(N, H, D)
    table = torch.from_numpy(np.concatenate([angles(width), angles(width)], axis=-1)).unsqueeze(0)
    for a, b in zip(ours.rotate(q, k, POSITIONS, POSITIONS), apply(q, k, table.cos(), table.sin()), strict=True):
        assert_close(a, b, 1e-12)


def test_interleaved_rope_matches_gpt_j() -> None:
    ours = build("rope")
    q, k = vectors(N, H, D, torch.float32)
    sin, cos = gptj.create_sinusoidal_positions(N, D).unsqueeze(0).chunk(2, dim=-1)
    for a, x in zip(ours.rotate(q, k, POSITIONS, POSITIONS), (q, k), strict=True):
        assert_close(a, gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2), 2e-5)
    q, k = vectors(N, H, D)
    table = torch.from_numpy(angles()).unsqueeze(0)
    for a, x in zip(ours.rotate(q, k, POSITIONS, POSITIONS), (q, k), strict=True):
        assert_close(a, gptj.apply_rotary_pos_emb(x.transpose(1, 2), table.sin(), table.cos()).transpose(1, 2), 1e-12)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_interleaved_rope_matches_rotary_embedding_torch(base: float) -> None:
    ours, theirs = build("rope", base=base), RotaryEmbedding(D, theta=base)
    q, k = vectors(N, H, D, torch.float32)
    for a, x in zip(ours.rotate(q, k, POSITIONS, POSITIONS), (q, k), strict=True):
        assert_close(a, theirs.rotate_queries_or_keys(x), 2e-5)
    later = ours.rotate(q, k, POSITIONS + 300, POSITIONS)[0]
    assert_close(later, theirs.rotate_queries_or_keys(q, offset=300), 1e-4)


# ---- biases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_heads", [4, 6, 8, 12, 16])
def test_alibi_matches_bloom_and_mpt(num_heads: int) -> None:
    """They add m_h j, which a softmax over keys cannot tell from -m_h (i - j): its value at j less that at i."""
    at_key = build_alibi_tensor(torch.ones(1, N), num_heads, torch.float32).double()
    ours = build("alibi", num_heads=num_heads, head_dim=4).bias(POSITIONS, POSITIONS)
    causal = torch.ones(N, N).tril()
    for theirs in (at_key, build_mpt_alibi_tensor(num_heads, N).double()):
        assert_close(ours.double() * causal, (theirs - theirs.transpose(-2, -1)) * causal, 2e-5)
    assert_close(build("alibi", num_heads=num_heads, head_dim=4).slopes, at_key[:, 0, 1], 1e-7)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 64), (8, 300)])
def test_t5_buckets_match_t5(bidirectional: bool, num_buckets: int, max_distance: int) -> None:
    """Our offset is query minus key, T5's relative position key minus query."""
    offsets = torch.arange(-300, 301)
    ours = build("t5", bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance)
    theirs = T5Attention._relative_position_bucket(-offsets, bidirectional, num_buckets, max_distance)
    assert torch.equal(ours.buckets(offsets), theirs)
    also = x_transformers.RelativePositionBias._relative_position_bucket(
        -offsets, causal=not bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )
    assert torch.equal(ours.buckets(offsets), also)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_t5_bias_matches_t5(bidirectional: bool) -> None:
    ours = build("t5", bidirectional=bidirectional)
    config = T5Config(d_model=H * D, d_kv=D, num_heads=H, is_decoder=not bidirectional)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    also = x_transformers.RelativePositionBias(scale=1.0, causal=not bidirectional, heads=H)
    with torch.no_grad():
        theirs.relative_attention_bias.weight.copy_(ours.weight)
        also.relative_attention_bias.weight.copy_(ours.weight)
    bias = ours.bias(POSITIONS, POSITIONS)
    assert_close(bias, theirs.compute_bias(N, N)[0], 0.0)
    assert_close(bias, also(N, N), 0.0)
    assert_close(bias[:, -3:], theirs.compute_bias(3, N, past_seen_tokens=N - 3)[0], 0.0)


# ---- sinusoids ------------------------------------------------------------------------------------------------------


def table(layout: str, base: float = 10000.0) -> Tensor:
    return build("sinusoidal", layout=layout, base=base).table(POSITIONS).float()


@pytest.mark.parametrize("public", [MarianSinusoidalPositionalEmbedding, RoFormerSinusoidalPositionalEmbedding])
def test_the_half_layout_sinusoid_matches_marian_and_roformer(public: type) -> None:
    assert_close(table("halves"), public(N, H * D).create_weight(), 1e-7)


def test_the_interleaved_sinusoid_matches_xlm() -> None:
    assert_close(table("interleaved"), create_sinusoidal_embeddings(N, H * D, torch.empty(N, H * D)), 1e-7)


def test_tensor2tensor_sinusoid_has_our_layout_and_other_frequencies() -> None:
    """Its frequencies are 10000^(-t/(d/2 - 1)) where the paper's are 10000^(-2t/d): the paper's with another base."""
    theirs = FSMTSinusoidal.get_embedding(N, H * D, None)
    half = H * D // 2
    assert_close(table("halves", base=10000 ** (half / (half - 1))), theirs, 2e-5)
    assert float((table("halves") - theirs).abs().max()) > 0.1


# ---- multi-head latent attention ------------------------------------------------------------------------------------

CONTENT, ROTARY, LATENT, WIDTH = 8, 4, 16, H * 8


def copy_weights(ours: LatentAttention, theirs: torch.nn.Module) -> None:
    """DeepSeek keeps a head's content and rotary query side by side, its key beside its value, and W_DKV above W_KR."""
    with torch.no_grad():
        if isinstance(ours.down_q, torch.nn.Linear):
            theirs.q_a_proj.weight.copy_(ours.down_q.weight)
            theirs.q_a_layernorm.weight.copy_(ours.norm_q.weight)
        up = (ours.up_q.weight.unflatten(0, (H, CONTENT)), ours.rotary_q.weight.unflatten(0, (H, ROTARY)))
        queries = theirs.q_proj if isinstance(ours.down_q, torch.nn.Identity) else theirs.q_b_proj
        queries.weight.copy_(torch.cat(up, dim=1).flatten(0, 1))
        theirs.kv_a_proj_with_mqa.weight.copy_(torch.cat((ours.down_kv.weight, ours.rotary_k.weight)))
        theirs.kv_a_layernorm.weight.copy_(ours.norm_kv.weight)
        keys, values = (part.unflatten(0, (H, CONTENT)) for part in ours.up_kv.weight.chunk(2))
        theirs.kv_b_proj.weight.copy_(torch.cat((keys, values), dim=1).flatten(0, 1))
        theirs.o_proj.weight.copy_(ours.out.weight)


def our_latent_attention(pairing: str, **more: Any) -> LatentAttention:
    torch.manual_seed(0)
    options = {"rotary_dim": ROTARY, "d_compress": LATENT, "pairing": pairing, **more}
    config = DecoderConfig(d_model=WIDTH, num_heads=H, encoding="mla", encoding_options=options)
    ours = LatentAttention(config, config.build_encoding())
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.5)
        for norm in (ours.norm_q, ours.norm_kv):
            if isinstance(norm, torch.nn.RMSNorm):
                norm.weight.add_(1.0)
                norm.eps = 1e-6  # DeepSeek's; torch's own default is 2^-23
    return ours.eval()


def deepseek_sizes(attention: str, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "num_attention_heads": H,
        "num_key_value_heads": H,
        "q_lora_rank": LATENT,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": CONTENT,
        "qk_rope_head_dim": ROTARY,
        "v_head_dim": CONTENT,
        "attn_implementation": attention,
        **more,
    }


def assert_outputs_agree(ours: LatentAttention, theirs: torch.nn.Module, x: Tensor, tables: Any, limit: float) -> None:
    """Relative to the largest output."""
    mask = torch.full((12, 12), float("-inf"), dtype=x.dtype).triu(1)[None, None]
    out, _ = theirs(x, attention_mask=mask, position_embeddings=tables)
    z = ours.head_outputs(x, x, q_positions=POSITIONS[:12], k_positions=POSITIONS[:12])
    scale = float(out.detach().abs().max())
    assert_close(ours.merge(z) / scale, out / scale, limit)


V2 = DeepseekV2Config, deepseek_v2.DeepseekV2Attention, deepseek_v2.DeepseekV2RotaryEmbedding
V3 = DeepseekV3Config, deepseek_v3.DeepseekV3Attention, deepseek_v3.DeepseekV3RotaryEmbedding


@pytest.mark.parametrize(
    ("version", "interleaved", "q_compress"),
    [(V3, True, LATENT), (V3, False, LATENT), (V2, True, LATENT), (V2, True, 24), (V2, True, None)],
)
def test_mla_matches_deepseek(version: tuple[Any, Any, Any], interleaved: bool, q_compress: int | None) -> None:
    """With latent queries of the keys' size, of a size of their own (V2), and with none (V2-Lite)."""
    make_config, attention, rotary = version
    ours = our_latent_attention("interleaved" if interleaved else "half", q_compress=q_compress)
    config = make_config(**deepseek_sizes("eager", q_lora_rank=q_compress, rope_interleave=interleaved))
    theirs = attention(config, layer_idx=0)
    copy_weights(ours, theirs)
    x = torch.randn(B, 12, WIDTH)
    assert_outputs_agree(ours, theirs, x, rotary(config)(x, POSITIONS[None, :12]), 2e-6)


def test_mla_matches_deepseek_v3_in_float64() -> None:
    """The reference forms RMSNorm's factor and the tables in float32; with its latents already of norm one, and float64
    tables, what is left is the attention itself."""
    ours = our_latent_attention("interleaved").double()
    theirs = deepseek_v3.DeepseekV3Attention(DeepseekV3Config(**deepseek_sizes("sdpa")), layer_idx=0).double()
    copy_weights(ours, theirs)
    for norm in ("norm_q", "norm_kv"):
        setattr(ours, norm, torch.nn.Identity())
    theirs.q_a_layernorm = theirs.kv_a_layernorm = torch.nn.Identity()
    phases = torch.from_numpy(np.tile(angles(ROTARY)[:12], 2)).unsqueeze(0)
    x = torch.randn(B, 12, WIDTH, dtype=torch.float64)
    assert_outputs_agree(ours, theirs, x, (phases.cos(), phases.sin()), 1e-12)
