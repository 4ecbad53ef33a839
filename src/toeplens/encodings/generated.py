"""Rotations exp(sum_a p_a G_a) with learned skew-symmetric generators G_a, one for each coordinate of a position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import normal, raster, require_count, require_even, rotary_frequencies, turns, widened
from toeplens.encodings.rotary import turn
from toeplens.encodings.shapes import Keys, Positions, Queries, Turned
from toeplens.ground import choose, invalid


class _Generated(PositionalEncoding):
    """A rotation that positions of one coordinate or several generate: a subclass gives `spectrum` and `turned`.

    Hooks take coordinates, [N, axes] or [B, N, axes], or running numbers [N], which `place` turns into coordinates as
    in `AxialRoPE`; with one axis, a position is a number as everywhere else. Coordinates are divided by ``extent``.
    """

    coupling = "rotation"
    shared = False

    def __init__(
        self, *, axes: int, grid: Sequence[int] | None, extent: Sequence[float] | None = None, **sizes: int
    ) -> None:
        super().__init__(**sizes)
        require_count(axes=axes)
        if grid is not None and (len(grid) != axes or not all(isinstance(size, int) and size > 0 for size in grid)):
            raise invalid("grid", f"be {axes} positive sizes", list(grid))
        self.axes = axes
        self.grid = None if grid is None else tuple(grid)
        units = torch.tensor([1.0] * axes if extent is None else list(extent), dtype=torch.float64)
        if units.shape != (axes,) or not bool(((units > 0) & units.isfinite()).all()):
            raise invalid("extent", f"be {axes} positive numbers, one an axis", units.tolist())
        self.extent = self.register_exact("extent", units)

    def lengths(self) -> list[int]:
        """How many places each axis has: those of the grid, else ``max_len``."""
        return [self.max_len] * self.axes if self.grid is None else list(self.grid)

    def place(self, tokens: Int[Tensor, "*B N"]) -> Positions:
        if self.axes == 1:
            return tokens
        return raster(tokens, self.axes, self.grid)

    def coordinates(self, positions: Positions) -> Float[Tensor, "*B N axes"]:
        """The coordinates in units of ``extent``, in float64; of running numbers too."""
        placed = self.place(positions) if positions.ndim == 1 else positions
        return (placed if self.axes > 1 else placed.unsqueeze(-1)).to(torch.float64) / self.extent

    def spectrum(self) -> Float[Tensor, "H axes n"]:
        """The angles of each plane for one unit of each coordinate, where the generators commute; in float64."""
        raise NotImplementedError

    def phases(self, positions: Positions) -> Float[Tensor, "*B H N n"]:
        """The angles of commuting generators' planes."""
        return torch.einsum("...na,has->...hns", self.coordinates(positions), self.spectrum())

    def turned(self, x: Float[Tensor, "B H N d"], positions: Positions) -> Float[Tensor, "B H N d"]:
        """``x``, of float32 or more, after its rotation."""
        raise NotImplementedError

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        wide = widened(q.dtype)
        return self.turned(q.to(wide), q_positions).to(q.dtype), self.turned(k.to(wide), k_positions).to(k.dtype)

    def kernel(self, offsets: Int[Tensor, "D *axes"]) -> Complex[Tensor, "H n D"] | None:
        """e^(i delta . lambda) of each plane; None where generators do not commute, and for offsets [D] on a grid."""
        if not self.toeplitz or (offsets.ndim == 1 and self.grid is not None and self.axes > 1):
            return None
        return turns(self.phases(offsets).transpose(-2, -1))


