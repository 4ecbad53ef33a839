"""The projections of latent attention: queries, keys and values by way of vectors of few dimensions (DeepSeek-V2)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from toeplens.encodings import MLA
from toeplens.encodings.shapes import Keys, Queries
from toeplens.model.norms import frozen


class LatentProjections(nn.Module):
    """Adds to a module the way from its input to queries, keys and values (arXiv 2405.04434, eq. 9-19)."""

    num_heads: int

    def add_projections(self, d_model: int, encoding: MLA) -> None:
        """Make the weights, of the sizes of the encoding `MLA`, for heads that together are as wide as the model."""
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
        """q, k, v from the latent vectors, and from the layer's input for the rotary key; linear, without biases."""
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
