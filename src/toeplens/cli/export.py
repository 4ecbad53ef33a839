"""Commands that export for a paper: citations, figures as pictures, tables as CSV and LaTeX."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from toeplens.cli.options import Json, Recorded, argument, option
from toeplens.cli.studies import gather, page_in
from toeplens.ground import InputError, choose, invalid, write_bytes, write_json, write_text
from toeplens.ground.outputs import entered
from toeplens.version import __version__

TITLE, AUTHORS, LICENSE = "toeplens", "The toeplens authors", "Apache-2.0"  # as CITATION.cff has them
ABOUT = "A laboratory for positional information in Transformers"


def cite(
    directory: Path | None = argument(None, "Also cite the encodings of this study or run.", is_path=True),
    bibtex: bool = option(False, "Print BibTeX.", flag="--bibtex"),
    as_json: Json = False,
) -> None:
    """Print citations of toeplens, the papers and encodings."""
    from toeplens import encodings
    from toeplens.cli import console
    from toeplens.ground.citations import Citation, citations_of
    from toeplens.papers.deposit import PAPER as DEPOSIT
    from toeplens.papers.positional_symbolic import PAPER as SYMBOLIC

    program = Citation(TITLE, (f"{{{AUTHORS}}}",), f"{TITLE}: {ABOUT}", version=__version__, license=LICENSE)
    papers = [DEPOSIT, SYMBOLIC]
    cited = {name: encodings.get(name).citation for name in ([] if directory is None else _encodings(directory))}
    new: dict[str, Citation] = {}  # a paper of several encodings is one entry
    for work in itertools.chain.from_iterable(citations_of(text, name) for name, text in cited.items()):
        if work.arxiv not in [paper.arxiv for paper in papers]:
            new.setdefault(work.arxiv or work.key, work)
    works = {"program": [program], "papers": papers, "encodings": list(new.values())}
    if as_json:
        console.print_json(
            {
                kind: [{"key": work.key, "words": work.text(), "bibtex": work.bibtex()} for work in found]
                for kind, found in works.items()
            }
        )
    elif bibtex:
        console.say("\n\n".join(work.bibtex() for found in works.values() for work in found))
        if not all(work.title for work in new.values()):
            console.say("Some entries lack a title; look them up on arXiv by number.", aside=True)
    else:
        lines = ["toeplens:", f"  {program.text()}", "the papers that it reproduces:"]
        lines += [f"  {paper.text()}" for paper in papers]
        if cited:
            lines += [f"the encodings in {directory}:", *(f"  {name}: {text}" for name, text in cited.items())]
        console.say("\n".join([*lines, "as BibTeX: toeplens cite --bibtex"]))


def _encodings(directory: Path) -> list[str]:
    """The encodings of a run's or a study's models, each once, in order."""
    from toeplens import encodings
    from toeplens.papers import deposit, mathematics
    from toeplens.studies import grid
    from toeplens.training import Run

    specs: list[Any] = []  # none of a pretrained model's
    if (directory / "spec.json").is_file():
        specs = [Run.open(directory).spec]
    elif isinstance(state := gather(directory), grid.Grid):
        specs = [cell.job.spec for cell in grid.cells(state.spec)]
    elif isinstance(state, deposit.Reproduction):
        specs = [cell.job.spec for cell in state.plan.cells()]
    elif isinstance(state, mathematics.Theory):
        specs = [job.spec for job in mathematics.jobs(state.scale, state.seeds)]
    names: dict[str, None] = {}
    for spec in specs:
        for each in filter(None, (spec.model.encoding, spec.model.input_encoding)):
            names |= dict.fromkeys(encodings.named(each))
    return list(names)


FIGURES, TABLES = "figures.json", "tables.json"


def figures(
    directory: Recorded,
    form: str = option("pdf", "pdf, svg or png (300 dpi) (default: pdf).", "NAME", flag="--format"),
    figure: list[str] | None = option(None, "Name or number of a figure; repeatable (default: all).", "NAME"),
    columns: int | None = option(
        None, "Width in columns: 1 (3.25 in) or 2 (6.75 in) (default: 2 for figures of several panels, else 1).", "N"
    ),
    out: Path | None = option(None, "Output directory (default: DIRECTORY/figures).", "PATH"),
    as_json: Json = False,
) -> None:
    """Export the figures of a page, sized for a paper, on white."""
    from toeplens.cli.progress import ProgressBars
    from toeplens.report.exporting import FORMATS, INCHES, columns_of, draw

    kind = choose("format", form, FORMATS)
    if columns is not None and columns not in INCHES:
        raise invalid("columns", "be 1 or 2", columns)
    every = list(enumerate(page_in(directory).figures, 1))
    if not every:
        raise InputError(f"figures: the report of {directory} has no figures.")
    ids = {str(number): each.id for number, each in every}
    chosen = {choose("figure", ids.get(each, each), ids.values()) for each in figure or ids}
    place = directory / "figures" if out is None else out
    wanted = [(number, each) for number, each in every if each.id in chosen]
    about = [
        {"file": f"{each.id}.{kind}", "figure": each.id, "number": number, "title": each.title, "caption": each.caption}
        | {"inches": INCHES[columns or columns_of(each)]}
        for number, each in wanted
    ]
    with entered(place, "figures", (FIGURES,)), ProgressBars() as progress:
        write_json(place / FIGURES, {"directory": str(directory), "figures": about})
        for done, (_, each) in enumerate(wanted, 1):
            write_bytes(place / f"{each.id}.{kind}", draw(each, kind, columns))
            progress("files", done, len(wanted))
    _print(place, about, as_json)


def tables(
    directory: Recorded,
    form: str = option(
        "both", "csv, latex (booktabs), html, both (csv and latex) or all (default: both).", "NAME", flag="--format"
    ),
    out: Path | None = option(None, "Output directory (default: DIRECTORY/tables).", "PATH"),
    as_json: Json = False,
) -> None:
    """Export the tables of a page as CSV, LaTeX and HTML.

    LaTeX tables use booktabs and have a caption and a label.
    """
    from toeplens.report.exporting import csv_of, html_of, latex_of, numbered

    writers = {"csv": csv_of, "tex": latex_of, "html": html_of}
    endings = {"csv": ["csv"], "latex": ["tex"], "html": ["html"], "both": ["csv", "tex"], "all": list(writers)}
    chosen = endings[choose("format", form, endings)]
    every = numbered(page_in(directory).tables)
    if not every:
        raise InputError(f"tables: the report of {directory} has no tables.")
    place, about = directory / "tables" if out is None else out, []
    with entered(place, "tables", (TABLES,)):
        for table in every:
            for ending in chosen:
                file = f"{table.file}.{ending}"
                write_text(place / file, writers[ending](table))
                about.append({"file": file, "table": table.name, "rows": len(table.body)})
        write_json(place / TABLES, {"directory": str(directory), "tables": about})
    _print(place, about, as_json)


def _print(place: Path, about: list[dict[str, Any]], as_json: bool) -> None:
    from toeplens.cli import console

    if as_json:
        console.print_json({"directory": str(place), "files": about})
    else:
        console.say(f"{len(about)} files: {place.resolve()}")
