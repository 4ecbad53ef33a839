"""RoPE for positions with several coordinates: rows and columns; time, height and width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from toeplens.encodings.kit import raster, require_even, require_number, rotary_frequencies
from toeplens.encodings.rotary import Pairing, Rotary
from toeplens.encodings.shapes import Frequencies, Positions
from toeplens.ground import InputError, choose, invalid


class _Coordinates(Rotary):
    """A rotation by angles that are linear in a position's coordinates; subclasses define `phases`.

    Hooks take coordinates, [N, axes] or [B, N, axes], or token indices [N], which `place` converts to coordinates. With
    a ``grid``, these are raster coordinates (the last axis runs fastest; indices beyond the grid continue along the
    first axis). Without one, all coordinates equal the index, as for text among images. The offset i - j, which
    determines the logit, is the vector of coordinate differences.
    """

    def __init__(
        self,
        frequencies: Float[Tensor, "H n"],
        *,
        axes: int,
        grid: Sequence[int] | None,
        **inherited: Any,
    ) -> None:
        super().__init__(frequencies, **inherited)
        self.axes = axes
        if grid is not None and (len(grid) != axes or not all(isinstance(size, int) and size > 0 for size in grid)):
            raise invalid("grid", f"be {axes} positive sizes", list(grid))
        self.grid = None if grid is None else tuple(grid)

    def place(self, tokens: Int[Tensor, "*B N"]) -> Int[Tensor, "*B N axes"]:
        return raster(tokens, self.axes, self.grid)

    def coordinates(self, positions: Positions) -> Float[Tensor, "*B N axes"]:
        """The coordinates in float64, also for token indices."""
        return (self.place(positions) if positions.ndim == 1 else positions).to(torch.float64)

    def kernel(self, offsets: Int[Tensor, "D *axes"]) -> Complex[Tensor, "H n D"] | None:
        """The rotation at offsets [D, axes], or [D] (the same along all axes; None with a grid)."""
        return None if offsets.ndim == 1 and self.grid is not None else super().kernel(offsets)


class _ByAxis(_Coordinates):
    """Each pair of dimensions is rotated by one coordinate, ``axis_of[t]``."""

    def __init__(self, frequencies: Float[Tensor, "1 n"], axis_of: Sequence[int], **inherited: Any) -> None:
        super().__init__(frequencies, **inherited)
        self.axis_of = self.register_exact("axis_of", torch.tensor(axis_of))

    def phases(self, positions: Positions, frequencies: Frequencies) -> Float[Tensor, "*B 1 N n"]:
        return phases_along(self.coordinates(positions), self.axis_of, frequencies)


def phases_along(
    coordinates: Float[Tensor, "*B N axes"], axis_of: Int[Tensor, "n"], frequencies: Frequencies
) -> Float[Tensor, "*B H N n"]:
    """The angles of pairs that each use one coordinate."""
    return coordinates.index_select(-1, axis_of).unsqueeze(-3) * frequencies.unsqueeze(-2)


class AxialRoPE(_ByAxis):
    """Axial RoPE: each axis rotates its own pairs (Su 2021 blog; Fang et al. 2023, EVA-02; Flux; RoPE-ViT).

    The pairs of axis 0 come first. RoPE-ViT's base is 100, that of Flux and EVA-02 10000. Published code differs in how
    it treats class or text tokens (not rotated, or all coordinates 0); give such tokens the coordinates you want.

    Arguments
        axes         number of coordinates
        axes_dims    pairs of dimensions per axis, d/2 in total (default: equal shares; if d/2 is not a multiple of
                     ``axes``, the first axes get one more)
        grid         sizes of the axes, if positions are raster indices
        frequencies  ``lang``: base^(-2j/d_a), j = 0..d_a/2 - 1, where an axis has d_a dimensions; ``pixel``: pi times
                     d_a/2 numbers from 1 to max_freq/2, for coordinates from -1 to 1 over the grid; needs ``grid``
        max_freq     see ``frequencies``
        base, pairing  as in RoPE
    """

    citation = "Fang et al. 2023, arXiv 2303.11331; Heo et al. 2024, arXiv 2403.13298"
    formula = (
        r"\mathrm{Re} \sum_a \sum_{t \in T_a} q_t \bar k_t \, e^{\mathrm{i} \delta_a \theta_t},"
        r" \quad \delta_a = i_a - j_a"
    )

    def __init__(
        self,
        *,
        axes: int = 2,
        axes_dims: Sequence[int] | None = None,
        grid: Sequence[int] | None = None,
        frequencies: Literal["lang", "pixel"] = "lang",
        max_freq: float = 10.0,
        base: float = 10000.0,
        pairing: Pairing = "interleaved",
        **sizes: int,
    ) -> None:
        require_even("head_dim", sizes["head_dim"])
        pairs = sizes["head_dim"] // 2
        if not 2 <= axes <= pairs:
            raise invalid("axes", f"be from 2 to {pairs}, one pair of dimensions an axis", axes)
        if axes_dims is None:
            axes_dims = [(pairs + axes - 1 - a) // axes for a in range(axes)]
        if len(axes_dims) != axes or any(n < 1 for n in axes_dims) or sum(axes_dims) != pairs:
            raise invalid("axes_dims", f"be {axes} positive numbers, {pairs} pairs together", list(axes_dims))
        if choose("frequencies", frequencies, ("lang", "pixel")) == "lang":
            spectra = [rotary_frequencies(2 * n, base) for n in axes_dims]
        else:
            if grid is None:
                raise InputError("grid must be set for 'pixel' frequencies.")
            require_number("max_freq", max_freq, over=0)
            spectra = [
                torch.linspace(1, max_freq / 2, n, dtype=torch.float64) * math.pi * 2 / max(1, size - 1)
                for n, size in zip(axes_dims, grid, strict=False)
            ]
        axis_of = [axis for axis, n in enumerate(axes_dims) for _ in range(n)]
        super().__init__(torch.cat(spectra).unsqueeze(0), axis_of, axes=axes, grid=grid, pairing=pairing, **sizes)


class MRoPE(_ByAxis):
    """Multimodal RoPE: the head's frequencies are divided among time, height and width (Wang et al. 2024, Qwen2-VL).

    Text tokens have three equal coordinates, which makes it plain RoPE. The caller provides the coordinates of images
    and video.

    Arguments
        sections              pairs of time, height and width, d/2 in total. Default as published: 1/4, 3/8, 3/8
                              (16, 24, 24 of 64); interleaved: 3/8, 5/16, 5/16 (24, 20, 20 of 64)
        interleaved_sections  alternate the axes from the highest frequency on, as in Qwen3-VL: height has pairs 1, 4,
                              7, ..., width 2, 5, 8, ..., as many as their sections say, and time the others. Otherwise
                              sections follow each other, and time has the highest frequencies
        base, pairing         as in RoPE; the published base is 10^6, in halves
    """

    citation = "Wang et al. 2024, arXiv 2409.12191"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \, e^{\mathrm{i} \delta_{a(t)} \theta_t},"
        r" \quad a(t) \in \{\text{time}, \text{height}, \text{width}\}"
    )

    def __init__(
        self,
        *,
        sections: Sequence[int] | None = None,
        interleaved_sections: bool = False,
        base: float = 1000000.0,
        pairing: Pairing = "half",
        **sizes: int,
    ) -> None:
        head_dim = sizes["head_dim"]
        require_even("head_dim", head_dim)
        pairs = head_dim // 2
        if sections is None:
            sections = _default_sections(pairs, interleaved_sections)
        axis_of = axes_of_pairs("sections", sections, pairs, interleaved_sections)
        frequencies = rotary_frequencies(head_dim, base).unsqueeze(0)
        super().__init__(frequencies, axis_of, axes=3, grid=None, pairing=pairing, **sizes)


def axes_of_pairs(field: str, sections: Sequence[int], pairs: int, interleaved: bool) -> list[int]:
    """Which of time, height and width (0, 1, 2) rotates each pair; see ``sections`` of `MRoPE`."""
    if len(sections) != 3 or any(n < 0 for n in sections) or sum(sections) != pairs:
        raise invalid(field, f"be the numbers of pairs for time, height and width, {pairs} in total", list(sections))
    if not interleaved:
        return [axis for axis, n in enumerate(sections) for _ in range(n)]
    axis_of = [0] * pairs
    for axis in (1, 2):
        own = range(axis, pairs, 3)[: sections[axis]]
        if len(own) < sections[axis]:
            raise invalid(
                field,
                f"have {len(own)} {('height', 'width')[axis - 1]} pairs when {pairs} pairs are interleaved",
                list(sections),
            )
        for t in own:
            axis_of[t] = axis
    return axis_of


def _default_sections(pairs: int, interleaved: bool) -> list[int]:
    if interleaved:
        side = 5 * pairs // 16
        return [pairs - 2 * side, side, side]
    time = pairs // 4
    return [time, (pairs - time + 1) // 2, (pairs - time) // 2]


class RoPEMixed(_Coordinates):
    """RoPE-Mixed: every pair is rotated by both coordinates, with frequencies learned per head (Heo et al. 2024).

    The angle is x . omega_t, with omega_t a learned vector. The vectors start with lengths base^(-4t/d), t = 0..d/4 -
    1, twice: along a random direction for each head and at a right angle to it. They are plain parameters, which
    ``model.half()`` rounds. Queries and keys then use the same rounded frequencies, so logits still depend only on the
    offset.

    Arguments
        grid           sizes of the two axes, if positions are raster indices
        base, pairing  as in RoPE; the published base is 10
    """

    citation = "Heo et al. 2024, arXiv 2403.13298"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \, e^{\mathrm{i}\, \delta \cdot \omega_t}, \quad \omega_t \in \mathbb{R}^2"
    )
    shared = False

    def __init__(
        self, *, grid: Sequence[int] | None = None, base: float = 10.0, pairing: Pairing = "interleaved", **sizes: int
    ) -> None:
        head_dim = sizes["head_dim"]
        if head_dim % 4 or head_dim < 4:
            raise invalid("head_dim", "be a multiple of 4: pairs in two directions", head_dim)
        lengths = rotary_frequencies(head_dim // 2, base).repeat(2).unsqueeze(0)
        super().__init__(lengths, axes=2, grid=grid, pairing=pairing, **sizes)
        self.omega = nn.Parameter(torch.empty(self.num_heads, head_dim // 2, 2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        angle = torch.rand(self.num_heads, 1, dtype=torch.float64, device=self.frequencies.device) * 2 * math.pi
        angle = torch.cat((angle, angle + math.pi / 2), dim=-1).repeat_interleave(self.head_dim // 4, dim=-1)
        self.omega.copy_(self.frequencies.unsqueeze(-1) * torch.stack((angle.cos(), angle.sin()), dim=-1))

    def phases(self, positions: Positions, frequencies: Frequencies) -> Float[Tensor, "*B G N n"]:
        rows, columns = self.coordinates(positions)[..., None, :, None, :].unbind(-1)
        along_rows, along_columns = self.omega.to(torch.float64).unsqueeze(-3).unbind(-1)
        return rows * along_rows + columns * along_columns


ENCODINGS = {"axial-rope": AxialRoPE, "mrope": MRoPE, "rope-mixed": RoPEMixed}
