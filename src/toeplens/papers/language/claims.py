"""Claims about encodings in language models, the field's and ours, judged on a grid study of the task language.

They know encodings by the labels nope, sinusoidal, t5, alibi, fire, fox, rope and p-rope, and the task by language.
The rules were written before the recorded models were trained. What had been seen: models of a minute that had hardly
begun to learn (NoPE, the sinusoid, ALiBi and RoPE, of the trial's size), and two RoPE models of the record's size with
other seeds (7, 8), which set its sizes and the learning rate for all encodings; of the first of these also what lies
beyond the training length and what extensions did there. Rules of heads, needles and tuning were made stricter after a
review, when the first two models of the record (NoPE, the sinusoid) were trained and had not been looked at.

The record was then begun again, with other seeds: four of its models (seed 300: NoPE, the sinusoid, T5, ALiBi; 768
steps of 32 windows) had been looked at and were undertrained, no better than a table of three tokens. The same text in
3,072 steps of 8 windows, set on two RoPE models of seed 7, teaches far more. The rules stayed as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite

from toeplens.studies.grid import language
from toeplens.studies.grid.study import Evidence
from toeplens.studies.kit.asking import Test, ask, ask_difference, over, under
from toeplens.studies.kit.claims import Claim, as_support, every
from toeplens.studies.kit.contrasts import difference
from toeplens.studies.kit.results import CellResult, Figure
from toeplens.studies.kit.verdicts import Finding, above, below, unknown

TASK = "language"
NOPE, SINUSOID, T5, ALIBI, ROPE = "nope", "sinusoidal", "t5", "alibi", "rope"
_UNIT = " bits a byte"
_GRAIN = 0.003  # bits a byte: models of one encoding that agree more closely do so by chance
_LITTLE, _MUCH = 0.01, 0.05
_WHY_LITTLE = (
    f"{_LITTLE:g} bits a byte is about half a percent of what such models need, the least that anybody would choose an "
    f"encoding for"
)
_WHY_MUCH = f"{_MUCH:g} bits a byte is five times the least that counts"
_ONE_RECIPE = "All encodings have one recipe, whose learning rate was set on RoPE."
_HALF, _LEAD = 0.5, 0.1  # of a share: more than all else; what could not be the draw of heads
_KNOWN = 0.2
_FAR = f"{language.LONG:g} times the training length"
_BY_FREQUENCY = "rank correlation of positional share with frequency, "
Check = Callable[[Evidence], list[Finding]]


def _figure(words: str, of: Callable[[CellResult], float], grain: float = _GRAIN) -> Figure:
    return Figure(words, of, lambda cell: isfinite(of(cell)), "it was not measured, or there is nothing", grain)


_BITS = _figure("bits a byte at the training length, ", language.bits)
_LOST = _figure(f"bits a byte lost at the end of texts of {_FAR}, ", language.lost)


def _title(data: Evidence, label: str) -> str:
    return next((column.title for column in data.spec.columns() if column.label == label), label)


def _one(label: str, figure: Figure, test: Test) -> Check:
    return lambda data: [ask(data.results, TASK, label, figure, test, partial(_title, data))]


def _two(first: str, second: str, figure: Figure, test: Test) -> Check:
    def check(data: Evidence) -> list[Finding]:
        title = partial(_title, data)
        return [ask_difference(data.results, TASK, first, second, title, figure=figure, test=test)]

    return check


def _method(method: str, *, tuned: bool) -> Check:
    """What a change of RoPE gains over leaving it, at `language.LONG` times the length, of the same models."""

    def gain(cell: CellResult) -> float:
        without = language.extended(cell, "none", tuned=tuned)
        return without - language.extended(cell, method, tuned=tuned)

    after = " after tuning both" if tuned else ""
    words = f"bits a byte gained by {method} at {_FAR}{after}, "
    return _one(ROPE, _figure(words, gain), over(_LITTLE, _UNIT))


def _longer(method: str, *, tuned: bool) -> Check:
    """What the same models lose, changed for `language.LONG` times the length, against reading one training length."""

    def loss(cell: CellResult) -> float:
        return language.extended(cell, method, tuned=tuned) - language.extended(cell, "none", 1.0, tuned=tuned)

    after = " after tuning" if tuned else ""
    words = f"bits a byte lost by {method} at {_FAR}{after} against one training length, "
    return _one(ROPE, _figure(words, loss), under(_LITTLE, _UNIT))


def _kinds(kind: str, share: str) -> Check:
    """How much the heads of a kind follow position or content, of RoPE's models that have such heads."""
    words = f"{share} share of up to {language.TOP} heads with the most {kind} weight, "
    lead = _figure("that less the other heads', ", lambda cell: language.kind_lead(cell, kind, share), 0.02)
    return every(
        _one(ROPE, _figure(words, lambda cell: language.kind_share(cell, kind, share), 0.02), over(_HALF)),
        as_support(_one(ROPE, lead, over(_LEAD))),
    )


