"""What the claims' rules have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toeplens.papers.deposit.labels import title
from toeplens.studies.kit.results import CellResult, Results
from toeplens.studies.kit.verdicts import Finding, above

V1 = "arXiv 2505.13027 v1"
FINAL = "ICLR 2026 version"
BETTER = "paired difference of final test accuracy over seeds above 0"


def beats(results: Results, task: str, first: str, others: Sequence[str]) -> list[Finding]:
    """Is ``first`` more accurate than each of the others that were run?"""
    return [
        above(f"{title(first)} - {title(other)}", results.difference(task, first, other), 0.0)
        for other in others
        if expected(results, task, other)
    ]


def expected(results: Results, task: str, label: str) -> bool:
    """Every encoding of a claim is waited for, but for "random", which the core of the smaller scales leaves out."""
    return label != "random" or bool(results.of(task, label))


def skilled(cells: Sequence[CellResult]) -> list[CellResult]:
    """Cells whose ablation can say anything: the model learned at least a quarter of what there is to learn."""
    return [cell for cell in cells if cell.ablation and cell.skilled]


def single_head(cell: CellResult, layers: slice = slice(None)) -> bool:
    """Whether a layer among ``layers`` is single-head."""
    return any(layer.kind == "single-head" for layer in cell.deposits()[layers])


def peak_layer(cell: CellResult) -> int:
    """The layer, from 0, that holds the head with the largest loss."""
    return int(np.argmax([layer.peak for layer in cell.deposits()]))


def paired_peaks(results: Results, task: str, first: str, second: str) -> np.ndarray:
    """Peak of ``first`` minus ``second``, paired by seed, of the skilled models."""
    other = {cell.key.seed: cell for cell in skilled(results.of(task, second))}
    cells = [cell for cell in skilled(results.of(task, first)) if cell.key.seed in other]
    return np.array([cell.peak - other[cell.key.seed].peak for cell in cells])


def full_rope(results: Results, task: str) -> str:
    """RoPE on all heads without a sinusoid: the released program's "rope" has one, that for partial RoPE none."""
    return "rope-alone" if results.of(task, "rope-alone") else "rope"
