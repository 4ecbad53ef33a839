"""The reproduction as a whole: carry out the grid, gather what is finished, judge the claims, write it down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toeplens.engine import Job, Limits, plan_workers, run_local
from toeplens.engine.local import OnEvent
from toeplens.ground import choose
from toeplens.model import Protocol
from toeplens.papers.deposit.cells import grid
from toeplens.papers.deposit.claims import claims_of
from toeplens.papers.deposit.questions import CORE, chosen_parts
from toeplens.papers.deposit.scales import SCALES
from toeplens.papers.deposit.tables import Row, accuracy_table
from toeplens.studies.kit.cells import Cell, Gathered, gather_cells, jobs_of
from toeplens.studies.kit.claims import judge
from toeplens.studies.kit.study import RUNS, Kind
from toeplens.training.presets import PROTOCOLS


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


@dataclass(frozen=True, kw_only=True)
class Reproduction(Gathered):
    """The state of a reproduction."""

    plan: Plan
    table: list[Row]

    def asked(self) -> dict[str, Any]:
        """The plan."""
        return asdict(self.plan)

    def found(self) -> dict[str, Any]:
        """The table and the cells."""
        return {"table": [row.to_dict() for row in self.table], **super().found()}


def _plan(content: dict[str, Any]) -> Plan:
    return Plan(
        choose("scale", content["scale"], SCALES),
        tuple(content["protocols"]),
        content["seeds"],
        chosen_parts(content.get("parts", [CORE])),
    )


def _read(directory: Path, plan: Plan, environment: dict[str, Any]) -> Reproduction:
    gathered = gather_cells(directory, plan.cells(), environment)
    entries = judge(claims_of(plan.parts), gathered.results, plan.protocols)
    table = accuracy_table(gathered.results, plan.protocols)
    judged: dict[str, Any] = vars(gathered) | {"entries": entries}
    return Reproduction(**judged, plan=plan, table=table)


KIND = Kind("reproduce", "reproduce", _plan, _read)
gather = KIND.gather


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
    jobs, runs = plan.jobs(), Path(out) / RUNS
    limits = limits or Limits()
    plan_workers(len(jobs), limits.device, workers)  # refuses what cannot be before anything is written
    work = partial(run_local, jobs, runs, limits, workers=workers, on_event=on_event)
    return KIND.carry_out(Path(out), asdict(plan), work)


def planned(out: Path | str, scale: str, protocols: Sequence[Protocol], seeds: int, parts: Sequence[str]) -> Plan:
    """The plan that `reproduce` would carry out in ``out``: what is asked for, and the parts the study has already."""
    had = KIND.plan_of(Path(out))[0].parts if KIND.holds(out) else ()
    return Plan(scale, tuple(protocols), seeds, chosen_parts((*had, *chosen_parts(parts))))
