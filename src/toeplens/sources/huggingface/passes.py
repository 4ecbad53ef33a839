"""Passes of one Hugging Face model over one batch, up to its head and on from there."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.ground import InputError
from toeplens.sources.huggingface.anatomy import Anatomy
from toeplens.sources.huggingface.outcome import Outcome, losses, wide
from toeplens.sources.huggingface.replays import Replay, logits_in
from toeplens.sources.huggingface.settings import precision

_TOKENS = 4096  # of a pass, over its copies of the batch
_SAME = {torch.float64: 1e-6, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # models round to float32 in places


def fits(heads: Tensor, rows: int, count: int) -> None:
    """Refuse heads' outputs that are not of so many sequences and heads."""
    if heads.ndim != 4 or heads.shape[0] != rows or heads.shape[2] != count:
        raise InputError(
            f"calls: {count} heads were given for {rows} sequences; the attention gives {list(heads.shape)} "
            "(sequences, queries, heads, width)."
        )


class Passes:
    """Passes of one model over one batch; within `observed`.

    batch       sequences
    width       copies of the batch that one pass takes: a few thousand tokens together
    vocabulary  logits of a position, once the intact pass was run
    same        how far apart states may be, relative to their size, that are equal but for the model's rounding
    """

    def __init__(self, model: Any, anatomy: Anatomy, outcome: Outcome) -> None:
        self.model, self.anatomy, self.outcome = model, anatomy, outcome
        self.batch = len(outcome.counted)
        self.width = max(1, _TOKENS // (self.batch * outcome.tokens)) if outcome.copies else 1
        self.vocabulary = 0
        self.same = _SAME.get(precision(model), 1e-4)

    @property
    def kind(self) -> str:
        """The model's class."""
        return type(self.model).__name__

    def run(self, rows: int = 1, **parts: Any) -> Replay:
        """One pass up to the head. Raises `InputError` where its last hidden states are not one for each token."""
        found = Replay(self.anatomy, self.batch, rows, **parts)
        found.run(self.model, self.outcome.inputs)
        wanted = (self.batch * rows, self.outcome.counted.shape[1])
        if found.states.ndim != 3 or found.states.shape[:2] != wanted:
            raise InputError(
                f"model: the last hidden states of {self.kind} are {list(found.states.shape)}; of {wanted[0]} "
                f"sequences of {wanted[1]} tokens they must be one for each."
            )
        return found

    def before(self, item: int, rows: int, **parts: Any) -> dict[str, Any]:
        """What the layers before this call of a layer hand on, in all copies of a pass that ends there."""
        found = Replay(self.anatomy, self.batch, rows, until=item, **parts)
        found.run(self.model, self.outcome.inputs)
        return found.kept

    def intact(self) -> tuple[Replay, Float[Tensor, "B K"] | None]:
        """The intact pass and its losses, None without one. Raises `InputError` for a head that is not understood."""
        found = self.run()
        if self.outcome.labels is None:
            return found, None
        own = logits_in(found.output)[:, -1:]
        again = self.logits(found, found.states[:, -1:])
        self.vocabulary = again.shape[-1]
        far = float((wide(again) - wide(own)).abs().max()) if again.shape == own.shape else torch.inf
        if not far <= self.same * float(wide(own).abs().max().clamp_min(1)):
            raise InputError(
                f"model: the head of {self.kind} was not understood: its logits at a position are not made of the last "
                "hidden state there alone."
            )
        return found, self.losses(found)

    def logits(self, found: Replay, states: Float[Tensor, "R n d"]) -> Float[Tensor, "R n V"]:
        """The head's logits of some states of a pass."""
        return found.logits(self.model, self.outcome.inputs, states)

    def losses(self, found: Replay) -> Float[Tensor, "R K"]:
        """The loss of each row of a pass, split over the outcome's blocks of tokens."""
        assert self.outcome.labels is not None
        states = found.states
        labels = self.outcome.labels.to(states.device).repeat(found.rows, 1)
        return losses(
            labels, lambda places: self.logits(found, states[:, places]), self.vocabulary, self.outcome.blocks
        )
