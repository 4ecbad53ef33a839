"""Rotary variants made for lengths that training does not show: whole periods, high frequencies, imaginary heads."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from jaxtyping import Complex, Int
from torch import Tensor

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import require_number
from toeplens.encodings.rotary import Pairing, RoPE
from toeplens.encodings.shapes import Keys, Positions, Queries, Turned
from toeplens.ground import InputError, choose


class ResonanceRoPE(RoPE):
    """Resonance RoPE: every wavelength is rounded to a whole number of positions (Wang et al. 2024).

    theta_t = 2 pi / round(2 pi / RoPE's), so that a pair that has turned once within the training length shows, beyond
    it, only angles that were seen. The paper also rounds the wavelengths that YaRN makes, and the program those of
    position interpolation: ``factor`` does the latter. The shortest wavelength is 6.

    Arguments
        factor         divides RoPE's frequencies before they are rounded
        base, pairing  as in RoPE
    """

    citation = "Wang et al. 2024, arXiv 2403.00071"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \, e^{2 \pi \mathrm{i} \delta / \lambda_t},"
        r" \quad \lambda_t = \mathrm{round}(2 \pi b^{2t/d})"
    )

    def __init__(self, *, factor: float = 1.0, **inherited: Any) -> None:
        require_number("factor", factor, at_least=1)
        super().__init__(**inherited)
        self.wavelengths = self.register_exact("wavelengths", (2 * math.pi * factor / self.frequencies).round())
        self.frequencies.copy_(2 * math.pi / self.wavelengths)


class HoPE(RoPE):
    """High-frequency rotary position encoding: what turns once within the training length is kept (Chen et al. 2024).

    Pairs whose period 2 pi / theta_t is longer do not turn, so that their content counts whatever the distance. It is
    p-RoPE with a share that the training length decides.

    Two later encodings have the same name and are others: hyperbolic (arXiv 2509.05218), and hybrid for images and text
    (arXiv 2505.20444).

    Not verified: the rule, which is read from works that use it, as neither the paper's text nor a program of the
    authors could be read; the paper may set the limit in another way near that length.

    Arguments
        train_length   default ``max_len``
        base, pairing  as in RoPE
    """

    citation = "Chen et al. 2024, arXiv 2410.21216"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \, e^{\mathrm{i} \delta \vartheta_t},"
        r" \quad \vartheta_t = b^{-2t/d} \text{ if } 2 \pi b^{2t/d} \le L, \text{ else } 0"
    )

    def __init__(self, *, train_length: int | None = None, **inherited: Any) -> None:
        super().__init__(**inherited)
        length = self.max_len if train_length is None else train_length
        if length < 7:
            field = "max_len" if train_length is None else "train_length"
            raise InputError(f"{field}: {length} was given; it must be at least 7, for one frequency to remain.")
        self.frequencies[2 * math.pi / self.frequencies > length] = 0


class RoPEPlusPlus(RoPE):
    """RoPE++: beside a head whose logit is RoPE's real part, one whose logit is the imaginary part (Liu et al. 2025).

    Head 2h is real and head 2h + 1 imaginary: its queries are turned back by a quarter turn, so that its logit is
    Im sum_t q_t conj(k_t) e^(i delta theta_t), which for a query and key of the same content is a sum of sines of the
    distance. In the released program a pair shares a query, a key and a value, either at equal heads (half of the
    projections and of the cache) or at equal cache (twice the heads). Here the number of heads is the model's, the
    second of a pair takes queries and keys of the first (its own are idle), and values stay each head's own. If the
    number of heads is odd, the last is real: ours.

    Arguments
        heads          ``shared``: queries and keys of a pair are the first one's, as published; ``own``: each its own
        base, pairing  as in RoPE; the program pairs in halves
    """

    citation = "Liu et al. 2025, arXiv 2512.07525"
    formula = (
        r"\mathrm{Re}\, z_{2h},\; \mathrm{Im}\, z_{2h},"
        r" \quad z_h = \sum_t q_{h,t}\, \overline{k_{h,t}}\, e^{\mathrm{i}\delta\theta_t}"
    )

    def __init__(
        self, *, heads: Literal["shared", "own"] = "shared", pairing: Pairing = "half", **inherited: Any
    ) -> None:
        super().__init__(pairing=pairing, **inherited)
        self.heads = choose("heads", heads, ("shared", "own"))
        if self.num_heads < 2:
            raise InputError(f"num_heads: {self.num_heads} was given; a real and an imaginary head are at least 2.")
        self.imaginary = self.register_exact("imaginary", torch.arange(self.num_heads) % 2 == 1)
        self.source = self.register_exact("source", torch.arange(self.num_heads) // 2 * 2)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        if self.heads == "shared":
            q, k = q.index_select(1, self.source), k.index_select(1, self.source)
        if self.pairing == "half":
            a, b = q.chunk(2, dim=-1)
            back = torch.cat((b, -a), dim=-1)
        else:
            a, b = q.unflatten(-1, (-1, 2)).unbind(-1)
            back = torch.stack((b, -a), dim=-1).flatten(-2)
        q = torch.where(self.imaginary[:, None, None], back, q)
        return super().rotate(q, k, q_positions, k_positions)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "H n D"]:
        """e^(i delta theta_t) of real heads, -i e^(i delta theta_t) of imaginary ones."""
        kernel = super().kernel(offsets)
        return torch.where(self.imaginary[:, None, None], -1j * kernel, kernel)


ENCODINGS: dict[str, type[PositionalEncoding]] = {
    "resonance-rope": ResonanceRoPE,
    "hope": HoPE,
    "rope-plus-plus": RoPEPlusPlus,
}
