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
from toeplens.lens.ablation import significant_drops
from toeplens.lens.kit.intervals import spearman
from toeplens.papers.deposit.claims.checks import (
    FIRST_LAYER,
    FULL_ROPE,
    LATER_LAYERS,
    ProtocolTest,
    is_released,
    label_of,
)
from toeplens.papers.deposit.measures import head_costs
from toeplens.papers.deposit.spec import EncodingLabel, title
from toeplens.studies.grid.measures import LONGER_FACTOR, skill_retained
from toeplens.studies.kit.results import CellResult, ModelValue, Results
from toeplens.studies.kit.verdicts import GRAIN, LEVEL, MIN_SEEDS, Finding, Verdict, unknown_finding
from toeplens.training.presets import DISTANCE
from toeplens.utils.formatting import plural

_EXACT = 1e-5  # grain of figures without measurement error
_MIN_ENCODINGS = 5  # minimum number of encodings for a rank correlation
_THRESHOLD, _PERMUTATIONS = 0.5, 9999
_UNKNOWN = "no skill, or not measured"


def _figure(
    measure: str,
    words: str,
    value_of: Callable[[CellResult], float],
    is_defined: Callable[[CellResult], bool] = lambda cell: True,
    missing_reason: str = _UNKNOWN,
    grain: float = GRAIN,
) -> ModelValue:
    """A value of models with skill, an ablation and a measure that also satisfy ``is_defined``."""

    def is_known(cell: CellResult) -> bool:
        return cell.measure(measure) is not None and cell.ablation is not None and cell.is_skilled and is_defined(cell)

    return ModelValue(words, value_of, is_known, missing_reason, grain)


def _mean(values: np.ndarray) -> float:
    """The mean of the defined values; NaN without any."""
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def _has_gradients(cell: CellResult) -> bool:
    return cell.measure("seed") is not None


def _fixed_share(results: Results, level: str, **options: Any) -> list[Finding]:
    """Test of the share of the first layer's positional gradient that is the same in every example."""

    def value(cell: CellResult) -> float:
        record = cell.measure("seed").strength.levels[level]
        if level == "logits":
            return float(np.asarray(record.layers.share)[0])
        return _mean(np.asarray(record.heads.share[0], dtype=float))

    words = f"fixed share of the positional gradient at the {level}, "
    return ProtocolTest(ModelValue(words, value, _has_gradients, grain=_EXACT), **options)(results)


def _signal(cell: CellResult) -> np.ndarray:
    """Signal of the heads at initialisation, [L, H]."""
    return cell.measure("seed").strength.levels["logits"].signal


def _amplification(results: Results) -> list[Finding]:
    """Gamma of every layer, before and after training."""
    rope, findings = label_of(results, FULL_ROPE), []
    trained = (
        lambda cell: np.asarray(cell.probe_rows[-1]["signal"], dtype=float),
        lambda cell: bool(cell.probe_rows) and "signal" in cell.probe_rows[-1] and cell.status != "diverged",
    )
    for when, signal, counts in (("at initialisation", _signal, _has_gradients), ("after training", *trained)):
        steps = max((len(signal(cell)) - 1 for cell in results.cells_of(DISTANCE, rope) if counts(cell)), default=1)
        if not steps:
            return [unknown_finding(title(rope), "the model has one layer", "a model with at least two layers")]
        for step in range(steps):
            words = f"{when}, log2 growth of the best head's lead from layer {step + 2} to layer {step + 1}, "
            figure = ModelValue(
                words,
                lambda cell, signal=signal, step=step: float(np.log2(margins(signal(cell)).gamma[step])),
                counts,
                grain=0.01,
            )
            findings += ProtocolTest(figure, rope, above=0.0)(results)
    return findings


def _effects(cell: CellResult) -> Any:
    """[L, H] ablation effects; None without."""
    costs = head_costs(cell)
    return None if costs is None else costs.effects


