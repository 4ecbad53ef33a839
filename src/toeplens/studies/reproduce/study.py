"""The reproduction as a whole: carry out the grid, gather what is finished, judge the claims, write it down."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toeplens.engine import Asked, Job, Limits, plan_workers, read_ablation, read_measures, run_local
from toeplens.engine.local import OnEvent
from toeplens.ground import InputError, choose, read_json, rounded, write_json
from toeplens.ground.files import make_directory
from toeplens.lens import HeadAblation
from toeplens.model import Decoder, Protocol
from toeplens.studies.claims import Entry, judge
from toeplens.studies.reproduce.cells import Cell, grid
from toeplens.studies.reproduce.claims import claims_of
from toeplens.studies.reproduce.labels import PROTOCOLS
from toeplens.studies.reproduce.parts import CORE, chosen_parts
from toeplens.studies.reproduce.scales import SCALES
from toeplens.studies.reproduce.tables import Row, accuracy_table
from toeplens.studies.results import CellResult, Results
from toeplens.training import Run, environment
from toeplens.training.run import ENVIRONMENT

STUDY, RESULTS, CLAIMS_FILE, RUNS = "study.json", "results.json", "claims.json", "runs"


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
        """The grid's runs, each once: two places of the grid may stand for the same run."""
        jobs: dict[str, Job] = {}
        for cell in self.cells():
            jobs.setdefault(cell.job.spec.name, cell.job)
        return list(jobs.values())


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
    directory = _claim(Path(out), plan)
    started = time.time()
    try:
        run_local(jobs, directory / RUNS, limits, workers=workers, on_event=on_event)
    finally:
        _note_time(directory, time.time() - started)
        state = gather(directory)
    return state


def planned(out: Path | str, scale: str, protocols: Sequence[Protocol], seeds: int, parts: Sequence[str]) -> Plan:
    """The plan that `reproduce` would carry out in ``out``: what is asked for, and the parts the study has already."""
    had: tuple[str, ...] = ()
    if (Path(out) / STUDY).exists():
        had = _read_plan(Path(out))[0].parts
    return Plan(scale, tuple(protocols), seeds, chosen_parts((*had, *chosen_parts(parts))))


def _claim(directory: Path, plan: Plan) -> Path:
    """Make ``directory`` the study's, or check that it is a study's whose scale is the same."""
    make_directory(directory)
    wanted = {"scale": plan.scale, "protocols": list(plan.protocols), "seeds": plan.seeds, "parts": list(plan.parts)}
    path = directory / STUDY
    seconds = 0.0
    if path.exists():
        had, about = _read_plan(directory)
        if had.scale != plan.scale:
            raise InputError(f"out: {directory} holds a study at scale {had.scale!r}; give another directory.")
        seconds = about["seconds"]
    elif any(not is_leftover(child) for child in directory.iterdir()):
        raise InputError(f"out: {directory} holds files that are not a study's; give an empty or new directory.")
    write_json(path, {**wanted, "seconds": seconds, "environment": environment()})
    make_directory(directory / RUNS)
    return directory


def is_leftover(path: Path) -> bool:
    """Whether ``path`` is a temporary file of ours, left by a process that was killed while it wrote the first one."""
    return path.name.startswith(f".{STUDY}.") and path.suffix == ".tmp"


def _note_time(directory: Path, seconds: float) -> None:
    content = read_json(directory / STUDY)
    write_json(directory / STUDY, {**content, "seconds": round(content["seconds"] + seconds, 1)})


def gather(directory: Path | str) -> Reproduction:
    """Read what a study has finished, judge the claims on it, and write both down (results.json, claims.json)."""
    directory = Path(directory)
    plan, about = _read_plan(directory)
    cells = plan.cells()
    found: list[CellResult] = []
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
        ready = run.status == "diverged" or (run.status == "complete" and measured)
        done += run.step if run.status == "stopped" else cell.job.spec.total_steps
        if ready:
            if (run_directory / ENVIRONMENT).exists():
                about = {**about, "execution": read_json(run_directory / ENVIRONMENT).get("execution")}
            found.append(_result(cell, run, ablation, measures))
    results = Results(found)
    entries = judge(claims_of(plan.parts), results, plan.protocols)
    state = Reproduction(
        directory,
        plan,
        results,
        entries,
        accuracy_table(results, plan.protocols),
        len(found),
        len(cells),
        done / total,
        about,
    )
    if found:
        _write(state)
    return state


def _result(cell: Cell, run: Run, ablation: HeadAblation | None, measures: dict[str, Any]) -> CellResult:
    task = cell.job.spec.build_task()
    model = Decoder(cell.job.spec.model)
    return CellResult(
        key=cell.key,
        run=cell.job.spec.name,
        status=run.status,
        chance=cell.job.spec.chance,
        length_chance=max(task.length_chance(), cell.job.spec.chance),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        epochs=run.metrics,
        result=run.result,
        ablation=ablation,
        measures=rounded(measures),
        watched=rounded(run.watched),
    )


def _read_plan(directory: Path) -> tuple[Plan, dict[str, Any]]:
    if not directory.is_dir() or not (directory / STUDY).exists():
        raise InputError(
            f"study: {directory} is not a study's directory (no {STUDY}); give one that 'toeplens reproduce' wrote."
        )
    content = read_json(directory / STUDY)
    try:
        plan = Plan(
            choose("scale", content["scale"], SCALES),
            tuple(content["protocols"]),
            int(content["seeds"]),
            chosen_parts(content.get("parts", [CORE])),
        )
        return plan, {**content["environment"], "seconds": float(content["seconds"])}
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"study: {directory / STUDY} is damaged ({error}).") from None


def _write(state: Reproduction) -> None:
    head = {
        "study": "reproduce",
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


def limits_for(time_budget: float | None, limits: Limits) -> Limits:
    """``limits`` with a deadline ``time_budget`` seconds from now, less what writing everything down takes."""
    if time_budget is None:
        return limits
    reserve = min(20.0, 0.25 * time_budget)
    return replace(limits, deadline=time.time() + time_budget - reserve)
