"""One call of an attention module, taken apart and proved; and what the measures of `toeplens.lens` take of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.ground import InputError
from toeplens.lens.kit.pieces import NoForm
from toeplens.sources.huggingface.capture.masks import Reach, at_rows, blocks, padded_lengths, reach_of, table_by_offset
from toeplens.sources.huggingface.capture.rotation import Rotation
from toeplens.sources.huggingface.model import tolerance

_AT_ONCE = 1 << 19  # weights that are formed again, over batch and heads
_FEWEST = 8  # queries whose weights are, however many that is: the first of causal attention alone would prove nothing
_BLOCK = 1 << 20  # of those that are looked at, at once
_TOLD = 3  # tokens
Kind = Literal["self", "cross"]
Side = Literal["encoder", "decoder"]
Place = tuple[str, str, int]  # side, kind, layer


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Weights = softmax(softcap(scale q . k) + bias) over the visible keys and sinks.

    q, k, v    [B, H, Nq, d], [B, G, Nk, d], [B, G, Nk, dv] as they enter the products; head h reads h // (H / G)
    scale      factor of q . k
    softcap    c of c tanh(x / c), which the scaled product passes through; None if it does not
    sinks      [H] one more logit of each head, which takes weight and gives no value; [H, B, Nq] where each query has
               its own; None if there is none
    bias       [B or 1, H or 1, Nq or 1, Nk] what is added after the cap, 0 where nothing is visible; None if nothing is
    causal     whether keys after the query are hidden
    visible    the same shape as the bias: whether the query sees the key; None if every key is seen that ``causal``
               leaves
    """

    q: Float[Tensor, "B H Nq d"] = field(repr=False)
    k: Float[Tensor, "B G Nk d"] = field(repr=False)
    v: Float[Tensor, "B G2 Nk dv"] = field(repr=False)
    scale: float
    softcap: float | None = None
    sinks: Float[Tensor, "H"] | Float[Tensor, "H B Nq"] | None = None
    bias: Float[Tensor, "_B _H _Nq Nk"] | None = field(default=None, repr=False)
    causal: bool = False
    visible: Bool[Tensor, "_B _H _Nq Nk"] | None = field(default=None, repr=False)

    def logits(
        self, rows: Int[Tensor, "R"] | None = None, keys: slice = slice(None), dtype: torch.dtype = torch.float64
    ) -> Float[Tensor, "B H R K"]:
        """softcap(scale q . k) + bias at these queries and keys, all unless given; -inf where a key is not visible."""
        rows = torch.arange(self.q.shape[2], device=self.q.device) if rows is None else rows
        k = self.k[:, :, keys]  # the heads of a group are rows of one product: keys are not repeated
        q = (self.scale * self.q.index_select(2, rows).to(dtype)).unflatten(1, (k.shape[1], -1))
        made = q.flatten(2, 3) @ k.to(dtype).transpose(-2, -1)
        made = made.unflatten(2, q.shape[2:4]).flatten(1, 2)
        if self.softcap is not None:
            made = self.softcap * (made / self.softcap).tanh()
        if self.bias is not None:
            made = made + at_rows(self.bias[..., keys], rows).to(dtype)
        if self.visible is not None:
            made = made.masked_fill(~at_rows(self.visible[..., keys], rows), -torch.inf)
        if self.causal and len(rows):
            place = (keys.start or 0) + torch.arange(k.shape[2], device=rows.device)
            after = slice(max(0, int(rows.min()) + 1 - (keys.start or 0)), None)  # all queries see those before
            made[..., after].masked_fill_(place[after] > rows.unsqueeze(-1), -torch.inf)
        return made

    def seen(self, rows: Int[Tensor, "R"], keys: slice) -> Bool[Tensor, "_B _H R K"]:
        """Whether these queries see these keys."""
        place = torch.arange(self.k.shape[2], device=rows.device)[keys]
        later = place > rows.unsqueeze(-1) if self.causal else torch.zeros_like(place > rows.unsqueeze(-1))
        return ~later[None, None] if self.visible is None else at_rows(self.visible[..., keys], rows) & ~later

    def softmax(
        self, logits: Float[Tensor, "B H R K"], rows: Int[Tensor, "R"] | None = None
    ) -> Float[Tensor, "B H R K"]:
        """The weights; a sink is one more logit of each head, whose weight is dropped.

        Arguments
            rows  the queries of the logits; all unless given

        Raises `InputError` for logits of some queries where each has a sink of its own and they are not said.
        """
        if self.sinks is None:
            return logits.softmax(-1)
        more = (
            self.sinks.view(1, -1, 1) if self.sinks.ndim == 1 else self._own_sinks(len(logits), logits.shape[2], rows)
        )
        more = more.to(logits.dtype).unsqueeze(-1).expand(*logits.shape[:3], 1)
        return torch.cat((logits, more), -1).softmax(-1)[..., :-1]

    def _own_sinks(self, batch: int, queries: int, rows: Int[Tensor, "R"] | None) -> Float[Tensor, "B H R"]:
        """Those of these queries, in the first so many sequences."""
        assert self.sinks is not None
        own = self.sinks[:, :batch].transpose(0, 1)
        own = own if rows is None else own.index_select(2, rows)
        if own.shape[2] != queries:
            raise InputError(
                f"sinks: each of {own.shape[2]} queries has its own, and weights of {queries} were asked for without "
                "saying which; give fewer tokens."
            )
        return own


