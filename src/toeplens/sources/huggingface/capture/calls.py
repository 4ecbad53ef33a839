"""One verified attention call of a module, and its form for the measures of `toeplens.lens`."""

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

_BLOCK = 1 << 20  # numbers checked at once
_TOLD = 3  # tokens that determine a bias by offset
Kind = Literal["self", "cross"]
Side = Literal["encoder", "decoder"]
Place = tuple[str, str, int]  # side, kind, layer


@dataclass(frozen=True, kw_only=True)
class AttentionCall(Attention):
    """One attention call of a module, in its parts (`Attention`).

    It holds the model's own tensors, not copies: read them before the pass continues.

    layer      from 0, counted over the attention calls of its kind and side, in the order of the pass
    kind       ``self`` or ``cross``
    side       ``encoder`` or ``decoder``; for a model without both, whether the keys after the query are visible
    module     name of the module in the model, and its class
    weights    [B, H, Nq, Nk] the model's own; None on long inputs, where they are computed some queries at a time, and
               for models that return only outputs
    heads      [B, Nq, H, dv] each head's output, before the output projection
    unrotated  q and k before their rotation, with dimensions ordered as after it except for `Rotation.pairs`; None if
               no rotation was observed
    rotation   the rotation; None if there is none, or if it is not known (see ``unknown``)
    unknown    why it is not known whether or how q and k are rotated, as a sentence; None if it is known
    proof      how close the parts come to the model's own weights and outputs
    positions  [B or 1, Nq] of the queries, and of the keys too if they belong to the same tokens
    pieces     number of products of the weights, each with its own values; ``v`` and ``heads`` are their
               concatenation, as if it were one product
    encoding   name of the encoding installed by `toeplens.hosts.install`; None for the model's own
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
        """Side, kind and layer, which identify the call in its pass."""
        return self.side, self.kind, self.layer

    def blocks(self) -> Iterator[tuple[Int[Tensor, "R"], int, Float[Tensor, "B H R K"], Float[Tensor, "B H R K"]]]:
        """Queries, the first key, logits and weights of the keys from it on, some queries at a time.

        Contains all keys that any of the queries sees. In float32, or the model's own dtype if wider. The weights are 0
        for a query that sees no key; the weight of a sink is left out.
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
        """Maximum number of keys up to its own that a query sees, on either side if not causal; None for no limit."""
        return self._reach.window

    @property
    def chunk(self) -> int | None:
        """Number of positions per chunk; a query sees no key of an earlier chunk. None without chunks."""
        return self._reach.chunk

    @cached_property
    def lengths(self) -> Int[Tensor, "B"] | None:
        """Number of tokens before the padding, if only padding, ``causal``, window and chunks mask keys.

        None without padding. Raises `NoForm` for other masks: packed sequences, padding on the left.
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
        """The bias by offset i - j: 0 .. N-1 if causal, otherwise -(N-1) .. N-1; None without a bias.

        A constant over all keys of a query changes no weight, so a bias of this form plus such constants is accepted,
        and set to 0 at offset 0. Raises `NoForm` for a bias of another form.
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
            # with fewer tokens, any table depends only on the offset up to a constant per query
            ways = (False, True) if length > _TOLD else (False,)
            tries = (table_by_offset(bias, seen, self.causal, relative, allowed) for relative in ways)
            table = next((each for each in tries if each is not None), None)
            if table is None:
                raise NoForm(f"{self.module}: its bias is not a function of the offset only.")
            found.append(table[length - 1 :] if self.causal else table)
        return torch.stack(found)

    def _bias_rounding(self) -> float:
        """Largest relative difference that rounding explains for a 16-bit bias, even if converted later.

        Such a bias contains only 16-bit numbers, or their products with the scale (Falcon's ALiBi). Each is off by half
        a unit in the last place of the largest, and so is the subtracted value at the query's own key.
        """
        assert self.bias is not None
        for dtype in (torch.bfloat16, torch.float16):
            for unit in (1.0, self.scale):
                x = self.bias / unit
                if bool(((x.to(dtype).to(x.dtype) - x).abs() <= 4 * torch.finfo(x.dtype).eps * x.abs()).all()):
                    return 2 * torch.finfo(dtype).eps
        return 0.0

    def _bias_by_position(self) -> Float[Tensor, "_B _H N N"] | None:
        """The bias as a table, if it does not depend on the content of keys; None if that is not known.

        An installed encoding's bias does not, nor does a bias that is equal for several sequences.
        """
        assert self.bias is not None
        if self.bias.shape[2] not in (1, self.q.shape[2]):
            return None
        alike = len(self.q) > 1 and (len(self.bias) == 1 or bool((self.bias == self.bias[:1]).all()))
        if self.encoding is None and not alike:
            return None
        return (self.bias[:1] if alike else self.bias).expand(-1, -1, self.q.shape[2], -1)

    def placed(self, *, tables: bool = False) -> dict[str, Any]:
        """Arguments of `toeplens.lens.behaviour` for this layer: queries, keys and everything else about their logits.

        The rotated pairs come first, interleaved, with the rotation's magnitude applied. A softcap is left out: these
        are the logits before it. Raises `NoForm` unless these are a rotation of pairs by an angle per position and a
        bias by offset.

        Arguments
            tables  return a 4-D bias by query and position if it is not by offset and does not depend on the content
                    of keys
        """
        if self.kind == "cross":
            raise NoForm(f"{self.module}: its queries and keys come from different sequences.")
        if self.q.shape[2] != self.k.shape[2]:
            raise NoForm(f"{self.module}: it has {self.q.shape[2]} queries for {self.k.shape[2]} keys.")
        if self.unknown is not None:
            raise NoForm(f"{self.module}: {self.unknown}")
        if self.softcap is not None and self.bias is not None:
            raise NoForm(f"{self.module}: a bias is added after its softcap, c tanh(x / c).")
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
    """Combine products of the same weights with several values into one call, with values and outputs concatenated."""
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
