"""The ledger: a claim has a statement, a rule fixed before the data, and tests that give a verdict.

A test is data (`Test`: which value of which models lies above or below which threshold), or a function from a study's
data to findings. Claims are written in YAML (`claim_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from math import inf, sqrt
from pathlib import Path
from string import Template
from typing import Any, Generic, TypeVar

from toeplens.ground.files import read_yaml
from toeplens.ground.words import listed
from toeplens.model import Protocol
from toeplens.studies.kit.results import ONLY_SKILLED, UNRULED, Figure, Results
from toeplens.studies.kit.verdicts import (
    LEVEL,
    NONE_COUNTS,
    OPEN,
    RULE,
    Finding,
    Verdict,
    chance,
    combine,
    contrast,
    holm,
    sharing,
    supporting,
    told_of,
    within,
)

MARGIN = 0.02
WHY_MARGIN = "smaller differences are not visible in the source's figures, and five seeds can resolve this one"
BETTER = f"mean final test accuracy higher by more than {100 * MARGIN:g} points ({WHY_MARGIN})"
STOPPED = f"Only models that have stopped learning count ({UNRULED})."

Data = TypeVar("Data")
Check = Callable[[Data], Sequence[Finding]]
Tests = Check[Data] | Sequence[Check[Data]]


def deviation(share: float) -> float:
    """Standard deviation of a binary outcome with this share: the smallest spread to assume of shares."""
    return sqrt(share * (1 - share))


@dataclass(frozen=True)
class Test:
    """A test of a mean over trained models, as data; called with a study's data, it gives its findings.

    figure        the value of a model
    of            label of the models; several labels: one finding each; labels with weights: one on the weighted sum
    minus         label of the models whose mean is subtracted; several labels: one finding each
    above, below  thresholds between which the mean has to lie
    task          the models' task
    what          start of the evidence (default: name of the value and of the models)
    unit          unit of the mean
    essential     whether the claim fails with it; otherwise it is a supporting part
    """

    figure: Figure
    of: str | Sequence[str] | Mapping[str, float]
    minus: str | Sequence[str] = ()
    above: float = -inf
    below: float = inf
    task: str = ""
    what: str = ""
    unit: str = ""
    essential: bool = True

    def __call__(self, data: Any) -> list[Finding]:
        return [self.finding(data.results, data.title, *labels) for labels in self.places()]

    def places(self) -> Iterable[tuple[str, ...]]:
        """The labels of each finding: of the models, and of those whose mean is subtracted."""
        if isinstance(self.of, Mapping):
            return [tuple(self.of)]
        first, second = ([each] if isinstance(each, str) else each for each in (self.of, self.minus))
        return product(first, second) if second else product(first)

    def finding(self, results: Results, title: Callable[[str], str], *labels: str) -> Finding:
        """The finding on the models of one label, or of one minus another; ``title`` names a label's models."""
        figure = self.figure
        what = self.what or figure.words + " − ".join(map(title, labels))
        values = [figure.by_seed(results.of(self.task, label)) for label in labels]
        weights = self.of.values() if isinstance(self.of, Mapping) else (1.0, -1.0)
        seen = contrast(*zip(weights, values, strict=False), grain=figure.grain)
        what += left_out(results, figure, self.task, *labels)
        found = within(what, seen, self.above, self.below, unit=self.unit)
        wanting = found.wanting
        if wanting == NONE_COUNTS and not isinstance(self.of, Mapping):  # no model counts: which runs are needed?
            absent = [title(label) for label in dict.fromkeys(labels) if not results.of(self.task, label)]
            wanted = f"models that are not left out ({figure.without})"
            if "not measured" in figure.without:
                wanted += "; to add missing measures, run the same command again (needs the weights)"
            wanting = f"finished models of {listed(absent)}" if absent else figure.wanted or wanted
        return replace(found, wanting=wanting, essential=self.essential)


def left_out(results: Results, figure: Figure, task: str, *labels: str) -> str:
    """`Results.left_out` in parentheses."""
    found = results.left_out(figure, task, *labels)
    return f" ({found})" if found else ""


