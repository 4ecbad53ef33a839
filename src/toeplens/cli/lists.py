"""Commands that show what there is: encodings, their cards, tasks."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from toeplens.cli.options import Full, Json, changed, path
from toeplens.ground import InputError, choose
from toeplens.ground.places import free
from toeplens.start import starting


def list_encodings(full: Full = False, as_json: Json = False) -> None:
    """List the positional encodings, their class and their options."""
    with starting():
        from toeplens import encodings
        from toeplens.cli import console

    rows = []
    for name in encodings.names():
        kind = encodings.get(name)
        options = {n: _default(p) for n, p in encodings.options(name).items()}
        facts = {field: getattr(kind, field) for field in ("coupling", "also_couples", "toeplitz", "data_dependent")}
        facts["scale"] = {0: "1", 1: "1/sqrt(d)"}.get(kind.scale_terms, f"1/sqrt({kind.scale_terms}d)")
        rows.append({"name": name, **facts, "formula": kind.formula, "options": options, "citation": kind.citation})
    if as_json:
        console.print_json(rows)
        return
    heads = ("enters by", "Toeplitz", "content", "scale", "options (defaults)", "citation")
    entries = []
    for row in rows:
        where = ", ".join((row["coupling"], *row["also_couples"]))
        toeplitz, content = ("yes" if row[fact] else "no" for fact in ("toeplitz", "data_dependent"))
        facts = (where, toeplitz, content, row["scale"], _options(row), row["citation"])
        entries.append((row["name"], dict(zip(heads, map(escape, facts), strict=True))))
    _print(entries, full, "encoding", "enters by", "Toeplitz", "content", "citation")


def card(
    out: Annotated[
        Path, typer.Option(help="The page to write; for all encodings, the directory of their pages.", parser=path)
    ],
    name: Annotated[str | None, typer.Argument(help="See 'toeplens encodings'; all of them unless given.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change an option of the encoding, e.g. --set base=500.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of the texts that are measured.")] = 512,
    as_json: Json = False,
) -> None:
    """Measure an encoding and write its card: formula, kernel, symbol, class, resolution by dtype, cost."""
    with starting():
        from toeplens import encodings, report
        from toeplens.cli import console
        from toeplens.studies.card import make_card

    if name is None and set_:
        raise InputError("set: an option was given, but no encoding; name the one that it belongs to.")
    names = encodings.names() if name is None else (choose("encoding", name, encodings.names()),)
    options = changed({}, set_ or [])
    for option in options:
        choose(f"option of encoding {name!r}", option, encodings.options(names[0]))
    if name is None:
        report.free_for_cards(names, out)
    else:
        free(out, "card")
    cards = [make_card(each, length=length, **options) for each in console.track(names, "measuring")]
    page = report.write_card(cards[0], out) if name is not None else report.write_cards(cards, out)
    if as_json:
        console.print_json({"page": str(page), "cards": [made.to_dict() for made in cards]})
    else:
        console.say(f"page: {page.resolve()}")


def list_tasks(full: Full = False, as_json: Json = False) -> None:
    """List the tasks, what their answer depends on, chance, and their options."""
    with starting():
        from toeplens import tasks
        from toeplens.cli import console

    rows = []
    for name in tasks.names():
        kind, task = tasks.get(name), tasks.build(name)
        options = {n: _default(p) for n, p in tasks.options(name).items()}
        rows.append(
            {
                "name": name,
                "answer": kind.answer,
                "chance": task.chance(),
                "options": options,
                "about": inspect.getdoc(kind),
            }
        )
    if as_json:
        console.print_json(rows)
        return
    heads = ("answer depends on", "chance", "about", "options (defaults)")
    entries = []
    for row in rows:
        about = " ".join(row["about"].split("\n\n")[0].split())
        facts = (row["answer"], f"{row['chance']:.4f}", about, _options(row))
        entries.append((row["name"], dict(zip(heads, map(escape, facts), strict=True))))
    _print(entries, full, "task", "answer depends on", "chance", "about")


def _print(entries: list[tuple[str, dict[str, str]]], full: bool, kind: str, *shown: str) -> None:
    """All facts of each entry, or a line with those that are shown."""
    from toeplens.cli import console

    if full:
        console.print_in_full(entries)
        return
    table = console.brief(kind, *shown)
    for name, facts in entries:
        table.add_row(name, *(facts[fact] for fact in shown))
    console.out.print(table)
    console.say("options, and all of each line: --full")


def _options(row: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in row["options"].items()) or "none"


def _default(parameter: inspect.Parameter) -> Any:
    return None if parameter.default is inspect.Parameter.empty else parameter.default
