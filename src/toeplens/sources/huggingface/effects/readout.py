"""The losses of a language model whose head is one product of matrices, some words of its vocabulary at a time.

Its logits are never there together: for 1,024 tokens and 49,152 words they are 200 MB, and to go through these again
and again takes more than half of the time of the product that makes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.sources.huggingface.effects.outcome import AT_ONCE, NONE, wide

_ROWS, _WORDS = 2048, 2048  # tokens and words at once, on a processor; 16 MB of logits
_ROUNDED, _FEW = 16, 3  # roundings that a logit may differ by from the head's own; of 16 bits, where they are coarse
_LARGE = 1024.0  # to this size states are scaled, at which a cap would show


@dataclass(frozen=True)
class Readout:
    """A head whose logits are weight x + bias.

    weight  [V, d]
    bias    [V]; None without one
    """

    weight: Float[Tensor, "V d"]
    bias: Float[Tensor, "V"] | None

    @classmethod
    def of(
        cls,
        embedding: nn.Module | None,
        states: Float[Tensor, "B n d"],
        head: Callable[[Float[Tensor, "B n d"]], Float[Tensor, "B n V"]],
    ) -> Readout | None:
        """The output embedding as such a head, if the model's own ``head`` makes its product of some states, and of
        these made larger or smaller, which a cap of the logits would show."""
        if type(embedding) is not nn.Linear or type(embedding.weight) is not nn.Parameter or embedding.weight.is_meta:
            return None
        if states.dtype != embedding.weight.dtype:  # which a model may bring together in its own way
            return None
        if states.shape[-1] != embedding.weight.shape[1]:  # something lies between
            return None
        eps = torch.finfo(states.dtype).eps
        allowed = eps * (_ROUNDED if eps <= torch.finfo(torch.float32).eps else _FEW)
        factor = 1.0
        for _ in range(2):
            some = factor * states
            logits = wide(head(some))
            made = wide(F.linear(some.to(embedding.weight.device), embedding.weight, embedding.bias)).to(logits.device)
            size = float(logits.abs().max())
            if made.shape != logits.shape or not float((made - logits).abs().max()) <= allowed * size:
                return None
            largest = max(size, float(wide(states).abs().max()))
            factor = 2.0 ** math.floor(math.log2(_LARGE / largest)) if largest > 0 else 1.0  # exact in any dtype
        return cls(embedding.weight, embedding.bias)

    def cross_entropies(self, states: Float[Tensor, "R N d"], labels: Int[Tensor, "R N"]) -> Float[Tensor, "R N"]:
        """At each position, 0 without a label, in float64; the sums over words are in float32 at least."""
        there = labels != NONE
        each = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
        if not there.any():
            return each
        rows, wanted = states[there.to(states.device)].split(_ROWS), labels[there].split(_ROWS)
        device = self.weight.device
        found = [self._of(x.to(device), y.to(device)) for x, y in zip(rows, wanted, strict=True)]
        each[there] = torch.cat(found).to(each.device)
        return each

    def slopes(
        self, states: Float[Tensor, "B n d"]
    ) -> tuple[Float[Tensor, "B n V"], Callable[[Int[Tensor, "B n"]], Float[Tensor, "B n d"]]]:
        """The shares of all words at some positions, and what of labels there gives the gradient of their summed losses
        at the states, 0 without a label: of all labels the product of shares and weights is the same."""
        weight = self.weight
        shares = wide(F.linear(states.to(weight.device), weight, self.bias)).softmax(-1)
        expected = shares.to(weight.dtype) @ weight

        def slopes(labels: Int[Tensor, "B n"]) -> Float[Tensor, "B n d"]:
            labels = labels.to(weight.device)
            there = (labels != NONE).unsqueeze(-1)
            return torch.where(there, expected - weight[labels.clamp_min(0)], 0)

        return shares, slopes

    def _of(self, x: Float[Tensor, "n d"], labels: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        words = _WORDS if x.device.type == "cpu" else max(_WORDS, AT_ONCE // len(x))
        dtype = torch.promote_types(x.dtype, torch.float32)
        total, own = (torch.zeros(len(x), dtype=dtype, device=x.device) for _ in range(2))
        top = torch.full_like(total, torch.finfo(dtype).min)
        for start in range(0, len(self.weight), words):
            some = slice(start, start + words)
            logits = wide(F.linear(x, self.weight[some], None if self.bias is None else self.bias[some]))
            at = labels - start
            here = (at >= 0) & (at < logits.shape[1])
            own = torch.where(here, logits.gather(1, at.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1), own)
            higher = torch.maximum(top, logits.amax(-1))
            total = total * (top - higher).exp() + logits.sub_(higher.unsqueeze(-1)).exp_().sum(-1)
            top = higher
        return (top + total.log() - own).double()
