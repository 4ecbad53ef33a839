"""The decoder: attention layers, pre-norm blocks and a readout, with any encoding and all switches of the protocols."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Unpack, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens import encodings
from toeplens.encodings import MLA, PositionalEncoding, Positions, attend
from toeplens.encodings.attention import PositionArguments
from toeplens.encodings.kit import is_readable
from toeplens.encodings.shapes import Keys, Queries, Stream, Values
from toeplens.model.config import DecoderConfig
from toeplens.model.fused_cpu import RotationFactors, can_fuse, finish_layer, norm_and_read, project_qkv, select_rows
from toeplens.utils import invalid

QueryStream = Float[Tensor, "B Nq d_model"]
KeyStream = Float[Tensor, "B Nk d_model"]
Streams = tuple[QueryStream, KeyStream]


def apply_frozen_norm(
    norm: nn.Module, part: Float[Tensor, "*B N width"], x: Float[Tensor, "*B N width"]
) -> Float[Tensor, "*B N width"]:
    """Contribution of ``part`` of the input ``x`` to the norm's output, with the norm's scale frozen on ``x``.

    Linear in ``part``, without the norm's shift. For parts that sum to ``x``, the results sum to ``norm(x)`` minus the
    shift (theory, section 1).
    """
    if isinstance(norm, nn.Identity):
        return part
    if isinstance(norm, nn.LayerNorm):
        std = (x.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        scaled = (part - part.mean(-1, keepdim=True)) / std
    elif isinstance(norm, nn.RMSNorm):
        eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps  # torch's default
        scaled = part / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    else:
        raise TypeError(f"{type(norm).__name__} is not a norm that is known to be linear once its statistics are held")
    return scaled if norm.weight is None else scaled * norm.weight


def split_heads(x: Float[Tensor, "B N width"], heads: int) -> Float[Tensor, "B H N d"]:
    """Split the last dimension into heads."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class _AttentionBase(nn.Module):
    """Base of the attention layers: position in the model, and the output projection of the heads."""

    def __init__(self, config: DecoderConfig, encoding: PositionalEncoding, *, linear_bias: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.encoding = encoding
        self.causal = config.causal
        self.dropout = config.dropout if "weights" in config.dropout_on else 0.0
        self.scale = config.attention_scale or encoding.query_dim**-0.5
        self.out = nn.Linear(config.d_model, config.d_model, bias=linear_bias)

    def head_outputs(
        self,
        queries: QueryStream,
        context: KeyStream,
        *,
        shared_bias: Tensor | None = None,
        rotations: tuple[RotationFactors, RotationFactors] | None = None,
        fused: bool = True,
        **positions: Unpack[PositionArguments],
    ) -> Float[Tensor, "B Nq H head_dim"]:
        """Each head's output, before the output projection.

        ``queries`` may be fewer positions than ``context``, with indices ``rows``, so that a layer whose output is read
        at one position computes only that. ``shared_bias``: a fixed bias that layers share. ``rotations``:
        precomputed `pair_factors` of the encoding at the queries and at the keys.
        """
        q, k, v = self.project(queries, context, *(() if rotations is None else (rotations,)))
        options = {"dropout": self.dropout if self.training else 0.0, "shared_bias": shared_bias, "fused": fused}
        return self.attend(q, k, v, context, self.encoding, rotated=rotations is not None, **options, **positions)

    def attend(
        self, q: Queries, k: Keys, v: Values, context: KeyStream, encoding: PositionalEncoding, **options: Any
    ) -> Float[Tensor, "B Nq H head_dim"]:
        """Each head's output from the layer's projections; other arguments as in `toeplens.encodings.attend`."""
        arguments = {"scale": self.scale, "key_features": self.encoding.key_features(context), "causal": self.causal}
        return attend(q, k, v, encoding=encoding, **arguments, **options).transpose(1, 2)

    def project(self, queries: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as [B, H, N, dimensions], before rotation.

        Layers whose encodings may have `pair_factors` take these as a third argument and return rotated queries and
        keys.
        """
        raise NotImplementedError

    def project_part(self, queries: QueryStream, context: KeyStream, *, full_inputs: Streams) -> tuple[Queries, Keys]:
        """Contribution of parts of ``full_inputs`` to q and k, without biases, with norms frozen on these."""
        raise NotImplementedError

    def merge(self, z: Float[Tensor, "B Nq H head_dim"]) -> Float[Tensor, "B Nq d_model"]:
        """The output projection of the concatenated head outputs."""
        return self.out(z.flatten(-2))


class DecoderAttention(_AttentionBase):
    """Standard multi-head attention with biases everywhere (protocols of arXiv 2505.13027)."""

    def __init__(self, config: DecoderConfig, encoding: PositionalEncoding) -> None:
        super().__init__(config, encoding, linear_bias=True)
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model)

    def project(
        self, queries: QueryStream, context: KeyStream, rotations: tuple[RotationFactors, RotationFactors] | None = None
    ) -> tuple[Queries, Keys, Values]:
        return project_qkv(context, queries, self.qkv, self.num_heads, rotations)

    def project_part(self, queries: QueryStream, context: KeyStream, *, full_inputs: Streams) -> tuple[Queries, Keys]:
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

    def project_part(self, queries: QueryStream, context: KeyStream, *, full_inputs: Streams) -> tuple[Queries, Keys]:
        c_q = apply_frozen_norm(self.norm_q, self.down_q(queries), self.down_q(full_inputs[0]))
        c_kv = apply_frozen_norm(self.norm_kv, self.down_kv(context), self.down_kv(full_inputs[1]))
        q, k, _ = self._expand(c_q, c_kv, context)
        return q, k

    def _expand(self, c_q: Tensor, c_kv: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v from the latent vectors and, for the rotary key, from the layer's input; linear, without biases."""
        k_content, v = self.up_kv(c_kv).chunk(2, dim=-1)
        rotary_q = split_heads(self.rotary_q(c_q), 1 if self.shared_query else self.num_heads)
        rotary_k = split_heads(self.rotary_k(context), 1).expand(-1, self.num_heads, -1, -1)
        content_q, k_content, v = (split_heads(x, self.num_heads) for x in (self.up_q(c_q), k_content, v))
        q = torch.cat((content_q, rotary_q.expand(-1, self.num_heads, -1, -1)), dim=-1)
        return q, torch.cat((k_content, rotary_k), dim=-1), v


class LatentAttention(LatentProjections, _AttentionBase):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, eq. 9-19), with the sizes of the encoding `MLA`."""

    def __init__(self, config: DecoderConfig, encoding: MLA) -> None:
        _AttentionBase.__init__(self, config, encoding, linear_bias=False)
        self.add_projections(config.d_model, encoding)


@dataclass(frozen=True)
class PassContext:
    """State shared by all layers of a forward pass.

    positions         [N] or [B, N], with one more dimension for encodings with several coordinates per position
    per_sequence      whether positions have one row per sequence
    lengths           [B], tokens before the padding; None without padding
    embeddings        raw input embeddings [B, N, d_model] if the protocol computes keys and values from them; otherwise
                      None
    key_mask          [B, 1, 1, N], True where a key may be seen; None for all
    shared_bias       the bias that all layers share, including the mask: [1 or B, H, N, N]; None if there is none
    rotary_encoding   the encoding whose `pair_factors` are in ``rotation_factors``; None if there is none
    rotation_factors  its factors at the positions: [B or nothing, N, 1, H or 1, n]
    """

    positions: Positions
    per_sequence: bool
    lengths: Int[Tensor, "B"] | None
    embeddings: Float[Tensor, "B N d_model"] | None
    key_mask: Tensor | None
    shared_bias: Tensor | None = None
    rotary_encoding: PositionalEncoding | None = None
    rotation_factors: RotationFactors | None = None

    def rotations_for(
        self, encoding: PositionalEncoding, rows: Int[Tensor, "B"] | None
    ) -> tuple[RotationFactors, RotationFactors] | None:
        """The precomputed rotation factors of an encoding, if any: at one row per query, or at all positions."""
        if self.rotation_factors is None or encoding is not self.rotary_encoding:
            return None
        if rows is None:
            return self.rotation_factors, self.rotation_factors
        index = (torch.arange(len(rows), device=rows.device), rows) if self.per_sequence else rows
        return self.rotation_factors[index].unsqueeze(1), self.rotation_factors

    def repeat(self, times: int) -> PassContext:
        """The context of the batch repeated ``times`` times."""
        return self._map_sequences(lambda x: x.repeat(times, *[1] * (x.ndim - 1)))

    def select(self, sequences: slice) -> PassContext:
        """The context of some of the sequences."""
        return self._map_sequences(lambda x: x[sequences])

    def _map_sequences(self, change: Callable[[Tensor], Tensor]) -> PassContext:
        """A copy with ``change`` applied to everything that has one row per sequence."""
        names = ["lengths", "embeddings", "key_mask", *(("positions", "rotation_factors") if self.per_sequence else ())]
        names += [] if self.shared_bias is None or len(self.shared_bias) == 1 else ["shared_bias"]
        return replace(self, **{name: change(x) for name in names if (x := getattr(self, name)) is not None})


class Block(nn.Module):
    """A pre-norm layer: attention and a feed-forward network, one after the other or ``parallel``, each with a residual
    connection."""

    def __init__(self, config: DecoderConfig, encoding: PositionalEncoding) -> None:
        super().__init__()
        rate = dict.fromkeys(("attention", "ffn-hidden", "ffn"), 0.0) | dict.fromkeys(config.dropout_on, config.dropout)
        self.shares_bias = encoding.has_fixed_bias and encoding.shared
        self.norm_attention = nn.LayerNorm(config.d_model)
        latent = isinstance(encoding, MLA)
        self.attention = LatentAttention(config, encoding) if latent else DecoderAttention(config, encoding)
        self.parallel = config.parallel
        if not config.parallel:
            self.norm_ffn = nn.LayerNorm(config.d_model)
        self.ffn = nn.Sequential(
            nn.Linear(config.d_model, config.d_ff),
            nn.ReLU() if config.activation == "relu" else nn.GELU(),
            nn.Dropout(rate["ffn-hidden"]),
            nn.Linear(config.d_ff, config.d_model),
            nn.Dropout(rate["ffn"]),
        )
        self.drop_attention = nn.Dropout(rate["attention"])

    def head_outputs(
        self, x: Float[Tensor, "B N d_model"], context: PassContext, *, read_positions: Tensor | None, fused: bool
    ) -> tuple[Float[Tensor, "B Nq d_model"], Float[Tensor, "B Nq H head_dim"]]:
        """The residual stream at the required positions, and each head's output there.

        ``read_positions`` is None for all positions, or [B]: the one position of each sequence that is needed.
        """
        positions = q_positions = context.positions
        rows, shared_bias = None, context.shared_bias if self.shares_bias else None
        if read_positions is None:
            normed = query_inputs = self.norm_attention(x)
        else:
            normed, query_inputs, x = norm_and_read(x, self.norm_attention, read_positions)
            rows, shared_bias = read_positions.unsqueeze(1), None
            q_positions = select_rows(positions, read_positions) if context.per_sequence else positions[rows]
        z = self.attention.head_outputs(
            query_inputs,
            normed if context.embeddings is None else context.embeddings,
            q_positions=q_positions,
            k_positions=positions,
            rows=rows,
            mask=context.key_mask,
            shared_bias=shared_bias,
            rotations=context.rotations_for(self.attention.encoding, read_positions),
            fused=fused,
        )
        return x, z

    def project(self, x: Float[Tensor, "B N d_model"], context: PassContext) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of all positions as [B, H, N, dimensions], before the encoding acts."""
        normed = self.norm_attention(x)
        return self.attention.project(normed, normed if context.embeddings is None else context.embeddings)

    def project_part(
        self, part: Stream, key_part: Stream, *, x: Tensor, context: PassContext
    ) -> tuple[Float[Tensor, "B H N d"], Float[Tensor, "B H N d"]]:
        """Contribution to q and k of a part of the residual stream ``x``, and of the same part of the keys' input.

        Linear in the parts: norms are frozen at their value on ``x``, and biases are left out.
        """
        queries, normed = apply_frozen_norm(self.norm_attention, part, x), self.norm_attention(x)
        if context.embeddings is None:
            keys = apply_frozen_norm(self.norm_attention, key_part, x)
            return self.attention.project_part(queries, keys, full_inputs=(normed, normed))
        return self.attention.project_part(queries, key_part, full_inputs=(normed, context.embeddings))

    def finish(
        self, x: Float[Tensor, "B Nq d_model"], z: Float[Tensor, "B Nq H head_dim"]
    ) -> Float[Tensor, "B Nq d_model"]:
        """The layer's output, from the residual stream and the (possibly modified) head outputs."""
        if self.parallel:
            return x + self.drop_attention(self.attention.merge(z)) + self.ffn(self.norm_attention(x))
        return finish_layer(x, z.flatten(-2), self.attention.out, self.drop_attention, self.norm_ffn, self.ffn)


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

    def start_pass(
        self, tokens: Int[Tensor, "B N"], lengths: Int[Tensor, "B"] | None = None, positions: Positions | None = None
    ) -> tuple[Float[Tensor, "B N d_model"], PassContext]:
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
            table = next((e for e in (self.encoding, self.input_encoding) if e and e.bounded), None)
            if table is not None and tokens.shape[1] > config.max_len:
                must = f"be at least the number of tokens, {tokens.shape[1]}, with {type(table).__name__}"
                raise invalid("max_len", must, config.max_len)
            positions = self.encoding.to_positions(torch.arange(tokens.shape[1], device=tokens.device))
        per_sequence = self.encoding.is_per_sequence(positions)
        _check_lengths(lengths, tokens.shape[1])
        x = self.encoding.embed(self.embedding(tokens), positions)
        if self.input_encoding is not None:
            x = self.input_encoding.embed(x, positions)
        key_mask = None
        if config.pad_mask and lengths is not None:
            key_mask = (torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1))[:, None, None, :]
        rotation_factors = self.encoding.pair_factors(positions, x.dtype) if can_fuse(x) else None
        return x, PassContext(
            positions=positions,
            per_sequence=per_sequence,
            lengths=lengths,
            embeddings=x if config.key_value_source == "embeddings" else None,
            key_mask=key_mask,
            shared_bias=self._shared_bias(x, positions, per_sequence, key_mask),
            rotary_encoding=None if rotation_factors is None else self.encoding,
            rotation_factors=None if rotation_factors is None else rotation_factors.transpose(-3, -2).unsqueeze(-3),
        )

    def _shared_bias(self, x: Tensor, positions: Positions, per_sequence: bool, mask: Tensor | None) -> Tensor | None:
        """The bias that layers share, computed once per pass, if it is not too large to cache."""
        encoding, config, length = self.encoding, self.config, x.shape[1]
        if not (encoding.has_fixed_bias and encoding.shared) or (config.num_layers == 1 and config.readout == "last"):
            return None
        rows = x.shape[0] if per_sequence or mask is not None else 1
        if rows * config.num_heads * length**2 > encodings.MAX_SHARED_BIAS:
            return None
        return encodings.fixed_bias(encoding, positions, dtype=x.dtype, mask=mask, causal=config.causal)

    def read_position(self, layer: int, tokens_shape: torch.Size, context: PassContext) -> Int[Tensor, "B"] | None:
        """The one position per sequence that ``layer`` must compute, or None for all."""
        if self.config.readout != "last" or layer != self.config.num_layers - 1:
            return None
        if context.lengths is not None:
            return context.lengths - 1
        return torch.full((tokens_shape[0],), tokens_shape[1] - 1, device=self.readout.weight.device)

    def layer_heads(
        self, layer: int, x: Stream, context: PassContext, *, fused: bool = True
    ) -> tuple[Tensor, Float[Tensor, "B Nq H head_dim"]]:
        """The residual stream where layer ``layer`` needs it, and its head outputs there."""
        position = self.read_position(layer, x.shape[:2], context)
        return self.block(layer).head_outputs(x, context, read_positions=position, fused=fused)

    def compute_logits(self, x: Float[Tensor, "B Nq d_model"], context: PassContext) -> Float[Tensor, "B *N C"]:
        """Class logits from the last layer's output."""
        x = self.final_norm(x)
        if self.config.readout == "each":
            return self.readout(x)
        if self.config.readout == "last":
            return self.readout(x.squeeze(1))
        if self.config.readout == "masked-mean" and context.lengths is not None:
            is_token = torch.arange(x.shape[1], device=x.device) < context.lengths.unsqueeze(1)
            is_token = is_token.unsqueeze(-1).to(x.dtype)
            return self.readout((x * is_token).sum(1) / is_token.sum(1))
        return self.readout(x.mean(1))

    def run_from_layer(
        self, layer: int, x: Stream, context: PassContext, *, fused: bool = True
    ) -> Float[Tensor, "B *N C"]:
        """Class logits from the input of layer ``layer`` on."""
        for index in range(layer, self.config.num_layers):
            x = self.block(index).finish(*self.layer_heads(index, x, context, fused=fused))
        return self.compute_logits(x, context)

    def forward(
        self,
        tokens: Int[Tensor, "B N"],
        lengths: Int[Tensor, "B"] | None = None,
        positions: Positions | None = None,
        *,
        fused: bool = True,
    ) -> Float[Tensor, "B *N C"]:
        """Class logits of a batch of sequences; ``fused=False`` forms attention weights explicitly."""
        x, context = self.start_pass(tokens, lengths, positions)
        return self.run_from_layer(0, x, context, fused=fused)


def _check_lengths(lengths: Tensor | None, limit: int) -> None:
    """Raise `InputError` for impossible lengths; skipped on a GPU, where reading them would synchronise."""
    if lengths is None or lengths.device.type != "cpu" or not lengths.numel() or not is_readable(lengths):
        return
    if int(lengths.min()) < 1 or int(lengths.max()) > limit:
        raise invalid("lengths", f"be from 1 to {limit}", lengths.tolist()[:8])
