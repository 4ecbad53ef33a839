"""Figures and checks of the origin of the deposit: gradients, margins, directions, heads that need position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr

from toeplens.lens import margins
from toeplens.lens.ablation import counted_drops
from toeplens.lens.kit.intervals import spearman
from toeplens.papers.deposit.claims.checks import FIRST_LAYER, FULL, LATER_LAYERS, WORDS, Test, is_released, label_of
from toeplens.papers.deposit.measured import look_at
from toeplens.papers.deposit.spec import Label, title
from toeplens.studies.grid.measured import LONGER, kept
from toeplens.studies.kit.results import CellResult, Figure, Results
from toeplens.studies.kit.verdicts import ENOUGH, GRAIN, LEVEL, Finding, Verdict, unknown
from toeplens.training.presets import DISTANCE

_EXACT = 1e-5  # grain of figures without measurement error
_FEWEST = 5  # minimum number of encodings for a rank correlation
_BAR, _ORDERS = 0.5, 9999
_UNKNOWN = "no skill, or not measured"


def _figure(
    measure: str,
    words: str,
    of: Callable[[CellResult], float],
    counts: Callable[[CellResult], bool] = lambda cell: True,
    without: str = _UNKNOWN,
    grain: float = GRAIN,
) -> Figure:
    """A value of models with skill, an ablation and a measure that also satisfy ``counts``."""

    def known(cell: CellResult) -> bool:
        return cell.measure(measure) is not None and cell.ablation is not None and cell.skilled and counts(cell)

    return Figure(words, of, known, without, grain)


def _mean(values: np.ndarray) -> float:
    """The mean of the defined values; NaN without any."""
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def _seeded(cell: CellResult) -> bool:
    return cell.measure("seed") is not None


def _fixed_share(results: Results, level: str, **options: Any) -> list[Finding]:
    """Test of the share of the first layer's positional gradient that is the same in every example."""

    def of(cell: CellResult) -> float:
        measured = cell.measure("seed").strength.levels[level]
        if level == "logits":
            return float(np.asarray(measured.layers.share)[0])
        return _mean(np.asarray(measured.heads.share[0], dtype=float))

    words = f"fixed share of the positional gradient at the {level}, "
    return Test(Figure(words, of, _seeded, grain=_EXACT), **options)(results)


def _signal(cell: CellResult) -> np.ndarray:
    """Signal of the heads at initialisation, [L, H]."""
    return cell.measure("seed").strength.levels["logits"].signal


def _amplified(results: Results) -> list[Finding]:
    """Gamma of every layer, before and after training."""
    rope, findings = label_of(results, FULL), []
    trained = (
        lambda cell: np.asarray(cell.watched[-1]["signal"], dtype=float),
        lambda cell: bool(cell.watched) and "signal" in cell.watched[-1] and cell.status != "diverged",
    )
    for when, signal, counts in (("at initialisation", _signal, _seeded), ("after training", *trained)):
        steps = max((len(signal(cell)) - 1 for cell in results.of(DISTANCE, rope) if counts(cell)), default=1)
        if not steps:
            return [unknown(title(rope), "the model has one layer", "a model with at least two layers")]
        for step in range(steps):
            words = f"{when}, log2 growth of the best head's lead from layer {step + 2} to layer {step + 1}, "
            figure = Figure(
                words,
                lambda cell, signal=signal, step=step: float(np.log2(margins(signal(cell)).gamma[step])),
                counts,
                grain=0.01,
            )
            findings += Test(figure, rope, above=0.0)(results)
    return findings


def _costs(cell: CellResult) -> Any:
    """[L, H] ablation effects; None without."""
    look = look_at(cell)
    return None if look is None else look.costs


def _led(cell: CellResult) -> bool:
    """Whether exactly one of several first-layer heads has the largest signal at initialisation."""
    first = _signal(cell)[0]
    return len(first) > 1 and bool(np.isfinite(first).all()) and int((first == first.max()).sum()) == 1


def _early(words: str, of: Callable[[np.ndarray, np.ndarray], float]) -> Figure:
    """A figure of the first layer's heads, from their signal at initialisation and their final ablation effect."""

    def counts(cell: CellResult) -> bool:
        costs = _costs(cell)
        return costs is not None and bool(costs[0].any()) and _led(cell)

    without = "no first-layer head has an effect or leads, or not measured"
    return _figure("seed", words, lambda cell: of(_signal(cell)[0], _costs(cell)[0]), counts, without, 0.02)


def _work(cell: CellResult) -> np.ndarray:
    """[L, H] accuracy drop from removing position from each head."""
    return counted_drops(cell.measure("position"))


def _works(cell: CellResult) -> bool:
    """Whether one head leads, and the drops from removing position sum to at least 0.1 of the skill."""
    found = cell.measure("position")
    return found is not None and _work(cell).sum() >= 0.1 * (found.baseline - cell.length_chance) and _led(cell)