@dataclass(frozen=True)
class Claim(Generic[Data]):
    """A statement of the papers, as an executable check.

    id         short name
    source     paper and section
    statement  the claim
    rule       the decision rule, fixed before the data
    check      the tests: a function, or several, from a study's data (of one protocol, if there are protocols) to the
               findings on the parts
    part       the part of the study that the claim needs, if the study has parts
    elsewhere  alternative checks by name; shown with the verdict, which does not depend on them
    """

    id: str
    source: str
    statement: str
    rule: str
    check: Tests[Data] = field(hash=False)
    part: str = ""
    elsewhere: Mapping[str, Tests[Data]] = field(default_factory=dict, hash=False)

    @property
    def ours(self) -> bool:
        """Whether it is our own question and not a statement of a paper."""
        return self.source.startswith("ours")


# ---- claims in YAML --------------------------------------------------------------------------------------------------

_WORDS = {
    "better": BETTER,
    "stopped": STOPPED,
    "only_skilled": ONLY_SKILLED,
    "why_margin": WHY_MARGIN,
    "verdict": RULE,
}


def read_claims(path: Path) -> dict[str, Any]:
    """A YAML file of claims; in its ``words``, and in texts that `claim_of` reads, ``$name`` stands for a word."""
    content = read_yaml(path)
    words = dict(_WORDS)
    for name, text in content.get("words", {}).items():
        words[name] = Template(text).substitute(words)
    return content | {"words": words}


def claim_of(
    entry: Mapping[str, Any],
    known: Mapping[str, Any],
    words: Mapping[str, str],
    kind: Callable[..., Check[Any]] = Test,
    **common: Any,
) -> Claim[Any]:
    """A claim of a YAML file: ``id``, ``source``, ``statement``, ``rule``, ``part`` and lists of tests.

    ``tests`` are essential, ``supporting`` ones are not, and ``elsewhere`` has lists of alternative tests by name. A
    test is the name of a figure or of a check, or a mapping from that name to options.

    Arguments
        known   figures, whose options are those of `Test`, and checks: functions of a study's data and their options
        words   the file's words (`read_claims`)
        kind    `Test`, or what makes a test of a figure and options in its place
        common  options of all tests
    """
    source, statement, rule = (Template(entry[name]).substitute(words) for name in ("source", "statement", "rule"))
    elsewhere = {name: _tests(each, known, kind, common) for name, each in entry.get("elsewhere", {}).items()}
    return Claim(
        entry["id"], source, statement, rule, checks_of(entry, known, kind, **common), entry.get("part", ""), elsewhere
    )


def checks_of(
    entry: Mapping[str, Any], known: Mapping[str, Any], kind: Callable[..., Check[Any]] = Test, **common: Any
) -> list[Check[Any]]:
    """The essential and the supporting tests of a claim in YAML; arguments as in `claim_of`."""
    support = _tests(entry.get("supporting", ()), known, kind, common)
    return [
        *_tests(entry["tests"], known, kind, common),
        *(lambda data, test=test: list(map(supporting, test(data))) for test in support),
    ]


def _tests(
    entries: Iterable[Any], known: Mapping[str, Any], kind: Callable[..., Check[Any]], common: Mapping[str, Any]
) -> list[Check[Any]]:
    found: list[Check[Any]] = []
    for entry in entries:
        name, options = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
        make: Any = partial if callable(known[name]) else kind
        found.append(make(known[name], **common, **options))
    return found


# ---- verdicts --------------------------------------------------------------------------------------------------------


def findings(check: Tests[Data], data: Data) -> tuple[Finding, ...]:
    """The findings of all tests; the same reason for knowing nothing is given once."""
    found: list[Finding] = []
    for test in (check,) if callable(check) else check:
        found += [each for each in test(data) if each.known or each not in found]
    return tuple(found)


