"""Attention layers: the projections around `toeplens.encodings.attend`, standard and latent."""

from __future__ import annotations

from typing import Unpack

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings import MLA, PositionalEncoding, attend
from toeplens.encodings.attention import Places
from toeplens.encodings.shapes import Keys, Queries
from toeplens.model.config import DecoderConfig
from toeplens.model.latent import LatentProjections
from toeplens.model.steps import Turn, projected

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
        turns: tuple[Turn, Turn] | None = None,
        fused: bool = True,
        **places: Unpack[Places],
    ) -> Float[Tensor, "B Nq H head_dim"]:
        """Each head's output, before the output projection.

        ``queries`` may be fewer positions than ``context``, whose ``rows`` they are, so that a layer whose output is
        read in one place does only that place's work. ``added``: the fixed bias, where layers share it. ``turns``:
        what the encoding's `pair_factors` are at the queries and at the keys, where a pass has formed it.
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

        Where encodings may have `pair_factors`, these are taken as a third argument, and queries and keys come turned.
        """
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

    def project(
        self, queries: Asking, context: Asked, turns: tuple[Turn, Turn] | None = None
    ) -> tuple[Queries, Keys, Keys]:
        return projected(context, queries, self.qkv, self.num_heads, turns)

    def project_part(self, queries: Asking, context: Asked, *, at: tuple[Asking, Asked]) -> tuple[Queries, Keys]:
        to_q, to_k, _ = self.qkv.weight.split(self.out.in_features)
        return self._split(F.linear(queries, to_q)), self._split(F.linear(context, to_k))


class LatentAttention(LatentProjections, _Heads):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, eq. 9-19), with the sizes of the encoding `MLA`."""

    def __init__(self, config: DecoderConfig, encoding: MLA) -> None:
        _Heads.__init__(self, config, encoding, linear_bias=False)
        self.add_projections(config.d_model, encoding)
