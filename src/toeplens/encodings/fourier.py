"""FoPE: each pair's cosine and sine become sums of several frequencies' cosines and sines."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import (
    Keys,
    Positions,
    Queries,
    Turned,
    phases_of,
    require_even,
    require_number,
    rotary_frequencies,
    widened,
)
from toeplens.encodings.rotary import Pairing, pairing_of, turn
from toeplens.ground import InputError, choose


class FoPE(PositionalEncoding):
    """Fourier position embedding (Hua et al. 2024), as its released program computes it.

    Of RoPE's frequencies those under 2 pi / train_length are dropped, since training never shows their whole period; D
    remain. Each of O = min(D, d/4) pairs then has sum_f C_fo cos(i theta_f) in the place of its cosine and
    sum_f S_fo sin(i theta_f) in that of its sine, with matrices of their own for each head, for cosines and for sines:
    the unit matrix (if D > O, pair o starts from frequency o ceil(D/O)) plus Xavier noise. A pair of such series is no
    rotation: it keeps no norms, and the logit is not a function of i - j.

    Differences: the program pads the sines of the pairs beyond O with 1, which turns them by 45 degrees and doubles
    their part of the logit; the paper gives them frequency 0, so sine 0, and so does the default here. The paper's
    formula would give every frequency that is kept a pair of its own; the program's d/4 is followed.

    Arguments
        gain          of the Xavier noise; the program's 0.3 (its configurations: 0.3 to 0.6, growing with the model)
        learnable     train the matrices; by default they stay as drawn, as in the program
        train_length  sets the lowest frequency; ``max_len`` by default
        padding       ``identity`` (sine 0) or ``ones`` (the released program) for the pairs without a series
        base, pairing as in RoPE; the program pairs in halves
    """

    coupling = "rotation"
    toeplitz = False
    shared = False
    citation = "Hua et al. 2024, arXiv 2412.17739"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \, h_t(i) \overline{h_t(j)},"
        r" \quad h_t(i) = \sum_f C_{ft} \cos(i \theta_f) + \mathrm{i} \sum_f S_{ft} \sin(i \theta_f)"
    )
    frequencies: Tensor
    cosines: Tensor
    sines: Tensor

    def __init__(
        self,
        *,
        gain: float = 0.3,
        learnable: bool = False,
        train_length: int | None = None,
        padding: Literal["identity", "ones"] = "identity",
        base: float = 10000.0,
        pairing: Pairing = "half",
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        require_even("head_dim", self.head_dim)
        self.gain = require_number("gain", gain, at_least=0)
        self.padding = choose("padding", padding, ("identity", "ones"))
        self.pairing: Pairing = pairing_of(pairing)
        length = self.max_len if train_length is None else train_length
        if length < 7:
            field = "max_len" if train_length is None else "train_length"
            raise InputError(f"{field}: {length} was given; it must be at least 7, for one frequency to remain.")
        if self.head_dim < 4:
            raise InputError(f"head_dim: {self.head_dim} was given; it must be at least 4, for one Fourier series.")
        frequencies = rotary_frequencies(self.head_dim, base)
        self.register_exact("frequencies", frequencies[frequencies >= 2 * math.pi / length])
        kept = len(self.frequencies)
        size = (self.num_heads, kept, min(kept, self.head_dim // 4))
        for name in ("cosines", "sines"):
            if learnable:
                setattr(self, name, nn.Parameter(torch.empty(size)))
            else:
                self.register_buffer(name, torch.empty(size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for matrix in (self.cosines, self.sines):
            nn.init.xavier_normal_(matrix, gain=self.gain)
            kept, series = matrix.shape[1:]
            own = torch.arange(0, kept, math.ceil(kept / series), device=matrix.device)
            matrix[:, own, torch.arange(len(own), device=matrix.device)] += 1

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        k_tables = self.tables(k_positions, k.dtype)
        q_tables = k_tables if q_positions is k_positions else self.tables(q_positions, q.dtype)
        return turn(q, *q_tables, self.pairing), turn(k, *k_tables, self.pairing)

    def tables(self, positions: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What stands for cosines and sines: [H, N, n], or [B, H, N, n] for positions by sequence."""
        phases = phases_of(positions, self.frequencies)
        wide = widened(dtype)
        still = (0, self.head_dim // 2 - self.cosines.shape[-1])
        cosine = F.pad(phases.cos() @ self.cosines.double(), still, value=1.0)
        sine = F.pad(phases.sin() @ self.sines.double(), still, value=1.0 if self.padding == "ones" else 0.0)
        return cosine.to(wide), sine.to(wide)


ENCODINGS = {"fope": FoPE}
