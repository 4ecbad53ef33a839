"""Other rotations: polar vectors, Fourier series of angles, circular shifts of heads, headings."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import phases_of, require_even, require_train_length, rotary_frequencies, turns, widened
from toeplens.encodings.rotary import Pairing, RoPE, Rotary, from_pairs, pairs_of, turn, turn_by
from toeplens.encodings.shapes import Frequencies, Keys, Positions, Queries, Turned
from toeplens.ground import invalid
from toeplens.ground.options import NotNegative, Positive


class PoPE(PositionalEncoding):
    """Polar coordinate position embedding: magnitudes carry content, phases position (Gopalakrishnan et al. 2025).

    Each of the d dimensions is a complex number of magnitude softplus(x_c) and phase i theta_c, with d frequencies
    theta_c = base^(-c/d), c = 0..d-1. A learned delta_c in [-2 pi, 0] is added to a key's phase. Queries and keys
    become 2d wide; the scale of the logits stays 1/sqrt(d). delta is clamped to its range, so a value
    outside it receives no gradient, as in x-transformers.

    Arguments
        base    theta_c = base^(-c/d)
        init    initial delta: ``zero`` (which generalises better to longer input, says the paper) or ``uniform``
        shared  one delta for all layers (as in x-transformers); otherwise one per layer
    """

    coupling = "rotation"
    citation = "Gopalakrishnan et al. 2025, arXiv 2509.10534"
    formula = (
        r"\sum_{c=1}^{d} \mathrm{softplus}(q_c)\, \mathrm{softplus}(k_c) \cos(\delta \theta_c - \Delta_c),"
        r" \quad \theta_c = b^{-(c-1)/d}"
    )

    def __init__(
        self, *, base: float = 10000.0, init: Literal["zero", "uniform"] = "zero", shared: bool = False, **sizes: int
    ) -> None:
        super().__init__(**sizes)
        self.shared = shared
        self.frequencies = self.register_exact("frequencies", rotary_frequencies(2 * self.head_dim, base))
        lowest = -2 * math.pi if init == "uniform" else 0.0
        self.delta = self.learned((self.num_heads, self.head_dim), partial(nn.init.uniform_, a=lowest, b=0.0))

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        q_phases, k_phases = (phases_of(positions, self.frequencies) for positions in (q_positions, k_positions))
        return _polar(q, q_phases), _polar(k, k_phases + self._shift().unsqueeze(-2))

    def _shift(self) -> Float[Tensor, "H d"]:
        return self.delta.to(torch.float64).clamp(-2 * math.pi, 0)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "H d D"]:
        """e^(i (offset theta_c - delta_c)), so that a logit is Re sum_c softplus(q_c) softplus(k_c) kernel_c."""
        return turns(self.frequencies.unsqueeze(-1) * offsets.to(torch.float64) - self._shift().unsqueeze(-1))


def _polar(x: Float[Tensor, "B H N d"], phases: Float[Tensor, "*_B #H N d"]) -> Float[Tensor, "B H N e"]:
    """Vectors of magnitude softplus(x) at the given phases: d real parts, then d imaginary ones."""
    wide = widened(x.dtype)
    size = F.softplus(x.to(wide))
    return torch.cat((size * phases.cos().to(wide), size * phases.sin().to(wide)), dim=-1).to(x.dtype)


class ComplexFormer(RoPE):
    """RoPE with a learned map of the phase differences between query and key (Shao et al. 2025; unverified, see below).

    The abstract of the paper (withdrawn by its authors) says that a head converts real queries and keys to polar
    complex vectors and takes the real part of their product under a rotation by Adapt(AS_ij) + Delta(P_ij), with AS the
    difference of their own phases and P that of their positions. It does not define Adapt and Delta. This
    reading takes the affine Adapt of its predecessor EulerFormer (arXiv 2403.17729), with a factor and a shift for
    each head and pair, and RoPE's angle for Delta:

        logit = sum_t |q_t| |k_t| cos(a_t (arg q_t - arg k_t) + b_t + (i - j) theta_t)

    It starts as RoPE (a = 1, b = 0). By our definition its position part is not data-dependent. For a_t other than an
    integer the logit is discontinuous where an argument passes pi. `kernel` is that of the rotation, between the
    adapted queries and keys.

    Not verified: everything except that sentence, as neither the paper's text nor code was available.
    """

    citation = "Shao et al. 2025, arXiv 2505.10222 (withdrawn; read from its abstract)"
    formula = r"\sum_t |q_t| |k_t| \cos\left(a_t (\arg q_t - \arg k_t) + b_t + \delta \theta_t\right)"
    shared = False

    def __init__(self, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.factor = self.learned((self.num_heads, self.head_dim // 2), nn.init.ones_)
        self.offset = self.learned((self.num_heads, self.head_dim // 2), nn.init.zeros_)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        adapted = self._adapt(q, self.offset), self._adapt(k, torch.zeros_like(self.offset))
        turned_q, turned_k = super().rotate(*adapted, q_positions, k_positions)
        return turned_q.to(q.dtype), turned_k.to(k.dtype)

    def _adapt(self, x: Float[Tensor, "B H N d"], offset: Float[Tensor, "H n"]) -> Float[Tensor, "B H N d"]:
        """Each pair with its phase multiplied by the factor and shifted by the offset, in at least float32."""
        wide = x.to(widened(x.dtype))
        a, b = pairs_of(wide, self.pairing)
        nothing = a.abs() + b.abs() < 1e-18  # zero has no phase, and near zero its derivative explodes
        a = torch.where(nothing, 1.0, a)
        size = torch.where(nothing, 0.0, torch.hypot(a, b))
        phase = self.factor.to(wide.dtype).unsqueeze(-2) * torch.atan2(b, a) + offset.to(wide.dtype).unsqueeze(-2)
        return from_pairs(size * phase.cos(), size * phase.sin(), self.pairing)


class FoPE(PositionalEncoding):
    """Fourier position embedding (Hua et al. 2024), as computed by its released code.

    RoPE frequencies below 2 pi / train_length, whose full period training never shows, are dropped; D remain. Each of
    O = min(D, d/4) pairs then has sum_f C_fo cos(i theta_f) instead of its cosine and sum_f S_fo sin(i theta_f) instead
    of its sine. Each head has its own matrices, initialised as the identity (if D > O, pair o starts from frequency
    o ceil(D/O)) plus Xavier noise. Such a pair is not a rotation, and the logit is not a function of i - j.

    The released code pads the sines of the pairs beyond O with 1, which rotates them by 45 degrees and doubles their
    part of the logit. The paper gives them frequency 0, the default here. The paper's formula would give every kept
    frequency its own pair; here the code's d/4 is used.

    Arguments
        gain          of the Xavier noise; 0.3 in the code (its configurations: 0.3 to 0.6, growing with the model)
        learnable     train the matrices; by default they stay fixed, as in the code
        train_length  sets the lowest frequency (default: ``max_len``)
        padding       ``identity`` (sine 0) or ``ones`` (the released code) for the pairs without a series
        base, pairing as in RoPE; the released code uses halves
    """

    coupling = "rotation"
    toeplitz = False
    shared = False
    citation = "Hua et al. 2024, arXiv 2412.17739"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \, h_t(i) \overline{h_t(j)},"
        r" \quad h_t(i) = \sum_f C_{ft} \cos(i \theta_f) + \mathrm{i} \sum_f S_{ft} \sin(i \theta_f)"
    )
    cosines: Tensor
    sines: Tensor

    def __init__(
        self,
        *,
        gain: NotNegative = 0.3,
        learnable: bool = False,
        train_length: int | None = None,
        padding: Literal["identity", "ones"] = "identity",
        base: float = 10000.0,
        pairing: Pairing = "half",
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        require_even("head_dim", self.head_dim)
        self.gain, self.padding = gain, padding
        self.pairing: Pairing = pairing
        length = require_train_length(train_length, self.max_len)
        if self.head_dim < 4:
            raise invalid("head_dim", "be at least 4, for one Fourier series", self.head_dim)
        frequencies = rotary_frequencies(self.head_dim, base)
        self.frequencies = self.register_exact("frequencies", frequencies[frequencies >= 2 * math.pi / length])
        kept = len(self.frequencies)
        size = (self.num_heads, kept, min(kept, self.head_dim // 4))
        for name in ("cosines", "sines"):
            register = self.register_parameter if learnable else self.register_buffer
            register(name, nn.Parameter(torch.empty(size)) if learnable else torch.empty(size))
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
        """The series that replace cosines and sines: [H, N, n], or [B, H, N, n] for positions per sequence."""
        phases = phases_of(positions, self.frequencies)
        wide = widened(dtype)
        still = (0, self.head_dim // 2 - self.cosines.shape[-1])
        cosine = F.pad(phases.cos() @ self.cosines.double(), still, value=1.0)
        sine = F.pad(phases.sin() @ self.sines.double(), still, value=1.0 if self.padding == "ones" else 0.0)
        return cosine.to(wide), sine.to(wide)


class RollPE(PositionalEncoding):
    """Queries and keys shifted circularly along the head's dimensions (van de Geijn et al. 2025).

    The query at position i becomes torch.roll(q, speed * i, -1). In the Fourier basis, a shift by a rotates component
    f = 1, 2, ... by 2 pi f a/d: RoPE in another basis, with multiples of 2 pi speed/d as frequencies. It is computed
    that way, so that a shift may be a fraction of a dimension. Component 0 (the mean) is unchanged. For even d,
    component d/2 (the alternating sum) has no fractional rotation: it is multiplied by (-1)^(i r), with r the integer
    nearest to ``speed``, which is torch.roll's factor for integer speeds; positions must then be integers.

    Not verified: the paper's speed; 1, the discrete roll, is our choice.

    Arguments
        speed  dimensions per position
    """

    coupling = "rotation"
    citation = "van de Geijn et al. 2025, arXiv 2511.11668"
    formula = r"\sum_c q_c \, k_{(c + s \delta) \bmod d}"

    def __init__(self, *, speed: Positive = 1.0, **sizes: int) -> None:
        super().__init__(**sizes)
        d = self.head_dim
        if d < 3:
            raise invalid("head_dim", "be at least 3, for a Fourier component to turn", d)
        self.speed = speed
        component = torch.arange(1, (d + 1) // 2, dtype=torch.float64)
        angles = 2 * math.pi / d * torch.arange(d, dtype=torch.float64).unsqueeze(-1) * component
        waves = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(-2) * math.sqrt(2 / d)
        still = [torch.full((d, 1), d**-0.5, dtype=torch.float64)]
        if d % 2 == 0:
            still.append(still[0] * (1 - 2 * (torch.arange(d).unsqueeze(-1) % 2)))
        self.basis = self.register_exact("basis", torch.cat((waves, *still), dim=-1))
        self.frequencies = self.register_exact("frequencies", 2 * math.pi * speed / d * component)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        return self._roll(q, q_positions), self._roll(k, k_positions)

    def _roll(self, x: Float[Tensor, "B H N d"], positions: Positions) -> Float[Tensor, "B H N d"]:
        wide = widened(x.dtype)
        basis = self.basis.to(wide)
        sizes = (2 * len(self.frequencies), 1, self.head_dim % 2 == 0)
        waves, mean, alternating = (x.to(wide) @ basis).split(sizes, dim=-1)
        turned = turn_by(waves, phases_of(positions, self.frequencies), "interleaved")
        signs = self._signs(positions).to(wide)[..., None, :, None]
        return (torch.cat((turned, mean, alternating * signs), dim=-1) @ basis.T).to(x.dtype)

    def _signs(self, positions: Positions) -> Positions:
        """(-1)^(i r): the factor of the alternating component."""
        return 1 - 2 * (positions * round(self.speed) % 2)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 n D"]:
        """e^(i delta theta_f) of the Fourier components f = 0, 1, ..., d//2."""
        waves = turns(self.frequencies.unsqueeze(-1) * offsets.to(torch.float64))
        rows = [torch.ones_like(waves[:1]), waves]
        if self.head_dim % 2 == 0:
            rows.append(self._signs(offsets).to(waves.dtype).unsqueeze(0))
        return torch.cat(rows).unsqueeze(0)


