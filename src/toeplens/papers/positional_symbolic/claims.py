"""Claims about positional and symbolic heads, frequencies and length, judged on a grid study.

They know tasks and encodings by the labels index, retrieval, mix; rope, nope, high, low, and the scan turn. The first
rules were written before the study that is recorded was looked at; what was seen before was one trial of each kind of
model under another seed (7), which set the sizes of the tasks and the range of the scan. Bars and parts were written
anew after it, when all ledgers got one kind of rule: for these the record of seeds 42 to 44 was known.

Of arXiv 2511.11579 we have the abstract. What stands there has it as its source; "ours" is what does not.
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
from toeplens.studies.kit.asking import (
    BETTER,
    MARGIN,
    STOPPED,
    WHY_MARGIN,
    Test,
    ask,
    ask_difference,
    left_out,
    over,
    under,
)
from toeplens.studies.kit.claims import Claim, as_support, every
from toeplens.studies.kit.contrasts import contrast, difference
from toeplens.studies.kit.results import ACCURACY, ONLY_SKILLED, SKILLED, CellResult, Figure
from toeplens.studies.kit.verdicts import ENOUGH, LEVEL, Finding, above, below, one_sided, opposite, supporting, unknown

SISTER = "arXiv 2511.11579, abstract"
OURS = "ours"
PAPER = "arXiv 2505.13027 v1"
INDEX, RETRIEVAL, MIX = "index", "retrieval", "mix"
ROPE, NOPE, HIGH, LOW, SCAN = "rope", "nope", "high", "low", "turn"
STRONG = 0.5
WHY_STRONG = "from half on a correlation is commonly called large"

Check = Callable[[Evidence], list[Finding]]


def named(data: Evidence, label: str) -> str:
    """What people call an encoding; its label where the study has none of that label."""
    return next((column.title for column in data.spec.columns() if column.label == label), label)


def of_skilled(words: str, of: Callable[[CellResult], float], without: str, grain: float = 0.005) -> Figure:
    """A figure of models that learned enough, of those that have it."""
    return Figure(words, of, lambda cell: cell.skilled and isfinite(of(cell)), f"no skill, or {without}", grain)


def model(task: str, label: str, figure: Figure, test: Test) -> Check:
    """A figure's mean over the models of a task and an encoding that count."""
    return lambda data: [ask(data.results, task, label, figure, test, partial(named, data))]


def better(task: str, first: str, second: str, figure: Figure = ACCURACY, test: Test | None = None) -> Check:
    """A figure, the test accuracy unless given, of one encoding's models on a task less another's."""

    def check(data: Evidence) -> list[Finding]:
        title = partial(named, data)
        what = "" if figure.words else f"accuracy on {task}, {title(first)} - {title(second)}"
        return [ask_difference(data.results, task, first, second, title, figure=figure, test=test, what=what)]

    return check


_BOTH = 0.6
_PURE = 0.9
_WHY_PURE = "a tenth is left for what training does not clean away"
_MOST = 0.5
_CHANGE = 0.1
_NO_HEAD = "no head whose loss is told from none"
_COUNTS = (
    "What is lost is nats: of models that get all right hardly a head's cost in accuracy is told from none. A head "
    "counts if its interval leaves 0."
)
_INTRICATE = "reverse", "dyck"
_HALF = 0.5


# ---- what a head may be ----------------------------------------------------------------------------------------------


def _exclusion(data: Evidence) -> list[Finding]:
    """The most that any head of a seed's models comes near to being both."""
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
    what = f"the smaller of a head's sampled scores, largest of a seed's models ({count} heads)"
    return [below(what, largest, _BOTH, grain=0.02)]


# ---- which heads do a task -------------------------------------------------------------------------------------------


def _carried(task: str, share: str) -> Figure:
    words = f"{share} share of what carries the skill on {task}, "
    return of_skilled(words, lambda cell: heads.carried(cell, share), _NO_HEAD, grain=0.02)


