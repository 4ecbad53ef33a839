"""A grid study as a whole: carry out its runs, gather what is finished, judge the claims, write it down."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from toeplens.engine import Limits, plan_workers, run_local
from toeplens.engine.local import OnEvent
from toeplens.studies.grid.cells import cells
from toeplens.studies.grid.claims import Evidence, judged
from toeplens.studies.grid.matrix import Row, matrix
from toeplens.studies.grid.relations import Relation, relations
from toeplens.studies.grid.spec import GridSpec, spec_from_yaml
from toeplens.studies.kit.cells import Cell, Gathered, gather_cells, jobs_of
from toeplens.studies.kit.study import RUNS, Kind


@dataclass(frozen=True, kw_only=True)
class Grid(Gathered):
    """The state of a grid study.

    relations  what goes with length extrapolation
    """

    spec: GridSpec
    relations: list[Relation]

    def matrix(self) -> list[Row]:
        """Every encoding on every task."""
        return self._matrix

    @cached_property
    def _matrix(self) -> list[Row]:
        return matrix(self.spec, self.results)

    def asked(self) -> dict[str, Any]:
        """The file."""
        return {"spec": self.spec.to_yaml()}

    def found(self) -> dict[str, Any]:
        """The table, the relations and the cells."""
        table = [row.to_dict() for row in self.matrix()]
        related = [relation.to_dict() for relation in self.relations]
        return {"table": table, "relations": related, **super().found()}


def _read(directory: Path, plan: tuple[GridSpec, list[Cell]], environment: dict[str, Any]) -> Grid:
    spec, wanted = plan
    gathered = gather_cells(directory, wanted, environment)
    related = relations(spec, gathered.results)
    with_claims: dict[str, Any] = vars(gathered) | {"entries": judged(Evidence(spec, gathered.results, related))}
    return Grid(**with_claims, spec=spec, relations=related)


def _plan(content: dict[str, Any]) -> tuple[GridSpec, list[Cell]]:
    spec = spec_from_yaml(content["spec"])
    return spec, cells(spec)


KIND = Kind("grid", "study", _plan, _read)
gather, is_grid = KIND.gather, KIND.holds


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
    jobs, runs = jobs_of(cells(spec)), Path(out) / RUNS
    limits = limits or Limits()
    plan_workers(len(jobs), limits.device, workers)  # refuses what cannot be before anything is written
    work = partial(run_local, jobs, runs, limits, workers=workers, on_event=on_event)
    return KIND.carry_out(Path(out), {"spec": spec.to_yaml()}, work)
