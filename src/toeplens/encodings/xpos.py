"""xPos: RoPE whose pairs also shrink with the distance, each at its own rate."""

from __future__ import annotations

import math

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from toeplens.encodings.base import Positions, require_even, require_number
from toeplens.encodings.rotary import Pairing, Rotary, rotary_frequencies
from toeplens.ground import InputError


class XPos(Rotary):
    """RoPE times zeta_t^((i - j)/B), which decays with the distance to earlier keys (Sun et al. 2022, section 3).

    zeta_t = (2t/d + gamma)/(1 + gamma). Queries are multiplied by zeta_t^((i - c)/B), keys by zeta_t^((c - j)/B); the
    centre c cancels. The released programs take half the length for it; here it is the middle of the keys' positions
    (a row a sequence), so that a window at any place has the same, small factors. Keys after the query would grow
    instead of decay: xPos is for causal attention. Positions too far apart for the factors to fit the queries' dtype
    are refused, except while compiling or on a GPU, where looking would cost a synchronisation.

    Arguments
        scale_base  B; the released program's 512
        gamma       share that keeps the highest frequency from vanishing at once
        base, pairing  as in RoPE
    """

    citation = "Sun et al. 2022, arXiv 2212.10554"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \, \zeta_t^{\delta / B} e^{\mathrm{i} \delta \theta_t},"
        r" \quad \zeta_t = \frac{2t/d + \gamma}{1 + \gamma}"
    )
    log_decay: Tensor

    def __init__(
        self,
        *,
        scale_base: float = 512.0,
        gamma: float = 0.4,
        base: float = 10000.0,
        pairing: Pairing = "interleaved",
        **sizes: int,
    ) -> None:
        head_dim = sizes["head_dim"]
        require_even("head_dim", head_dim, "a rotation takes dimensions in pairs")
        require_number("scale_base", scale_base, over=0)
        require_number("gamma", gamma, over=0)
        super().__init__(rotary_frequencies(head_dim, base).unsqueeze(0), pairing=pairing, **sizes)
        zeta = (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim + gamma) / (1 + gamma)
        self.register_exact("log_decay", zeta.log() / scale_base)

    def rotate(
        self, q: Float[Tensor, "B H Nq d"], k: Float[Tensor, "B H Nk d"], q_positions: Positions, k_positions: Positions
    ) -> tuple[Float[Tensor, "B H Nq d"], Float[Tensor, "B H Nk d"]]:
        centre = (k_positions.amin(-1, keepdim=True) + k_positions.amax(-1, keepdim=True)) // 2
        q_places, k_places = q_positions - centre, k_positions - centre
        self._check_span(q_places, k_places, q.dtype)
        frequencies = self.frequencies_at(k_positions)
        k_tables = self.tables(k_positions, frequencies, k.dtype)
        q_tables = k_tables if q_positions is k_positions else self.tables(q_positions, frequencies, q.dtype)
        return self._turn(q, self._scaled(q_tables, q_places)), self._turn(k, self._scaled(k_tables, -k_places))

    def _scaled(self, tables: tuple[Tensor, Tensor], places: Positions) -> tuple[Tensor, Tensor]:
        """The tables times zeta_t^(place/B)."""
        cos, sin = tables
        factor = (places.to(torch.float64)[..., None, :, None] * self.log_decay).exp().to(cos.dtype)
        return cos * factor, sin * factor

    def _check_span(self, q_places: Positions, k_places: Positions, dtype: torch.dtype) -> None:
        """Each side's factors may take a quarter of the dtype's range of exponents, so that products fit too."""
        if torch.compiler.is_compiling() or k_places.device.type != "cpu" or not q_places.numel():
            return
        limit = int(math.log(torch.finfo(dtype).max) / 4 / float(-self.log_decay.min()))
        widest = max(int(q_places.abs().max()), int(k_places.abs().max()))
        if widest > limit:
            raise InputError(
                f"positions: {widest} from the middle of the keys' positions was given; with this scale_base the "
                f"factors of xPos fit {str(dtype).removeprefix('torch.')} up to {limit}."
            )

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 n D"]:
        """zeta_t^(delta/B) e^(i delta theta_t)."""
        return super().kernel(offsets) * (self.log_decay.unsqueeze(-1) * offsets.to(torch.float64)).exp()


ENCODINGS = {"xpos": XPos}
