"""The page: one HTML file that needs nothing else, no network, no server, no fonts."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from toeplens.ground import write_text
from toeplens.lens import THRESHOLDS
from toeplens.papers.deposit import SCALES, Reproduction
from toeplens.papers.deposit.page import answers, glossary, look, tables, words
from toeplens.papers.deposit.page import factors as factor_blocks
from toeplens.papers.deposit.page import mla as mla_blocks
from toeplens.papers.deposit.page.blocks import blocks
from toeplens.report.kit.ledger import claim_rows
from toeplens.report.kit.page import PAGE, environment, inline, places, script_json
from toeplens.studies import COUNTED, RULE


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
        .get_template("papers/deposit/page/page.html.j2")
        .render(
            look=look,
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
            claims=claim_rows(state.entries),
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
