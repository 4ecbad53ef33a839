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

from toeplens.studies.grid import language
from toeplens.studies.grid.study import Evidence
from toeplens.studies.kit.claims import Claim, Test
from toeplens.studies.kit.results import CellResult, Figure
from toeplens.studies.kit.verdicts import Finding, above, below, difference, supporting, unknown

TASK = "language"
NOPE, SINUSOID, T5, ALIBI, ROPE = "nope", "sinusoidal", "t5", "alibi", "rope"
_GRAIN = 0.003  # bits per byte: closer agreement of models of one encoding is by chance
_LITTLE, _MUCH = 0.01, 0.05
_WHY_LITTLE = (
    f"{_LITTLE:g} bits per byte is about half a percent of such models' loss, the smallest difference that matters for "
    f"choosing an encoding"
)
_WHY_MUCH = f"{_MUCH:g} bits per byte is five times the smallest difference that matters"
_ONE_RECIPE = "All encodings use one recipe, whose learning rate was tuned on RoPE."
_HALF, _LEAD = 0.5, 0.1  # of a share: the majority; more than chance
_KNOWN = 0.2
_FAR = f"{language.LONG:g} times the training length"
_BY_FREQUENCY = "rank correlation of positional share with frequency, "
_test, _bits = partial(Test, task=TASK), partial(Test, task=TASK, unit=" bits per byte")


def _figure(words: str, of: Callable[[CellResult], float], grain: float = _GRAIN) -> Figure:
    return Figure(words, of, lambda cell: isfinite(of(cell)), "not measured, or not defined", grain)


_BITS = _figure("bits per byte at the training length, ", language.bits)
_LOST = _figure(f"increase of bits per byte at the end of texts of {_FAR}, ", language.lost)


def _method(method: str, *, tuned: bool) -> Test:
    """Gain of a context extension of RoPE at `language.LONG` times the length, in the same models."""

    def gain(cell: CellResult) -> float:
        without = language.extended(cell, "none", tuned=tuned)
        return without - language.extended(cell, method, tuned=tuned)

    after = " after tuning both" if tuned else ""
    return _bits(_figure(f"decrease of bits per byte by {method} at {_FAR}{after}, ", gain), ROPE, above=_LITTLE)


def _longer(method: str, *, tuned: bool) -> Test:
    """Loss of an extended model at `language.LONG` times the length, compared with one training length."""

    def loss(cell: CellResult) -> float:
        return language.extended(cell, method, tuned=tuned) - language.extended(cell, "none", 1.0, tuned=tuned)

    after = " after tuning" if tuned else ""
    words = f"increase of bits per byte with {method} at {_FAR}{after} compared with one training length, "
    return _bits(_figure(words, loss), ROPE, below=_LITTLE)


def _kinds(kind: str, share: str) -> list[Test]:
    """Tests of the positional or symbolic share of a kind of heads, in RoPE's models with such heads."""
    words = f"{share} share of up to {language.TOP} heads with the most {kind} weight, "
    own = _figure(words, lambda cell: language.kind_share(cell, kind, share), 0.02)
    lead = _figure("that − the other heads' share, ", lambda cell: language.kind_lead(cell, kind, share), 0.02)
    return [_test(own, ROPE, above=_HALF), supporting(_test(lead, ROPE, above=_LEAD))]


def _deposit(layer: int | None) -> Test:
    head = "one head" if layer is None else "one head of the first layer"
    words = f"share of {head} in the summed effects of removing position from single heads, "
    return _test(_figure(words, lambda cell: language.deposit(cell, layer), 0.02), ROPE, above=_HALF)


def _taught(cell: CellResult) -> float:
    """Correlation of positional share and frequency over a model's heads, minus that before training."""
    return language.positional_by_frequency(cell) - language.positional_by_frequency(cell, untrained=True)


_TAUGHT = _figure(f"{_BY_FREQUENCY}trained − untrained, ", _taught, 0.05)
_ORDER = _figure(_BY_FREQUENCY, language.positional_by_frequency, 0.05)


def _retrieves(data: Evidence) -> list[Finding]:
    """Test: does RoPE find fewer needles beyond the training length than within it?"""
    at = _figure("", lambda cell: language.retrieved(cell, 1.0), 0.02)
    far = _figure("", lambda cell: language.retrieved(cell, language.LONG), 0.02)
    cells = data.results.of(TASK, ROPE)
    near, beyond = at.by_seed(cells), far.by_seed(cells)
    what = f"accuracy on needles, RoPE, at the training length − at {_FAR}"
    if not near or not beyond:
        return [unknown(what, "not measured", "the measure needles")]
    found = [near[seed] for seed in near]
    if sum(found) / len(found) < _KNOWN:
        return [unknown(what, f"the models find less than {_KNOWN:.0%} at the training length", "longer training")]
    left = below(f"accuracy on needles, RoPE, at {_FAR}", beyond, _KNOWN, grain=0.02)
    return [above(what, difference(near, beyond, 0.02), _KNOWN), left]


