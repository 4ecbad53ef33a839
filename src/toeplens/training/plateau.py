"""When a model has stopped learning: a stated rule on its test loss, and how long training goes on after that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class Plateau(BaseModel):
    """The rule by which a model has stopped learning, and the share of training that may follow.

    The plateau is the first evaluation at which the least test loss of the last ``patience`` evaluations is not lower,
    by at least ``gain``, than the least before them. Until the last evaluation this counts only in a model whose skill
    is at least ``skill``: one that is still guessing may only not have begun.

    Arguments
        gain      in nats
        patience  evaluations
        skill     test accuracy over the best guess from the text's length, as a share of what there is to learn
        beyond    times the plateau's steps: training goes on to there, but not past the spec's epochs
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gain: Annotated[float, Field(gt=0)] = 0.01
    patience: Annotated[int, Field(ge=1, le=10**9)] = 4
    skill: Annotated[float, Field(ge=0, le=1)] = 0.1
    beyond: Annotated[float, Field(ge=1)] = 1.0

    def reached(self, rows: Sequence[Mapping[str, Any]], guess: float, evaluations: int) -> int | None:
        """The step of the plateau; None where there is none yet.

        Arguments
            rows         the run's metrics so far, one an evaluation
            guess        accuracy of the best guess from the text's length
            evaluations  how many the run has at the most
        """
        losses = [row["test_loss"] for row in rows]
        if None in losses:
            return None
        least = list(accumulate(losses, min))
        for count in range(self.patience + 1, len(rows) + 1):
            now, row = count - self.patience, rows[count - 1]
            able = row["test_accuracy"] - guess >= self.skill * (1 - guess)
            if least[now - 1] - min(losses[now:count]) < self.gain and (able or count == evaluations):
                return int(row["step"])
        return None

    def ends(self, rows: Sequence[Mapping[str, Any]], guess: float, evaluations: int) -> bool:
        """Whether training is over after these rows: ``beyond`` times the plateau's steps are done."""
        step = self.reached(rows, guess, evaluations)
        return step is not None and rows[-1]["step"] >= self.beyond * step
