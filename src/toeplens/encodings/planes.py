"""Biases for positions in a plane: functions of the row offset and the column offset together, as in Swin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import linear, offsets_between, require_number, require_whole, widened
from toeplens.encodings.shapes import Keys, Positions, Queries, Turned
from toeplens.ground import invalid


class PlaneBias(PositionalEncoding):
    """A bias that depends on the row offset and the column offset; subclasses define `at`.

    Positions are rows and columns, [N, 2] or [B, N, 2], or token indices [N], which are raster indices of the
    ``grid`` (columns run fastest; larger indices continue in further rows). The offset i - j is the pair of
    differences.

    Arguments
        window  rows and columns of Swin's attention window
        grid    rows and columns of the raster for token indices (default: the window)
    """

    coupling = "bias"
    shared = False

    def __init__(self, *, window: Sequence[int], grid: Sequence[int] | None = None, **sizes: int) -> None:
        super().__init__(**sizes)
        self.axes = 2
        self.window, self.grid = _sizes("window", window), _sizes("grid", window if grid is None else grid)

    def at(self, rows: Int[Tensor, "*D"], columns: Int[Tensor, "*D"]) -> Float[Tensor, "H *D"]:
        """The bias at offsets of rows and columns, which are broadcast against each other."""
        raise NotImplementedError

    def place(self, tokens: Int[Tensor, "*B N"]) -> Int[Tensor, "*B N axes"]:
        return torch.stack((tokens // self.grid[1], tokens % self.grid[1]), dim=-1)

    def bias(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*B H Nq Nk"]:
        q, k = (self.place(p) if p.ndim == 1 else p for p in (q_positions, k_positions))
        bias = self.at(*(offsets_between(q[..., axis], k[..., axis]) for axis in range(2)))
        return bias if bias.ndim == 3 else bias.movedim(0, 1)

    def kernel(self, offsets: Int[Tensor, "D *axes"]) -> Float[Tensor, "H D"] | None:
        """The bias at offsets [D, 2] of rows and columns; None for offsets [D] of token indices."""
        return None if offsets.ndim == 1 else self.at(*offsets.unbind(-1))


def _sizes(field: str, given: Sequence[int]) -> tuple[int, int]:
    if len(given) != 2 or not all(isinstance(size, int) and size > 0 for size in given):
        raise invalid(field, "be two positive sizes, rows and columns", list(given))
    return given[0], given[1]


class Swin(PlaneBias):
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

    def __init__(
        self,
        *,
        window: Sequence[int] = (7, 7),
        grid: Sequence[int] | None = None,
        init_std: float = 0.02,
        **sizes: int,
    ) -> None:
        super().__init__(window=window, grid=grid, **sizes)
        require_number("init_std", init_std, at_least=0)
        start = partial(nn.init.trunc_normal_, std=init_std) if init_std else nn.init.zeros_
        self.weight = self.learned(((2 * self.window[0] - 1) * (2 * self.window[1] - 1), self.num_heads), start)

    def at(self, rows: Int[Tensor, "*D"], columns: Int[Tensor, "*D"]) -> Float[Tensor, "H *D"]:
        require_whole("Swin", rows)
        last_row, last_column = (size - 1 for size in self.window)
        row = rows.clamp(-last_row, last_row) + last_row
        column = columns.clamp(-last_column, last_column) + last_column
        return self.weight.T[:, row * (2 * last_column + 1) + column]


class SwinV2(PlaneBias):
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
        grid: Sequence[int] | None = None,
        pretrained_window: Sequence[int] | None = None,
        hidden: int = 512,
        cosine: bool = False,
        **sizes: int,
    ) -> None:
        super().__init__(window=window, grid=grid, **sizes)
        self.divided_by = _sizes("pretrained_window", self.window if pretrained_window is None else pretrained_window)
        require_number("hidden", hidden, at_least=1)
        self.pair_width = 1 + 2 * hidden // self.num_heads
        self.inward, self.outward = nn.Linear(2, hidden), nn.Linear(hidden, self.num_heads, bias=False)
        self.log_factor: nn.Parameter | None = None
        if cosine:
            self.log_factor = self.learned((self.num_heads,), partial(nn.init.constant_, val=math.log(10)))
            self.also_couples, self.scale_terms = ("rotation",), 0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for layer in (self.inward, self.outward):
            nn.init.trunc_normal_(layer.weight, std=0.02)
        nn.init.zeros_(self.inward.bias)

    def overrides(self, name: str) -> bool:
        return super().overrides(name) and (name != "rotate" or self.log_factor is not None)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        if self.log_factor is None:
            return q, k
        wide = widened(q.dtype)
        factor = self.log_factor.to(wide).clamp(max=math.log(100)).exp()[:, None, None]
        return (F.normalize(q.to(wide), dim=-1) * factor).to(q.dtype), F.normalize(k.to(wide), dim=-1).to(k.dtype)

    def at(self, rows: Int[Tensor, "*D"], columns: Int[Tensor, "*D"]) -> Float[Tensor, "H *D"]:
        costly = rows.device.type != "cpu" or torch.compiler.is_compiling()
        if costly or rows.is_floating_point() or rows.numel() == 0:
            return self._network(rows, columns)
        lows, highs = zip(*((int(x.min()), int(x.max())) for x in (rows, columns)), strict=True)
        height, width = (high - low + 1 for low, high in zip(lows, highs, strict=True))
        if 2 * height * width > rows.numel():
            return self._network(rows, columns)
        every = [torch.arange(low, high + 1) for low, high in zip(lows, highs, strict=True)]
        table = self._network(every[0].unsqueeze(1).expand(-1, width), every[1].expand(height, -1))
        return table[:, rows - lows[0], columns - lows[1]]

    def _network(self, rows: Int[Tensor, "*D"], columns: Int[Tensor, "*D"]) -> Float[Tensor, "H *D"]:
        wide = widened(self.outward.weight.dtype)
        shares = [8 * x.double() / max(1, size - 1) for x, size in zip((rows, columns), self.divided_by, strict=True)]
        spaced = torch.stack([x.sign() * x.abs().log1p() / math.log(8) for x in shares], dim=-1)
        return 16 * linear(self.outward, F.relu(linear(self.inward, spaced.to(wide)))).sigmoid().movedim(-1, 0)


ENCODINGS: dict[str, type[PositionalEncoding]] = {"swin": Swin, "swin-v2": SwinV2}
