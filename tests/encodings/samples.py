"""What the tests of encodings are built from."""

from __future__ import annotations

import cmath
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, Rotary

SIZES = {"d_model": 24, "num_heads": 3, "head_dim": 8, "max_len": 64}
ModuleType = TypeVar("Made", bound=nn.Module)


def randomised(module: ModuleType, std: float = 1.0) -> ModuleType:
    """With parameters of a normal distribution, where nothing is zero by its start."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std)
    return module


def build(name: str, std: float | None = None, *, grad: bool = True, **options: Any) -> Any:
    """An encoding, of the sizes above unless others are given; with ``std`` in float64 and with drawn parameters."""
    torch.manual_seed(0)
    sizes = {size: options.pop(size, usual) for size, usual in SIZES.items()}
    encoding = encodings.build(name, **sizes, **options)
    return encoding if std is None else randomised(encoding.double().requires_grad_(grad), std)


def random_tensor(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape
    same = (ours == theirs) | ((ours - theirs).abs() <= tolerance)  # infinities are equal
    assert bool(same.all()), float((ours - theirs).detach().abs().max())


def vectors(
    length: int = 6, heads: int = 3, width: int = 8, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Queries and keys of two sequences."""
    return random_tensor(2, heads, length, width, dtype=dtype), random_tensor(
        2, heads, length, width, seed=2, dtype=dtype
    )


def rotated_logits(encoding: PositionalEncoding, q: Tensor, k: Tensor, places: Tensor) -> Tensor:
    """The products after the encoding's rotation, before any scale."""
    turned_q, turned_k = encoding.rotate(q, k, places, places)
    return (turned_q @ turned_k.mT).detach()


def pairs_of(x: Tensor, pairing: str = "interleaved") -> list[complex]:
    """A vector's pairs of dimensions as complex numbers."""
    values, half = x.tolist(), len(x) // 2
    sides = (values[:half], values[half:]) if pairing == "half" else (values[::2], values[1::2])
    return [complex(*pair) for pair in zip(*sides, strict=True)]


def pair_by_pair(
    q: Tensor, k: Tensor, factor: Callable[[int, int, int, int, int], complex], pairing: str = "interleaved"
) -> Tensor:
    """sum_t q_t conj(k_t) factor(sequence, head, row, column, t), complex, one query, key and pair at a time."""
    total = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.complex128)
    for b, h, row, column in itertools.product(*map(range, total.shape)):
        pairs = zip(pairs_of(q[b, h, row], pairing), pairs_of(k[b, h, column], pairing), strict=True)
        total[b, h, row, column] = sum(
            x * y.conjugate() * factor(b, h, row, column, t) for t, (x, y) in enumerate(pairs)
        )
    return total


def by_kernel(encoding: Rotary, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    """Re sum over pairs t of q_t conj(k_t) kernel_t(i - j), and the plain product of what is not turned."""
    turned = slice(encoding.first, encoding.first + 2 * encoding.frequencies.shape[-1])
    kernel = encoding.kernel((positions[:, None] - positions).flatten()).unflatten(-1, 2 * (len(positions),))
    shape, dim = ((2, -1), -2) if encoding.pairing == "half" else ((-1, 2), -1)
    one, other = (torch.complex(*x[..., turned].unflatten(-1, shape).unbind(dim)) for x in (q, k))
    pairs = torch.einsum("bhit,bhjt,htij->bhij", one, other.conj(), kernel.expand(q.shape[1], -1, -1, -1)).real
    return pairs + q @ k.mT - q[..., turned] @ k[..., turned].mT


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def rope(offset: float, t: int, width: int = 8, base: float = 10000.0) -> complex:
    """RoPE's factor of one pair."""
    return cmath.exp(1j * offset * base ** (-2 * t / width))
