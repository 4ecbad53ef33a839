"""Other programs' decoders, of a run's shape: they compute every position of every layer, and the last is read."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import Transformer

from toeplens.model import DecoderConfig


class TorchEncoder(nn.Module):
    """torch's own layers, causal; it has no rotation to do."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            shape.d_model, shape.num_heads, shape.d_ff, 0.0, batch_first=True, norm_first=True
        )
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.layers = nn.TransformerEncoder(layer, shape.num_layers, enable_nested_tensor=False)
        self.readout = nn.Linear(shape.d_model, shape.num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.readout(self.layers(self.embedding(tokens), mask=mask, is_causal=True)[:, -1])


class Llama(nn.Module):
    """transformers' Llama; its gated network has as many weights as ours."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        self.model = LlamaModel(
            LlamaConfig(
                vocab_size=shape.vocab_size,
                hidden_size=shape.d_model,
                intermediate_size=shape.d_ff * 2 // 3,
                num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.num_heads,
                num_key_value_heads=shape.num_heads,
                max_position_embeddings=shape.max_len,
                use_cache=False,
            )
        )
        self.readout = nn.Linear(shape.d_model, shape.num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.readout(self.model(tokens).last_hidden_state[:, -1])


class XTransformers(nn.Module):
    """x-transformers' decoder with rotation and its flash attention."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        from x_transformers import Decoder as Layers
        from x_transformers import TransformerWrapper

        layers = Layers(
            dim=shape.d_model,
            depth=shape.num_layers,
            heads=shape.num_heads,
            attn_dim_head=shape.d_model // shape.num_heads,
            rotary_pos_emb=True,
            ff_mult=shape.d_ff // shape.d_model,
            attn_flash=True,
        )
        self.model = TransformerWrapper(
            num_tokens=shape.vocab_size, max_seq_len=shape.max_len, use_abs_pos_emb=False, attn_layers=layers
        )
        self.readout = nn.Linear(shape.d_model, shape.num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.readout(self.model(tokens, return_embeddings=True)[:, -1])


# the name that is printed, the package that it needs, the model
PEERS: tuple[tuple[str, str, type[nn.Module]], ...] = (
    ("torch.nn.TransformerEncoder", "torch", TorchEncoder),
    ("transformers Llama", "transformers", Llama),
    ("x-transformers", "x_transformers", XTransformers),
)