def _standing(signal: np.ndarray, costs: np.ndarray) -> float:
    """The share of the other heads with a smaller effect than the initial leader; ties count half."""
    others = np.delete(costs, signal.argmax())
    leader = costs[signal.argmax()]
    return float((others < leader).mean() + (others == leader).mean() / 2)


def _stream(words: str, of: Callable[[Any], float]) -> Figure:
    def deep(cell: CellResult) -> bool:
        found = cell.measure("representation")
        return found is not None and len(found.alignment) > 2

    return Figure(words, lambda cell: float(of(cell.measure("representation"))), deep, "no layer after layer 2", 0.005)


_DECODABLE = _stream(
    "mean R2 of decoding position from the stream after layer 2 and later, ",
    lambda found: np.mean(found.decodability[2:]),
)


def _implicit(results: Results) -> list[Finding]:
    if is_released(results):
        return [unknown("NoPE", "cannot see order in the released code", "the paper protocol")]
    return Test(_DECODABLE, "rope", "nope", below=-0.1)(results)


def _through_mask(results: Results) -> list[Finding]:
    """The switch takes the other protocol's mask, so the causal model is on either side, by protocol."""
    pair = ("nope/mask", "nope") if is_released(results) else ("nope", "nope/mask")
    return Test(Figure("skill of ", lambda cell: cell.skill), *pair, above=0.1)(results)


def _lost(rank: int, words: str) -> Figure:
    """The ``rank``-th largest effect (from 0) of removing position from one head, as a share of the skill."""

    def of(cell: CellResult) -> float:
        drops = np.sort(_work(cell), axis=None)[::-1]
        skill = cell.measure("position").baseline - cell.length_chance
        return float(drops[rank] / skill) if rank < len(drops) else 0.0

    return _figure("position", words, of)


def _costliest(cell: CellResult) -> tuple[int, int]:
    """Layer and head with the largest effect; the model must have a head with an effect."""
    layer, head = np.unravel_index(_costs(cell).argmax(), _costs(cell).shape)
    return int(layer), int(head)


def _of_costliest(words: str, of: Callable[[CellResult], float]) -> Figure:
    def counts(cell: CellResult) -> bool:
        costs = _costs(cell)
        return costs is not None and bool(costs.any())

    return _figure("frequency", words, of, counts, "no skill, no head with an effect, or not measured", 0.02)


def _norm_of_used(cell: CellResult) -> float:
    """log2 of the norm share of the pair that the most important head's logits depend on most, over an even share."""
    found, (layer, head) = cell.measure("frequency"), _costliest(cell)
    pairs = np.asarray(found.logits)[layer, head, 1:-1]
    norms = np.asarray(found.norms)[layer, head, 1:]
    if not np.isfinite(pairs).any():
        return float("nan")
    with np.errstate(divide="ignore"):
        return float(np.log2(norms[np.nanargmax(pairs)] * len(norms)))


def _massive(cell: CellResult) -> float:
    """log2 of the energy share of the most important head's largest dimension, over an even share."""
    found, (layer, head) = cell.measure("frequency"), _costliest(cell)
    largest = np.asarray(found.massive)[:, layer, head].max()
    return float(np.log2(largest * 2 * (np.asarray(found.norms).shape[-1] - 1)))


def _breadth(cell: CellResult, layers: slice) -> float:
    """Mean over heads of the effective number of pairs that the logits depend on, as a share of all pairs."""
    shares = np.clip(np.asarray(cell.measure("frequency").logits)[layers, :, 1:-1], 0, None)
    total, squares = shares.sum(-1), np.square(shares).sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        effective = total**2 / squares / shares.shape[-1]
    return _mean(effective)


_used = partial(_figure, "frequency", counts=lambda cell: look_at(cell) is not None, grain=0.02)


def _width(cell: CellResult) -> float:
    return _mean(np.log2(cell.measure("contraction").width[0]))


def _goes_with(
    words: str, of: Callable[[CellResult], float], counts: Callable[[CellResult], bool], without: str, sign: int
) -> Callable[[Results], list[Finding]]:
    """Is an encoding's value rank-correlated (with this sign) with its first layer's spectral range?

    The units are encodings, each with its mean over seeds, as seeds of one encoding are not independent encodings.
    """

    def check(results: Results) -> list[Finding]:
        plain = [results.of(DISTANCE, label) for label in results.labels(DISTANCE) if Label.parse(label).plain]
        seen = [
            [(_width(cell), of(cell)) for cell in cells if cell.measure("contraction") is not None and counts(cell)]
            for cells in plain
        ]
        known = [[pair for pair in pairs if not np.isnan(pair).any()] for pairs in seen]
        count, there = (sum(map(len, each)) for each in (plain, known))
        points = [np.mean(pairs, axis=0) for pairs in known if pairs]
        what = f"over {len(points)} encodings, rank correlation of the first layer's spectral range with {words}"
        if there < count:
            what += f" ({count - there} of {count} models excluded: {without})"
        if len(points) < _FEWEST:
            wanted = f"{_FEWEST} encodings with models that are not excluded"
            return [unknown(what, f"fewer than {_FEWEST} encodings qualify", wanted)]
        return [_judged(what, np.array(points).T, sign, min(len(pairs) for pairs in known if pairs))]

    return check


