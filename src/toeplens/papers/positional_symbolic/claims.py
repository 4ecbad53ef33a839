"""Claims about positional and symbolic heads, frequencies and length, judged on a grid study.

Required labels: the tasks index, retrieval, mix; the encodings rope, nope, high, low; the scan turn. The first rules
were written before the recorded study was analysed; one trial per kind of model with another seed (7) had set the task
sizes and the scan's range. Thresholds and parts were rewritten afterwards, when the record of seeds 42 to 44 was known.

Only the abstract of arXiv 2511.11579 was available. Claims with source "ours" are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite, pi

import numpy as np

from toeplens import encodings
from toeplens.lens.kit.intervals import spearman
from toeplens.studies.grid import measured as heads
from toeplens.studies.grid.relations import FIGURES, Relation
from toeplens.studies.grid.spec import Column
from toeplens.studies.grid.study import Evidence
from toeplens.studies.kit.claims import BETTER, MARGIN, STOPPED, WHY_MARGIN, Claim, Test, left_out
from toeplens.studies.kit.results import ACCURACY, ONLY_SKILLED, SKILLED, CellResult, Figure
from toeplens.studies.kit.verdicts import (
    ENOUGH,
    LEVEL,
    NONE_COUNTS,
    Finding,
    above,
    below,
    contrast,
    difference,
    one_sided,
    opposite,
    supporting,
    unknown,
)

SISTER = "arXiv 2511.11579, abstract"
OURS = "ours"
PAPER = "arXiv 2505.13027 v1"
INDEX, RETRIEVAL, MIX = "index", "retrieval", "mix"
ROPE, NOPE, HIGH, LOW, SCAN = "rope", "nope", "high", "low", "turn"
STRONG = 0.5
WHY_STRONG = "correlations from 0.5 are commonly called large"


def of_skilled(words: str, of: Callable[[CellResult], float], without: str, grain: float = 0.005) -> Figure:
    """A figure for models with enough skill and a finite value."""
    return Figure(words, of, lambda cell: cell.skilled and isfinite(of(cell)), f"no skill, or {without}", grain)


def _accuracy(task: str) -> Figure:
    return replace(ACCURACY, words=f"accuracy on {task}, ")


def _skill(task: str) -> Figure:
    return Figure(f"skill on {task}, ", lambda cell: cell.skill, ACCURACY.counts, ACCURACY.without)


_BOTH = 0.6
_PURE = 0.9
_WHY_PURE = "allowing a tenth for incomplete training"
_MOST = 0.5
_CHANGE = 0.1
_NO_HEAD = "no head with a significant ablation effect"
_COUNTS = (
    "Ablation effects are measured by loss, as accuracy hardly changes in models that solve the task. Only heads whose "
    "effect's interval excludes 0 count."
)
_INTRICATE = "reverse", "dyck"
_HALF = 0.5


# ---- exclusion -------------------------------------------------------------------------------------------------------


def _exclusion(data: Evidence) -> list[Finding]:
    """Per seed, the largest over heads of the smaller of the two scores."""
    largest: dict[int, float] = {}
    count = 0
    for cell in data.results.cells:
        scores = cell.measure("permutations")
        if scores is not None:
            smaller = np.fmin(scores.logits.positional, scores.logits.symbolic)
            smaller = smaller[np.isfinite(smaller)]
            count += smaller.size
            if smaller.size:
                largest[cell.key.seed] = max(largest.get(cell.key.seed, -1.0), float(smaller.max()))
    what = f"largest over a seed's heads of the smaller sampled score ({count} heads)"
    return [below(what, largest, _BOTH, grain=0.02)]


# ---- which heads solve a task ----------------------------------------------------------------------------------------


def _carried(task: str, share: str) -> Figure:
    words = f"{share} share of the heads that carry the skill on {task}, "
    return of_skilled(words, lambda cell: heads.carried(cell, share), _NO_HEAD, grain=0.02)


def _pure(data: Evidence, task: str, share: str) -> list[Finding]:
    """Test of the task's kind: the mean over all unrestricted encodings, with equal weights."""
    figure = _carried(task, share)
    labels = [column.label for column in data.spec.columns() if _free(column)]
    values = {label: row for label in labels if (row := figure.by_seed(data.results.of(task, label)))}
    if not values:
        return [unknown(f"{figure.words}mean over encodings", NONE_COUNTS)]
    mean = contrast(*((1 / len(values), row) for row in values.values()), grain=figure.grain)
    what = f"{figure.words}mean over encodings ({', '.join(data.title(label) for label in values)})"
    return [above(what, mean, _PURE)]


