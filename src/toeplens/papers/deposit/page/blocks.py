"""The report's numbered figures, in the page's order."""

from __future__ import annotations

from collections.abc import Callable

from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.page import accuracy as accuracy_blocks
from toeplens.papers.deposit.page import deposits as deposit_blocks
from toeplens.papers.deposit.page import factors as factor_blocks
from toeplens.papers.deposit.page import heads as head_blocks
from toeplens.papers.deposit.page import mla as mla_blocks
from toeplens.papers.deposit.page import partial as partial_blocks
from toeplens.papers.deposit.page import representation as representation_blocks
from toeplens.papers.deposit.page import seed_training as seed_training_blocks
from toeplens.papers.deposit.page import seeds as seed_blocks
from toeplens.papers.deposit.page import sets as sets_blocks
from toeplens.papers.deposit.page import silence as silence_blocks
from toeplens.papers.deposit.page import training as training_blocks
from toeplens.papers.deposit.page.look import plain
from toeplens.report.kit.blocks import Block, numbered

_Maker = Callable[[Reproduction], Block]
_MAKERS: tuple[_Maker, ...] = (
    accuracy_blocks.accuracy,
    accuracy_blocks.convergence_distance,
    accuracy_blocks.convergence_count,
    head_blocks.heads,
    head_blocks.violins,
    deposit_blocks.by_encoding,
    deposit_blocks.by_layer,
    head_blocks.skill,
    head_blocks.cumulative,
    silence_blocks.position,
    sets_blocks.removed,
    sets_blocks.sizes,
    factor_blocks.figure,
    partial_blocks.accuracy,
    partial_blocks.layers,
    partial_blocks.peaks,
    accuracy_blocks.sinusoid,
    representation_blocks.representation,
    mla_blocks.figure,
    seed_blocks.strength,
    seed_blocks.exponent,
    seed_blocks.lead,
    training_blocks.training,
    seed_training_blocks.exponents,
)
# those that show encodings as their protocol has them; variants and other parts' models would crowd them
_PLAIN = frozenset(
    (
        *_MAKERS[: _MAKERS.index(silence_blocks.position)],
        accuracy_blocks.sinusoid,
        seed_training_blocks.exponents,
    )
)
# what is shown only if its part is asked for: cells of other parts alone would give a part of it
_PART: dict[_Maker, str] = {
    factor_blocks.figure: "factors",
    partial_blocks.layers: "partial",
    partial_blocks.peaks: "partial",
    mla_blocks.figure: "mla",
}


def blocks(state: Reproduction) -> dict[str, Block]:
    """All figures that have anything to show, by id; only these are numbered."""
    encodings, parts = plain(state), state.plan.parts
    return numbered(
        make(encodings if make in _PLAIN else state) for make in _MAKERS if _PART.get(make, parts[0]) in parts
    )
