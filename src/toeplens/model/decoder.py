"""The decoder: embeddings, pre-norm blocks and a readout, with any encoding and all switches of the two protocols."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from toeplens import encodings
from toeplens.encodings import MLA, PositionalEncoding, Positions
from toeplens.encodings.kit import is_mapped
from toeplens.ground import invalid
from toeplens.model.attention import Attention, LatentAttention, frozen
from toeplens.model.config import DecoderConfig
from toeplens.model.fused_cpu import Turn, finished, read_at, row_at, takes_steps


@dataclass(frozen=True)
class Context:
    """State shared by all layers of a forward pass.

    positions    [N] or [B, N], with one more dimension for encodings with several coordinates per position
    by_sequence  whether positions have one row per sequence
    lengths      [B], tokens before the padding; None without padding
    embeddings   raw input embeddings [B, N, d_model] if the protocol computes keys and values from them; otherwise None
    key_mask     [B, 1, 1, N], True where a key may be seen; None for all
    added        the bias that all layers share, including the mask: [1 or B, H, N, N]; None if there is none
    turned_by    the encoding whose `pair_factors` are in ``turn``; None if there is none
    turn         its factors at the positions: [B or nothing, N, 1, H or 1, n]
    """

    positions: Positions
    by_sequence: bool
    lengths: Int[Tensor, "B"] | None
    embeddings: Float[Tensor, "B N d_model"] | None
    key_mask: Tensor | None
    added: Tensor | None = None
    turned_by: PositionalEncoding | None = None
    turn: Turn | None = None

    def turns(self, encoding: PositionalEncoding, rows: Int[Tensor, "B"] | None) -> tuple[Turn, Turn] | None:
        """The precomputed rotation factors of an encoding, if any: at one row per query, or at all positions."""
        if self.turn is None or encoding is not self.turned_by:
            return None
        if rows is None:
            return self.turn, self.turn
        own = self.turn[torch.arange(len(rows), device=rows.device), rows] if self.by_sequence else self.turn[rows]
        return own.unsqueeze(1), self.turn

    def repeat(self, times: int) -> Context:
        """The context of the batch repeated ``times`` times."""
        return self._each(lambda x: x.repeat(times, *[1] * (x.ndim - 1)))

    def part(self, some: slice) -> Context:
        """The context of some of the sequences."""
        return self._each(lambda x: x[some])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Context:
        """A copy with ``change`` applied to everything that has one row per sequence."""

        def changed(x: Tensor | None) -> Tensor | None:
            return None if x is None else change(x)

        added = self.added
        return replace(
            self,
            positions=change(self.positions) if self.by_sequence else self.positions,
            turn=changed(self.turn) if self.by_sequence else self.turn,
            added=added if added is None or len(added) == 1 else change(added),
            lengths=changed(self.lengths),
            embeddings=changed(self.embeddings),
            key_mask=changed(self.key_mask),
        )


class Block(nn.Module):
    """A pre-norm layer: attention and a feed-forward network, each with a residual connection."""

    def __init__(self, config: DecoderConfig, encoding: PositionalEncoding) -> None:
        super().__init__()
        rate = {
            place: config.dropout if place in config.dropout_on else 0.0 for place in ("attention", "ffn-hidden", "ffn")
        }
        self.shares_bias = encoding.fixed_bias and encoding.shared
        self.norm_attention = nn.LayerNorm(config.d_model)
        latent = isinstance(encoding, MLA)
        self.attention = LatentAttention(config, encoding) if latent else Attention(config, encoding)
        self.norm_ffn = nn.LayerNorm(config.d_model)
        self.ffn = nn.Sequential(
            nn.Linear(config.d_model, config.d_ff),
            nn.ReLU() if config.activation == "relu" else nn.GELU(),
            nn.Dropout(rate["ffn-hidden"]),
            nn.Linear(config.d_ff, config.d_model),
            nn.Dropout(rate["ffn"]),
        )
        self.drop_attention = nn.Dropout(rate["attention"])

    def heads(
        self, x: Float[Tensor, "B N d_model"], context: Context, *, read: Tensor | None, fused: bool
    ) -> tuple[Float[Tensor, "B Nq d_model"], Float[Tensor, "B Nq H head_dim"]]:
        """The residual stream at the required positions, and each head's output there.

        ``read`` is None for all positions, or [B]: the one position of each sequence that is needed.
        """
        positions = context.positions
        if read is None:
            normed = asking = self.norm_attention(x)
        else:
            normed, asking, x = read_at(x, self.norm_attention, read)
        keys = normed if context.embeddings is None else context.embeddings
        if read is None:
            return x, self.attention.heads(
                asking,
                keys,
                q_positions=positions,
                k_positions=positions,
                mask=context.key_mask,
                added=context.added if self.shares_bias else None,
                turns=context.turns(self.attention.encoding, None),
                fused=fused,
            )
        z = self.attention.heads(
            asking,
            keys,
            q_positions=row_at(positions, read) if context.by_sequence else positions[read].unsqueeze(1),
            k_positions=positions,
            rows=read.unsqueeze(1),
            mask=context.key_mask,
            turns=context.turns(self.attention.encoding, read),
            fused=fused,
        )
        return x, z

    def project(self, x: Float[Tensor, "B N d_model"], context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of all positions as [B, H, N, dimensions], before the encoding acts."""
        normed = self.norm_attention(x)
        return self.attention.project(normed, normed if context.embeddings is None else context.embeddings)

    def project_part(
        self, part: Float[Tensor, "B N d_model"], key_part: Float[Tensor, "B N d_model"], *, x: Tensor, context: Context
    ) -> tuple[Float[Tensor, "B H N d"], Float[Tensor, "B H N d"]]:
        """Contribution to q and k of a part of the residual stream ``x``, and of the same part of the keys' input.

        Linear in the parts: norms are frozen at their value on ``x``, and biases are left out.
        """
        queries, at = frozen(self.norm_attention, part, x), self.norm_attention(x)
        if context.embeddings is None:
            return self.attention.project_part(queries, frozen(self.norm_attention, key_part, x), at=(at, at))
        return self.attention.project_part(queries, key_part, at=(at, context.embeddings))

    def finish(
        self, x: Float[Tensor, "B Nq d_model"], z: Float[Tensor, "B Nq H head_dim"]
    ) -> Float[Tensor, "B Nq d_model"]:
        """The layer's output, from the residual stream and the (possibly modified) head outputs."""
        return finished(x, z.flatten(-2), self.attention.out, self.drop_attention, self.norm_ffn, self.ffn)