def _free(column: Column) -> bool:
    """Whether an encoding is not restricted to a frequency band and adds no position at the input."""
    kind = encodings.get(column.encoding)
    return not column.scan and column.label not in (HIGH, LOW) and "input" not in (kind.coupling, *kind.also_couples)


def _exceeds(data: Evidence, task: str) -> list[Finding]:
    """No encoding reaches a skill of 0.5; models that are still learning give a lower bound."""
    labels = data.results.labels(task)
    if not labels:
        return [unknown(f"skill on {task}", NONE_COUNTS)]
    findings = []
    skill = replace(_skill(task), counts=lambda cell: cell.status == "complete")
    for label in labels:
        stopped = all(cell.settled for cell in data.results.of(task, label))
        [finding] = Test(skill, label, below=_HALF, task=task)(data)
        findings.append(one_sided(finding, holds=stopped, fails=True, why="models that are still learning"))
    return findings


# ---- how heads change during training --------------------------------------------------------------------------------


def _emerges(task: str, share: str) -> list[Test]:
    """Test of the heads of the trained model, weighted by their ablation effect."""

    def at(cell: CellResult, place: int) -> float:
        rows = [row for row in cell.watched if row.get(share) is not None]
        return heads.weighed(cell, heads.array(rows[place][share])) if len(rows) > 1 else float("nan")

    what = f"{share} share of the heads that carry the skill on {task}"
    without = f"{_NO_HEAD}, or not measured during training"
    end = of_skilled(f"{what}, at the end, ", lambda cell: at(cell, -1), without, grain=0.02)
    gain = of_skilled(f"{what}, end − beginning, ", lambda cell: at(cell, -1) - at(cell, 0), without, grain=0.02)
    return [Test(end, ROPE, above=_PURE, task=task), Test(gain, ROPE, above=_CHANGE, task=task)]


def _emerging(kind: str, task: str) -> Claim[Evidence]:
    return Claim(
        f"{kind}-head-emerges",
        OURS,
        f"Purely {kind} heads emerge in training.",
        f"RoPE on {task}: the {kind} share of the heads that carry the trained model's skill (weighted by ablation "
        f"effect) is above {_PURE:g} at the end ({_WHY_PURE}), and larger than at the beginning by more than "
        f"{_CHANGE:g}. {_COUNTS} {ONLY_SKILLED}",
        _emerges(task, kind),
    )


_CONTROL = 0.25
_NATS = 0.1
_NO_BEGINNING = "the models were not measured before training"
_WHOLE = "training until all models of the scan have stopped learning"
Row = list[tuple[float, float]]  # frequency and accuracy, seed by seed


# ---- frequencies that heads use --------------------------------------------------------------------------------------


def _correspondence(data: Evidence) -> list[Finding]:
    what = "rank correlation over heads of the frequencies' centre with positional − symbolic share"
    after, before = (_correlations(data, *measures) for measures in (("frequency", "behaviour"), ("beginning",) * 2))
    more = {seed: after[seed] - before[seed] for seed in after if seed in before}
    gain = "that correlation − its value before training"
    taught = above(gain, more, 0.0, grain=0.02) if more or not after else unknown(gain, _NO_BEGINNING)
    return [above(what, after, STRONG, grain=0.02), supporting(taught)]


