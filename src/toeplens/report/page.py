"""The page: one HTML file that needs nothing else, no network, no server, no fonts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from toeplens.ground import write_text
from toeplens.lens import THRESHOLDS
from toeplens.report import answers, factor_blocks, glossary, look, mla_blocks, tables, words
from toeplens.report.blocks import Block, blocks
from toeplens.studies import COUNTED, RULE
from toeplens.studies.reproduce import SCALES, Reproduction

PAGE = "report.html"


def write_page(state: Reproduction) -> Path:
    """Write the study's report to ``report.html`` in its directory, whole or not at all; returns its path."""
    path = state.directory / PAGE
    write_text(path, render(state))
    return path


def render(state: Reproduction) -> str:
    """The report as one self-contained HTML document; the same state gives the same document."""
    shown, encodings = blocks(state), look.plain(state)
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            state=state,
            scale=SCALES[state.plan.scale],
            blocks=shown,
            many_heads=SCALES[state.plan.scale].model["num_heads"] > 8,
            headline=words.headline(state),
            answers=answers.answers(state),
            tallies=words.tallies(state),
            seeds_note=words.seeds_note(state),
            seeds=sorted({key.seed for key in look.planned(state.plan)}),
            largest=words.largest_drop(encodings.results.cells),
            diverged=[cell for cell in state.results.cells if cell.status == "diverged"],
            glossary=glossary.terms(state),
            claims=tables.claim_rows(state.entries),
            accuracy=tables.accuracy_tables(encodings),
            deposits=tables.deposit_tables(encodings),
            effects=factor_blocks.tables(state),
            strongest=factor_blocks.sentences(state),
            variants=mla_blocks.tables(state),
            settings=tables.settings(state),
            models=tables.model_rows(state),
            thresholds=THRESHOLDS.split("; "),
            rule=f"{RULE} {COUNTED}",
            figures=script_json({place: panel.figure for block in shown.values() for place, panel in places(block)}),
            plotly=Markup(inline(get_plotlyjs())),
        )
    )


@cache
def environment() -> Environment:
    """The templates of this package, with what they all call."""
    loader = PackageLoader("toeplens.report", "")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.globals |= {"look": look, "asset": _asset}
    made.filters |= {"percent": look.percent, "points": look.points, "duration": look.duration}
    return made


def _asset(file: str) -> Markup:
    """A style sheet or a script of this package, as it is."""
    return Markup(inline((Path(__file__).parent / file).read_text(encoding="utf-8")))


def inline(script: str) -> str:
    """A script that cannot end its own element."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def script_json(figures: dict[str, go.Figure]) -> Markup:
    """Plots by the id of their place, as JSON in which nothing can end the element that holds it."""
    plots = {place: figure.to_plotly_json() for place, figure in figures.items()}
    text = json.dumps(plots, separators=(",", ":"), allow_nan=False, default=list)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def places(block: Block) -> list[tuple[str, Any]]:
    """The panels of a figure with the ids of their places on the page."""
    return [
        (f"{block.id}-{v}-{g}-{p}", panel)
        for v, view in enumerate(block.views)
        for g, group in enumerate(view.groups)
        for p, panel in enumerate(group.panels)
    ]
