"""Study directories: run and resume a study, gather its results, and write or read its record; grids of runs.

A record is results.json (possibly compressed) and claims.json, without the runs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import pyarrow as pa

from toeplens.engine import (
    Asked,
    ExecutionOptions,
    Job,
    Watched,
    Workers,
    must_have,
    read_ablation,
    read_measures,
    without_weights,
)
from toeplens.ground import InputError, choose, parse_json, read_json, rounded, write_json
from toeplens.ground.files import LARGEST, is_leftover, make_directory, read_bytes, unzipped
from toeplens.ground.outputs import LOCK, Busy, locked
from toeplens.ground.records import Count, Number, Positive, Record, Text, Truth
from toeplens.model import Decoder
from toeplens.studies.kit.claims import Entry
from toeplens.studies.kit.frames import table
from toeplens.studies.kit.pages import HasPage
from toeplens.studies.kit.results import CLAIMS, FRAMES, CellResult, Key, Results
from toeplens.studies.kit.verdicts import RULE
from toeplens.training import Run, Segment, environment
from toeplens.training.run import ENVIRONMENT, SPEC, WATCHED

STUDY, RESULTS, CLAIMS_FILE, RUNS = "study.json", "results.json", "claims.json", "runs"
FIRST = "reproduce"  # the kind of study in files that do not name one
_PACKED = (RESULTS, f"{RESULTS}.xz", f"{RESULTS}.gz")
_SECONDS, _ENVIRONMENT = "seconds", "environment"
Environment = dict[str, Text | Number | Truth | None]  # versions, machine and command


@dataclass(frozen=True, kw_only=True)
class _Begun(Record):
    """The fields of study.json that all kinds have: kind of study, environment and seconds."""

    LATER = ("study", "seconds")

    study: str = FIRST
    environment: Environment
    seconds: Positive = 0.0


@dataclass(frozen=True, kw_only=True)
class _Head(Record):
    finished: Count
    total: Count
    environment: Environment


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A results.json."""

    path: Path
    content: Mapping[str, Any]  # the request and the results
    head: dict[str, Any]  # fields of a `State` that all kinds of study share, without the ledger


def read_record(path: Path) -> Kept:
    """Read a results.json, plain or compressed by gzip or xz. Raises `InputError` if that fails."""
    try:
        packed = read_bytes(path)
        text = (unzipped(packed, LARGEST) if path.suffix in (".gz", ".xz") else packed).decode()
    except (OSError, ValueError) as error:
        raise InputError(f"study: {path} could not be read ({str(error).lower().rstrip('.')}).") from None
    content = parse_json(text, path)
    return Kept(path=path, content=content, head={"directory": path.parent, **vars(_Head.from_dict(content, path))})