def _correlations(data: Evidence, use: str, follows: str) -> dict[int, float]:
    """Correlation of two measures by seed, over the heads of all tasks' models with enough skill."""
    by_seed: dict[int, list[tuple[float, float]]] = {}
    for task in data.spec.tasks:
        for cell in data.skilled(task, ROPE):
            used, found = cell.measure(use), cell.measure(follows)
            if used is not None and found is not None:
                pairs = zip(used.centre.ravel(), (found.positional - found.symbolic).ravel(), strict=True)
                by_seed.setdefault(cell.key.seed, []).extend(pair for pair in pairs if np.isfinite(pair).all())
    return {seed: float(spearman(np.array(pairs).T)) for seed, pairs in sorted(by_seed.items()) if len(pairs) > 2}


def _halves(cell: CellResult) -> float:
    """Loss increase without the faster half of the frequencies minus that without the slower; NaN without effects."""
    bands = cell.measure("bands")
    if bands is None:
        return float("nan")
    sure = np.isnan(bands.low) | (bands.low > 0)
    lost = np.nansum(np.where(sure, np.clip(bands.drops, 0, None), 0.0), axis=(0, 1))
    half = len(lost) // 2
    return float(lost[:half].sum() - lost[half:].sum()) if lost.any() else float("nan")


_TURNING = of_skilled("loss on index without the faster half − without the slower half, ", _halves, "not measured")


# ---- models restricted to frequency bands ----------------------------------------------------------------------------


def _needed(kind: str, task: str, right: str, wrong: str, words: tuple[str, str]) -> Claim[Evidence]:
    return Claim(
        f"{task}-needs-{right}-frequencies",
        SISTER,
        f"A {kind} task is learned better with only {right} frequencies than with only {wrong} ones: the available "
        "frequencies control performance.",
        f"On {task}, the three {words[0]} frequencies compared with the three {words[1]}: {BETTER}. Supporting (they "
        f"control performance): the skill is higher by more than {_CONTROL:g}. {STOPPED}",
        [
            Test(_accuracy(task), right, wrong, above=MARGIN, task=task),
            supporting(Test(_skill(task), right, wrong, above=_CONTROL, task=task)),
        ],
    )


def _with_high_alone(data: Evidence) -> list[Finding]:
    """Test only if each frequency of the high band makes at least one full rotation within a sequence."""
    what = "accuracy on mix with only the highest frequencies"
    keep = next((column.options.get("keep") for column in data.spec.columns() if column.label == HIGH), None)
    for cell in data.results.of(MIX, HIGH):
        use, longer = cell.measure("frequency"), cell.measure("extrapolation")
        if use is None or longer is None:
            continue
        band = use.frequencies[0, 0] if keep is None else use.frequencies[0, 0][list(keep)]
        slowest, bar = float(band.min()), 2 * pi / longer.trained_length
        if slowest < bar:
            why = f"the band's {slowest:.2g} radians per token make less than one full rotation within a sequence"
            return [unknown(what, why, f"a study whose high band ends above {bar:.2g} radians per token")]
        return Test(_accuracy(MIX), ROPE, HIGH, above=MARGIN, task=MIX)(data)
    return [unknown(what, NONE_COUNTS)]


# ---- models with one frequency ---------------------------------------------------------------------------------------


def _scan(data: Evidence, task: str, sign: int) -> list[Finding]:
    """Is an inner frequency better (sign 1) or worse (-1) than both ends of the scan?"""
    columns = sorted((c for c in data.spec.columns() if c.scan == SCAN), key=lambda column: column.value or 0.0)
    if len(columns) < 3:
        why = "no scan with at least three frequencies"
        return [unknown(f"accuracy on {task} by frequency", why, "a scan called turn")]
    rows = {column.value or 0.0: ACCURACY.by_seed(data.results.of(task, column.label)) for column in columns}
    whole = sorted(set.intersection(*(set(row) for row in rows.values())))
    if not whole:
        missing = left_out(data.results, ACCURACY, task, *(column.label for column in columns))
        return [unknown(f"accuracy on {task} by frequency{missing}", "no seed has a complete scan", _WHOLE)]
    low, *inner, high = ([(value, row[seed]) for seed in whole] for value, row in rows.items())
    return [_gap(task, sign, _chosen(inner, sign), end) for end in (low, high)]


