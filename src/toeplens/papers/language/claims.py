"""Claims about encodings in language models, the field's and ours, judged on a grid study of the task language.

Required labels: the encodings nope, sinusoidal, t5, alibi, fire, fox, rope and p-rope, and the task language.
The rules were written before the recorded models were trained. Known then: small models trained for a minute (NoPE,
sinusoid, ALiBi, RoPE), and two RoPE models of the record's size with other seeds (7, 8), which set the sizes and the
learning rate for all encodings; for the first, also results beyond the training length. The rules of heads, needles
and tuning were made stricter after a review, before the first two recorded models (NoPE, sinusoid) were analysed.

The record was then restarted with other seeds. Four of its models (seed 300: NoPE, sinusoid, T5, ALiBi; 768 steps of
32 windows) had been analysed and were undertrained, no better than a table of three tokens. The new setting, 3,072
steps of 8 windows on the same text, was chosen on two RoPE models of seed 7. The rules did not change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from toeplens.studies.grid import language
from toeplens.studies.grid.study import ClaimData
from toeplens.studies.kit.claims import Claim, MeanTest, claim_of, read_claims
from toeplens.studies.kit.results import CellResult, ModelValue
from toeplens.studies.kit.verdicts import Finding, above, below, difference, unknown_finding

TASK = "language"
_GRAIN = 0.003  # bits per byte: closer agreement of models of one encoding is by chance
_MIN_FOUND = 0.2  # of the needles
_FAR = f"{language.LONG_FACTOR:g} times the training length"


def _figure(words: str, value_of: Callable[[CellResult], float], grain: float = _GRAIN) -> ModelValue:
    return ModelValue(words, value_of, lambda cell: isfinite(value_of(cell)), "not measured, or not defined", grain)


def _gain(method: str, *, tuned: bool) -> ModelValue:
    """Gain of a context extension of RoPE at `language.LONG_FACTOR` times the length, in the same models."""

    def gain(cell: CellResult) -> float:
        without = language.extended_bits(cell, "none", tuned=tuned)
        return without - language.extended_bits(cell, method, tuned=tuned)

    after = " after tuning both" if tuned else ""
    return _figure(f"decrease of bits per byte by {method} at {_FAR}{after}, ", gain)


def _loss(method: str, *, tuned: bool) -> ModelValue:
    """Loss of an extended model at `language.LONG_FACTOR` times the length, compared with one training length."""

    def loss(cell: CellResult) -> float:
        return language.extended_bits(cell, method, tuned=tuned) - language.extended_bits(
            cell, "none", 1.0, tuned=tuned
        )

    after = " after tuning" if tuned else ""
    words = f"increase of bits per byte with {method} at {_FAR}{after} compared with one training length, "
    return _figure(words, loss)


def _kind_figures(kind: str, share: str) -> dict[str, ModelValue]:
    """The positional or symbolic share of a kind of heads, in models with such heads."""
    words = f"{share} share of up to {language.MAX_HEADS} heads with the most {kind} weight, "
    return {
        f"{share}-of-{kind}": _figure(words, lambda cell: language.head_type_share(cell, kind, share), 0.02),
        f"lead-of-{kind}": _figure(
            "that − the other heads' share, ", lambda cell: language.head_type_lead(cell, kind, share), 0.02
        ),
    }


def _deposit_figure(layer: int | None) -> ModelValue:
    head = "one head" if layer is None else "one head of the first layer"
    words = f"share of {head} in the summed effects of removing position from single heads, "
    return _figure(words, lambda cell: language.deposit(cell, layer), 0.02)


def _learned_correlation(cell: CellResult) -> float:
    """Correlation of positional share and frequency over a model's heads, minus that before training."""
    return language.positional_by_frequency(cell) - language.positional_by_frequency(cell, untrained=True)


def _retrieves(data: ClaimData) -> list[Finding]:
    """Test: does RoPE find fewer needles beyond the training length than within it?"""
    near_figure = _figure("", lambda cell: language.needle_accuracy(cell, 1.0), 0.02)
    far_figure = _figure("", lambda cell: language.needle_accuracy(cell, language.LONG_FACTOR), 0.02)
    cells = data.results.cells_of(TASK, "rope")
    near, beyond = near_figure.by_seed(cells), far_figure.by_seed(cells)
    quantity = f"accuracy on needles, RoPE, at the training length − at {_FAR}"
    if not near or not beyond:
        return [unknown_finding(quantity, "not measured", "the measure needles")]
    values = [near[seed] for seed in near]
    if sum(values) / len(values) < _MIN_FOUND:
        reason = f"the models find less than {_MIN_FOUND:.0%} at the training length"
        return [unknown_finding(quantity, reason, "longer training")]
    remaining = below(f"accuracy on needles, RoPE, at {_FAR}", beyond, _MIN_FOUND, grain=0.02)
    return [above(quantity, difference(near, beyond, 0.02), _MIN_FOUND), remaining]


_BY_FREQUENCY = "rank correlation of positional share with frequency, "
_CHECKS: dict[str, Any] = {
    "bits": _figure("bits per byte at the training length, ", language.bits_per_byte),
    "lost": _figure(f"increase of bits per byte at the end of texts of {_FAR}, ", language.bits_increase),
    "gain-ntk": _gain("ntk", tuned=False),
    "gain-yarn": _gain("yarn", tuned=False),
    "gain-interpolation-tuned": _gain("interpolation", tuned=True),
    "loss-ntk": _loss("ntk", tuned=False),
    "loss-interpolation-tuned": _loss("interpolation", tuned=True),
    **_kind_figures("previous", "positional"),
    **_kind_figures("induction", "symbolic"),
    "by-frequency": _figure(_BY_FREQUENCY, language.positional_by_frequency, 0.05),
    "by-frequency-learned": _figure(f"{_BY_FREQUENCY}trained − untrained, ", _learned_correlation, 0.05),
    "deposit-first-layer": _deposit_figure(0),
    "deposit": _deposit_figure(None),
    "retrieves": _retrieves,
}
_DATA = read_claims(Path(__file__).with_name("claims.yaml"))
CLAIMS: tuple[Claim[ClaimData], ...] = tuple(
    claim_of(entry, _CHECKS, _DATA["words"], partial(MeanTest, task=TASK)) for entry in _DATA["claims"]
)