@dataclass(frozen=True, kw_only=True)
class State(HasPage):
    """A study's state on disk; a subclass is a kind of study."""

    NAME: ClassVar[str]  # the kind in study.json
    COMMAND: ClassVar[str]  # the toeplens command that runs it
    REQUEST: ClassVar[type[Record]]  # what it was asked, as study.json has it

    directory: Path
    entries: list[Entry] = field(default_factory=list)  # the ledger
    finished: int  # number of finished pieces
    total: int
    environment: dict[str, Any]  # versions, machine, command and seconds

    @classmethod
    def planned(cls, request: Any) -> Any:
        """The plan of a request; raises `InputError` for invalid values."""
        return request

    @classmethod
    def read(cls, directory: Path, plan: Any, environment: dict[str, Any]) -> Self:
        """The state of a plan in a directory."""
        raise NotImplementedError

    @classmethod
    def reread(cls, kept: Kept, plan: Any) -> Self:
        """The state from the record of a study."""
        raise NotImplementedError

    def asked(self) -> dict[str, Any]:
        """The request, as in study.json."""
        raise NotImplementedError

    def found(self) -> dict[str, Any]:
        """The results, as in results.json; a long list, if any, as ``cells``."""
        raise NotImplementedError

    @property
    def begun(self) -> bool:
        """Whether there are any results."""
        return self.finished > 0

    @property
    def complete(self) -> bool:
        """Whether everything is finished."""
        return self.finished == self.total

    @property
    def progress(self) -> str:
        """How much is finished."""
        return f"{self.finished} of {self.total} records finished"

    @property
    def rule(self) -> str:
        """How its verdicts are made."""
        return RULE

    def summary(self) -> dict[str, Any]:
        """What commands print of it as JSON, besides its progress and claims."""
        return {}

    def table_makers(self) -> dict[str, Callable[[], pa.Table]]:
        return {"claims": lambda: table(CLAIMS, (entry.row() for entry in self.entries))}

    def frame(self, rows: str | None = None) -> pa.Table:
        """The results as an Arrow table, which pandas and polars accept (columns: docs/how-to/export.md).

        rows  what a row is: ``claims``, or for most kinds of study ``cells`` (default) or ``heads``
        """
        makers = self.table_makers()
        return makers[choose("rows", rows or next(iter(makers)), makers)]()

    @classmethod
    def holds(cls, directory: Path | str) -> bool:
        """Whether a directory belongs to such a study."""
        content = read_study(Path(directory))
        return content is not None and content["study"] == cls.NAME

    @classmethod
    def tells(cls, directory: Path | str) -> bool:
        """Whether a directory belongs to such a study, or holds the record of one."""
        return study_in(Path(directory)) == cls.NAME

    @classmethod
    def plan_of(cls, directory: Path | str) -> tuple[Any, dict[str, Any]]:
        """The plan of a directory's study, and its environment."""
        directory = Path(directory)
        content = read_study(directory)
        if content is None:
            raise InputError(f"study: {directory} contains no study (no {STUDY}) and no record of one.")
        if content["study"] != cls.NAME:
            raise InputError(
                f"study: {directory} contains another kind of study. Choose one written by 'toeplens {cls.COMMAND}'."
            )
        return cls._planned(content, directory / STUDY), content[_ENVIRONMENT] | {_SECONDS: float(content[_SECONDS])}

    @classmethod
    def _planned(cls, content: Mapping[str, Any], path: Path) -> Any:
        request = cls.REQUEST.from_dict(content, f"study: {path}")
        try:
            return cls.planned(request)
        except InputError as error:
            raise InputError(f"study: {path} is damaged: {error}") from None

    @classmethod
    def open_record(cls, path: Path | str) -> Self:
        """A study from its results.json (plain, gzip or xz), with claims judged by the current rules."""
        kept = read_record(Path(path))
        return cls.reread(kept, cls._planned(kept.content, kept.path))

    @classmethod
    def gather(cls, directory: Path | str) -> Self:
        """Read the finished parts of a study, judge its claims, and write results.json and claims.json.

        Nothing is written while another process runs the study, or if the directory only holds a record.
        """
        directory = Path(directory)
        record = _record_in(directory)
        if record is not None and record[0] == cls.NAME:
            return cls.open_record(record[1])
        ours = False
        with ExitStack() as stack:
            if (directory / STUDY).exists():
                with suppress(Busy):
                    stack.enter_context(locked(directory, "study"))
                    ours = True
            state = cls.read(directory, *cls.plan_of(directory))
            if ours and state.begun:
                state.write_down()
        return state

    def write_down(self) -> None:
        """Write the record to the directory: results.json and claims.json."""
        counted = {"finished": self.finished, "total": self.total, _ENVIRONMENT: self.environment}
        head, found = {"study": self.NAME, **self.asked(), **counted}, self.found()
        write_json(self.directory / RESULTS, {**head, **found}, rows="cells" if "cells" in found else None)
        write_json(self.directory / CLAIMS_FILE, {**head, "claims": [entry.to_dict() for entry in self.entries]})

    @classmethod
    @contextmanager
    def opened(cls, directory: Path, asked: dict[str, Any]) -> Iterator[list[Self]]:
        """The directory of the study ``asked`` for, created if needed, and locked against other processes.

        At the end the results are gathered; they are then in the yielded list. Raises `InputError` if the directory
        holds another study, or the study at another scale.
        """
        gathered: list[Self] = []
        _open_directory(directory)
        with locked(directory, "study"):
            had = _open_directory(directory)
            had = had or {"study": cls.NAME, "scale": asked.get("scale"), _SECONDS: 0.0}
            if had["study"] != cls.NAME:
                raise InputError(f"out: {directory} contains another study. Choose another directory.")
            if (scale := had.get("scale")) != asked.get("scale"):
                raise InputError(f"out: {directory} contains a study at scale {scale!r}. Choose another directory.")
            content = {"study": cls.NAME, **asked, _SECONDS: had[_SECONDS], _ENVIRONMENT: environment()}
            write_json(directory / STUDY, content)
            make_directory(directory / RUNS)
            started = time.monotonic()
            try:
                yield gathered
            finally:
                spent = round(had[_SECONDS] + time.monotonic() - started, 1)
                write_json(directory / STUDY, {**read_json(directory / STUDY), _SECONDS: spent})
                gathered.append(cls.gather(directory))


def read_study(directory: Path) -> dict[str, Any] | None:
    """The study.json of ``directory``, with its common fields checked; None if there is none."""
    path = directory / STUDY
    if not path.exists():
        return None
    content = read_json(path)
    return {**content, **vars(_Begun.from_dict(content, f"study: {path}"))}


