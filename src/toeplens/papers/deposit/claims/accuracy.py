"""Claims about accuracy: which encoding learns which task, learning speed, stability and generalisation gap."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from toeplens.papers.deposit.claims.common import FINAL, RIVALS, V1, Test, core, count, others
from toeplens.papers.deposit.labels import Label, title
from toeplens.studies.kit.claims import BETTER, MARGIN, STOPPED, WHY_MARGIN, Claim
from toeplens.studies.kit.results import ACCURACY, SKILLED, STILL, CellResult, Figure, Results, skill
from toeplens.studies.kit.verdicts import ENOUGH, Finding, below, contrast, one_sided, supporting, unknown
from toeplens.training.presets import COUNT, DISTANCE, starting_spec
from toeplens.training.spec import run_spec

_ANEW = (
    "newly trained models (same command, another directory): these were trained before accuracy on training examples "
    "was evaluated, or are still learning"
)
_SKILL = replace(ACCURACY, words="skill of ", of=lambda cell: cell.skill)
_FIT = Figure(
    "accuracy on training examples, ",
    lambda cell: cell.fit,
    lambda cell: cell.status == "diverged" or (cell.settled and cell.fit >= 0),
    "still learning, or not measured",
    wanted=_ANEW,
)
_GAP = replace(_FIT, words="train − test gap, ", of=lambda cell: cell.fit - cell.accuracy)
_OWN_GAP = replace(
    _GAP,
    counts=lambda cell: (
        _FIT.counts(cell) and (cell.status == "diverged" or skill(cell.fit, cell.length_chance) >= SKILLED)
    ),
    without="still learning, not measured, or too little learned",
)
_SPEED = Figure(
    "log2 of the epochs until half is learned, ",
    lambda cell: cell.half_learned,
    lambda cell: cell.status == "diverged" or cell.looked_back,
    "accuracy on training examples not evaluated",
    grain=0.05,
    wanted=_ANEW,
)
_SETBACKS = Figure("sum of test accuracy drops during training, ", lambda cell: cell.setbacks)
_BIAS = Figure(
    "log2 of the learned bias's spread",
    lambda cell: cell.measure("bias").doublings,
    lambda cell: cell.measure("bias") is not None,
)
_TASKS = {DISTANCE: "Task 1", COUNT: "Task 2"}
_LEVEL = {task: replace(ACCURACY, words=f"{text}: accuracy of ") for task, text in _TASKS.items()}
_FASTER = 0.25
_WHY_FASTER = "a factor of 1.2; smaller differences are below the evaluation interval"
_SOME = 0.1  # at most this is "little", "mild" or "near"
_WHY_SOME = "the sources use such words for differences of up to 10 percentage points"
_TABLE = (  # the source's accuracies
    *((DISTANCE, "mla", 0.8834), (DISTANCE, "rope", 0.9264), (DISTANCE, "nope", 0.0351)),
    *((COUNT, "mla", 0.9741), (COUNT, "rope", 0.6943), (COUNT, "nope", 0.7769)),
)
_COST = count(
    ACCURACY,
    {"nope": 1} | dict.fromkeys(("absolute", "rope", "relative", "alibi", "random"), -1 / 5),
    above=MARGIN,
    what="NoPE − mean of Absolute, RoPE, Relative, ALiBi, Random",
)


def _faster(results: Results, fast: str, slow: str) -> list[Finding]:
    """The second needs more examples than the first.

    The number of examples of a model that never learned half is a lower bound. With such a model among the slow ones
    the claim cannot fail; with one among the fast ones it cannot hold.
    """
    cells = (results.of(DISTANCE, label.removesuffix("?")) for label in (fast, slow))
    lost, won = (any(not cell.learned_half for cell in each) for each in cells)
    return [
        one_sided(finding, holds=not lost, fails=not won, why="models that never learned half")
        for finding in Test(_SPEED, slow, fast, above=_FASTER)(results)
    ]


def _beside(task: str, level: float) -> Figure:
    """The skill of a model minus the source's skill, whose baseline is that of the source's sizes."""

    def of(cell: CellResult) -> float:
        spec = run_spec(**starting_spec("paper", cell.key.protocol, task, "rope", 0))
        return cell.skill - skill(level, spec.guess)

    return replace(ACCURACY, words=f"{_TASKS[task]}: skill − skill of Table 1, ", of=of)


def _stablest(results: Results) -> list[Finding]:
    """Every rival's test accuracy drops by more than RoPE's; undecided if too few models of both have drops."""
    findings = []
    for rival in RIVALS:
        label = rival.removesuffix("?")
        both = [results.of(DISTANCE, each) for each in (label, "rope")]
        cells, enough = [*both[0], *both[1]], min(ENOUGH, *map(len, both))
        falls = sum(cell.setbacks > 0 for cell in cells if cell.status == "complete")
        few = f"only {falls} of {len(cells)} models have accuracy drops, too few to estimate their frequency"
        findings += [
            finding
            if falls >= enough or not finding.known
            else unknown(f"{title(label)} and {title('rope')}", few, "less stable training")
            for finding in Test(_SETBACKS, rival, "rope", above=MARGIN)(results)
        ]
    return findings


def _near_best(results: Results) -> list[Finding]:
    found: list[Finding] = []
    for task, figure in _LEVEL.items():
        plain = {label for label in results.labels(task) if Label.parse(label).plain} | {"rope", "nope"}
        found += Test(figure, "mla", sorted(plain - {"mla"}), above=-_SOME, task=task)(results)
    return found


def _bias_attenuates(results: Results) -> list[Finding]:
    counting, distance = (_BIAS.by_seed(results.of(task, "relative")) for task in (COUNT, DISTANCE))
    what = "log2 of the learned bias's spread over offsets, Task 2 − Task 1"
    return [below(what, contrast((1, counting), (-1, distance), grain=0.05), -1.0)]


CLAIMS: tuple[Claim[Results], ...] = (
    core(
        "task1-rope-best",
        f"{V1}, 4.2",
        "On Task 1 RoPE generalises best of the basic encodings.",
        f"RoPE compared with each of absolute, relative, ALiBi, NoPE (and random, if run): {BETTER}. {STOPPED}",
        [Test(ACCURACY, "rope", RIVALS, above=MARGIN)],
    ),
    core(
        "task1-rope-fastest",
        f"{V1}, 4.2",
        "On Task 1 RoPE converges fastest.",
        "Number of examples until the skill on training examples (without dropout) reaches 0.5: every other basic "
        f"encoding needs more than {_FASTER:g} doublings more than RoPE ({_WHY_FASTER}).",
        [partial(_faster, fast="rope", slow=rival) for rival in RIVALS],
    ),
    core(
        "task1-rope-stable",
        f"{V1}, 4.2 and abstract",
        "On Task 1 RoPE converges most stably.",
        f"Sum of the test accuracy drops between evaluations, counting drops of more than {100 * STILL:g} percentage "
        "points (smaller ones are noise): every other basic encoding's sum (and random's, if run) is larger than "
        f"RoPE's by more than {100 * MARGIN:g} percentage points ({WHY_MARGIN}). All evaluations count, so longer runs "
        "have more. Undecided if fewer than five models of both have such drops: an average of the weights can remove "
        "them, and the frequency of rare drops cannot be estimated from few models.",
        _stablest,
    ),
    core(
        "task1-absolute-second",
        f"{V1}, 4.2",
        "On Task 1 absolute encoding ranks second, after RoPE.",
        f"RoPE compared with absolute, and absolute with each of relative, ALiBi, NoPE (and random, if run): {BETTER}. "
        f"{STOPPED}",
        [
            Test(ACCURACY, "rope", "absolute", above=MARGIN, what="RoPE − Absolute"),
            Test(ACCURACY, "absolute", RIVALS[1:], above=MARGIN),
        ],
    ),
    core(
        "task1-nope-relative-fail",
        f"{V1}, 4.2",
        "Neither NoPE nor the relative encoding generalises on Task 1.",
        "The skill of each (accuracy above the length-only baseline, as a share of what is left to learn) is below "
        f"0.25. {STOPPED}",
        [Test(_SKILL, ("nope", "relative"), below=SKILLED)],
    ),
    core(
        "task1-alibi-nope-fail",
        f"{FINAL}: results table",
        "ALiBi and NoPE fail on Task 1.",
        f"The skill of each is below 0.25. {STOPPED}",
        [Test(_SKILL, ("alibi", "nope"), below=SKILLED)],
    ),
    core(
        "task1-alibi-poor",
        f"{V1}, 4.2",
        "ALiBi performs poorly on Task 1.",
        f"The skill of ALiBi is below half of RoPE's. {STOPPED}",
        [Test(_SKILL, {"alibi": 1, "rope": -0.5}, below=0.0, what="skill of ALiBi − half the skill of RoPE")],
    ),
    core(
        "table1-task1-order",
        f"{V1}, Table 1",
        "Task 1: RoPE (92.64) over MLA (88.34) over NoPE (3.51).",
        f"RoPE compared with MLA, and MLA with NoPE: {BETTER}. {STOPPED}",
        [Test(ACCURACY, "rope", "mla", above=MARGIN), Test(ACCURACY, "mla", "nope", above=MARGIN)],
    ),
    core(
        "table1-task2-order",
        f"{V1}, Table 1",
        "Task 2: MLA (97.41) over NoPE (77.69) over RoPE (69.43).",
        f"MLA compared with NoPE, and NoPE with RoPE: {BETTER}. {STOPPED}",
        [count(ACCURACY, "mla", "nope", above=MARGIN), count(ACCURACY, "nope", "rope", above=MARGIN)],
    ),
    core(
        "table1-levels",
        f"{V1}, Table 1",
        "The accuracies themselves: Task 1 MLA 88.34, RoPE 92.64, NoPE 3.51; Task 2 MLA 97.41, RoPE 69.43, NoPE 77.69.",
        f"Each mean skill is within {_SOME:g} of the source's. Skill is used because the length-only baseline depends "
        f"on the sizes; the source's skill uses the baseline of the source's sizes. {STOPPED}",
        [Test(_beside(task, level), label, above=-_SOME, below=_SOME, task=task) for task, label, level in _TABLE],
    ),
    core(
        "task2-rope-superior",
        f"{V1}, 4.2 (against its own Table 1)",
        "On Task 2 RoPE imposes even less overhead than absolute encoding and yields superior test accuracy.",
        f"RoPE compared with absolute: {BETTER}. Supporting (little overhead): NoPE − RoPE is below {_SOME:g} "
        f"({_WHY_SOME}). {STOPPED}",
        [
            count(ACCURACY, "rope", "absolute", above=MARGIN),
            supporting(count(ACCURACY, "nope", "rope", below=_SOME)),
        ],
    ),
    core(
        "task1-convergence-order",
        f"{V1}, 4.2",
        "On Task 1 the order of convergence is RoPE, Absolute, ALiBi.",
        "Number of examples until the skill on training examples reaches 0.5: absolute needs more than "
        f"{_FASTER:g} doublings more than RoPE, and ALiBi than absolute ({_WHY_FASTER}).",
        [partial(_faster, fast="rope", slow="absolute"), partial(_faster, fast="absolute", slow="alibi")],
    ),
    core(
        "task1-rope-smallest-gap",
        f"{V1}, 4.2",
        "On Task 1 RoPE has a minimal generalisation gap.",
        "RoPE's accuracy on training examples (after training, without dropout) minus its test accuracy is below 0.05, "
        f"which is hardly visible in the source's figure. {STOPPED} They also need a skill of 0.25 or more on training "
        "examples. Supporting: the gap of each of absolute, relative, ALiBi and NoPE (and random, if run) is larger "
        f"than RoPE's by more than {MARGIN:g}.",
        [Test(_OWN_GAP, "rope", below=0.05), supporting(Test(_OWN_GAP, RIVALS, "rope", above=MARGIN))],
    ),
    core(
        "mla-near-best",
        f"{FINAL}: near-optimal performance on both tasks",
        "MLA comes near the best encoding on both tasks.",
        f"On each task, MLA minus each other encoding is above −{_SOME:g} ({_WHY_SOME}). Supporting (the encodings "
        f"differ): MLA is better than NoPE on Task 1 and than RoPE on Task 2 by more than {_SOME:g}, as in the source. "
        f"{STOPPED}",
        [
            _near_best,
            supporting(Test(_LEVEL[DISTANCE], "mla", "nope", above=_SOME)),
            supporting(count(_LEVEL[COUNT], "mla", "rope", above=_SOME)),
        ],
    ),
    core(
        "mla-small-cost",
        f"{V1}, C.3",
        "MLA costs a little generalisation on Task 1.",
        f"RoPE − MLA is above {MARGIN:g} (otherwise there is no loss) and below {_SOME:g} (otherwise it is not "
        f"little). {STOPPED}",
        [Test(ACCURACY, "rope", "mla", above=MARGIN, below=_SOME)],
    ),
    others(
        "task1-random-overfits",
        f"{V1}, 4.2",
        "On Task 1 a random table matches absolute encoding in training accuracy but generalises worse.",
        f"Random − Absolute: accuracy on training examples within {_SOME:g} ({_WHY_SOME}); test accuracy below "
        f"−{MARGIN:g}. {STOPPED}",
        [
            Test(_FIT, "random", "absolute", above=-_SOME, below=_SOME),
            Test(ACCURACY, "absolute", "random?", above=MARGIN, what="test accuracy, Absolute − Random"),
        ],
    ),
    others(
        "task2-positions-cost",
        f"{V1}, 4.2",
        "On Task 2 imposing position generally degrades generalisation.",
        f"NoPE compared with the mean of absolute, RoPE, relative, ALiBi and random: {BETTER}. {STOPPED}",
        [_COST],  # one comparison: "generally" does not mean "each"
    ),
    others(
        "task2-absolute-mild",
        f"{V1}, 4.2",
        "On Task 2 absolute encoding costs a mild penalty.",
        f"NoPE − absolute is above {MARGIN:g} (otherwise there is no penalty) and below {_SOME:g} ({_WHY_SOME}). "
        f"{STOPPED}",
        [count(ACCURACY, "nope", "absolute", above=MARGIN, below=_SOME)],
    ),
    others(
        "task2-absolute-moderate",
        f"{FINAL}: results table",
        "On Task 2 absolute encoding does moderately: between MLA, the best, and ALiBi, the worst.",
        f"MLA compared with absolute, and absolute with ALiBi: {BETTER}. {STOPPED}",
        [count(ACCURACY, "mla", "absolute", above=MARGIN), count(ACCURACY, "absolute", "alibi", above=MARGIN)],
    ),
    others(
        "task2-relative-like-nope",
        f"{V1}, 4.2",
        "On Task 2 the relative encoding matches NoPE.",
        f"Relative − NoPE is between −0.05 and 0.05, where curves overlap visually. {STOPPED}",
        [count(ACCURACY, "relative", "nope", above=-0.05, below=0.05)],
    ),
    others(
        "task2-relative-bias-attenuates",
        f"{V1}, 4.2",
        "On Task 2 the relative encoding attenuates its learned bias toward zero.",
        "Spread of the learned bias over the offsets (root mean square about each head's mean): after Task 2 it is "
        "less than half of that after Task 1, which needs position.",
        _bias_attenuates,
    ),
    others(
        "task2-random-perfect-fit",
        f"{V1}, 4.2",
        "On Task 2 a random table fits the training examples perfectly.",
        f"Random's accuracy on training examples is above 0.98, which looks like 1 in the source's figure. {STOPPED}",
        [count(_FIT, "random", above=0.98)],
    ),
    others(
        "task2-random-largest-gap",
        f"{V1}, 4.2",
        "On Task 2 a random table has the largest gap between train and test.",
        "Random's gap (accuracy on training examples − test accuracy) minus the gap of each of RoPE, absolute, "
        f"relative, ALiBi and NoPE is above {MARGIN:g} ({WHY_MARGIN}). {STOPPED}",
        [count(_GAP, "random", ("rope", "absolute", "relative", "alibi", "nope"), above=MARGIN)],
    ),
    others(
        "task2-alibi-worst",
        f"{V1}, 4.2; {FINAL}: results table",
        "On Task 2 ALiBi is worst of all.",
        f"Each of NoPE, RoPE, absolute, relative, random and MLA compared with ALiBi: {BETTER}. {STOPPED}",
        [count(ACCURACY, ("nope", "rope", "absolute", "relative", "random", "mla"), "alibi", above=MARGIN)],
    ),
)
