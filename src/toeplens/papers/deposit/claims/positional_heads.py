"""Claims about trained heads: which need position, with which frequencies, and how far it carries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from toeplens.lens.ablation.deposit import counted_drops
from toeplens.papers.deposit.claims.common import (
    FINAL,
    V1,
    against,
    between,
    compare,
    has,
    mechanism,
    models,
    on_rope,
    over,
    under,
)
from toeplens.papers.deposit.looks import look_at
from toeplens.studies.grid.measured import LONGER, kept
from toeplens.studies.kit.claims import Claim, as_support, every
from toeplens.studies.kit.results import ONLY_SKILLED, CellResult, Figure, Results
from toeplens.training.presets import DISTANCE

# ---- trained heads ---------------------------------------------------------------------------------------------------


def _lost(rank: int, words: str) -> Figure:
    """What is lost by taking position from one head, the ``rank``th from the most on, as a share of the skill."""

    def of(cell: CellResult) -> float:
        found = cell.measure("position")
        drops = np.sort(counted_drops(found), axis=None)[::-1]
        return float(drops[rank] / (found.baseline - cell.length_chance)) if rank < len(drops) else 0.0

    return Figure(words, of, has("position"))


def _heads_of(measure: str, words: str, of: Callable[[int], float] = float) -> Figure:
    def number(cell: CellResult) -> float:
        return float(of(len(cell.measure(measure).sufficient)))

    return Figure(words, number, has(measure), grain=0.1)


_NEEDED = _heads_of("sets", "doublings of the heads that suffice, ", lambda count: float(np.log2(max(1, count))))
_POSITIONAL = _heads_of("position-sets", "heads that need position, ")


def _costliest(cell: CellResult) -> tuple[int, int]:
    """Layer and head; only of a model in which a head costs anything."""
    look = look_at(cell)
    assert look is not None
    layer, head = np.unravel_index(look.costs.argmax(), look.costs.shape)
    return int(layer), int(head)


def _used(words: str, of: Callable[[CellResult], float], grain: float = 0.02) -> Figure:
    return Figure(words, of, lambda cell: has("frequency")(cell) and look_at(cell) is not None, grain=grain)


def _of_costliest(words: str, of: Callable[[CellResult], float]) -> Figure:
    def counts(cell: CellResult) -> bool:
        look = look_at(cell)
        return has("frequency")(cell) and look is not None and look.matter > 0

    return Figure(words, of, counts, "no skill, no head that matters, or not measured", 0.02)


def _norm_of_used(cell: CellResult) -> float:
    """Doublings of the norm share of the pair the costliest head's logits vary by most, over an even share."""
    found, (layer, head) = cell.measure("frequency"), _costliest(cell)
    pairs = np.asarray(found.logits)[layer, head, 1:-1]
    norms = np.asarray(found.norms)[layer, head, 1:]
    if not np.isfinite(pairs).any():
        return float("nan")
    with np.errstate(divide="ignore"):
        return float(np.log2(norms[np.nanargmax(pairs)] * len(norms)))


def _massive(cell: CellResult) -> float:
    """Doublings of what the largest dimension of the costliest head has of its energy, over an even share."""
    found, (layer, head) = cell.measure("frequency"), _costliest(cell)
    largest = np.asarray(found.massive)[:, layer, head].max()
    return float(np.log2(largest * 2 * (np.asarray(found.norms).shape[-1] - 1)))


def _breadth(layers: slice) -> Callable[[CellResult], float]:
    """Mean over heads: the effective number of pairs that the logits vary by, as a share of all pairs."""

    def of(cell: CellResult) -> float:
        shares = np.clip(np.asarray(cell.measure("frequency").logits)[layers, :, 1:-1], 0, None)
        total, squares = shares.sum(-1), np.square(shares).sum(-1)
        with np.errstate(invalid="ignore", divide="ignore"):
            effective = total**2 / squares / shares.shape[-1]
        return float(np.nanmean(effective)) if np.isfinite(effective).any() else float("nan")

    return of


_FIRST_BREADTH = _used("share of the frequencies that the first layer's heads use, ", _breadth(slice(0, 1)))
_GROWTH = _used(
    "the same in the later layers less the first, ",
    lambda cell: _breadth(slice(1, None))(cell) - _breadth(slice(0, 1))(cell),
)


_KEPT = Figure(f"share of the skill kept at {LONGER:g} times the length, ", kept, has("extrapolation"))


