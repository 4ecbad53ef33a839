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
    ExampleRequest,
    ExecutionOptions,
    HeadProbeRow,
    Job,
    Workers,
    check_workers,
    read_ablation,
    read_measures,
    without_weights,
)
from toeplens.model import Decoder
from toeplens.studies.kit.claims import LedgerEntry
from toeplens.studies.kit.frames import table
from toeplens.studies.kit.pages import HasPage
from toeplens.studies.kit.results import CLAIMS, FRAMES, CellKey, CellResult, Results
from toeplens.studies.kit.verdicts import RULE
from toeplens.training import Run, Segment, environment
from toeplens.training.run import ENVIRONMENT, PROBES, SPEC
from toeplens.utils import EnvironmentFailure, InputError, choose, parse_json, read_json, round_floats, write_json
from toeplens.utils.files import MAX_BYTES, decompress, is_leftover, make_directory, read_bytes
from toeplens.utils.formatting import plural
from toeplens.utils.outputs import LOCK, DirectoryBusy, lock_directory
from toeplens.utils.records import FiniteFloat, NonNegative, NonNegativeInt, Record, StrictBool, StrictStr

STUDY, RESULTS, CLAIMS_FILE, RUNS = "study.json", "results.json", "claims.json", "runs"
DEFAULT_KIND = "reproduce"  # the kind of study in files that do not name one
_RESULT_FILES = (RESULTS, f"{RESULTS}.xz", f"{RESULTS}.gz")
_SECONDS, _ENVIRONMENT = "seconds", "environment"
Environment = dict[str, StrictStr | FiniteFloat | StrictBool | None]  # versions, machine and command


@dataclass(frozen=True, kw_only=True)
class _StudyHeader(Record):
    """The fields of study.json that all kinds have: kind of study, environment and seconds."""

    ADDED_LATER = ("study", "seconds")

    study: str = DEFAULT_KIND
    environment: Environment
    seconds: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class _RecordHeader(Record):
    finished: NonNegativeInt
    total: NonNegativeInt
    environment: Environment


@dataclass(frozen=True, kw_only=True)
class StoredResults:
    """A results.json."""

    path: Path
    content: Mapping[str, Any]  # the request and the results
    head: dict[str, Any]  # fields of a `StudyState` that all kinds of study share, without the ledger


def read_record(path: Path) -> StoredResults:
    """Read a results.json, plain or compressed by gzip or xz. Raises `InputError` if that fails."""
    try:
        data = read_bytes(path)
        text = (decompress(data, MAX_BYTES) if path.suffix in (".gz", ".xz") else data).decode()
    except (OSError, ValueError) as error:
        raise InputError(f"study: {path} could not be read ({str(error).lower().rstrip('.')}).") from None
    content = parse_json(text, path)
    return StoredResults(
        path=path, content=content, head={"directory": path.parent, **vars(_RecordHeader.from_dict(content, path))}
    )