def study_in(directory: Path) -> str | None:
    """The kind of study in a directory, or of the record in it; None if there is none."""
    content, record = read_study(directory), _record_in(directory)
    return content["study"] if content is not None else record[0] if record is not None else None


def _record_in(directory: Path) -> tuple[str, Path] | None:
    """The kind of study and its results file, if a directory only holds a record; otherwise None."""
    claims = directory / CLAIMS_FILE
    results = next((path for name in _PACKED if (path := directory / name).is_file()), None)
    if results is None or (directory / STUDY).exists() or not claims.is_file():
        return None
    content = read_json(claims)
    return (content.get("study", FIRST), results) if isinstance(content, dict) else None


def _open_directory(directory: Path) -> dict[str, Any] | None:
    """Create ``directory`` if needed and return its study, or None. Raises `InputError` if it holds other files.

    A directory with only runs is allowed, so that unpacked runs can be resumed.
    """
    make_directory(directory)
    had = read_study(directory)
    others: list[Path] = []
    for child in sorted(directory.iterdir()) if had is None else ():
        if child.name == RUNS and child.is_dir():
            others += [run for run in sorted(child.iterdir()) if not (run / SPEC).is_file()]
        elif child.name != LOCK and not is_leftover(child):
            others.append(child)
    if others:
        raise InputError(
            f"out: {directory} contains {others[0].relative_to(directory)}, which belongs to neither a study nor runs "
            f"({RUNS}/*/{SPEC}). Choose an empty or new directory."
        )
    return had


def of_study(limits: ExecutionOptions | None, out: Path) -> ExecutionOptions:
    """The limits of a study in ``out``, whose name is the loggers' group."""
    limits = limits or ExecutionOptions()
    return replace(limits, group=limits.group if limits.group is not None else out.absolute().name)


def of_runs(limits: ExecutionOptions | None, out: Path, jobs: Sequence[Job], workers: Workers) -> ExecutionOptions:
    """The limits of a study in ``out`` that consists of runs only.

    Raises `InputError` if these workers cannot run the jobs, and for existing runs that do not belong to the study or
    lack weights that are needed.
    """
    limits = of_study(limits, out)
    must_have(workers, len(jobs), limits)
    _open_directory(out)
    runs, names = out / RUNS, {job.spec.name for job in jobs}
    there = {run.name for run in runs.iterdir()} if runs.is_dir() else set[str]()
    if there and not names & there and not (out / STUDY).exists():
        raise InputError(
            f"out: none of the {len(there)} runs in {runs} belongs to this study's {len(names)}. Set their scale, "
            "protocol and parts, or choose another directory."
        )
    if limits.publish is None and (kept := without_weights(jobs, runs)):
        raise InputError(
            f"out: {len(kept)} finished runs in {runs} have no weights to measure (first: {kept[0].spec.name}). "
            "Delete these runs to train them again, or choose another directory."
        )
    return limits


# ---- grids of runs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run of a study's grid, and its place."""

    key: Key
    job: Job


def jobs_of(cells: Sequence[Cell]) -> list[Job]:
    """The grid's runs without duplicates; cells with the same run are merged, with the measures of all."""
    jobs: dict[str, Job] = {}
    for cell in cells:
        job = cell.job
        had = jobs.get(job.spec.name, job)
        measures = tuple(dict.fromkeys((*had.measures, *job.measures)))
        jobs[job.spec.name] = replace(had, measures=measures, watch=had.watch or job.watch)
    return list(jobs.values())


@dataclass(frozen=True, kw_only=True)
class Gathered(State):
    """The state of a grid."""

    results: Results  # cells that are trained and ablated, or have diverged; finished cells also have all measures
    share: float  # of the maximum number of training steps, done; a run that ended early counts as complete

    @classmethod
    def cells(cls, plan: Any) -> list[Cell]:
        """The grid of a plan."""
        raise NotImplementedError

    @classmethod
    def judged(cls, plan: Any, **gathered: Any) -> Self:
        """The state with the verdicts on its claims, from the fields of `Gathered`."""
        raise NotImplementedError

    @classmethod
    def read(cls, directory: Path, plan: Any, environment: dict[str, Any]) -> Self:
        return cls.judged(plan, **gather_cells(directory, cls.cells(plan), environment))

    @classmethod
    def reread(cls, kept: Kept, plan: Any) -> Self:
        results = Results(CellResult.from_list(kept.content.get("cells"), f"{kept.path}: cells"))
        share = kept.head["finished"] / max(1, kept.head["total"])  # the record does not know unfinished runs
        return cls.judged(plan, **kept.head, results=results, share=share)

    @property
    def begun(self) -> bool:
        return len(self.results.cells) > 0

    @property
    def progress(self) -> str:
        done = f"{self.finished} of {self.total} cells finished"
        return f"{done} ({100 * self.share:.3g}% of the maximum number of steps)"

    @property
    def trained_seconds(self) -> float:
        """Total training time of its models in seconds."""
        return sum(float(cell.result.get("seconds") or 0.0) for cell in self.models.values())

    @property
    def models(self) -> dict[str, CellResult]:
        """Its models by run, without duplicates."""
        return {cell.run: cell for cell in self.results.cells}

    def summary(self) -> dict[str, Any]:
        """The share of the training steps that is done, and the tables."""
        return {"share": self.share, **self.tables()}

    def tables(self) -> dict[str, Any]:
        """The tables, as in results.json."""
        raise NotImplementedError

    def table_makers(self) -> dict[str, Callable[[], pa.Table]]:
        return {rows: partial(self.results.frame, rows) for rows in FRAMES} | super().table_makers()

    def found(self) -> dict[str, Any]:
        return {**self.tables(), "cells": [cell.to_dict() for cell in self.results.cells]}


