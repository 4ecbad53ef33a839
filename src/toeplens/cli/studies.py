"""Commands on studies: run or resume one, write its page, print its ledger."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toeplens.cli.options import Full, Json, Recorded, StudyDirectory, StudyPlace, argument, option, with_options
from toeplens.ground import InputError, choose
from toeplens.ground.execution import ClusterOptions, ExecutionOptions
from toeplens.ground.options import MEASURE
from toeplens.ground.words import listed

if TYPE_CHECKING:
    from toeplens.report.kit.page import Page

PARTS = ("core", "others", "partial", "mla", "factors", "factors-back", "ladder", "mechanism")
OURS = ("canonical", "canonical-smoke", "language", "language-large", "language-smoke")
_PARTS, _OURS = ", ".join(PARTS), ", ".join(OURS)


@with_options()
def reproduce(
    out: StudyPlace,
    scale: str = option(
        "laptop",
        "smoke (a minute), laptop (10 minutes), desk (minutes per model) or paper (GPU, hours) (default: laptop).",
        "NAME",
        MEASURE,
    ),
    protocol: str = option("both", "paper, released or both (default: both).", "NAME", MEASURE),
    seeds: int = option(
        1, "Seeds per cell. Verdicts need at least 5; with fewer they are only indicative (default: 1).", "N", MEASURE
    ),
    part: list[str] | None = option(
        None,
        f"Part to run: {_PARTS} or all. Repeatable; added to the parts already in OUT (default: core).",
        "NAME",
        MEASURE,
    ),
    *,
    execution: ExecutionOptions,
    cluster: ClusterOptions,
    as_json: Json = False,
) -> None:
    """Reproduce the papers' central experiment and judge it.

    Trains small decoders with many encodings, ablates each head, judges the papers' claims and writes a page.
    """
    from toeplens.cli import tables
    from toeplens.cli.progress import StudyProgress, interruptible
    from toeplens.model import Protocol
    from toeplens.papers import deposit as study
    from toeplens.papers.deposit.page import reproduction_page
    from toeplens.report.kit.page import write_report
    from toeplens.training.presets import PROTOCOLS

    choose("scale", scale, study.SCALES)
    choose("protocol", protocol, (*PROTOCOLS, "both"))
    protocols: tuple[Protocol, ...] = tuple(p for p in PROTOCOLS if protocol in (p, "both"))
    parts = study.chosen_parts(part or ["core"])
    plan: dict[str, Any] = {"scale": scale, "protocols": protocols, "seeds": seeds, "parts": parts}
    asked = study.planned(out, **plan)
    jobs = asked.jobs()
    about = f"{len(jobs)} models at scale {scale} ({study.SCALES[scale].about})"
    if fewer := study.SCALES[scale].fewer(asked.seeds):
        about += f" ({fewer})"
    if (asked.protocols, asked.seeds, asked.parts) != (protocols, seeds, parts):
        about += f", including what the study in {out} already has ({asked.seeds} seeds, {listed(asked.parts)})"
    progress = StudyProgress(jobs, about, execution, cluster)
    with interruptible(execution) as limits:
        with progress:
            state = study.reproduce(out, **plan, limits=limits, workers=cluster, on_event=progress)
        page = write_report(state.directory, reproduction_page(state))
        tables.print_study(state, page, tables.accuracy_tables(state.table), as_json=as_json)


@with_options()
def study(
    spec: Path = argument(..., f"A YAML file, or a built-in study: {_OURS}.", is_path=True),
    out: Path | None = option(
        None, "Output directory or URL (default: demo/NAME). An interrupted study found here is resumed.", "PATH|URL"
    ),
    seeds: int | None = option(
        None, "Seeds per cell. Verdicts need at least 5 (default: as in the file).", "N", MEASURE
    ),
    text: list[Path] | None = option(
        None,
        "Text for language tasks: a text file, .jsonl, .parquet or a folder. Repeatable (default: as in the file).",
        "PATH",
        MEASURE,
    ),
    *,
    execution: ExecutionOptions,
    cluster: ClusterOptions,
    as_json: Json = False,
) -> None:
    """Run a study of your own: tasks by encodings.

    Trains each encoding on each task, measures what the heads follow, tests on longer sequences and writes a page.
    """
    from toeplens import report
    from toeplens.cli import tables
    from toeplens.cli.progress import StudyProgress, interruptible
    from toeplens.studies import grid
    from toeplens.studies.kit.study import jobs_of

    wanted = grid.read_spec(spec)
    if seeds is not None:
        wanted = grid.grid_spec({**wanted.model_dump(mode="json"), "seeds": seeds})
    if text:
        wanted = wanted.of_text([str(each) for each in text])
    jobs = jobs_of(grid.cells(wanted))
    progress = StudyProgress(jobs, f"{len(jobs)} models ({wanted.title})", execution, cluster)
    place = Path("demo") / spec.stem if out is None else out
    with interruptible(execution) as limits:
        with progress:
            state = grid.study(wanted, place, limits=limits, workers=cluster, on_event=progress)
        tables.print_study(state, report.write_grid(state), tables.matrix_tables(state), as_json=as_json)


@with_options()
def theory(
    out: StudyPlace,
    scale: str = option("laptop", "smoke, laptop, desk or paper (default: laptop).", "NAME", MEASURE),
    seeds: int = option(5, "Number of seeds. Verdicts need at least 5 (default: 5).", "N", MEASURE),
    *,
    execution: ExecutionOptions,
    cluster: ClusterOptions,
    as_json: Json = False,
) -> None:
    """Check the papers' mathematics numerically.

    Judges each statement as published and, where needed, as corrected.
    """
    from toeplens.cli import console, tables
    from toeplens.cli.progress import StudyProgress, interruptible
    from toeplens.papers import mathematics
    from toeplens.report import write_report
    from toeplens.training import PRESETS

    choose("scale", scale, PRESETS)
    jobs = mathematics.jobs(scale, seeds)
    about = f"{len(mathematics.EXPERIMENTS) * seeds} experiments, and {len(jobs)} models at scale {scale}"
    progress = StudyProgress(jobs, about, execution, cluster)
    plan: dict[str, Any] = {"scale": scale, "seeds": seeds, "workers": cluster, "on_event": progress}
    plan["on_record"] = lambda name, seed: console.say(f"{name}, seed {seed}: done", aside=True)
    with interruptible(execution) as limits:
        with progress:
            state = mathematics.check_theory(out, **plan, limits=limits)
        tables.print_study(state, write_report(state.directory, state.page()), as_json=as_json)


def kind_of(directory: Path) -> tuple[type[Any], Callable[[Any], Page]]:
    """For a directory's study: its kind, and the function that makes its page."""
    from toeplens.papers.deposit import Reproduction
    from toeplens.papers.deposit.page import reproduction_page
    from toeplens.papers.mathematics import Theory
    from toeplens.papers.positional_symbolic.pretrained import Pretrained
    from toeplens.report.grid.page import grid_page
    from toeplens.studies.grid import Grid
    from toeplens.studies.kit.study import study_in

    pages = {Pretrained: Pretrained.page, Theory: Theory.page, Grid: grid_page, Reproduction: reproduction_page}
    named = {kind.NAME: (kind, page) for kind, page in pages.items()}
    return named.get(study_in(directory) or "", (Reproduction, reproduction_page))


