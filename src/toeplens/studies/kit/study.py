"""Study directories: run and resume a study, gather its results, and write its record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa

from toeplens.engine import Job, Limits, Workers, must_have, run_jobs, without_weights
from toeplens.engine.jobs import OnEvent
from toeplens.ground import InputError, choose, read_json, write_json
from toeplens.ground.files import is_leftover, make_directory
from toeplens.ground.locks import LOCK, Busy, locked
from toeplens.ground.reading import Number, Positive, Text, Truth
from toeplens.ground.records import Record
from toeplens.studies.kit.claims import Entry
from toeplens.studies.kit.frames import ClaimRow, table
from toeplens.studies.kit.recorded import CLAIMS_FILE, FIRST, RESULTS, STUDY, Kept, read_record, record_in
from toeplens.training import environment
from toeplens.training.run import SPEC

RUNS = "runs"
_SECONDS, _ENVIRONMENT = "seconds", "environment"

Plan = TypeVar("Plan")


@dataclass(frozen=True, kw_only=True)
class Begun(Record):
    """study.json: kind of study, environment and seconds; each kind adds its request."""

    LATER = ("study", "seconds")

    study: str = FIRST
    environment: dict[str, Text | Number | Truth | None]  # versions, machine and command
    seconds: Positive = 0.0


@dataclass(frozen=True, kw_only=True)
class State:
    """A study's state on disk.

    entries          the ledger
    finished, total  number of finished pieces, and of all
    environment      versions, machine, command and seconds
    """

    directory: Path
    entries: list[Entry] = field(default_factory=list)
    finished: int
    total: int
    environment: dict[str, Any]

    @property
    def complete(self) -> bool:
        """Whether everything is finished."""
        return self.finished == self.total

    @property
    def begun(self) -> bool:
        """Whether there are any results."""
        return self.finished > 0

    def frames(self) -> dict[str, Callable[[], pa.Table]]:
        """Functions that make its tables, by what a row is; other kinds add more in front."""
        return {"claims": lambda: table(ClaimRow, map(claim_row, self.entries))}

    def frame(self, rows: str | None = None) -> pa.Table:
        """The results as an Arrow table, which pandas and polars accept (columns: docs/how-to/export.md).

        rows  what a row is: ``claims``, or for most kinds of study ``cells`` (default) or ``heads``
        """
        frames = self.frames()
        return frames[choose("rows", rows or next(iter(frames)), frames)]()

    def asked(self) -> dict[str, Any]:
        """The request, as in study.json."""
        raise NotImplementedError

    def found(self) -> dict[str, Any]:
        """The results, as in results.json; a long list, if any, as ``cells``."""
        raise NotImplementedError


def claim_row(entry: Entry) -> dict[str, Any]:
    """An entry of the ledger as a row of the table of claims (`ClaimRow`)."""
    claim = entry.claim
    return {
        "claim": claim.id,
        "protocol": entry.protocol,
        "verdict": entry.verdict,
        "uncorrected": entry.plain,
        "source": claim.source,
        "statement": claim.statement,
        "rule": claim.rule,
        "evidence": "\n".join(entry.evidence),
    }


Found = TypeVar("Found", bound=State)


@dataclass(frozen=True)
class Kind(Generic[Plan, Found]):
    """A kind of study.

    name     name in study.json
    command  the toeplens command that runs it
    record   record type of study.json
    plan     parses the request; raises `InputError` for invalid values
    read     reads the state of a plan from a directory, given the environment
    reread   reads the state from the record of a study
    """

    name: str
    command: str
    record: type[Begun]
    plan: Callable[[Any], Plan]
    read: Callable[[Path, Plan, dict[str, Any]], Found]
    reread: Callable[[Kept, Plan], Found]

    def holds(self, directory: Path | str) -> bool:
        """Whether a directory belongs to such a study."""
        content = read_study(Path(directory))
        return content is not None and content["study"] == self.name

    def tells(self, directory: Path | str) -> bool:
        """Whether a directory belongs to such a study, or holds the record of one."""
        return study_in(Path(directory)) == self.name

    def plan_of(self, directory: Path) -> tuple[Plan, dict[str, Any]]:
        """The plan of a directory's study, and its environment."""
        content = read_study(directory)
        if content is None:
            raise InputError(f"study: {directory} contains no study (no {STUDY}) and no record of one.")
        if content["study"] != self.name:
            raise InputError(
                f"study: {directory} contains another kind of study. Choose one written by 'toeplens {self.command}'."
            )
        begun = self.record.from_dict(content, f"study: {directory / STUDY}")
        return self._planned(begun, directory / STUDY), {**begun.environment, _SECONDS: float(begun.seconds)}

    def _planned(self, begun: Begun, path: Path) -> Plan:
        try:
            return self.plan(begun)
        except InputError as error:
            raise InputError(f"study: {path} is damaged: {error}") from None

    def open_record(self, path: Path | str) -> Found:
        """A study from its results.json (plain, gzip or xz), with claims judged by the current rules."""
        kept = read_record(Path(path))
        content = {_SECONDS: kept.head["environment"].get(_SECONDS, 0.0), **kept.content}  # as in study.json
        return self.reread(kept, self._planned(self.record.from_dict(content, f"study: {path}"), kept.path))

    def gather(self, directory: Path | str) -> Found:
        """Read the finished parts of a study, judge its claims, and write results.json and claims.json.

        Nothing is written while another process runs the study, or if the directory only holds a record.
        """
        directory = Path(directory)
        record = record_in(directory)
        if record is not None and record[0] == self.name:
            return self.open_record(record[1])
        with _ours(directory) as ours:
            state = self.read(directory, *self.plan_of(directory))
            if ours and state.begun:
                self.write_down(state)
        return state

    def write_down(self, state: Found) -> None:
        """Write a study's record to its directory: results.json and claims.json."""
        counted = {"finished": state.finished, "total": state.total, _ENVIRONMENT: state.environment}
        head, found = {"study": self.name, **state.asked(), **counted}, state.found()
        entries = [entry.to_dict() for entry in state.entries]
        write_json(state.directory / RESULTS, {**head, **found}, rows="cells" if "cells" in found else None)
        write_json(state.directory / CLAIMS_FILE, {**head, "claims": entries})

    def carry_out(self, directory: Path, asked: dict[str, Any], work: Callable[[], Any]) -> Found:
        """Run ``work`` in the directory of the study ``asked`` for, which is created if needed; gather the results.

        The directory is locked against other processes. Raises `InputError` if it holds another study, or the study at
        another scale.
        """
        _open_directory(directory)
        with locked(directory, "study"):
            had = _open_directory(directory)
            if had is not None and had["study"] != self.name:
                raise InputError(f"out: {directory} contains another study. Choose another directory.")
            if had is not None and (scale := had.get("scale")) != asked.get("scale"):
                raise InputError(f"out: {directory} contains a study at scale {scale!r}. Choose another directory.")
            seconds = 0.0 if had is None else had.get(_SECONDS, 0.0)
            content = {"study": self.name, **asked, _SECONDS: seconds, _ENVIRONMENT: environment()}
            write_json(directory / STUDY, content)
            make_directory(directory / RUNS)
            started = time.monotonic()
            try:
                work()
            finally:
                content = read_json(directory / STUDY)
                spent = round(content[_SECONDS] + time.monotonic() - started, 1)
                write_json(directory / STUDY, {**content, _SECONDS: spent})
                state = self.gather(directory)
        return state

    def carry_out_runs(
        self,
        out: Path | str,
        asked: dict[str, Any],
        jobs: Sequence[Job],
        limits: Limits | None,
        workers: Workers,
        on_event: OnEvent | None,
    ) -> Found:
        """`carry_out` for a study that consists of runs only."""
        limits, runs = of_study(limits, Path(out)), Path(out) / RUNS
        must_have(workers, len(jobs), limits)
        _open_directory(Path(out))
        _must_go_on(runs, jobs, limits)
        work = partial(run_jobs, jobs, runs, limits, workers=workers, on_event=on_event)
        return self.carry_out(Path(out), asked, work)