@dataclass(frozen=True, kw_only=True)
class StudyState(HasPage):
    """A study's state on disk; a subclass is a kind of study."""

    NAME: ClassVar[str]  # the kind in study.json
    COMMAND: ClassVar[str]  # the toeplens command that runs it
    REQUEST: ClassVar[type[Record]]  # what it was asked, as study.json has it

    directory: Path
    entries: list[LedgerEntry] = field(default_factory=list)  # the ledger
    finished: int  # number of finished pieces
    total: int
    environment: dict[str, Any]  # versions, machine, command and seconds

    @classmethod
    def plan_from_request(cls, request: Any) -> Any:
        """The plan of a request; raises `InputError` for invalid values."""
        return request

    @classmethod
    def read(cls, directory: Path, plan: Any, environment: dict[str, Any]) -> Self:
        """The state of a plan in a directory."""
        raise NotImplementedError

    @classmethod
    def from_record(cls, stored: StoredResults, plan: Any) -> Self:
        """The state from the record of a study."""
        raise NotImplementedError

    def request_fields(self) -> dict[str, Any]:
        """The request, as in study.json."""
        raise NotImplementedError

    def result_fields(self) -> dict[str, Any]:
        """The results, as in results.json; a long list, if any, as ``cells``."""
        raise NotImplementedError

    @property
    def has_results(self) -> bool:
        """Whether there are any results."""
        return self.finished > 0

    @property
    def is_complete(self) -> bool:
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
    def is_study_directory(cls, directory: Path | str) -> bool:
        """Whether a directory belongs to such a study."""
        content = read_study(Path(directory))
        return content is not None and content["study"] == cls.NAME

    @classmethod
    def is_study_or_record(cls, directory: Path | str) -> bool:
        """Whether a directory belongs to such a study, or holds the record of one."""
        return study_kind(Path(directory)) == cls.NAME

    @classmethod
    def read_plan(cls, directory: Path | str) -> tuple[Any, dict[str, Any]]:
        """The plan of a directory's study, and its environment."""
        directory = Path(directory)
        content = read_study(directory)
        if content is None:
            raise InputError(f"study: {directory} contains no study (no {STUDY}) and no record of one.")
        if content["study"] != cls.NAME:
            raise InputError(
                f"study: {directory} contains another kind of study. Choose one written by 'toeplens {cls.COMMAND}'."
            )
        return cls._parse_plan(content, directory / STUDY), content[_ENVIRONMENT] | {_SECONDS: float(content[_SECONDS])}

    @classmethod
    def _parse_plan(cls, content: Mapping[str, Any], path: Path) -> Any:
        request = cls.REQUEST.from_dict(content, f"study: {path}")
        try:
            return cls.plan_from_request(request)
        except InputError as error:
            raise InputError(f"study: {path} is damaged: {error}") from None

    @classmethod
    def open_record(cls, path: Path | str) -> Self:
        """A study from its results.json (plain, gzip or xz), with claims judged by the current rules."""
        stored = read_record(Path(path))
        return cls.from_record(stored, cls._parse_plan(stored.content, stored.path))

    @classmethod
    def gather(cls, directory: Path | str) -> Self:
        """Read the finished parts of a study, judge its claims, and write results.json and claims.json.

        Nothing is written while another process runs the study, or if the directory only holds a record.
        """
        directory = Path(directory)
        record = _find_record(directory)
        if record is not None and record[0] == cls.NAME:
            return cls.open_record(record[1])
        has_lock = False
        with ExitStack() as stack:
            if (directory / STUDY).exists():
                with suppress(DirectoryBusy, EnvironmentFailure):  # the latter: no permission to write
                    stack.enter_context(lock_directory(directory, "study"))
                    has_lock = True
            state = cls.read(directory, *cls.read_plan(directory))
            if has_lock and state.has_results:
                state.write_record()
        return state

    def write_record(self) -> None:
        """Write the record to the directory: results.json and claims.json."""
        counts = {"finished": self.finished, "total": self.total, _ENVIRONMENT: self.environment}
        head, results = {"study": self.NAME, **self.request_fields(), **counts}, self.result_fields()
        write_json(self.directory / RESULTS, {**head, **results}, rows="cells" if "cells" in results else None)
        write_json(self.directory / CLAIMS_FILE, {**head, "claims": [entry.to_dict() for entry in self.entries]})

    @classmethod
    @contextmanager
    def open_locked(cls, directory: Path, request: dict[str, Any]) -> Iterator[list[Self]]:
        """The directory of the study of a ``request``, created if needed, and locked against other processes.

        At the end the results are gathered; they are then in the yielded list. Raises `InputError` if the directory
        holds another study, or the study at another scale.
        """
        states: list[Self] = []
        _open_directory(directory)
        with lock_directory(directory, "study"):
            existing = _open_directory(directory)
            existing = existing or {"study": cls.NAME, "scale": request.get("scale"), _SECONDS: 0.0}
            if existing["study"] != cls.NAME:
                raise InputError(f"out: {directory} contains another study. Choose another directory.")
            if (scale := existing.get("scale")) != request.get("scale"):
                raise InputError(f"out: {directory} contains a study at scale {scale!r}. Choose another directory.")
            content = {"study": cls.NAME, **request, _SECONDS: existing[_SECONDS], _ENVIRONMENT: environment()}
            write_json(directory / STUDY, content)
            make_directory(directory / RUNS)
            started = time.monotonic()
            try:
                yield states
            finally:
                seconds = round(existing[_SECONDS] + time.monotonic() - started, 1)
                write_json(directory / STUDY, {**read_json(directory / STUDY), _SECONDS: seconds})
                states.append(cls.gather(directory))


def read_study(directory: Path) -> dict[str, Any] | None:
    """The study.json of ``directory``, with its common fields checked; None if there is none."""
    path = directory / STUDY
    if not path.exists():
        return None
    content = read_json(path)
    return {**content, **vars(_StudyHeader.from_dict(content, f"study: {path}"))}


