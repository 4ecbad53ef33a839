"""Commands that take a page apart for a paper: its figures as pictures, its tables as CSV and LaTeX."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from toeplens.cli.options import Json, path
from toeplens.ground import InputError, choose, write_json, write_text
from toeplens.ground.places import entered

Shown = Annotated[
    Path, typer.Argument(help="The directory of a study, an audit or a probe, or a page of any command.", parser=path)
]
FIGURES, TABLES = "figures.json", "tables.json"


def figures(
    directory: Shown,
    form: Annotated[str, typer.Option("--format", help="svg, png (300 dots an inch) or pdf.")] = "pdf",
    figure: Annotated[
        list[str] | None, typer.Option(help="A figure's name or number; give it again for more. All unless given.")
    ] = None,
    columns: Annotated[
        int | None,
        typer.Option(help="Of a paper's two columns: 1 (3.25 inches) or 2 (6.75); as the page has it unless given."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for them; 'figures' beside the page unless given.", parser=path)
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw every figure of a page for a paper, a file a panel: sized for its columns, on white, with a legend."""
    from toeplens.cli import console
    from toeplens.report.exporting.drawing import FORMATS, draw, programs
    from toeplens.report.exporting.figures import read_figures
    from toeplens.report.exporting.maps import read_maps
    from toeplens.report.exporting.pages import plots_in, read_page, readable
    from toeplens.report.exporting.printed import INCHES, printed

    kind = choose("format", form, FORMATS)
    if columns is not None and columns not in INCHES:
        raise InputError(f"columns: {columns} was given; it must be 1 or 2.")
    programs()  # before a page is made for them
    page = _page(directory)
    html = read_page(page)
    with readable(page):
        there = [*read_maps(html), *read_figures(html, plots_in(html, page))]
    if not there:
        raise InputError(f"figures: {page} has none.")
    names = {name for each in there for name in (each.id, str(each.number)) if name != "0"}
    chosen = {choose("figure", each, names) for each in figure} if figure else names
    wanted = [each for each in there if chosen & {each.id, str(each.number)}]
    place = page.parent / "figures" if out is None else out
    panels, about = {}, []
    for each in wanted:
        for name, panel in each.names().items():
            with readable(page):
                made, file = printed(each, panel, columns), f"{name}.{kind}"
            panels[place / file] = made
            told = {"figure": each.id, "number": each.number, "title": each.title, "caption": each.caption}
            told |= {"view": panel.view, "group": panel.group, "panel": panel.title}
            about.append({"file": file, **told, "inches": [round(size, 2) for size in made.inches]})
    with entered(place, "figures", (FIGURES,)), console.bar("drawing", len(panels)) as step:
        write_json(place / FIGURES, {"page": str(page), "figures": about})
        draw(panels, kind, tabs=os.cpu_count() or 1, on_done=lambda _: step())
    _say(place, about, f"{_many(about, 'file')} of {_many(wanted, 'figure')}", as_json)


def tables(
    directory: Shown,
    form: Annotated[str, typer.Option("--format", help="csv, latex (booktabs), or both.")] = "both",
    out: Annotated[
        Path | None, typer.Option(help="Directory for them; 'tables' beside the page unless given.", parser=path)
    ] = None,
    as_json: Json = False,
) -> None:
    """Write every table of a page as CSV and as LaTeX with the rules of booktabs, a caption and a label."""
    from toeplens.report.exporting.latex import latex_of
    from toeplens.report.exporting.pages import read_page, readable
    from toeplens.report.exporting.tables import csv_of, read_tables

    writers: dict[str, tuple[str, Callable[[Any], str]]] = {"csv": ("csv", csv_of), "latex": ("tex", latex_of)}
    kinds = {**{kind: [kind] for kind in writers}, "both": list(writers)}
    chosen = kinds[choose("format", form, kinds)]
    page = _page(directory)
    html = read_page(page)
    with readable(page):
        found = read_tables(html)
    if not found:
        raise InputError(f"tables: {page} has none.")
    place, about = page.parent / "tables" if out is None else out, []
    with entered(place, "tables", (TABLES,)):
        for table in found:
            for ending, write in (writers[kind] for kind in chosen):
                file = f"{table.file}.{ending}"
                write_text(place / file, write(table))
                about.append({"file": file, "table": table.name, "section": table.section, "rows": len(table.body())})
        write_json(place / TABLES, {"page": str(page), "tables": about})
    _say(place, about, f"{_many(about, 'file')} of {_many(found, 'table')}", as_json)


def _many(things: Sequence[Any], what: str) -> str:
    return f"{len(things)} {what}{'s' if len(things) != 1 else ''}"


def _say(place: Path, about: list[dict[str, Any]], words: str, as_json: bool) -> None:
    from toeplens.cli import console

    if as_json:
        console.print_json({"directory": str(place), "files": about})
        return
    console.say(f"{words}: {place.resolve()}")


def _page(shown: Path) -> Path:
    """The page that is to be read: the file, or a directory's; one that is not there, or is older, is made (again)."""
    from toeplens.cli import console
    from toeplens.cli.studies import page_maker
    from toeplens.report import PAGE
    from toeplens.report.exporting.pages import current

    if shown.is_file():
        return shown
    if not shown.is_dir():
        raise InputError(f"page: there is no {shown}; it must be a directory of a study, or a page.")
    page = shown / PAGE
    there = page.is_file()
    if there and current(page):
        return page
    if not _holds_records(shown):
        if there:
            return page
        raise InputError(f"page: {shown} holds no {PAGE}, and no study, audit or probe to make one of.")
    console.say(
        f"page: {page} is {'of an older version' if there else 'not there'}; it is made{' again' * there}.", aside=True
    )
    return page_maker(shown)()


def _holds_records(directory: Path) -> bool:
    """Whether there is what a page can be made of."""
    from toeplens.studies import auditing, probing
    from toeplens.studies.kit.recorded import CLAIMS_FILE, STUDY

    return any((directory / name).is_file() for name in (auditing.RECORD, probing.RECORD, STUDY, CLAIMS_FILE))
