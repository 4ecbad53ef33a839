"""Commands that list encodings and tasks, and measure an encoding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toeplens.cli.options import Full, Json, apply_changes, argument, option
from toeplens.utils import InputError, choose
from toeplens.utils.outputs import check_output_file

_Columns = dict[str, Callable[[dict[str, Any]], str]]  # header: text of a row


def list_encodings(full: Full = False, as_json: Json = False) -> None:
    """List the positional encodings and their options."""
    from toeplens import encodings
    from toeplens.cli.console import echo

    for name, reason in encodings.load_errors().items():
        echo(f"{name}: {reason}", stderr=True)
    rows = []
    for name in encodings.names():
        kind = encodings.get(name)
        facts = {field: getattr(kind, field) for field in ("coupling", "also_couples", "toeplitz", "data_dependent")}
        facts["scale"] = {0: "1", 1: "1/sqrt(d)"}.get(kind.scale_terms, f"1/sqrt({kind.scale_terms}d)")
        rows.append({"name": name, **facts, "formula": kind.formula, **_options(encodings.options(name))})
        rows[-1]["citation"] = kind.citation
    columns: _Columns = {
        "encoding": lambda row: row["name"],
        "acts on": lambda row: ", ".join((row["coupling"], *row["also_couples"])),
        "Toeplitz": lambda row: "yes" if row["toeplitz"] else "no",
        "content": lambda row: "yes" if row["data_dependent"] else "no",
        "citation": lambda row: row["citation"],
    }
    _print_rows(rows, columns, {"scale": lambda row: row["scale"]}, full, as_json)


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
    from toeplens.cli.progress import ProgressBars
    from toeplens.studies.card import make_card
    from toeplens.utils.outputs import write_page

    if name is None and set_:
        raise InputError("set must not be used without an encoding.")
    names = encodings.names() if name is None else (encodings.canonical_name(name),)
    options = apply_changes({}, set_ or [])
    parts = encodings.split_names(names[0])  # options of a sum are named by part
    for item in options:
        choose(f"option of encoding {names[0]!r}", item, parts if len(parts) > 1 else encodings.options(names[0]))
    if name is None:
        report.check_cards_directory(names, out)
    else:
        check_output_file(out, "card")
    cards = []
    with ProgressBars() as progress:
        for item in names:
            cards.append(make_card(item, length=length, **options))
            progress("cards", len(cards), len(names))
    page = write_page(out, cards[0].page().html(), "card") if name is not None else report.write_cards(cards, out)
    console.print_page(page, as_json=as_json, cards=[result.to_dict() for result in cards])


def list_tasks(full: Full = False, as_json: Json = False) -> None:
    """List the tasks, their chance accuracy and options."""
    from toeplens import tasks

    rows = []
    for name in tasks.names():
        kind = tasks.get(name)
        facts = {"name": name, "answer": kind.answer, "chance": tasks.build(name).chance()}
        rows.append({**facts, **_options(tasks.options(name)), "about": inspect.getdoc(kind) or ""})
    columns: _Columns = {
        "task": lambda row: row["name"],
        "answer depends on": lambda row: row["answer"],
        "chance": lambda row: f"{row['chance']:.4f}",
        "about": lambda row: " ".join(row["about"].split("\n\n")[0].split()),
    }
    _print_rows(rows, columns, {}, full, as_json)


def _options(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    return {
        "options": {name: None if param.default is param.empty else param.default for name, param in parameters.items()}
    }


def _print_rows(rows: list[dict[str, Any]], columns: _Columns, more: _Columns, full: bool, as_json: bool) -> None:
    """Print rows as JSON, as a table, or (``full``) with more facts and the options."""
    from toeplens.cli import console

    if as_json:
        console.print_json(rows)
    elif full:
        more = more | {"options": lambda row: ", ".join(f"{n}={x}" for n, x in row["options"].items()) or "none"}
        facts = dict(list(columns.items())[1:]) | more
        console.print_details((row["name"], {fact: text(row) for fact, text in facts.items()}) for row in rows)
    else:
        cells = [[text(row) for text in columns.values()] for row in rows]
        console.print_table(None, list(columns), cells, brief=True)
        console.echo("Use --full for options and full texts.")
