"""The page of a grid study: accuracy by task and encoding, heads, and longer sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import isfinite
from pathlib import Path

from toeplens.report.grid import frequencies as grid_frequencies
from toeplens.report.grid import lengths as grid_lengths
from toeplens.report.grid import matrix as grid_matrix
from toeplens.report.grid import plane as grid_plane
from toeplens.report.grid import training as grid_training
from toeplens.report.grid.language import heads as language_heads
from toeplens.report.grid.language import lengths, planted
from toeplens.report.grid.language import tables as language_tables
from toeplens.report.grid.language.cells import language_tasks, only_language
from toeplens.report.grid.look import encoding_looks
from toeplens.report.kit.blocks import Block, numbered
from toeplens.report.kit.page import Page, ledger, ledger_table, surroundings, write_report
from toeplens.studies import RULE
from toeplens.studies.grid import Grid
from toeplens.studies.grid import measured as heads
from toeplens.studies.grid.language import LONG
from toeplens.studies.kit.results import SKILLED

_MAKERS: tuple[Callable[[Grid], Block], ...] = (
    grid_plane.plane,
    grid_frequencies.scans,
    grid_frequencies.centres,
    grid_frequencies.bands,
    grid_lengths.lengths,
    grid_lengths.relations,
    grid_training.training,
)
_OF_LANGUAGE: tuple[Callable[[Grid], Block], ...] = (
    lengths.by_length,
    lengths.by_position,
    planted.needles,
    planted.copies,
    language_heads.kinds,
    language_heads.position,
    language_heads.without,
)
_OF_ACCURACY = (grid_lengths.lengths, grid_lengths.relations)  # not for language models


def write_grid(state: Grid) -> Path:
    """Write the study's page to ``report.html`` in its directory, whole or not at all; returns its path."""
    return write_report(state.directory, render_grid(state))


def render_grid(state: Grid) -> str:
    """The page as one self-contained HTML document; the same state gives the same document."""
    return grid_page(state).html()


def grid_page(state: Grid) -> Page:
    """The figures and tables of the study."""
    language, only = bool(language_tasks(state.spec)), only_language(state.spec)
    makers = (*_OF_LANGUAGE, *_MAKERS) if language else _MAKERS
    found = numbered(make(state) for make in makers if not (only and make in _OF_ACCURACY))
    titles = {column.label: column.title for column in state.spec.columns()}
    claims = ledger(state.entries)
    prices, ways = (language_tables.prices(state), language_tables.extensions(state)) if language else ([], [])
    tables = {
        **{f"prices-{i}": each.table for i, each in enumerate(prices)},
        "claims": ledger_table(claims),
        "matrix": grid_matrix.matrix(state),
        **{f"ways-{i}": each.table for i, each in enumerate(ways)},
        **grid_lengths.relation_tables(state),
        "missing": language_tables.missing(state) if language else None,
        "costs": grid_matrix.costs(state),
        "run": surroundings(state, "models"),
        "models": grid_matrix.models(state, language=only),
    }
    hidden = {"matrix", "by_length", "by_task"} if only else set()
    return Page(
        "report/grid/page.html.j2",
        found,
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
            "longer": heads.LONGER,
            "without_shares": grid_plane.without_shares(state),
            "settings": state.spec.to_yaml(),
            "language": language,
            "only": only,
            "prices": prices,
            "ways": ways,
            "long": f"{LONG:g}",
            "watched": any(part.watch for part in state.spec.tasks.values()),
        },
    )