class _Exponential(_Generated):
    """The matrix exponential itself, formed in float64 for each token, of block-diagonal generators (`generators`)."""

    def generators(self) -> Float[Tensor, "H axes m b b"]:
        """The skew-symmetric blocks of each axis, in float64."""
        raise NotImplementedError

    def spectrum(self) -> Float[Tensor, "H axes n"]:
        blocks = self.generators()
        vectors = torch.linalg.eigh(1j * blocks.detach().sum(1))[1]  # of a sum: what commutes has the same planes
        angles = torch.einsum("hmij,hamik,hmkj->hamj", vectors.conj(), 1j * blocks, vectors).real
        return angles[..., blocks.shape[-1] // 2 :].flatten(-2)

    def turned(self, x: Float[Tensor, "B H N d"], positions: Positions) -> Float[Tensor, "B H N d"]:
        angles = torch.einsum("...na,hamij->...hnmij", self.coordinates(positions), self.generators())
        blocks = torch.matrix_exp(angles.contiguous()).to(x.dtype)
        return (blocks @ x.unflatten(-1, blocks.shape[-3:-1]).unsqueeze(-1)).flatten(-3)


def _blocks(block: int, head_dim: int) -> int:
    if not (isinstance(block, int) and block >= 2 and head_dim % block == 0):
        raise invalid("block", f"be at least 2 and divide head_dim, which is {head_dim}", block)
    return head_dim // block


class LieRE(_Exponential):
    """LieRE: a dense rotation exp(sum_a p_a G_a), a generator for each axis, head and layer (Ostmeier et al. 2024).

    Only the entries above the diagonal are used, as in the released program; they start uniformly from 0 to 2 pi, for
    coordinates from 0 to 1. With several axes the generators do not commute, so that the logit is not a function of
    the offset; with one, exp(p G) is RoPE in a learned basis with learned frequencies. The program leaves class tokens
    unturned: give such tokens coordinates of 0. Forms a matrix exponential for each token, head and block.

    Arguments
        axes    number of coordinates; published: 2 and 3
        block   size of the blocks on the generators' diagonals; None: the whole head. The program takes any
        grid    sizes of the axes, if running numbers are raster positions
        extent  coordinates are divided by these; default as in the program: the last place of each axis is 1, so the
                grid's sizes less 1, or ``max_len`` - 1 (ours)
    """

    citation = "Ostmeier et al. 2024, arXiv 2406.10322"
    toeplitz = False
    formula = r"q_i^\top e^{(\sum_a p_{i,a} G_a)^\top} e^{\sum_a p_{j,a} G_a} k_j,\quad G_a^\top = -G_a"

    def __init__(
        self,
        *,
        axes: int = 2,
        block: int | None = None,
        grid: Sequence[int] | None = None,
        extent: Sequence[float] | None = None,
        **sizes: int,
    ) -> None:
        super().__init__(axes=axes, grid=grid, extent=extent, **sizes)
        if extent is None:
            self.extent.copy_(torch.tensor([max(1, size - 1) for size in self.lengths()]))
        block = self.head_dim if block is None else block
        self.toeplitz = axes == 1 or block == 2
        shape = (self.num_heads, axes, _blocks(block, self.head_dim), block, block)
        self.weight = self.learned(shape, partial(nn.init.uniform_, a=0.0, b=2 * math.pi))

    def generators(self) -> Float[Tensor, "H axes m b b"]:
        upper = self.weight.to(torch.float64).triu(1)
        return upper - upper.mT


class ComRoPE(_Exponential):
    """ComRoPE: angle matrices that commute, so that the offset is all that counts (Yu et al. 2025).

    Blocks P_m - P_m^T are learned for each head and layer. In ``ap`` (axial partition) block m turns with axis m mod
    ``axes`` alone; in ``ld`` (linearly dependent) it turns with every axis, by factors theta_am that are one for all
    heads. All start from a normal distribution of standard deviation 1, for coordinates from 0 to 1, as in the released
    program. Its random shifts of the coordinates while training are left out.

    Not verified: the block size of the paper's experiments, which readers give as 8; the program's default is 2.

    Arguments
        variant  ``ld``, the better one in the paper, or ``ap``
        axes     number of coordinates; published: 2 and 3
        block    size of the blocks; default 8, or the next smaller power of two that fits
        grid     sizes of the axes, if running numbers are raster positions
        extent   coordinates are divided by these; default the number of places of each axis, as published: the grid's
                 sizes, or ``max_len`` (ours)
    """

    citation = "Yu et al. 2025, arXiv 2506.03737"
    formula = (
        r"q_i^\top e^{\sum_a (p_{j,a} - p_{i,a}) A_a} k_j,\quad A_a A_b = A_b A_a,"
        r"\; A_a = \mathrm{diag}_m\, \theta_{am} (P_m - P_m^\top)"
    )

    def __init__(
        self,
        *,
        variant: Literal["ld", "ap"] = "ld",
        axes: int = 2,
        block: int | None = None,
        grid: Sequence[int] | None = None,
        extent: Sequence[float] | None = None,
        **sizes: int,
    ) -> None:
        super().__init__(axes=axes, grid=grid, extent=extent, **sizes)
        if extent is None:
            self.extent.copy_(torch.tensor(self.lengths()))
        parts = axes if choose("variant", variant, ("ld", "ap")) == "ap" else 1
        if block is None:
            block = next((size for size in (8, 4, 2) if self.head_dim % (size * parts) == 0), 2)
        count = _blocks(block, self.head_dim)
        if count % parts:
            raise invalid(
                "block", f"give a number of blocks divisible by {axes} axes", got=f"{block}, which gives {count}"
            )
        self.weight = self.learned((self.num_heads, count, block, block), normal(1.0))
        self.factors = None if variant == "ap" else self.learned((axes, count), normal(1.0))
        own = torch.arange(count) % axes == torch.arange(axes).unsqueeze(-1)
        self.own = self.register_exact("own", own.to(torch.float64))

    def generators(self) -> Float[Tensor, "H axes m b b"]:
        weight = self.weight.to(torch.float64)
        factors = self.own if self.factors is None else self.factors.to(torch.float64)
        return (weight - weight.mT).unsqueeze(1) * factors[..., None, None]


class STRING(_Generated):
    """STRING: the most general rotation that offsets alone decide, in two cheap forms (Schenck et al. 2025).

    ``cayley``: R(p) = RoPE(p) P with an orthogonal P = (I - S)(I + S)^-1, S skew-symmetric, and RoPE's angles
    p . omega_t; S and omega are learned, a set a head and layer. ``circulant``: R(p) = exp(sum_a p_a (C_a - C_a^T))
    with circulant matrices C_a, whose first columns c_a are learned; it turns the Fourier components by the angles
    2 sum_am p_a c_am sin(2 pi f m / d), and leaves the mean and, if d is even, the alternating one as they are.

    Of another STRING, the shifted rotary positions of An et al. 2024 (arXiv 2410.18745), it has the name alone.

    Not verified: the start, on which the paper has nothing. Ours is RoPE's frequencies base^(-2t/d), with several axes
    along a random direction for each pair, and S = 0, so that ``cayley`` on one axis starts as RoPE.

    Arguments
        form  ``cayley``, the better one in the paper, or ``circulant``, the cheaper one
        axes  number of coordinates; published: 2 and 3
        grid  sizes of the axes, if running numbers are raster positions
        base  of the start
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
        axes: int = 2,
        grid: Sequence[int] | None = None,
        base: float = 10000.0,
        **sizes: int,
    ) -> None:
        super().__init__(axes=axes, grid=grid, extent=None, **sizes)
        d = self.head_dim
        self.form = choose("form", form, ("cayley", "circulant"))
        pairs = d // 2 if self.form == "cayley" else (d - 1) // 2
        if self.form == "cayley":
            require_even("head_dim", d)
        elif d < 3:
            raise invalid("head_dim", "be at least 3 for one pair of Fourier components", d)
        self.frequencies = self.register_exact("frequencies", rotary_frequencies(d, base)[:pairs])
        if self.form == "cayley":
            self.skew = self.learned((self.num_heads, d, d), nn.init.zeros_)
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
        """e^(i delta . omega) of each pair; in the circulant form 1 first, for the components that do not turn."""
        kernel = super().kernel(offsets)
        if kernel is None or self.form == "cayley":
            return kernel
        return torch.cat((torch.ones_like(kernel[:, :1]), kernel), dim=1)

    def basis(self) -> Float[Tensor, "H d d"]:
        """P of the Cayley form, in float64."""
        weight = self.skew.to(torch.float64).triu(1)
        skew, unit = weight - weight.mT, torch.eye(self.head_dim, dtype=torch.float64, device=weight.device)
        return torch.linalg.solve(unit + skew, unit - skew)  # both are polynomials in S, so that they commute

    def turned(self, x: Float[Tensor, "B H N d"], positions: Positions) -> Float[Tensor, "B H N d"]:
        phases = self.phases(positions)
        cos, sin = phases.cos().to(x.dtype), phases.sin().to(x.dtype)
        if self.form == "cayley":
            return turn(x @ self.basis().mT.to(x.dtype), cos, sin, "interleaved")
        waves = self.waves.to(x.dtype)
        parts = x @ waves
        return x + (turn(parts, cos, sin, "interleaved") - parts) @ waves.T


ENCODINGS: dict[str, type[PositionalEncoding]] = {"liere": LieRE, "string": STRING, "comrope": ComRoPE}
