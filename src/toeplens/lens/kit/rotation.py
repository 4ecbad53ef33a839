"""A rotation seen through its kernel: which dimensions belong to which frequency, and its mean over the offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from toeplens.encodings import Rotary
from toeplens.encodings.rotary import Pairing
from toeplens.ground import InputError, choose
from toeplens.lens.kit.trace import LayerTrace

_OFFSETS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Rotation:
    """An encoding that turns pairs of dimensions, so that a logit is Re sum_t q_t conj(k_t) kernel_t(i - j).

    encoding     the encoding
    groups       [d] the frequency that each dimension belongs to, from 1; 0 where it is not turned
    frequencies  [H or 1, n] radians a position
    """

    encoding: Rotary
    groups: Int[Tensor, "d"]
    frequencies: Float[Tensor, "_ n"]

    def pairs(self, x: Float[Tensor, "*B d"]) -> Complex[Tensor, "*B n"]:
        """The turned dimensions as complex numbers."""
        first, width = self.encoding.first, 2 * self.frequencies.shape[-1]
        turned = x[..., first : first + width]
        a, b = turned.chunk(2, dim=-1) if self.encoding.pairing == "half" else turned.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.complex(a, b)

    def unpaired(self, pairs: Complex[Tensor, "*B n"], x: Float[Tensor, "*B d"]) -> Float[Tensor, "*B d"]:
        """``x`` with its turned dimensions replaced by these complex numbers."""
        first, width = self.encoding.first, 2 * self.frequencies.shape[-1]
        if self.encoding.pairing == "half":
            turned = torch.cat((pairs.real, pairs.imag), dim=-1)
        else:
            turned = torch.view_as_real(pairs.resolve_conj()).flatten(-2)
        return torch.cat((x[..., :first], turned, x[..., first + width :]), dim=-1)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "_ n D"]:
        """The rotation at these offsets, [H or 1, n, D]."""
        made = self.encoding.kernel(offsets)
        assert made is not None
        return made.to(torch.complex128)

    def mean(self, layer: LayerTrace) -> Complex[Tensor, "_ n"]:
        """The mean of the kernel over the visible pairs of a batch, [H or 1, n]."""
        length, device = len(layer.rows), layer.q.device
        there = layer.present.sum(1).unsqueeze(1)
        total: Tensor | float = 0.0
        pairs = 0.0
        for start in range(0 if layer.causal else -length + 1, length, _OFFSETS_AT_ONCE):
            offsets = torch.arange(start, min(start + _OFFSETS_AT_ONCE, length), device=device)
            counts = (there - offsets.abs()).clamp(min=0).sum(0).double()
            total = total + (self.kernel(offsets) * counts).sum(-1)
            pairs += float(counts.sum())
        return torch.as_tensor(total) / pairs

    def turn_by_mean(self, q: Float[Tensor, "B H N d"], layer: LayerTrace) -> Float[Tensor, "B H N d"]:
        """Queries turned (and shrunk) by the mean of the rotation over the visible pairs."""
        return self.unpaired(self.pairs(q) * self.mean(layer).unsqueeze(-2), q)


def index_of(dimensions: Int[Tensor, "n"]) -> slice | Int[Tensor, "n"]:
    """What takes these dimensions, in this order: a slice where they rise by even steps, else themselves.

    A slice gives a view, not a copy, and is several times as fast.
    """
    places = dimensions.tolist()
    if not places:
        return slice(0, 0)
    step = places[1] - places[0] if len(places) > 1 else 1
    even = step > 0 and places == list(range(places[0], places[0] + step * len(places), step))
    return slice(places[0], places[-1] + 1, step) if even else dimensions


def pairing_of(pairing: Pairing | None) -> Pairing:
    """The pairing that goes with frequencies; it has no default, as the wrong one gives wrong numbers."""
    if pairing is None:
        raise InputError(
            "pairing: it must be 'half' (dimensions t and t + n: Llama, Qwen, Gemma) or 'interleaved' (2t and 2t + 1: "
            "RoPE's paper, GPT-J) where a rotation is given by its frequencies (got None)."
        )
    return choose("pairing", pairing, get_args(Pairing))


def pair_numbers(pairs: int, pairing: Pairing, device: torch.device) -> Int[Tensor, "two_n"]:
    """The pair, from 1, that each of the turned dimensions belongs to."""
    numbers = torch.arange(1, pairs + 1, device=device)
    return numbers.repeat(2) if pairing == "half" else numbers.repeat_interleave(2)


def groups_of(encoding: Rotary, width: int, device: torch.device) -> Int[Tensor, "d"] | None:
    """The pair, from 1, of each of ``width`` dimensions, 0 where it is not turned; None where the pairs do not fit."""
    count = encoding.frequencies.shape[-1]
    if encoding.first + 2 * count > width:
        return None
    groups = torch.zeros(width, dtype=torch.long, device=device)
    groups[encoding.first : encoding.first + 2 * count] = pair_numbers(count, encoding.pairing, device)
    return groups


def rotation_of(layer: LayerTrace) -> Rotation | None:
    """The rotation of a layer's encoding; None where it has none, or is not one of pairs by a function of the offset.

    That the kernel gives the layer's own products is checked on some pairs.
    """
    encoding = layer.encoding
    if not isinstance(encoding, Rotary) or encoding.axes > 1 or not layer.consecutive:
        return None
    frequencies = encoding.frequencies_at(layer.positions)
    if frequencies.ndim > 2:
        return None
    groups = groups_of(encoding, layer.q.shape[-1], layer.q.device)
    if groups is None:
        return None
    rotation = Rotation(encoding, groups, frequencies)
    return rotation if _is_true(rotation, layer) else None


def _is_true(rotation: Rotation, layer: LayerTrace) -> bool:
    """Whether the kernel gives the products that the encoding gives, for random queries and keys."""
    if rotation.encoding.kernel(torch.zeros(1, dtype=torch.long, device=layer.q.device)) is None:
        return False
    length = len(layer.rows)
    made = torch.Generator().manual_seed(0)
    shape = (1, layer.q.shape[1], length, layer.q.shape[-1])
    row = torch.randn(shape[1], 2, shape[-1], generator=made, dtype=torch.float64).to(layer.q.device)
    q, k = (x.unsqueeze(0).unsqueeze(2).expand(shape) for x in row.unbind(1))
    turned_q, turned_k = layer.encoding.rotate(q, k, layer.positions, layer.positions)
    if turned_q.shape != q.shape:
        return False
    far = torch.arange(0, length, max(1, length // 16), device=layer.q.device)
    true = (turned_q[0, :, far] * turned_k[0, :, :1]).sum(-1)
    kernel = rotation.kernel(far)
    z = rotation.pairs(row[:, 0]) * rotation.pairs(row[:, 1]).conj()
    still = (row[:, 0] * row[:, 1])[:, rotation.groups == 0].sum(-1, keepdim=True)
    ours = (z.unsqueeze(-1) * kernel).sum(1).real + still
    return torch.allclose(true, ours, rtol=1e-6, atol=1e-6)
