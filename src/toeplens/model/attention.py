"""Attention layers around `toeplens.encodings.attend`: standard and latent attention, and frozen norms."""

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
from toeplens.model.fused_cpu import Turn, projected

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

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


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
        return self._split(F.linear(queries, to_q)), self._split(F.linear(context, to_k))


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
        self.rotary_q = nn.Linear(
            latent_q or d_model, rotary if self.shared_query else self.num_heads * rotary, bias=False
        )
        self.rotary_k = nn.Linear(d_model, rotary, bias=False)

    def project(self, queries: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._expand(self.norm_q(self.down_q(queries)), self.norm_kv(self.down_kv(context)), context)

    def project_part(
        self,
        queries: Float[Tensor, "B Nq d_model"],
        context: Float[Tensor, "B Nk d_model"],
        *,
        at: tuple[Tensor, Tensor],
    ) -> tuple[Queries, Keys]:
        c_q = frozen(self.norm_q, self.down_q(queries), self.down_q(at[0]))
        c_kv = frozen(self.norm_kv, self.down_kv(context), self.down_kv(at[1]))
        q, k, _ = self._expand(c_q, c_kv, context)
        return q, k

    def _expand(self, c_q: Tensor, c_kv: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v from the latent vectors and, for the rotary key, from the layer's input; linear, without biases."""
        k_content, v = self.up_kv(c_kv).chunk(2, dim=-1)
        turned_q = self.rotary_q(c_q)
        turned_q = self._share(turned_q) if self.shared_query else self._split(turned_q)
        q = torch.cat((self._split(self.up_q(c_q)), turned_q), dim=-1)
        k = torch.cat((self._split(k_content), self._share(self.rotary_k(context))), dim=-1)
        return q, k, self._split(v)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _share(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1).expand(-1, self.num_heads, -1, -1)


class LatentAttention(LatentProjections, _Heads):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, eq. 9-19), with the sizes of the encoding `MLA`."""

    def __init__(self, config: DecoderConfig, encoding: MLA) -> None:
        _Heads.__init__(self, config, encoding, linear_bias=False)
        self.add_projections(config.d_model, encoding)