def study_kind(directory: Path) -> str | None:
    """The kind of study in a directory, or of the record in it; None if there is none."""
    content, record = read_study(directory), _find_record(directory)
    return content["study"] if content is not None else record[0] if record is not None else None


def _find_record(directory: Path) -> tuple[str, Path] | None:
    """The kind of study and its results file, if a directory only holds a record; otherwise None."""
    claims = directory / CLAIMS_FILE
    results = next((path for name in _RESULT_FILES if (path := directory / name).is_file()), None)
    if results is None or (directory / STUDY).exists() or not claims.is_file():
        return None
    content = read_json(claims)
    return (content.get("study", DEFAULT_KIND), results) if isinstance(content, dict) else None


def _open_directory(directory: Path) -> dict[str, Any] | None:
    """Create ``directory`` if needed and return its study, or None. Raises `InputError` if it holds other files.

    A directory with only runs is allowed, so that unpacked runs can be resumed.
    """
    make_directory(directory)
    existing = read_study(directory)
    others: list[Path] = []
    for child in sorted(directory.iterdir()) if existing is None else ():
        if child.name == RUNS and child.is_dir():
            others += [run for run in sorted(child.iterdir()) if not (run / SPEC).is_file()]
        elif child.name != LOCK and not is_leftover(child):
            others.append(child)
    if others:
        raise InputError(
            f"out: {directory} contains {others[0].relative_to(directory)}, which belongs to neither a study nor runs "
            f"({RUNS}/*/{SPEC}). Choose an empty or new directory."
        )
    return existing


def with_group(execution: ExecutionOptions | None, out: Path) -> ExecutionOptions:
    """The execution options of a study in ``out``, whose name is the loggers' group."""
    execution = execution or ExecutionOptions()
    return replace(execution, group=execution.group if execution.group is not None else out.absolute().name)


def prepare_runs(
    execution: ExecutionOptions | None, out: Path, jobs: Sequence[Job], workers: Workers
) -> ExecutionOptions:
    """The execution options of a study in ``out`` that consists of runs only.

    Raises `InputError` if these workers cannot run the jobs, and for existing runs that do not belong to the study or
    lack weights that are needed.
    """
    execution = with_group(execution, out)
    check_workers(workers, len(jobs), execution)
    _open_directory(out)
    runs, names = out / RUNS, {job.spec.name for job in jobs}
    existing = {run.name for run in runs.iterdir()} if runs.is_dir() else set[str]()
    if existing and not names & existing and not (out / STUDY).exists():
        raise InputError(
            f"out: none of the {len(existing)} runs in {runs} belongs to this study's {len(names)}. Set their scale, "
            "protocol and parts, or choose another directory."
        )
    if execution.publish is None and (missing := without_weights(jobs, runs)):
        raise InputError(
            f"out: {len(missing)} finished runs in {runs} have no weights to measure (first: {missing[0].spec.name}). "
            "Delete these runs to train them again, or choose another directory."
        )
    return execution


# ---- grids of runs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run of a study's grid, and its place."""

    key: CellKey
    job: Job


def jobs_of(cells: Sequence[Cell]) -> list[Job]:
    """The grid's runs without duplicates; cells with the same run are merged, with the measures of all."""
    jobs: dict[str, Job] = {}
    for cell in cells:
        job = cell.job
        previous = jobs.get(job.spec.name, job)
        measures = tuple(dict.fromkeys((*previous.measures, *job.measures)))
        jobs[job.spec.name] = replace(previous, measures=measures, probe=previous.probe or job.probe)
    return list(jobs.values())


@dataclass(frozen=True, kw_only=True)
class GridState(StudyState):
    """The state of a grid."""

    results: Results  # cells that are trained and ablated, or have diverged; finished cells also have all measures
    share: float  # of the maximum number of training steps, done; a run that ended early counts as complete

    @classmethod
    def cells(cls, plan: Any) -> list[Cell]:
        """The grid of a plan."""
        raise NotImplementedError

    @classmethod
    def with_verdicts(cls, plan: Any, **fields: Any) -> Self:
        """The state with the verdicts on its claims, from the fields of `GridState`."""
        raise NotImplementedError

    @classmethod
    def read(cls, directory: Path, plan: Any, environment: dict[str, Any]) -> Self:
        return cls.with_verdicts(plan, **gather_cells(directory, cls.cells(plan), environment))

    @classmethod
    def from_record(cls, stored: StoredResults, plan: Any) -> Self:
        results = Results(CellResult.from_list(stored.content.get("cells"), f"{stored.path}: cells"))
        share = stored.head["finished"] / max(1, stored.head["total"])  # the record does not know unfinished runs
        return cls.with_verdicts(plan, **stored.head, results=results, share=share)

    @property
    def has_results(self) -> bool:
        return len(self.results.cells) > 0

    @property
    def progress(self) -> str:
        text = f"{self.finished} of {self.total} cells finished"
        return f"{text} ({100 * self.share:.3g}% of the maximum number of steps)"

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

    def result_fields(self) -> dict[str, Any]:
        return {**self.tables(), "cells": [cell.to_dict() for cell in self.results.cells]}