class DRoPE(Rotary):
    """Directional RoPE: every pair is rotated by the same angle, the heading of an agent (Zhao et al. 2025).

    A position is a heading, in integer units of ``step`` (default: one degree). With token indices as positions, the
    logit repeats every 2 pi/step tokens. Not included: the paper's combination with a rotary encoding of locations, in
    other heads or other dimensions of the same head.

    Arguments
        step     the angle of one position unit, in radians; the resolution is ours, the paper's angles are real numbers
        pairing  as in RoPE
    """

    citation = "Zhao et al. 2025, arXiv 2503.15029"
    formula = r"\mathrm{Re} \sum_t q_t \bar k_t \, e^{\mathrm{i} \delta \varphi}"

    def __init__(self, *, step: Positive = 2 * math.pi / 360, pairing: Pairing = "interleaved", **sizes: int) -> None:
        require_even("head_dim", sizes["head_dim"])
        same = torch.full((1, sizes["head_dim"] // 2), step, dtype=torch.float64)
        super().__init__(same, pairing=pairing, **sizes)


class RopeLearned(RoPE):
    """RoPE with learned frequencies (``learned_freq`` of rotary-embedding-torch).

    The parameter is an offset from RoPE's frequencies and receives the gradient that the frequency would receive. The
    base frequencies stay in float64, so casting the model to half precision does not round them.

    Arguments
        per_head       separate frequencies for each head; otherwise all heads share them, as published
        shared         one set for all layers, as published; otherwise one per layer
    """

    citation = "Wang, rotary-embedding-torch, learned_freq"
    formula = r"\mathrm{Re} \sum_t q_t \bar k_t \, e^{\mathrm{i} \delta (\theta_t + \epsilon_t)}"

    def __init__(self, *, per_head: bool = False, shared: bool = True, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.shared = shared
        self.offset = self.learned((self.num_heads if per_head else 1, self.head_dim // 2), nn.init.zeros_)

    def frequencies_at(self, k_positions: Positions) -> Frequencies:
        return self.frequencies + self.offset.to(torch.float64)


class HARoPE(RoPE):
    """A learned map applied to each head's queries and keys before the rotation (Li et al. 2025).

    M = U diag(s) V^T with U, V the exponentials of skew-symmetric matrices and s = softplus(sigma) + 10^-6. M starts
    within 10^-6 of the identity, so the encoding starts as RoPE. The paper and its code use it with axial RoPE on
    images; here positions are those of a sequence. `kernel` is that of the rotation, between the mapped queries and
    keys.

    Arguments
        map            ``inverse``: M on queries and M^-T on keys, as in the released code, so that at offset 0 the
                       logit is q . k; ``shared``: M on both, as the abstract can be read
    """

    citation = "Li et al. 2025, arXiv 2510.10489"
    formula = r"q^\top M^\top R_{j-i} M^{-\top} k, \quad M = U \,\mathrm{diag}(s)\, V^\top"
    shared = False

    def __init__(self, *, map: Literal["inverse", "shared"] = "inverse", **inherited: Any) -> None:
        super().__init__(**inherited)
        self.map = map
        shape = (self.num_heads, self.head_dim, self.head_dim)
        self.left, self.right = (self.learned(shape, nn.init.zeros_) for _ in range(2))
        self.sigma = self.learned((self.num_heads, self.head_dim), partial(nn.init.constant_, val=math.log(math.e - 1)))

    def maps(self, dtype: torch.dtype) -> tuple[Float[Tensor, "H d d"], Float[Tensor, "H d d"]]:
        """The matrices that queries and keys are multiplied by."""
        u, v = (torch.matrix_exp(0.5 * (a - a.mT)) for a in (self.left.to(dtype), self.right.to(dtype)))
        s = (F.softplus(self.sigma.to(dtype)) + 1e-6).unsqueeze(-2)
        forward = (u * s) @ v.mT
        return forward, (u / s) @ v.mT if self.map == "inverse" else forward

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        wide = widened(q.dtype)
        on_q, on_k = self.maps(wide)
        turned_q, turned_k = super().rotate(q.to(wide) @ on_q.mT, k.to(wide) @ on_k.mT, q_positions, k_positions)
        return turned_q.to(q.dtype), turned_k.to(k.dtype)


ENCODINGS: dict[str, type[PositionalEncoding]] = {
    "pope": PoPE,
    "complexformer": ComplexFormer,
    "fope": FoPE,
    "rollpe": RollPE,
    "drope": DRoPE,
    "rope-learned": RopeLearned,
    "harope": HARoPE,
}
