"""The page: one HTML file that needs nothing else, no network, no server, no fonts."""

from __future__ import annotations

from pathlib import Path

from toeplens.lens import THRESHOLDS
from toeplens.papers.deposit import SCALES, Reproduction
from toeplens.papers.deposit.page import answers, glossary, look, tables, words
from toeplens.papers.deposit.page import factors as factor_blocks
from toeplens.papers.deposit.page import mla as mla_blocks
from toeplens.papers.deposit.page.blocks import blocks
from toeplens.report.kit.ledger import claim_rows
from toeplens.report.kit.page import render_page, write_report
from toeplens.studies import COUNTED, RULE


def write_page(state: Reproduction) -> Path:
    """Write the study's report to ``report.html`` in its directory, whole or not at all; returns its path."""
    return write_report(state.directory, render(state))


def render(state: Reproduction) -> str:
    """The report as one self-contained HTML document; the same state gives the same document."""
    shown, encodings = blocks(state), look.plain(state)
    return render_page(
        "papers/deposit/page/page.html.j2",
        shown,
        look=look,
        state=state,
        scale=SCALES[state.plan.scale],
        many_heads=SCALES[state.plan.scale].model["num_heads"] > 8,
        headline=words.headline(state),
        answers=answers.answers(state),
        tallies=words.tallies(state),
        seeds_note=words.seeds_note(state),
        seeds=sorted({key.seed for key in look.planned(state.plan)}),
        largest=words.largest_drop(encodings.results.cells),
        gone=words.diverged(state),
        protocols={p: look.PROTOCOL_NAMES[p] for p in state.plan.protocols},
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
    )
