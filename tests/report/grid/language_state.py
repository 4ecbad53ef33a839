"""The recorded study of language models, whole or in part."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from toeplens.studies import Results
from toeplens.studies.grid import GridStudy

RECORD = Path(__file__).parents[3] / "results" / "language"


@cache
def recorded_state() -> GridStudy:
    return GridStudy.gather(RECORD)


def language_grid(directory: Path, finished: int | None = None) -> GridStudy:
    """Of its first ``finished`` models by seed (default: all); as of a study in ``directory``."""
    state = recorded_state()
    ordered = sorted(state.results.cells, key=lambda cell: cell.key.seed)[:finished]
    share = len(ordered) / state.total
    return replace(state, directory=directory, results=Results(ordered), finished=len(ordered), share=share)
