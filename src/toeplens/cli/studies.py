"""Commands on studies: carry one out or go on with it, write its page, print its ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from toeplens.cli.options import Budget, Compile, Device, Full, Json, Study, StudyOut, Workers, compile_mode, seconds
from toeplens.ground import choose
from toeplens.start import starting

if TYPE_CHECKING:
    from toeplens.papers.mathematics import Theory

PARTS = ("core", "others", "partial", "mla", "factors", "factors-back", "mechanism")


def reproduce(
    out: StudyOut,
    scale: Annotated[
        str, typer.Option(help="smoke (a minute), laptop (under 10 minutes) or paper (a GPU, hours).")
    ] = "laptop",
    protocol: Annotated[str, typer.Option(help="paper, released, or both.")] = "both",
    seeds: Annotated[int, typer.Option(help="Trained models a cell; 3 or more give intervals over seeds.")] = 1,
    part: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What to ask: {', '.join(PARTS)}, or all; give it again for more. What the study in OUT "
            "asks already stays in it."
        ),
    ] = None,
    time_budget: Budget = None,
    workers: Workers = None,
    device: Device = "auto",
    compile: Compile = "auto",
    as_json: Json = False,
) -> None:
    """Carry out the papers' central experiment: train, knock out heads, judge the claims, write the page."""
    with starting():
        from toeplens.cli import console
        from toeplens.cli.progress import StudyProgress, work
        from toeplens.engine import Limits, stop_on_signals
        from toeplens.model import Protocol
        from toeplens.papers import deposit as study
        from toeplens.papers.deposit.page import write_page
        from toeplens.studies import limits_for
        from toeplens.training import plan_execution
        from toeplens.training.presets import PROTOCOLS

    choose("scale", scale, study.SCALES)
    if protocol != "both":
        choose("protocol", protocol, (*PROTOCOLS, "both"))
    protocols: tuple[Protocol, ...] = tuple(p for p in PROTOCOLS if protocol in (p, "both"))
    budget = seconds(time_budget)
    parts = study.chosen_parts(part or ["core"])
    jobs = study.planned(out, scale, protocols, seeds, parts).jobs()
    execution = plan_execution(device, compile_mode(compile), "auto")
    about = f"{len(jobs)} models at scale {scale} ({study.SCALES[scale].about}) on {execution.describe()}"
    about += f": {work([job.spec for job in jobs])}"
    with stop_on_signals() as stopped, StudyProgress(jobs, about) as progress:
        limits = limits_for(budget, Limits(device=device, compile=compile_mode(compile), should_stop=stopped))
        state = study.reproduce(
            out,
            scale=scale,
            protocols=protocols,
            seeds=seeds,
            parts=parts,
            limits=limits,
            workers=workers,
            on_event=progress,
        )
    page = write_page(state)
    console.print_study(state, page, state.table, console.accuracy_tables(state.table), as_json=as_json)
    if stopped():
        raise typer.Exit(130)


def theory_study(
    out: StudyOut,
    scale: Annotated[
        str, typer.Option(help="Of the models whose heads are measured: smoke, laptop or paper.")
    ] = "laptop",
    seeds: Annotated[int, typer.Option(help="Of every experiment and model; 3 or more give intervals.")] = 3,
    time_budget: Budget = None,
    workers: Workers = None,
    device: Device = "auto",
    compile: Compile = "auto",
    as_json: Json = False,
) -> None:
    """Check the papers' mathematics by numbers: each statement as it stands and as it should stand, with a verdict."""
    with starting():
        from toeplens.cli.progress import StudyProgress, work
        from toeplens.engine import Limits, stop_on_signals
        from toeplens.papers import mathematics as theory
        from toeplens.studies import limits_for
        from toeplens.training import PRESETS, plan_execution

    choose("scale", scale, PRESETS)
    jobs = theory.jobs(scale, seeds)
    execution = plan_execution(device, compile_mode(compile), "auto")
    records = len(theory.EXPERIMENTS) * seeds
    about = f"{records} experiments, and {len(jobs)} models at scale {scale} on {execution.describe()}"
    about += f": {work([job.spec for job in jobs])}"
    with stop_on_signals() as stopped, StudyProgress(jobs, about) as progress:
        limits = limits_for(
            seconds(time_budget), Limits(device=device, compile=compile_mode(compile), should_stop=stopped)
        )
        state = theory.check_theory(
            out,
            scale=scale,
            seeds=seeds,
            limits=limits,
            workers=workers,
            on_event=progress,
            on_record=lambda name, seed: progress.say(f"{name}, seed {seed}: done"),
        )
    _print_theory(state, as_json)
    if stopped():
        raise typer.Exit(130)


def _print_theory(state: Theory, as_json: bool) -> None:
    from toeplens.cli import console
    from toeplens.papers.mathematics.page import write_theory

    page = write_theory(state)
    if as_json:
        claims_ = [entry.to_dict() for entry in state.entries]
        console.print_json({"finished": state.finished, "total": state.total, "page": str(page), "claims": claims_})
        return
    console.print_claims(state.entries)
    if not state.complete:
        console.say(f"{state.finished} of {state.total} records are there; the same command goes on.")
    console.say(f"page: {page.resolve()}")


def report_page(
    directory: Study,
    as_json: Json = False,
) -> None:
    """Write a study's page again from what is finished."""
    with starting():
        from toeplens import report
        from toeplens.cli import console
        from toeplens.papers import deposit as study
        from toeplens.papers import mathematics as theory
        from toeplens.papers.deposit.page import write_page
        from toeplens.papers.mathematics.page import write_theory
        from toeplens.studies import grid

    if theory.is_theory(directory):
        page = write_theory(theory.gather(directory))
    elif grid.is_grid(directory):
        page = report.write_grid(grid.gather(directory))
    else:
        page = write_page(study.gather(directory))
    if as_json:
        console.print_json({"page": str(page)})
    else:
        console.say(f"page: {page.resolve()}")


def claims(
    directory: Study,
    full: Full = False,
    evidence: Annotated[bool, typer.Option(help="Also print each verdict's evidence.")] = False,
    as_json: Json = False,
) -> None:
    """Judge the papers' claims on a study's results and print the ledger."""
    with starting():
        from toeplens.cli import console
        from toeplens.papers import deposit as study
        from toeplens.papers import mathematics as theory
        from toeplens.studies import COUNTED, RULE, grid

    of = theory if theory.is_theory(directory) else grid if grid.is_grid(directory) else study
    entries = of.gather(directory).entries
    if as_json:
        console.print_json([entry.to_dict() for entry in entries])
        return
    console.print_claims(entries, full=full)
    if evidence:
        for entry in entries:
            place = "" if entry.protocol is None else f", {entry.protocol}"
            console.say(f"{entry.claim.id}{place}: {entry.verdict}")
            for line in entry.evidence:
                console.say(f"  {line}")
    console.say(RULE if of is theory else f"{RULE} {COUNTED}")
