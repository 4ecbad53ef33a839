"""The page of a grid study: accuracy by task and encoding, heads, and longer sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import isfinite
from pathlib import Path

from toeplens.report.grid import figures, language
from toeplens.report.grid import tables as grid_tables
from toeplens.report.grid.look import encoding_looks, language_tasks, only_language
from toeplens.report.kit.blocks import Block, numbered
from toeplens.report.kit.page import Page, ledger, ledger_table, surroundings, write_report
from toeplens.studies import RULE
from toeplens.studies.grid import Grid
from toeplens.studies.grid.language import LONG
from toeplens.studies.grid.measured import LONGER
from toeplens.studies.kit.results import SKILLED

_Makers = tuple[Callable[[Grid], Block], ...]
_OF_HEADS: _Makers = (figures.plane, figures.scans, figures.centres, figures.bands)
_OF_ACCURACY: _Makers = (figures.lengths, figures.relations)  # not for language models
_OF_LANGUAGE: _Makers = (
    *(language.by_length, language.by_position, language.needles, language.copies),
    *(language.kinds, language.position, language.without),
)


def write_grid(state: Grid) -> Path:
    """Write the study's page to ``report.html`` in its directory, whole or not at all; returns its path."""
    return write_report(state.directory, render_grid(state))


def render_grid(state: Grid) -> str:
    """The page as one self-contained HTML document; the same state gives the same document."""
    return grid_page(state).html()


def grid_page(state: Grid) -> Page:
    """The figures and tables of the study."""
    has_language, only = bool(language_tasks(state.spec)), only_language(state.spec)
    makers = (*(_OF_LANGUAGE if has_language else ()), *_OF_HEADS, *(() if only else _OF_ACCURACY), figures.training)
    titles = {column.label: column.title for column in state.spec.columns()}
    claims = ledger(state.entries)
    prices, ways = (grid_tables.prices(state), grid_tables.extensions(state)) if has_language else ([], [])
    tables = {
        **{f"prices-{i}": each.table for i, each in enumerate(prices)},
        "claims": ledger_table(claims),
        "matrix": grid_tables.matrix(state),
        **{f"ways-{i}": each.table for i, each in enumerate(ways)},
        **grid_tables.relation_tables(state),
        "missing": grid_tables.missing(state) if has_language else None,
        "costs": grid_tables.costs(state),
        "run": surroundings(state, "models"),
        "models": grid_tables.models(state, bits=only),
    }
    hidden = {"matrix", "by_length", "by_task"} if only else set()
    return Page(
        "report/grid/page.html.j2",
        numbered(make(state) for make in makers),
        {name: table for name, table in tables.items() if table is not None and name not in hidden},
        {
            "state": state,
            "claims": claims,
            "tally": Counter(entry.verdict for entry in state.entries),
            "rule": RULE,
            "encodings": list(encoding_looks(state.spec).values()),
            "titles": titles,
            "gone": [
                f"{titles[cell.key.label]}, {state.spec.title_of(cell.key.task)}, seed {cell.key.seed}"
                for cell in state.results.cells
                if cell.status == "diverged"
            ],
            "skilled": sum(cell.skilled for cell in state.results.cells if isfinite(cell.accuracy)),
            "least": SKILLED,
            "longer": LONGER,
            "without_shares": figures.without_shares(state),
            "settings": state.spec.to_yaml(),
            "language": has_language,
            "only": only,
            "prices": prices,
            "ways": ways,
            "long": f"{LONG:g}",
            "watched": any(part.watch for part in state.spec.tasks.values()),
        },
    )