class Decoder(nn.Module):
    """A small decoder, built from a `DecoderConfig`, that classifies a sequence or each of its tokens.

    If only one position is read out, the last layer computes only that position's query, head outputs and FFN. In
    shapes, ``*N`` is N (tokens) with the readout ``each``, and empty otherwise.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.encoding = config.build_encoding()
        self.input_encoding = config.build_input_encoding()
        self.blocks = nn.ModuleList(Block(config, self.encoding.for_layer(layer)) for layer in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.d_model) if config.final_norm else nn.Identity()
        self.readout = nn.Linear(config.d_model, config.num_classes)

    def block(self, layer: int) -> Block:
        """Layer ``layer``, from 0."""
        return cast(Block, self.blocks[layer])

    def begin(
        self, tokens: Int[Tensor, "B N"], lengths: Int[Tensor, "B"] | None = None, positions: Positions | None = None
    ) -> tuple[Float[Tensor, "B N d_model"], Context]:
        """The input embeddings and the context of a forward pass.

        Arguments
            tokens     token ids
            lengths    number of tokens of each sequence before its padding; None without padding
            positions  any positions, [N] or [B, N], with coordinates in a last dimension if the encoding's
                       positions have several (default: 0, 1, 2, ...). They may exceed ``max_len`` if no encoding uses a
                       table of positions
        """
        config = self.config
        if positions is None:
            table = next((each for each in (self.encoding, self.input_encoding) if each and each.bounded), None)
            if table is not None and tokens.shape[1] > config.max_len:
                raise invalid(
                    "max_len",
                    f"be at least the number of tokens, {tokens.shape[1]}, with {type(table).__name__}",
                    config.max_len,
                )
            positions = self.encoding.place(torch.arange(tokens.shape[1], device=tokens.device))
        by_sequence = self.encoding.by_sequence(positions)
        _check_lengths(lengths, tokens.shape[1])
        x = self.encoding.embed(self.embedding(tokens), positions)
        if self.input_encoding is not None:
            x = self.input_encoding.embed(x, positions)
        key_mask = None
        if config.pad_mask and lengths is not None:
            key_mask = (torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1))[:, None, None, :]
        turn = self.encoding.pair_factors(positions, x.dtype) if takes_steps(x) else None
        return x, Context(
            positions=positions,
            by_sequence=by_sequence,
            lengths=lengths,
            embeddings=x if config.key_value_source == "embeddings" else None,
            key_mask=key_mask,
            added=self._shared_bias(x, positions, by_sequence, key_mask),
            turned_by=None if turn is None else self.encoding,
            turn=None if turn is None else turn.transpose(-3, -2).unsqueeze(-3),
        )

    def _shared_bias(
        self, x: Tensor, positions: Positions, by_sequence: bool, key_mask: Tensor | None
    ) -> Tensor | None:
        """The bias that layers share, computed once per pass, if it is not too large to cache."""
        encoding, config, length = self.encoding, self.config, x.shape[1]
        if not (encoding.fixed_bias and encoding.shared) or (config.num_layers == 1 and config.readout == "last"):
            return None
        rows = x.shape[0] if by_sequence or key_mask is not None else 1
        if rows * config.num_heads * length**2 > encodings.KEPT:
            return None
        return encodings.fixed_bias(encoding, positions, dtype=x.dtype, mask=key_mask, causal=config.causal)

    def read_position(self, layer: int, tokens_shape: torch.Size, context: Context) -> Int[Tensor, "B"] | None:
        """The one position per sequence that ``layer`` must compute, or None for all."""
        if self.config.readout != "last" or layer != self.config.num_layers - 1:
            return None
        if context.lengths is not None:
            return context.lengths - 1
        return torch.full((tokens_shape[0],), tokens_shape[1] - 1, device=self.readout.weight.device)

    def layer_heads(
        self, layer: int, x: Float[Tensor, "B N d_model"], context: Context, *, fused: bool = True
    ) -> tuple[Tensor, Float[Tensor, "B Nq H head_dim"]]:
        """The residual stream where layer ``layer`` needs it, and its head outputs there."""
        return self.block(layer).heads(x, context, read=self.read_position(layer, x.shape[:2], context), fused=fused)

    def end(self, x: Float[Tensor, "B Nq d_model"], context: Context) -> Float[Tensor, "B *N C"]:
        """Class logits from the last layer's output."""
        x = self.final_norm(x)
        if self.config.readout == "each":
            return self.readout(x)
        if self.config.readout == "last":
            return self.readout(x.squeeze(1))
        if self.config.readout == "masked-mean" and context.lengths is not None:
            kept = (torch.arange(x.shape[1], device=x.device) < context.lengths.unsqueeze(1)).unsqueeze(-1).to(x.dtype)
            return self.readout((x * kept).sum(1) / kept.sum(1))
        return self.readout(x.mean(1))

    def replay(
        self, layer: int, x: Float[Tensor, "B N d_model"], context: Context, *, fused: bool = True
    ) -> Float[Tensor, "B *N C"]:
        """Class logits from the input of layer ``layer`` on."""
        for index in range(layer, self.config.num_layers):
            x = self.block(index).finish(*self.layer_heads(index, x, context, fused=fused))
        return self.end(x, context)

    def forward(
        self,
        tokens: Int[Tensor, "B N"],
        lengths: Int[Tensor, "B"] | None = None,
        positions: Positions | None = None,
        *,
        fused: bool = True,
    ) -> Float[Tensor, "B *N C"]:
        """Class logits of a batch of sequences; ``fused=False`` forms attention weights explicitly."""
        x, context = self.begin(tokens, lengths, positions)
        return self.replay(0, x, context, fused=fused)


def _check_lengths(lengths: Tensor | None, most: int) -> None:
    """Raise `InputError` for impossible lengths; skipped on a GPU, where reading them would synchronise."""
    if lengths is None or lengths.device.type != "cpu" or lengths.numel() == 0:
        return
    if torch.compiler.is_compiling() or is_mapped():
        return
    if int(lengths.min()) < 1 or int(lengths.max()) > most:
        raise invalid("lengths", f"be from 1 to {most}", lengths.tolist()[:8])
