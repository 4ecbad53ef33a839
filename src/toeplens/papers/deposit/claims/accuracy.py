"""Claims about accuracy: which encoding learns which task, how fast and how steadily, and what it over-learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from toeplens.papers.deposit.claims.common import (
    BETTER,
    FINAL,
    MARGIN,
    STOPPED,
    V1,
    WHY_MARGIN,
    Check,
    against,
    between,
    compare,
    core,
    left_out,
    models,
    others,
    over,
    there,
    under,
)
from toeplens.papers.deposit.labels import Label, title
from toeplens.studies.kit.claims import Claim, as_support, every
from toeplens.studies.kit.contrasts import contrast
from toeplens.studies.kit.results import ACCURACY, SKILLED, STILL, CellResult, Figure, Results, skill
from toeplens.studies.kit.verdicts import ENOUGH, Finding, above, below, one_sided, unknown
from toeplens.training.presets import COUNT, DISTANCE, starting_spec
from toeplens.training.spec import run_spec

_ANEW = (
    "models trained anew, by the same command into another directory: these are from before training examples were "
    "looked at after evaluations, or are still learning"
)
_SKILL = replace(ACCURACY, words="skill of ", of=lambda cell: cell.skill)
_FIT = Figure(
    "accuracy on training examples, ",
    lambda cell: cell.fit,
    lambda cell: cell.status == "diverged" or (cell.settled and cell.fit >= 0),
    "still learning, or not measured",
    wanted=_ANEW,
)
_GAP = replace(_FIT, words="train - test gap, ", of=lambda cell: cell.fit - cell.accuracy)
_OWN_GAP = replace(
    _GAP,
    counts=lambda cell: (
        _FIT.counts(cell) and (cell.status == "diverged" or skill(cell.fit, cell.length_chance) >= SKILLED)
    ),
    without="still learning, not measured, or nothing learned",
)
_SPEED = Figure(
    "doublings of an epoch until half is learned, ",
    lambda cell: cell.half_learned,
    lambda cell: cell.status == "diverged" or cell.looked_back,
    "training examples not looked at after evaluations",
    grain=0.05,
    wanted=_ANEW,
)
_SETBACKS = Figure("test accuracy lost on the way, ", lambda cell: cell.setbacks)
_FASTER = 0.25
_WHY_FASTER = "a fifth more examples; less lies between two evaluations"
_RIVALS = ("absolute", "relative", "alibi", "nope", "random")
_SOME = 0.1  # what "little", "mild" and "near" may be at the most
_WHY_SOME = "ten points at the most, as the sources' own differences that they call so are"
_TABLE = {
    DISTANCE: {"mla": 0.8834, "rope": 0.9264, "nope": 0.0351},
    COUNT: {"mla": 0.9741, "rope": 0.6943, "nope": 0.7769},
}
_TASKS = {DISTANCE: "Task 1", COUNT: "Task 2"}
_COSTLY = ("absolute", "rope", "relative", "alibi", "random")


def _speed(pairs: Sequence[tuple[str, str]]) -> Check:
    """The second of each pair needs more examples than the first.

    A model that never learned half needs more than it seems to: with such a one among the slow nothing is refuted, with
    one among the fast nothing is shown.
    """

    def check(results: Results) -> list[Finding]:
        findings = []
        for fast, slow in there(results, DISTANCE, pairs):
            lost, won = (any(not cell.learned_half for cell in results.of(DISTANCE, label)) for label in (fast, slow))
            findings += [
                one_sided(finding, holds=not lost, fails=not won, why="models that never learned half")
                for finding in compare(DISTANCE, [(slow, fast)], _SPEED, over(_FASTER))(results)
            ]
        return findings

    return check


def _failing(*labels: str) -> Check:
    return every(*(models(label, (_SKILL, under(SKILLED))) for label in labels))


def _alibi_poor(results: Results) -> list[Finding]:
    alibi, rope = (_SKILL.by_seed(results.of(DISTANCE, label)) for label in ("alibi", "rope"))
    what = f"skill of ALiBi - half the skill of RoPE{left_out(results, _SKILL, DISTANCE, 'alibi', 'rope')}"
    return [below(what, contrast((1, alibi), (-0.5, rope)), 0.0)]


def _levels(results: Results) -> list[Finding]:
    return [
        finding
        for task, levels in _TABLE.items()
        for label, level in levels.items()
        for finding in models(label, (_beside(task, level), between(-_SOME, _SOME)), task=task)(results)
    ]


def _beside(task: str, level: float) -> Figure:
    """The skill of a model less that of the source's, whose number is over the guess at the source's own sizes."""

    def of(cell: CellResult) -> float:
        spec = run_spec(**starting_spec("paper", cell.key.protocol, task, "rope", 0))
        return cell.skill - skill(level, spec.guess)

    return replace(ACCURACY, words=f"{_TASKS[task]}: skill less that of Table 1, ", of=of)


def _level(task: str) -> Figure:
    return replace(ACCURACY, words=f"{_TASKS[task]}: accuracy of ")


def _stablest(results: Results) -> list[Finding]:
    """Every rival falls by more than RoPE; where hardly a model of either falls, nobody knows how often one does."""
    findings = []
    for _, rival in there(results, DISTANCE, against("rope", *_RIVALS)):
        both = [results.of(DISTANCE, label) for label in (rival, "rope")]
        cells, enough = [*both[0], *both[1]], min(ENOUGH, *map(len, both))
        falls = sum(cell.setbacks > 0 for cell in cells if cell.status == "complete")
        few = f"{falls} of {len(cells)} models of both fall, too few to tell how often one does"
        findings += [
            finding
            if falls >= enough or not finding.known
            else unknown(f"{title(rival)} and {title('rope')}", few, "training that is rougher")
            for finding in compare(DISTANCE, [(rival, "rope")], _SETBACKS)(results)
        ]
    return findings


def _near_best(results: Results) -> list[Finding]:
    findings = []
    for task in (DISTANCE, COUNT):
        plain = {label for label in results.labels(task) if Label.parse(label).plain} | {"rope", "nope"}
        findings += compare(task, against("mla", *sorted(plain - {"mla"})), _level(task), over(-_SOME))(results)
    return findings


def _positions_cost(results: Results) -> list[Finding]:
    """NoPE less the mean of the others, as one comparison: "generally" is not "each"."""
    nope = ACCURACY.by_seed(results.of(COUNT, "nope"))
    costly = [ACCURACY.by_seed(results.of(COUNT, label)) for label in _COSTLY]
    mean = [(-1 / len(costly), values) for values in costly]
    missing = left_out(results, ACCURACY, COUNT, "nope", *_COSTLY)
    what = f"NoPE - mean of Absolute, RoPE, Relative, ALiBi, Random{missing}"
    return [above(what, contrast((1, nope), *mean), MARGIN)]


_BIAS = Figure(
    "doublings of the learned bias's spread",
    lambda cell: cell.measure("bias").doublings,
    lambda cell: cell.measure("bias") is not None,
)


def _bias_attenuates(results: Results) -> list[Finding]:
    counting, distance = (_BIAS.by_seed(results.of(task, "relative")) for task in (COUNT, DISTANCE))
    what = "doublings of the learned bias's spread over offsets, Task 2 - Task 1"
    return [below(what, contrast((1, counting), (-1, distance), grain=0.05), -1.0)]


CLAIMS: tuple[Claim[Results], ...] = (
    core(
        "task1-rope-best",
        f"{V1}, 4.2",
        "On Task 1 RoPE generalises best of the basic encodings.",
        f"RoPE against absolute, relative, ALiBi, NoPE (and random, where run), each: {BETTER}. {STOPPED}",
        compare(DISTANCE, against("rope", *_RIVALS)),
    ),
    core(
        "task1-rope-fastest",
        f"{V1}, 4.2",
        "On Task 1 RoPE converges fastest.",
        "Half of what there is to learn of the training examples, looked at after evaluations without dropout, is "
        f"learned: every other basic encoding needs more than {_FASTER:g} doublings more examples than RoPE "
        f"({_WHY_FASTER}).",
        _speed(against("rope", *_RIVALS)),
    ),
    core(
        "task1-rope-stable",
        f"{V1}, 4.2 and abstract",
        "On Task 1 RoPE converges most stably.",
        f"Falls of the test accuracy from one evaluation to the next, those of more than {100 * STILL:g} points (less "
        "is the noise of a model that only guesses), added up: every other basic encoding's sum (and random's, where "
        f"run) is larger than RoPE's by more than {100 * MARGIN:g} points ({WHY_MARGIN}). All evaluations count, and a "
        "model that takes longer has more of them. Where fewer than five models of both fall, nothing can be said: a "
        "running mean of the weights can take every fall away, and how often a rare one comes is not seen in few.",
        _stablest,
    ),
    core(
        "task1-absolute-second",
        f"{V1}, 4.2",
        "On Task 1 absolute encoding ranks second, after RoPE.",
        f"RoPE over absolute, and absolute over relative, ALiBi, NoPE (and random, where run), each: {BETTER}. "
        f"{STOPPED}",
        every(
            compare(DISTANCE, against("rope", "absolute"), what="RoPE - Absolute"),
            compare(DISTANCE, against("absolute", *_RIVALS[1:])),
        ),
    ),
    core(
        "task1-nope-relative-fail",
        f"{V1}, 4.2",
        "Neither NoPE nor the relative encoding generalises on Task 1.",
        "Skill (accuracy over the best guess from the length, as a share of the rest) of each under 0.25: whoever has "
        f"a quarter of what can be learned has learned something. {STOPPED}",
        _failing("nope", "relative"),
    ),
    core(
        "task1-alibi-nope-fail",
        f"{FINAL}: results table",
        "ALiBi and NoPE fail on Task 1.",
        f"Skill of each under 0.25: whoever has a quarter of what can be learned has not failed. {STOPPED}",
        _failing("alibi", "nope"),
    ),
    core(
        "task1-alibi-poor",
        f"{V1}, 4.2",
        "ALiBi performs poorly on Task 1.",
        f"Skill of ALiBi under half of RoPE's: with half of it nobody would call it poor. {STOPPED}",
        _alibi_poor,
    ),
    core(
        "table1-task1-order",
        f"{V1}, Table 1",
        "Task 1: RoPE (92.64) over MLA (88.34) over NoPE (3.51).",
        f"RoPE over MLA, and MLA over NoPE, each: {BETTER}. {STOPPED}",
        compare(DISTANCE, (("rope", "mla"), ("mla", "nope"))),
    ),
    core(
        "table1-task2-order",
        f"{V1}, Table 1",
        "Task 2: MLA (97.41) over NoPE (77.69) over RoPE (69.43).",
        f"MLA over NoPE and NoPE over RoPE, each: {BETTER}. {STOPPED}",
        compare(COUNT, (("mla", "nope"), ("nope", "rope"))),
    ),
    core(
        "table1-levels",
        f"{V1}, Table 1",
        "The accuracies themselves: Task 1 MLA 88.34, RoPE 92.64, NoPE 3.51; Task 2 MLA 97.41, RoPE 69.43, NoPE 77.69.",
        "Skill, for at other sizes the guess is another: each mean within "
        f"{_SOME:g} of what the source's number is over the guess at the source's own sizes, which leaves room for "
        f"another draw of examples and little else. {STOPPED}",
        _levels,
    ),
    core(
        "task2-rope-superior",
        f"{V1}, 4.2 (against its own Table 1)",
        "On Task 2 RoPE imposes even less overhead than absolute encoding and yields superior test accuracy.",
        f"RoPE over absolute: {BETTER}. Supporting, little overhead: NoPE less RoPE below {_SOME:g} ({_WHY_SOME}). "
        f"{STOPPED}",
        every(
            compare(COUNT, against("rope", "absolute")),
            as_support(compare(COUNT, against("nope", "rope"), test=under(_SOME))),
        ),
    ),
    core(
        "task1-convergence-order",
        f"{V1}, 4.2",
        "On Task 1 the order of convergence is RoPE, Absolute, ALiBi.",
        "Half of what there is to learn of the training examples is learned: absolute needs more than "
        f"{_FASTER:g} doublings more examples than RoPE, and ALiBi than absolute ({_WHY_FASTER}).",
        _speed(tuple(pairwise(("rope", "absolute", "alibi")))),
    ),
    core(
        "task1-rope-smallest-gap",
        f"{V1}, 4.2",
        "On Task 1 RoPE has a minimal generalisation gap.",
        "RoPE's accuracy on training examples (after training, without dropout) less its test accuracy below 0.05: a "
        f"gap that is hard to see in the source's figure. {STOPPED} So do only those that have learned a quarter of "
        "what there is to learn of the training examples: others have no gap to show. Supporting, that others have "
        f"one: that of absolute, relative, ALiBi and NoPE (and random, where run) over RoPE's by {MARGIN:g}, each.",
        every(
            models("rope", (_OWN_GAP, under(0.05))),
            as_support(
                lambda results: compare(
                    DISTANCE,
                    [(rival, rope) for rope, rival in there(results, DISTANCE, against("rope", *_RIVALS))],
                    _OWN_GAP,
                )(results)
            ),
        ),
    ),
    core(
        "mla-near-best",
        f"{FINAL}: near-optimal performance on both tasks",
        "MLA comes near the best encoding on both tasks.",
        f"On each task, MLA less every other encoding that is there: above -{_SOME:g} ({_WHY_SOME}). Supporting, that "
        f"there is something to come near to: MLA over NoPE on Task 1 and over RoPE on Task 2 by {_SOME:g}, as in the "
        f"source. {STOPPED}",
        every(
            _near_best,
            as_support(
                every(
                    compare(DISTANCE, against("mla", "nope"), _level(DISTANCE), over(_SOME)),
                    compare(COUNT, against("mla", "rope"), _level(COUNT), over(_SOME)),
                )
            ),
        ),
    ),
    core(
        "mla-small-cost",
        f"{V1}, C.3",
        "MLA costs a little generalisation on Task 1.",
        f"RoPE less MLA: over {MARGIN:g}, or it costs nothing, and below {_SOME:g}, or it is not little. {STOPPED}",
        compare(DISTANCE, against("rope", "mla"), test=between(MARGIN, _SOME)),
    ),
    others(
        "task1-random-overfits",
        f"{V1}, 4.2",
        "On Task 1 a random table matches absolute encoding in training accuracy but generalises worse.",
        f"Random less Absolute: accuracy on training examples within {_SOME:g} ({_WHY_SOME}); test accuracy below "
        f"-{MARGIN:g}. {STOPPED}",
        every(
            compare(DISTANCE, against("random", "absolute"), _FIT, between(-_SOME, _SOME)),
            compare(DISTANCE, against("absolute", "random"), what="test accuracy, Absolute - Random"),
        ),
    ),
    others(
        "task2-positions-cost",
        f"{V1}, 4.2",
        "On Task 2 imposing position generally degrades generalisation.",
        f"NoPE over the mean of absolute, RoPE, relative, ALiBi and random: {BETTER}. {STOPPED}",
        _positions_cost,
    ),
    others(
        "task2-absolute-mild",
        f"{V1}, 4.2",
        "On Task 2 absolute encoding costs a mild penalty.",
        f"NoPE less absolute: over {MARGIN:g}, or it costs nothing, and below {_SOME:g} ({_WHY_SOME}). {STOPPED}",
        compare(COUNT, against("nope", "absolute"), test=between(MARGIN, _SOME)),
    ),
    others(
        "task2-absolute-moderate",
        f"{FINAL}: results table",
        "On Task 2 absolute encoding does moderately: between MLA, the best, and ALiBi, the worst.",
        f"MLA over absolute, and absolute over ALiBi, each: {BETTER}. {STOPPED}",
        compare(COUNT, (("mla", "absolute"), ("absolute", "alibi"))),
    ),
    others(
        "task2-relative-like-nope",
        f"{V1}, 4.2",
        "On Task 2 the relative encoding matches NoPE.",
        f"Relative less NoPE: between -0.05 and 0.05, within which curves lie on each other. {STOPPED}",
        compare(COUNT, against("relative", "nope"), test=between(-0.05, 0.05)),
    ),
    others(
        "task2-relative-bias-attenuates",
        f"{V1}, 4.2",
        "On Task 2 the relative encoding attenuates its learned bias toward zero.",
        "Spread of the learned bias over the offsets (root mean square about each head's mean), after Task 2 against "
        "after Task 1, where position is needed: less than half, a doubling less; what keeps more than half is not "
        "attenuated toward zero.",
        _bias_attenuates,
    ),
    others(
        "task2-random-perfect-fit",
        f"{V1}, 4.2",
        "On Task 2 a random table fits the training examples perfectly.",
        "Random's accuracy on training examples over 0.98: what rounds to all of them in the source's figure. "
        f"{STOPPED}",
        models("random", (_FIT, over(0.98)), task=COUNT),
    ),
    others(
        "task2-random-largest-gap",
        f"{V1}, 4.2",
        "On Task 2 a random table has the largest gap between train and test.",
        "Accuracy on training examples less test accuracy of Random, less that of RoPE, absolute, relative, ALiBi and "
        f"NoPE: over {MARGIN:g}, each ({WHY_MARGIN}). {STOPPED}",
        compare(COUNT, against("random", "rope", "absolute", "relative", "alibi", "nope"), _GAP),
    ),
    others(
        "task2-alibi-worst",
        f"{V1}, 4.2; {FINAL}: results table",
        "On Task 2 ALiBi is worst of all.",
        f"NoPE, RoPE, absolute, relative, random and MLA over ALiBi, each: {BETTER}. {STOPPED}",
        compare(COUNT, [(other, "alibi") for other in ("nope", "rope", "absolute", "relative", "random", "mla")]),
    ),
)
