"""Positions with several coordinates: rows and columns, windows of images, paths in trees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings import kit
from toeplens.encodings.additive import Sinusoidal
from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.rotary import Pairing, Rotary
from toeplens.encodings.shapes import Frequencies, Keys, Positions, Queries, RotatedQK, Stream
from toeplens.utils import InputError, invalid
from toeplens.utils.options import NonNegative, Positive, PositiveInt, Range


class GridPositions:
    """Positions with several coordinates, [N, axes] or [B, N, axes], or token indices [N] (see `to_positions`).

    With a ``grid``, token indices are raster indices (the last axis runs fastest; indices beyond the grid continue
    along the first axis). Without one, all coordinates equal the index, as for text among images. The offset i - j is
    the vector of coordinate differences. With one axis, a position is a number.
    """

    axes: int
    grid: tuple[int, ...] | None

    def set_grid(self, axes: int, grid: Sequence[int] | None) -> None:
        """Set the number of coordinates and the sizes of the grid."""
        self.axes = axes
        self.grid = None if grid is None else _check_sizes("grid", grid, axes, f"{axes} positive sizes")

    def to_positions(self, tokens: Int[Tensor, "*B N"]) -> Positions:
        if self.axes == 1:
            return tokens
        if self.grid is None:
            return tokens.unsqueeze(-1).expand(*tokens.shape, self.axes)
        coordinates = []
        for size in reversed(self.grid[1:]):
            coordinates.append(tokens % size)
            tokens = tokens // size
        return torch.stack((tokens, *reversed(coordinates)), dim=-1)

    def coordinates(self, positions: Positions) -> Float[Tensor, "*B N axes"]:
        """The coordinates in float64, also for token indices."""
        grid_positions = self.to_positions(positions) if positions.ndim == 1 else positions
        return (grid_positions if self.axes > 1 else grid_positions.unsqueeze(-1)).to(torch.float64)


class _CoordinateRotation(GridPositions, Rotary):
    """A rotation by angles that are linear in a position's coordinates.

    Each pair of dimensions is rotated by one coordinate, ``axis_of[t]``, unless a subclass defines `phases`.
    """

    def __init__(
        self,
        frequencies: Float[Tensor, "H n"],
        axis_of: Sequence[int] = (),
        *,
        axes: int,
        grid: Sequence[int] | None,
        **inherited: Any,
    ) -> None:
        super().__init__(frequencies, **inherited)
        self.set_grid(axes, grid)
        if axis_of:
            self.axis_of = self.register_exact("axis_of", torch.tensor(axis_of))

    def phases(self, positions: Positions, frequencies: Frequencies) -> Float[Tensor, "*B H N n"]:
        return axis_phases(self.coordinates(positions), self.axis_of, frequencies)

    def kernel(self, offsets: Int[Tensor, "D *axes"]) -> Complex[Tensor, "H n D"] | None:
        """The rotation at offsets [D, axes], or [D] (the same along all axes; None with a grid)."""
        return None if offsets.ndim == 1 and self.grid is not None else super().kernel(offsets)


def axis_phases(
    coordinates: Float[Tensor, "*B N axes"], axis_of: Int[Tensor, "n"], frequencies: Frequencies
) -> Float[Tensor, "*B H N n"]:
    """The angles of pairs that each use one coordinate."""
    return coordinates.index_select(-1, axis_of).unsqueeze(-3) * frequencies.unsqueeze(-2)


class AxialRoPE(_CoordinateRotation, name="axial-rope"):
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
        max_freq: Positive = 10.0,
        base: float = 10000.0,
        pairing: Pairing = "interleaved",
        **sizes: int,
    ) -> None:
        kit.require_even("head_dim", sizes["head_dim"])
        pairs = sizes["head_dim"] // 2
        if not 2 <= axes <= pairs:
            raise invalid("axes", f"be from 2 to {pairs}, one pair of dimensions an axis", axes)
        if axes_dims is None:
            axes_dims = [(pairs + axes - 1 - a) // axes for a in range(axes)]
        if len(axes_dims) != axes or any(n < 1 for n in axes_dims) or sum(axes_dims) != pairs:
            raise invalid("axes_dims", f"be {axes} positive numbers, {pairs} pairs together", list(axes_dims))
        if frequencies == "lang":
            spectra = [kit.rotary_frequencies(2 * n, base) for n in axes_dims]
        else:
            if grid is None:
                raise InputError("grid must be set for 'pixel' frequencies.")
            spectra = [
                torch.linspace(1, max_freq / 2, n, dtype=torch.float64) * math.pi * 2 / max(1, size - 1)
                for n, size in zip(axes_dims, grid, strict=False)
            ]
        axis_of = [axis for axis, n in enumerate(axes_dims) for _ in range(n)]
        super().__init__(torch.cat(spectra).unsqueeze(0), axis_of, axes=axes, grid=grid, pairing=pairing, **sizes)


class MRoPE(_CoordinateRotation, name="mrope"):
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
        kit.require_even("head_dim", head_dim)
        pairs = head_dim // 2
        if sections is None:
            width = 5 * pairs // 16 if interleaved_sections else (pairs - pairs // 4) // 2
            height = width if interleaved_sections else (pairs - pairs // 4 + 1) // 2
            sections = (pairs - height - width, height, width)
        axis_of = axes_of_pairs("sections", sections, pairs, interleaved_sections)
        frequencies = kit.rotary_frequencies(head_dim, base).unsqueeze(0)
        super().__init__(frequencies, axis_of, axes=3, grid=None, pairing=pairing, **sizes)


def axes_of_pairs(field: str, sections: Sequence[int], pairs: int, interleaved: bool) -> list[int]:
    """Which of time, height and width (0, 1, 2) rotates each pair; see ``sections`` of `MRoPE`."""
    if len(sections) != 3 or any(n < 0 for n in sections) or sum(sections) != pairs:
        raise invalid(field, f"be the numbers of pairs for time, height and width, {pairs} in total", list(sections))
    if not interleaved:
        return [axis for axis, n in enumerate(sections) for _ in range(n)]
    axis_of = [0] * pairs
    for axis in (1, 2):
        axis_pairs = range(axis, pairs, 3)[: sections[axis]]
        if len(axis_pairs) < sections[axis]:
            side = ("height", "width")[axis - 1]
            must = f"have {len(axis_pairs)} {side} pairs when {pairs} pairs are interleaved"
            raise invalid(field, must, list(sections))
        for t in axis_pairs:
            axis_of[t] = axis
    return axis_of


class RoPEMixed(_CoordinateRotation, name="rope-mixed"):
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
        lengths = kit.rotary_frequencies(head_dim // 2, base).repeat(2).unsqueeze(0)
        super().__init__(lengths, (), axes=2, grid=grid, pairing=pairing, **sizes)
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


class PlaneBias(GridPositions, PositionalEncoding):
    """A bias that depends on the row offset and the column offset; subclasses define `bias_at`.

    Arguments
        window  rows and columns of Swin's attention window
        grid    rows and columns of the raster for token indices (default: the window)
    """

    coupling = "bias"
    shared = False

    def __init__(self, *, window: Sequence[int], grid: Sequence[int] | None = None, **sizes: int) -> None:
        super().__init__(**sizes)
        self.window = _check_sizes("window", window)
        self.set_grid(2, _check_sizes("grid", window if grid is None else grid))

    def bias_at(self, rows: Int[Tensor, "*D"], columns: Int[Tensor, "*D"]) -> Float[Tensor, "H *D"]:
        """The bias at offsets of rows and columns, which are broadcast against each other."""
        raise NotImplementedError

    def bias(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*B H Nq Nk"]:
        q, k = (self.to_positions(p) if p.ndim == 1 else p for p in (q_positions, k_positions))
        bias = self.bias_at(*(kit.offsets_between(q[..., axis], k[..., axis]) for axis in range(2)))
        return bias if bias.ndim == 3 else bias.movedim(0, 1)

    def kernel(self, offsets: Int[Tensor, "D *axes"]) -> Float[Tensor, "H D"] | None:
        """The bias at offsets [D, 2] of rows and columns; None for offsets [D] of token indices."""
        return None if offsets.ndim == 1 else self.bias_at(*offsets.unbind(-1))


def _check_sizes(
    field: str, sizes: Sequence[int], axes: int = 2, must: str = "two positive sizes, rows and columns"
) -> tuple[int, ...]:
    if len(sizes) != axes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise invalid(field, f"be {must}", list(sizes))
    return tuple(sizes)


class Swin(PlaneBias, name="swin"):
    """One learned value per head, row offset and column offset in a window (Liu et al. 2021, section 3.2, eq. 4).

    The table has (2M - 1)(2M' - 1) rows for a window of M x M' tokens, in the order of the released code, so that
    a model's table can be loaded. Swin attends only within windows. Offsets outside the window share the
    outermost value in their direction (our choice).

    Arguments
        window    M and M'; 7 and 7 in the paper
        grid      see `PlaneBias`
        init_std  standard deviation of the initial table, truncated to [-2, 2] as in the released code
    """

    citation = "Liu et al. 2021, arXiv 2103.14030"
    formula = r"b_{ij} = B_{h,\, i_1 - j_1,\, i_2 - j_2}"

    def __init__(self, *, window: Sequence[int] = (7, 7), init_std: NonNegative = 0.02, **inherited: Any) -> None:
        super().__init__(window=window, **inherited)
        start = partial(nn.init.trunc_normal_, std=init_std) if init_std else nn.init.zeros_
        self.weight = self.new_parameter(((2 * self.window[0] - 1) * (2 * self.window[1] - 1), self.num_heads), start)

    def bias_at(self, rows: Int[Tensor, "*D"], columns: Int[Tensor, "*D"]) -> Float[Tensor, "H *D"]:
        kit.require_integers("Swin", rows)
        last_row, last_column = (size - 1 for size in self.window)
        row = rows.clamp(-last_row, last_row) + last_row
        column = columns.clamp(-last_column, last_column) + last_column
        return self.weight.T[:, row * (2 * last_column + 1) + column]


class SwinV2(PlaneBias, name="swin-v2"):
    """An MLP of log-spaced row and column offsets computes each head's bias (Liu et al. 2022, section 3.3).

    b = 16 sigmoid(W2 ReLU(W1 u + c)), u the two offsets, each as sign(x) log2(1 + |x|) / log2(8) of x = 8 delta / (M -
    1). The factors 8 and 16 are those of transformers' code. It is defined for any offset, including fractions,
    so a network trained with one window can serve a larger one. The network is evaluated once per distinct offset
    where finding those is cheap.

    Arguments
        window             M and M'; 8 and 8, as in the smaller models
        grid               see `PlaneBias`
        pretrained_window  the training window, by which offsets are divided (default: ``window``)
        hidden             width of the network
        cosine             use the paper's scaled cosine attention: queries and keys of norm 1, and instead of 1/sqrt(d)
                           a learned factor per head, which starts at 10 and is at most 100. Off by default, as
                           it does not concern position
    """

    citation = "Liu et al. 2022, arXiv 2111.09883"
    formula = (
        r"b_{ij} = 16\, \sigma\big(f_\theta(\hat\delta_1, \hat\delta_2)_h\big),"
        r" \quad \hat\delta = \mathrm{sign}(\delta) \log_8\big(1 + 8 |\delta| / (M - 1)\big)"
    )

    def __init__(
        self,
        *,
        window: Sequence[int] = (8, 8),
        pretrained_window: Sequence[int] | None = None,
        hidden: PositiveInt = 512,
        cosine: bool = False,
        **inherited: Any,
    ) -> None:
        super().__init__(window=window, **inherited)
        reference = self.window if pretrained_window is None else pretrained_window
        self.reference_window = _check_sizes("pretrained_window", reference)
        self.pair_width = 1 + 2 * hidden // self.num_heads
        self.inward, self.outward = nn.Linear(2, hidden), nn.Linear(hidden, self.num_heads, bias=False)
        self.log_factor: nn.Parameter | None = None
        if cosine:
            self.log_factor = self.new_parameter((self.num_heads,), partial(nn.init.constant_, val=math.log(10)))
            self.also_couples, self.scale_terms = ("rotation",), 0
        else:
            self.unused_hooks = {"rotate"}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for layer in (self.inward, self.outward):
            nn.init.trunc_normal_(layer.weight, std=0.02)
        nn.init.zeros_(self.inward.bias)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> RotatedQK:
        if self.log_factor is None:
            return q, k
        wide = kit.wide_dtype(q.dtype)
        factor = self.log_factor.to(wide).clamp(max=math.log(100)).exp()[:, None, None]
        return (F.normalize(q.to(wide), dim=-1) * factor).to(q.dtype), F.normalize(k.to(wide), dim=-1).to(k.dtype)

    def bias_at(self, rows: Int[Tensor, "*D"], columns: Int[Tensor, "*D"]) -> Float[Tensor, "H *D"]:
        return kit.evaluate_distinct(self._network, rows, columns)

    def _network(self, rows: Int[Tensor, "*D"], columns: Int[Tensor, "*D"]) -> Float[Tensor, "H *D"]:
        wide = kit.wide_dtype(self.outward.weight.dtype)
        offsets = zip((rows, columns), self.reference_window, strict=True)
        scaled = [8 * x.double() / max(1, size - 1) for x, size in offsets]
        log_offsets = torch.stack([x.sign() * x.abs().log1p() / math.log(8) for x in scaled], dim=-1)
        out = kit.linear(self.outward, F.relu(kit.linear(self.inward, log_offsets.to(wide))))
        return 16 * out.sigmoid().movedim(-1, 0)


TreeRelation = Literal["path", "depth"]
_AtLeast2 = Annotated[int, Range(at_least=2)]


class TreePositions(PositionalEncoding):
    """An encoding whose positions are paths: branch numbers from the root, 1 to ``branching``, then 0s.

    A path has ``max_depth`` coordinates; positions are [N, max_depth] or [B, N, max_depth]. A token index i means
    node i of the complete tree, counted level by level from the root, 0 (`to_positions`).
    """

    bounded = True
    toeplitz = False

    def __init__(
        self, *, branching: _AtLeast2 = 2, max_depth: _AtLeast2 | None = None, by: TreeRelation = "path", **sizes: int
    ) -> None:
        super().__init__(**sizes)
        self.branching, self.by = branching, by
        if max_depth is None:
            max_depth = 2
            while self._node_count(max_depth) < self.max_len:
                max_depth += 1
        self.max_depth = self.axes = max_depth

    def _node_count(self, depth: int) -> int:
        return (self.branching ** (depth + 1) - 1) // (self.branching - 1)

    def to_positions(self, tokens: Int[Tensor, "*B N"]) -> Int[Tensor, "*B N axes"]:
        """The path of node i of the complete tree, counted level by level; node i's parent is (i - 1) // branching."""
        limit = self._node_count(self.max_depth) - 1
        tree = f"branching {self.branching} and max_depth {self.max_depth}"
        kit.require_between(f"be from 0 to {limit} with {tree}", tokens, limit)
        branches = []
        for _ in range(self.max_depth):
            is_below_root = tokens > 0
            branches.append(torch.where(is_below_root, (tokens - 1) % self.branching + 1, 0))
            tokens = torch.where(is_below_root, (tokens - 1) // self.branching, 0)
        return reverse_paths(torch.stack(branches, dim=-1))

    def check_positions(self, positions: Positions) -> None:
        """Raise `InputError` for anything but paths of this tree."""
        if positions.shape[-1] != self.max_depth:
            must = f"be paths of {self.max_depth} branches, padded with 0"
            raise invalid("positions", must, got=f"{positions.shape[-1]} branches")
        kit.require_between(f"have branches from 1 to {self.branching}, or 0 after the end", positions, self.branching)
        if kit.is_readable(positions) and bool(((positions[..., :-1] == 0) & (positions[..., 1:] > 0)).any()):
            raise InputError("positions must have only 0 after the end of a path.")

    def paths(self, positions: Positions) -> Int[Tensor, "*B N axes"]:
        """Checked paths; token indices [N] are converted."""
        if positions.ndim == 1:
            return self.to_positions(positions)
        self.check_positions(positions)
        return positions


def depths(paths: Int[Tensor, "*B N axes"]) -> Int[Tensor, "*B N"]:
    """Number of branches between each node and the root."""
    return (paths > 0).sum(-1)


def reverse_paths(paths: Int[Tensor, "*B N axes"]) -> Int[Tensor, "*B N axes"]:
    """Convert paths from the root to paths to the root, or back; trailing 0s stay."""
    level = torch.arange(paths.shape[-1], device=paths.device)
    source = depths(paths).unsqueeze(-1) - 1 - level
    return torch.where(source >= 0, paths.gather(-1, source.clamp(min=0)), 0)


def tree_distances(a: Int[Tensor, "*#B Nq axes"], b: Int[Tensor, "*#B Nk axes"]) -> Int[Tensor, "*B Nq Nk"]:
    """Number of edges between two nodes, through their lowest common ancestor."""
    distances = depths(a).unsqueeze(-1) + depths(b).unsqueeze(-2)
    shares_path = torch.ones_like(distances, dtype=torch.bool)
    for branch_a, branch_b in zip(a.unbind(-1), b.unbind(-1), strict=True):
        branch_a = branch_a.unsqueeze(-1)
        shares_path = shares_path & (branch_a == branch_b.unsqueeze(-2)) & (branch_a > 0)
        distances = distances - 2 * shares_path
    return distances


class Syntactic(TreePositions, name="syntactic"):
    """A vector of the node's path, added to the token embeddings (Shiv and Quirk 2019, section 3).

    The branches of a path form a stack, the latest on top, each as a one-hot vector of width ``branching``. A learned
    decay p weights the m-th from the top with p^m, so that a step down or up is a linear map. Several decays give
    several copies of the stack, each times sqrt((1 - p^2) d_model / 2), a size meant for embeddings that are multiplied
    by sqrt(d_model). The root is the zero vector. As in the released code, p is the tanh of a parameter, which starts
    from U(0.7, 0.999) as in the ports to torch. There are as many decays as fit into d_model, and the remaining
    dimensions are 0 (our choice; the released code appends a dense layer).

    ``by="depth"`` uses only the path's length, as the sinusoid of the depth: the absolute structural position of
    Wang et al. 2019 (arXiv 1909.00383), without their sequential position.

    Arguments
        branching  children per node (published: 2)
        max_depth  branches of the longest path (default: enough for ``max_len`` nodes of a complete tree)
        by         ``path`` or ``depth``
    """

    coupling = "input"
    citation = "Shiv and Quirk 2019, Novel positional encodings to enable tree-based transformers (NeurIPS)"
    formula = r"x_i + \bigoplus_p \sqrt{(1 - p^2) D / 2} \, [p^0 e_{b_n}; p^1 e_{b_{n-1}}; \dots; p^{n-1} e_{b_1}]"

    def __init__(self, **inherited: Any) -> None:
        super().__init__(**inherited)
        if self.by == "depth":
            self.sinusoid = Sinusoidal(layout="interleaved", **self.sizes)
            return
        branching = self.branching
        copies = self.d_model // (branching * self.max_depth)
        if copies < 1:
            must = f"be small enough that {branching} one-hot branches per level fit in d_model ({self.d_model})"
            raise invalid("max_depth", must, self.max_depth)
        self.raw_decay = self.new_parameter((copies,), partial(nn.init.uniform_, a=0.7, b=0.999))

    def table(self, positions: Positions) -> Float[Tensor, "*B N d_model"]:
        """The vectors of paths."""
        paths = self.paths(positions)
        if self.by == "depth":
            return self.sinusoid.table(depths(paths))
        decay = self.raw_decay.to(kit.wide_dtype(self.raw_decay.dtype))
        steps = torch.arange(self.max_depth, device=decay.device).unsqueeze(-1)
        weights = decay.tanh() ** steps * (math.sqrt(self.d_model / 2) / decay.cosh())  # 1 - tanh^2 = 1 / cosh^2
        branches = torch.arange(1, self.branching + 1, device=paths.device)
        stack = reverse_paths(paths).unsqueeze(-1) == branches
        vectors = (stack.unsqueeze(-1) * weights.unsqueeze(1)).flatten(-3)
        return F.pad(vectors, (0, self.d_model - vectors.shape[-1]))

    def embed(self, x: Stream, positions: Positions) -> Stream:
        return x + self.table(positions).to(x.dtype)


class SyntacticBias(TreePositions, name="syntactic-bias"):
    """One learned value per head and tree distance, added to the logits (Ying et al. 2021, eq. 6).

    Graphormer's spatial encoding on a tree: one value for each length of the shortest path between two nodes, shared by
    all layers. The path leads through the lowest common ancestor.

    ``by="depth"`` uses the signed difference of the two depths instead, the relation of Omote et al. 2019 (Dependency-
    based relative positional encoding for Transformer NMT, RANLP). They use vectors as in Shaw et al., not a bias.

    Arguments
        branching     children per node
        max_depth     branches of the longest path (default: enough for ``max_len`` nodes of a complete tree)
        max_distance  distance from which on all share the last value (default: the longest possible)
        by            ``path`` or ``depth``
        init_std      standard deviation of the initial values
    """

    coupling = "bias"
    citation = "Ying et al. 2021, arXiv 2106.05234"
    formula = r"q_i^\top k_j / \sqrt{d} + b_{\mathrm{dist}(i, j)}"

    def __init__(
        self, *, max_distance: PositiveInt | None = None, init_std: NonNegative = 0.02, **inherited: Any
    ) -> None:
        super().__init__(**inherited)
        sides = 1 if self.by == "path" else 2
        self.max_distance = self.max_depth * (3 - sides) if max_distance is None else max_distance
        values = sides * self.max_distance + 1
        self.weight = self.new_parameter((values, self.num_heads), kit.normal_init(init_std))

    def bias(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*H_Nq_Nk"]:
        a, b = self.paths(q_positions), self.paths(k_positions)
        if self.by == "path":
            rows = tree_distances(a, b).clamp(max=self.max_distance)
        else:
            difference = depths(a).unsqueeze(-1) - depths(b).unsqueeze(-2)
            rows = difference.clamp(-self.max_distance, self.max_distance) + self.max_distance
        return F.embedding(rows, self.weight).movedim(-1, -3)
