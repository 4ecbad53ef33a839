"""A small instance of an encoding with random content, and measurements of its attributes."""

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
from toeplens.encodings.seen import Seen
from toeplens.encodings.shapes import Positions, Stream
from toeplens.ground import InputError

# default sizes of the instances that are checked
SIZES = {"d_model": 24, "num_heads": 3, "head_dim": 8, "max_len": 64}


def randomise(encoding: PositionalEncoding, seed: int) -> PositionalEncoding:
    """Draw every parameter from a normal distribution, so that nothing is zero by its initialisation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return encoding.eval()


@dataclass
class Specimen:
    """An encoding with random parameters, between random projections of the width it needs; all in float64.

    build  makes a new instance, with new parameters
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
        """Positions ``start``, ``start`` + 1, ..., within the table if there is one."""
        if self.encoding.bounded:
            start = min(start, self.encoding.max_len - length)
        return self.encoding.place(torch.arange(start, start + length))

    def project(self, x: Stream) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, H, N, d] of embedded tokens; v has the head's own width."""
        q, k, v = (x.unsqueeze(1) @ projection.to(x.dtype) for projection in self.projections)
        return q, k, v[..., : self.encoding.head_dim]

    def layer(self, x: Stream, positions: Positions, encoding: PositionalEncoding | None = None) -> dict[str, Any]:
        """The keyword arguments of attention; ``x`` are the embedded tokens at these positions."""
        encoding = self.encoding if encoding is None else encoding
        told = {"encoding": encoding, "q_positions": positions, "k_positions": positions, "scale": self.scale}
        return {**told, "notes": encoding.note(x)}

    def attend(
        self, x: Stream, positions: Positions, *, encoding: PositionalEncoding | None = None, **more: Any
    ) -> Float[Tensor, "B H N d"]:
        """The whole layer: input vectors, projections, key features, attention."""
        x = (encoding or self.encoding).embed(x, positions)
        return attend(*self.project(x), **self.layer(x, positions, encoding), **more)

    def logits(
        self, x: Stream, positions: Positions, *, encoding: PositionalEncoding | None = None, **more: Any
    ) -> Float[Tensor, "B H N N"]:
        """The layer's logits; minus infinity where a key is masked."""
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


NOTHING = 1e-9  # relative differences of float64 numbers below this are rounding
LENGTH = 16


@dataclass(frozen=True)
class Facts:
    """Where and how position enters, as measured on random input."""

    couplings: frozenset[str]
    data_dependent: bool
    toeplitz: bool


def measure(specimen: Specimen) -> Facts:
    """Measure the attributes of the specimen's encoding.

    couplings       the hooks that change something (a rotation that leaves a content part unchanged is a concatenation)
    data_dependent  whether the logit of a fixed query and key changes with the other tokens or with other content
                    features. If not: whether the logits, over many contents and position pairs, are more than a fixed
                    set of functions of position (for one query, a matrix of low rank)
    toeplitz        whether logits depend only on the offset if the content is the same everywhere (for input vectors:
                    whether their inner products do); not measured for data-dependent encodings
    """
    couplings = _couplings(specimen)
    dependent = _depends_on_others(specimen, couplings) or _is_no_kernel_family(specimen, couplings)
    return Facts(couplings, dependent, not dependent and _is_toeplitz(specimen, couplings))


def _seen(specimen: Specimen) -> tuple[Seen, Positions]:
    x = specimen.content(2, LENGTH)
    seen = Seen.of(*specimen.project(x)[:2], notes=specimen.encoding.note(x), scale=specimen.scale)
    return seen, specimen.positions(LENGTH)


def _couplings(specimen: Specimen) -> frozenset[str]:
    encoding, found = specimen.encoding, set()
    seen, p = _seen(specimen)
    x = specimen.content(2, LENGTH)
    if apart(encoding.embed(x, p), x) > NOTHING:
        found.add("input")
    q, k = encoding.hook("rotate", seen.q, seen.k, p, p, seen=seen)
    if q.shape != seen.q.shape or apart(q, seen.q) > NOTHING:
        content = encoding.head_dim
        beside = encoding.query_dim > content and q.shape == seen.q.shape
        kept = beside and apart(q[..., :content], seen.q[..., :content]) <= NOTHING
        found.add("concatenation" if kept else "rotation")
    plain = q @ k.transpose(-2, -1)
    if apart(encoding.hook("score", q, k, p, p, seen=seen).tril(), plain.tril()) > NOTHING:
        found.add("accumulated")
    bias = encoding.hook("bias", p, p, seen=seen)
    if bias is not None and float(bias.detach().abs().max()) > NOTHING:
        found.add("bias")
    logits = plain * specimen.scale
    if apart(encoding.hook("transform_logits", logits, p, p, seen=seen).tril(), logits.tril()) > NOTHING:
        found.add("logits")
    weights = logits.softmax(-1)
    if apart(encoding.hook("transform_weights", weights, p, p, seen=seen).tril(), weights.tril()) > NOTHING:
        found.add("weights")
    if "logits" not in found and encoding.hook("add_values", weights, p, p, seen=seen) is not None:
        found.add("logits")
    return frozenset(found or {"none"})


