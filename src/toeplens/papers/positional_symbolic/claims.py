"""Claims about positional and symbolic heads, frequencies and length, judged on a grid study.

They know tasks and encodings by the labels index, retrieval, mix; rope, nope, high, low, and the scan turn. The rules
were written before the study that is recorded was looked at. What was seen before: one trial of each kind of model
under another seed (7), which set the sizes of the tasks and the range of the scan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float

from toeplens.lens.kit.intervals import spearman
from toeplens.studies.grid import measured as heads
from toeplens.studies.grid.study import Evidence
from toeplens.studies.kit.claims import Claim, every
from toeplens.studies.kit.results import ONLY_SKILLED, CellResult, Figure
from toeplens.studies.kit.verdicts import Finding, above, found, interval_above, opposite, seen

SISTER = "arXiv 2511.11579"
FOLLOW_UP = "arXiv 2605.31558"
PAPER = "arXiv 2505.13027"
_PAIRED = "paired over seeds"
INDEX, RETRIEVAL, MIX = "index", "retrieval", "mix"
ROPE, NOPE, HIGH, LOW, SCAN = "rope", "nope", "high", "low", "turn"
PURE = 0.9  # of a head's variance: what is called purely positional or symbolic
BOTH = 0.75  # both scores above it would contradict the exclusion beyond what sampling does
Check = Callable[[Evidence], list[Finding]]


def _scanned(data: Evidence, task: str) -> tuple[list[float], Float[np.ndarray, "V S"]]:
    """The scanned values in order, and accuracies by value and seed, of seeds that have all values."""
    columns = sorted((c for c in data.spec.columns() if c.scan == SCAN), key=lambda column: column.value or 0.0)
    rows = [{cell.key.seed: cell.accuracy for cell in data.results.of(task, c.label)} for c in columns]
    seeds = sorted(set.intersection(*map(set, rows))) if rows else []
    table = np.array([[row[seed] for seed in seeds] for row in rows], dtype=float).reshape(len(rows), len(seeds))
    return [column.value or 0.0 for column in columns], table


def _exclusion(data: Evidence) -> list[Finding]:
    both: list[bool] = []
    largest, count = 0.0, 0
    for cell in data.results.cells:
        scores = cell.measure("permutations")
        if scores is not None:
            smaller = np.fmin(scores.logits.positional, scores.logits.symbolic)
            count += int(np.isfinite(smaller).sum())
            worst = float(np.nanmax(smaller)) if np.isfinite(smaller).any() else 0.0
            largest = max(largest, worst)
            both.append(worst > BOTH)
    what = (
        f"a head whose sampled scores are both over {BOTH:g} (of {count} heads, the smaller one at most {largest:.2f})"
    )
    return [opposite(found(what, both))]


def _correspondence(data: Evidence) -> list[Finding]:
    by_seed: dict[int, list[tuple[float, float]]] = {}
    for task in data.spec.tasks:
        for cell in data.skilled(task, ROPE):
            by_seed.setdefault(cell.key.seed, []).extend(_frequency_and_behaviour(cell))
    values = [
        float(spearman(np.array(pairs).T)) if len(pairs) > 2 else float("nan") for _, pairs in sorted(by_seed.items())
    ]
    what = "rank correlation over heads of the frequencies' centre with positional less symbolic share"
    return [above(what, values, 0.0), above(f"{what}, strong", values, 0.5)]


def _frequency_and_behaviour(cell: CellResult) -> Iterator[tuple[float, float]]:
    use, found = cell.measure("frequency"), cell.measure("behaviour")
    if use is not None and found is not None:
        for pair in zip(use.centre.ravel(), (found.positional - found.symbolic).ravel(), strict=True):
            if np.isfinite(pair).all():
                yield pair


def _better(task: str, first: str, second: str, bar: float = 0.0) -> Check:
    def check(data: Evidence) -> list[Finding]:
        what = f"accuracy on {task}, {_titles(data)[first]} - {_titles(data)[second]}"
        return [above(what, data.results.difference(task, first, second), bar)]

    return check


def _titles(data: Evidence) -> dict[str, str]:
    """What people call the encodings; their label where the study has none of that label."""
    own = {column.label: column.title for column in data.spec.columns()}
    return {label: own.get(label, label) for label in (*own, ROPE, NOPE, HIGH, LOW)}


def _between(task: str, sign: int) -> Check:
    """Is an inner frequency better (sign 1) or worse (-1) than both ends of the scan?"""

    def check(data: Evidence) -> list[Finding]:
        values, table = _scanned(data, task)
        kind = "best" if sign > 0 else "worst"
        inner: list[float] = []
        gaps: list[tuple[float, float]] = []
        for seed in range(table.shape[1] if len(values) > 2 else 0):
            others = np.delete(table, seed, axis=1)
            if others.shape[1] == 0:  # the only seed has to choose for itself
                others = table
            chosen = 1 + int(np.argmax(sign * others.mean(axis=1)[1:-1]))
            inner.append(values[chosen])
            gaps.append((table[chosen, seed] - table[0, seed], table[chosen, seed] - table[-1, seed]))
        where = ", ".join(f"{value:g}" for value in sorted(set(inner)))
        findings = []
        for index, end in enumerate((0, -1)):
            frequency = f"{values[end]:g}" if values else "the end"
            what = f"accuracy on {task} at the {kind} inner frequency ({where or 'none'}) less that at {frequency}"
            finding = above(what, [sign * gap[index] for gap in gaps], 0.0)
            findings.append(finding if sign > 0 else Finding(finding.verdict, f"{finding.evidence} (signs turned)"))
        return findings

    return check


def _carried(task: str, sign: int) -> Check:
    def check(data: Evidence) -> list[Finding]:
        cells = data.skilled(task, ROPE)
        gaps = [sign * (heads.carried(cell, "positional") - heads.carried(cell, "symbolic")) for cell in cells]
        more, less = ("positional", "symbolic") if sign > 0 else ("symbolic", "positional")
        return [above(f"{more} less {less} share of what carries RoPE's skill on {task}", gaps, 0.0)]

    return check


def _turning(data: Evidence) -> list[Finding]:
    """What RoPE loses on the positional task if the faster, or the slower, half of its frequencies stops turning."""
    gaps = []
    for cell in data.skilled(INDEX, ROPE):
        bands = cell.measure("bands")
        if bands is not None:
            lost = np.nansum(bands.drops, axis=(0, 1))
            half = len(lost) // 2
            gaps.append(float(lost[:half].sum() - lost[half:].sum()))
    what = "loss on index gained without the faster half of the frequencies, less that without the slower half"
    return [above(what, gaps, 0.0, unit=" nats")]


def _emerges(task: str, share: str) -> Check:
    """How much of a kind the head that matters most after training is then, and was before it."""

    def check(data: Evidence) -> list[Finding]:
        gains, pure = [], []
        for cell in data.skilled(task, ROPE):
            rows = [row for row in cell.watched if row.get(share) is not None]
            if len(rows) > 1:
                first, last = heads.array(rows[0][share]), heads.array(rows[-1][share])
                head = np.unravel_index(np.argmax(heads.array(rows[-1]["drops"])), last.shape)
                gains.append(float(last[head] - first[head]))
                pure.append(bool(last[head] >= PURE))
        what = f"RoPE on {task}, {share} share of the head that matters most"
        return [above(f"{what}, end less beginning", gains, 0.0), seen(f"{what} is at least {PURE:g} at the end", pure)]

    return check


def _extrapolates(data: Evidence) -> list[Finding]:
    findings = []
    for factor in (1.5, 2.0):
        figure = Figure("", lambda cell, factor=factor: heads.kept(cell, factor))
        retrieval, index = (figure.by_seed(data.skilled(task, ROPE)) for task in (RETRIEVAL, INDEX))
        what = f"skill kept at {factor:g} times the length, RoPE, retrieval - index"
        findings.append(above(what, retrieval - index, 0.0))
    return findings


def _related(figure: str, sign: int) -> Check:
    """Does a figure of the heads go with skill kept on longer texts (sign 1), or against it (-1)?"""

    def check(data: Evidence) -> list[Finding]:
        findings = []
        for relation in data.relations:
            if (relation.figure, relation.task) == (figure, None):
                what = f"rank correlation of {figure} with skill kept at {relation.factor:g} times the length"
                if relation.value is None or relation.low is None or relation.high is None:
                    findings.append(Finding("undecided", f"{what}: too few encodings"))
                    continue
                over = f"{what} ({len(relation.points)} models, {relation.encodings} encodings)"
                finding = interval_above(over, relation.value, relation.low, relation.high, 0.0)
                findings.append(finding if sign > 0 else opposite(finding))
        return findings or [Finding("undecided", f"{figure} and longer texts: no finished run that counts")]

    return check


CLAIMS: tuple[Claim[Evidence], ...] = (
    Claim(
        "exclusion",
        SISTER,
        "A head cannot be positional and symbolic at once.",
        f"No head of any model has both sampled scores (invariance, equivariance of its logits) over {BOTH:g}. The "
        "exact shares sum to at most 1 by their definition; the sampled ones are measured without it.",
        _exclusion,
    ),
    Claim(
        "behaviour-and-frequency",
        SISTER,
        "How positional a head is corresponds strongly to the frequencies it uses: high ones positional, low symbolic.",
        "Spearman's correlation, over all heads of a seed's RoPE models of all tasks, of the frequencies' centre "
        f"(octaves, by variance) with the positional less the symbolic share: above 0, and above 0.5. {ONLY_SKILLED}",
        _correspondence,
    ),
    Claim(
        "index-needs-high-frequencies",
        SISTER,
        "A positional task is learned with high frequencies and not with low ones.",
        f"Accuracy on index with the three highest frequencies alone above that with the three lowest, {_PAIRED}, by "
        "more than 0, and by more than 0.5.",
        every(_better(INDEX, HIGH, LOW), _better(INDEX, HIGH, LOW, 0.5)),
    ),
    Claim(
        "retrieval-needs-low-frequencies",
        SISTER,
        "A symbolic task is learned with low frequencies and not with high ones.",
        f"Accuracy on retrieval with the three lowest frequencies alone above that with the three highest, {_PAIRED}, "
        "by more than 0, and by more than 0.25.",
        every(_better(RETRIEVAL, LOW, HIGH), _better(RETRIEVAL, LOW, HIGH, 0.25)),
    ),
    Claim(
        "mix-needs-both",
        SISTER,
        "A task that is both needs both kinds of frequencies.",
        f"Accuracy on mix with all frequencies above that with the highest alone and that with the lowest, {_PAIRED}.",
        every(_better(MIX, ROPE, HIGH), _better(MIX, ROPE, LOW)),
    ),
    Claim(
        "index-inverted-u",
        f"{SISTER}, frequency scan",
        "With one frequency for all pairs, accuracy on the positional task is highest in between.",
        "The inner frequency that is best on the other seeds is better than either end of the scan, over seeds.",
        _between(INDEX, 1),
    ),
    Claim(
        "retrieval-u",
        f"{SISTER}, frequency scan",
        "With one frequency for all pairs, accuracy on the symbolic task is lowest in between.",
        "The inner frequency that is worst on the other seeds is worse than either end of the scan, over seeds.",
        _between(RETRIEVAL, -1),
    ),
    Claim(
        "mix-inverted-u",
        f"{SISTER}, frequency scan",
        "With one frequency for all pairs, accuracy on the mixed task is highest in between.",
        "The inner frequency that is best on the other seeds is better than either end of the scan, over seeds.",
        _between(MIX, 1),
    ),
    Claim(
        "canonical-heads",
        SISTER,
        "The positional task is done by positional heads and the symbolic one by symbolic heads.",
        "Shares of RoPE's heads, weighed by what is lost without each: on index more positional than symbolic, on "
        f"retrieval more symbolic than positional, over seeds. {ONLY_SKILLED}",
        every(_carried(INDEX, 1), _carried(RETRIEVAL, -1)),
    ),
    Claim(
        "canonical-tasks",
        SISTER,
        "The positional task needs a positional encoding and the symbolic one does not.",
        f"RoPE above NoPE on index by more than 0.5; NoPE above RoPE less 0.05 on retrieval, {_PAIRED}.",
        every(_better(INDEX, ROPE, NOPE, 0.5), _better(RETRIEVAL, NOPE, ROPE, -0.05)),
    ),
    Claim(
        "faster-half-at-inference",
        SISTER,
        "In a trained model it is the high frequencies that the positional task hangs on.",
        "Loss gained on index when single frequencies of single heads stop turning, summed over heads: more over the "
        f"faster half than over the slower half of RoPE's frequencies, over seeds. {ONLY_SKILLED}",
        _turning,
    ),
    Claim(
        "positional-head-emerges",
        FOLLOW_UP,
        "Purely positional heads emerge in training.",
        "On index, the positional share of the head that matters most at the end is larger at the end than at the "
        f"beginning, and at least {PURE:g} in every seed. {ONLY_SKILLED}",
        _emerges(INDEX, "positional"),
    ),
    Claim(
        "symbolic-head-emerges",
        FOLLOW_UP,
        "Purely symbolic heads emerge in training.",
        "On retrieval, the symbolic share of the head that matters most at the end is larger at the end than at the "
        f"beginning, and at least {PURE:g} in every seed. {ONLY_SKILLED}",
        _emerges(RETRIEVAL, "symbolic"),
    ),
    Claim(
        "symbolic-extrapolates",
        FOLLOW_UP,
        "Symbolic mechanisms extrapolate in length better than positional ones.",
        "RoPE keeps more of its skill on retrieval than on index at 1.5 and at 2 times the training length, "
        f"{_PAIRED}. {ONLY_SKILLED}",
        _extrapolates,
    ),
    Claim(
        "positional-share-against-length",
        FOLLOW_UP,
        "The more positional what carries a model's skill, the less it extrapolates.",
        "Rank correlation over models, within tasks, of the positional share of what carries the skill with the skill "
        f"kept on longer texts: below 0 at each length, by an interval over encodings. {ONLY_SKILLED}",
        _related("positional", -1),
    ),
    Claim(
        "deposit-against-length",
        f"{PAPER}, appendix D",
        "The more a model's skill is deposited in one head, the less it extrapolates (a hypothesis there).",
        "Rank correlation over models, within tasks, of the largest loss by one head with the skill kept on longer "
        f"texts: below 0 at each length, by an interval over encodings. {ONLY_SKILLED}",
        _related("deposit", -1),
    ),
    Claim(
        "coupling-against-length",
        f"{PAPER}, appendix D",
        "The less position and content are coupled, the better a model extrapolates (a hypothesis there).",
        "Rank correlation over models, within tasks, of the interaction share of what carries the skill with the skill "
        f"kept on longer texts: below 0 at each length, by an interval over encodings. {ONLY_SKILLED}",
        _related("interaction", -1),
    ),
)
