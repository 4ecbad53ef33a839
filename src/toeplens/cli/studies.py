"""Commands on studies: run or resume one, write its page, print its ledger."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from toeplens.cli.options import Full, Json, OutOrUrl, RecordDirectory, StudyDirectory, argument, option, with_options
from toeplens.utils import InputError, choose
from toeplens.utils.execution import ClusterOptions, ExecutionOptions
from toeplens.utils.formatting import join_list
from toeplens.utils.options import MEASURE

if TYPE_CHECKING:
    from toeplens.report import Page
    from toeplens.studies.kit.study import StudyState

PARTS = ("core", "others", "partial", "mla", "factors", "factors-back", "ladder", "mechanism")
BUILTIN_STUDIES = ("canonical", "canonical-smoke", "language", "language-large", "language-smoke", "multihop")
_PART_NAMES, _BUILTIN_NAMES = ", ".join(PARTS), ", ".join(BUILTIN_STUDIES)


@with_options()
def reproduce(
    out: OutOrUrl,
    scale: str = option(
        "laptop",
        "smoke (a minute), laptop (10 minutes), desk (minutes per model), full (hours each) or paper (GPU, hours) "
        "(default: laptop).",
        "NAME",
        MEASURE,
    ),
    protocol: str = option("both", "paper, released or both (default: both).", "NAME", MEASURE),
    seeds: int = option(
        1, "Seeds per cell. Verdicts need at least 5; with fewer they are only indicative (default: 1).", "N", MEASURE
    ),
    part: list[str] | None = option(
        None,
        f"Part to run: {_PART_NAMES} or all. Repeatable; added to the parts already in OUT (default: core).",
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
    from toeplens.cli.progress import StudyProgress, interruptible
    from toeplens.model import Protocol
    from toeplens.papers import deposit as study
    from toeplens.training.presets import PROTOCOLS

    choose("scale", scale, study.SCALES)
    choose("protocol", protocol, (*PROTOCOLS, "both"))
    protocols: tuple[Protocol, ...] = tuple(p for p in PROTOCOLS if protocol in (p, "both"))
    parts = study.select_parts(part or ["core"])
    plan: dict[str, Any] = {"scale": scale, "protocols": protocols, "seeds": seeds, "parts": parts}
    merged = study.merged_plan(out, **plan)
    jobs = merged.jobs()
    about = f"{len(jobs)} models at scale {scale} ({study.SCALES[scale].about})"
    if note := study.SCALES[scale].fewer_seeds_text(merged.seeds):
        about += f" ({note})"
    if (merged.protocols, merged.seeds, merged.parts) != (protocols, seeds, parts):
        about += f", including what the study in {out} already has ({merged.seeds} seeds, {join_list(merged.parts)})"
    with interruptible(execution) as execution:
        with StudyProgress(jobs, about, execution, cluster) as progress:
            state = study.reproduce(out, **plan, execution=execution, workers=cluster, on_event=progress.on_event)
        write_and_print(state, as_json=as_json)


@with_options()
def study(
    spec: Path = argument(..., f"A YAML file, or a built-in study: {_BUILTIN_NAMES}.", is_path=True),
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
    from toeplens.cli.progress import StudyProgress, interruptible
    from toeplens.studies import grid
    from toeplens.studies.kit.study import jobs_of

    grid_spec = grid.read_spec(spec)
    if seeds is not None:
        grid_spec = grid.grid_spec({**grid_spec.model_dump(mode="json"), "seeds": seeds})
    if text:
        grid_spec = grid_spec.with_text([str(path) for path in text])
    jobs = jobs_of(grid.grid_cells(grid_spec))
    about = f"{len(jobs)} models ({grid_spec.title})"
    out_dir = Path("demo") / spec.stem if out is None else out
    with interruptible(execution) as execution:
        with StudyProgress(jobs, about, execution, cluster) as progress:
            state = grid.run_study(grid_spec, out_dir, execution=execution, workers=cluster, on_event=progress.on_event)
        write_and_print(state, as_json=as_json)


@with_options()
def theory(
    out: OutOrUrl,
    scale: str = option("laptop", "smoke, laptop, desk, full or paper (default: laptop).", "NAME", MEASURE),
    seeds: int = option(5, "Number of seeds. Verdicts need at least 5 (default: 5).", "N", MEASURE),
    *,
    execution: ExecutionOptions,
    cluster: ClusterOptions,
    as_json: Json = False,
) -> None:
    """Check the papers' mathematics numerically.

    Judges each statement as published and, where needed, as corrected.
    """
    from toeplens.cli import console
    from toeplens.cli.progress import StudyProgress, interruptible
    from toeplens.papers import mathematics
    from toeplens.training import PRESETS

    choose("scale", scale, PRESETS)
    jobs = mathematics.model_jobs(scale, seeds)
    about = f"{len(mathematics.EXPERIMENTS) * seeds} experiments, and {len(jobs)} models at scale {scale}"
    plan: dict[str, Any] = {"scale": scale, "seeds": seeds, "workers": cluster}
    plan["on_record"] = lambda name, seed: console.echo(f"{name}, seed {seed}: done", stderr=True)
    with interruptible(execution) as execution:
        with StudyProgress(jobs, about, execution, cluster) as progress:
            state = mathematics.check_theory(out, **plan, execution=execution, on_event=progress.on_event)
        write_and_print(state, as_json=as_json)


def write_and_print(state: StudyState, *, as_json: bool) -> None:
    """Write a study's page, and print its tables, claims, progress and page; or the same as JSON."""
    from toeplens.cli import tables
    from toeplens.report import write_report

    tables.print_study(state, write_report(state.directory, state.page()), as_json=as_json)