def _has_leader(cell: CellResult) -> bool:
    """Whether exactly one of several first-layer heads has the largest signal at initialisation."""
    first = _signal(cell)[0]
    return len(first) > 1 and bool(np.isfinite(first).all()) and int((first == first.max()).sum()) == 1


def _first_layer_figure(words: str, value_of: Callable[[np.ndarray, np.ndarray], float]) -> ModelValue:
    """A figure of the first layer's heads, from their signal at initialisation and their final ablation effect."""

    def counts(cell: CellResult) -> bool:
        effects = _effects(cell)
        return effects is not None and bool(effects[0].any()) and _has_leader(cell)

    without = "no first-layer head has an effect or leads, or not measured"
    return _figure("seed", words, lambda cell: value_of(_signal(cell)[0], _effects(cell)[0]), counts, without, 0.02)


def _position_drops(cell: CellResult) -> np.ndarray:
    """[L, H] accuracy drop from removing position from each head."""
    return significant_drops(cell.measure("position"))


def _has_position_drops(cell: CellResult) -> bool:
    """Whether one head leads, and the drops from removing position sum to at least 0.1 of the skill."""
    record = cell.measure("position")
    enough = record is not None and _position_drops(cell).sum() >= 0.1 * (record.baseline - cell.length_chance)
    return enough and _has_leader(cell)


def _leader_rank(signal: np.ndarray, effects: np.ndarray) -> float:
    """The share of the other heads with a smaller effect than the initial leader; ties count half."""
    others = np.delete(effects, signal.argmax())
    leader = effects[signal.argmax()]
    return float((others < leader).mean() + (others == leader).mean() / 2)


def _stream_figure(words: str, value_of: Callable[[Any], float]) -> ModelValue:
    def is_deep(cell: CellResult) -> bool:
        record = cell.measure("representation")
        return record is not None and len(record.alignment) > 2

    return ModelValue(
        words, lambda cell: float(value_of(cell.measure("representation"))), is_deep, "no layer after layer 2", 0.005
    )


_DECODABLE = _stream_figure(
    "mean R2 of decoding position from the stream after layer 2 and later, ",
    lambda record: np.mean(record.decodability[2:]),
)


def _implicit(results: Results) -> list[Finding]:
    if is_released(results):
        return [unknown_finding("NoPE", "cannot see order in the released code", "the paper protocol")]
    return ProtocolTest(_DECODABLE, "rope", "nope", below=-0.1)(results)


def _through_mask(results: Results) -> list[Finding]:
    """The switch takes the other protocol's mask, so the causal model is on either side, by protocol."""
    pair = ("nope/mask", "nope") if is_released(results) else ("nope", "nope/mask")
    return ProtocolTest(ModelValue("skill of ", lambda cell: cell.skill), *pair, above=0.1)(results)


def _position_effect(rank: int, words: str) -> ModelValue:
    """The ``rank``-th largest effect (from 0) of removing position from one head, as a share of the skill."""

    def value(cell: CellResult) -> float:
        drops = np.sort(_position_drops(cell), axis=None)[::-1]
        skill = cell.measure("position").baseline - cell.length_chance
        return float(drops[rank] / skill) if rank < len(drops) else 0.0

    return _figure("position", words, value)


def _top_head(cell: CellResult) -> tuple[int, int]:
    """Layer and head with the largest effect; the model must have a head with an effect."""
    layer, head = np.unravel_index(_effects(cell).argmax(), _effects(cell).shape)
    return int(layer), int(head)


def _top_head_figure(words: str, value_of: Callable[[CellResult], float]) -> ModelValue:
    def counts(cell: CellResult) -> bool:
        effects = _effects(cell)
        return effects is not None and bool(effects.any())

    return _figure("frequency", words, value_of, counts, "no skill, no head with an effect, or not measured", 0.02)


