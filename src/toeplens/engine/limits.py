"""When and how work is carried out: its machine, its deadline, and who may stop it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from toeplens.ground import choose
from toeplens.ground.machine import within
from toeplens.training.environment import CompileMode
from toeplens.training.loggers import LOGGERS

MOST_STACKED = 256  # models as one: each holds a file open


def clocks() -> tuple[float, float]:
    """What both clocks of this machine say."""
    return time.time(), time.monotonic()


@dataclass(frozen=True)
class Limits:
    """When and how a job runs.

    device, compile     see `toeplens.training.plan_execution`
    checkpoint_seconds  how much work a kill may cost at most
    deadline            `time.time()` at which to have stopped. A clock that is set anew later changes nothing: time is
                        counted from when the limits were made, in all processes of this machine
    should_stop         asked before every unit of work
    publish             URL that runs are fetched from and published to, see `toeplens.engine.remote`; None for nowhere
    stack               how many models of equal shape are trained as one, see `toeplens.engine.stacks`; None: as many
                        as fill a GPU, and on a CPU, where it does not pay, 1
    machines            in words, those that carry the work out, where that is not this one: then what devices this one
                        has says nothing
    follow              names of the loggers of each run's evaluations: ``tensorboard``, ``wandb``, ``mlflow``
    group               what these call all runs together: a study gives its directory's name

    Raises `InputError` for a ``stack`` that cannot be, or an unknown logger.
    """

    device: str = "auto"
    compile: CompileMode = "auto"
    checkpoint_seconds: float = 30.0
    deadline: float | None = None
    should_stop: Callable[[], bool] = lambda: False
    publish: str | None = None
    stack: int | None = None
    machines: str | None = None
    follow: tuple[str, ...] = ()
    group: str | None = None
    made: tuple[float, float] = field(default_factory=clocks, repr=False, compare=False)

    def __post_init__(self) -> None:
        within("stack", self.stack, 1, MOST_STACKED)
        object.__setattr__(
            self, "follow", tuple(dict.fromkeys(choose("follow", each, LOGGERS) for each in self.follow))
        )

    def late(self, ahead: float = 0.0) -> bool:
        """Whether the deadline will be over, if the next piece of work takes ``ahead`` seconds."""
        return self.deadline is not None and self._now() + ahead >= self.deadline

    def over(self, ahead: float = 0.0) -> bool:
        """Whether it is time to stop, if the next piece of work takes ``ahead`` seconds."""
        return self.should_stop() or self.late(ahead)

    def left(self) -> float | None:
        """Seconds until the deadline."""
        return None if self.deadline is None else self.deadline - self._now()

    def deadline_now(self) -> float | None:
        """The deadline by what `time.time()` says now."""
        left = self.left()
        return None if left is None else time.time() + left

    def _now(self) -> float:
        wall, steady = self.made
        return wall + time.monotonic() - steady
