"""Commands that export for a paper: citations, figures as pictures, tables as CSV and LaTeX."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from toeplens.cli.options import Json, RecordDirectory, argument, option
from toeplens.cli.studies import load_study, page_in
from toeplens.utils import InputError, choose, invalid, write_bytes, write_json, write_text
from toeplens.utils.outputs import open_output_dir
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
    from toeplens.papers.deposit import PAPER as DEPOSIT
    from toeplens.papers.positional_symbolic import FOLLOW_UP
    from toeplens.papers.positional_symbolic import PAPER as SYMBOLIC
    from toeplens.utils.citations import Citation, citations_of

    program = Citation(TITLE, (f"{{{AUTHORS}}}",), f"{TITLE}: {ABOUT}", version=__version__, license=LICENSE)
    papers = [DEPOSIT, SYMBOLIC, FOLLOW_UP]
    texts = {name: encodings.get(name).citation for name in ([] if directory is None else _encodings(directory))}
    encoding_papers: dict[str, Citation] = {}  # a paper of several encodings is one entry
    for entry in itertools.chain.from_iterable(citations_of(text, name) for name, text in texts.items()):
        if entry.arxiv not in [paper.arxiv for paper in papers]:
            encoding_papers.setdefault(entry.arxiv or entry.key, entry)
    groups = {"program": [program], "papers": papers, "encodings": list(encoding_papers.values())}
    if as_json:
        console.print_json(
            {
                kind: [{"key": entry.key, "words": entry.text(), "bibtex": entry.bibtex()} for entry in citations]
                for kind, citations in groups.items()
            }
        )
    elif bibtex:
        console.echo("\n\n".join(entry.bibtex() for citations in groups.values() for entry in citations))
        if not all(entry.title for entry in encoding_papers.values()):
            console.echo("Some entries lack a title; look them up on arXiv by number.", stderr=True)
    else:
        lines = ["toeplens:", f"  {program.text()}", "the papers that it reproduces:"]
        lines += [f"  {paper.text()}" for paper in papers]
        if texts:
            lines += [f"the encodings in {directory}:", *(f"  {name}: {text}" for name, text in texts.items())]
        console.echo("\n".join([*lines, "as BibTeX: toeplens cite --bibtex"]))


def _encodings(directory: Path) -> list[str]:
    """The encodings of a run's or a study's models, each once, in order."""
    from toeplens import encodings
    from toeplens.papers import deposit, mathematics
    from toeplens.studies import grid
    from toeplens.training import Run

    specs: list[Any] = []  # none of a pretrained model's
    if (directory / "spec.json").is_file():
        specs = [Run.open(directory).spec]
    elif isinstance(state := load_study(directory), grid.GridStudy):
        specs = [cell.job.spec for cell in grid.grid_cells(state.spec)]
    elif isinstance(state, deposit.Reproduction):
        specs = [cell.job.spec for cell in state.plan.cells()]
    elif isinstance(state, mathematics.Theory):
        specs = [job.spec for job in mathematics.model_jobs(state.scale, state.seeds)]
    names: dict[str, None] = {}
    for spec in specs:
        for encoding in filter(None, (spec.model.encoding, spec.model.input_encoding)):
            names |= dict.fromkeys(encodings.split_names(encoding))
    return list(names)


FIGURES, TABLES = "figures.json", "tables.json"


def figures(
    directory: RecordDirectory,
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
    from toeplens.report.exporting import FORMATS, INCHES, columns_of, draw_figure

    kind = choose("format", form, FORMATS)
    if columns is not None and columns not in INCHES:
        raise invalid("columns", "be 1 or 2", columns)
    numbered = list(enumerate(page_in(directory).figures, 1))
    if not numbered:
        raise InputError(f"figures: the report of {directory} has no figures.")
    ids = {str(number): fig.id for number, fig in numbered}
    chosen_ids = {choose("figure", ids.get(fig, fig), ids.values()) for fig in figure or ids}
    out_dir = directory / "figures" if out is None else out
    selected = [(number, fig) for number, fig in numbered if fig.id in chosen_ids]
    entries = [
        {"file": f"{fig.id}.{kind}", "figure": fig.id, "number": number, "title": fig.title, "caption": fig.caption}
        | {"inches": INCHES[columns or columns_of(fig)]}
        for number, fig in selected
    ]
    with open_output_dir(out_dir, "figures", (FIGURES,)), ProgressBars() as progress:
        write_json(out_dir / FIGURES, {"directory": str(directory), "figures": entries})
        for done, (_, fig) in enumerate(selected, 1):
            write_bytes(out_dir / f"{fig.id}.{kind}", draw_figure(fig, kind, columns))
            progress("files", done, len(selected))
    _print_files(out_dir, entries, as_json)


def tables(
    directory: RecordDirectory,
    form: str = option(
        "both", "csv, latex (booktabs), html, both (csv and latex) or all (default: both).", "NAME", flag="--format"
    ),
    out: Path | None = option(None, "Output directory (default: DIRECTORY/tables).", "PATH"),
    as_json: Json = False,
) -> None:
    """Export the tables of a page as CSV, LaTeX and HTML.

    LaTeX tables use booktabs and have a caption and a label.
    """
    from toeplens.report.exporting import csv_of, html_of, latex_of, number_tables

    writers = {"csv": csv_of, "tex": latex_of, "html": html_of}
    endings = {"csv": ["csv"], "latex": ["tex"], "html": ["html"], "both": ["csv", "tex"], "all": list(writers)}
    suffixes = endings[choose("format", form, endings)]
    all_tables = number_tables(page_in(directory).tables)
    if not all_tables:
        raise InputError(f"tables: the report of {directory} has no tables.")
    out_dir, entries = directory / "tables" if out is None else out, []
    with open_output_dir(out_dir, "tables", (TABLES,)):
        for table in all_tables:
            for ending in suffixes:
                file = f"{table.file}.{ending}"
                write_text(out_dir / file, writers[ending](table))
                entries.append({"file": file, "table": table.name, "rows": len(table.body)})
        write_json(out_dir / TABLES, {"directory": str(directory), "tables": entries})
    _print_files(out_dir, entries, as_json)


def _print_files(out_dir: Path, entries: list[dict[str, Any]], as_json: bool) -> None:
    from toeplens.cli import console

    if as_json:
        console.print_json({"directory": str(out_dir), "files": entries})
    else:
        console.echo(f"{len(entries)} files: {out_dir.resolve()}")