def loses_bias(specimen: Specimen) -> bool:
    """Whether `transform_logits` gives the same result with and without a bias in the logits."""
    seen, p = _seen(specimen)
    logits = seen.q @ seen.k.transpose(-2, -1) * specimen.scale
    hook = specimen.encoding.hook
    made = [hook("transform_logits", logits + bias, p, p, seen=seen) for bias in (0.0, torch.rand_like(logits))]
    return apart(*made) <= NOTHING


def logits_of(specimen: Specimen, q: Tensor, k: Tensor, x: Tensor, *, causal: bool = True) -> Tensor:
    """The logits of given queries and keys at positions 0, 1, 2, ..., with the key features of content ``x``."""
    return attention_logits(q, k, **specimen.layer(x, specimen.positions(q.shape[-2])), causal=causal)


def _depends_on_others(specimen: Specimen, couplings: frozenset[str]) -> bool:
    encoding, row, column = specimen.encoding, LENGTH - 4, 5
    positions = specimen.positions(LENGTH)
    if "input" in couplings:
        added = [encoding.embed(x, positions) - x for x in (specimen.content(2, LENGTH), specimen.content(2, LENGTH))]
        if apart(*added) > NOTHING:
            return True
    contents = [specimen.content(1, LENGTH) for _ in range(2)]
    (q, k, _), (other_q, other_k, _) = (specimen.project(x) for x in contents)
    other_q[..., row, :], other_k[..., column, :] = q[..., row, :], k[..., column, :]
    results = logits_of(specimen, q, k, contents[0]), logits_of(specimen, other_q, other_k, contents[1])
    if apart(*(logits[..., row, column] for logits in results)) > NOTHING:
        return True
    if "weights" not in couplings:
        return False
    weights = torch.rand(2, encoding.num_heads, LENGTH, LENGTH, dtype=torch.float64, generator=specimen.generator)
    seen = [_seen(specimen)[0] for _ in range(2)]
    made = (encoding.hook("transform_weights", weights, positions, positions, seen=each) for each in seen)
    return apart(*made) > NOTHING


def _is_no_kernel_family(specimen: Specimen, couplings: frozenset[str]) -> bool:
    """Whether one head's logits, as a matrix of contents by position pairs, do not have low rank."""
    if couplings <= {"none", "input"}:
        return False
    encoding = specimen.encoding
    most = 4 * encoding.query_dim + 4  # sums of products of a query, a key and fixed functions stay well below this
    length = 2 * most  # more distances than that
    length = min(length, encoding.max_len) if encoding.bounded else length
    positions = specimen.positions(length)
    for size in (1, 8):  # a content-dependent phase shows only at large values
        rows = []
        for x in (size * specimen.content(3 * most, 1)).split(32):
            x = x.expand(-1, length, -1)
            q, k, _ = specimen.project(x)
            told = {**specimen.layer(x, positions), "q_positions": positions[-1:]}
            rows.append(attention_logits(q[..., -1:, :], k, **told)[:, 0, 0])
        logits = torch.cat(rows).detach()
        singular = torch.linalg.svdvals(logits[:, logits.isfinite().all(0)])  # masked keys carry no information
        if int((singular > NOTHING * singular[0]).sum()) > most:
            return True
    return False


def _is_toeplitz(specimen: Specimen, couplings: frozenset[str]) -> bool:
    encoding = specimen.encoding
    strides = (1,) if encoding.bounded else (1, 397)  # close, and far beyond any threshold
    return all(_is_toeplitz_at(specimen, couplings, torch.arange(LENGTH) * stride) for stride in strides)


def _is_toeplitz_at(specimen: Specimen, couplings: frozenset[str], places: Tensor) -> bool:
    encoding = specimen.encoding
    positions = encoding.place(places)
    if couplings == {"input"}:
        rows = encoding.embed(torch.zeros(1, LENGTH, encoding.d_model, dtype=torch.float64), positions)
        return _constant_diagonals(rows @ rows.transpose(-1, -2))
    if "weights" in couplings:
        seen, _ = _seen(specimen)
        ones = torch.ones(2, encoding.num_heads, LENGTH, LENGTH, dtype=torch.float64)
        if not _constant_diagonals(encoding.hook("transform_weights", ones, positions, positions, seen=seen)):
            return False
    x = specimen.content(1, 1).expand(1, LENGTH, -1)
    if encoding.axes == 1:
        return _constant_diagonals(specimen.logits(x, positions, causal=False))
    scattered = positions[torch.randperm(LENGTH, generator=specimen.generator)]
    try:
        moved = specimen.logits(x, scattered + torch.arange(1, encoding.axes + 1), causal=False)
    except InputError:
        return False  # these coordinates are not lengths: they cannot be shifted
    return apart(moved, specimen.logits(x, scattered, causal=False)) <= NOTHING


def _constant_diagonals(matrix: Tensor) -> bool:
    return apart(matrix[..., 1:, 1:], matrix[..., :-1, :-1]) <= NOTHING


def declared(encoding: PositionalEncoding) -> Facts:
    """The attributes that the encoding declares."""
    return Facts(frozenset({encoding.coupling, *encoding.also_couples}), encoding.data_dependent, encoding.toeplitz)