@dataclass(frozen=True)
class Aside:
    """The result of an alternative check."""

    name: str
    verdict: Verdict  # corrected for all alternative checks of the claim
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A claim's verdict with its evidence, under one protocol (None without protocols).

    verdict   corrected for all comparisons of the ledger
    plain     verdict without correction
    findings  the parts
    error     two-sided error of the claim after correction
    asides    results of the alternative checks that have data
    """

    claim: Claim
    protocol: Protocol | None
    verdict: Verdict
    plain: Verdict
    findings: tuple[Finding, ...]
    error: float = LEVEL
    asides: tuple[Aside, ...] = ()

    @property
    def evidence(self) -> list[str]:
        """One sentence per part; supporting parts are marked."""
        return [f"{'' if part.essential else 'supporting: '}{part.evidence}" for part in self.findings]

    @property
    def wanting(self) -> list[str]:
        """What would decide an open claim, part by part; empty for a decided one."""
        if self.verdict not in OPEN:
            return []
        share = self.error / sharing([part for part in self.findings if part.essential])
        wanting = [  # with the error of each part after correction
            part.wanting
            if part.comparison is None or part.holds is None or part.sides != (True, True)
            else part.comparison.wanting(self.error, share)
            for part, verdict in zip(self.findings, told_of(self.findings, self.error), strict=True)
            if part.essential and verdict in OPEN
        ]
        alone = f"{self.plain} without correction, but open after the correction for the whole ledger"
        return [*([alone] if self.plain not in OPEN else []), *dict.fromkeys(each for each in wanting if each)]

    def row(self) -> dict[str, Any]:
        """A row of the table of claims."""
        same = {name: getattr(self.claim, name) for name in ("source", "statement", "rule")}
        verdicts = {"protocol": self.protocol, "verdict": self.verdict, "uncorrected": self.plain}
        return {"claim": self.claim.id, **verdicts, **same, "evidence": "\n".join(self.evidence)}

    def to_dict(self) -> dict[str, Any]:
        """The entry for JSON."""
        told = [
            {"verdict": verdict, "plain": part.verdict, "essential": part.essential, "evidence": part.evidence}
            for part, verdict in zip(self.findings, told_of(self.findings, self.error), strict=True)
        ]
        return {
            **{name: getattr(self.claim, name) for name in ("id", "source", "statement", "rule")},
            "protocol": self.protocol,
            "verdict": self.verdict,
            "plain": self.plain,
            "evidence": self.evidence,
            "parts": told,
            "wanting": self.wanting,
            "elsewhere": [asdict(aside) for aside in self.asides],
        }


def judge(claims: Sequence[Claim[Results]], results: Results, protocols: Sequence[Protocol]) -> list[Entry]:
    """Every claim under every protocol, as one ledger."""
    under = {protocol: results.under(protocol) for protocol in protocols}
    return _ledger([(claim, each, under[each]) for claim in claims for each in protocols])


def judge_all(claims: Sequence[Claim[Data]], data: Data) -> list[Entry]:
    """Every claim, without protocols, as one ledger."""
    return _ledger([(claim, None, data) for claim in claims])


def _ledger(asked: Sequence[tuple[Claim[Data], Protocol | None, Data]]) -> list[Entry]:
    found = [findings(claim.check, data) for claim, _, data in asked]
    return [
        Entry(claim, protocol, verdict, plain, parts, error, _asides(claim, data))
        for (claim, protocol, data), parts, (verdict, plain, error) in zip(asked, found, settle(found), strict=True)
    ]


def settle(found: Sequence[Sequence[Finding]]) -> list[tuple[Verdict, Verdict, float]]:
    """For each claim: the corrected verdict, the uncorrected one, and the error after correction."""
    errors = holm([chance(parts) for parts in found])
    return [(combine(parts, error), combine(parts), error) for parts, error in zip(found, errors, strict=True)]


def _asides(claim: Claim[Data], data: Data) -> tuple[Aside, ...]:
    found = {name: findings(check, data) for name, check in claim.elsewhere.items()}
    known = {name: parts for name, parts in found.items() if any(part.known for part in parts)}
    return tuple(
        Aside(name, verdict, tuple(part.evidence for part in parts))
        for (name, parts), (verdict, *_) in zip(known.items(), settle(list(known.values())), strict=True)
    )
