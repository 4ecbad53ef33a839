"""Jobs whose models are trained as one, before each is gone on with alone."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toeplens.engine.jobs import Job, loggers_of, watcher_of
from toeplens.engine.leases import HeldElsewhere
from toeplens.engine.limits import MOST_STACKED, Limits
from toeplens.engine.records import forget_measured
from toeplens.engine.scratch import scratch
from toeplens.engine.sharing import shared
from toeplens.ground import InputError
from toeplens.ground.locks import Busy
from toeplens.ground.machine import out_of_memory
from toeplens.training import train_as_one
from toeplens.training.run import RESULT, entered
from toeplens.training.stack import must_stack, shape_of, that_fill_a_gpu


@dataclass(frozen=True)
class Room:
    """Where stacks are trained: at how many places at a time, and what share of a GPU each has (0 on a CPU)."""

    places: int
    share: float


def stacks_of(jobs: Sequence[Job], places: Sequence[int], out: Path, limits: Limits, room: Room) -> list[list[int]]:
    """The places of those jobs that are not trained yet and can be trained as one, stack by stack.

    Unless ``limits`` say how many are one, as many as a place's share of a GPU holds, and fewer where a place would
    have none.
    """
    if limits.stack == 1 or (limits.stack is None and not room.share):
        return []
    alike: dict[Any, list[int]] = defaultdict(list)
    for place in {jobs[place].spec.name: place for place in places}.values():
        spec = jobs[place].spec
        if not (out / spec.name / RESULT).exists():
            alike[shape_of(spec), repr(spec.model.encoding_options)].append(place)
    groups = []
    for some in alike.values():
        with suppress(InputError):  # what cannot be stacked is trained alone
            if len(some) > 1:
                must_stack([jobs[place].spec for place in some])
                groups.append(some)
    fair = -(-sum(map(len, groups)) // room.places)
    found = []
    for some in groups:
        full = int(that_fill_a_gpu(jobs[some[0]].spec) * room.share)
        most = limits.stack or max(1, min(MOST_STACKED, full, fair))
        stacks = -(-len(some) // most)
        size = -(-len(some) // stacks)
        found += [part for part in (some[at : at + size] for at in range(0, len(some), size)) if len(part) > 1]
    return found


class _Member:
    """A job in a stack, whose run is held from when it is entered until it is left."""

    def __init__(self, place: int, job: Job) -> None:
        self.place, self.job, self.lost = place, job, False
        self._held = ExitStack()

    def enter(self, where: Path, limits: Limits) -> bool:
        """Hold the run; False where somebody else does."""
        directory = where / self.job.spec.name
        try:
            self._held.enter_context(entered(directory, self.job.spec))
            self._stops = self._held.enter_context(shared(directory, limits)).should_stop
            forget_measured(directory)
        except BaseException as error:
            self.leave()
            if not isinstance(error, Busy):
                raise
            return False
        return True

    def leave(self, *raised: Any) -> None:
        """Hold it no more; what was raised meanwhile stays raised."""
        with suppress(HeldElsewhere):  # it was taken over
            self._held.__exit__(*(raised or (None, None, None)))

    def stops(self, limits: Limits) -> bool:
        """Publish what is new of the run; whether to stop, for it is lost to another worker or time is up."""
        stops = self._stops()
        self.lost = self.lost or (stops and not limits.should_stop())
        return stops


def train_stack(piece: tuple[Sequence[Job], Path | None], limits: Limits, tell: Callable[[Any], None]) -> bool | None:
    """Train the models of some jobs as one; True if none was stopped, else None.

    What another worker holds, or takes over, is left to it, and the others are gone on with. Where memory runs out,
    the stack is trained in halves, one after the other.
    """
    jobs, out = piece
    with scratch() as own, _entered(jobs, out or own, limits) as members:
        stacks = [members]
        while stacks:
            some = [member for member in stacks.pop() if not member.lost]
            whole = None
            try:
                whole = not some or _trained(some, out or own, limits, tell)
            except Exception as error:
                if len(some) == 1 or not out_of_memory(error):
                    raise
            gc.collect()
            torch.cuda.empty_cache()  # else this process keeps it from what is beside it on the GPU
            if whole is None:  # the error is gone, and what it held
                half = len(some) // 2
                stacks += [some[half:], some[:half]]
            elif any(member.lost for member in some):
                for member in some:
                    if member.lost:
                        member.leave()
                stacks.append(some)
            elif not whole:
                return None
    return True


@contextmanager
def _entered(jobs: Sequence[Job], where: Path, limits: Limits) -> Iterator[list[_Member]]:
    """Those of the jobs whose runs nobody else holds, held; in the order of the jobs."""
    members = []
    with ExitStack() as held:
        for place, job in sorted(enumerate(jobs), key=lambda each: each[1].spec.name):  # nobody waits in a circle
            member = _Member(place, job)
            if member.enter(where, limits):
                held.push(member.leave)
                members.append(member)
        yield sorted(members, key=lambda member: member.place)


def _trained(members: Sequence[_Member], where: Path, limits: Limits, tell: Callable[[Any], None]) -> bool:
    """Train them as one until all are done, or one says to stop; whether all are done."""

    def report(place: int, step: int, total: int, row: dict[str, Any] | None) -> None:
        tell((members[place].place, step, total, row["test_accuracy"] if row else None))

    runs = train_as_one(
        [member.job.spec for member in members],
        where,
        device=limits.device,
        compile=limits.compile,
        checkpoint_seconds=limits.checkpoint_seconds,
        deadline=limits.deadline_now(),
        should_stop=lambda: max([member.stops(limits) for member in members]),  # each publishes what is new
        on_progress=report,
        watchers=[watcher_of(member.job) for member in members],
        loggers=[loggers_of(member.job, limits) for member in members],
    )
    return all(run.status != "stopped" for run in runs)
