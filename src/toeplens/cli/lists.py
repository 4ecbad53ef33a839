"""Commands that show what there is: encodings, their cards, tasks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from toeplens.cli.options import Full, Json, changed, path
from toeplens.ground import InputError, choose
from toeplens.ground.places import free


def list_encodings(full: Full = False, as_json: Json = False) -> None:
    """List the positional encodings, their class and their options."""
    from toeplens import encodings
    from toeplens.cli.console import say

    rows = []
    for name, why in encodings.unusable().items():
        say(f"{name}: {why}", aside=True)
    for name in encodings.names():
        kind = encodings.get(name)
        facts = {field: getattr(kind, field) for field in ("coupling", "also_couples", "toeplitz", "data_dependent")}
        facts["scale"] = {0: "1", 1: "1/sqrt(d)"}.get(kind.scale_terms, f"1/sqrt({kind.scale_terms}d)")
        facts |= {"formula": kind.formula, "options": _defaults(encodings.options(name)), "citation": kind.citation}
        rows.append({"name": name, **facts})

    def told(row: dict[str, Any]) -> dict[str, str]:
        return {
            "enters by": ", ".join((row["coupling"], *row["also_couples"])),
            "Toeplitz": "yes" if row["toeplitz"] else "no",
            "content": "yes" if row["data_dependent"] else "no",
            "scale": row["scale"],
            "options (defaults)": _options(row),
            "citation": row["citation"],
        }

    _print(rows, told, full, as_json, "encoding", "enters by", "Toeplitz", "content", "citation")


def card(
    out: Annotated[
        Path, typer.Option(help="The page to write; for all encodings, the directory of their pages.", parser=path)
    ],
    name: Annotated[
        str | None,
        typer.Argument(help="See 'toeplens encodings'; several at once as rope+fox; all of them unless given."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Change an option of the encoding, e.g. --set base=500; of rope+fox, rope.base=500."
        ),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of the texts that are measured.")] = 512,
    as_json: Json = False,
) -> None:
    """Measure an encoding and write its card: formula, kernel, symbol, class, resolution by dtype, cost."""
    from toeplens import encodings, report
    from toeplens.cli import console
    from toeplens.studies.card import make_card

    if name is None and set_:
        raise InputError("set must not be used without an encoding.")
    names = encodings.names() if name is None else (encodings.canonical(name),)
    options = changed({}, set_ or [])
    for option in options:
        known = encodings.named(names[0])  # options of several are given by name
        choose(f"option of encoding {names[0]!r}", option, known if len(known) > 1 else encodings.options(names[0]))
    if name is None:
        report.free_for_cards(names, out)
    else:
        free(out, "card")
    cards = [make_card(each, length=length, **options) for each in console.track(names, "measuring")]
    page = report.write_card(cards[0], out) if name is not None else report.write_cards(cards, out)
    console.print_page(page, as_json=as_json, cards=[made.to_dict() for made in cards])


def list_tasks(full: Full = False, as_json: Json = False) -> None:
    """List the tasks, what their answer depends on, chance, and their options."""
    from toeplens import tasks

    rows = []
    for name in tasks.names():
        kind, chance = tasks.get(name), tasks.build(name).chance()
        options, about = _defaults(tasks.options(name)), inspect.getdoc(kind)
        rows.append({"name": name, "answer": kind.answer, "chance": chance, "options": options, "about": about})

    def told(row: dict[str, Any]) -> dict[str, str]:
        return {
            "answer depends on": row["answer"],
            "chance": f"{row['chance']:.4f}",
            "about": " ".join(row["about"].split("\n\n")[0].split()),
            "options (defaults)": _options(row),
        }

    _print(rows, told, full, as_json, "task", "answer depends on", "chance", "about")


def _print(
    rows: list[dict[str, Any]],
    told: Callable[[dict[str, Any]], dict[str, str]],
    full: bool,
    as_json: bool,
    kind: str,
    *shown: str,
) -> None:
    """Rows as JSON; or what is ``told`` of each for people: all of it, or a line with what is ``shown``."""
    from toeplens.cli import console

    if as_json:
        console.print_json(rows)
        return
    entries = [(row["name"], {fact: escape(text) for fact, text in told(row).items()}) for row in rows]
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


def _defaults(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    return {name: None if each.default is each.empty else each.default for name, each in parameters.items()}
