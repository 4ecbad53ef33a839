"""A small language model made of `toeplens.nn.Attention`: pre-norm blocks with gated feed-forward networks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, Positions
from toeplens.encodings.kit import is_readable, require_count, require_tensor
from toeplens.ground import InputError
from toeplens.ground.options import must_be
from toeplens.nn import generation
from toeplens.nn.attention import Attention
from toeplens.nn.cache import Cache
from toeplens.nn.places import Places, places


class Transformer(nn.Module):
    """A decoder over tokens, in Llama's form, in which position does what an encoding says.

    Arguments
        vocab_size  tokens that there are
        d_model     width of the residual stream
        num_layers  blocks of attention and a feed-forward network
        num_heads   heads of each attention
        encoding    a name of `toeplens.encodings.names`, several, or an encoding already built; shared where it says so
        d_ff        width of the feed-forward networks; 8/3 of d_model, in eights, unless given
        max_len     places that a table of positions must hold
        dropout     rate, on attention weights and on what each block adds
        tied        whether tokens are read out with the embedding's own weights
        head_dim, num_key_heads, window, softcap, sinks  as in `Attention`
        options     the encoding's own options

    Where layers share an encoding its parameters are in the state dict once a layer, the same tensors.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        *,
        encoding: str | Sequence[str] | PositionalEncoding = "rope",
        d_ff: int | None = None,
        head_dim: int | None = None,
        max_len: int = 2048,
        dropout: float = 0.0,
        tied: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        require_count(vocab_size=vocab_size, d_model=d_model, num_layers=num_layers, num_heads=num_heads)
        must_be("tied", tied, bool)
        own = {name: options.pop(name) for name in ("num_key_heads", "window", "softcap", "sinks") if name in options}
        if not isinstance(encoding, PositionalEncoding):
            size = d_model // num_heads if head_dim is None else head_dim
            sizes = {"d_model": d_model, "num_heads": num_heads, "head_dim": size, "max_len": max_len}
            encoding, options = encodings.build(encoding, **sizes, **options), {}
        d_ff = 8 * -(-d_model // 3) if d_ff is None else d_ff
        require_count(d_ff=d_ff)
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        more = {"head_dim": head_dim, "embed": False, "dropout": dropout, **own, **options}
        self.blocks = nn.ModuleList(
            _Block(Attention(d_model, num_heads, encoding=encoding.for_layer(layer), **more), d_ff, dropout)
            for layer in range(num_layers)
        )
        self.norm = nn.RMSNorm(d_model, eps=1e-6)
        self.readout = nn.Linear(d_model, vocab_size, bias=False)
        if tied:
            self.readout.weight = self.embedding.weight

    @property
    def encoding(self) -> PositionalEncoding:
        """The first layer's encoding."""
        return self._block(0).attention.encoding

    def _block(self, layer: int) -> _Block:
        return cast(_Block, self.blocks[layer])

    def new_cache(self, batch: int, length: int) -> list[Cache]:
        """An empty key cache a layer, for ``batch`` sequences of up to ``length`` tokens."""
        return [self._block(layer).attention.new_cache(batch, length) for layer in range(len(self.blocks))]

    def forward(
        self,
        tokens: Int[Tensor, "B N"],
        *,
        positions: Positions | None = None,
        key_padding_mask: Bool[Tensor, "B N"] | None = None,
        segments: Int[Tensor, "B N"] | None = None,
        cache: list[Cache] | None = None,
    ) -> Float[Tensor, "B N vocab_size"]:
        """Logits of each place's next token; the arguments are those of `Attention.forward`."""
        require_tensor("tokens", tokens, "integer", ("B", "N"))
        words = self.embedding.num_embeddings
        if tokens.device.type == "cpu" and is_readable(tokens) and bool(((tokens < 0) | (tokens >= words)).any()):
            raise InputError(f"tokens: must be from 0 to {words - 1} (got {int(tokens.min())} to {int(tokens.max())}).")
        if cache is not None and not (isinstance(cache, Sequence) and all(isinstance(each, Cache) for each in cache)):
            raise InputError(f"cache: must be a list of caches from new_cache (got {type(cache).__name__}).")
        if cache is not None and len(cache) != len(self.blocks):
            raise InputError(f"cache: {len(cache)} layers were given; this model has {len(self.blocks)}.")
        found = places(
            self.encoding,
            tokens.shape[0],
            tokens.shape[1],
            tokens.device,
            positions=positions,
            key_padding_mask=key_padding_mask,
            segments=segments,
            cache=None if cache is None else cache[0],
        )
        x = self.encoding.embed(self.embedding(tokens.long()), found.positions)
        with ExitStack() as kept:
            for each in cache or ():
                kept.enter_context(each.kept_whole())
            for layer in range(len(self.blocks)):
                x = self._block(layer)(x, found, None if cache is None else cache[layer])
        return self.readout(self.norm(x))

    def generate(
        self, tokens: Int[Tensor, "B N"], *, max_new_tokens: int, **how: Any
    ) -> Int[Tensor, "B N+max_new_tokens"]:
        """``tokens`` and what follows them; see `toeplens.nn.generate`."""
        return generation.generate(self, tokens, max_new_tokens=max_new_tokens, **how)


class _Block(nn.Module):
    def __init__(self, attention: Attention, d_ff: int, dropout: float) -> None:
        super().__init__()
        width = attention.d_model
        self.norm_attention, self.norm_ffn = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.attention = attention
        self.gate, self.up = nn.Linear(width, d_ff, bias=False), nn.Linear(width, d_ff, bias=False)
        self.down = nn.Linear(d_ff, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, found: Places, cache: Cache | None) -> Tensor:
        x = x + self.drop(self.attention.attend(self.norm_attention(x), found, cache=cache))
        y = self.norm_ffn(x)
        return x + self.drop(self.down(F.silu(self.gate(y)) * self.up(y)))
