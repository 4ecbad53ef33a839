"""Other programs' decoders, of a run's shape: they compute every position of every layer; the last or each is read."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import Transformer

from toeplens.model import DecoderConfig


class Peer(nn.Module):
    """What is read of the positions: each where ours is read at each, else the last."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        self.each = shape.readout == "each"
        self.readout = nn.Linear(shape.d_model, shape.num_classes)

    def end(self, x: Tensor) -> Tensor:
        """Class logits."""
        return self.readout(x if self.each else x[:, -1])


class TorchEncoder(Peer):
    """torch's own layers, causal; it has no rotation to do."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__(shape)
        layer = nn.TransformerEncoderLayer(
            shape.d_model, shape.num_heads, shape.d_ff, 0.0, batch_first=True, norm_first=True
        )
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.layers = nn.TransformerEncoder(layer, shape.num_layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.end(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


class Llama(Peer):
    """transformers' Llama; its gated network has as many weights as ours."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__(shape)
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

    def forward(self, tokens: Tensor) -> Tensor:
        return self.end(self.model(tokens).last_hidden_state)


class XTransformers(Peer):
    """x-transformers' decoder with rotation and its flash attention."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__(shape)
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

    def forward(self, tokens: Tensor) -> Tensor:
        return self.end(self.model(tokens, return_embeddings=True))


# the name that is printed, the package that it needs, the model
PEERS: tuple[tuple[str, str, type[nn.Module]], ...] = (
    ("torch.nn.TransformerEncoder", "torch", TorchEncoder),
    ("transformers Llama", "transformers", Llama),
    ("x-transformers", "x_transformers", XTransformers),
)