def _pure(task: str, share: str) -> Check:
    """The task's own kind, so over all encodings that may do it as they like: each weighs alike."""

    def check(data: Evidence) -> list[Finding]:
        figure = _carried(task, share)
        labels = [column.label for column in data.spec.columns() if _free(column)]
        values = {label: row for label in labels if (row := figure.by_seed(data.results.of(task, label)))}
        if not values:
            return [unknown(f"{figure.words}mean over encodings", "no finished run that counts")]
        mean = contrast(*((1 / len(values), row) for row in values.values()), grain=figure.grain)
        what = f"{figure.words}mean over encodings ({', '.join(named(data, label) for label in values)})"
        return [above(what, mean, _PURE)]

    return check


def _free(column: Column) -> bool:
    """Whether an encoding is held to no band, and its keys have no position in them that would move with them."""
    kind = encodings.get(column.encoding)
    return not column.scan and column.label not in (HIGH, LOW) and "input" not in (kind.coupling, *kind.also_couples)


def _skill(task: str) -> Figure:
    return Figure(f"skill on {task}, ", lambda cell: cell.skill, ACCURACY.counts, ACCURACY.without)


def _exceeds(task: str) -> Check:
    """No encoding learns half of a task; a model that is still learning has learned no less than it has."""

    def check(data: Evidence) -> list[Finding]:
        labels = data.results.labels(task)
        if not labels:
            return [unknown(f"skill on {task}", "no finished run that counts")]
        findings = []
        skill = replace(_skill(task), counts=lambda cell: cell.status == "complete")
        for label in labels:
            stopped = all(cell.settled for cell in data.results.of(task, label))
            findings += [
                one_sided(finding, holds=stopped, fails=True, why="models that are still learning")
                for finding in model(task, label, skill, under(_HALF))(data)
            ]
        return findings

    return check


# ---- how heads come to it --------------------------------------------------------------------------------------------


def _emerges(task: str, share: str) -> Check:
    """The heads are those that matter in the trained model, each weighed by what is lost without it."""

    def at(cell: CellResult, place: int) -> float:
        rows = [row for row in cell.watched if row.get(share) is not None]
        return heads.weighed(cell, heads.array(rows[place][share])) if len(rows) > 1 else float("nan")

    what = f"{share} share of the heads that carry the skill on {task}"
    without = f"{_NO_HEAD}, or not watched"
    end = of_skilled(f"{what}, at the end, ", lambda cell: at(cell, -1), without, grain=0.02)
    gain = of_skilled(f"{what}, end less beginning, ", lambda cell: at(cell, -1) - at(cell, 0), without, grain=0.02)
    return every(model(task, ROPE, end, over(_PURE)), model(task, ROPE, gain, over(_CHANGE)))


def _emerging(kind: str, task: str) -> Claim[Evidence]:
    return Claim(
        f"{kind}-head-emerges",
        OURS,
        f"Purely {kind} heads emerge in training.",
        f"RoPE on {task}: the {kind} share of the heads that carry the trained model's skill, each weighed by what is "
        f"lost without it, over {_PURE:g} at the end ({_WHY_PURE}), and over that at the beginning by more than "
        f"{_CHANGE:g} (a tenth of what a head's logits vary by: with less it is the head it was). {_COUNTS} "
        f"{ONLY_SKILLED}",
        _emerges(task, kind),
    )


_CONTROL = 0.25
_NATS = 0.1
_NO_BEGINNING = "what the models were before training was not measured"
_WHOLE = "training until all models of the scan have stopped learning"
Row = list[tuple[float, float]]  # frequency and accuracy, seed by seed


# ---- what heads use --------------------------------------------------------------------------------------------------


def _correspondence(data: Evidence) -> list[Finding]:
    what = "rank correlation over heads of the frequencies' centre with positional less symbolic share"
    after, before = (_correlations(data, *measures) for measures in (("frequency", "behaviour"), ("beginning",) * 2))
    more = {seed: after[seed] - before[seed] for seed in after if seed in before}
    gain = "that correlation less what it is before training"
    taught = above(gain, more, 0.0, grain=0.02) if more or not after else unknown(gain, _NO_BEGINNING)
    return [above(what, after, STRONG, grain=0.02), supporting(taught)]