def _gap(task: str, sign: int, inner: Row, end: Row) -> Finding:
    """An inner frequency minus an end of the scan, or the reverse (sign -1), over seeds."""
    chosen = ", ".join(f"{value:g}" for value in sorted({value for value, _ in inner}))
    names = [f"the {'best' if sign > 0 else 'worst'} inner frequency ({chosen})", f"{end[0][0]:g}"][::sign]
    first, second = ([accuracy for _, accuracy in row] for row in (inner, end)[::sign])
    return above(f"accuracy on {task} at {names[0]} − at {names[1]}", difference(first, second), MARGIN)


def _chosen(inner: Sequence[Row], sign: int) -> Row:
    """For each seed, the best (or worst) frequency on the other seeds, and the seed's accuracy there.

    This avoids selection bias. A single seed chooses for itself.
    """
    table = sign * np.array([[accuracy for _, accuracy in row] for row in inner])
    count = table.shape[1]
    means = table if count == 1 else (table.sum(1, keepdims=True) - table) / (count - 1)
    return [inner[best][seed] for seed, best in enumerate(means.argmax(0))]


def _scanned(name: str, task: str, kind: str, sign: int) -> Claim[Evidence]:
    side, shape = ("highest", "better") if sign > 0 else ("lowest", "worse")
    return Claim(
        name,
        OURS,
        f"With one frequency for all pairs, accuracy on the {kind} task is {side} at an intermediate frequency.",
        f"The inner frequency that is {'best' if sign > 0 else 'worst'} on the other seeds is {shape} than either end "
        f"of the scan by more than {100 * MARGIN:g} percentage points of mean final test accuracy ({WHY_MARGIN}). "
        f"{STOPPED} A seed counts only if all models of its scan count, to avoid a bias against slow learners.",
        partial(_scan, task=task, sign=sign),
    )


_SKILL = 0.05
_TWICE = 2.0
_FAMILIES = (
    f"at {heads.LONGER:g} times the length it is below 0. The interval is a jackknife over families of encodings "
    "(Student's, on Fisher's scale). Encodings of one family use position in the same way: not at all, at the input, "
    f"as a bias, by rotation, ... With fewer than {ENOUGH} families or seeds the verdict is only indicative. "
    f"Supporting: the other lengths, for the same models. {ONLY_SKILLED}"
)


def _extrapolates(data: Evidence) -> list[Finding]:
    findings = []
    for factor in (heads.LONGER, _TWICE):
        figure = of_skilled("", lambda cell, factor=factor: heads.kept(cell, factor), "no such sequences", grain=0.02)
        retrieval, index = (figure.by_seed(data.results.of(task, ROPE)) for task in (RETRIEVAL, INDEX))
        what = f"share of the skill kept at {factor:g} times the length, RoPE, retrieval − index"
        finding = above(what, difference(retrieval, index, figure.grain), _SKILL)
        findings.append(finding if factor == heads.LONGER else supporting(finding))
    return findings


def _falls(data: Evidence, figure: str) -> list[Finding]:
    """Test: is a figure of the heads negatively correlated with the skill kept on longer sequences?"""
    found = [each for each in data.relations if (each.figure, each.task) == (figure, None)]
    found.sort(key=lambda each: each.factor != heads.LONGER)
    if not found or found[0].factor != heads.LONGER:
        return [unknown(f"{FIGURES[figure][0]}, against longer sequences", NONE_COUNTS)]
    first, *rest = (opposite(_rises(each)) for each in found)
    return [first, *(supporting(finding) for finding in rest)]


