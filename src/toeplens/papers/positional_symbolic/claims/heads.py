"""Claims about heads: what they follow, which of them do a task, and how they come to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from toeplens import encodings
from toeplens.papers.positional_symbolic.claims.common import (
    HIGH,
    INDEX,
    LOW,
    NOPE,
    OURS,
    PAPER,
    RETRIEVAL,
    ROPE,
    SISTER,
    Check,
    better,
    model,
    named,
    of_skilled,
)
from toeplens.studies.grid import measured as heads
from toeplens.studies.grid.spec import Column
from toeplens.studies.grid.study import Evidence
from toeplens.studies.kit.asking import BETTER, MARGIN, STOPPED, over, under
from toeplens.studies.kit.claims import Claim, every
from toeplens.studies.kit.contrasts import contrast
from toeplens.studies.kit.results import ACCURACY, ONLY_SKILLED, SKILLED, CellResult, Figure
from toeplens.studies.kit.verdicts import Finding, above, below, one_sided, unknown

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


def _done_by(task: str, share: str) -> Check:
    return model(task, ROPE, _carried(task, share), over(_MOST))


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
        for label in labels:
            stopped = all(cell.settled for cell in data.results.of(task, label))
            findings += [
                one_sided(finding, holds=stopped, fails=True, why="models that are still learning")
                for finding in model(task, label, replace(_skill(task), counts=_ended), under(_HALF))(data)
            ]
        return findings

    return check


def _ended(cell: CellResult) -> bool:
    return cell.status == "complete"


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
        every(_done_by(INDEX, "positional"), _done_by(RETRIEVAL, "symbolic")),
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
)
