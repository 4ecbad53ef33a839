"""The first-order estimate of what silencing each head of a Hugging Face model adds to its loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from toeplens.sources.huggingface.effects.outcome import cross_entropies, in_blocks, pieces, wide
from toeplens.sources.huggingface.effects.replays import Address, Passes, fits


def first_order(passes: Passes, places: Sequence[Address], counts: Sequence[int]) -> list[Float[np.ndarray, "B K _H"]]:
    """-z . dloss/dz of each call's heads, z their outputs, in each sequence; NaN without a label.

    The sum over positions is split over blocks of the head's own positions (the mean of these parts is the sum).
    Parameters need no gradient meanwhile, so that nothing is kept for theirs.
    """
    probes = [_Probe(passes.batch, count) for count in counts]
    labels = passes.outcome.labels
    assert labels is not None
    with torch.enable_grad(), _without_gradients(passes.model):
        run = passes.run(changes=dict(zip(places, probes, strict=True)))
        labels = labels.to(run.states.device)
        predicted = (labels >= 0).sum(1)
        upstream = torch.zeros_like(run.states)
        for some in pieces(labels, passes.vocabulary):
            states = run.states.detach()[:, some].requires_grad_()
            each = cross_entropies(run.logits(states), labels[:, some]).sum(1)
            total = (each / predicted.clamp_min(1).to(each.device)).sum()
            upstream[:, some] = torch.autograd.grad(total, states)[0]
        gradients = torch.autograd.grad(run.states, [probe.at for probe in probes], upstream)
    known, blocks = (predicted > 0).view(-1, 1, 1), passes.outcome.blocks
    split = [
        torch.stack([in_blocks(each.to(known.device), blocks) for each in found.double().unbind(2)], 2)
        for found in gradients
    ]
    return [torch.where(known, -each, torch.nan).cpu().numpy() for each in split]


class _Probe:
    """Multiplies each head's output at each position by 1 + a number of its own, which is 0."""

    def __init__(self, rows: int, heads: int) -> None:
        self.shape = rows, heads
        self.at = torch.empty(0)

    def __call__(self, heads: Float[Tensor, "B N H dv"]) -> Float[Tensor, "B N H dv"]:
        fits(heads, *self.shape)
        self.at = torch.zeros(heads.shape[:3], dtype=wide(heads).dtype, device=heads.device, requires_grad=True)
        return (heads * (1 + self.at).unsqueeze(-1)).to(heads.dtype)


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    learnt = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in learnt:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in learnt:
            weight.requires_grad_(True)
