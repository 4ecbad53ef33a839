"""Examples on a device, and a model's predictions on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from toeplens.model import Decoder
from toeplens.tasks import Examples
from toeplens.training.spec import RunSpec

IGNORED = -100  # class ignored by loss and accuracy
TOKENS_PER_PASS = {"cpu": 2**13, "cuda": 2**20}  # attention with dropout needs memory in proportion: 13 GB at 2**16
LOGITS_PER_PASS = {"cpu": 2**26, "cuda": 2**31}  # maximum number of logits, for per-token predictions
_STATES_PER_PASS = 2**30  # values of the residual stream over all layers that such a pass keeps


@dataclass(frozen=True)
class Batches:
    """A data set on a device; ``lengths`` is None without padding, ``labels`` are per sequence or per token."""

    tokens: Int[Tensor, "n length"]
    labels: Int[Tensor, "n *length"]
    lengths: Int[Tensor, "n"] | None

    @classmethod
    def of(cls, examples: Examples, device: torch.device, ignore_label: int | None = None) -> Batches:
        """Tensors of ``examples``; labels equal to ``ignore_label`` become the ignored class."""
        labels = torch.from_numpy(examples.labels)
        if ignore_label is not None:
            labels = labels.masked_fill(labels == ignore_label, IGNORED)
        padded = bool((examples.lengths < examples.tokens.shape[1]).any())
        lengths = torch.from_numpy(examples.lengths).to(device) if padded else None
        return cls(torch.from_numpy(examples.tokens).to(device), labels.to(device), lengths)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Int[Tensor, "b"] | slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens, labels and lengths of ``rows``."""
        return self.tokens[rows], self.labels[rows], None if self.lengths is None else self.lengths[rows]

    def split(self, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """All examples in order, ``size`` at a time."""
        for start in range(0, len(self), size):
            yield self.take(slice(start, start + size))


def micro_batch_size(spec: RunSpec, length: int, device: torch.device) -> int:
    """Number of sequences per training pass; larger batches are split (gradient accumulation)."""
    tokens = TOKENS_PER_PASS[device.type]
    if spec.model.readout == "each":
        sequences_logits = LOGITS_PER_PASS[device.type] // spec.model.num_classes
        tokens = min(tokens, sequences_logits, _STATES_PER_PASS // (spec.model.num_layers * spec.model.d_model))
    return max(1, tokens // length)


def is_correct(logits: Float[Tensor, "b *N C"], labels: Int[Tensor, "b *N"]) -> Bool[Tensor, "b *N"]:
    """Which predictions are correct (False for ignored labels)."""
    return logits.argmax(-1) == labels


def to_float32(logits: Float[Tensor, "b *N C"]) -> Float[Tensor, "b *N C"]:
    """Logits in at least float32, for the loss."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def loss_of(logits: Float[Tensor, "b *N C"], labels: Int[Tensor, "b *N"]) -> Float[Tensor, ""]:
    """The sum of the cross-entropies, in nats, over labels that are not ignored."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


@torch.no_grad()
def eval_batch(
    model: Decoder, batch: tuple[Tensor, Tensor, Tensor | None], amp: Callable[[], Any] = nullcontext
) -> Float[Tensor, "3"]:
    """Sum of losses, correct predictions and labels that count, of one batch, without dropout."""
    tokens, labels, lengths = batch
    model.eval()
    with amp():
        logits = to_float32(model(tokens, lengths))
    return torch.stack((loss_of(logits, labels), is_correct(logits, labels).sum(), (labels != IGNORED).sum())).double()


def evaluate(model: Decoder, data: Batches, batch_size: int) -> tuple[float, float]:
    """Mean loss and accuracy over labels that are not ignored."""
    loss, hits, count = torch.stack([eval_batch(model, batch) for batch in data.split(batch_size)]).sum(0).tolist()
    return loss / max(count, 1), hits / max(count, 1)
