"""The reproduction as a whole: carry out the grid, gather what is finished, judge the claims, write it down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toeplens.engine import Job, Limits, plan_workers, run_local
from toeplens.engine.local import OnEvent
from toeplens.ground import InputError, choose, write_json
from toeplens.model import Protocol
from toeplens.papers.deposit.cells import grid
from toeplens.papers.deposit.claims import claims_of
from toeplens.papers.deposit.questions import CORE, chosen_parts
from toeplens.papers.deposit.scales import SCALES
from toeplens.papers.deposit.tables import Row, accuracy_table
from toeplens.studies.kit.claims import Entry, judge
from toeplens.studies.kit.results import Results
from toeplens.studies.kit.store import (
    CLAIMS_FILE,
    RESULTS,
    RUNS,
    STUDY,
    Cell,
    about,
    gather_cells,
    held,
    jobs_of,
    own,
    read_study,
    timed,
    written,
)
from toeplens.training.presets import PROTOCOLS

KIND = "reproduce"


@dataclass(frozen=True)
class Plan:
    """What was asked for."""

    scale: str
    protocols: tuple[Protocol, ...]
    seeds: int
    parts: tuple[str, ...] = (CORE,)

    def cells(self) -> list[Cell]:
        """The grid."""
        return grid(self.scale, self.protocols, self.seeds, self.parts)

    def jobs(self) -> list[Job]:
        """The grid's runs, each once."""
        return jobs_of(self.cells())


@dataclass(frozen=True)
class Reproduction:
    """A study's state on disk: what is finished, and what it says.

    share        share of all training steps that is done
    environment  what it was carried out with
    """

    directory: Path
    plan: Plan
    results: Results
    entries: list[Entry]
    table: list[Row]
    finished: int
    total: int
    share: float
    environment: dict[str, Any]

    @property
    def complete(self) -> bool:
        """Whether every cell is finished."""
        return self.finished == self.total


def reproduce(
    out: Path | str,
    *,
    scale: str = "laptop",
    protocols: Sequence[Protocol] = PROTOCOLS,
    seeds: int = 1,
    parts: Sequence[str] = (CORE,),
    limits: Limits | None = None,
    workers: int | None = None,
    on_event: OnEvent | None = None,
) -> Reproduction:
    """Carry out the papers' central experiment in ``out``, or go on with it; returns what is finished so far.

    Arguments
        scale      ``smoke``, ``laptop`` or ``paper``
        protocols  ``paper``, ``released``, or both
        seeds      trained models a cell
        parts      which questions to ask, see `PARTS`; those that the study in ``out`` already asks stay in it
        limits     device, deadline, compilation
        workers    processes; one a core unless given
        on_event   told of every step and every finished run, by the run's place in `Plan.jobs`
    """
    choose("scale", scale, SCALES)
    plan = planned(out, scale, protocols, seeds, parts)
    jobs = plan.jobs()
    limits = limits or Limits()
    plan_workers(len(jobs), limits.device, workers)  # refuses what cannot be before anything is written
    directory = Path(out)
    with held(directory):
        _claim(directory, plan)
        try:
            with timed(directory):
                run_local(jobs, directory / RUNS, limits, workers=workers, on_event=on_event)
        finally:
            state = gather(directory)
    return state


def planned(out: Path | str, scale: str, protocols: Sequence[Protocol], seeds: int, parts: Sequence[str]) -> Plan:
    """The plan that `reproduce` would carry out in ``out``: what is asked for, and the parts the study has already."""
    had: tuple[str, ...] = ()
    if read_study(Path(out)) is not None:
        had = _read_plan(Path(out))[0].parts
    return Plan(scale, tuple(protocols), seeds, chosen_parts((*had, *chosen_parts(parts))))


def _claim(directory: Path, plan: Plan) -> None:
    """Make ``directory`` the study's, or check that it is a study's whose scale is the same."""
    if read_study(directory) is not None:
        had = _read_plan(directory)[0]
        if had.scale != plan.scale:
            raise InputError(f"out: {directory} holds a study at scale {had.scale!r}; give another directory.")
    wanted = {"scale": plan.scale, "protocols": list(plan.protocols), "seeds": plan.seeds, "parts": list(plan.parts)}
    own(directory, wanted)


def gather(directory: Path | str) -> Reproduction:
    """Read what a study has finished, judge the claims on it, and write both down (results.json, claims.json).

    While another process carries the study out it is read only.
    """
    directory = Path(directory)
    with written(directory) as ours:
        state = _read(directory)
        if ours and state.finished:
            _write(state)
    return state


def _read(directory: Path) -> Reproduction:
    plan, environment = _read_plan(directory)
    cells = plan.cells()
    gathered = gather_cells(directory, cells)
    results = Results(gathered.cells)
    return Reproduction(
        directory,
        plan,
        results,
        judge(claims_of(plan.parts), results, plan.protocols),
        accuracy_table(results, plan.protocols),
        len(gathered.cells),
        len(cells),
        gathered.share,
        gathered.told(environment),
    )


def _read_plan(directory: Path) -> tuple[Plan, dict[str, Any]]:
    content = read_study(directory)
    if content is None:
        raise InputError(
            f"study: {directory} is not a study's directory (no {STUDY}); give one that 'toeplens reproduce' wrote."
        )
    if content.get("study", KIND) != KIND:
        raise InputError(f"out: {directory} holds another study; give another directory.")
    try:
        plan = Plan(
            choose("scale", content["scale"], SCALES),
            tuple(content["protocols"]),
            content["seeds"],
            chosen_parts(content.get("parts", [CORE])),
        )
    except InputError as error:
        raise InputError(f"study: {directory / STUDY} is damaged: {error}") from None
    return plan, about(content)


def _write(state: Reproduction) -> None:
    head = {
        "study": KIND,
        "scale": state.plan.scale,
        "protocols": list(state.plan.protocols),
        "seeds": state.plan.seeds,
        "parts": list(state.plan.parts),
        "finished": state.finished,
        "total": state.total,
        "environment": state.environment,
    }
    cells = [cell.to_dict() for cell in state.results.cells]
    table = [row.to_dict() for row in state.table]
    write_json(state.directory / RESULTS, {**head, "table": table, "cells": cells}, rows="cells")
    write_json(state.directory / CLAIMS_FILE, {**head, "claims": [entry.to_dict() for entry in state.entries]})