def page_in(directory: Path) -> Page:
    """The page of the audit, probe, study or record in a directory."""
    from toeplens.report.auditing.page import audit_page
    from toeplens.studies import auditing, probing
    from toeplens.studies.kit.study import study_in

    if (directory / auditing.RECORD).is_file():
        found = auditing.open_audit(directory)
        return audit_page(found, auditing.parquet_of(found))
    if (directory / probing.RECORD).is_file():
        return probing.open_probe(directory).page()
    if study_in(directory) is None:
        what = "contains no study, audit, probe or record of one" if directory.exists() else "does not exist"
        raise InputError(f"directory: {directory} {what}.")
    kind, page = kind_of(directory)
    return page(kind.gather(directory))


def report_page(directory: Recorded, as_json: Json = False) -> None:
    """Rebuild a page from saved results, without measuring again."""
    from toeplens.cli import console
    from toeplens.report.kit.page import write_report

    page = page_in(directory)

    console.print_page(write_report(directory, page), as_json=as_json)


def claims(
    directory: StudyDirectory,
    full: Full = False,
    evidence: bool = option(False, "Also print each claim's rule, evidence and what is missing.", flag="--evidence"),
    as_json: Json = False,
) -> None:
    """Judge the claims of a study and print the verdicts."""
    from toeplens.cli import console, tables
    from toeplens.studies.kit.verdicts import verdict_text

    study = kind_of(directory)[0].gather(directory)
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
            console.say(f"{entry.claim.id}{place}: {verdict_text(entry.verdict)}")
            if not full:
                console.say(f"  rule: {entry.claim.rule}")
            for line in entry.evidence:
                console.say(f"  {line}")
            for line in entry.wanting:
                console.say(f"  missing: {line}")
    console.say(study.rule)
