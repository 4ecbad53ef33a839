"""One call of an attention module, taken apart and proved; and what the measures of `toeplens.lens` take of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.lens.kit.terms import NoForm
from toeplens.sources.huggingface.capture.attention import (
    Attention,
    Reach,
    blocks,
    padded_lengths,
    reach_of,
    table_by_offset,
)
from toeplens.sources.huggingface.capture.proof import Proof
from toeplens.sources.huggingface.capture.rotation import Rotation
from toeplens.sources.huggingface.model import tolerance

_BLOCK = 1 << 20  # of those that are looked at, at once
_TOLD = 3  # tokens
Kind = Literal["self", "cross"]
Side = Literal["encoder", "decoder"]
Place = tuple[str, str, int]  # side, kind, layer


@dataclass(frozen=True, kw_only=True)
class AttentionCall(Attention):
    """One call of an attention module, in its parts (`Attention`).

    It holds the model's own tensors, not copies: read them before the pass goes on.

    layer      from 0, counted over the attention calls of its kind and side, in the order of the pass
    kind       ``self`` or ``cross``
    side       ``encoder`` or ``decoder``; of a model without both, whether the keys after the query are visible
    module     name of the module in the model, and its class
    weights    [B, H, Nq, Nk] the model's own; None on long inputs, where they are formed some queries at a time, and
               where it forms none, but outputs alone
    heads      [B, Nq, H, dv] each head's output, before the output projection
    unrotated  q and k before their rotation, as the dimensions lie after it but for `Rotation.pairs`; None where no
               rotation was seen
    rotation   what the rotation is; None where there is none, or ``unknown`` tells why it is not known
    unknown    why it is not known whether or how q and k are rotated, as a sentence; None where it is known
    proof      how near the parts come to the model's own weights and outputs
    positions  [B or 1, Nq] of the queries, and of the keys too where they are of the same tokens
    pieces     how many products the weights went into, each with values of its own; ``v`` and ``heads`` are theirs, one
               piece's after the other's, as if it were one product
    encoding   name of the encoding that `toeplens.hosts.install` put here; None for the model's own position
    """

    layer: int
    kind: Kind
    side: Side
    module: str
    weights: Float[Tensor, "B H Nq Nk"] | None = field(repr=False)
    heads: Float[Tensor, "B Nq H dv"] = field(repr=False)
    unrotated: tuple[Float[Tensor, "B H Nq d"], Float[Tensor, "B G Nk d"]] | None = field(repr=False)
    rotation: Rotation | None = field(repr=False)
    unknown: str | None
    proof: Proof
    positions: Int[Tensor, "_B Nq"] = field(repr=False)
    pieces: int = 1
    encoding: str | None = None

    @property
    def place(self) -> Place:
        """Side, kind and layer, which tell it from the pass's other calls."""
        return self.side, self.kind, self.layer

    def blocks(self) -> Iterator[tuple[Int[Tensor, "R"], int, Float[Tensor, "B H R K"], Float[Tensor, "B H R K"]]]:
        """Queries, the first key that is given, logits and weights of the keys from it on, some queries at a time.

        All keys are there that any of the queries sees. In float32, or the model's own dtype if that is wider. A query
        that sees no key has weights 0; a sink's is left out.
        """
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        for part in blocks(self.q.shape[2], self.q.shape[0] * self.q.shape[1] * self.k.shape[2], _BLOCK):
            rows = torch.arange(part.start, part.stop, device=self.q.device)
            first = 0 if self.window is None else max(0, part.start - self.window + 1)
            first = first if self.chunk is None else part.start - part.start % self.chunk
            last = self.k.shape[2] if self.window is None else min(self.k.shape[2], part.stop + self.window - 1)
            last = part.stop if self.causal and self.kind == "self" else last
            made = self.logits(rows, slice(first, last), dtype)
            weights = self.softmax(made, rows, slice(first, last))
            yield rows, first, made, weights if self.visible is None else weights.nan_to_num(nan=0.0)

    @cached_property
    def _reach(self) -> Reach:
        there = self.visible is not None and self.kind == "self" and self.q.shape[2] == self.k.shape[2]
        return reach_of(self.visible, self.causal) if there and self.visible is not None else Reach()

    @property
    def window(self) -> int | None:
        """How many keys up to its own a query sees at most, on either side if not causal; None if it sees all."""
        return self._reach.window

    @property
    def chunk(self) -> int | None:
        """Positions are in chunks of so many, and a query sees none of a chunk before; None if they are not."""
        return self._reach.chunk

    @cached_property
    def lengths(self) -> Int[Tensor, "B"] | None:
        """Tokens before the padding, where padding is all that hides keys, beside ``causal`` and how far a query sees.

        None where nothing is padded. Raises `NoForm` where other keys are hidden: by packed sequences, by padding on
        the left.
        """
        if self.visible is None:
            return None
        ends = padded_lengths(self.visible, self.causal, self._reach)
        if isinstance(ends, str):
            raise NoForm(
                f"{self.module}: its queries see {ends}. Known masks are all keys, earlier keys, a window and chunks."
            )
        return None if ends is None else ends.expand(self.q.shape[0])

    def bias_by_offset(self) -> Float[Tensor, "_H D"] | None:
        """The bias as a function of the offset i - j: of 0 .. N-1 if causal, else of -(N-1) .. N-1; None without one.

        A number that all keys of a query share changes no weight, so a bias of this form but for such numbers counts,
        with 0 at offset 0. Raises `NoForm` for a bias of another form.
        """
        if self.bias is None:
            return None
        found, length = [], self.q.shape[2]
        allowed = max(tolerance(self.bias.dtype), self._bias_rounding())
        for head in range(self.bias.shape[1]):
            bias = self.bias[:, head].expand(-1, length, -1)
            seen = None
            if self.visible is not None:
                seen = self.visible[:, head if self.visible.shape[1] > 1 else 0].expand(-1, length, -1)
                bias = bias.expand(len(seen), -1, -1)
            # of fewer tokens, any table is a function of the offset but for a number a query
            ways = (False, True) if length > _TOLD else (False,)
            tries = (table_by_offset(bias, seen, self.causal, relative, allowed) for relative in ways)
            table = next((each for each in tries if each is not None), None)
            if table is None:
                raise NoForm(f"{self.module}: its bias is not a function of the offset only.")
            found.append(table[length - 1 :] if self.causal else table)
        return torch.stack(found)

    def _bias_rounding(self) -> float:
        """Largest relative difference that rounding explains of a bias made in 16 bits, whatever it was widened to.

        Such a bias holds numbers of 16 bits alone, or their products with the scale (Falcon's ALiBi): each is off by
        half a unit in the last place of the largest, and so is the query's own that is taken off.
        """
        assert self.bias is not None
        for dtype in (torch.bfloat16, torch.float16):
            for unit in (1.0, self.scale):
                x = self.bias / unit
                if bool(((x.to(dtype).to(x.dtype) - x).abs() <= 4 * torch.finfo(x.dtype).eps * x.abs()).all()):
                    return 2 * torch.finfo(dtype).eps
        return 0.0

    def _bias_by_position(self) -> Float[Tensor, "_B _H N N"] | None:
        """The bias as it is, if it does not depend on what keys hold; None where that is not known.

        That of an installed encoding does not, and no bias does that is the same for several sequences.
        """
        assert self.bias is not None
        if self.bias.shape[2] not in (1, self.q.shape[2]):
            return None
        alike = len(self.q) > 1 and (len(self.bias) == 1 or bool((self.bias == self.bias[:1]).all()))
        if self.encoding is None and not alike:
            return None
        return (self.bias[:1] if alike else self.bias).expand(-1, -1, self.q.shape[2], -1)

    def placed(self, *, tables: bool = False) -> dict[str, Any]:
        """What `toeplens.lens.behaviour` takes of this layer: queries, keys and all that it names of their logits.

        The rotated pairs come first, interleaved, with the rotation's magnitude in them. A cap is left out: they are
        the logits before it. Raises `NoForm` where those are not a rotation of pairs by an angle a position and a bias
        by offset.

        Arguments
            tables  give a bias by query and position, of 4 dimensions, where it is not by offset, and does not depend
                    on what keys hold
        """
        if self.kind == "cross":
            raise NoForm(f"{self.module}: its queries and keys are of different sequences.")
        if self.q.shape[2] != self.k.shape[2]:
            raise NoForm(f"{self.module}: it has {self.q.shape[2]} queries for {self.k.shape[2]} keys.")
        if self.unknown is not None:
            raise NoForm(f"{self.module}: {self.unknown}")
        if self.softcap is not None and self.bias is not None:
            raise NoForm(f"{self.module}: a bias is added after its cap, c tanh(x / c).")
        try:
            bias = self.bias_by_offset()
        except NoForm:
            bias = self._bias_by_position() if tables else None
            if bias is None:
                raise
        q, k, rotation = self.q, self.k, None
        if self.rotation is not None and self.unrotated is not None:
            pairs = self.rotation.pairs
            still = torch.ones(q.shape[-1], dtype=torch.bool, device=q.device)
            still[pairs.flatten()] = False
            order = torch.cat((pairs.flatten(), still.nonzero().flatten()))
            sizes = torch.ones(q.shape[-1], dtype=q.dtype, device=q.device)
            sizes[: pairs.numel()] = self.rotation.magnitudes.repeat_interleave(2).to(q.dtype)
            q, k = (x[..., order] * sizes for x in self.unrotated)
            rotation = self.rotation.frequencies
        return {
            "q": q,
            "k": k,
            "rotation": rotation,
            "pairing": "interleaved",
            "layout": "bhnd",
            "bias": bias,
            "causal": self.causal,
            "scale": self.scale,
            "lengths": self.lengths,
            "window": self.window,
            "chunk": self.chunk,
        }


def joined(pieces: Sequence[AttentionCall]) -> AttentionCall:
    """Products of the same weights with several values as one call, the values and outputs next to each other."""
    first, *others = pieces
    if not others:
        return first
    worst = max((each.proof for each in pieces), key=lambda proof: proof.outputs)
    return replace(
        first,
        v=torch.cat([each.v for each in pieces], dim=-1),
        heads=torch.cat([each.heads for each in pieces], dim=-1),
        proof=replace(
            worst, weights=max((each.proof.weights for each in pieces if each.proof.weights is not None), default=None)
        ),
        pieces=len(pieces),
    )
