"""Commands on studies: carry one out or go on with it, write its page, print its ledger."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toeplens.cli.means import Hands, Means, with_options
from toeplens.cli.options import Full, Json, Recorded, StudyDirectory, StudyPlace, path, url_or_path
from toeplens.ground import InputError, choose
from toeplens.ground.words import listed

if TYPE_CHECKING:
    from toeplens.report.kit.page import Page

PARTS = ("core", "others", "partial", "mla", "factors", "factors-back", "ladder", "mechanism")
OURS = ("canonical", "canonical-smoke", "language", "language-large", "language-smoke")


@with_options
def reproduce(
    out: StudyPlace,
    scale: Annotated[
        str,
        typer.Option(
            help="smoke (a minute), laptop (under 10 minutes), desk (minutes a model) or paper (a GPU, hours)."
        ),
    ] = "laptop",
    protocol: Annotated[str, typer.Option(help="paper, released, or both.")] = "both",
    seeds: Annotated[int, typer.Option(help="Trained models a cell; 5 or more decide, with fewer verdicts lean.")] = 1,
    part: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What to ask: {', '.join(PARTS)}, or all; give it again for more. What the study in OUT "
            "asks already stays in it."
        ),
    ] = None,
    *,
    means: Means,
    hands: Hands,
    as_json: Json = False,
) -> None:
    """Carry out the papers' central experiment: train, knock out heads, judge the claims, write the page."""
    from toeplens.cli import tables
    from toeplens.cli.progress import StudyProgress, carry_out
    from toeplens.model import Protocol
    from toeplens.papers import deposit as study
    from toeplens.papers.deposit.page import write_page
    from toeplens.training.presets import PROTOCOLS

    choose("scale", scale, study.SCALES)
    if protocol != "both":
        choose("protocol", protocol, (*PROTOCOLS, "both"))
    protocols: tuple[Protocol, ...] = tuple(p for p in PROTOCOLS if protocol in (p, "both"))
    parts = study.chosen_parts(part or ["core"])
    asked = study.planned(out, scale, protocols, seeds, parts)
    jobs = asked.jobs()
    about = f"{len(jobs)} models at scale {scale} ({study.SCALES[scale].about})"
    if fewer := study.SCALES[scale].fewer(asked.seeds):
        about += f" ({fewer})"
    if (asked.protocols, asked.seeds, asked.parts) != (protocols, seeds, parts):
        about += f", with what the study in {out} asks for already ({asked.seeds} seeds, {listed(asked.parts)})"
    limits = means.limits()
    progress = StudyProgress(jobs, about, limits)
    plan = {"scale": scale, "protocols": protocols, "seeds": seeds, "parts": parts}

    def show(state: study.Reproduction) -> None:
        shown = tables.accuracy_tables(state.table)
        tables.print_study(state, write_page(state), shown, rows=state.table, as_json=as_json)

    carry_out(partial(study.reproduce, out, **plan, workers=hands.chosen(), on_event=progress), progress, limits, show)


@with_options
def study(
    spec: Annotated[
        Path,
        typer.Argument(help=f"A YAML file, or one of those that come along: {', '.join(OURS)}.", parser=path),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output directory, or a URL (default: demo/ and the study's name). An interrupted study found here is "
            "resumed.",
            parser=url_or_path,
            metavar="PATH|URL",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Trained models a cell, in place of the file's; 5 or more decide.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text of its language tasks, in place of the file's: a plain file, .jsonl or .parquet, or a folder; "
            "give it again for more.",
            parser=path,
        ),
    ] = None,
    *,
    means: Means,
    hands: Hands,
    as_json: Json = False,
) -> None:
    """Train tasks by encodings, measure what heads follow and how models do on longer texts, write the page."""
    from toeplens import report
    from toeplens.cli import tables
    from toeplens.cli.progress import StudyProgress, carry_out
    from toeplens.studies import grid
    from toeplens.studies.kit.cells import jobs_of

    wanted = grid.read_spec(spec)
    if seeds is not None:
        wanted = grid.grid_spec({**wanted.model_dump(mode="json"), "seeds": seeds})
    if text:
        wanted = wanted.of_text([str(each) for each in text])
    jobs = jobs_of(grid.cells(wanted))
    limits = means.limits()
    progress = StudyProgress(jobs, f"{len(jobs)} models ({wanted.title})", limits)

    def show(state: grid.Grid) -> None:
        page, shown = report.write_grid(state), tables.matrix_tables(state)
        tables.print_study(state, page, shown, rows=state.matrix(), as_json=as_json)

    place = Path("demo") / spec.stem if out is None else out
    carry_out(partial(grid.study, wanted, place, workers=hands.chosen(), on_event=progress), progress, limits, show)