def _deposit(layer: int | None) -> Check:
    head = "one head" if layer is None else "one head of the first layer"
    words = f"share of {head} in what is lost when position is taken from each head alone, "
    return _one(ROPE, _figure(words, lambda cell: language.deposit(cell, layer), 0.02), over(_HALF))


def _taught(cell: CellResult) -> float:
    """How much more a model's heads are positional by their frequencies than before training."""
    return language.positional_by_frequency(cell) - language.positional_by_frequency(cell, untrained=True)


def _retrieves(data: Evidence) -> list[Finding]:
    """Does RoPE find needles less beyond the training length, where it finds them at it?"""
    at = _figure("", lambda cell: language.retrieved(cell, 1.0), 0.02)
    far = _figure("", lambda cell: language.retrieved(cell, language.LONG), 0.02)
    cells = data.results.of(TASK, ROPE)
    near, beyond = at.by_seed(cells), far.by_seed(cells)
    what = f"accuracy on needles, RoPE, at the training length - at {_FAR}"
    if not near or not beyond:
        return [unknown(what, "it was not measured", "the measure needles")]
    found = [near[seed] for seed in near]
    if sum(found) / len(found) < _KNOWN:
        return [unknown(what, f"the models find under {_KNOWN:.0%} at the training length", "longer training")]
    left = below(f"accuracy on needles, RoPE, at {_FAR}", beyond, _KNOWN, grain=0.02)
    return [above(what, difference(near, beyond, 0.02), _KNOWN), left]