def _rises(relation: Relation) -> Finding:
    """Test: is a rank correlation above 0?"""
    what = f"rank correlation of {relation.figure} with skill kept at {relation.factor:g} times the length"
    families, seeds = len(relation.families), len({point.seed for point in relation.points})
    wanted = f"{ENOUGH} families of encodings and {ENOUGH} seeds (now {families} and {seeds})"
    if relation.value is None:
        return unknown(what, "too few encodings, or no variation", wanted)
    counted = f"{len(relation.points)} models, {relation.encodings} encodings of {families} families"
    text = f"{what} ({counted}: {', '.join(relation.families)}): {relation.value:.3f}"
    if relation.low is None or relation.high is None or relation.chance is None:
        why = "no interval, as there are too few families or no variation without one of them"
        return Finding("undecided", f"{text}, threshold 0; {why}", wanting="more families in which it varies")
    text = f"{text} [{relation.low:.3f}, {relation.high:.3f}], threshold 0"
    if min(families, seeds) < ENOUGH:
        return Finding("leans to hold" if relation.value > 0 else "leans to fail", text, wanting=wanted)
    decided = Finding("undecided", text, relation.chance, 1 - relation.chance, wanting="more families of encodings")
    return replace(decided, verdict=decided.at(LEVEL))


CLAIMS: tuple[Claim[Evidence], ...] = (
    Claim(
        "exclusion",
        SISTER,
        "A head cannot be positional and symbolic at once.",
        "For each head, the smaller of its two sampled scores (invariance and equivariance of its logits); the largest "
        f"over all heads of a seed's models, mean over seeds, is below {_BOTH:g}. This is half way between 0.5, the "
        "maximum for exact shares, which sum to at most 1, and 0.71, the maximum for sampled scores, which sum to at "
        "most √2.",
        _exclusion,
    ),
    Claim(
        "canonical-heads",
        OURS,
        "Positional heads solve the positional task, and symbolic heads the symbolic task.",
        "Shares of RoPE's heads, weighted by ablation effect: on index the positional share is above "
        f"{_MOST:g}; on retrieval the symbolic share is above {_MOST:g}. {_COUNTS} {ONLY_SKILLED}",
        [
            Test(_carried(INDEX, "positional"), ROPE, above=_MOST, task=INDEX),
            Test(_carried(RETRIEVAL, "symbolic"), ROPE, above=_MOST, task=RETRIEVAL),
        ],
    ),
    Claim(
        "canonical-tasks-pure",
        SISTER,
        "The canonical tasks are purely positional or purely symbolic.",
        "Shares of the heads that carry the skill, weighted by ablation effect, mean over the encodings that learn the "
        f"task: on index the positional share is above {_PURE:g}; on retrieval the symbolic share is above {_PURE:g} "
        f"({_WHY_PURE}). Encodings restricted to a frequency band are excluded. So are encodings that add position at "
        f"the input, where it moves together with the permuted keys. {_COUNTS} {ONLY_SKILLED}",
        [partial(_pure, task=INDEX, share="positional"), partial(_pure, task=RETRIEVAL, share="symbolic")],
    ),
    Claim(
        "canonical-tasks",
        OURS,
        "The positional task needs a positional encoding and the symbolic one does not.",
        f"On index, RoPE compared with NoPE: {BETTER}; NoPE's skill is below {SKILLED:g}. On retrieval, RoPE − NoPE is "
        f"below {MARGIN:g}; NoPE's skill is above {SKILLED:g} (otherwise neither learns the task). {STOPPED}",
        [
            Test(_accuracy(INDEX), ROPE, NOPE, above=MARGIN, task=INDEX),
            Test(_skill(INDEX), NOPE, below=SKILLED, task=INDEX),
            Test(_accuracy(RETRIEVAL), ROPE, NOPE, below=MARGIN, task=RETRIEVAL),
            Test(_skill(RETRIEVAL), NOPE, above=SKILLED, task=RETRIEVAL),
        ],
    ),
    Claim(
        "intricate-tasks-exceed",
        f"{PAPER}, 6 (likely, there)",
        "More intricate tasks, reversing a sequence or Dyck languages, exceed a Transformer's positional reasoning.",
        f"The skill of every trained encoding on {' and on '.join(_INTRICATE)} is below {_HALF:g}. Models that are "
        "still learning count only against the claim, as their skill can still grow.",
        [partial(_exceeds, task=task) for task in _INTRICATE],
    ),
    _emerging("positional", INDEX),
    _emerging("symbolic", RETRIEVAL),
    Claim(
        "behaviour-and-frequency",
        f"{SISTER} (about language models)",
        "How positional a head is corresponds strongly to the frequencies it uses: high ones positional, low symbolic.",
        "Over all heads of a seed's RoPE models of all tasks, Spearman's correlation of the frequencies' centre "
        f"(octaves, by variance) with the positional − symbolic share is above {STRONG:g} ({WHY_STRONG}). Supporting "
        "(training causes it): it is larger than over the same heads before training, where the weights are random. "
        f"{ONLY_SKILLED}",
        _correspondence,
    ),
    _needed("positional", INDEX, HIGH, LOW, ("highest", "lowest")),
    _needed("symbolic", RETRIEVAL, LOW, HIGH, ("lowest", "highest")),
    Claim(
        "mix-needs-both",
        OURS,
        "A task that is both needs both kinds of frequencies.",
        f"On mix, all frequencies compared with only the three lowest, and with only the three highest: {BETTER}. The "
        "second is tested only if each of the highest makes at least one full rotation within a sequence, as "
        f"intermediate frequencies can serve both. {STOPPED}",
        [Test(_accuracy(MIX), ROPE, LOW, above=MARGIN, task=MIX), _with_high_alone],
    ),
    _scanned("index-inverted-u", INDEX, "positional", 1),
    _scanned("retrieval-u", RETRIEVAL, "symbolic", -1),
    _scanned("mix-inverted-u", MIX, "mixed", 1),
    Claim(
        "faster-half-at-inference",
        SISTER,
        "In a trained model the positional task depends on the high frequencies.",
        "Loss increase on index when single frequencies of single heads are frozen, summed over heads: the sum over "
        f"the faster half of RoPE's frequencies exceeds that over the slower half by more than {_NATS:g} nats (a tenth "
        f"of the label's probability). Only effects whose interval excludes 0 count. {ONLY_SKILLED}",
        [Test(_TURNING, ROPE, above=_NATS, task=INDEX, unit=" nats")],
    ),
    Claim(
        "symbolic-extrapolates",
        OURS,
        "RoPE extrapolates in length better on the symbolic task than on the positional one.",
        f"At {heads.LONGER:g} times the training length, RoPE keeps a larger share of its skill on retrieval than on "
        f"index, by more than {_SKILL:g}. Supporting: the same at {_TWICE:g} times the length, for the same models. "
        f"{ONLY_SKILLED}",
        _extrapolates,
    ),
    Claim(
        "positional-share-against-length",
        OURS,
        "The more positional the heads that carry a model's skill, the less it extrapolates.",
        "Rank correlation over models, within tasks, of the positional share of the heads that carry the skill with "
        f"the skill kept on longer sequences: {_FAMILIES}",
        partial(_falls, figure="positional"),
    ),
    Claim(
        "deposit-against-length",
        f"{PAPER}, 5.2 and appendix D",
        "The more a model's skill is deposited in one head, the less it extrapolates (a hypothesis there).",
        "Rank correlation over models, within tasks, of the largest ablation effect of a head with the skill kept on "
        f"longer sequences: {_FAMILIES}",
        partial(_falls, figure="deposit"),
    ),
    Claim(
        "coupling-against-length",
        f"{PAPER}, appendix D",
        "The less position and content are coupled, the better a model extrapolates (a hypothesis there).",
        "Rank correlation over models, within tasks, of the interaction share of the heads that carry the skill with "
        f"the skill kept on longer sequences: {_FAMILIES}",
        partial(_falls, figure="interaction"),
    ),
)

__all__ = ["CLAIMS", "Evidence"]
