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
from toeplens.studies.grid.study import Evidence
from toeplens.studies.kit.claims import Claim, Test, claim_of, read_claims
from toeplens.studies.kit.results import CellResult, Figure
from toeplens.studies.kit.verdicts import Finding, above, below, difference, unknown

TASK = "language"
_GRAIN = 0.003  # bits per byte: closer agreement of models of one encoding is by chance
_KNOWN = 0.2  # of the needles
_FAR = f"{language.LONG:g} times the training length"


def _figure(words: str, of: Callable[[CellResult], float], grain: float = _GRAIN) -> Figure:
    return Figure(words, of, lambda cell: isfinite(of(cell)), "not measured, or not defined", grain)


def _gain(method: str, *, tuned: bool) -> Figure:
    """Gain of a context extension of RoPE at `language.LONG` times the length, in the same models."""

    def gain(cell: CellResult) -> float:
        without = language.extended(cell, "none", tuned=tuned)
        return without - language.extended(cell, method, tuned=tuned)

    after = " after tuning both" if tuned else ""
    return _figure(f"decrease of bits per byte by {method} at {_FAR}{after}, ", gain)


def _loss(method: str, *, tuned: bool) -> Figure:
    """Loss of an extended model at `language.LONG` times the length, compared with one training length."""

    def loss(cell: CellResult) -> float:
        return language.extended(cell, method, tuned=tuned) - language.extended(cell, "none", 1.0, tuned=tuned)

    after = " after tuning" if tuned else ""
    words = f"increase of bits per byte with {method} at {_FAR}{after} compared with one training length, "
    return _figure(words, loss)


def _kinds(kind: str, share: str) -> dict[str, Figure]:
    """The positional or symbolic share of a kind of heads, in models with such heads."""
    words = f"{share} share of up to {language.TOP} heads with the most {kind} weight, "
    return {
        f"{share}-of-{kind}": _figure(words, lambda cell: language.kind_share(cell, kind, share), 0.02),
        f"lead-of-{kind}": _figure(
            "that − the other heads' share, ", lambda cell: language.kind_lead(cell, kind, share), 0.02
        ),
    }


def _deposit(layer: int | None) -> Figure:
    head = "one head" if layer is None else "one head of the first layer"
    words = f"share of {head} in the summed effects of removing position from single heads, "
    return _figure(words, lambda cell: language.deposit(cell, layer), 0.02)


def _taught(cell: CellResult) -> float:
    """Correlation of positional share and frequency over a model's heads, minus that before training."""
    return language.positional_by_frequency(cell) - language.positional_by_frequency(cell, untrained=True)


def _retrieves(data: Evidence) -> list[Finding]:
    """Test: does RoPE find fewer needles beyond the training length than within it?"""
    at = _figure("", lambda cell: language.retrieved(cell, 1.0), 0.02)
    far = _figure("", lambda cell: language.retrieved(cell, language.LONG), 0.02)
    cells = data.results.of(TASK, "rope")
    near, beyond = at.by_seed(cells), far.by_seed(cells)
    what = f"accuracy on needles, RoPE, at the training length − at {_FAR}"
    if not near or not beyond:
        return [unknown(what, "not measured", "the measure needles")]
    found = [near[seed] for seed in near]
    if sum(found) / len(found) < _KNOWN:
        return [unknown(what, f"the models find less than {_KNOWN:.0%} at the training length", "longer training")]
    left = below(f"accuracy on needles, RoPE, at {_FAR}", beyond, _KNOWN, grain=0.02)
    return [above(what, difference(near, beyond, 0.02), _KNOWN), left]


_BY_FREQUENCY = "rank correlation of positional share with frequency, "
_CHECKS: dict[str, Any] = {
    "bits": _figure("bits per byte at the training length, ", language.bits),
    "lost": _figure(f"increase of bits per byte at the end of texts of {_FAR}, ", language.lost),
    "gain-ntk": _gain("ntk", tuned=False),
    "gain-yarn": _gain("yarn", tuned=False),
    "gain-interpolation-tuned": _gain("interpolation", tuned=True),
    "loss-ntk": _loss("ntk", tuned=False),
    "loss-interpolation-tuned": _loss("interpolation", tuned=True),
    **_kinds("previous", "positional"),
    **_kinds("induction", "symbolic"),
    "by-frequency": _figure(_BY_FREQUENCY, language.positional_by_frequency, 0.05),
    "by-frequency-learned": _figure(f"{_BY_FREQUENCY}trained − untrained, ", _taught, 0.05),
    "deposit-first-layer": _deposit(0),
    "deposit": _deposit(None),
    "retrieves": _retrieves,
}
_DATA = read_claims(Path(__file__).with_name("claims.yaml"))
CLAIMS: tuple[Claim[Evidence], ...] = tuple(
    claim_of(entry, _CHECKS, _DATA["words"], partial(Test, task=TASK)) for entry in _DATA["claims"]
)
