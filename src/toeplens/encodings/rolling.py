"""Two rotations that repeat: heads rolled along their dimensions, and headings."""

from __future__ import annotations

import math

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import (
    Keys,
    Positions,
    Queries,
    Turned,
    phases_of,
    require_even,
    require_number,
    turns,
    widened,
)
from toeplens.encodings.rotary import Pairing, Rotary, turn
from toeplens.ground import InputError


class RollPE(PositionalEncoding):
    """Queries and keys rolled circularly along the head's dimensions (van de Geijn et al. 2025).

    The query at position i becomes torch.roll(q, speed * i, -1). In the basis of the discrete Fourier transform a shift
    by a turns component f = 1, 2, ... by the angle 2 pi f a/d: a RoPE in another basis, with frequencies that are the
    multiples of 2 pi speed/d. That is how it is computed, with a fixed orthogonal matrix there and back, so that a
    shift may be a fraction of a dimension. Component 0 (the mean) stays. Where d is even, component d/2 (the
    alternating sum) is real and has no fraction of a turn that is real: it is multiplied by (-1)^(i r), r the whole
    number nearest to ``speed``, which is torch.roll's factor for a whole speed and keeps a group for any.

    Not verified: the paper's own speed; 1, the discrete roll, is ours.

    Arguments
        speed  dimensions per position
    """

    coupling = "rotation"
    citation = "van de Geijn et al. 2025, arXiv 2511.11668"
    formula = r"\sum_c q_c \, k_{(c + s \delta) \bmod d}"
    frequencies: Tensor
    basis: Tensor

    def __init__(self, *, speed: float = 1.0, **sizes: int) -> None:
        super().__init__(**sizes)
        d = self.head_dim
        if d < 3:
            raise InputError(f"head_dim: {d} was given; it must be at least 3, for a Fourier component to turn.")
        self.speed = require_number("speed", speed, over=0)
        component = torch.arange(1, (d + 1) // 2, dtype=torch.float64)
        angles = 2 * math.pi / d * torch.arange(d, dtype=torch.float64).unsqueeze(-1) * component
        waves = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(-2) * math.sqrt(2 / d)
        still = [torch.full((d, 1), d**-0.5, dtype=torch.float64)]
        if d % 2 == 0:
            still.append(still[0] * (1 - 2 * (torch.arange(d).unsqueeze(-1) % 2)))
        self.register_exact("basis", torch.cat((waves, *still), dim=-1))
        self.register_exact("frequencies", 2 * math.pi * speed / d * component)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        return self._roll(q, q_positions), self._roll(k, k_positions)

    def _roll(self, x: Float[Tensor, "B H N d"], positions: Positions) -> Float[Tensor, "B H N d"]:
        wide = widened(x.dtype)
        basis = self.basis.to(wide)
        waves, mean, alternating = (x.to(wide) @ basis).split(
            (2 * len(self.frequencies), 1, self.head_dim % 2 == 0), dim=-1
        )
        phases = phases_of(positions, self.frequencies)
        turned = turn(waves, phases.cos().to(wide), phases.sin().to(wide), "interleaved")
        signs = self._signs(positions).to(wide)[..., None, :, None]
        return (torch.cat((turned, mean, alternating * signs), dim=-1) @ basis.T).to(x.dtype)

    def _signs(self, positions: Positions) -> Positions:
        """(-1)^(i r): what the alternating component is multiplied by."""
        return 1 - 2 * (positions * round(self.speed) % 2)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 n D"]:
        """e^(i delta theta_f) of the Fourier components f = 0, 1, ..., d//2."""
        waves = turns(self.frequencies.unsqueeze(-1) * offsets.to(torch.float64))
        rows = [torch.ones_like(waves[:1]), waves]
        if self.head_dim % 2 == 0:
            rows.append(self._signs(offsets).to(waves.dtype).unsqueeze(0))
        return torch.cat(rows).unsqueeze(0)


class DRoPE(Rotary):
    """Directional RoPE: every pair turns by the same angle, the heading of an agent (Zhao et al. 2025).

    A position is a heading, in whole units of ``step``: with the default of one degree, positions 0 and 360 are the
    same direction and the logit depends on the difference of headings, modulo a whole turn. Given running numbers
    instead, it repeats every 2 pi/step tokens. The paper also joins it with a rotary encoding of places, in other heads
    or in other dimensions of the same head; that is not part of this.

    Arguments
        step     the angle of one position unit, in radians; the resolution is ours, the paper's angles are real numbers
        pairing  as in RoPE
    """

    citation = "Zhao et al. 2025, arXiv 2503.15029"
    formula = r"\mathrm{Re} \sum_t q_t \bar k_t \, e^{\mathrm{i} \delta \varphi}"

    def __init__(self, *, step: float = 2 * math.pi / 360, pairing: Pairing = "interleaved", **sizes: int) -> None:
        require_even("head_dim", sizes["head_dim"])
        require_number("step", step, over=0)
        same = torch.full((1, sizes["head_dim"] // 2), step, dtype=torch.float64)
        super().__init__(same, pairing=pairing, **sizes)


ENCODINGS = {"rollpe": RollPE, "drope": DRoPE}
