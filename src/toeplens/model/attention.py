"""Attention layers: the projections around `toeplens.encodings.attend`, standard and latent."""

from __future__ import annotations

from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings import MLA, PositionalEncoding, attend
from toeplens.encodings.attention import Places
from toeplens.encodings.shapes import Keys, Queries
from toeplens.model.config import DecoderConfig
from toeplens.model.norms import frozen
from toeplens.model.parts import in_parts

Asking = Float[Tensor, "B Nq d_model"]
Asked = Float[Tensor, "B Nk d_model"]


class _Heads(nn.Module):
    """What every attention layer shares: its place in the model, and the way from heads to the residual stream."""

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
        fused: bool = True,
        **places: Unpack[Places],
    ) -> Float[Tensor, "B Nq H head_dim"]:
        """Each head's output, before the output projection.

        ``queries`` may be fewer positions than ``context``, whose ``rows`` they are, so that a layer whose output is
        read in one place does only that place's work. ``added``: the fixed bias, where layers share it.
        """
        q, k, v = self.project(queries, context)
        z = attend(
            q,
            k,
            v,
            encoding=self.encoding,
            scale=self.scale,
            notes=self.encoding.note(context),
            causal=self.causal,
            added=added,
            dropout=self.dropout if self.training else 0.0,
            fused=fused,
            **places,
        )
        return z.transpose(1, 2)

    def project(self, queries: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as [B, H, N, dimensions], before rotation."""
        raise NotImplementedError

    def project_part(self, queries: Asking, context: Asked, *, at: tuple[Asking, Asked]) -> tuple[Queries, Keys]:
        """What parts of the inputs ``at`` contribute to q and k: no biases, norms held at their value on ``at``."""
        raise NotImplementedError

    def merge(self, z: Float[Tensor, "B Nq H head_dim"]) -> Float[Tensor, "B Nq d_model"]:
        """The output projection of the head outputs: a head lives in its input, not in its output."""
        return self.out(z.flatten(-2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class Attention(_Heads):
    """Standard multi-head attention with biases everywhere (protocols of arXiv 2505.13027)."""

    def __init__(self, config: DecoderConfig, encoding: PositionalEncoding) -> None:
        super().__init__(config, encoding, linear_bias=True)
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model)

    def project(self, queries: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        width = self.out.in_features
        if queries is context:
            return in_parts(self.qkv(queries), self.num_heads)
        q = F.linear(queries, self.qkv.weight[:width], self.qkv.bias[:width])
        k, v = F.linear(context, self.qkv.weight[width:], self.qkv.bias[width:]).split(width, dim=-1)
        return self._split(q), self._split(k), self._split(v)

    def project_part(self, queries: Asking, context: Asked, *, at: tuple[Asking, Asked]) -> tuple[Queries, Keys]:
        to_q, to_k, _ = self.qkv.weight.split(self.out.in_features)
        return self._split(F.linear(queries, to_q)), self._split(F.linear(context, to_k))


class LatentAttention(_Heads):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, eq. 9-19), with the sizes of the encoding `MLA`."""

    def __init__(self, config: DecoderConfig, encoding: MLA) -> None:
        rotary, latent, latent_q = encoding.rotary_dim, encoding.d_compress, encoding.q_compress
        super().__init__(config, encoding, linear_bias=False)
        d_model, heads = config.d_model, config.num_heads
        self.shared_query = encoding.rotary_query == "shared"
        self.rotary_dim = rotary
        self.down_q = nn.Identity() if latent_q is None else nn.Linear(d_model, latent_q, bias=False)
        self.down_kv = nn.Linear(d_model, latent, bias=False)
        self.norm_q = nn.RMSNorm(latent_q, eps=1e-6) if latent_q and encoding.latent_norm else nn.Identity()
        self.norm_kv = nn.RMSNorm(latent, eps=1e-6) if encoding.latent_norm else nn.Identity()
        self.up_q = nn.Linear(latent_q or d_model, d_model, bias=False)
        self.up_kv = nn.Linear(latent, 2 * d_model, bias=False)
        self.rotary_q = nn.Linear(latent_q or d_model, rotary if self.shared_query else heads * rotary, bias=False)
        self.rotary_k = nn.Linear(d_model, rotary, bias=False)

    def project(self, queries: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._expand(self.norm_q(self.down_q(queries)), self.norm_kv(self.down_kv(context)), context)

    def project_part(self, queries: Asking, context: Asked, *, at: tuple[Asking, Asked]) -> tuple[Queries, Keys]:
        c_q = frozen(self.norm_q, self.down_q(queries), self.down_q(at[0]))
        c_kv = frozen(self.norm_kv, self.down_kv(context), self.down_kv(at[1]))
        q, k, _ = self._expand(c_q, c_kv, context)
        return q, k

    def _expand(self, c_q: Tensor, c_kv: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v from the latent vectors, and from the layer's input for the rotary key; linear, without biases."""
        k_content, v = self.up_kv(c_kv).chunk(2, dim=-1)
        turned_q = self.rotary_q(c_q)
        turned_q = self._share(turned_q) if self.shared_query else self._split(turned_q)
        q = torch.cat((self._split(self.up_q(c_q)), turned_q), dim=-1)
        k = torch.cat((self._split(k_content), self._share(self.rotary_k(context))), dim=-1)
        return q, k, self._split(v)

    def _share(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1).expand(-1, self.num_heads, -1, -1)
