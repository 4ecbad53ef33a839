"""Multi-head latent attention's encoding: a rotary part concatenated to a content part that knows no position."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Complex, Int
from torch import Tensor

from toeplens.encodings.kit import Positions, require_count, require_even, rotary_frequencies
from toeplens.encodings.rotary import Frequencies, Pairing, Rotary
from toeplens.ground import InputError, choose


class MLA(Rotary):
    """DeepSeek's decoupled RoPE: q = [q_content ; R_i q_rotary], k = [k_content ; R_j k_rotary] (V2, eq. 14-19).

    Acts on heads of ``head_dim + rotary_dim`` dimensions and turns the last ``rotary_dim`` of them; the rotary key is
    one for all heads. The projections to and from the latent vectors belong to the attention that uses it.

    Arguments
        rotary_dim    dimensions of the rotary part; default half of ``head_dim``, as in DeepSeek-V2
        d_compress    size of the latent vector c^KV; default half of ``d_model``, as in arXiv 2505.13027 (DeepSeek-V2:
                      512 of 5120)
        q_compress    size of c^Q: ``same`` as c^KV, as in arXiv 2505.13027; a number of its own (DeepSeek-V2: 1536); or
                      None for queries straight from the layer's input, as in V2-Lite
        rotary_query  ``per-head`` (DeepSeek) or ``shared``: one rotary query for all heads (released program of
                      arXiv 2505.13027)
        latent_norm   RMSNorm on the latent vectors, as in DeepSeek
        phase_table   ``rotation``, or ``released``: the released program reads cosines and sines from a concatenated
                      table as if it were interleaved, so that what it applies is no rotation and not a function of
                      the offset
        base, pairing as in RoPE
    """

    coupling = "concatenation"
    citation = "DeepSeek-AI 2024, arXiv 2405.04434"
    formula = r"q_i = [q^C_i;\, R_i q^R_i],\quad k_j = [k^C_j;\, R_j k^R_j]"

    def __init__(
        self,
        *,
        rotary_dim: int | None = None,
        d_compress: int | None = None,
        q_compress: int | Literal["same"] | None = "same",
        rotary_query: Literal["per-head", "shared"] = "per-head",
        latent_norm: bool = True,
        phase_table: Literal["rotation", "released"] = "rotation",
        base: float = 10000.0,
        pairing: Pairing = "interleaved",
        **sizes: int,
    ) -> None:
        head_dim = sizes["head_dim"]
        rotary_dim = 2 * max(1, head_dim // 4) if rotary_dim is None else rotary_dim
        require_even("rotary_dim", rotary_dim)
        super().__init__(rotary_frequencies(rotary_dim, base).unsqueeze(0), pairing=pairing, first=head_dim, **sizes)
        self.rotary_dim = rotary_dim
        self.d_compress = max(1, self.d_model // 2) if d_compress is None else d_compress
        require_count(d_compress=self.d_compress)
        self.q_compress = self.d_compress if q_compress == "same" else q_compress
        if self.q_compress is not None and not (isinstance(self.q_compress, int) and self.q_compress >= 1):
            raise InputError(f"q_compress: {q_compress!r} was given; it must be at least 1, 'same', or None.")
        self.rotary_query = choose("rotary_query", rotary_query, ("per-head", "shared"))
        self.latent_norm = latent_norm
        self.phase_table = choose("phase_table", phase_table, ("rotation", "released"))
        if self.phase_table == "released":
            self.toeplitz = False
            if rotary_dim % 4:
                raise InputError(f"rotary_dim: {rotary_dim} was given; the released phase table needs a multiple of 4.")

    @property
    def query_dim(self) -> int:
        return self.head_dim + self.rotary_dim

    def tables(self, positions: Positions, frequencies: Frequencies, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = super().tables(positions, frequencies, dtype)
        if self.phase_table == "rotation":
            return cos, sin
        both = torch.cat((sin, cos), dim=-1)
        return both[..., 1::2], both[..., 0::2]

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "H n D"] | None:
        """The rotary part's kernel (the content part has none); None for the released table, which has none."""
        return super().kernel(offsets) if self.phase_table == "rotation" else None


ENCODINGS = {"mla": MLA}