def gather_cells(directory: Path, cells: Sequence[Cell], environment: dict[str, Any]) -> dict[str, Any]:
    """The finished cells of a grid in a study's directory, as the fields of `Gathered`.

    Adds the ``execution`` of the last run and the result of `carried_out` to the environment.
    """
    found: list[CellResult] = []
    runs: dict[str, Any] = {}
    histories: list[list[Segment]] = []
    done = finished = 0
    for cell in cells:
        run_directory = directory / RUNS / cell.job.spec.name
        if not (run_directory / SPEC).exists():
            continue
        run = Run.open(run_directory)
        done += run.step if run.status == "stopped" else cell.job.spec.total_steps
        result = _result(cell, run)
        if result is not None:
            finished += run.status == "diverged" or len(result.measures) == len(cell.job.measures)
            histories.append(run.history)
            if (path := run_directory / ENVIRONMENT).exists():
                runs["execution"] = read_json(path).get("execution")
            found.append(result)
    return {
        "directory": directory,
        "finished": finished,
        "total": len(cells),
        "environment": {**environment, **runs, **carried_out(histories, environment)},
        "results": Results(found),
        "share": done / max(1, sum(cell.job.spec.total_steps for cell in cells)),
    }


def _result(cell: Cell, run: Run) -> CellResult | None:
    """The result of a run that has diverged, or is complete and ablated."""
    spec, asked, watched = cell.job.spec, Asked(cell.job.examples, cell.job.split), run.watched
    ablation, by_loss = (read_ablation(run.directory, asked, metric) for metric in ("accuracy", "loss"))
    if run.status != "diverged" and (run.status != "complete" or ablation is None):
        return None
    guesses = (run.result["chance"], run.result["guess"]) if "chance" in run.result else (spec.chance, spec.guess)
    Watched.from_list(watched, run.directory / WATCHED)  # raises if it is damaged
    return CellResult(
        key=cell.key,
        run=spec.name,
        status="diverged" if run.status == "diverged" else "complete",
        chance=guesses[0],
        length_chance=guesses[1],
        parameters=sum(parameter.numel() for parameter in Decoder(spec.model).parameters()),
        epochs=run.metrics,
        result=run.result,
        ablation=ablation,
        measures=rounded(read_measures(run.directory, cell.job.measures, asked)),
        watched=rounded(watched),
        by_loss=by_loss,
    )


def carried_out(histories: Iterable[Sequence[Segment]], here: Mapping[str, Any]) -> dict[str, Any]:
    """Facts from the histories of a study's runs; empty without histories, as in earlier versions.

    Returns ``threads`` of the training processes (None if they differ) and, if the runs used several set-ups or one
    that differs from the study's last environment (``here``), a sentence ``setups`` that names them.
    """
    known = [list(dict.fromkeys(segment.setup for segment in history)) for history in histories if history]
    if not known:
        return {}
    counted = Counter(str(setup) for setups in known for setup in setups)
    threads = {setup.threads for setups in known for setup in setups}
    found: dict[str, Any] = {"threads": threads.pop() if len(threads) == 1 else None}
    only = known[0][0]
    differs = any(here.get(name) != getattr(only, name) for name in ("processor", "torch"))
    if len(counted) == 1 and (differs or only.gpu not in (None, here.get("gpu"))):
        found["setups"] = f"The {len(known)} runs were trained on {only}, not on the machine that gathered the study."
    if len(counted) > 1:
        named = "; ".join(f"{words}: {count} run{'s' if count > 1 else ''}" for words, count in counted.most_common())
        moved = sum(len(setups) > 1 for setups in known)
        begun = f" ({moved} of them moved between set-ups)" if moved else ""
        found["setups"] = (
            f"The {len(known)} runs were trained on {len(counted)} set-ups{begun}, so the results may not be "
            f"bit-identical to those of a single one: {named}."
        )
    return found
