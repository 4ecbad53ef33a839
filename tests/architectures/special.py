"""Sizes of a small model: those of every configuration, and what some model types need of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _scaled(kind: str, **more: Any) -> dict[str, Any]:
    """Parameters of a rotary encoding."""
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


def _axes(*sections: int) -> dict[str, Any]:
    """Parameters of a rotary encoding whose pairs are shared out among axes."""
    return _scaled("default", mrope_section=list(sections))


def _byte_latent() -> dict[str, Any]:
    """Sizes of a model of bytes in patches: those of its parts go together, and its tables of hashes are short."""
    local = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    local |= {name: SMALL[name] for name in ("intermediate_size", "max_position_embeddings")}
    across = {"hidden_size_global": 2 * SMALL["hidden_size"]}
    return {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3, 4],
        "local_attention_window_len": SMALL["sliding_window"],
        "patcher_config": local,
        "encoder_config": local | across,
        "decoder_config": local | across,
        "global_config": local | {"hidden_size": across["hidden_size_global"]},
    }


def _boxes(tokens: Tensor) -> dict[str, Tensor]:
    """The corners of a box on a page for each token, by its id: [B, N, 4] of left, top, right and bottom."""
    left, top = (tokens % 8) / 10, (tokens // 8 % 8) / 10
    return {"bbox": torch.stack((left, top, left + 0.1, top + 0.1), dim=-1)}


_DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}
# what fields of configurations are called, whatever the type; a configuration takes those that it has
_SIZES = (
    (96, "vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input"),
    (64, "hidden_size d_model n_embd dim emb_dim embedding_size word_embed_proj_dim"),
    (2, "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers"),
    (2, "num_encoder_layers num_decoder_layers"),
    (4, "num_attention_heads num_heads n_head n_heads attention_heads encoder_attention_heads decoder_attention_heads"),
    (4, "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads"),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads"),
    (16, "head_dim d_kv d_head swa_head_dim v_head_dim global_head_dim dim_head kv_channels attention_head_size"),
    (
        80,
        "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff dff d_inner hidden_dim ffn_hidden_size dim_ff",
    ),
    (80, "n_inner intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size feed_forward_size"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size"),
    (32, "moe_shared_expert_intermediate_size shared_experts_intermediate_size expert_intermediate_size"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num"),
    (2, "num_experts_per_tok top_k_experts moe_topk moe_k n_group"),
    (1, "topk_group n_shared_experts first_k_dense_replace"),
    (24, "q_lora_rank o_lora_rank"),
    (16, "kv_lora_rank qk_nope_head_dim index_head_dim indexer_head_dim"),
    (8, "qk_rope_head_dim rotary_dim"),
    (2, "index_n_heads indexer_n_heads indexer_kv_heads"),
    (6, "index_topk"),
    (64, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions"),
    (64, "max_encoder_position_embeddings max_decoder_position_embeddings"),
    (8, "sliding_window window_size local_attention sliding_window_size attention_window_size attention_window"),
    (8, "attention_chunk_size linear_key_head_dim linear_value_head_dim linear_head_dim"),
    (2, "linear_num_key_heads linear_num_heads"),
    (4, "linear_num_value_heads"),
    (8, "mamba_d_state state_size ssm_state_size mamba_head_dim mamba_d_head mamba_chunk_size chunk_size"),
    (8, "hidden_size_per_layer_input"),
)
_TOKENS = {"pad": 0, "bos": 1, "decoder_start": 1, "eos": 2, "sep": 3, "cls": 4, "mask": 5}
SMALL: dict[str, Any] = {name: size for size, names in _SIZES for name in names.split()}
SMALL |= {f"{name}_token_id": token for name, token in _TOKENS.items()}
# fields that have an entry a layer
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "no_rope_layers", "indexer_types")
LAYER_TYPES = ("full_attention", "sliding_attention")
SIZES_BY_TYPE: dict[str, dict[str, Any]] = {
    "blt": _byte_latent(),
    "bamba": {"mamba_n_heads": 16, "attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(LAYER_TYPES, _scaled("default"))},
    "cosmos3_edge_text": {"rope_parameters": _axes(2, 3, 3)},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deberta": _DISENTANGLED,
    "deberta-v2": _DISENTANGLED,
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm4v_moe_text": {"rope_parameters": _axes(1, 1, 2) | {"partial_rotary_factor": 0.5}},
    "glm4v_text": {"rope_parameters": _axes(2, 3, 3)},
    "glm5_next_text": {"index_kpool": 2, "qk_rope_head_dim": 0},
    "glm_image_text": {"rope_parameters": _axes(2, 3, 3)},
    "glm_ocr_text": {"rope_parameters": _axes(2, 3, 3)},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 16, "layer_types": ["mamba", "attention"]},
    "hunyuan_vl_text": {"rope_parameters": _axes(2, 2, 2, 2)},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 96},
    "longcat_flash": {"head_dim": 8},
    "luke": {"entity_vocab_size": 32, "entity_emb_size": 32},
    "mamba2": {"num_heads": 8},
    "perceiver": {
        "num_latents": 16,
        "d_latents": 64,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
        "qk_channels": 64,
        "v_channels": 64,
    },
    "qwen2_5_vl_text": {"rope_parameters": _axes(2, 3, 3)},
    "qwen2_vl_text": {"rope_parameters": _axes(2, 3, 3)},
    "qwen4_exp_text": {"indexer_budget": 8, "indexer_compress_ratio": 2, "indexer_kv_heads": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "axial_pos_shape": (8, 8),
        "axial_pos_embds_dim": (16, 48),
        "attn_layers": ("local", "lsh"),
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 1,
    },
    "sam3_lite_text_text_model": {"num_hidden_layers": 4},
    "vits": {
        "upsample_initial_channel": 16,
        "upsample_rates": (2, 2),
        "upsample_kernel_sizes": (4, 4),
        "resblock_kernel_sizes": (3,),
        "resblock_dilation_sizes": ((1,),),
        "flow_size": 16,
        "spectrogram_bins": 17,
        "duration_predictor_filter_channels": 16,
        "prior_encoder_num_flows": 1,
        "prior_encoder_num_wavenet_layers": 1,
        "posterior_encoder_num_wavenet_layers": 1,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
}
EXTRA_INPUTS: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "bros": _boxes
}  # what goes with tokens, or nothing runs
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # of a type whose position is not told by its default alone
    "esm+rotary": ("esm", {"position_embedding_type": "rotary"}),
    "falcon+alibi": ("falcon", {"alibi": True}),
    "llama+dynamic": ("llama", {"rope_parameters": _scaled("dynamic", factor=4.0)}),
    "llama+linear": ("llama", {"rope_parameters": _scaled("linear", factor=4.0)}),
    "llama+llama3": ("llama", {"rope_parameters": _scaled("llama3", **_LLAMA3)}),
    "llama+yarn": ("llama", {"rope_parameters": _scaled("yarn", factor=4.0, original_max_position_embeddings=16)}),
}