def _norm_of_used(cell: CellResult) -> float:
    """log2 of the norm share of the pair that the most important head's logits depend on most, over an even share."""
    record, (layer, head) = cell.measure("frequency"), _top_head(cell)
    pairs = np.asarray(record.logits)[layer, head, 1:-1]
    norms = np.asarray(record.norms)[layer, head, 1:]
    if not np.isfinite(pairs).any():
        return float("nan")
    with np.errstate(divide="ignore"):
        return float(np.log2(norms[np.nanargmax(pairs)] * len(norms)))


def _massive_share(cell: CellResult) -> float:
    """log2 of the energy share of the most important head's largest dimension, over an even share."""
    record, (layer, head) = cell.measure("frequency"), _top_head(cell)
    largest = np.asarray(record.massive)[:, layer, head].max()
    return float(np.log2(largest * 2 * (np.asarray(record.norms).shape[-1] - 1)))


def _breadth(cell: CellResult, layers: slice) -> float:
    """Mean over heads of the effective number of pairs that the logits depend on, as a share of all pairs."""
    shares = np.clip(np.asarray(cell.measure("frequency").logits)[layers, :, 1:-1], 0, None)
    total, squares = shares.sum(-1), np.square(shares).sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        effective = total**2 / squares / shares.shape[-1]
    return _mean(effective)


_frequency_figure = partial(_figure, "frequency", is_defined=lambda cell: head_costs(cell) is not None, grain=0.02)


def _width(cell: CellResult) -> float:
    return _mean(np.log2(cell.measure("contraction").width[0]))


def _correlates(
    text: str, value_of: Callable[[CellResult], float], is_defined: Callable[[CellResult], bool], reason: str, sign: int
) -> Callable[[Results], list[Finding]]:
    """Is an encoding's value rank-correlated (with this sign) with its first layer's spectral range?

    The units are encodings, each with its mean over seeds, as seeds of one encoding are not independent encodings.
    """

    def check(results: Results) -> list[Finding]:
        labels = [label for label in results.labels(DISTANCE) if EncodingLabel.parse(label).is_plain]
        plain = [results.cells_of(DISTANCE, label) for label in labels]
        measured = ([c for c in cells if c.measure("contraction") is not None and is_defined(c)] for cells in plain)
        pairs_by_encoding = [[(_width(cell), value_of(cell)) for cell in cells] for cells in measured]
        known = [[pair for pair in pairs if not np.isnan(pair).any()] for pairs in pairs_by_encoding]
        count, num_known = (sum(map(len, group)) for group in (plain, known))
        points = [np.mean(pairs, axis=0) for pairs in known if pairs]
        quantity = f"over {len(points)} encodings, rank correlation of the first layer's spectral range with {text}"
        if num_known < count:
            quantity += f" ({count - num_known} of {count} models excluded: {reason})"
        if len(points) < _MIN_ENCODINGS:
            wanted = f"{_MIN_ENCODINGS} encodings with models that are not excluded"
            return [unknown_finding(quantity, f"fewer than {_MIN_ENCODINGS} encodings qualify", wanted)]
        return [_permutation_test(quantity, np.array(points).T, sign, min(len(pairs) for pairs in known if pairs))]

    return check


def _permutation_test(quantity: str, pairs: Float[np.ndarray, "2 E"], sign: int, seeds: int) -> Finding:
    """Permutation test: holds if the correlation exceeds chance; fails if it is below a true one of `_THRESHOLD`."""
    correlation = sign * float(spearman(pairs))
    text = f"{quantity}: {sign * correlation:.2f}"
    if np.isnan(correlation):
        return unknown_finding(quantity, "all ranks are equal")
    if seeds < MIN_SEEDS:
        side: Verdict = "leans to fail" if correlation < 0 else "undecided"
        side = "leans to hold" if correlation > _THRESHOLD else side
        return Finding(side, f"{text} ({plural(seeds, 'seed')})", missing=f"{MIN_SEEDS} seeds")
    rng = np.random.Generator(np.random.Philox(0))
    permutations = rng.permuted(np.tile(pairs[1], (_PERMUTATIONS, 1)), axis=1)
    by_chance = sign * spearman(np.stack((np.broadcast_to(pairs[0], permutations.shape), permutations)))
    holds = float((1 + (by_chance >= correlation - 1e-9).sum()) / (1 + _PERMUTATIONS))
    error = np.sqrt(1.06 / max(1, pairs.shape[1] - 3))  # of Fisher's transform of a rank correlation
    fails = float(ndtr((np.arctanh(np.clip(correlation, -0.999, 0.999)) - np.arctanh(_THRESHOLD)) / error))
    finding = Finding("undecided", text, holds, fails, missing="more encodings, not more seeds")
    return replace(finding, verdict=finding.verdict_at(LEVEL))


