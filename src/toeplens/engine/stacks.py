"""Jobs whose models are trained as one, before each is gone on with alone."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from toeplens.engine.jobs import Job, watcher_of
from toeplens.engine.leases import HeldElsewhere
from toeplens.engine.limits import Limits
from toeplens.engine.pool import keeping_time
from toeplens.engine.sharing import shared
from toeplens.ground import InputError
from toeplens.ground.locks import Busy
from toeplens.ground.machine import within
from toeplens.training import train_as_one
from toeplens.training.run import RESULT, entered
from toeplens.training.stack import must_stack, shape_of

_FULL = 2**17  # tokens of a step that fill a GPU
_WEIGHTS = 2**31  # numbers of attention weights that a stack's layers may keep, formed whole
_MOST = 256  # each holds a file open


def stacks_of(jobs: Sequence[Job], places: Sequence[int], out: Path, limits: Limits) -> list[list[int]]:
    """The places of those jobs that are not trained yet and can be trained as one, stack by stack."""
    if limits.stack is not None:
        within("stack", limits.stack, 1, _MOST)
    on_gpu = limits.device.startswith("cuda") or (limits.device == "auto" and torch.cuda.is_available())
    if limits.stack == 1 or (limits.stack is None and not on_gpu):
        return []
    alike: dict[Any, list[int]] = defaultdict(list)
    for place in {jobs[place].spec.name: place for place in places}.values():
        spec = jobs[place].spec
        if not (out / spec.name / RESULT).exists():
            alike[shape_of(spec), repr(spec.model.encoding_options)].append(place)
    found = []
    for some in alike.values():
        spec = jobs[some[0]].spec
        length, model = spec.build_task().length, spec.model
        weights = spec.batch_size * model.num_heads * model.num_layers * length**2
        most = limits.stack or min(_MOST, max(1, min(_FULL // (spec.batch_size * length), _WEIGHTS // weights)))
        stacks = -(-len(some) // most)
        size = -(-len(some) // stacks)
        with suppress(InputError):  # what cannot be stacked is trained alone
            must_stack([jobs[place].spec for place in some])
            found += [part for part in (some[at : at + size] for at in range(0, len(some), size)) if len(part) > 1]
    return found


def train_stack(piece: tuple[Sequence[Job], Path | None], limits: Limits, tell: Callable[[Any], None]) -> bool | None:
    """Train the models of some jobs as one; True if none was stopped, else None.

    What another worker holds is left to it.
    """

    def report(place: int, step: int, total: int, row: dict[str, Any] | None) -> None:
        tell((mine[place], step, total, row["test_accuracy"] if row else None))

    jobs, out = piece
    mine: list[int] = []
    stops = []
    with tempfile.TemporaryDirectory(prefix="toeplens-") as scratch, ExitStack() as held:
        where = out or Path(scratch)
        for place, job in sorted(enumerate(jobs), key=lambda each: each[1].spec.name):  # nobody waits in a circle
            directory = where / job.spec.name
            own = ExitStack()
            try:
                own.enter_context(entered(directory, job.spec))
                stops.append(own.enter_context(shared(directory, limits)).should_stop)
            except (Busy, HeldElsewhere):
                own.close()
                continue
            mine.append(place)
            held.push(own)
        with keeping_time():
            runs = train_as_one(
                [jobs[place].spec for place in mine],
                where,
                device=limits.device,
                compile=limits.compile,
                checkpoint_seconds=limits.checkpoint_seconds,
                deadline=limits.deadline_now(),
                should_stop=lambda: max([stop() for stop in stops], default=False),  # each publishes what is new
                on_progress=report,
                watchers=[watcher_of(jobs[place]) for place in mine],
            )
    return None if any(run.status == "stopped" for run in runs) else True