CLAIMS: tuple[Claim[Evidence], ...] = (
    Claim(
        "language-needs-position",
        "arXiv 2203.16634 (Haviv et al. 2022): small gaps in favour of encodings",
        "A causal language model without any encoding is worse at its training length than one with RoPE.",
        f"Bits per byte on the test split: NoPE − RoPE is above {_LITTLE:g}; {_WHY_LITTLE}. {_ONE_RECIPE}",
        [_bits(_BITS, NOPE, ROPE, above=_LITTLE)],
    ),
    Claim(
        "rope-over-absolute",
        "arXiv 2104.09864 (Su et al. 2021), section 4",
        "At its training length RoPE is better than absolute position at the input.",
        f"Bits per byte on the test split: sinusoid − RoPE is above {_LITTLE:g}; {_WHY_LITTLE}. {_ONE_RECIPE}",
        [_bits(_BITS, SINUSOID, ROPE, above=_LITTLE)],
    ),
    Claim(
        "alibi-extrapolates",
        "arXiv 2108.12409 (Press et al. 2022), section 3",
        "ALiBi reads longer texts than it was trained on without loss.",
        f"The loss on the end of a text with a context of {_FAR} exceeds that with one training length, on the same "
        f"tokens, by less than {_LITTLE:g} bits per byte; {_WHY_LITTLE}.",
        [_bits(_LOST, ALIBI, below=_LITTLE)],
    ),
    Claim(
        "rope-fails-beyond",
        "arXiv 2108.12409, figure 1; arXiv 2306.15595 (Chen et al. 2023), section 2",
        "RoPE, as it was trained, fails on texts longer than those of training.",
        f"The loss on the end of a text increases by more than {_MUCH:g} bits per byte at {_FAR}; {_WHY_MUCH}.",
        [_bits(_LOST, ROPE, above=_MUCH)],
    ),
    Claim(
        "nope-extrapolates",
        "arXiv 2305.19466 (Kazemnejad et al. 2023), on small tasks; arXiv 2404.12224 finds that language models do not",
        "A language model without an encoding reads longer texts without loss.",
        f"The loss on the end of a text increases by less than {_LITTLE:g} bits per byte at {_FAR}. Supporting: by "
        f"less than RoPE's.",
        [_bits(_LOST, NOPE, below=_LITTLE), supporting(_bits(_LOST, NOPE, ROPE, below=0.0))],
    ),
    Claim(
        "long-context-helps",
        "arXiv 2108.12409, analysis B: apparent extrapolation may only reflect fewer tokens with a short context",
        "With a context longer than the training length, ALiBi predicts the end of a text better.",
        f"The loss on the end of a text decreases by more than {_LITTLE:g} bits per byte at {_FAR}.",
        [_bits(_LOST, ALIBI, below=-_LITTLE)],
    ),
    Claim(
        "interpolation-helps",
        "arXiv 2306.15595; arXiv 2309.00071 (Peng et al. 2023)",
        "Slowing RoPE's frequencies down gives a trained model a longer context, without tuning and with a short one.",
        f"Bits per byte on the end of texts of {_FAR}, in the same models with the original and the rescaled rotation. "
        f"NTK-aware scaling without tuning, and interpolation after tuning both on texts of that length, each improve "
        f"by more than {_LITTLE:g}. Each is worse than a context of one training length by less than that. Supporting: "
        f"YaRN without tuning improves by more than {_LITTLE:g}.",
        [
            _method("ntk", tuned=False),
            _method("interpolation", tuned=True),
            _longer("ntk", tuned=False),
            _longer("interpolation", tuned=True),
            supporting(_method("yarn", tuned=False)),
        ],
    ),
    Claim(
        "previous-heads-positional",
        "ours, after arXiv 2511.11579",
        "In a language model with RoPE, previous-token heads are positional.",
        f"The positional share (analysis of variance) of the {language.TOP} heads with the most attention on the "
        f"previous token is above {_HALF:g}. Supporting: it exceeds that of the model's other heads by more than "
        f"{_LEAD:g}. Only heads with at least {language.LEAST:.0%} of their attention on the previous token count, and "
        f"models with such a head.",
        _kinds("previous", "positional"),
    ),
    Claim(
        "induction-heads-symbolic",
        "ours, after arXiv 2511.11579",
        "In a language model with RoPE, induction heads are symbolic.",
        f"The symbolic share of the {language.TOP} heads with the most attention on the token after an earlier copy is "
        f"above {_HALF:g}. Supporting: it exceeds that of the model's other heads by more than {_LEAD:g}. Only heads "
        f"with at least {language.LEAST:.0%} of their attention there count, and models with such a head.",
        _kinds("induction", "symbolic"),
    ),
    Claim(
        "positional-by-frequency",
        "arXiv 2511.11579, abstract",
        "In a language model with RoPE, the higher the frequencies that a head uses, the more positional it is.",
        f"Rank correlation over a model's heads of the positional share with the centre of the frequencies used: the "
        f"mean over models is above {_HALF:g} (correlations from 0.5 are commonly called large). Supporting (training "
        "causes it): it is larger than over the same heads before training, where the weights are random.",
        [_test(_ORDER, ROPE, above=_HALF), supporting(_test(_TAUGHT, ROPE, above=0.0))],
    ),
    Claim(
        "language-deposit",
        "ours: the finding of arXiv 2505.13027 (section 5) on its tasks, tested on language",
        "Position is deposited in one head of RoPE's first layer also when the task is language.",
        f"Position is removed from one head at a time (rotation frozen, content kept). One head of the first layer has "
        f"more than {_HALF:g} of the summed loss increase over the heads with a significant effect. Supporting: one "
        f"head of any layer has.",
        [_deposit(0), supporting(_deposit(None))],
    ),
    Claim(
        "needles-end-at-the-training-length",
        "arXiv 2309.00071, section 4; arXiv 2306.15595, section 3.3",
        "RoPE, as it was trained, finds a planted key's value within its training length and not beyond it.",
        f"Accuracy on the value's tokens, mean over depths: at the training length − at {_FAR} is above {_KNOWN:g}, "
        f"and at {_FAR} it is below {_KNOWN:g}. Tested only if the mean accuracy at the training length is at least "
        f"{_KNOWN:.0%}.",
        _retrieves,
    ),
)
