"""The command that carries out a grid study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toeplens.cli.options import Budget, Compile, Device, Json, StudyOut, Workers, compile_mode, path, seconds
from toeplens.start import starting

OURS = ("canonical", "canonical-smoke")


def study(
    spec: Annotated[
        Path,
        typer.Argument(help=f"A YAML file, or one of those that come along: {', '.join(OURS)}.", parser=path),
    ],
    out: StudyOut,
    seeds: Annotated[
        int | None, typer.Option(help="Trained models a cell, in place of the file's; 3 or more give intervals.")
    ] = None,
    time_budget: Budget = None,
    workers: Workers = None,
    device: Device = "auto",
    compile: Compile = "auto",
    as_json: Json = False,
) -> None:
    """Train tasks by encodings, measure what heads follow and how models do on longer texts, write the page."""
    with starting():
        from toeplens import report
        from toeplens.cli import console
        from toeplens.cli.progress import StudyProgress, work
        from toeplens.engine import Limits, stop_on_signals
        from toeplens.studies import grid, limits_for
        from toeplens.studies.kit.store import jobs_of
        from toeplens.training import plan_execution

    wanted = grid.read_spec(spec)
    if seeds is not None:
        wanted = grid.grid_spec({**wanted.model_dump(mode="json"), "seeds": seeds})
    jobs = jobs_of(grid.cells(wanted))
    budget = seconds(time_budget)
    execution = plan_execution(device, compile_mode(compile), "auto")
    about = f"{len(jobs)} models ({wanted.title}) on {execution.describe()}: {work([job.spec for job in jobs])}"
    with stop_on_signals() as stopped, StudyProgress(jobs, about) as progress:
        limits = limits_for(budget, Limits(device=device, compile=compile_mode(compile), should_stop=stopped))
        state = grid.study(wanted, out, limits=limits, workers=workers, on_event=progress)
    page = report.write_grid(state)
    console.print_study(state, page, state.matrix(), console.matrix_tables(state), as_json=as_json)
    if stopped():
        raise typer.Exit(130)