CLAIMS: tuple[Claim[Evidence], ...] = (
    Claim(
        "language-needs-position",
        "arXiv 2203.16634 (Haviv et al. 2022): small gaps, to the encodings' side",
        "A causal language model without any encoding is worse at its training length than one with RoPE.",
        f"Bits a byte on the test split, NoPE's less RoPE's, above {_LITTLE:g}: {_WHY_LITTLE}. {_ONE_RECIPE}",
        _two(NOPE, ROPE, _BITS, over(_LITTLE, _UNIT)),
    ),
    Claim(
        "rope-over-absolute",
        "arXiv 2104.09864 (Su et al. 2021), section 4",
        "At its training length RoPE is better than absolute position at the input.",
        f"Bits a byte on the test split, the sinusoid's less RoPE's, above {_LITTLE:g}: {_WHY_LITTLE}. {_ONE_RECIPE}",
        _two(SINUSOID, ROPE, _BITS, over(_LITTLE, _UNIT)),
    ),
    Claim(
        "alibi-extrapolates",
        "arXiv 2108.12409 (Press et al. 2022), section 3",
        "ALiBi reads longer texts than it was trained on without loss.",
        f"What the end of a text loses by being read with {_FAR} before it rather than one training length, on the "
        f"same tokens, is under {_LITTLE:g} bits a byte: {_WHY_LITTLE}.",
        _one(ALIBI, _LOST, under(_LITTLE, _UNIT)),
    ),
    Claim(
        "rope-fails-beyond",
        "arXiv 2108.12409, figure 1; arXiv 2306.15595 (Chen et al. 2023), section 2",
        "RoPE, as it was trained, fails on texts longer than those of training.",
        f"What the end of a text loses at {_FAR} is above {_MUCH:g} bits a byte: {_WHY_MUCH}.",
        _one(ROPE, _LOST, over(_MUCH, _UNIT)),
    ),
    Claim(
        "nope-extrapolates",
        "arXiv 2305.19466 (Kazemnejad et al. 2023), on small tasks; arXiv 2404.12224 finds that language models do not",
        "A language model without an encoding reads longer texts without loss.",
        f"What the end of a text loses at {_FAR} is under {_LITTLE:g} bits a byte. Supporting: it loses less than "
        f"RoPE.",
        every(_one(NOPE, _LOST, under(_LITTLE, _UNIT)), as_support(_two(NOPE, ROPE, _LOST, under(0.0, _UNIT)))),
    ),
    Claim(
        "long-context-helps",
        "arXiv 2108.12409, analysis B: what looks like extrapolation may come from shorter contexts being given up",
        "With more before it than one training length, ALiBi foretells a text's end better.",
        f"What the end of a text loses at {_FAR} is under -{_LITTLE:g} bits a byte: it gains more than that.",
        _one(ALIBI, _LOST, under(-_LITTLE, _UNIT)),
    ),
    Claim(
        "interpolation-helps",
        "arXiv 2306.15595; arXiv 2309.00071 (Peng et al. 2023)",
        "Slowing RoPE's frequencies down gives a trained model a longer context, without tuning and with a short one.",
        f"Bits a byte of the end of texts of {_FAR}, of the same models with the rotation left as it is and with it "
        f"set for that length: NTK-aware without tuning, and interpolation after tuning both alike on texts of that "
        f"length, each gain over "
        f"{_LITTLE:g}, and each loses less than that against reading one training length alone, as else nobody would "
        f"read more. Supporting: YaRN without tuning gains as much.",
        every(
            _method("ntk", tuned=False),
            _method("interpolation", tuned=True),
            _longer("ntk", tuned=False),
            _longer("interpolation", tuned=True),
            as_support(_method("yarn", tuned=False)),
        ),
    ),
    Claim(
        "previous-heads-positional",
        "ours, after arXiv 2511.11579",
        "In a language model with RoPE, heads that look at the token before are positional.",
        f"Positional share of the {language.TOP} heads with the most weight on the token before, by the analysis of "
        f"variance, above {_HALF:g}: more of their logits goes with place than with all else. Supporting, that it is "
        f"this kind: by {_LEAD:g} more than the model's other heads. Heads count that give it {language.LEAST:.0%} of "
        f"their weight or more, and models that have one.",
        _kinds("previous", "positional"),
    ),
    Claim(
        "induction-heads-symbolic",
        "ours, after arXiv 2511.11579",
        "In a language model with RoPE, induction heads are symbolic.",
        f"Symbolic share of the {language.TOP} heads with the most weight on the token after an earlier copy, above "
        f"{_HALF:g}. Supporting, that it is this kind: by {_LEAD:g} more than the model's other heads. Heads count "
        f"that give it {language.LEAST:.0%} of their weight or more, and models that have one.",
        _kinds("induction", "symbolic"),
    ),
    Claim(
        "positional-by-frequency",
        "arXiv 2511.11579, abstract",
        "In a language model with RoPE, the higher the frequencies that a head uses, the more positional it is.",
        f"Rank correlation over a model's heads of the positional share with the centre of the frequencies used, mean "
        f"over models, above {_HALF:g}: from half on a correlation is commonly called large. Supporting, that training "
        "brings it about: above what it is over the same heads before training, where weights are random and the "
        "correlation is that of the two measures.",
        every(
            _one(ROPE, _figure(_BY_FREQUENCY, language.positional_by_frequency, 0.05), over(_HALF)),
            as_support(_one(ROPE, _figure(f"{_BY_FREQUENCY}less that before training, ", _taught, 0.05), over(0.0))),
        ),
    ),
    Claim(
        "language-deposit",
        "ours: what arXiv 2505.13027 (section 5) finds on its tasks, asked of language",
        "Position collects in one head of RoPE's first layer when the task is language, too.",
        f"Position is taken from one head at a time (its rotation stopped, its content kept). Of all that is lost "
        f"so, in nats, over the heads whose loss is told from none, one head of the first layer has more than "
        f"{_HALF:g}. Supporting: one head has, of whatever layer.",
        every(_deposit(0), as_support(_deposit(None))),
    ),
    Claim(
        "needles-end-at-the-training-length",
        "arXiv 2309.00071, section 4; arXiv 2306.15595, section 3.3",
        "RoPE, as it was trained, finds a planted key's value within its training length and not beyond it.",
        f"Accuracy on the value's tokens, mean over depths: at the training length less that at {_FAR}, above "
        f"{_KNOWN:g}, and at {_FAR} under {_KNOWN:g}, well over what guessing finds; asked where they find "
        f"{_KNOWN:.0%} in the mean at the training length.",
        _retrieves,
    ),
)
