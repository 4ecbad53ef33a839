"""The exponential moving average of a model's weights: what they would settle to if the learning rate fell."""

from __future__ import annotations

import copy

import torch

from toeplens.model import Decoder


class EMA:
    """A model whose weights are the exponential moving average of another's.

    ``model`` is the averaged one. Its decay at step t is min(decay, (1 + t) / (10 + t)), so that the weights of the
    first steps, which are soon worth nothing, are soon forgotten.
    """

    def __init__(self, of: Decoder, decay: float) -> None:
        self.model, self.decay = copy.deepcopy(of), decay

    def share(self, step: int) -> float:
        """How much of the mean a step's weights become, the first being 1."""
        return 1 - min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, of: Decoder, step: int) -> None:
        """Take up the weights after a step, the first being 1."""
        share = self.share(step)
        for mean, weight in zip(self.model.parameters(), of.parameters(), strict=True):
            mean.lerp_(weight, share)