def _judged(what: str, pairs: Float[np.ndarray, "2 E"], sign: int, seeds: int) -> Finding:
    """Permutation test: holds if the correlation exceeds chance; fails if it is below a true one of `_BAR`."""
    found = sign * float(spearman(pairs))
    text = f"{what}: {sign * found:.2f}"
    if np.isnan(found):
        return unknown(what, "all ranks are equal")
    if seeds < ENOUGH:
        side: Verdict = "leans to hold" if found > _BAR else "leans to fail" if found < 0 else "undecided"
        return Finding(side, f"{text} ({seeds} seed{'s' if seeds > 1 else ''})", wanting=f"{ENOUGH} seeds")
    rng = np.random.Generator(np.random.Philox(0))
    orders = rng.permuted(np.tile(pairs[1], (_ORDERS, 1)), axis=1)
    by_chance = sign * spearman(np.stack((np.broadcast_to(pairs[0], orders.shape), orders)))
    holds = float((1 + (by_chance >= found - 1e-9).sum()) / (1 + _ORDERS))
    error = np.sqrt(1.06 / max(1, pairs.shape[1] - 3))  # of Fisher's transform of a rank correlation
    fails = float(ndtr((np.arctanh(np.clip(found, -0.999, 0.999)) - np.arctanh(_BAR)) / error))
    finding = Finding("undecided", text, holds, fails, wanting="more encodings, not more seeds")
    return replace(finding, verdict=finding.at(LEVEL))


KNOWN: dict[str, Any] = {
    "fixed-share": _fixed_share,
    "drift": Figure(
        WORDS["drift"], lambda cell: float(cell.measure("seed").drift.relative[0].mean()), _seeded, grain=_EXACT
    ),
    "amplified": _amplified,
    "leader-share": _figure(
        "seed",
        WORDS["leader-share"],
        lambda cell: float((work := _work(cell))[0, int(_signal(cell)[0].argmax())] / work.sum()),
        _works,
        "no position or no leader, or not measured",
        0.02,
    ),
    "leader-rank": _early(WORDS["leader-rank"], _standing),
    "signal-effect": _early(WORDS["signal-effect"], lambda first, last: float(spearman(np.stack((first, last))))),
    "alignment": _stream(WORDS["alignment"], lambda found: found.alignment[2] - found.chance),
    "coefficient": _stream(WORDS["coefficient"], lambda found: found.coefficient[2]),
    "least-coefficient": _stream(WORDS["least-coefficient"], lambda found: np.min(found.coefficient[2:])),
    "implicit": _implicit,
    "through-mask": _through_mask,
    "largest-lost": _lost(0, WORDS["largest-lost"]),
    "second-lost": _lost(1, WORDS["second-lost"]),
    "sufficient-heads": _figure(
        "sets",
        WORDS["sufficient-heads"],
        lambda cell: float(np.log2(max(1, len(cell.measure("sets").sufficient)))),
        grain=0.1,
    ),
    "positional-heads": _figure(
        "position-sets",
        WORDS["positional-heads"],
        lambda cell: float(len(cell.measure("position-sets").sufficient)),
        grain=0.1,
    ),
    "norm": _of_costliest(WORDS["norm"], _norm_of_used),
    "energy": _of_costliest(WORDS["energy"], _massive),
    "first-breadth": _used(WORDS["first-breadth"], lambda cell: _breadth(cell, FIRST_LAYER)),
    "growth": _used(WORDS["growth"], lambda cell: _breadth(cell, LATER_LAYERS) - _breadth(cell, FIRST_LAYER)),
    "kept-length": _figure("extrapolation", f"share of the skill kept at {LONGER:g} times the length, ", kept),
    "range-with-speed": _goes_with(
        WORDS["range-with-speed"],
        lambda cell: cell.half_learned if cell.learned_half else float("inf"),
        lambda cell: cell.looked_back and cell.status != "diverged",
        "diverged, not measured, or accuracy on training examples not evaluated",
        1,
    ),
    "range-with-peak": _goes_with(
        WORDS["range-with-peak"],
        lambda cell: float(_costs(cell).max(initial=0.0)),
        lambda cell: look_at(cell) is not None,
        "diverged, not measured, or no skill",
        -1,
    ),
}