def gather_cells(directory: Path, cells: Sequence[Cell], environment: dict[str, Any]) -> dict[str, Any]:
    """The finished cells of a grid in a study's directory, as the fields of `GridState`.

    Adds the ``execution`` of the last run and the result of `describe_setups` to the environment.
    """
    results: list[CellResult] = []
    execution: dict[str, Any] = {}
    histories: list[list[Segment]] = []
    steps_done = finished = 0
    for cell in cells:
        run_directory = directory / RUNS / cell.job.spec.name
        if not (run_directory / SPEC).exists():
            continue
        run = Run.open(run_directory)
        steps_done += run.step if run.status == "stopped" else cell.job.spec.total_steps
        result = _cell_result(cell, run)
        if result is not None:
            finished += run.status == "diverged" or len(result.measures) == len(cell.job.measures)
            histories.append(run.history)
            if (path := run_directory / ENVIRONMENT).exists():
                execution["execution"] = read_json(path).get("execution")
            results.append(result)
    return {
        "directory": directory,
        "finished": finished,
        "total": len(cells),
        "environment": {**environment, **execution, **describe_setups(histories, environment)},
        "results": Results(results),
        "share": steps_done / max(1, sum(cell.job.spec.total_steps for cell in cells)),
    }


def _cell_result(cell: Cell, run: Run) -> CellResult | None:
    """The result of a run that has diverged, or is complete and ablated."""
    spec, request, probe_rows = cell.job.spec, ExampleRequest(cell.job.examples, cell.job.split), run.probe_rows
    ablation, by_loss = (read_ablation(run.directory, request, metric) for metric in ("accuracy", "loss"))
    if run.status != "diverged" and (run.status != "complete" or ablation is None):
        return None
    baselines = (run.result["chance"], run.result["guess"]) if "chance" in run.result else (spec.chance, spec.guess)
    HeadProbeRow.from_list(probe_rows, run.directory / PROBES)  # raises if it is damaged
    return CellResult(
        key=cell.key,
        run=spec.name,
        status="diverged" if run.status == "diverged" else "complete",
        chance=baselines[0],
        length_chance=baselines[1],
        parameters=sum(parameter.numel() for parameter in Decoder(spec.model).parameters()),
        epochs=run.metrics,
        result=run.result,
        ablation=ablation,
        measures=round_floats(read_measures(run.directory, cell.job.measures, request)),
        probe_rows=round_floats(probe_rows),
        by_loss=by_loss,
    )


def describe_setups(histories: Iterable[Sequence[Segment]], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Facts from the histories of a study's runs; empty without histories, as in earlier versions.

    Returns ``threads`` of the training processes (None if they differ) and, if the runs used several set-ups or one
    that differs from the study's last ``environment``, a sentence ``setups`` that names them.
    """
    runs = [list(dict.fromkeys(segment.setup for segment in history)) for history in histories if history]
    if not runs:
        return {}
    counts = Counter(str(setup) for setups in runs for setup in setups)
    threads = {setup.threads for setups in runs for setup in setups}
    facts: dict[str, Any] = {"threads": threads.pop() if len(threads) == 1 else None}
    first = runs[0][0]
    differs = any(environment.get(name) != getattr(first, name) for name in ("processor", "torch"))
    if len(counts) == 1 and (differs or first.gpu not in (None, environment.get("gpu"))):
        facts["setups"] = f"The {len(runs)} runs were trained on {first}, not on the machine that gathered the study."
    if len(counts) > 1:
        names = "; ".join(f"{text}: {plural(count, 'run')}" for text, count in counts.most_common())
        moved = sum(len(setups) > 1 for setups in runs)
        moved_note = f" ({moved} of them moved between set-ups)" if moved else ""
        facts["setups"] = (
            f"The {len(runs)} runs were trained on {len(counts)} set-ups{moved_note}, so the results may not be "
            f"bit-identical to those of a single one: {names}."
        )
    return facts
