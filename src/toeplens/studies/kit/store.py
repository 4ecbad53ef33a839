"""A study's directory: whose it is, the cells of its grid, what of them is finished, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toeplens.engine import Asked, Job, Limits, Watched, read_ablation, read_measures
from toeplens.ground import InputError, read_json, rounded, write_json
from toeplens.ground.files import is_leftover, make_directory
from toeplens.ground.locks import LOCK, Busy, locked
from toeplens.ground.reading import checked, read_record
from toeplens.lens import HeadAblation
from toeplens.model import Decoder
from toeplens.studies.kit.records import KINDS, Executed
from toeplens.studies.kit.results import CellResult, Key
from toeplens.studies.kit.setups import carried_out
from toeplens.training import Run, Segment, environment
from toeplens.training.run import ENVIRONMENT, WATCHED

STUDY, RESULTS, CLAIMS_FILE, RUNS = "study.json", "results.json", "claims.json", "runs"
_SECONDS, _ENVIRONMENT = "seconds", "environment"


@dataclass(frozen=True)
class Cell:
    """One run of a study's grid, and where it stands."""

    key: Key
    job: Job


def jobs_of(cells: Sequence[Cell]) -> list[Job]:
    """The grid's runs, each once: two places of the grid may stand for the same run."""
    jobs: dict[str, Job] = {}
    for cell in cells:
        jobs.setdefault(cell.job.spec.name, cell.job)
    return list(jobs.values())


def read_study(directory: Path) -> dict[str, Any] | None:
    """What ``directory`` says its study is (`toeplens.studies.kit.records`); None where it is no study's."""
    path = directory / STUDY
    if not path.exists():
        return None
    content = read_json(path)
    kind = content.get("study", "reproduce") if isinstance(content, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"study: {path} is damaged: it does not say which study it is ({', '.join(KINDS)}).")
    checked(KINDS[kind], content, f"study: {path}")
    return content


def enter(directory: Path) -> dict[str, Any] | None:
    """Make ``directory`` if it is not there; what study it holds, None for none. Other files are not written among."""
    make_directory(directory)
    had = read_study(directory)
    if had is None and any(child.name != LOCK and not is_leftover(child) for child in directory.iterdir()):
        raise InputError(f"out: {directory} holds files that are not a study's; give an empty or new directory.")
    return had


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold a study's directory while it is carried out: a second process is refused. Made if it is not there."""
    enter(directory)
    with locked(directory, "study"):
        yield


@contextmanager
def written(directory: Path) -> Iterator[bool]:
    """Whether what is gathered within may be written down: not while another process carries the study out."""
    if not (directory / STUDY).exists():
        yield False
        return
    try:
        with locked(directory, "study"):
            yield True
    except Busy:
        yield False


def own(directory: Path, content: dict[str, Any]) -> None:
    """Make ``directory`` the study's that ``content`` describes, or note that it is now described by it.

    Whether an earlier study there is the same one is for the caller to say, see `read_study`.
    """
    had = enter(directory)
    seconds = 0.0 if had is None else had.get(_SECONDS, 0.0)
    write_json(directory / STUDY, {**content, _SECONDS: seconds, _ENVIRONMENT: environment()})
    make_directory(directory / RUNS)


@contextmanager
def timed(directory: Path) -> Iterator[None]:
    """Add what is done inside to the study's time."""
    started = time.monotonic()
    try:
        yield
    finally:
        content = read_json(directory / STUDY)
        spent = round(content[_SECONDS] + time.monotonic() - started, 1)
        write_json(directory / STUDY, {**content, _SECONDS: spent})


def about(content: dict[str, Any]) -> dict[str, Any]:
    """What a study was carried out with, and for how long, from what `read_study` gives."""
    return {**content[_ENVIRONMENT], _SECONDS: float(content[_SECONDS])}


@dataclass(frozen=True)
class Gathered:
    """What of a grid is there.

    cells  those that are trained and measured, or have diverged
    share  share of all training steps that is done
    runs   what their runs were carried out on: how the last of them was computed (``execution``), and what
           `carried_out` says
    """

    cells: list[CellResult]
    share: float
    runs: dict[str, Any]

    def told(self, environment: dict[str, Any]) -> dict[str, Any]:
        """What the study was carried out with, and its runs."""
        return {**environment, **self.runs}


def gather_cells(directory: Path, cells: Sequence[Cell]) -> Gathered:
    """Read what is finished of a grid's cells in a study's directory."""
    found: list[CellResult] = []
    runs: dict[str, Any] = {}
    histories: list[list[Segment]] = []
    done = total = 0
    for cell in cells:
        total += cell.job.spec.total_steps
        run_directory = directory / RUNS / cell.job.spec.name
        if not (run_directory / "spec.json").exists():
            continue
        run = Run.open(run_directory)
        asked = Asked(cell.job.examples, cell.job.split)
        ablation = read_ablation(run_directory, asked)
        measures = read_measures(run_directory, cell.job.measures, asked)
        measured = ablation is not None and len(measures) == len(cell.job.measures)
        done += run.step if run.status == "stopped" else cell.job.spec.total_steps
        if run.status == "diverged" or (run.status == "complete" and measured):
            histories.append(run.history)
            if (run_directory / ENVIRONMENT).exists():
                runs["execution"] = read_record(run_directory / ENVIRONMENT, Executed).execution
            found.append(_result(cell, run, ablation, measures))
    return Gathered(found, done / total, runs | carried_out(histories))


def _result(cell: Cell, run: Run, ablation: HeadAblation | None, measures: dict[str, Any]) -> CellResult:
    task = cell.job.spec.build_task()
    model = Decoder(cell.job.spec.model)
    watched = run.watched
    Watched.from_list(watched, run.directory / WATCHED)
    return CellResult(
        key=cell.key,
        run=cell.job.spec.name,
        status=run.status,
        chance=cell.job.spec.chance,
        length_chance=max(task.length_chance(cell.job.spec.ignore_label), cell.job.spec.chance),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        epochs=run.metrics,
        result=run.result,
        ablation=ablation,
        measures=rounded(measures),
        watched=rounded(watched),
    )


def limits_for(time_budget: float | None, limits: Limits) -> Limits:
    """``limits`` with a deadline ``time_budget`` seconds from now, less what writing everything down takes."""
    if time_budget is None:
        return limits
    reserve = min(20.0, 0.25 * time_budget)
    return replace(limits, deadline=time.time() + time_budget - reserve)
