"""Queries and keys as polar vectors: position turns the phase, content sets the magnitude, and perhaps the phase."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import Keys, Positions, Queries, Turned, phases_of, rotary_frequencies, turns, widened
from toeplens.encodings.rotary import RoPE
from toeplens.ground import choose


class PoPE(PositionalEncoding):
    """Polar coordinate position embedding: magnitudes say what, phases say where (Gopalakrishnan et al. 2025).

    Each of the d dimensions is a complex number of magnitude softplus(x_c) and phase i theta_c, with d frequencies
    theta_c = base^(-c/d), c = 0..d-1; a key's phase has a learned delta_c in [-2 pi, 0] besides. Queries and keys
    become 2d wide; the scale of the logits stays 1/sqrt(d). The bounds on delta are kept by clamping, so that a value
    outside them receives no gradient, as in x-transformers.

    Arguments
        base    theta_c = base^(-c/d)
        init    delta's start: ``zero`` (generalises better to longer input, says the paper) or ``uniform`` in its range
        shared  one delta for all layers; else each has its own (x-transformers shares it)
    """

    coupling = "rotation"
    citation = "Gopalakrishnan et al. 2025, arXiv 2509.10534"
    formula = (
        r"\sum_{c=1}^{d} \mathrm{softplus}(q_c)\, \mathrm{softplus}(k_c) \cos(\delta \theta_c - \Delta_c),"
        r" \quad \theta_c = b^{-(c-1)/d}"
    )
    frequencies: Tensor

    def __init__(
        self, *, base: float = 10000.0, init: Literal["zero", "uniform"] = "zero", shared: bool = False, **sizes: int
    ) -> None:
        super().__init__(**sizes)
        self.shared = shared
        self.register_exact("frequencies", rotary_frequencies(2 * self.head_dim, base))
        lowest = -2 * math.pi if choose("init", init, ("zero", "uniform")) == "uniform" else 0.0
        self.delta = self.learned((self.num_heads, self.head_dim), partial(nn.init.uniform_, a=lowest, b=0.0))

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        q_phases, k_phases = (phases_of(positions, self.frequencies) for positions in (q_positions, k_positions))
        return _polar(q, q_phases), _polar(k, k_phases + self._shift().unsqueeze(-2))

    def _shift(self) -> Float[Tensor, "H d"]:
        return self.delta.to(torch.float64).clamp(-2 * math.pi, 0)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "H d D"]:
        """e^(i (offset theta_c - delta_c)), so that a logit is Re sum_c softplus(q_c) softplus(k_c) kernel_c."""
        phases = self.frequencies.unsqueeze(-1) * offsets.to(torch.float64) - self._shift().unsqueeze(-1)
        return turns(phases)


def _polar(x: Float[Tensor, "B H N d"], phases: Float[Tensor, "*_B #H N d"]) -> Float[Tensor, "B H N e"]:
    """The vectors of magnitude softplus(x) at the given phases: d real parts, then d imaginary ones."""
    wide = widened(x.dtype)
    size = F.softplus(x.to(wide))
    return torch.cat((size * phases.cos().to(wide), size * phases.sin().to(wide)), dim=-1).to(x.dtype)


class ComplexFormer(RoPE):
    """RoPE whose heads also learn how the angle between query and key counts (Shao et al. 2025; uncertain, see below).

    The paper (withdrawn by its authors) says in its abstract that a head turns real queries and keys into polar
    complex vectors and takes the real part of their product under a rotation by Adapt(AS_ij) + Delta(P_ij), AS the
    difference of their own phases and P that of their positions. It does not say what Adapt and Delta are. This
    reading takes the affine Adapt of its predecessor EulerFormer (arXiv 2403.17729), with a factor and a shift for
    each head and pair, and RoPE's angle for Delta:

        logit = sum_t |q_t| |k_t| cos(a_t (arg q_t - arg k_t) + b_t + (i - j) theta_t)

    which starts as RoPE (a = 1, b = 0) and factorises into a query and a key, so that it depends on q_i, k_j and i - j
    alone: by our definition its position part is not data-dependent. For a_t other than an integer the logit jumps
    where an argument passes pi. Its `kernel` is the rotation's, between the adapted queries and keys.

    Not verified: all of it but that sentence, as neither the paper's text nor a program could be read.

    Arguments
        base, pairing  as in RoPE
    """

    citation = "Shao et al. 2025, arXiv 2505.10222 (withdrawn; read from its abstract)"
    formula = r"\sum_t |q_t| |k_t| \cos\left(a_t (\arg q_t - \arg k_t) + b_t + \delta \theta_t\right)"
    shared = False

    def __init__(self, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.factor = self.learned((self.num_heads, self.head_dim // 2), nn.init.ones_)
        self.offset = self.learned((self.num_heads, self.head_dim // 2), nn.init.zeros_)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        adapted_q, adapted_k = self._adapt(q, self.offset), self._adapt(k, torch.zeros_like(self.offset))
        turned_q, turned_k = super().rotate(adapted_q, adapted_k, q_positions, k_positions)
        return turned_q.to(q.dtype), turned_k.to(k.dtype)

    def _adapt(self, x: Float[Tensor, "B H N d"], offset: Float[Tensor, "H n"]) -> Float[Tensor, "B H N d"]:
        """Each pair with its phase multiplied by the factor and moved by the offset, in float32 or better."""
        wide = x.to(widened(x.dtype))
        a, b = wide.chunk(2, dim=-1) if self.pairing == "half" else wide.unflatten(-1, (-1, 2)).unbind(-1)
        nothing = a.abs() + b.abs() < 1e-18  # has no phase, and the phase of what is nearly nothing has no derivative
        a = torch.where(nothing, 1.0, a)
        size = torch.where(nothing, 0.0, torch.hypot(a, b))
        phase = self.factor.to(wide.dtype).unsqueeze(-2) * torch.atan2(b, a) + offset.to(wide.dtype).unsqueeze(-2)
        pair = (size * phase.cos(), size * phase.sin())
        return torch.cat(pair, dim=-1) if self.pairing == "half" else torch.stack(pair, dim=-1).flatten(-2)


ENCODINGS = {"pope": PoPE, "complexformer": ComplexFormer}