def _correlations(data: Evidence, use: str, follows: str) -> dict[int, float]:
    """By the measures of these names, seed by seed over the heads of all tasks' models that learned enough."""
    by_seed: dict[int, list[tuple[float, float]]] = {}
    for task in data.spec.tasks:
        for cell in data.skilled(task, ROPE):
            used, found = cell.measure(use), cell.measure(follows)
            if used is not None and found is not None:
                pairs = zip(used.centre.ravel(), (found.positional - found.symbolic).ravel(), strict=True)
                by_seed.setdefault(cell.key.seed, []).extend(pair for pair in pairs if np.isfinite(pair).all())
    return {seed: float(spearman(np.array(pairs).T)) for seed, pairs in sorted(by_seed.items()) if len(pairs) > 2}


def _halves(cell: CellResult) -> float:
    """Nats lost without the faster half of the frequencies less those without the slower; NaN where none matters."""
    bands = cell.measure("bands")
    if bands is None:
        return float("nan")
    sure = np.isnan(bands.low) | (bands.low > 0)
    lost = np.nansum(np.where(sure, np.clip(bands.drops, 0, None), 0.0), axis=(0, 1))
    half = len(lost) // 2
    return float(lost[:half].sum() - lost[half:].sum()) if lost.any() else float("nan")


_TURNING = of_skilled("loss on index without the faster half less that without the slower, ", _halves, "not measured")


# ---- what is learned with bands --------------------------------------------------------------------------------------


def _needed(kind: str, task: str, right: str, wrong: str, words: tuple[str, str]) -> Claim[Evidence]:
    return Claim(
        f"{task}-needs-{right}-frequencies",
        SISTER,
        f"A {kind} task is learned better with {right} frequencies alone than with {wrong} ones: which frequencies "
        "heads may use controls performance.",
        f"On {task}, the three {words[0]} frequencies alone against the three {words[1]}: {BETTER}. Supporting, that "
        f"this controls performance: skill higher by more than {_CONTROL:g}, since a quarter of what can be learned "
        f"is what counts as having learned something. {STOPPED}",
        every(better(task, right, wrong), as_support(better(task, right, wrong, _skill(task), over(_CONTROL)))),
    )


def _with_high_alone(data: Evidence) -> list[Finding]:
    """Only asked where the high band is one: each of its frequencies goes round at least once in a text."""
    what = "accuracy on mix with the highest frequencies alone"
    keep = next((column.options.get("keep") for column in data.spec.columns() if column.label == HIGH), None)
    for cell in data.results.of(MIX, HIGH):
        use, longer = cell.measure("frequency"), cell.measure("extrapolation")
        if use is None or longer is None:
            continue
        band = use.frequencies[0, 0] if keep is None else use.frequencies[0, 0][list(keep)]
        slowest, bar = float(band.min()), 2 * pi / longer.trained_length
        if slowest < bar:
            why = f"the band goes down to {slowest:.2g} radians a token, which does not go round in a text"
            return [unknown(what, why, f"a study whose high band ends above {bar:.2g} radians a token")]
        return better(MIX, ROPE, HIGH)(data)
    return [unknown(what, "no finished run that counts")]


# ---- what is learned with one frequency ------------------------------------------------------------------------------


