"""The page: one HTML file that needs nothing else, no network, no server, no fonts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from toeplens.lens import THRESHOLDS
from toeplens.papers.deposit import SCALES, Reproduction
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
from toeplens.report.kit.page import Page, ledger, ledger_table, surroundings, write_report
from toeplens.studies import ENOUGH, RULE

_Maker = Callable[[Reproduction], Block]
# in the page's order; those that show encodings as their protocol has them come with True: variants and the models of
# other parts would crowd them
_MAKERS: tuple[tuple[_Maker, bool], ...] = (
    (accuracy.accuracy, True),
    (accuracy.convergence_distance, True),
    (accuracy.convergence_count, True),
    (heads.heads, True),
    (deposits.by_encoding, True),
    (deposits.by_layer, True),
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
    return reproduction_page(state).html()


def reproduction_page(state: Reproduction) -> Page:
    """The figures and tables of the study."""
    found, encodings, scale = blocks(state), look.plain(state), SCALES[state.plan.scale]
    general = bool(look.plain_keys(state.plan) or _BESIDE & found.keys())
    claims, protocols = ledger(state.entries), {p: look.PROTOCOL_NAMES[p] for p in state.plan.protocols}
    known = recorded() if state.plan.seeds < ENOUGH else {}
    seeds = ", ".join(map(str, sorted({key.seed for key in look.planned(state.plan)})))
    deposits_shown = tables.deposit_tables(encodings) if general else []
    effects = factors.tables(state) if "factors" in state.plan.parts else []
    variants = mla.tables(state) if "mla" in state.plan.parts else []
    facts = [("Scale", f"{state.plan.scale}: {scale.about}"), ("Protocols", ", ".join(state.plan.protocols))]
    every = {
        "results": words.results_table(state),
        "encodings": tables.encodings_table(state),
        "claims": ledger_table(claims, protocols=protocols, recorded=known),
        **({f"accuracy-{task}": tables.accuracy_table(encodings, task) for task in look.TASKS} if general else {}),
        **{f"kinds-{i}": kinds for i, (_, kinds, _) in enumerate(deposits_shown)},
        **{f"deposits-{i}": each for i, (*_, each) in enumerate(deposits_shown)},
        **({"strongest": factors.strongest_table(state)} if effects else {}),
        **{f"effects-{i}": each for i, each in enumerate(effects)},
        **{f"variants-{i}": each for i, each in enumerate(variants)},
        **({"steps": mla.steps_table(state)} if variants else {}),
        "run": surroundings(state, "cells", [*facts, ("Seeds", f"{seeds} (of weights, order and data)")]),
        "settings": tables.settings_table(state),
        "models": tables.models_table(state),
    }
    return Page(
        "papers/deposit/page/page.html.j2",
        found,
        {key: table for key, table in every.items() if table.body},
        {
            "look": look,
            "state": state,
            "general": general,
            "scale": scale,
            "many_heads": scale.model["num_heads"] > 8,
            "headline": words.headline(state),
            "central": words.central(state),
            "opposite": words.opposite(state),
            "measured": words.measured(state),
            "tallies": words.tallies(state),
            "seeds_told": scale.told(state.plan.seeds),
            "enough": ENOUGH,
            "largest": words.largest_drop((encodings if general else state).results.cells),
            "gone": words.diverged(state),
            "protocols": protocols,
            "claims": claims,
            "deposits": deposits_shown,
            "effects": effects,
            "variants": variants,
            "thresholds": THRESHOLDS.split("; "),
            "rule": RULE,
            "recorded": known,
        },
    )
