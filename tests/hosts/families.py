"""Tiny models of the families that take an encoding."""

from __future__ import annotations

from typing import Any

import torch
from tests.backends.hf.models import BLOOM, GPT, GROUPED, LATENT, SIZES, T5, tiny

from toeplens import hosts

_NARROW = GROUPED | {"head_dim": 8, "sliding_window": 6}
_BART = {"vocab_size": 31, "d_model": 32, "max_position_embeddings": 64} | {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()
}
WITHOUT_ROTATION = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}
}  # YaRN's factor is part of its position
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 8}),
    "Mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 6}),
    "Gemma 2": ("Gemma2ForCausalLM", _NARROW),
    "Gemma 3": ("Gemma3ForCausalLM", _NARROW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", SIZES),
    "GPT-2": ("GPT2LMHeadModel", GPT),
    "OPT": ("OPTForCausalLM", SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "BLOOM": ("BloomForCausalLM", BLOOM),
    "BERT": ("BertForMaskedLM", SIZES),
    "T5": ("T5ForConditionalGeneration", T5),
    "RoBERTa": ("RobertaForMaskedLM", SIZES),
    "BART": ("BartForConditionalGeneration", _BART),
    "ModernBERT": ("ModernBertForMaskedLM", SIZES),
    "ESM": ("EsmForMaskedLM", SIZES | {"position_embedding_type": "rotary"}),
    "gpt-oss": ("GptOssForCausalLM", _NARROW | {"num_local_experts": 4} | WITHOUT_ROTATION),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", LATENT),
    "Phi-3": ("Phi3ForCausalLM", GROUPED),
    "OLMo 2": ("Olmo2ForCausalLM", GROUPED),
    "Granite": ("GraniteForCausalLM", GROUPED),
    "StableLM": ("StableLmForCausalLM", GROUPED),
    "Starcoder 2": ("Starcoder2ForCausalLM", GROUPED),
    "GLM": ("GlmForCausalLM", GROUPED | {"head_dim": 8}),
    "Cohere": ("CohereForCausalLM", GROUPED),
}
TABLES = {  # of positions, at the input
    "GPT2LMHeadModel": ["transformer.wpe"],
    "OPTForCausalLM": ["model.decoder.embed_positions"],
    "BertForMaskedLM": ["bert.embeddings.position_embeddings"],
    "RobertaForMaskedLM": ["roberta.embeddings.position_embeddings"],
    "BartForConditionalGeneration": ["model.encoder.embed_positions", "model.decoder.embed_positions"],
}
ROTARY = ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma 2", "Gemma 3", "GPT-NeoX", "gpt-oss", "Phi-3", "OLMo 2"]
ROTARY += ["Granite", "StableLM", "Starcoder 2", "GLM", "Cohere"]


def model_with_encoding(name: str, family: str = "Llama", **options: Any) -> Any:
    """A tiny model with an encoding whose parameters are drawn."""
    model = tiny(FAMILIES[family][0], **FAMILIES[family][1])
    host = hosts.install(model, name, **options)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in host.encodings.parameters():
            parameter.normal_(std=0.3)
    return model
