"""Rotations exp(sum_a p_a G_a) with learned skew-symmetric generators G_a, one for each coordinate of a position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings import kit
from toeplens.encodings.additive import geometric_slopes
from toeplens.encodings.base import AttentionInputs, CachedFeatures, KeyFeatures, PositionalEncoding
from toeplens.encodings.coordinates import GridPositions
from toeplens.encodings.rotary import rotate_by
from toeplens.encodings.shapes import Keys, PairMatrix, Positions, Queries, RotatedQK, Stream
from toeplens.utils import invalid
from toeplens.utils.options import PositiveInt


class _VectorRotation(PositionalEncoding):
    """A rotation of each vector by its own position; subclasses define `rotate_vectors`."""

    coupling = "rotation"
    shared = False

    def rotate_vectors(self, x: Float[Tensor, "*B H N d"], positions: Positions) -> Float[Tensor, "*B H N d"]:
        """``x`` (float32 or float64) after its rotation."""
        raise NotImplementedError

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> RotatedQK:
        wide = kit.wide_dtype(q.dtype)
        if q_positions is k_positions and q.shape == k.shape:  # with the same matrices
            rotated = self.rotate_vectors(torch.stack((q, k)).to(wide), q_positions).unbind(0)
        else:
            rotated = self.rotate_vectors(q.to(wide), q_positions), self.rotate_vectors(k.to(wide), k_positions)
        return rotated[0].to(q.dtype), rotated[1].to(k.dtype)


class _GeneratedRotation(GridPositions, _VectorRotation):
    """Commuting or free generators for one or several coordinates, which are divided by ``extent``."""

    def __init__(
        self, *, axes: int, grid: Sequence[int] | None, extent: Sequence[float] | None = None, **sizes: int
    ) -> None:
        super().__init__(**sizes)
        self.set_grid(axes, grid)
        units = torch.tensor([1.0] * axes if extent is None else list(extent), dtype=torch.float64)
        if units.shape != (axes,) or not bool(((units > 0) & units.isfinite()).all()):
            raise invalid("extent", f"be {axes} positive numbers, one an axis", units.tolist())
        self.extent = self.register_exact("extent", units)

    def coordinates(self, positions: Positions) -> Float[Tensor, "*B N axes"]:
        """The coordinates in units of ``extent``, in float64, also for token indices."""
        return super().coordinates(positions) / self.extent

    def spectrum(self) -> Float[Tensor, "H axes n"]:
        """The angles of each plane for one unit of each coordinate, if the generators commute; in float64."""
        raise NotImplementedError

    def phases(self, positions: Positions) -> Float[Tensor, "*B H N n"]:
        """The angles of commuting generators' planes."""
        return torch.einsum("...na,has->...hns", self.coordinates(positions), self.spectrum())

    def kernel(self, offsets: Int[Tensor, "D *axes"]) -> Complex[Tensor, "H n D"] | None:
        """e^(i delta . lambda) of each plane; None if generators do not commute, and for offsets [D] on a grid."""
        if not self.toeplitz or (offsets.ndim == 1 and self.grid is not None and self.axes > 1):
            return None
        return kit.complex_exp(self.phases(offsets).transpose(-2, -1))


