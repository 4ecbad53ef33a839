"""A Llama-shaped language model with any positional encoding, and greedy or sampled generation with a key cache.

    python examples/tiny_llama.py alibi

trains it to count modulo 32 and lets it continue from 5, 6, 7.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens import encodings
from toeplens.nn import Attention, Cache


class Block(nn.Module):
    """Pre-norm attention and a gated feed-forward network."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        d_model, d_ff = attention.d_model, 8 * attention.d_model // 3
        self.attention = attention
        self.norm_attention, self.norm_ffn = nn.RMSNorm(d_model, eps=1e-6), nn.RMSNorm(d_model, eps=1e-6)
        self.gate, self.up = nn.Linear(d_model, d_ff, bias=False), nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor, positions: Tensor, cache: Cache | None) -> Tensor:
        x = x + self.attention(self.norm_attention(x), positions=positions, cache=cache)
        y = self.norm_ffn(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class TinyLlama(nn.Module):
    """The encoding's input vectors, if it has any, are added once; layers share its parameters where it says so."""

    def __init__(self, vocab_size: int, d_model: int, num_layers: int, num_heads: int, encoding: str = "rope") -> None:
        super().__init__()
        sizes = {"d_model": d_model, "num_heads": num_heads, "head_dim": d_model // num_heads, "max_len": 2048}
        self.encoding = encodings.build(encoding, **sizes)
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.blocks = nn.ModuleList(
            Block(Attention(d_model, num_heads, encoding=self.encoding.for_layer(layer), embed=False))
            for layer in range(num_layers)
        )
        self.norm = nn.RMSNorm(d_model, eps=1e-6)

    def forward(self, tokens: Tensor, caches: list[Cache] | None = None) -> Tensor:
        """Logits of the next token at each position; with caches, ``tokens`` follow those in them."""
        start = 0 if caches is None else len(caches[0])
        positions = self.encoding.to_positions(torch.arange(start, start + tokens.shape[1], device=tokens.device))
        x = self.encoding.embed(self.embedding(tokens), positions)
        for layer, block in enumerate(self.blocks):
            x = block(x, positions, None if caches is None else caches[layer])
        return F.linear(self.norm(x), self.embedding.weight)

    @torch.no_grad()
    def generate(self, tokens: Tensor, new_tokens: int, *, temperature: float = 0.0) -> Tensor:
        """``tokens`` and ``new_tokens`` more: the most likely ones, or drawn at a temperature."""
        batch, length = tokens.shape
        caches = [block.attention.new_cache(batch, length + new_tokens) for block in self.blocks]
        logits = self(tokens, caches)[:, -1]
        for _ in range(new_tokens):
            if temperature:
                new = torch.multinomial((logits / temperature).softmax(-1), 1)
            else:
                new = logits.argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, new), dim=1)
            logits = self(new, caches)[:, -1]
        return tokens


def main(encoding: str = "rope", steps: int = 100) -> list[int]:
    """Train on counting, from any number, and return what follows 5, 6, 7."""
    torch.manual_seed(0)
    model = TinyLlama(vocab_size=32, d_model=64, num_layers=2, num_heads=4, encoding=encoding)
    texts = (torch.randint(32, (64, 1)) + torch.arange(24)) % 32
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = F.cross_entropy(model(texts)[:, :-1].flatten(0, 1), texts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.generate(torch.tensor([[5, 6, 7]]), 8)[0].tolist()


if __name__ == "__main__":
    print(main(*sys.argv[1:2]))
