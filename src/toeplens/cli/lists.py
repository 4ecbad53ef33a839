"""Commands that list encodings and tasks, and measure an encoding."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

from toeplens.cli.options import Full, Json, argument, changed, option
from toeplens.ground import InputError, choose
from toeplens.ground.outputs import free


def list_encodings(full: Full = False, as_json: Json = False) -> None:
    """List the positional encodings and their options."""
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
        told = {
            "acts on": ", ".join((kind.coupling, *kind.also_couples)),
            "Toeplitz": "yes" if kind.toeplitz else "no",
            "content": "yes" if kind.data_dependent else "no",
            "scale": facts["scale"],
            "options (defaults)": _options(facts["options"]),
            "citation": kind.citation,
        }
        rows.append(({"name": name, **facts}, told))
    _print(rows, full, as_json, "encoding", "acts on", "Toeplitz", "content", "citation")


def card(
    out: Path = option(..., "Page to write; without NAME, the directory for all cards.", "PATH"),
    name: str | None = argument(None, "An encoding, or a sum such as rope+fox (default: all)."),
    set_: list[str] | None = option(
        None, "Change an option, e.g. base=500 (rope.base=500 for rope+fox). Repeatable.", "OPTION=VALUE", flag="--set"
    ),
    length: int = option(512, "Sequence length in tokens (default: 512).", "N"),
    as_json: Json = False,
) -> None:
    """Measure an encoding and write its card.

    A card shows formula, kernel, symbol, class, positional resolution by dtype, and cost.
    """
    from toeplens import encodings, report
    from toeplens.cli import console
    from toeplens.ground.outputs import write_page
    from toeplens.studies.card import make_card

    if name is None and set_:
        raise InputError("set must not be used without an encoding.")
    names = encodings.names() if name is None else (encodings.canonical(name),)
    options = changed({}, set_ or [])
    parts = encodings.named(names[0])  # options of a sum are named by part
    for each in options:
        choose(f"option of encoding {names[0]!r}", each, parts if len(parts) > 1 else encodings.options(names[0]))
    if name is None:
        report.free_for_cards(names, out)
    else:
        free(out, "card")
    cards = []
    with console.bar("measuring", len(names)) as step:
        for each in names:
            cards.append(make_card(each, length=length, **options))
            step()
    page = write_page(out, cards[0].page().html(), "card") if name is not None else report.write_cards(cards, out)
    console.print_page(page, as_json=as_json, cards=[made.to_dict() for made in cards])


def list_tasks(full: Full = False, as_json: Json = False) -> None:
    """List the tasks, their chance accuracy and options."""
    from toeplens import tasks

    rows = []
    for name in tasks.names():
        kind, chance = tasks.get(name), tasks.build(name).chance()
        options, about = _defaults(tasks.options(name)), inspect.getdoc(kind) or ""
        told = {
            "answer depends on": kind.answer,
            "chance": f"{chance:.4f}",
            "about": " ".join(about.split("\n\n")[0].split()),
            "options (defaults)": _options(options),
        }
        row = {"name": name, "answer": kind.answer, "chance": chance, "options": options, "about": about}
        rows.append((row, told))
    _print(rows, full, as_json, "task", "answer depends on", "chance", "about")


def _print(rows: list[tuple[dict[str, Any], dict[str, str]]], full: bool, as_json: bool, *columns: str) -> None:
    """Print rows as JSON, or all facts about each, or those of the columns on one line; the first is the name."""
    from toeplens.cli import console

    if as_json:
        console.print_json([row for row, _ in rows])
        return
    entries = [(row["name"], {fact: escape(text) for fact, text in told.items()}) for row, told in rows]
    if full:
        console.print_in_full(entries)
        return
    table = console.brief(*columns)
    for name, facts in entries:
        table.add_row(name, *(facts[fact] for fact in columns[1:]))
    console.out.print(table)
    console.say("Use --full for options and full texts.")


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "none"


def _defaults(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    return {name: None if each.default is each.empty else each.default for name, each in parameters.items()}
