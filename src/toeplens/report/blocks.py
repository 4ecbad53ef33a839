"""The report's numbered figures, in the page's order."""

from __future__ import annotations

from dataclasses import replace

from toeplens.report import accuracy_blocks, head_blocks
from toeplens.report.parts import Block
from toeplens.studies.reproduce import Reproduction

_MAKERS = (
    accuracy_blocks.accuracy,
    accuracy_blocks.convergence_distance,
    accuracy_blocks.convergence_count,
    head_blocks.heads,
    head_blocks.violins,
    head_blocks.skill,
    head_blocks.cumulative,
    accuracy_blocks.partial,
    accuracy_blocks.sinusoid,
)


def blocks(state: Reproduction) -> dict[str, Block]:
    """All figures that have anything to show, by id; only these are numbered."""
    found: dict[str, Block] = {}
    for make in _MAKERS:
        block = make(state, len(found) + 1)
        views = [view for view in block.views if any(group.panels for group in view.groups)]
        if views:
            found[block.id] = replace(block, views=views)
    return found
