"""The page of a grid study: tasks by encodings, what their heads follow, and how they do on longer texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from toeplens.report.grid import frequencies as grid_frequencies
from toeplens.report.grid import lengths as grid_lengths
from toeplens.report.grid import matrix as grid_matrix
from toeplens.report.grid import plane as grid_plane
from toeplens.report.grid import training as grid_training
from toeplens.report.grid.language import page as grid_language
from toeplens.report.grid.look import encoding_looks
from toeplens.report.kit.blocks import Block, numbered
from toeplens.report.kit.page import ledger, render_page, write_report
from toeplens.studies import RULE
from toeplens.studies.grid import Grid
from toeplens.studies.grid import measured as heads
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
_OF_ACCURACY = (grid_lengths.lengths, grid_lengths.relations)  # of which language has none


def write_grid(state: Grid) -> Path:
    """Write the study's page to ``report.html`` in its directory, whole or not at all; returns its path."""
    return write_report(state.directory, render_grid(state))


def render_grid(state: Grid) -> str:
    """The page as one self-contained HTML document; the same state gives the same document."""
    language = grid_language.parts(state)
    makers = _MAKERS if language is None else (*grid_language.MAKERS, *_MAKERS)
    if language is not None and language.only:
        makers = tuple(make for make in makers if make not in _OF_ACCURACY)
    found = numbered(make(state) for make in makers)
    titles = {column.label: column.title for column in state.spec.columns()}
    return render_page(
        "report/grid/page.html.j2",
        found,
        state=state,
        claims=ledger(state.entries),
        tally=Counter(entry.verdict for entry in state.entries),
        rule=RULE,
        encodings=list(encoding_looks(state.spec).values()),
        titles=titles,
        matrix=grid_matrix.matrix(state),
        gone=[
            f"{titles[cell.key.label]}, {state.spec.title_of(cell.key.task)}, seed {cell.key.seed}"
            for cell in state.results.cells
            if cell.status == "diverged"
        ],
        skilled=grid_matrix.skilled(state),
        least=SKILLED,
        longer=heads.LONGER,
        by_length=grid_lengths.by_length(state),
        by_task=grid_lengths.by_task(state),
        costs=grid_matrix.costs(state),
        models=grid_matrix.models(state),
        without_shares=grid_plane.without_shares(state),
        settings=state.spec.to_yaml(),
        language=language,
        of_model=grid_language.of_model,
        watched=any(part.watch for part in state.spec.tasks.values()),
    )
