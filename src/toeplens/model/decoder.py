"""The decoder: attention layers, pre-norm blocks and a readout, with any encoding and all switches of the protocols."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Unpack, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens import encodings
from toeplens.encodings import MLA, PositionalEncoding, Positions, attend
from toeplens.encodings.attention import Places
from toeplens.encodings.kit import is_readable
from toeplens.encodings.shapes import Keys, Queries
from toeplens.ground import invalid
from toeplens.model.config import DecoderConfig
from toeplens.model.fused_cpu import Turn, finished, projected, read_at, row_at, takes_steps

Asking = Float[Tensor, "B Nq d_model"]
Asked = Float[Tensor, "B Nk d_model"]


def frozen(
    norm: nn.Module, part: Float[Tensor, "*B N width"], at: Float[Tensor, "*B N width"]
) -> Float[Tensor, "*B N width"]:
    """Contribution of ``part`` of the input ``at`` to the norm's output, with the norm's scale frozen on ``at``.

    Linear in ``part``, without the norm's shift. For parts that sum to ``at``, the results sum to ``norm(at)`` minus
    the shift (theory, section 1).
    """
    if isinstance(norm, nn.Identity):
        return part
    if isinstance(norm, nn.LayerNorm):
        spread = (at.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        scaled = (part - part.mean(-1, keepdim=True)) / spread
    elif isinstance(norm, nn.RMSNorm):
        eps = torch.finfo(at.dtype).eps if norm.eps is None else norm.eps  # torch's default
        scaled = part / (at.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    else:
        raise TypeError(f"{type(norm).__name__} is not a norm that is known to be linear once its statistics are held")
    return scaled if norm.weight is None else scaled * norm.weight


def split_heads(x: Float[Tensor, "B N width"], heads: int) -> Float[Tensor, "B H N d"]:
    """Split the last dimension into heads."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class _Heads(nn.Module):
    """Base of the attention layers: position in the model, and the output projection of the heads."""

    def __init__(self, config: DecoderConfig, encoding: PositionalEncoding, *, linear_bias: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.encoding = encoding
        self.causal = config.causal
        self.dropout = config.dropout if "weights" in config.dropout_on else 0.0
        self.scale = config.attention_scale or encoding.query_dim**-0.5
        self.out = nn.Linear(config.d_model, config.d_model, bias=linear_bias)

    def heads(
        self,
        queries: Asking,
        context: Asked,
        *,
        added: Tensor | None = None,
        turns: tuple[Turn, Turn] | None = None,
        fused: bool = True,
        **places: Unpack[Places],
    ) -> Float[Tensor, "B Nq H head_dim"]:
        """Each head's output, before the output projection.

        ``queries`` may be fewer positions than ``context``, with indices ``rows``, so that a layer whose output is read
        at one position computes only that. ``added``: a fixed bias that layers share. ``turns``: precomputed
        `pair_factors` of the encoding at the queries and at the keys.
        """
        q, k, v = self.project(queries, context, *(() if turns is None else (turns,)))
        z = attend(
            q,
            k,
            v,
            encoding=self.encoding,
            scale=self.scale,
            notes=self.encoding.note(context),
            causal=self.causal,
            added=added,
            turned=turns is not None,
            dropout=self.dropout if self.training else 0.0,
            fused=fused,
            **places,
        )
        return z.transpose(1, 2)

    def project(self, queries: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as [B, H, N, dimensions], before rotation.

        Layers whose encodings may have `pair_factors` take these as a third argument and return rotated queries and
        keys.
        """
        raise NotImplementedError

    def project_part(self, queries: Asking, context: Asked, *, at: tuple[Asking, Asked]) -> tuple[Queries, Keys]:
        """Contribution of parts of the inputs ``at`` to q and k, without biases, with norms frozen on ``at``."""
        raise NotImplementedError

    def merge(self, z: Float[Tensor, "B Nq H head_dim"]) -> Float[Tensor, "B Nq d_model"]:
        """The output projection of the concatenated head outputs."""
        return self.out(z.flatten(-2))


class Attention(_Heads):
    """Standard multi-head attention with biases everywhere (protocols of arXiv 2505.13027)."""

    def __init__(self, config: DecoderConfig, encoding: PositionalEncoding) -> None:
        super().__init__(config, encoding, linear_bias=True)
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model)

    def project(
        self, queries: Asking, context: Asked, turns: tuple[Turn, Turn] | None = None
    ) -> tuple[Queries, Keys, Keys]:
        return projected(context, queries, self.qkv, self.num_heads, turns)

    def project_part(self, queries: Asking, context: Asked, *, at: tuple[Asking, Asked]) -> tuple[Queries, Keys]:
        to_q, to_k, _ = self.qkv.weight.split(self.out.in_features)
        q, k = F.linear(queries, to_q), F.linear(context, to_k)
        return split_heads(q, self.num_heads), split_heads(k, self.num_heads)


class LatentProjections(nn.Module):
    """Mixin with the latent projections from input to queries, keys and values (arXiv 2405.04434, eq. 9-19)."""

    num_heads: int

    def add_projections(self, d_model: int, encoding: MLA) -> None:
        """Create the weights, with the sizes of the encoding `MLA`; the heads together are as wide as the model."""
        rotary, latent, latent_q = encoding.rotary_dim, encoding.d_compress, encoding.q_compress
        self.shared_query = encoding.rotary_query == "shared"
        self.rotary_dim = rotary
        self.down_q = nn.Identity() if latent_q is None else nn.Linear(d_model, latent_q, bias=False)
        self.down_kv = nn.Linear(d_model, latent, bias=False)
        self.norm_q = nn.RMSNorm(latent_q, eps=1e-6) if latent_q and encoding.latent_norm else nn.Identity()
        self.norm_kv = nn.RMSNorm(latent, eps=1e-6) if encoding.latent_norm else nn.Identity()
        self.up_q = nn.Linear(latent_q or d_model, d_model, bias=False)
        self.up_kv = nn.Linear(latent, 2 * d_model, bias=False)
        width = rotary if self.shared_query else self.num_heads * rotary
        self.rotary_q = nn.Linear(latent_q or d_model, width, bias=False)
        self.rotary_k = nn.Linear(d_model, rotary, bias=False)

    def project(self, queries: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._expand(self.norm_q(self.down_q(queries)), self.norm_kv(self.down_kv(context)), context)

    def project_part(self, queries: Asking, context: Asked, *, at: tuple[Asking, Asked]) -> tuple[Queries, Keys]:
        c_q = frozen(self.norm_q, self.down_q(queries), self.down_q(at[0]))
        c_kv = frozen(self.norm_kv, self.down_kv(context), self.down_kv(at[1]))
        q, k, _ = self._expand(c_q, c_kv, context)
        return q, k

    def _expand(self, c_q: Tensor, c_kv: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v from the latent vectors and, for the rotary key, from the layer's input; linear, without biases."""
        k_content, v = self.up_kv(c_kv).chunk(2, dim=-1)
        turned_q = split_heads(self.rotary_q(c_q), 1 if self.shared_query else self.num_heads)
        turned_k = split_heads(self.rotary_k(context), 1).expand(-1, self.num_heads, -1, -1)
        content_q, k_content, v = (split_heads(x, self.num_heads) for x in (self.up_q(c_q), k_content, v))
        q = torch.cat((content_q, turned_q.expand(-1, self.num_heads, -1, -1)), dim=-1)
        return q, torch.cat((k_content, turned_k), dim=-1), v


class LatentAttention(LatentProjections, _Heads):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, eq. 9-19), with the sizes of the encoding `MLA`."""

    def __init__(self, config: DecoderConfig, encoding: MLA) -> None:
        _Heads.__init__(self, config, encoding, linear_bias=False)
        self.add_projections(config.d_model, encoding)


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
        names = ["lengths", "embeddings", "key_mask", *(("positions", "turn") if self.by_sequence else ())]
        names += [] if self.added is None or len(self.added) == 1 else ["added"]
        return replace(self, **{name: change(x) for name in names if (x := getattr(self, name)) is not None})


class Block(nn.Module):
    """A pre-norm layer: attention and a feed-forward network, each with a residual connection."""

    def __init__(self, config: DecoderConfig, encoding: PositionalEncoding) -> None:
        super().__init__()
        rate = dict.fromkeys(("attention", "ffn-hidden", "ffn"), 0.0) | dict.fromkeys(config.dropout_on, config.dropout)
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
        positions = q_positions = context.positions
        rows, added = None, context.added if self.shares_bias else None
        if read is None:
            normed = asking = self.norm_attention(x)
        else:
            normed, asking, x = read_at(x, self.norm_attention, read)
            q_positions = row_at(positions, read) if context.by_sequence else positions[read].unsqueeze(1)
            rows, added = read.unsqueeze(1), None
        z = self.attention.heads(
            asking,
            normed if context.embeddings is None else context.embeddings,
            q_positions=q_positions,
            k_positions=positions,
            rows=rows,
            mask=context.key_mask,
            added=added,
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
                must = f"be at least the number of tokens, {tokens.shape[1]}, with {type(table).__name__}"
                raise invalid("max_len", must, config.max_len)
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
    if lengths is None or lengths.device.type != "cpu" or not lengths.numel() or not is_readable(lengths):
        return
    if int(lengths.min()) < 1 or int(lengths.max()) > most:
        raise invalid("lengths", f"be from 1 to {most}", lengths.tolist()[:8])
