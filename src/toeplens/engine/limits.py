"""When and how work is carried out: its machine, its deadline, and who may stop it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from toeplens.training.environment import CompileMode


def _clocks() -> tuple[float, float]:
    return time.time(), time.monotonic()


@dataclass(frozen=True)
class Limits:
    """When and how a job runs.

    device, compile     see `toeplens.training.plan_execution`
    checkpoint_seconds  how much work a kill may cost at most
    deadline            `time.time()` at which to have stopped. A clock that is set anew later changes nothing: time is
                        counted from when the limits were made, in all processes of this machine
    should_stop         asked before every unit of work
    stack               how many models of equal shape are trained as one, see `toeplens.engine.stacks`; None: as many
                        as fill a GPU, and on a CPU, where it does not pay, 1
    store               URL of where runs are kept beside this machine, see `toeplens.engine.store`; None for nowhere
    """

    device: str = "auto"
    compile: CompileMode = "auto"
    checkpoint_seconds: float = 30.0
    deadline: float | None = None
    should_stop: Callable[[], bool] = lambda: False
    store: str | None = None
    stack: int | None = None
    made: tuple[float, float] = field(default_factory=_clocks, repr=False, compare=False)

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
