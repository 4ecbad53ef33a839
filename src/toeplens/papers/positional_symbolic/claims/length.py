"""Claims about texts longer than those of training: what of a model goes with keeping its skill."""

from __future__ import annotations

from dataclasses import replace

from toeplens.papers.positional_symbolic.claims.common import INDEX, OURS, PAPER, RETRIEVAL, ROPE, Check, of_skilled
from toeplens.studies.grid import measured as heads
from toeplens.studies.grid.relations import FIGURES, Relation
from toeplens.studies.grid.study import Evidence
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.contrasts import difference
from toeplens.studies.kit.results import ONLY_SKILLED
from toeplens.studies.kit.verdicts import ENOUGH, LEVEL, Finding, above, opposite, supporting, unknown

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