@with_options
def theory(
    out: StudyPlace,
    scale: Annotated[
        str, typer.Option(help="Of the models whose heads are measured: smoke, laptop, desk or paper.")
    ] = "laptop",
    seeds: Annotated[int, typer.Option(help="Of every experiment and model; 5 or more decide.")] = 5,
    *,
    means: Means,
    hands: Hands,
    as_json: Json = False,
) -> None:
    """Check the papers' mathematics by numbers: each statement as it stands and as it should stand, with a verdict."""
    from toeplens.cli import console, tables
    from toeplens.cli.progress import StudyProgress, carry_out
    from toeplens.papers import mathematics
    from toeplens.papers.mathematics.page import write_theory
    from toeplens.training import PRESETS

    choose("scale", scale, PRESETS)
    jobs = mathematics.jobs(scale, seeds)
    about = f"{len(mathematics.EXPERIMENTS) * seeds} experiments, and {len(jobs)} models at scale {scale}"
    limits = means.limits()
    progress = StudyProgress(jobs, about, limits)
    plan: dict[str, Any] = {"scale": scale, "seeds": seeds, "workers": hands.chosen(), "on_event": progress}

    def done(name: str, seed: int) -> None:
        console.say(f"{name}, seed {seed}: done", aside=True)

    def show(state: mathematics.Theory) -> None:
        tables.print_study(state, write_theory(state), as_json=as_json)

    carry_out(partial(mathematics.check_theory, out, **plan, on_record=done), progress, limits, show)


def kind_of(directory: Path) -> tuple[Any, Callable[[Any], Page], Callable[[Any], str]]:
    """What gathers a directory's study (a module), what makes its page, and what says the rule of its verdicts."""
    from toeplens.papers import deposit, mathematics
    from toeplens.papers.deposit.page import reproduction_page
    from toeplens.papers.mathematics.page import theory_page
    from toeplens.papers.positional_symbolic import pretrained
    from toeplens.papers.positional_symbolic.pretrained.page import pretrained_page
    from toeplens.report.grid.page import grid_page
    from toeplens.studies import RULE, grid
    from toeplens.studies.kit.study import study_in

    kinds = {
        "pretrained": (pretrained, pretrained_page, lambda study: RULE.replace("seed", study.plan.units[:-1])),
        "theory": (mathematics, theory_page, lambda study: RULE),
        "grid": (grid, grid_page, lambda study: RULE),
    }
    return kinds.get(study_in(directory) or "", (deposit, reproduction_page, lambda study: RULE))


def page_in(directory: Path) -> Page:
    """The page of what a directory holds: an audit, a probe, a study, or the record of one."""
    from toeplens.report.auditing.page import audit_page
    from toeplens.report.probing.page import probe_page
    from toeplens.studies import auditing, probing
    from toeplens.studies.kit.study import study_in

    if (directory / auditing.RECORD).is_file():
        found = auditing.open_audit(directory)
        return audit_page(found, auditing.parquet_of(found))
    if (directory / probing.RECORD).is_file():
        return probe_page(probing.open_probe(directory))
    if study_in(directory) is None:
        raise InputError(f"directory: {directory} contains no study, audit, probe or record of one.")
    kind, page, _ = kind_of(directory)
    return page(kind.gather(directory))


def report_page(directory: Recorded, as_json: Json = False) -> None:
    """Write the page of a study, an audit or a probe again, from what is finished or recorded."""
    from toeplens.cli import console
    from toeplens.report.kit.page import write_report

    page = page_in(directory)

    console.print_page(write_report(directory, page.html()), as_json=as_json)


def claims(
    directory: StudyDirectory,
    full: Full = False,
    evidence: Annotated[
        bool, typer.Option(help="Also print each claim's rule, its evidence and what would decide it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Judge the papers' claims on a study's results and print the ledger."""
    from toeplens.cli import console, tables

    kind, _, rule = kind_of(directory)
    study = kind.gather(directory)
    entries = study.entries
    if as_json:
        console.print_json([entry.to_dict() for entry in entries])
        return
    if not entries:
        raise InputError(f"claims: the study in {directory} evaluates none. Set 'claims:' in the study's file.")
    tables.print_claims(entries, full=full)
    if evidence:
        for entry in entries:
            place = "" if entry.protocol is None else f", {entry.protocol}"
            console.say(f"{entry.claim.id}{place}: {entry.verdict}")
            console.say(f"  rule: {entry.claim.rule}")
            for line in entry.evidence:
                console.say(f"  {line}")
            for line in entry.wanting:
                console.say(f"  what would decide it: {line}")
    console.say(rule(study))
