"""All model types of the installed transformers, each in a process of its own, each with a record of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from toeplens.engine import Cluster, Limits, Workers, plan_workers
from toeplens.engine.cluster import in_cluster
from toeplens.ground import InputError, choose, read_json, write_json
from toeplens.ground.files import make_directory
from toeplens.ground.places import entered
from toeplens.sources.huggingface.model import library
from toeplens.studies.auditing.survey.check import surveyed
from toeplens.studies.auditing.survey.models import model_types
from toeplens.studies.auditing.survey.record import Survey, Surveyed

RESULT = "survey.json"
RECORDS = "types"
LIMIT = 120.0  # seconds that a model type may take
# what every process needs is imported once, in the one that they are forked from
_FIRST = (
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "toeplens.studies.auditing.survey.run",
)


def survey(
    out: Path | str,
    *,
    only: Collection[str] | None = None,
    workers: Workers = None,
    limit: float = LIMIT,
    on_progress: Callable[[Surveyed], None] = lambda found: None,
) -> Survey:
    """Build every text model of the installed transformers small and check it, or go on with that in ``out``.

    A type that has a record of the same version of transformers is not done again. A type whose process dies, or takes
    longer than ``limit`` seconds, is recorded as failed.

    Arguments
        only         model types; all unless given
        workers      processes at a time, one a core unless given; or a `toeplens.engine.Cluster`
        on_progress  told of every type as it is done

    Returns what is there of the types that were asked for. Raises `InputError` for a type that transformers does not
    have, for an ``out`` of another version and for damaged records; `EnvironmentFailure` without transformers.
    """
    about, types = _about(), model_types()
    names = types if only is None else [choose("only", name, types) for name in only]
    directory = Path(out)
    with entered(directory, "survey", (RESULT, RECORDS)):
        return _go_on(directory, names, about, workers, limit, on_progress)


def _go_on(
    directory: Path,
    names: Collection[str],
    about: dict[str, Any],
    workers: Workers,
    limit: float,
    on_progress: Callable[[Surveyed], None],
) -> Survey:
    make_directory(directory / RECORDS)
    if (directory / RESULT).exists():
        had = Survey.from_dict(read_json(directory / RESULT), directory / RESULT).about
        if had.get("transformers") != about["transformers"]:
            raise InputError(
                f"out: {directory} holds a survey of transformers {had.get('transformers')}; give another."
            )
    _write(directory, names, about)
    missing = [name for name in names if not _path(directory, name).exists()]
    try:
        if isinstance(workers, Cluster):
            _on_cluster(missing, directory, workers, limit, on_progress)
        else:
            count, _ = plan_workers(max(1, len(missing)), "cpu", workers)
            _carry_out(missing, directory, count, limit, on_progress)
    finally:
        found = _write(directory, names, about)
    return found


def _about() -> dict[str, Any]:
    python = ".".join(map(str, sys.version_info[:3]))
    return {"transformers": library().__version__, "torch": torch.__version__, "python": python}


def _path(directory: Path, name: str) -> Path:
    return directory / RECORDS / f"{name}.json"


def _record(directory: Path, name: str) -> Surveyed:
    return Surveyed.from_dict(read_json(_path(directory, name)), _path(directory, name))


def _write(directory: Path, names: Collection[str], about: dict[str, Any]) -> Survey:
    there = [name for name in sorted(names) if _path(directory, name).exists()]
    found = tuple(_record(directory, name) for name in there)
    state = Survey(about, found, tuple(sorted(set(names) - set(there))))
    write_json(directory / RESULT, state.to_dict(), rows="found")
    return state


def _carry_out(
    names: Collection[str], directory: Path, count: int, limit: float, on_progress: Callable[[Surveyed], None]
) -> None:
    """One process a type, ``count`` at a time; what a process leaves no record of has failed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_FIRST))
    upcoming = iter(names)
    running: dict[str, tuple[BaseProcess, float]] = {}
    try:
        while True:
            while len(running) < count and (name := next(upcoming, None)) is not None:
                process = context.Process(target=_work, args=(name, directory), daemon=True)
                process.start()
                running[name] = process, time.monotonic() + limit
            if not running:
                return
            ends = min(end for _, end in running.values())
            wait([process.sentinel for process, _ in running.values()], max(0.0, ends - time.monotonic()))
            for name, (process, end) in list(running.items()):
                if process.is_alive() and time.monotonic() < end:
                    continue
                late = process.is_alive()
                process.kill()
                process.join()
                del running[name]
                if not _path(directory, name).exists():
                    why = f"it took more than {limit:g} seconds" if late else f"its process died ({process.exitcode})"
                    write_json(_path(directory, name), Surveyed(name, "failed", why=f"{why}.").to_dict())
                on_progress(_record(directory, name))
    finally:
        for process, _ in running.values():
            process.kill()
            process.join()


def _on_cluster(
    names: Sequence[str], directory: Path, workers: Cluster, limit: float, on_progress: Callable[[Surveyed], None]
) -> None:
    """The same on a cluster's machines, which bring their records here."""
    workers.must_serve("cpu")

    def done(index: int, content: dict[str, Any] | None) -> None:
        if content is not None:
            write_json(_path(directory, names[index]), content)
            on_progress(_record(directory, names[index]))

    in_cluster(_there, [(name, limit) for name in names], Limits(), workers, on_done=done)


def _there(piece: tuple[str, float], limits: Limits, tell: Callable[[Any], None]) -> dict[str, Any]:
    """A type's record, made in a process of its own on whatever machine this is."""
    name, limit = piece
    with tempfile.TemporaryDirectory(prefix="toeplens-") as scratch:
        make_directory(Path(scratch) / RECORDS)
        _carry_out([name], Path(scratch), 1, limit, lambda _: None)
        return _record(Path(scratch), name).to_dict()


def _work(name: str, directory: Path) -> None:
    """A type's process: one thread, no network, no warnings of transformers on the terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to handle
    torch.set_num_threads(1)
    _hold_back()
    write_json(_path(directory, name), surveyed(name).to_dict())


def _hold_back() -> None:
    import warnings

    import transformers
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    nothing = os.open(os.devnull, os.O_WRONLY)  # some print
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