def load_study(directory: Path) -> StudyState:
    """The state of the study in a directory."""
    from toeplens.papers.deposit import Reproduction
    from toeplens.papers.mathematics import Theory
    from toeplens.papers.positional_symbolic.pretrained import PretrainedStudy
    from toeplens.studies.grid import GridStudy
    from toeplens.studies.kit.study import study_kind

    kinds: dict[str, type[StudyState]] = {x.NAME: x for x in (Reproduction, PretrainedStudy, Theory, GridStudy)}
    return kinds.get(study_kind(directory) or "", Reproduction).gather(directory)


def page_in(directory: Path) -> Page:
    """The page of the audit, probe, study or record in a directory."""
    from toeplens.studies import auditing, probing
    from toeplens.studies.kit.study import study_kind

    if (directory / auditing.RECORD).is_file():
        return auditing.open_audit(directory).page()
    if (directory / probing.RECORD).is_file():
        return probing.open_probe(directory).page()
    if study_kind(directory) is None:
        problem = "contains no study, audit, probe or record of one" if directory.exists() else "does not exist"
        raise InputError(f"directory: {directory} {problem}.")
    return load_study(directory).page()


def report_page(directory: RecordDirectory, as_json: Json = False) -> None:
    """Rebuild a page from saved results, without measuring again."""
    from toeplens.cli import console
    from toeplens.report import write_report

    console.print_page(write_report(directory, page_in(directory)), as_json=as_json)


def claims(
    directory: StudyDirectory,
    full: Full = False,
    evidence: bool = option(False, "Also print each claim's rule, evidence and what is missing.", flag="--evidence"),
    as_json: Json = False,
) -> None:
    """Judge the claims of a study and print the verdicts."""
    from toeplens.cli import console, tables
    from toeplens.studies.kit.verdicts import verdict_text

    state = load_study(directory)
    entries = state.entries
    if as_json:
        console.print_json([entry.to_dict() for entry in entries])
        return
    if not entries:
        raise InputError(f"claims: the study in {directory} evaluates none. Set 'claims:' in the study's file.")
    tables.print_claims(entries, full=full)
    if evidence:
        for entry in entries:
            suffix = "" if entry.protocol is None else f", {entry.protocol}"
            console.echo(f"{entry.claim.id}{suffix}: {verdict_text(entry.verdict)}")
            if not full:
                console.echo(f"  rule: {entry.claim.rule}")
            for line in entry.evidence:
                console.echo(f"  {line}")
            for line in entry.missing:
                console.echo(f"  missing: {line}")
            if entry.learning_text:
                console.echo(f"  {entry.learning_text}")
    console.echo(state.rule)
