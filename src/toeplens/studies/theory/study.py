"""The mathematics as a study: run each experiment under each seed, keep its record, judge the claims on all of them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toeplens.engine import Job, Limits, plan_workers, run_local, signals_held
from toeplens.engine.local import OnEvent
from toeplens.ground import InputError, choose, read_json, write_json
from toeplens.ground.files import make_directory
from toeplens.studies.claims import Claim, Entry, judge_all
from toeplens.studies.reproduce.cells import cell
from toeplens.studies.reproduce.scales import DISTANCE, SCALES
from toeplens.studies.store import CLAIMS_FILE, RESULTS, RUNS, STUDY, enter, read_study
from toeplens.studies.theory import contraction, estimators, expressiveness, heads, phases
from toeplens.studies.theory.records import Record, Records
from toeplens.training import Run, environment

RECORDS = "records"
KIND = "theory"
EXPERIMENTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "contraction": contraction.contraction,
    "phases": phases.phases,
    "expressiveness": expressiveness.expressiveness,
    "estimators": estimators.estimators,
}
CLAIMS: tuple[Claim[Records], ...] = (
    *contraction.CLAIMS,
    *phases.CLAIMS,
    *heads.CLAIMS,
    *expressiveness.CLAIMS,
    *estimators.CLAIMS,
)
_FIRST = 42  # as in the papers
_LOOK = 1.0  # seconds between looks at whether the other process is still there


@dataclass(frozen=True)
class Theory:
    """The study's state on disk.

    records   by experiment, one a finished seed
    finished  records there are, of ``total``
    """

    directory: Path
    scale: str
    seeds: int
    records: Records
    entries: list[Entry]
    finished: int
    total: int
    environment: dict[str, Any]

    @property
    def complete(self) -> bool:
        """Whether every experiment is finished under every seed."""
        return self.finished == self.total


def check_theory(
    out: Path | str,
    *,
    scale: str = "laptop",
    seeds: int = 3,
    limits: Limits | None = None,
    workers: int | None = None,
    on_event: OnEvent | None = None,
    on_record: Callable[[str, int], None] = lambda name, seed: None,
) -> Theory:
    """Carry out the experiments on the papers' mathematics in ``out``, or go on with them.

    Arguments
        scale      of the models whose heads are measured: ``smoke``, ``laptop`` or ``paper``
        seeds      of every experiment, and of the models
        limits     device, deadline, compilation
        workers    processes; one a core unless given
        on_event   told of the models' training steps, by their place in `jobs`
        on_record  told of every finished experiment and its seed
    """
    choose("scale", scale, SCALES)
    if seeds < 1:
        raise InputError(f"seeds: {seeds} was given; it must be at least 1.")
    limits = limits or Limits()
    directory = _claim(Path(out), scale, seeds)
    numbers = range(_FIRST, _FIRST + seeds)
    wanted = [(name, seed) for seed in numbers for name in EXPERIMENTS]
    missing = [place for place in wanted if not _path(directory, *place).exists()]
    count, _ = plan_workers(max(1, len(missing)), "cpu", workers)
    for place in _carry_out(missing, directory, count, limits):
        on_record(*place)
    if not limits.over():
        run_local(jobs(scale, seeds), directory / RUNS, limits, workers=workers, on_event=on_event)
    for seed in numbers:
        _measure_heads(directory, scale, seed)
    return gather(directory)


def jobs(scale: str, seeds: int) -> list[Job]:
    """The models whose heads are measured: the paper protocol's, on the distance task."""
    return [_job(scale, label, seed) for seed in range(_FIRST, _FIRST + seeds) for label in heads.LABELS]


def gather(directory: Path | str) -> Theory:
    """Read what the study has finished, judge the claims on it, and write both down (results.json, claims.json)."""
    directory = Path(directory)
    content = read_json(directory / STUDY)
    try:
        scale, seeds = choose("scale", content["scale"], SCALES), int(content["seeds"])
        about = dict(content["environment"])
    except InputError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"study: {directory / STUDY} is damaged ({error}).") from None
    records: dict[str, Sequence[Record]] = {}
    for name in (*EXPERIMENTS, heads.NAME):
        paths = [_path(directory, name, seed) for seed in range(_FIRST, _FIRST + seeds)]
        records[name] = [read_json(path) for path in paths if path.exists()]
    finished = sum(len(found) for found in records.values())
    total = seeds * (len(EXPERIMENTS) + 1)
    theory = Theory(directory, scale, seeds, records, judge_all(CLAIMS, records), finished, total, about)
    head = {"study": KIND, "scale": scale, "seeds": seeds, "finished": finished, "total": total, "environment": about}
    write_json(directory / RESULTS, {**head, "records": records})
    write_json(directory / CLAIMS_FILE, {**head, "claims": [entry.to_dict() for entry in theory.entries]})
    return theory


def is_theory(directory: Path | str) -> bool:
    """Whether a directory is this study's."""
    content = read_study(Path(directory))
    return content is not None and content.get("study") == KIND


def _claim(directory: Path, scale: str, seeds: int) -> Path:
    had = enter(directory)
    if had is not None:
        if had.get("study") != KIND:
            raise InputError(f"out: {directory} holds another study; give another directory.")
        if had.get("scale") != scale:
            raise InputError(f"out: {directory} holds a study at scale {had.get('scale')!r}; give another directory.")
    about = {**environment(), "began": time.strftime("%Y-%m-%d")}
    write_json(directory / STUDY, {"study": KIND, "scale": scale, "seeds": seeds, "environment": about})
    make_directory(directory / RECORDS)
    make_directory(directory / RUNS)
    return directory


def _path(directory: Path, name: str, seed: int) -> Path:
    return directory / RECORDS / f"{name}-{seed}.json"


def _carry_out(
    places: Sequence[tuple[str, int]], directory: Path, count: int, limits: Limits
) -> Iterator[tuple[str, int]]:
    """Run experiments, ``count`` at a time, until time is up; gives each as it is done."""
    if not places or limits.over():
        return
    if count == 1:
        for place in places:
            if limits.over():
                return
            yield _experiment(*place, directory)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context, initializer=_start_worker, initargs=(os.getpid(),)) as pool:
        with signals_held():  # a Ctrl-C is this process's to handle
            waiting = {pool.submit(_experiment, *place, directory) for place in places[:count]}
        upcoming = iter(places[count:])
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
            for place in itertools.islice(upcoming, len(done)):
                if not limits.over():
                    waiting.add(pool.submit(_experiment, *place, directory))


def _start_worker(parent: int) -> None:
    """One thread; a worker whose parent is gone goes too."""
    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _experiment(name: str, seed: int, directory: Path) -> tuple[str, int]:
    write_json(_path(directory, name, seed), EXPERIMENTS[name](seed))
    return name, seed


def _job(scale: str, label: str, seed: int) -> Job:
    made = cell(SCALES[scale], "paper", DISTANCE, label, seed).job
    return Job(made.spec, made.label)


def _measure_heads(directory: Path, scale: str, seed: int) -> None:
    """Write the heads' record once all of a seed's models are there; a model that diverged is left out."""
    if _path(directory, heads.NAME, seed).exists():
        return
    runs: dict[str, Run] = {}
    for label in heads.LABELS:
        path = directory / RUNS / _job(scale, label, seed).spec.name
        if not (path / "spec.json").exists():
            return
        run = Run.open(path)
        if run.status == "stopped":
            return
        if run.status == "complete":
            runs[label] = run
    write_json(_path(directory, heads.NAME, seed), heads.heads(runs))