class _ExponentialRotation(_GeneratedRotation):
    """The matrix exponential of block-diagonal `generators`, computed in float64 for each token."""

    extent_offset: int = 0  # subtracted from the number of an axis's positions for the default extent

    def __init__(
        self,
        *,
        axes: PositiveInt = 2,
        grid: Sequence[int] | None = None,
        extent: Sequence[float] | None = None,
        **sizes: int,
    ) -> None:
        super().__init__(axes=axes, grid=grid, extent=extent, **sizes)
        if extent is None:
            lengths = torch.tensor([self.max_len] * axes if grid is None else list(grid))
            self.extent.copy_((lengths - self.extent_offset).clamp(min=1))

    def block_count(self, block: int) -> int:
        """The number of blocks of this size in a head."""
        if block < 2 or self.head_dim % block:
            raise invalid("block", f"be at least 2 and divide head_dim, which is {self.head_dim}", block)
        return self.head_dim // block

    def generators(self) -> Float[Tensor, "H axes m b b"]:
        """The skew-symmetric blocks of each axis, in float64."""
        raise NotImplementedError

    def spectrum(self) -> Float[Tensor, "H axes n"]:
        blocks = self.generators()
        vectors = torch.linalg.eigh(1j * blocks.detach().sum(1))[1]  # of a sum: commuting matrices have the same planes
        angles = torch.einsum("hmij,hamik,hmkj->hamj", vectors.conj(), 1j * blocks, vectors).real
        return angles[..., blocks.shape[-1] // 2 :].flatten(-2)

    def rotate_vectors(self, x: Float[Tensor, "*B H N d"], positions: Positions) -> Float[Tensor, "*B H N d"]:
        angles = torch.einsum("...na,hamij->...hnmij", self.coordinates(positions), self.generators())
        blocks = torch.matrix_exp(angles.contiguous()).to(x.dtype)
        return (blocks @ x.unflatten(-1, blocks.shape[-3:-1]).unsqueeze(-1)).flatten(-3)


class LieRE(_ExponentialRotation, name="liere"):
    """LieRE: a dense rotation exp(sum_a p_a G_a), one generator per axis, head and layer (Ostmeier et al. 2024).

    Only entries above the diagonal are used, as in the released code, initialised uniformly from 0 to 2 pi for
    coordinates from 0 to 1. With several axes the generators do not commute, so the logit is not a function of the
    offset. With one axis it is RoPE in a learned basis with learned frequencies. The released code does not rotate
    class tokens: give such tokens coordinates of 0. Computes a matrix exponential for each token, head and block.

    Arguments
        block   size of the generators' diagonal blocks; None: the whole head. The released code takes any
        axes    number of coordinates; published: 2 and 3
        grid    sizes of the axes, if positions are raster indices
        extent  divisor of the coordinates. By default, as in the released code, the last position of each axis is 1:
                the grid's sizes minus 1, or ``max_len`` - 1 (our choice)
    """

    citation = "Ostmeier et al. 2024, arXiv 2406.10322"
    toeplitz = False
    extent_offset = 1
    formula = r"q_i^\top e^{(\sum_a p_{i,a} G_a)^\top} e^{\sum_a p_{j,a} G_a} k_j,\quad G_a^\top = -G_a"

    def __init__(self, *, block: int | None = None, **inherited: Any) -> None:
        super().__init__(**inherited)
        block = self.head_dim if block is None else block
        self.toeplitz = self.axes == 1 or block == 2
        shape = (self.num_heads, self.axes, self.block_count(block), block, block)
        self.weight = self.new_parameter(shape, partial(nn.init.uniform_, a=0.0, b=2 * math.pi))

    def generators(self) -> Float[Tensor, "H axes m b b"]:
        upper = self.weight.to(torch.float64).triu(1)
        return upper - upper.mT


class STRING(_GeneratedRotation, name="string"):
    """STRING: the most general rotation whose logits depend only on offsets, in two cheap forms (Schenck et al. 2025).

    ``cayley``: R(p) = RoPE(p) P with an orthogonal P = (I - S)(I + S)^-1, S skew-symmetric, and RoPE's angles
    p . omega_t; S and omega are learned, one set per head and layer. ``circulant``: R(p) = exp(sum_a p_a (C_a - C_a^T))
    with circulant matrices C_a, whose first columns c_a are learned. It rotates the Fourier components by the angles
    2 sum_am p_a c_am sin(2 pi f m / d), and leaves the mean and, for even d, the alternating component unchanged.

    Not to be confused with the STRING of An et al. 2024 (arXiv 2410.18745), shifted rotary positions.

    Not verified: the initialisation, which the paper does not give. Ours is RoPE's frequencies base^(-2t/d), for
    several axes along a random direction per pair, and S = 0, so that ``cayley`` on one axis starts as RoPE.

    Arguments
        form  ``cayley``, the better one in the paper, or ``circulant``, the cheaper one
        axes  number of coordinates; published: 2 and 3
        grid  sizes of the axes, if positions are raster indices
        base  RoPE base of the initial frequencies
    """

    citation = "Schenck et al. 2025, arXiv 2502.02562"
    formula = (
        r"q_i^\top P^\top \mathrm{RoPE}(p_j - p_i) P k_j \quad\text{or}\quad"
        r" q_i^\top e^{\sum_a (p_{j,a} - p_{i,a})(C_a - C_a^\top)} k_j"
    )

    def __init__(
        self,
        *,
        form: Literal["cayley", "circulant"] = "cayley",
        axes: PositiveInt = 2,
        grid: Sequence[int] | None = None,
        base: float = 10000.0,
        **sizes: int,
    ) -> None:
        super().__init__(axes=axes, grid=grid, extent=None, **sizes)
        d = self.head_dim
        self.form = form
        pairs = d // 2 if self.form == "cayley" else (d - 1) // 2
        if self.form == "cayley":
            kit.require_even("head_dim", d)
        elif d < 3:
            raise invalid("head_dim", "be at least 3 for one pair of Fourier components", d)
        self.frequencies = self.register_exact("frequencies", kit.rotary_frequencies(d, base)[:pairs])
        if self.form == "cayley":
            self.skew = self.new_parameter((self.num_heads, d, d), nn.init.zeros_)
        else:
            rows, component = torch.arange(d).unsqueeze(-1), torch.arange(1, pairs + 1)
            angles = (rows * component).to(torch.float64) * (2 * math.pi / d)
            waves = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(-2) * math.sqrt(2 / d)
            self.waves = self.register_exact("waves", waves)
            self.sines = self.register_exact("sines", 2 * angles.sin())
        self.weight = nn.Parameter(torch.empty(self.num_heads, axes, pairs if self.form == "cayley" else d))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        omega = self.frequencies.new_ones(self.num_heads, self.axes, len(self.frequencies))
        if self.axes > 1:
            omega = nn.functional.normalize(torch.randn_like(omega), dim=1)
        omega = omega * self.frequencies
        self.weight.copy_(omega if self.form == "cayley" else omega @ self.sines.T / (2 * self.head_dim))

    def spectrum(self) -> Float[Tensor, "H axes n"]:
        weight = self.weight.to(torch.float64)
        return weight if self.form == "cayley" else weight @ self.sines

    def kernel(self, offsets: Int[Tensor, "D *axes"]) -> Complex[Tensor, "H n D"] | None:
        """e^(i delta . omega) of each pair; in the circulant form, first 1 for the unrotated components."""
        kernel = super().kernel(offsets)
        if kernel is None or self.form == "cayley":
            return kernel
        return torch.cat((torch.ones_like(kernel[:, :1]), kernel), dim=1)

    def basis(self) -> Float[Tensor, "H d d"]:
        """P of the Cayley form, in float64."""
        weight = self.skew.to(torch.float64).triu(1)
        skew, unit = weight - weight.mT, torch.eye(self.head_dim, dtype=torch.float64, device=weight.device)
        return torch.linalg.solve(unit + skew, unit - skew)  # both are polynomials in S, so they commute

    def rotate_vectors(self, x: Float[Tensor, "*B H N d"], positions: Positions) -> Float[Tensor, "*B H N d"]:
        phases = self.phases(positions)
        if self.form == "cayley":
            return rotate_by(x @ self.basis().mT.to(x.dtype), phases, "interleaved")
        waves = self.waves.to(x.dtype)
        projected = x @ waves
        return x + (rotate_by(projected, phases, "interleaved") - projected) @ waves.T


class ComRoPE(_ExponentialRotation, name="comrope"):
    """ComRoPE: commuting angle matrices, so that logits depend only on the offset (Yu et al. 2025).

    Blocks P_m - P_m^T are learned for each head and layer. In ``ap`` (axial partition) block m rotates only with axis m
    mod ``axes``. In ``ld`` (linearly dependent) it rotates with every axis, by factors theta_am shared by all
    heads. All parameters start from N(0, 1), for coordinates from 0 to 1, as in the released code. Its random shifts of
    the coordinates during training are left out.

    Not verified: the block size of the paper's experiments, which others report as 8; the code's default is 2.

    Arguments
        variant  ``ld``, the better one in the paper, or ``ap``
        block    size of the blocks (default: 8, or the next smaller power of two that fits)
        axes     number of coordinates; published: 2 and 3
        grid     sizes of the axes, if positions are raster indices
        extent   divisor of the coordinates (default: the number of positions of each axis, as published: the grid's
                 sizes, or ``max_len``, our choice)
    """

    citation = "Yu et al. 2025, arXiv 2506.03737"
    formula = (
        r"q_i^\top e^{\sum_a (p_{j,a} - p_{i,a}) A_a} k_j,\quad A_a A_b = A_b A_a,"
        r"\; A_a = \mathrm{diag}_m\, \theta_{am} (P_m - P_m^\top)"
    )

    def __init__(self, *, variant: Literal["ld", "ap"] = "ld", block: int | None = None, **inherited: Any) -> None:
        super().__init__(**inherited)
        axes = self.axes
        parts = axes if variant == "ap" else 1
        if block is None:
            block = next((size for size in (8, 4, 2) if self.head_dim % (size * parts) == 0), 2)
        count = self.block_count(block)
        if count % parts:
            got = f"{block}, which gives {count}"
            raise invalid("block", f"give a number of blocks divisible by {axes} axes", got=got)
        self.weight = self.new_parameter((self.num_heads, count, block, block), kit.normal_init(1.0))
        self.factors = None if variant == "ap" else self.new_parameter((axes, count), kit.normal_init(1.0))
        axis_mask = torch.arange(count) % axes == torch.arange(axes).unsqueeze(-1)
        self.axis_mask = self.register_exact("axis_mask", axis_mask.to(torch.float64))

    def generators(self) -> Float[Tensor, "H axes m b b"]:
        weight = self.weight.to(torch.float64)
        factors = self.axis_mask if self.factors is None else self.factors.to(torch.float64)
        return (weight - weight.mT).unsqueeze(1) * factors[..., None, None]


def _init_orthogonal(x: Float[Tensor, "H d m"]) -> None:
    """Each matrix orthogonal."""
    for matrix in x:
        nn.init.orthogonal_(matrix)


PLANE_TOLERANCE = 1e-12  # share of |a|^2 |b|^2 below which two vectors span no plane


class GRAPE(_VectorRotation, name="grape"):
    """Multiplicative GRAPE: exp(n sum_r theta_r L_r), each L(a, b) = a b^T - b a^T (Zhang et al. 2025).

    The frequencies are learned as logarithms and start as RoPE's. ``canonical`` planes are RoPE's pairs, as in the
    released code. ``orthogonal`` planes are those pairs in a learned orthogonal basis B = exp(A - A^T), which starts as
    the identity (the paper does not say how B is made). ``free`` planes are spanned by any learned a_r, b_r; their
    generators do not commute, but logits depend only on the offset (appendix D). One free plane has the closed form of
    section 2.3,

        exp(n L) x = x + sin(n s)/s (a v - b u) + (1 - cos(n s))/s^2 [g (a v + b u) - |b|^2 a u - |a|^2 b v],

    u = a.x, v = b.x, g = a.b, s^2 = |a|^2 |b|^2 - g^2; several planes are compressed to the 2r dimensions that they
    span. Free planes start orthonormal to each other, along random directions (our choice).

    Left out: the code's factor of 16 on the logarithms, which slows their learning, its opposite direction of rotation,
    and the contextual form, whose step is a gate of the token.

    Arguments
        planes    ``canonical``, ``orthogonal`` or ``free``
        count     number of free planes (default: d/2, the maximum)
        per_head  separate parameters for each head; otherwise one set for all heads, as published
        base      RoPE base of the initial frequencies
    """

    citation = "Zhang et al. 2025, arXiv 2512.07805, sections 2 and 3"
    formula = r"q_i^\top e^{(j - i) L} k_j,\quad L = \sum_r \theta_r (a_r b_r^\top - b_r a_r^\top)"

    def __init__(
        self,
        *,
        planes: Literal["canonical", "orthogonal", "free"] = "canonical",
        count: int | None = None,
        per_head: bool = False,
        base: float = 10000.0,
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        kit.require_even("head_dim", self.head_dim)
        self.planes = planes
        pairs, heads = self.head_dim // 2, self.num_heads if per_head else 1
        if count is not None and (self.planes != "free" or not 1 <= count <= pairs):
            raise invalid("count", f"be from 1 to {pairs}, with planes='free' only", count)
        start = kit.rotary_frequencies(self.head_dim, base)[:count]
        self.start = self.register_exact("start", start.log())
        self.log_frequency = self.new_parameter((heads, len(start)), nn.init.zeros_)
        self.basis = self.vectors = None
        if self.planes == "orthogonal":
            self.basis = self.new_parameter((heads, self.head_dim, self.head_dim), nn.init.zeros_)
        if self.planes == "free":
            shape = (heads, self.head_dim, 2 * len(start))
            self.vectors = self.new_parameter(shape, _init_orthogonal)

    def frequencies(self) -> Float[Tensor, "H n"]:
        """theta_r, in float64; the parameter is log theta_r relative to RoPE's."""
        return (self.start + self.log_frequency.to(torch.float64)).exp()

    def compress_generators(self) -> tuple[Float[Tensor, "H d m"], Float[Tensor, "H m m"]]:
        """The sum of free generators as E M E^T, E orthonormal: its m = 2r dimensions, and M in them; in float64."""
        assert self.vectors is not None
        span, inner = torch.linalg.qr(self.vectors.to(torch.float64))
        a, b = inner[..., 0::2] * self.frequencies().unsqueeze(-2), inner[..., 1::2]
        half = a @ b.mT
        return span, half - half.mT

    def rotate_vectors(self, x: Float[Tensor, "*B H N d"], positions: Positions) -> Float[Tensor, "*B H N d"]:
        if self.vectors is not None:
            rotate = self._rotate_one_plane if self.vectors.shape[-1] == 2 else self._rotate_planes
            return rotate(x, positions)
        phases = kit.phases_of(positions, self.frequencies())
        if self.basis is None:
            return rotate_by(x, phases, "interleaved")
        weight = self.basis.to(torch.float64)
        basis = torch.matrix_exp(weight - weight.mT).to(x.dtype)
        return rotate_by(x @ basis, phases, "interleaved") @ basis.mT

    def _rotate_one_plane(self, x: Float[Tensor, "*B H N d"], positions: Positions) -> Float[Tensor, "*B H N d"]:
        assert self.vectors is not None
        a, b = self.vectors.to(torch.float64).unbind(-1)
        aa, bb, ab = (a * a).sum(-1), (b * b).sum(-1), (a * b).sum(-1)
        s = (aa * bb - ab * ab).clamp(min=PLANE_TOLERANCE * aa * bb).sqrt()
        phases = kit.phases_of(positions, s.unsqueeze(-1) * self.frequencies())
        s, aa, bb, ab = (y[:, None, None] for y in (s, aa, bb, ab))
        first, second = (phases.sin() / s).to(x.dtype), ((1 - phases.cos()) / (s * s)).to(x.dtype)
        a, b, aa, bb, ab = (y.to(x.dtype) for y in (a.unsqueeze(-2), b.unsqueeze(-2), aa, bb, ab))
        u, v = (x * a).sum(-1, keepdim=True), (x * b).sum(-1, keepdim=True)
        return x + first * (a * v - b * u) + second * (ab * (a * v + b * u) - bb * a * u - aa * b * v)

    def _rotate_planes(self, x: Float[Tensor, "*B H N d"], positions: Positions) -> Float[Tensor, "*B H N d"]:
        span, generator = self.compress_generators()
        rotation = torch.matrix_exp(positions.to(torch.float64)[..., None, :, None, None] * generator.unsqueeze(-3))
        projected = x @ span.to(x.dtype)
        update = (rotation.to(x.dtype) @ projected.unsqueeze(-1)).squeeze(-1) - projected
        return x + update @ span.mT.to(x.dtype)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "H n D"]:
        """e^(i delta lambda) of each plane of rotation, and first 1 for the unrotated part."""
        if self.vectors is None:
            return kit.complex_exp(kit.phases_of(offsets, self.frequencies()).transpose(-2, -1))
        generator = self.compress_generators()[1]
        angles = torch.linalg.eigvalsh(1j * generator)[..., generator.shape[-1] // 2 :]
        return kit.complex_exp(kit.phases_of(offsets, F.pad(angles, (1, 0))).transpose(-2, -1))


class GRAPEAdditive(PositionalEncoding, name="grape-additive"):
    """Additive GRAPE: a penalty linear in the distance, at a rate set by the query and the key (Zhang et al. 2025).

    The bias is -|i - j| omega_h (softplus(v_h . q_i / sqrt d) + softplus(u_h . k_j / sqrt d)), generated by a unipotent
    matrix with two extra dimensions. As in the released code, u and v are divided by their norms, and omega_h is
    ALiBi's slope times the softplus of a parameter, 1 at the start; with ``constant`` the rate is only omega_h: ALiBi
    at the start. Without a causal mask, keys after the query take the same penalty (our choice). The penalty is a
    function of the offset times numbers of the query and of the key, so by our definition its position part is not
    data-dependent; `kernel` is that function, |delta|. FoX is a special case of `GRAPEPath`.

    Arguments
        rate  ``query-key`` (the paper's GRAPE-A-QK), ``query``, ``key``, or ``constant``
    """

    coupling = "logits"
    shared = False
    pair_width = 3
    citation = "Zhang et al. 2025, arXiv 2512.07805, section 4"
    formula = (
        r"b_{ij} = -|i - j|\, \omega_h \left(\mathrm{softplus}(v_h^\top q_i / \sqrt d)"
        r" + \mathrm{softplus}(u_h^\top k_j / \sqrt d)\right)"
    )

    def __init__(self, *, rate: Literal["query-key", "query", "key", "constant"] = "query-key", **sizes: int) -> None:
        super().__init__(**sizes)
        self.rate = rate
        self.slopes = self.register_exact("slopes", geometric_slopes(self.num_heads))
        softplus_of_1 = partial(nn.init.constant_, val=0.541324854612918)
        self.omega = self.new_parameter((self.num_heads,), softplus_of_1)
        shape, start = (self.num_heads, self.head_dim), kit.normal_init(self.head_dim**-0.5)
        self.v = self.new_parameter(shape, start) if "query" in rate else None
        self.u = self.new_parameter(shape, start) if "key" in rate else None

    def scales(self) -> Float[Tensor, "H"]:
        """omega_h, in float64."""
        return self.slopes * F.softplus(self.omega.to(torch.float64))

    def transform_logits(
        self, logits: PairMatrix, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs
    ) -> PairMatrix:
        wide = kit.wide_dtype(logits.dtype)
        rates = [_rate(inputs.q, self.v).unsqueeze(-1)] if self.v is not None else []
        rates += [_rate(inputs.k, self.u).unsqueeze(-2)] if self.u is not None else []
        distances = kit.offsets_between(q_positions, k_positions).abs().to(torch.float64).unsqueeze(-3)
        penalty = (distances * self.scales()[:, None, None]).to(wide)
        return (logits - penalty * sum(rates[1:], rates[0]) if rates else logits - penalty).to(logits.dtype)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 1 D"]:
        """The function of the offset that queries and keys weight: the distance."""
        return offsets.abs().to(torch.complex128)[None, None]


def _rate(x: Float[Tensor, "B H N d"], direction: Float[Tensor, "H d"]) -> Float[Tensor, "B H N"]:
    wide = kit.wide_dtype(x.dtype)
    unit = F.normalize(direction.to(wide), dim=-1, eps=1e-6)
    return F.softplus((x.to(wide) * unit.unsqueeze(-2)).sum(-1) * x.shape[-1] ** -0.5)


class GRAPEPath(PositionalEncoding, name="grape-path"):
    """Path-integral additive GRAPE: each token between key and query lowers the logit (Zhang et al. 2025).

    b_ij = alpha_h sum over j < m <= i of log sigmoid(p_i . R_m p'_m / w), with alpha ALiBi's slopes, p a projection of
    the layer's input to w dimensions, p' the same divided by its root mean square, and R_m a rotation of every pair by
    m radians. As in the released code, p_i itself is not divided; in the paper's text both are. With ``edges``
    "token" a token's term is log sigmoid(w_h . x_m + b_h) for every query: the Forgetting Transformer, `FoX`.
    The sum runs over the keys that the query sees, in their order. Without a causal mask, keys after the query get no
    penalty (our choice).

    Arguments
        edges  ``endpoint`` (each term depends on the query) or ``token`` (FoX)
        width  w; even; 8 in the released configurations
    """

    coupling = "bias"
    data_dependent = True
    shared = False
    pair_width = 3
    citation = "Zhang et al. 2025, arXiv 2512.07805, section 5 and appendix C"
    formula = r"b_{ij} = \alpha_h \sum_{m=j+1}^{i} \log \sigma\left(p_i^\top R_m p_m / w\right)"

    def __init__(self, *, edges: Literal["endpoint", "token"] = "endpoint", width: int = 8, **sizes: int) -> None:
        super().__init__(**sizes)
        kit.require_even("width", width)
        self.edges, self.width = edges, width
        rows = self.num_heads * width if self.edges == "endpoint" else self.num_heads
        self.probe = nn.Linear(self.d_model, rows, bias=self.edges == "token")
        self.slopes = self.register_exact("slopes", geometric_slopes(self.num_heads))
        self.initialise(kit.normal_init(0.02), self.probe.weight)
        if self.edges == "token":
            self.initialise(nn.init.zeros_, self.probe.bias)

    def key_features(self, x: Stream, cached: CachedFeatures | None = None) -> KeyFeatures:
        return kit.linear(self.probe, x.to(kit.wide_dtype(x.dtype))).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def bias(self, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs) -> PairMatrix:
        visible_past = inputs.causal_mask()
        if inputs.is_masked and (visible := inputs.visible_mask()) is not None:
            visible_past = visible_past & visible
        if self.edges == "token":
            terms = F.logsigmoid(inputs.features[..., 0]).unsqueeze(-2)
        else:
            probes = F.rms_norm(inputs.features, (self.width,))
            ones = torch.ones(1, self.width // 2, dtype=torch.float64, device=probes.device)
            rotated = rotate_by(probes, kit.phases_of(k_positions, ones), "half")
            terms = self.slopes[:, None, None] * F.logsigmoid(inputs.query_features() @ rotated.mT / self.width)
        terms = torch.where(visible_past, terms.double(), 0.0)
        return (terms.sum(-1, keepdim=True) - terms.cumsum(-1)).to(kit.wide_dtype(inputs.q.dtype))