@dataclass(frozen=True)
class Proof:
    """How far weights and outputs formed again in float64 are from those that the model itself went on with.

    weights    largest difference of an attention weight; None where the model formed none, but outputs alone
    outputs    largest difference of a head's output, relative to the largest output of the layer
    queries    how many queries of a sequence were formed again
    tolerance  what is let pass
    """

    weights: float | None
    outputs: float
    queries: int
    tolerance: float


def proved_rows(q: Float[Tensor, "B H Nq d"], k: Float[Tensor, "B _G Nk d"]) -> Int[Tensor, "R"]:
    """The queries whose weights are formed again: all, or on long inputs some, first and last among them."""
    count = min(q.shape[2], max(_FEWEST, _AT_ONCE // (q.shape[0] * q.shape[1] * k.shape[2])))
    return torch.linspace(0, q.shape[2] - 1, count, device=q.device, dtype=torch.float64).round().long()


def prove(
    name: str,
    parts: Attention,
    rows: Int[Tensor, "R"],
    own: Float[Tensor, "B H R Nk"] | None,
    heads: Float[Tensor, "B Nq H dv"],
) -> Proof:
    """Form weights and outputs again at these queries; ``own`` are the model's weights there.

    Raises `InputError` that names the module where they are not the model's own. Queries that see no key are left out:
    their weights are whatever the model's substitute for minus infinity makes of them.
    """
    q, k, v = parts.q, parts.k, parts.v
    fits = q.ndim == k.ndim == v.ndim == 4 and q.shape[1] % k.shape[1] == 0 and q.shape[1] % v.shape[1] == 0
    fits = fits and q.shape[3] == k.shape[3] and (own is None or own.shape == (*q.shape[:2], len(rows), k.shape[2]))
    if not fits or heads.shape != (q.shape[0], q.shape[2], q.shape[1], v.shape[3]):
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v, own, heads) if x is not None)
        raise InputError(
            f"model: the attention of {name} was not understood: its queries, keys, values, weights and outputs are of "
            f"shapes that do not fit, {shapes}."
        )
    formed = parts.logits(rows)
    seen = formed.isfinite().any(-1, keepdim=True)
    formed = formed.masked_fill(~seen, 0)
    ours = parts.softmax(formed, rows)
    made = torch.einsum("bhqk,bhkd->bqhd", ours, v.repeat_interleave(q.shape[1] // v.shape[1], 1).double())
    outputs, asked = heads.index_select(1, rows).double(), seen.transpose(1, 2)
    wrong = 0.0 if own is None else float(((ours - own.double()) * seen).abs().max())
    if own is not None and parts.sinks is not None:  # some models return them before the sink has taken its part
        wrong = min(wrong, float(((formed.softmax(-1) - own.double()) * seen).abs().max()))
    size = float((outputs * asked).abs().max())
    missed = float(((made - outputs) * asked).abs().max()) / (size if size > 0 else 1.0)
    allowed = tolerance(max(q.dtype, heads.dtype, key=lambda dtype: torch.finfo(dtype).eps))
    if not (wrong <= allowed and missed <= allowed):
        hint = "" if allowed == tolerance(torch.float32) else f", and the model in float32 instead of {q.dtype}"
        raise InputError(
            f"model: the attention of {name} was not understood: formed again from its parts, its weights differ by "
            f"{wrong:.1e} and its outputs by {missed:.1e} (relative) from the model's own, where at most {allowed:.0e} "
            f"is allowed; known are a scaled product, a cap, a bias, a mask and sinks{hint}."
        )
    return Proof(None if own is None else wrong, missed, len(rows), allowed)


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
            weights = self.softmax(made, rows)
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
                f"{self.module}: its queries see {ends}; what is known is all keys, those before, a window, and chunks."
            )
        return None if ends is None else ends.expand(self.q.shape[0])

    def bias_by_offset(self) -> Float[Tensor, "_H D"] | None:
        """The bias as a function of the offset i - j: of 0 .. N-1 if causal, else of -(N-1) .. N-1; None without one.

        A number that all keys of a query share changes no weight, so a bias of this form but for such numbers counts,
        with 0 at offset 0. Raises `NoForm` for a bias of another form.
        """
        if self.bias is None:
            return None
        found, length, allowed = [], self.q.shape[2], tolerance(self.bias.dtype)
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
                raise NoForm(f"{self.module}: its bias is no function of the offset alone.")
            found.append(table[length - 1 :] if self.causal else table)
        return torch.stack(found)

    def placed(self) -> dict[str, Any]:
        """What `toeplens.lens.behaviour` takes of this layer: queries, keys and all that it names of their logits.

        The rotated pairs come first, interleaved, with the rotation's magnitude in them. A cap is left out: they are
        the logits before it. Raises `NoForm` where those are not a rotation of pairs by an angle a position and a bias
        by offset.
        """
        if self.kind == "cross":
            raise NoForm(f"{self.module}: its queries and keys are of different sequences.")
        if self.q.shape[2] != self.k.shape[2]:
            raise NoForm(f"{self.module}: it has {self.q.shape[2]} queries for {self.k.shape[2]} keys.")
        if self.unknown is not None:
            raise NoForm(f"{self.module}: {self.unknown}")
        if self.softcap is not None and self.bias is not None:
            raise NoForm(f"{self.module}: a bias is added after its cap, c tanh(x / c).")
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
            "bias": self.bias_by_offset(),
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
