"""A grid study as a whole: carry out its runs, gather what is finished, judge the claims, write it down."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from toeplens.engine import Limits, plan_workers, run_local
from toeplens.engine.local import OnEvent
from toeplens.ground import InputError, write_json
from toeplens.studies.grid.cells import cells
from toeplens.studies.grid.claims import Evidence, judged
from toeplens.studies.grid.matrix import Row, matrix
from toeplens.studies.grid.relations import Relation, relations
from toeplens.studies.grid.spec import GridSpec, spec_from_yaml
from toeplens.studies.kit.claims import Entry
from toeplens.studies.kit.results import Results
from toeplens.studies.kit.store import (
    CLAIMS_FILE,
    RESULTS,
    RUNS,
    STUDY,
    about,
    gather_cells,
    held,
    jobs_of,
    own,
    read_study,
    timed,
    written,
)

KIND = "grid"


@dataclass(frozen=True)
class Grid:
    """A grid study's state on disk: what is finished, and what it says.

    relations    what goes with length extrapolation
    finished     cells that are there, of ``total``
    share        share of all training steps that is done
    environment  what it was carried out with
    """

    directory: Path
    spec: GridSpec
    results: Results
    entries: list[Entry]
    relations: list[Relation]
    finished: int
    total: int
    share: float
    environment: dict[str, Any]

    @property
    def complete(self) -> bool:
        """Whether every cell is finished."""
        return self.finished == self.total

    def matrix(self) -> list[Row]:
        """Every encoding on every task."""
        return self._matrix

    @cached_property
    def _matrix(self) -> list[Row]:
        return matrix(self.spec, self.results)


def study(
    spec: GridSpec,
    out: Path | str,
    *,
    limits: Limits | None = None,
    workers: int | None = None,
    on_event: OnEvent | None = None,
) -> Grid:
    """Carry out a grid study in ``out``, or go on with it; returns what is finished so far.

    A study may be changed and gone on with: what it still asks for and is finished is not done again.

    Arguments
        limits    device, deadline, compilation
        workers   processes; one a core unless given
        on_event  told of every step and every finished run, by the run's place in ``jobs_of(cells(spec))``
    """
    jobs = jobs_of(cells(spec))
    limits = limits or Limits()
    plan_workers(len(jobs), limits.device, workers)  # refuses what cannot be before anything is written
    directory = Path(out)
    with held(directory):
        if read_study(directory) is not None and not is_grid(directory):
            raise InputError(f"out: {directory} holds another study; give another directory.")
        own(directory, {"study": KIND, "spec": spec.to_yaml()})
        try:
            with timed(directory):
                run_local(jobs, directory / RUNS, limits, workers=workers, on_event=on_event)
        finally:
            state = gather(directory)
    return state


def is_grid(directory: Path | str) -> bool:
    """Whether a directory is a grid study's."""
    content = read_study(Path(directory))
    return content is not None and content.get("study") == KIND


def gather(directory: Path | str) -> Grid:
    """Read what a study has finished, judge its claims, and write both down (results.json, claims.json).

    While another process carries the study out it is read only.
    """
    directory = Path(directory)
    with written(directory) as ours:
        state = _read(directory)
        if ours and state.finished:
            _write(state)
    return state


def _read(directory: Path) -> Grid:
    content = read_study(directory)
    if content is None:
        raise InputError(f"study: {directory} is not a study's directory (no {STUDY}).")
    if content.get("study") != KIND:
        raise InputError(f"study: {directory} holds another study.")
    try:
        spec, environment = spec_from_yaml(content["spec"]), about(content)
        wanted = cells(spec)
    except InputError as error:
        raise InputError(f"study: {directory / STUDY} is damaged: {error}") from None
    gathered = gather_cells(directory, wanted)
    results = Results(gathered.cells)
    related = relations(spec, results)
    entries = judged(Evidence(spec, results, related))
    return Grid(
        directory,
        spec,
        results,
        entries,
        related,
        len(gathered.cells),
        len(wanted),
        gathered.share,
        gathered.told(environment),
    )


def _write(state: Grid) -> None:
    head = {
        "study": KIND,
        "spec": state.spec.to_yaml(),
        "finished": state.finished,
        "total": state.total,
        "environment": state.environment,
    }
    found = [cell.to_dict() for cell in state.results.cells]
    table = [row.to_dict() for row in state.matrix()]
    related = [relation.to_dict() for relation in state.relations]
    write_json(state.directory / RESULTS, {**head, "table": table, "relations": related, "cells": found}, rows="cells")
    write_json(state.directory / CLAIMS_FILE, {**head, "claims": [entry.to_dict() for entry in state.entries]})