def read_study(directory: Path) -> dict[str, Any] | None:
    """The study.json of ``directory``, with its common fields checked; None if there is none."""
    path = directory / STUDY
    if not path.exists():
        return None
    content = read_json(path)
    study = Begun.from_dict(content, f"study: {path}").study
    return {**content, "study": study}


def study_in(directory: Path) -> str | None:
    """The kind of study in a directory, or of the record in it; None if there is none."""
    content, record = read_study(directory), record_in(directory)
    return content["study"] if content is not None else record[0] if record is not None else None


def _open_directory(directory: Path) -> dict[str, Any] | None:
    """Create ``directory`` if needed and return its study, or None. Raises `InputError` if it holds other files.

    A directory with only runs is allowed, so that unpacked runs can be resumed.
    """
    make_directory(directory)
    had = read_study(directory)
    if had is None and (other := next(_others(directory), None)) is not None:
        raise InputError(
            f"out: {directory} contains {other}, which belongs to neither a study nor runs ({RUNS}/*/{SPEC}). Choose "
            "an empty or new directory."
        )
    return had


def _others(directory: Path) -> Iterator[Path]:
    """Relative paths in a directory that are neither runs nor leftovers from writing."""
    for child in sorted(directory.iterdir()):
        if child.name == RUNS and child.is_dir():
            yield from (run.relative_to(directory) for run in sorted(child.iterdir()) if not (run / SPEC).is_file())
        elif child.name != LOCK and not is_leftover(child):
            yield child.relative_to(directory)


def _must_go_on(runs: Path, jobs: Sequence[Job], limits: Limits) -> None:
    """Raise `InputError` if existing runs do not belong to the study, or lack weights that are needed."""
    names = {job.spec.name for job in jobs}
    there = {run.name for run in runs.iterdir()} if runs.is_dir() else set[str]()
    if there and not names & there and not (runs.parent / STUDY).exists():
        raise InputError(
            f"out: none of the {len(there)} runs in {runs} belongs to this study's {len(names)}. Set their scale, "
            "protocol and parts, or choose another directory."
        )
    if limits.publish is None and (kept := without_weights(jobs, runs)):
        raise InputError(
            f"out: {len(kept)} finished runs in {runs} have no weights to measure (first: {kept[0].spec.name}). "
            "Delete these runs to train them again, or choose another directory."
        )


@contextmanager
def _ours(directory: Path) -> Iterator[bool]:
    """Whether the record may be written: not while another process runs the study."""
    if not (directory / STUDY).exists():
        yield False
        return
    try:
        with locked(directory, "study"):
            yield True
    except Busy:
        yield False


def of_study(limits: Limits | None, out: Path) -> Limits:
    """The limits of a study in ``out``, whose name is the loggers' group."""
    limits = limits or Limits()
    return limits if limits.group is not None else replace(limits, group=out.absolute().name)
