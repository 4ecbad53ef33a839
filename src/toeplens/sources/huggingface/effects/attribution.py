"""An estimate of what silencing each head of a Hugging Face model adds to its loss, from a few backward passes.

Where a head's output z moves by d at all positions, the loss of a sequence changes by g . d + d' H d / 2 + ..., with g
the gradient at z and H the curvature. A trained model is near a point where g is flat on average, so that the second
term is the larger one; of H the Fisher information is taken, whose expectation needs gradients alone: those of the loss
of labels that the model itself draws (Gauss-Newton; LeCun et al. 1990 and, for heads, Kwon et al. 2022, arXiv
2204.09656, who take the data's labels and no first term). Of its products of positions those within a few neighbours
are kept: what a head does to all positions alike (to the first token's state, from which all others read) moves the
loss less than any curvature at one point says, and products of far positions are mostly noise of the draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.sources.huggingface.effects.outcome import NONE, cross_entropies, in_blocks, pieces, wide
from toeplens.sources.huggingface.effects.replays import Address, Passes, Replay, fits

_DRAWS = 4  # of labels
_SPAN = 8  # neighbouring positions whose products are kept
_LOGITS = 1 << 24  # that are held at once


def attributed(
    passes: Passes, places: Sequence[Address], counts: Sequence[int], instead: Sequence[Tensor | None], seed: int
) -> list[Float[np.ndarray, "B K _H"]]:
    """Estimates of each call's heads in each sequence, nats a predicted token; NaN without a label.

    With a_i = d_i . dl/dz_i at position i, l the loss of a sequence of n labels, and b_i the same of n l for labels
    that are drawn: sum_i a_i + mean over draws of sum over spans (sum_i b_i)^2 / 2n. The sum over positions is split
    over blocks of the head's own positions (the mean of these parts is the sum). Parameters need no gradient meanwhile,
    so that nothing is kept for theirs.

    Arguments
        instead  [B, N, H, dv] what each call's heads put out instead; None for nothing
        seed     of the draws
    """
    probes = [_Probe(passes.batch, count, put) for count, put in zip(counts, instead, strict=True)]
    labels = passes.outcome.labels
    assert labels is not None
    with torch.enable_grad(), _without_gradients(passes.model):
        run = passes.run(changes=dict(zip(places, probes, strict=True)))
        labels = labels.to(run.states.device)
        predicted = (labels != NONE).sum(1)
        first, *drawn = _upstream(passes, run, labels, seed)
        ends = [probe.at for probe in probes]
        each = 1 / predicted.clamp_min(1).view(-1, 1, 1)
        total = [slope * each.to(slope.device) for slope in _slopes(run, ends, first)]
        for upstream in drawn:
            for place, slope in enumerate(_slopes(run, ends, upstream)):
                total[place] += slope * _over_spans(slope) * each.to(slope.device) / (2 * len(drawn))
    known, blocks = (predicted > 0).view(-1, 1, 1), passes.outcome.blocks
    split = [torch.stack([in_blocks(x.to(known.device), blocks) for x in found.unbind(2)], 2) for found in total]
    return [torch.where(known, each, torch.nan).cpu().numpy() for each in split]


def _upstream(passes: Passes, run: Replay, labels: Int[Tensor, "B N"], seed: int) -> list[Float[Tensor, "B N d"]]:
    """The gradient of the summed losses of all labels at the last hidden states: of the labels as they are, and of such
    as are drawn."""
    random = torch.Generator().manual_seed(seed)
    found = [torch.zeros_like(run.states) for _ in range(1 + _DRAWS)]
    for some in pieces(labels, passes.vocabulary, _LOGITS):
        states, own = run.states.detach()[:, some], labels[:, some]
        shares, slopes = _by_gradient(run, states) if passes.readout is None else passes.readout.slopes(states)
        for upstream, each in zip(found, [own, *_drawn(shares, own, random)], strict=True):
            upstream[:, some] = slopes(each).to(upstream)
    return found


def _by_gradient(
    run: Replay, states: Float[Tensor, "B n d"]
) -> tuple[Float[Tensor, "B n V"], Callable[[Int[Tensor, "B n"]], Float[Tensor, "B n d"]]]:
    """`Readout.slopes` of any head."""
    states = states.requires_grad_()
    logits = run.logits(states)

    def slopes(labels: Int[Tensor, "B n"]) -> Float[Tensor, "B n d"]:
        return torch.autograd.grad(cross_entropies(logits, labels).sum(), states, retain_graph=True)[0]

    return wide(logits.detach()).softmax(-1), slopes


def _drawn(
    shares: Float[Tensor, "B n V"], labels: Int[Tensor, "B n"], random: torch.Generator
) -> Iterator[Int[Tensor, "B n"]]:
    """Labels that the model itself draws, where there are labels."""
    reached = shares.cumsum(-1)
    at = torch.rand((*labels.shape, _DRAWS), generator=random, dtype=torch.float32).to(reached) * reached[..., -1:]
    found = torch.searchsorted(reached, at, right=True).clamp_max(shares.shape[-1] - 1)
    for each in found.to(labels.device).unbind(-1):
        yield torch.where(labels == NONE, NONE, each)


def _slopes(run: Replay, ends: Sequence[Tensor], upstream: Float[Tensor, "B N d"]) -> list[Float[Tensor, "B _N _H"]]:
    """What a loss with this gradient at the last states changes by, as each head moves at each position, in float64."""
    return [each.double() for each in torch.autograd.grad(run.states, ends, upstream, retain_graph=True)]


def _over_spans(x: Float[Tensor, "B N H"]) -> Float[Tensor, "B N H"]:
    """At each position the sum over its span."""
    count = x.shape[1]
    summed = F.pad(x, (0, 0, 0, -count % _SPAN)).unflatten(1, (-1, _SPAN)).sum(2)
    return summed.repeat_interleave(_SPAN, 1)[:, :count]


class _Probe:
    """Moves each head's output at each position by a number of its own, which is 0, times what it is to be less what it
    is."""

    def __init__(self, rows: int, heads: int, instead: Tensor | None) -> None:
        self.shape = rows, heads
        self.at = torch.empty(0)
        self._instead = instead

    def __call__(self, heads: Float[Tensor, "B N H dv"]) -> Float[Tensor, "B N H dv"]:
        fits(heads, *self.shape)
        self.at = torch.zeros(heads.shape[:3], dtype=wide(heads).dtype, device=heads.device, requires_grad=True)
        by = -heads if self._instead is None else self._instead.to(heads) - heads
        return (heads + self.at.unsqueeze(-1) * by).to(heads.dtype)


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
