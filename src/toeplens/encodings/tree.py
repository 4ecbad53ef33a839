"""Positions in a tree: a node is its path from the root, added to the embeddings or as a bias."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.absolute import Sinusoidal
from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import normal, require_count, require_number, widened
from toeplens.encodings.shapes import Positions, Stream
from toeplens.ground import InputError, choose, invalid

By = Literal["path", "depth"]


class TreePositions(PositionalEncoding):
    """An encoding whose positions are paths: branch numbers from the root, 1 to ``branching``, then 0s.

    A path has ``max_depth`` coordinates; positions are [N, max_depth] or [B, N, max_depth]. A token index i means
    node i of the complete tree, counted level by level from the root, 0 (`place`).
    """

    bounded = True
    toeplitz = False

    def __init__(self, *, branching: int, max_depth: int | None, **sizes: int) -> None:
        super().__init__(**sizes)
        if branching < 2:
            raise invalid("branching", "be at least 2", branching)
        self.branching = branching
        if max_depth is None:
            max_depth = 2
            while self._nodes(max_depth) < self.max_len:
                max_depth += 1
        if max_depth < 2:
            raise invalid("max_depth", "be at least 2", max_depth)
        self.max_depth = self.axes = max_depth

    def _nodes(self, depth: int) -> int:
        return (self.branching ** (depth + 1) - 1) // (self.branching - 1)

    def place(self, tokens: Int[Tensor, "*B N"]) -> Int[Tensor, "*B N axes"]:
        """The path of node i of the complete tree, counted level by level; node i's parent is (i - 1) // branching."""
        if not torch.compiler.is_compiling() and tokens.numel():
            low, high, nodes = int(tokens.min()), int(tokens.max()), self._nodes(self.max_depth)
            if low < 0 or high >= nodes:
                raise invalid(
                    "positions",
                    f"be from 0 to {nodes - 1} with branching {self.branching} and max_depth {self.max_depth}",
                    high if high >= nodes else low,
                )
        upwards = []
        for _ in range(self.max_depth):
            below = tokens > 0
            upwards.append(torch.where(below, (tokens - 1) % self.branching + 1, 0))
            tokens = torch.where(below, (tokens - 1) // self.branching, 0)
        return turned_round(torch.stack(upwards, dim=-1))

    def check_positions(self, positions: Positions) -> None:
        """Raise `InputError` for anything but paths of this tree."""
        if positions.shape[-1] != self.max_depth:
            raise invalid(
                "positions",
                f"be paths of {self.max_depth} branches, padded with 0",
                got=f"{positions.shape[-1]} branches",
            )
        if torch.compiler.is_compiling() or positions.numel() == 0:
            return
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high > self.branching:
            raise invalid(
                "positions",
                f"have branches from 1 to {self.branching}, or 0 after the end",
                high if high > self.branching else low,
            )
        if bool(((positions[..., :-1] == 0) & (positions[..., 1:] > 0)).any()):
            raise InputError("positions must have only 0 after the end of a path.")

    def paths(self, positions: Positions) -> Int[Tensor, "*B N axes"]:
        """Checked paths; token indices [N] are converted."""
        if positions.ndim == 1:
            return self.place(positions)
        self.check_positions(positions)
        return positions


def depths(paths: Int[Tensor, "*B N axes"]) -> Int[Tensor, "*B N"]:
    """Number of branches between each node and the root."""
    return (paths > 0).sum(-1)


def turned_round(paths: Int[Tensor, "*B N axes"]) -> Int[Tensor, "*B N axes"]:
    """Convert paths from the root to paths to the root, or back; trailing 0s stay."""
    place = torch.arange(paths.shape[-1], device=paths.device)
    source = depths(paths).unsqueeze(-1) - 1 - place
    return torch.where(source >= 0, paths.gather(-1, source.clamp(min=0)), 0)


def tree_distances(a: Int[Tensor, "*#B Nq axes"], b: Int[Tensor, "*#B Nk axes"]) -> Int[Tensor, "*B Nq Nk"]:
    """Number of edges between two nodes, through their lowest common ancestor."""
    distances = depths(a).unsqueeze(-1) + depths(b).unsqueeze(-2)
    together = torch.ones_like(distances, dtype=torch.bool)
    for branch_a, branch_b in zip(a.unbind(-1), b.unbind(-1), strict=True):
        branch_a = branch_a.unsqueeze(-1)
        together = together & (branch_a == branch_b.unsqueeze(-2)) & (branch_a > 0)
        distances = distances - 2 * together
    return distances


class Syntactic(TreePositions):
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

    def __init__(self, *, branching: int = 2, max_depth: int | None = None, by: By = "path", **sizes: int) -> None:
        super().__init__(branching=branching, max_depth=max_depth, **sizes)
        self.by = choose("by", by, ("path", "depth"))
        if self.by == "depth":
            self.sinusoid = Sinusoidal(layout="interleaved", **sizes)
            return
        copies = self.d_model // (branching * self.max_depth)
        if copies < 1:
            raise invalid(
                "max_depth",
                f"be small enough that {branching} one-hot branches per level fit in d_model ({self.d_model})",
                self.max_depth,
            )
        self.raw_decay = self.learned((copies,), partial(nn.init.uniform_, a=0.7, b=0.999))

    def table(self, positions: Positions) -> Float[Tensor, "*B N d_model"]:
        """The vectors of paths."""
        paths = self.paths(positions)
        if self.by == "depth":
            return self.sinusoid.table(depths(paths))
        raw = self.raw_decay.to(widened(self.raw_decay.dtype))
        steps = torch.arange(self.max_depth, device=raw.device).unsqueeze(-1)
        weights = raw.tanh() ** steps * (math.sqrt(self.d_model / 2) / raw.cosh())  # 1 - tanh^2 = 1 / cosh^2
        numbers = torch.arange(1, self.branching + 1, device=paths.device)
        stack = turned_round(paths).unsqueeze(-1) == numbers
        vectors = (stack.unsqueeze(-1) * weights.unsqueeze(1)).flatten(-3)
        return F.pad(vectors, (0, self.d_model - vectors.shape[-1]))

    def embed(self, x: Stream, positions: Positions) -> Stream:
        return x + self.table(positions).to(x.dtype)


class SyntacticBias(TreePositions):
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
        self,
        *,
        branching: int = 2,
        max_depth: int | None = None,
        max_distance: int | None = None,
        by: By = "path",
        init_std: float = 0.02,
        **sizes: int,
    ) -> None:
        super().__init__(branching=branching, max_depth=max_depth, **sizes)
        self.by = choose("by", by, ("path", "depth"))
        start = normal(require_number("init_std", init_std, at_least=0.0))
        if max_distance is None:
            max_distance = self.max_depth * (2 if self.by == "path" else 1)
        require_count(max_distance=max_distance)
        self.max_distance = max_distance
        values = max_distance + 1 if self.by == "path" else 2 * max_distance + 1
        self.weight = self.learned((values, self.num_heads), start)

    def bias(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*H_Nq_Nk"]:
        a, b = self.paths(q_positions), self.paths(k_positions)
        if self.by == "path":
            rows = tree_distances(a, b).clamp(max=self.max_distance)
        else:
            difference = depths(a).unsqueeze(-1) - depths(b).unsqueeze(-2)
            rows = difference.clamp(-self.max_distance, self.max_distance) + self.max_distance
        return F.embedding(rows, self.weight).movedim(-1, -3)


ENCODINGS = {"syntactic": Syntactic, "syntactic-bias": SyntacticBias}