CLAIMS: tuple[Claim[Results], ...] = (
    mechanism(
        "one-head-knows-position",
        f"{V1}, App. D",
        "Once one head of RoPE has position, the others no longer capture it.",
        "The rotation is taken from one head at a time: the largest loss over a quarter of the skill, without which "
        "position is spread or kept in several heads, and the second largest of the whole model under a tenth, which "
        "does not affect the whole. Supporting: left to one head alone (between 0.5 and 1.5 in the "
        "mean), rotation keeps 90% of the skill, all but that tenth. "
        f"{ONLY_SKILLED}",
        on_rope(
            lambda rope: every(
                models(
                    rope,
                    (_lost(0, "largest loss by taking position from one head, "), over(0.25)),
                    (_lost(1, "second largest, "), under(0.1)),
                ),
                as_support(models(rope, (_POSITIONAL, between(0.5, 1.5)))),
            )
        ),
    ),
    mechanism(
        "rope-needs-fewer-heads",
        f"{V1}, App. D",
        "Much fewer parameters answer to position under RoPE than under relative encoding or none.",
        "Size of a set of heads that keeps 90% of the skill when all others are silenced, in doublings: RoPE less "
        "NoPE and less relative below -1, each: half as many are much fewer. Heads that work on content are among "
        f"them, under every encoding, as position cannot be taken from NoPE. {ONLY_SKILLED}",
        on_rope(lambda rope: compare(DISTANCE, against(rope, "nope", "relative"), _NEEDED, under(-1.0))),
    ),
    mechanism(
        "two-heads-do-it",
        f"{FINAL}: key findings",
        "RoPE needs one or two heads for all positional reasoning; the rest are redundant.",
        "Size of a set of RoPE's heads whose rotation keeps 90% of the skill when all others' is stopped: between "
        f"0.5, for who needs none is no case of it, and 2.5, so that two are nearer than three. The others keep their "
        f"content. {ONLY_SKILLED}",
        on_rope(lambda rope: models(rope, (_POSITIONAL, between(0.5, 2.5)))),
    ),
    mechanism(
        "significant-angle-massive",
        f"{V1}, B.2",
        "RoPE needs one significant angle, which corresponds to massive values.",
        "In RoPE's costliest head: the pair of dimensions that its logits vary by most has more than twice an even "
        "share of the norms (the least that anybody would call more than its share). Supporting: its largest dimension "
        "has more than four times an even share of the energy of queries or keys (twice of the norm is four times of "
        f"the energy). {ONLY_SKILLED}",
        on_rope(
            lambda rope: every(
                models(
                    rope,
                    (
                        _of_costliest("doublings of the most used pair's norm over an even share, ", _norm_of_used),
                        over(1.0),
                    ),
                ),
                as_support(
                    models(rope, (_of_costliest("doublings of the largest dimension's energy, ", _massive), over(2.0)))
                ),
            )
        ),
    ),
    mechanism(
        "few-bands-trained",
        f"{V1}, App. D",
        "Only some frequency bands are fully trained, and their influence spreads to most bands in deep layers.",
        "RoPE: the heads of the first layer use less than half of the frequencies (effective number by the variance "
        "of the logits, mean over heads), or they would be most; those of later layers use more, by over a tenth of "
        f"all, less than which spreads to none. {ONLY_SKILLED}",
        on_rope(lambda rope: models(rope, (_FIRST_BREADTH, under(0.5)), (_GROWTH, over(0.1)))),
    ),
    mechanism(
        "rope-loses-length",
        f"{V1}, App. D and 5.2",
        "RoPE's length generalisation is drastically affected: it falls short of what it was designed for.",
        f"Share of RoPE's skill kept on texts of {LONGER:g} times the training length under a half: what "
        f"keeps most of its skill is not drastically affected. {ONLY_SKILLED}",
        on_rope(lambda rope: models(rope, (_KEPT, under(0.5)))),
    ),
    mechanism(
        "mla-keeps-length",
        f"{V1}, 5.2",
        "MLA, by diffusing positional responsibility, points toward a remedy for length generalisation.",
        f"Share of the skill kept on texts of {LONGER:g} times the training length, MLA less RoPE: over 0.05, less "
        f"than which is no remedy. {ONLY_SKILLED}",
        on_rope(lambda rope: compare(DISTANCE, [("mla", rope)], _KEPT, over(0.05))),
    ),
)