def _scan(task: str, sign: int) -> Check:
    """Is an inner frequency better (sign 1) or worse (-1) than both ends of the scan?"""

    def check(data: Evidence) -> list[Finding]:
        columns = sorted((c for c in data.spec.columns() if c.scan == SCAN), key=lambda column: column.value or 0.0)
        if len(columns) < 3:
            return [unknown(f"accuracy on {task} by frequency", "no scan of three or more", "a scan called turn")]
        rows = {column.value or 0.0: ACCURACY.by_seed(data.results.of(task, column.label)) for column in columns}
        whole = sorted(set.intersection(*(set(row) for row in rows.values())))
        if not whole:
            missing = left_out(data.results, ACCURACY, task, *(column.label for column in columns))
            return [unknown(f"accuracy on {task} by frequency{missing}", "no seed has its whole scan", _WHOLE)]
        low, *inner, high = ([(value, row[seed]) for seed in whole] for value, row in rows.items())
        return [_gap(task, sign, _chosen(inner, sign), end) for end in (low, high)]

    return check


def _gap(task: str, sign: int, inner: Row, end: Row) -> Finding:
    """An inner frequency less an end, or the end less it (sign -1), over seeds."""
    chosen = ", ".join(f"{value:g}" for value in sorted({value for value, _ in inner}))
    names = [f"the {'best' if sign > 0 else 'worst'} inner frequency ({chosen})", f"{end[0][0]:g}"][::sign]
    first, second = ([accuracy for _, accuracy in row] for row in (inner, end)[::sign])
    return above(f"accuracy on {task} at {names[0]} less that at {names[1]}", difference(first, second), MARGIN)


