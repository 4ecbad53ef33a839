"""One call of an attention module, taken apart; and what the measures of `toeplens.lens` take of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.lens.decompose import NoForm
from toeplens.sources.huggingface.proof import Proof, logits, tolerance
from toeplens.sources.huggingface.rotation import Rotation

Kind = Literal["self", "cross"]
Side = Literal["encoder", "decoder"]


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention module: weights = softmax(softcap(scale q . k) + bias) over the visible keys and sinks.

    It holds the model's own tensors, not copies: read them before the pass goes on.

    layer      from 0, counted over the attention calls of its kind and side, in the order of the pass
    kind       ``self`` or ``cross``
    side       ``encoder`` or ``decoder``; of a model without both, whether the keys after the query are visible
    module     name of the module in the model, and its class
    q, k, v    [B, H, Nq, d], [B, G, Nk, d], [B, G, Nk, dv] as they enter the products; head h reads h // (H / G)
    scale      factor of q . k
    softcap    c of c tanh(x / c), which the scaled product passes through; None if it does not
    sinks      [H] one more logit of each head, which takes weight and gives no value; None if there is none
    bias       [B or 1, H or 1, Nq or 1, Nk] what is added after the cap, 0 where nothing is visible; None if nothing is
    visible    the same shape: whether the query sees the key; None if every key is seen
    weights    [B, H, Nq, Nk] the model's own; None where it forms none, but outputs alone
    heads      [B, Nq, H, dv] each head's output, before the output projection
    unrotated  q and k before their rotation, as the dimensions lie after it but for `Rotation.pairs`; None where no
               rotation was seen
    rotation   what the rotation is; None where there is none, or ``unknown`` tells why it is not known
    unknown    why it is not known whether or how q and k are rotated, as a sentence; None where it is known
    proof      how near the parts come to the model's own weights and outputs
    """

    layer: int
    kind: Kind
    side: Side
    module: str
    q: Float[Tensor, "B H Nq d"] = field(repr=False)
    k: Float[Tensor, "B G Nk d"] = field(repr=False)
    v: Float[Tensor, "B G2 Nk dv"] = field(repr=False)
    scale: float
    softcap: float | None
    sinks: Float[Tensor, "H"] | None
    bias: Float[Tensor, "_B _H _Nq Nk"] | None = field(repr=False)
    visible: Bool[Tensor, "_B _H _Nq Nk"] | None = field(repr=False)
    weights: Float[Tensor, "B H Nq Nk"] | None = field(repr=False)
    heads: Float[Tensor, "B Nq H dv"] = field(repr=False)
    unrotated: tuple[Float[Tensor, "B H Nq d"], Float[Tensor, "B G Nk d"]] | None = field(repr=False)
    rotation: Rotation | None = field(repr=False)
    unknown: str | None
    proof: Proof

    def logits(self, rows: Int[Tensor, "R"] | None = None) -> Float[Tensor, "B H R Nk"]:
        """The logits in float64 at these queries, all unless given; minus infinity where a key is not visible."""
        rows = torch.arange(self.q.shape[2], device=self.q.device) if rows is None else rows
        parts = {"scale": self.scale, "softcap": self.softcap, "bias": self.bias, "visible": self.visible}
        return logits(self.q, self.k, **parts, rows=rows)

    @cached_property
    def causal(self) -> bool:
        """Whether no query sees a key after it."""
        return self.visible is not None and self.kind == "self" and not bool(self.visible.triu(1).any())

    @cached_property
    def window(self) -> int | None:
        """Of causal attention, how many keys up to its own a query sees at most, where that is less than all."""
        if not self.causal or self.visible is None:
            return None
        near = self.visible.any(0).any(0)
        reach = int((_offsets(near) * near).max()) + 1
        return reach if reach < near.shape[-1] else None

    @cached_property
    def lengths(self) -> Int[Tensor, "B"] | None:
        """Tokens before the padding, where padding is all that hides keys from queries of self-attention.

        None where nothing is padded. Raises `NoForm` where other keys are hidden than padding and, if the attention is
        causal, those after the query: by a window, by packed sequences, by padding on the left.
        """
        batch, length = self.q.shape[0], self.q.shape[2]
        if self.visible is None:
            return None
        visible = self.visible.expand(batch, -1, length, -1)
        places = torch.arange(length, device=visible.device)
        ends = visible.any(2).any(1).sum(-1)
        there = places < ends.unsqueeze(-1)
        wanted = there.unsqueeze(1).expand(-1, length, -1)
        wanted = wanted.tril() if self.causal else wanted
        if bool(((visible != wanted.unsqueeze(1)) & there[:, None, :, None]).any()):
            seen = f"a window of {self.window} positions" if self.window else "some of the keys"
            raise NoForm(f"{self.module}: its queries see {seen}; what is known is all keys, or all up to the query.")
        return None if bool(there.all()) else ends

    def bias_by_offset(self) -> Float[Tensor, "_H D"] | None:
        """The bias as a function of the offset i - j: of 0 .. N-1 if causal, else of -(N-1) .. N-1; None without one.

        A number that all keys of a query share changes no weight, so a bias of this form but for such numbers counts,
        with 0 at offset 0. Raises `NoForm` for a bias of another form.
        """
        if self.bias is None:
            return None
        found = []
        for head in range(self.bias.shape[1]):
            plain = self._of_offset(head, relative=False)
            table = self._of_offset(head, relative=True) if plain is None else plain
            if table is None:
                raise NoForm(f"{self.module}: its bias is no function of the offset alone.")
            found.append(table)
        return torch.stack(found)

    def _of_offset(self, head: int, *, relative: bool) -> Float[Tensor, "D"] | None:
        """One head's bias by offset, less that of each query's own key if relative; None where it is no such thing."""
        assert self.bias is not None
        length = self.q.shape[2]
        bias = self.bias[:, head].double().expand(self.q.shape[0], length, -1)
        seen = torch.ones_like(bias, dtype=torch.bool)
        if self.visible is not None:
            seen = self.visible[:, head if self.visible.shape[1] > 1 else 0].expand_as(bias)
        if relative:
            bias = bias - bias.diagonal(dim1=1, dim2=2).unsqueeze(-1)
            seen = seen & seen.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        at = (_offsets(bias[0]) + length - 1).expand_as(bias)[seen]
        counts = torch.bincount(at, minlength=2 * length - 1)
        table = torch.zeros(2 * length - 1, dtype=bias.dtype, device=bias.device).index_add(0, at, bias[seen])
        table = table / counts.clamp_min(1)
        near = tolerance(self.bias.dtype) * float(bias[seen].abs().max()) if len(at) else 0.0
        if len(at) and float((table[at] - bias[seen]).abs().max()) > near:
            return None
        return table[length - 1 :] if self.causal else table

    def placed(self) -> dict[str, Any]:
        """What `toeplens.lens.behaviour` takes of this layer: q, k, rotation, pairing, bias, causal, scale, lengths.

        The rotated pairs come first, interleaved, with the rotation's magnitude in them. Raises `NoForm` where the
        logits are not a rotation of pairs by an angle a position and a bias by offset.
        """
        if self.kind == "cross":
            raise NoForm(f"{self.module}: its queries and keys are of different sequences.")
        if self.unknown is not None:
            raise NoForm(f"{self.module}: {self.unknown}")
        if self.softcap is not None:
            raise NoForm(f"{self.module}: its logits pass through c tanh(x / c), c = {self.softcap:g}.")
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
            "bias": self.bias_by_offset(),
            "causal": self.causal,
            "scale": self.scale,
            "lengths": self.lengths,
        }


def _offsets(like: Tensor) -> Int[Tensor, "Nq Nk"]:
    """i - j of the last two dimensions."""
    rows, keys = (torch.arange(size, device=like.device) for size in like.shape[-2:])
    return rows.unsqueeze(-1) - keys
