"""How heads use the frequencies of a rotation, of queries and keys as tensors, also within a sliding window.

With a window of w keys, positions are cut into blocks of w. A query sees the keys of its own block up to itself and,
of the block before, those after its own place there, which is a causal sum too if both blocks are read backwards. So
sums over a window are added up from two, and none is taken off another.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from toeplens.lens.frequency.layers import LayerUse, by_group, energy_shares, shares_by_group
from toeplens.lens.kit.movable import Placed, turned_pairs
from toeplens.lens.kit.pieces import where_present
from toeplens.lens.kit.shares import Shares
from toeplens.lens.kit.sums import inner
from toeplens.lens.kit.terms import Common, Fixed, Offsets, Whole

_AT_ONCE = 1 << 23  # numbers of a tensor [sequences, heads, positions, dimensions] worked at once


class _Windowed(Whole):
    """`Whole`, where a query sees the keys up to its own that are in a window; the fixed terms are 0 beyond it."""

    def __init__(self, q: Tensor, k: Tensor, fixed: list[Fixed], present: Bool[Tensor, "B N"], window: int) -> None:
        self.window = window
        super().__init__(q, k, fixed, present, True, present)
        self.seen = self.seen.clamp(max=window)
        self.pairs = float((self.seen.squeeze(1) * present).sum())

    def products(self, q: Float[Tensor, "B H N e"], k: Float[Tensor, "B H N e"]) -> Common:
        raw = _windowed_inner(q, k, self.q, self.k, self.window).sum(0)
        for term in self.fixed:
            raw = raw + (q * term.apply(k)).sum((0, 2))
        rows = self._rows(q, k)
        return Common(rows.sum((0, 2)), raw, (rows * (self.row_sums / self.seen).unsqueeze(-1)).sum((0, 2)))

    def _rows(self, q: Tensor, k: Tensor) -> Float[Tensor, "B H N e"]:
        return q * _windowed_sums(k, self.window)


def tensors_use(
    placed: Placed,
    q: Float[Tensor, "*_B _H _N _d"],
    k: Float[Tensor, "*_B2 _G _N _d"],
    rotation: Float[Tensor, "*_H2 _n"] | None,
) -> LayerUse:
    """Of queries and keys as given to `toeplens.lens.frequency.use.frequency_use`, and what was placed of them."""
    q, k = (x.reshape(-1, *x.shape[-3:]) for x in (q, k))
    heads, length, width = q.shape[1:]
    present = torch.arange(length, device=q.device) < placed.ends.unsqueeze(1)
    pairs = float(placed.seen().sum())
    frequencies = q.new_zeros(1, 0) if rotation is None else rotation
    found = []
    own = placed.key_heads(slice(None))
    together = max(1, _AT_ONCE // (length * width))
    for start in range(0, heads, together):
        some = slice(start, min(start + together, heads))
        sequences = max(1, _AT_ONCE // (length * width * together))
        wholes = _wholes(placed, some, present, sequences)
        own_q, own_k = (where_present(x.double(), present) for x in (q[:, some], k[:, own[some]]))
        found.append(
            (
                *shares_by_group(wholes, placed.groups, 1 + placed.pairs, pairs),
                *_norms_and_energies(placed, own_q, own_k, pairs),
            )
        )
    shares, variance, norms, q_energy, k_energy = zip(*found, strict=True)
    return LayerUse(
        frequencies.double().expand(heads, -1),
        torch.cat(norms),
        Shares(torch.cat([x.logits for x in shares]), torch.cat([x.softmax for x in shares])),
        torch.cat(variance),
        torch.cat(q_energy),
        torch.cat(k_energy),
    )


def _wholes(placed: Placed, heads: slice, present: Bool[Tensor, "B N"], at_once: int) -> Iterator[Whole]:
    """The logits of some heads, of ``at_once`` sequences at a time."""
    keys = placed.key_heads(heads)
    turns = placed.turns if len(placed.turns) == 1 else placed.turns[heads]
    fixed: list[Fixed] = [] if placed.bias is None else [_fixed(placed, placed.bias, heads, len(keys))]
    for start in range(0, len(present), at_once):
        some = slice(start, start + at_once)
        there = present[some]
        q = where_present(placed.q[some, heads], there)
        k = where_present(placed.content[some][:, keys].double(), there)
        k = turned_pairs(k, placed.groups, turns.conj())
        if placed.window is None:
            yield Whole(q, k, fixed, there, placed.causal, there)
        else:
            yield _Windowed(q, k, fixed, there, placed.window)


def _fixed(placed: Placed, bias: Float[Tensor, "_H D"], heads: slice, count: int) -> Offsets:
    """The bias of some heads at all offsets, 0 where no key is seen."""
    length = placed.q.shape[2]
    kernel = bias.double() if len(bias) == 1 else bias[heads].double()
    if placed.causal:
        kernel = F.pad(kernel[:, : placed.window], (length - 1, 0))
        kernel = F.pad(kernel, (0, 2 * length - 1 - kernel.shape[-1]))
    return Offsets(kernel.expand(count, -1), placed.causal)


def _norms_and_energies(
    placed: Placed, q: Float[Tensor, "B h N d"], k: Float[Tensor, "B h N d"], pairs: float
) -> tuple[Float[Tensor, "h g"], Float[Tensor, "h d"], Float[Tensor, "h d"]]:
    """The mean over the visible pairs of the product of norms, group by group; what each dimension has of the norms."""
    norms, seen = (by_group(x, placed.groups, 1 + placed.pairs) for x in (q, k))
    if placed.window is not None:
        seen = _windowed_sums(seen, placed.window)
    else:
        seen = seen.cumsum(2) if placed.causal else seen.sum(2, keepdim=True)
    return (norms * seen).sum((0, 2)) / pairs, energy_shares(q), energy_shares(k)


def _blocks(x: Float[Tensor, "*B N e"], window: int) -> Float[Tensor, "*B b w e"]:
    """Positions in blocks, the last filled up with 0."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % window)).unflatten(-2, (-1, window))


def _windowed_sums(x: Float[Tensor, "*B N e"], window: int) -> Float[Tensor, "*B N e"]:
    """Sums over the rows that each row sees."""
    blocks = _blocks(x, window)
    sums = blocks.cumsum(-2)
    sums[..., 1:, :-1, :] += blocks[..., :-1, 1:, :].flip(-2).cumsum(-2).flip(-2)
    return sums.flatten(-3, -2)[..., : x.shape[-2], :]


def _windowed_inner(q: Tensor, k: Tensor, q2: Tensor, k2: Tensor, window: int) -> Float[Tensor, "*B e"]:
    """`toeplens.lens.kit.sums.inner` over the pairs in a window."""
    parts = [_blocks(x, window) for x in (q, k, q2, k2)]
    total = inner(*parts).sum(-2)
    if window > 1 and parts[0].shape[-3] > 1:
        q, q2 = (x[..., 1:, :-1, :].flip(-2) for x in parts[::2])
        k, k2 = (x[..., :-1, 1:, :].flip(-2) for x in parts[1::2])
        total = total + inner(q, k, q2, k2).sum(-2)
    return total