def _chosen(inner: Sequence[Row], sign: int) -> Row:
    """For each seed, the frequency that is best, or worst, on the other seeds, and the seed's accuracy there.

    So the best of many by chance does not count as best. An only seed has to choose for itself.
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
        f"With one frequency for all pairs, accuracy on the {kind} task is {side} in between.",
        f"The inner frequency that is {'best' if sign > 0 else 'worst'} on the other seeds is {shape} than either end "
        f"of the scan by more than {100 * MARGIN:g} points of mean final test accuracy ({WHY_MARGIN}). {STOPPED} "
        "A seed counts if all models of its scan do: else those that learn longest could not be best.",
        _scan(task, sign),
    )


_SKILL = 0.05
_TWICE = 2.0
_FAMILIES = (
    f"at {heads.LONGER:g} times the length below 0 (the statement has a direction and no strength), by an interval "
    "over families of encodings: those are of one family in which position enters in the same way (nowhere, at the "
    "input, as a bias, by turning, ...), and the interval is that of leaving out one family at a time (Student's, on "
    f"Fisher's scale). With fewer than {ENOUGH} families or seeds it only leans. Supporting: the other lengths, of the "
    f"same models. {ONLY_SKILLED}"
)


def _extrapolates(data: Evidence) -> list[Finding]:
    findings = []
    for factor in (heads.LONGER, _TWICE):
        figure = of_skilled("", lambda cell, factor=factor: heads.kept(cell, factor), "no such texts", grain=0.02)
        retrieval, index = (figure.by_seed(data.results.of(task, ROPE)) for task in (RETRIEVAL, INDEX))
        what = f"share of the skill kept at {factor:g} times the length, RoPE, retrieval - index"
        finding = above(what, difference(retrieval, index, figure.grain), _SKILL)
        findings.append(finding if factor == heads.LONGER else supporting(finding))
    return findings


def _falls(figure: str) -> Check:
    """Is the more of a figure of the heads, the less skill kept on longer texts?"""

    def check(data: Evidence) -> list[Finding]:
        found = [each for each in data.relations if (each.figure, each.task) == (figure, None)]
        found.sort(key=lambda each: each.factor != heads.LONGER)
        if not found or found[0].factor != heads.LONGER:
            return [unknown(f"{FIGURES[figure][0]}, against longer texts", "no finished run that counts")]
        first, *rest = (opposite(_rises(each)) for each in found)
        return [first, *(supporting(finding) for finding in rest)]

    return check


def _rises(relation: Relation) -> Finding:
    """Is a rank correlation above 0?"""
    what = f"rank correlation of {relation.figure} with skill kept at {relation.factor:g} times the length"
    families, seeds = len(relation.families), len({point.seed for point in relation.points})
    wanted = f"{ENOUGH} families of encodings and {ENOUGH} seeds; there are {families} and {seeds}"
    if relation.value is None:
        return unknown(what, "too few encodings, or nothing varies", wanted)
    counted = f"{len(relation.points)} models, {relation.encodings} encodings of {families} families"
    text = f"{what} ({counted}: {', '.join(relation.families)}): {relation.value:.3f}"
    if relation.low is None or relation.high is None or relation.chance is None:
        why = "no interval, since without one of the families nothing varies, or there are too few"
        return Finding("undecided", f"{text}, bar 0; {why}", wanting="more families in which it varies")
    text = f"{text} [{relation.low:.3f}, {relation.high:.3f}], bar 0"
    if min(families, seeds) < ENOUGH:
        return Finding("leans to hold" if relation.value > 0 else "leans to fail", text, wanting=wanted)
    decided = Finding("undecided", text, relation.chance, 1 - relation.chance, wanting="more families of encodings")
    return replace(decided, verdict=decided.at(LEVEL))


CLAIMS: tuple[Claim[Evidence], ...] = (
    Claim(
        "exclusion",
        SISTER,
        "A head cannot be positional and symbolic at once.",
        "Of each head the smaller of its two sampled scores (invariance, equivariance of its logits); the largest of "
        f"them over all heads of a seed's models, mean over seeds: below {_BOTH:g}, half way between the half that "
        "the exact shares allow, which sum to at most 1 by their definition, and the 0.71 that the sampled ones allow, "
        "which sum to at most the root of 2 whatever the logits. So it asks how near to the theorem real heads stay, "
        "measured without it.",
        _exclusion,
    ),
    Claim(
        "canonical-heads",
        OURS,
        "The positional task is done by positional heads and the symbolic one by symbolic heads.",
        "Shares of RoPE's heads, each head weighed by what is lost without it: on index the positional one over "
        f"{_MOST:g}, on retrieval the symbolic one over {_MOST:g} (more than all else together). {_COUNTS} "
        f"{ONLY_SKILLED}",
        every(
            model(INDEX, ROPE, _carried(INDEX, "positional"), over(_MOST)),
            model(RETRIEVAL, ROPE, _carried(RETRIEVAL, "symbolic"), over(_MOST)),
        ),
    ),
    Claim(
        "canonical-tasks-pure",
        SISTER,
        "The canonical tasks are purely positional or purely symbolic.",
        "A task is what does it, whatever the encoding: shares of what carries the skill, each head weighed by what is "
        "lost without it, mean over the encodings that learn the task: on index the positional one over "
        f"{_PURE:g}, on retrieval the symbolic one over {_PURE:g} ({_WHY_PURE}). Without encodings that are held to a "
        "band, or that add position at the input, where it moves with the keys that the definitions move. "
        f"{_COUNTS} {ONLY_SKILLED}",
        every(_pure(INDEX, "positional"), _pure(RETRIEVAL, "symbolic")),
    ),
    Claim(
        "canonical-tasks",
        OURS,
        "The positional task needs a positional encoding and the symbolic one does not.",
        f"On index RoPE over NoPE: {BETTER}, and NoPE's skill under {SKILLED:g} (whoever has a quarter of what can be "
        f"learned has learned something). On retrieval RoPE less NoPE below {MARGIN:g}: it gains nothing that could be "
        f"seen; and NoPE's skill over {SKILLED:g}, as else neither can do it. {STOPPED}",
        every(
            better(INDEX, ROPE, NOPE),
            model(INDEX, NOPE, _skill(INDEX), under(SKILLED)),
            better(RETRIEVAL, ROPE, NOPE, test=under(MARGIN)),
            model(RETRIEVAL, NOPE, _skill(RETRIEVAL), over(SKILLED)),
        ),
    ),
    Claim(
        "intricate-tasks-exceed",
        f"{PAPER}, 6 (likely, there)",
        "More intricate tasks, reversing a sequence or Dyck languages, exceed a Transformer's positional reasoning.",
        f"Skill on {' and on '.join(_INTRICATE)}, of every encoding that is trained on them: under {_HALF:g}, each; "
        "a task of which half is learned is within reach. Models that are still learning count, too, but only against "
        "it: they have more before them.",
        every(*map(_exceeds, _INTRICATE)),
    ),
    _emerging("positional", INDEX),
    _emerging("symbolic", RETRIEVAL),
    Claim(
        "behaviour-and-frequency",
        f"{SISTER} (there of language models)",
        "How positional a head is corresponds strongly to the frequencies it uses: high ones positional, low symbolic.",
        "Spearman's correlation, over all heads of a seed's RoPE models of all tasks, of the frequencies' centre "
        f"(octaves, by variance) with the positional less the symbolic share: above {STRONG:g} ({WHY_STRONG}). "
        "Supporting, that training brings it about: above what it is over the same heads before training, where "
        f"weights are random and the correlation is that of the two measures. {ONLY_SKILLED}",
        _correspondence,
    ),
    _needed("positional", INDEX, HIGH, LOW, ("highest", "lowest")),
    _needed("symbolic", RETRIEVAL, LOW, HIGH, ("lowest", "highest")),
    Claim(
        "mix-needs-both",
        OURS,
        "A task that is both needs both kinds of frequencies.",
        f"On mix, all frequencies against the three lowest alone, and against the three highest alone, each: {BETTER}. "
        "The second is only asked where each of the highest goes round at least once in a text: in between there are "
        f"frequencies that do both. {STOPPED}",
        every(better(MIX, ROPE, LOW), _with_high_alone),
    ),
    _scanned("index-inverted-u", INDEX, "positional", 1),
    _scanned("retrieval-u", RETRIEVAL, "symbolic", -1),
    _scanned("mix-inverted-u", MIX, "mixed", 1),
    Claim(
        "faster-half-at-inference",
        SISTER,
        "In a trained model it is the high frequencies that the positional task hangs on.",
        "Loss gained on index when single frequencies of single heads stop turning, summed over heads: over the faster "
        f"half of RoPE's frequencies more than over the slower half, by over {_NATS:g} nats (a tenth of the answer's "
        f"probability; less does not affect the whole). A frequency counts if the interval of its loss leaves 0. "
        f"{ONLY_SKILLED}",
        model(INDEX, ROPE, _TURNING, over(_NATS, " nats")),
    ),
    Claim(
        "symbolic-extrapolates",
        OURS,
        "What RoPE learns of the symbolic task extrapolates in length better than what it learns of the positional "
        "one.",
        f"RoPE keeps more of its skill on retrieval than on index at {heads.LONGER:g} times the training length, by "
        f"over {_SKILL:g} of it: less would be no help. Supporting: the same at {_TWICE:g} times the length, of the "
        f"same models. {ONLY_SKILLED}",
        _extrapolates,
    ),
    Claim(
        "positional-share-against-length",
        OURS,
        "The more positional what carries a model's skill, the less it extrapolates.",
        "Rank correlation over models, within tasks, of the positional share of what carries the skill with the skill "
        f"kept on longer texts: {_FAMILIES}",
        _falls("positional"),
    ),
    Claim(
        "deposit-against-length",
        f"{PAPER}, 5.2 and appendix D",
        "The more a model's skill is deposited in one head, the less it extrapolates (a hypothesis there).",
        "Rank correlation over models, within tasks, of the largest loss by one head with the skill kept on longer "
        f"texts: {_FAMILIES}",
        _falls("deposit"),
    ),
    Claim(
        "coupling-against-length",
        f"{PAPER}, appendix D",
        "The less position and content are coupled, the better a model extrapolates (a hypothesis there).",
        "Rank correlation over models, within tasks, of the interaction share of what carries the skill with the skill "
        f"kept on longer texts: {_FAMILIES}",
        _falls("interaction"),
    ),
)

__all__ = ["CLAIMS", "Evidence"]
