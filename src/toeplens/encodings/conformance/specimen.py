"""A small instance of an encoding with random content around it, and attention over that content."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.encodings.attention import attend, attention_logits
from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.shapes import Positions, Stream

# sizes at which an encoding is checked unless others are given
SIZES = {"d_model": 24, "num_heads": 3, "head_dim": 8, "max_len": 64}


def randomise(encoding: PositionalEncoding, seed: int) -> PositionalEncoding:
    """Every parameter drawn anew from a normal distribution: a generic point, where nothing is zero by its start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return encoding.eval()


@dataclass
class Specimen:
    """An encoding at random parameters, between random projections of the width it needs; all in float64.

    build  makes a new instance, with fresh parameters
    """

    build: Callable[[], PositionalEncoding]
    seed: int = 0
    encoding: PositionalEncoding = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.encoding = randomise(self.build(), self.seed + 1).double()
        generator = torch.Generator().manual_seed(self.seed + 2)
        encoding = self.encoding
        shape = (3, encoding.num_heads, encoding.d_model, encoding.query_dim)
        self.projections = torch.randn(shape, generator=generator, dtype=torch.float64) / encoding.d_model**0.5
        self.scale = encoding.scale
        self.generator = generator

    def content(self, batch: int, length: int, dtype: torch.dtype = torch.float64) -> Stream:
        """Random token embeddings, with a mean that is not zero."""
        shape = (batch, length, self.encoding.d_model)
        return (torch.randn(shape, generator=self.generator, dtype=torch.float64) + 0.3).to(dtype)

    def positions(self, length: int, start: int = 0) -> Positions:
        """Places ``start``, ``start`` + 1, ..., inside the table where there is one."""
        if self.encoding.bounded:
            start = min(start, self.encoding.max_len - length)
        return self.encoding.place(torch.arange(start, start + length))

    def project(self, x: Stream) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, H, N, d] of embedded tokens; v has the head's own width."""
        q, k, v = (x.unsqueeze(1) @ projection.to(x.dtype) for projection in self.projections)
        return q, k, v[..., : self.encoding.head_dim]

    def layer(self, x: Stream, positions: Positions, encoding: PositionalEncoding | None = None) -> dict[str, Any]:
        """What attention is told beside queries and keys: ``x`` are the embedded tokens at these positions."""
        encoding = self.encoding if encoding is None else encoding
        told = {"encoding": encoding, "q_positions": positions, "k_positions": positions, "scale": self.scale}
        return {**told, "notes": encoding.note(x)}

    def attend(
        self, x: Stream, positions: Positions, *, encoding: PositionalEncoding | None = None, **more: Any
    ) -> Float[Tensor, "B H N d"]:
        """The whole layer: embed, project, note, attend."""
        x = (encoding or self.encoding).embed(x, positions)
        return attend(*self.project(x), **self.layer(x, positions, encoding), **more)

    def logits(
        self, x: Stream, positions: Positions, *, encoding: PositionalEncoding | None = None, **more: Any
    ) -> Float[Tensor, "B H N N"]:
        """The layer's logits; minus infinity where a key is hidden."""
        x = (encoding or self.encoding).embed(x, positions)
        return attention_logits(*self.project(x)[:2], **self.layer(x, positions, encoding), **more)

    def like(self, dtype: torch.dtype) -> PositionalEncoding:
        """A copy of the encoding with its parameters in ``dtype``."""
        return copy.deepcopy(self.encoding).to(dtype)


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the larger of 1 and the largest entry; minus infinities must coincide."""
    a, b = a.detach().double(), b.detach().double()
    same = a == b  # infinities too
    if bool(((~a.isfinite() | ~b.isfinite()) & ~same).any()):
        return float("inf")
    difference = torch.where(same, torch.zeros_like(a), a - b).abs().max() if a.numel() else torch.tensor(0.0)
    size = torch.where(b.isfinite(), b, torch.zeros_like(b)).abs().max() if b.numel() else torch.tensor(1.0)
    return float(difference / size.clamp(min=1.0))
