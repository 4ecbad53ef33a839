"""The page: one HTML file that needs nothing else, no network, no server, no fonts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from toeplens.lens import THRESHOLDS
from toeplens.papers.deposit import SCALES, Reproduction, title
from toeplens.papers.deposit.page import (
    accuracy,
    deposits,
    factors,
    heads,
    look,
    mla,
    partial,
    seeds,
    silencing,
    sinusoid,
    tables,
    training,
    words,
)
from toeplens.papers.deposit.recorded import recorded
from toeplens.report.kit.blocks import Block, numbered
from toeplens.report.kit.page import ledger, render_page, write_report
from toeplens.studies import ENOUGH, RULE

_Maker = Callable[[Reproduction], Block]
# in the page's order; those that show encodings as their protocol has them come with True: variants and the models of
# other parts would crowd them
_MAKERS: tuple[tuple[_Maker, bool], ...] = (
    (accuracy.accuracy, True),
    (accuracy.convergence_distance, True),
    (accuracy.convergence_count, True),
    (heads.heads, True),
    (heads.violins, True),
    (deposits.by_encoding, True),
    (deposits.by_layer, True),
    (heads.skill, True),
    (heads.cumulative, True),
    (silencing.position, False),
    (silencing.removed, False),
    (silencing.sizes, False),
    (silencing.circuit, True),
    (factors.figure, False),
    (partial.accuracy, False),
    (partial.layers, False),
    (partial.peaks, False),
    (sinusoid.sinusoid, True),
    (sinusoid.representation, False),
    (mla.figure, False),
    (deposits.by_rung, False),
    (deposits.by_moment, False),
    (seeds.strength, False),
    (seeds.exponent, False),
    (seeds.lead, False),
    (training.training, False),
    (training.exponents, True),
)
# what is shown only if its part is asked for: cells of other parts alone would give a part of it
_PART: dict[_Maker, str] = {
    factors.figure: "factors",
    partial.layers: "partial",
    partial.peaks: "partial",
    mla.figure: "mla",
    deposits.by_rung: "ladder",
    deposits.by_moment: "ladder",
}
# figures of other models in sections of the encodings as their protocol has them
_BESIDE = {"position", "sets", "sets-size", "representation"}


def blocks(state: Reproduction) -> dict[str, Block]:
    """All figures that have anything to show, by id; only these are numbered."""
    encodings, parts = look.plain(state), state.plan.parts
    asked = [(make, plain) for make, plain in _MAKERS if _PART.get(make, parts[0]) in parts]
    return numbered(make(encodings if plain else state) for make, plain in asked)


def write_page(state: Reproduction) -> Path:
    """Write the study's report to ``report.html`` in its directory, whole or not at all; returns its path."""
    return write_report(state.directory, render(state))


def render(state: Reproduction) -> str:
    """The report as one self-contained HTML document; the same state gives the same document."""
    shown, encodings, settings = blocks(state), look.plain(state), tables.settings(state)
    general = bool(look.plain_keys(state.plan) or _BESIDE & shown.keys())
    return render_page(
        "papers/deposit/page/page.html.j2",
        shown,
        look=look,
        state=state,
        general=general,
        scale=SCALES[state.plan.scale],
        many_heads=SCALES[state.plan.scale].model["num_heads"] > 8,
        headline=words.headline(state),
        central=words.central(state),
        measured=words.measured(state),
        partings=words.partings(state),
        answers=words.answers(state),
        tallies=words.tallies(state),
        seeds_note=words.seeds_note(state),
        seeds_told=SCALES[state.plan.scale].told(state.plan.seeds),
        seeds=sorted({key.seed for key in look.planned(state.plan)}),
        largest=words.largest_drop((encodings if general else state).results.cells),
        gone=words.diverged(state),
        protocols={p: look.PROTOCOL_NAMES[p] for p in state.plan.protocols},
        glossary=tables.terms(state),
        claims=ledger(state.entries),
        accuracy=tables.accuracy_tables(encodings),
        deposits=tables.deposit_tables(encodings),
        effects=factors.tables(state),
        strongest=factors.sentences(state),
        variants=mla.tables(state),
        settings=settings,
        differing=sum(paper != ours for _, paper, ours in settings),
        shown=tables.shown,
        title=title,
        models=tables.model_rows(state),
        thresholds=THRESHOLDS.split("; "),
        rule=RULE,
        recorded=recorded() if state.plan.seeds < ENOUGH else {},
    )