CHECKS: dict[str, Any] = {
    "fixed-share": _fixed_share,
    "drift": ModelValue(
        "mean positional drift of the first layer's heads, ",
        lambda cell: float(cell.measure("seed").drift.relative[0].mean()),
        _has_gradients,
        grain=_EXACT,
    ),
    "amplified": _amplification,
    "leader-share": _figure(
        "seed",
        "share of the initial leader in the summed effects of removing position, ",
        lambda cell: float((work := _position_drops(cell))[0, int(_signal(cell)[0].argmax())] / work.sum()),
        _has_position_drops,
        "no position or no leader, or not measured",
        0.02,
    ),
    "leader-rank": _first_layer_figure("share of heads with a smaller effect than the initial leader, ", _leader_rank),
    "signal-effect": _first_layer_figure(
        "rank correlation of initial signal and final effect, ",
        lambda first, last: float(spearman(np.stack((first, last)))),
    ),
    "alignment": _stream_figure(
        "after layer 2, alignment with the input's position vectors − chance, ",
        lambda record: record.alignment[2] - record.chance,
    ),
    "coefficient": _stream_figure(
        "after layer 2, coefficient on the input's position vectors, ", lambda record: record.coefficient[2]
    ),
    "least-coefficient": _stream_figure(
        "smallest coefficient on the input's position vectors after layer 2 and later, ",
        lambda x: np.min(x.coefficient[2:]),
    ),
    "implicit": _implicit,
    "through-mask": _through_mask,
    "largest-lost": _position_effect(0, "largest effect of removing position from one head, "),
    "second-lost": _position_effect(1, "second largest effect of removing position from one head, "),
    "sufficient-heads": _figure(
        "sets",
        "log2 of the number of sufficient heads, ",
        lambda cell: float(np.log2(max(1, len(cell.measure("sets").sufficient)))),
        grain=0.1,
    ),
    "positional-heads": _figure(
        "position-sets",
        "number of heads that need position, ",
        lambda cell: float(len(cell.measure("position-sets").sufficient)),
        grain=0.1,
    ),
    "norm": _top_head_figure("log2 of the most used pair's norm over an even share, ", _norm_of_used),
    "energy": _top_head_figure("log2 of the largest dimension's energy over an even share, ", _massive_share),
    "first-breadth": _frequency_figure(
        "share of the frequencies used by the first layer's heads, ", lambda cell: _breadth(cell, FIRST_LAYER)
    ),
    "growth": _frequency_figure(
        "share used in the later layers − share used in the first, ",
        lambda cell: _breadth(cell, LATER_LAYERS) - _breadth(cell, FIRST_LAYER),
    ),
    "kept-length": _figure(
        "extrapolation", f"share of the skill kept at {LONGER_FACTOR:g} times the length, ", skill_retained
    ),
    "range-with-speed": _correlates(
        "the time until half is learned",
        lambda cell: cell.half_learned if cell.has_learned_half else float("inf"),
        lambda cell: cell.has_fit_accuracy and cell.status != "diverged",
        "diverged, not measured, or accuracy on training examples not evaluated",
        1,
    ),
    "range-with-peak": _correlates(
        "the largest ablation effect of a head",
        lambda cell: float(_effects(cell).max(initial=0.0)),
        lambda cell: head_costs(cell) is not None,
        "diverged, not measured, or no skill",
        -1,
    ),
}
