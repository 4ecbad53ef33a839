"""Tiny models of transformers, what they read, and attention that is written by hand."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from toeplens.backends.hf import AttentionCall, capture_attention

transformers = pytest.importorskip("transformers")

TOKENS, PADDED, WIDTH = 12, 9, 8  # the second sequence has 9 tokens before its padding; WIDTH is of `HandwrittenModel`
SIZES = {
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
NARROW = GROUPED | {"head_dim": 8, "sliding_window": 4}
MIXED = {"num_local_experts": 2, "num_experts_per_tok": 1}
GPT = {
    "vocab_size": 31,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BLOOM = {"vocab_size": 31, "hidden_size": 32, "n_layer": 2, "n_head": 4}
LATENT = SIZES | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
T5 = {
    "vocab_size": 31,
    "d_model": 32,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 4,
    "d_ff": 48,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
XLNET = {"vocab_size": 31, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}
INPUTS = {"input_ids": torch.randint(4, 31, (2, TOKENS), generator=torch.Generator().manual_seed(3))}


def fsmt(layers: int) -> dict[str, Any]:
    sizes = {"d_model": 32, "src_vocab_size": 31, "tgt_vocab_size": 31, "tie_word_embeddings": False}
    each = {"layers": layers, "attention_heads": 4, "ffn_dim": 48}
    return sizes | {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in each.items()}


def tiny(kind: str, *, gain: float = 0.2, **sizes: Any) -> Any:
    """A model of this class with random weights that are large enough for its attention not to be flat."""
    cls = getattr(transformers, kind)
    model, generator = cls(cls.config_class(**sizes)).eval(), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(gain * noise if weight.ndim > 1 else weight + 0.1 * noise)
    return model


def padded_inputs() -> dict[str, Tensor]:
    mask = torch.ones_like(INPUTS["input_ids"])
    mask[1, PADDED:] = 0
    return INPUTS | {"attention_mask": mask}


def calls_in(model: Any, inputs: dict[str, Tensor] = INPUTS) -> list[AttentionCall]:
    """The attention calls of a pass."""
    calls: list[AttentionCall] = []
    capture_attention(model, inputs, calls.append)
    return calls


def reference_logits(
    q: Tensor, k: Tensor, rotation: Tensor | None, bias: Tensor | None, causal: bool, scale: float, **_: Any
) -> Tensor:
    """Logits of queries and keys that are rotated pair by pair as e^(iota (i - j) theta), by their definition."""
    count, width = 0 if rotation is None else len(rotation), q.shape[2]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    offsets = torch.arange(width)[:, None] - torch.arange(width)
    logits = q[..., 2 * count :].double() @ k[..., 2 * count :].double().transpose(-1, -2)
    for pair in range(count):
        x, y = (torch.complex(*z[..., 2 * pair : 2 * pair + 2].double().unbind(-1)) for z in (q, k))
        assert rotation is not None
        logits += (x[..., :, None] * y[..., None, :].conj() * torch.exp(1j * rotation[pair] * offsets)).real
    logits = scale * logits
    if bias is not None:
        logits = logits + bias[:, (offsets.clamp(min=0) if causal else offsets + width - 1)]
    return logits


def full_state(model: nn.Module) -> Any:
    """All that a pass might leave behind."""
    from transformers.masking_utils import AttentionMaskInterface

    functions = sys.modules[type(model).__module__].__dict__
    return (
        dict(transformers.AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
        [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m)) for m in model.modules()],
        [dict(vars(m.config)) | {"rope_parameters": None} for m in model.modules() if hasattr(m, "config")],
        {name: value for name, value in functions.items() if callable(value)},
        [weight.requires_grad for weight in model.parameters()],
    )


class HandwrittenModel(transformers.PreTrainedModel):
    """Modules of attention, one after another, each given its input in the order that it takes."""

    config_class = transformers.BertConfig

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(transformers.BertConfig(**SIZES))
        self.embed = nn.Embedding(31, WIDTH)
        self.parts = nn.ModuleList(parts)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for weight in self.parameters():
                weight.normal_(generator=generator)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        x = self.embed(input_ids)
        for part in self.parts:
            order = getattr(part, "order", (0, 1, 2))
            x = x + part(x.permute(order)).permute(order)
        return (x,)


class SoftAttention(nn.Module):
    """Two heads, written out."""

    order = (0, 1, 2)  # of batch, tokens and width in what it is given; each its own inverse

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        parts = (layer(x.permute(self.order)).unflatten(-1, (2, -1)).transpose(1, 2) for layer in self.of)
        return self.attend(*parts).transpose(1, 2).flatten(2).permute(self.order)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) * 0.5).softmax(-1) @ v
