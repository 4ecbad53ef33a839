"""How work is run: device, deadline and loggers (`ExecutionOptions`), worker processes or Ray (`ClusterOptions`).

And how it is stopped: the first Ctrl-C or SIGTERM sets a flag that is checked between steps; a second Ctrl-C raises at
once. Files are written atomically (`toeplens.utils.files`), so an interruption loses only the work in progress.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Annotated, Literal

from toeplens.utils.errors import choose, invalid
from toeplens.utils.machine import NUMBER, parse_bytes
from toeplens.utils.options import CLUSTER, MACHINE, TRAINING, Range, check_fields, option

CompileMode = Literal["auto", "on", "off"]
LOGGERS = ("tensorboard", "wandb", "mlflow")
MAX_BATCHED = 256  # maximum number of models in a stack; each holds a file open
INTERRUPTED_MESSAGE = "Interrupted. Finished work is saved; run the same command to resume."
INTERRUPTED_EXIT_CODE = 130
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


def read_clocks() -> tuple[float, float]:
    """The wall clock and the monotonic clock."""
    return time.time(), time.monotonic()


def parse_duration(text: str) -> float:
    """``90s``, ``9m``, ``2h`` or plain seconds."""
    match = re.fullmatch(rf"{NUMBER}([smh]?)\s*", text)
    if match is None or float(match[1]) <= 0:
        raise invalid("time_budget", "be a positive time such as 90s, 9m or 2h", text)
    return float(match[1]) * _SECONDS[match[2]]


@dataclass(frozen=True)
class ExecutionOptions:
    """When and how work is run.

    time_budget         e.g. ``90s``, ``9m`` or ``2h``: sets the deadline, with a reserve for writing the results
    device, compile     see `toeplens.training.plan_execution`
    stack               number of models of equal shape trained together; None: as many as fill a GPU, and 1 on a CPU
    follow              names of loggers for each run's evaluations: ``tensorboard``, ``wandb``, ``mlflow``
    checkpoint_seconds  maximum amount of work lost when killed
    deadline            `time.time()` by which to stop; later changes of the system clock have no effect
    should_stop         called before every unit of work
    publish             URL to fetch runs from and publish them to, see `toeplens.engine.remote`; None for no URL
    group               group name of the runs in loggers; a study uses the name of its directory
    """

    time_budget: str | None = option(None, "Stop after e.g. 90s, 9m or 2h; resumable.", "TIME", MACHINE)
    device: str = option("auto", "auto, cpu, cuda or cuda:N (default: auto).", "NAME", MACHINE)
    compile: str = option("auto", "torch.compile: auto, on or off (default: auto).", "WHEN", TRAINING)
    stack: Annotated[int, Range(1, MAX_BATCHED)] | None = option(
        None, "Models trained as one batch (default: auto).", panel=TRAINING
    )
    follow: tuple[str, ...] = option(
        (), "Log to tensorboard, wandb or mlflow; repeatable.", "NAME", TRAINING, typed=list[str]
    )
    checkpoint_seconds: float = 30.0
    deadline: float | None = None
    should_stop: Callable[[], bool] = lambda: False
    publish: str | None = None
    group: str | None = None
    start_clocks: tuple[float, float] = field(default_factory=read_clocks, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        follow = tuple(dict.fromkeys(choose("follow", name, LOGGERS) for name in self.follow))
        object.__setattr__(self, "follow", follow)
        if self.time_budget is not None:
            budget = parse_duration(self.time_budget)
            object.__setattr__(self, "deadline", self._current_time() + budget - min(20.0, 0.25 * budget))
            object.__setattr__(self, "time_budget", None)  # its time has begun

    def is_late(self, ahead: float = 0.0) -> bool:
        """Whether work of ``ahead`` seconds would exceed the deadline."""
        return self.deadline is not None and self._current_time() + ahead >= self.deadline

    def is_over(self, ahead: float = 0.0) -> bool:
        """Whether to stop instead of starting work of ``ahead`` seconds."""
        return self.should_stop() or self.is_late(ahead)

    def seconds_left(self) -> float | None:
        """Seconds until the deadline."""
        return None if self.deadline is None else self.deadline - self._current_time()

    def _current_time(self) -> float:
        wall, steady = self.start_clocks
        return wall + time.monotonic() - steady


@dataclass(frozen=True)
class ClusterOptions:
    """Where work runs: in processes on this machine, or on a Ray cluster.

    workers          maximum number of parallel items; None: one per core, or as many as the cluster has room for
    engine           ``local`` or ``ray``
    address          ``HOST:PORT`` of the cluster's head, from one of its machines; ``auto`` for the cluster on this
                     machine; None to start Ray on this machine for this process
    cpus_per_cell    cores and threads per item (default: 1)
    gpus_per_cell    GPUs per item (default: 0); 0.25 runs four items on each GPU
    memory_per_cell  memory reserved per item, e.g. ``4G``; None for none
    """

    workers: Annotated[int, Range(1)] | None = option(
        None, "Number of processes (default: one per core).", panel=MACHINE
    )
    engine: str = option("local", "local or ray (a cluster) (default: local).", "NAME", MACHINE)
    address: str | None = option(None, "Head node HOST:PORT, or auto (default: start Ray).", "NODE", CLUSTER)
    cpus_per_cell: Annotated[float, Range(above=0)] | None = option(
        None, "Cores per model (default: 1).", panel=CLUSTER
    )
    gpus_per_cell: Annotated[float, Range(0)] | None = option(
        None, "GPUs per model; may be 0.25 (default: 0).", panel=CLUSTER
    )
    memory_per_cell: str | None = option(None, "Memory per model, e.g. 4G (default: none).", "SIZE", CLUSTER)

    def __post_init__(self) -> None:
        check_fields(self)
        if choose("engine", self.engine, ("local", "ray")) == "local":
            for name in ("address", "cpus_per_cell", "gpus_per_cell", "memory_per_cell"):
                if (value := getattr(self, name)) is not None:
                    raise invalid(name, "not be set without --engine ray", value)
        for name, value in (("cpus_per_cell", self.cpus), ("gpus_per_cell", self.gpus)):
            if value > 1 and value % 1:
                raise invalid(name, "be a whole number if it is over 1", value)
        _ = self.memory  # raises

    @property
    def on_ray(self) -> bool:
        """Whether work runs on a Ray cluster."""
        return self.engine == "ray"

    @property
    def cpus(self) -> float:
        """Cores per item."""
        return 1.0 if self.cpus_per_cell is None else self.cpus_per_cell

    @property
    def gpus(self) -> float:
        """GPUs per item."""
        return self.gpus_per_cell or 0.0

    @property
    def memory(self) -> int | None:
        """Bytes reserved per item."""
        if self.memory_per_cell is None:
            return None
        return parse_bytes("memory_per_cell", self.memory_per_cell)

    def device(self, requested: str) -> str:
        """The device of a Ray worker: ``auto`` is a GPU if items have (part of) one."""
        return ("cuda" if self.gpus else "cpu") if requested == "auto" else requested


Workers = int | ClusterOptions | None  # a number of processes on this machine (None: one per core), or options


def cluster_of(workers: Workers) -> ClusterOptions:
    """Workers as options."""
    return workers if isinstance(workers, ClusterOptions) else ClusterOptions(workers)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Context in which SIGINT and SIGTERM set a flag, read by the yielded function; a second SIGINT raises.

    Only for the main thread.
    """
    requested = False

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        if requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        requested = True

    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: requested
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def children_ignore_sigint() -> Iterator[None]:
    """Context in which child processes ignore SIGINT, which terminals send to all; their parent stops them.

    In the parent, a SIGINT waits until the end of the context.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # which children inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
