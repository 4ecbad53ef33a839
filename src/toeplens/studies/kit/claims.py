"""The ledger: a claim has a statement, a rule fixed before the data, and tests that give a verdict.

A test is data (`MeanTest`: which value of which models lies above or below which threshold), or a function from a
study's data to findings. Claims are written in YAML (`claim_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from math import inf, isfinite, sqrt
from pathlib import Path
from string import Template
from typing import Any, Generic, TypeVar

import numpy as np

from toeplens.model import Protocol
from toeplens.studies.kit.results import NO_STOPPING_RULE, ONLY_SKILLED_RULE, CellResult, ModelValue, Results
from toeplens.studies.kit.verdicts import (
    LEVEL,
    NO_RUNS,
    OPEN_VERDICTS,
    RULE,
    Finding,
    Verdict,
    claim_p_value,
    combine,
    contrast,
    holm,
    num_tests,
    part_verdicts,
    supporting,
    verdict_text,
    within,
    worst_and_best,
)
from toeplens.utils.files import read_yaml
from toeplens.utils.formatting import join_list

MARGIN = 0.02
MARGIN_REASON = "smaller differences are not visible in the source's figures, and five seeds can resolve this one"
BETTER_RULE = f"mean final test accuracy higher by more than {100 * MARGIN:g} points ({MARGIN_REASON})"
STOPPED_RULE = f"Only models that have stopped learning count ({NO_STOPPING_RULE})."

Data = TypeVar("Data")
Check = Callable[[Data], Sequence[Finding]]
Tests = Check[Data] | Sequence[Check[Data]]


def deviation(share: float) -> float:
    """Standard deviation of a binary outcome with this share: the smallest spread to assume of shares."""
    return sqrt(share * (1 - share))


@dataclass(frozen=True)
class MeanTest:
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

    figure: ModelValue
    of: str | Sequence[str] | Mapping[str, float]
    minus: str | Sequence[str] = ()
    above: float = -inf
    below: float = inf
    task: str = ""
    what: str = ""
    unit: str = ""
    essential: bool = True

    def __call__(self, data: Any) -> list[Finding]:
        return [self.finding(data.results, data.title, *labels) for labels in self.label_groups()]

    def label_groups(self) -> Iterable[tuple[str, ...]]:
        """The labels of each finding: of the models, and of those whose mean is subtracted."""
        if isinstance(self.of, Mapping):
            return [tuple(self.of)]
        first, second = ([labels] if isinstance(labels, str) else labels for labels in (self.of, self.minus))
        return product(first, second) if second else product(first)

    def finding(self, results: Results, title: Callable[[str], str], *labels: str) -> Finding:
        """The finding on the models of one label, or of one minus another; ``title`` names a label's models."""
        figure = self.figure
        cells = [results.cells_of(self.task, label) for label in labels]
        what = self.what or figure.title + " − ".join(map(title, labels))
        what += excluded_note(results, figure, self.task, *labels)
        result = self._within(what, [figure.by_seed(each) for each in cells])
        wanting = result.missing
        if wanting == NO_RUNS and not isinstance(self.of, Mapping):  # no model counts: which runs are needed?
            untrained = [title(label) for label in dict.fromkeys(labels) if not results.cells_of(self.task, label)]
            needed = f"models that are not left out ({figure.missing_reason})"
            if "not measured" in figure.missing_reason:
                needed += "; to add missing measures, run the same command again (needs the weights)"
            wanting = f"finished models of {join_list(untrained)}" if untrained else figure.needed_runs or needed
        return replace(result, missing=wanting, essential=self.essential, extremes=self._extremes(what, cells))

    def _within(self, what: str, values: Sequence[Mapping[int, float]]) -> Finding:
        """The finding on these values of the models of each label, by seed."""
        weights = self.of.values() if isinstance(self.of, Mapping) else (1.0, -1.0)
        measured = contrast(*zip(weights, values, strict=False), grain=self.figure.grain)
        return within(what, measured, self.above, self.below, unit=self.unit)

    def _extremes(self, what: str, cells: Sequence[Sequence[CellResult]]) -> tuple[Finding, Finding] | None:
        """The worst and the best finding if the models that are still learning counted; None without such models.

        With two thresholds, values between the models' extreme ones are tried as well, in steps of 1%.
        """
        ranges = [self.figure.ranges_by_seed(each) for each in cells]
        counted = sum(self.figure.is_defined(cell) for each in cells for cell in each)
        if not all(ranges) or sum(map(len, ranges)) == counted:
            return None
        signs = self.of.values() if isinstance(self.of, Mapping) else (1.0, -1.0)
        findings = []
        for share in np.linspace(0, 1, 101 if isfinite(self.above) and isfinite(self.below) else 2):
            up = [share if sign > 0 else 1 - share for sign in signs]
            values = [
                {seed: low + rise * (high - low) for seed, (low, high) in row.items()}
                for rise, row in zip(up, ranges, strict=False)
            ]
            findings.append(self._within(what, values))
        return worst_and_best(findings)


def excluded_note(results: Results, figure: ModelValue, task: str, *labels: str) -> str:
    """`Results.excluded_text` in parentheses."""
    text = results.excluded_text(figure, task, *labels)
    return f" ({text})" if text else ""


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


# ---- claims in YAML --------------------------------------------------------------------------------------------------

_PHRASES = {
    "better": BETTER_RULE,
    "stopped": STOPPED_RULE,
    "only_skilled": ONLY_SKILLED_RULE,
    "why_margin": MARGIN_REASON,
    "verdict": RULE,
}


def read_claims(path: Path) -> dict[str, Any]:
    """A YAML file of claims; in its ``words``, and in texts that `claim_of` reads, ``$name`` stands for a word."""
    content = read_yaml(path)
    words = dict(_PHRASES)
    for name, text in content.get("words", {}).items():
        words[name] = Template(text).substitute(words)
    return content | {"words": words}


def claim_of(
    entry: Mapping[str, Any],
    known: Mapping[str, Any],
    words: Mapping[str, str],
    kind: Callable[..., Check[Any]] = MeanTest,
    **common: Any,
) -> Claim[Any]:
    """A claim of a YAML file: ``id``, ``source``, ``statement``, ``rule``, ``part`` and lists of tests.

    ``tests`` are essential, ``supporting`` ones are not, and ``elsewhere`` has lists of alternative tests by name. A
    test is the name of a figure or of a check, or a mapping from that name to options.

    Arguments
        known   figures, whose options are those of `MeanTest`, and checks: functions of a study's data and options
        words   the file's words (`read_claims`)
        kind    `MeanTest`, or what makes a test of a figure and options in its place
        common  options of all tests
    """
    source, statement, rule = (Template(entry[name]).substitute(words) for name in ("source", "statement", "rule"))
    elsewhere = {name: _read_tests(tests, known, kind, common) for name, tests in entry.get("elsewhere", {}).items()}
    return Claim(
        entry["id"], source, statement, rule, checks_of(entry, known, kind, **common), entry.get("part", ""), elsewhere
    )


def checks_of(
    entry: Mapping[str, Any], known: Mapping[str, Any], kind: Callable[..., Check[Any]] = MeanTest, **common: Any
) -> list[Check[Any]]:
    """The essential and the supporting tests of a claim in YAML; arguments as in `claim_of`."""
    support = _read_tests(entry.get("supporting", ()), known, kind, common)
    return [
        *_read_tests(entry["tests"], known, kind, common),
        *(lambda data, test=test: list(map(supporting, test(data))) for test in support),
    ]


def _read_tests(
    entries: Iterable[Any], known: Mapping[str, Any], kind: Callable[..., Check[Any]], common: Mapping[str, Any]
) -> list[Check[Any]]:
    tests: list[Check[Any]] = []
    for entry in entries:
        name, options = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
        make: Any = partial if callable(known[name]) else kind
        tests.append(make(known[name], **common, **options))
    return tests


# ---- verdicts --------------------------------------------------------------------------------------------------------


def findings_of(check: Tests[Data], data: Data) -> tuple[Finding, ...]:
    """The findings of all tests; the same reason for knowing nothing is given once."""
    results: list[Finding] = []
    for test in (check,) if callable(check) else check:
        results += [finding for finding in test(data) if finding.has_data or finding not in results]
    return tuple(results)


@dataclass(frozen=True)
class AlternativeCheck:
    """The result of an alternative check."""

    name: str
    verdict: Verdict  # corrected for all alternative checks of the claim
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class LedgerEntry:
    """A claim's verdict with its evidence, under one protocol (None without protocols).

    verdict       corrected for all comparisons of the ledger
    uncorrected   verdict without correction
    findings      the parts
    error         two-sided error of the claim after correction
    alternatives  results of the alternative checks that have data
    extremes      the worst and the best verdict if the models that are still learning counted, with the present
                  accuracy of each or with 1; None if no model is left out because it is still learning
    """

    claim: Claim
    protocol: Protocol | None
    verdict: Verdict
    uncorrected: Verdict
    findings: tuple[Finding, ...]
    error: float = LEVEL
    alternatives: tuple[AlternativeCheck, ...] = ()
    extremes: tuple[Verdict, Verdict] | None = None

    @property
    def is_sensitive(self) -> bool:
        """Whether the verdict differs in the worst or the best case of the models that are still learning."""
        return self.extremes is not None and {*self.extremes} != {self.verdict}

    @property
    def learning_text(self) -> str:
        """The verdicts in the worst and the best case of the models that are still learning; empty without any."""
        if self.extremes is None:
            return ""
        worst, best = map(verdict_text, self.extremes)
        verdicts = "the same" if not self.is_sensitive else worst if worst == best else f"from {worst} to {best}"
        return f"with the models that are still learning, at their present accuracy or at 1: {verdicts}"

    @property
    def evidence(self) -> list[str]:
        """One sentence per part; supporting parts are marked."""
        return [f"{'' if part.essential else 'supporting: '}{part.evidence}" for part in self.findings]

    @property
    def missing(self) -> list[str]:
        """What would decide an open claim, part by part; empty for a decided one."""
        if self.verdict not in OPEN_VERDICTS:
            return []
        share = self.error / num_tests([part for part in self.findings if part.essential])
        wanting = [  # with the error of each part after correction
            part.missing
            if part.comparison is None or part.holds is None or part.sides != (True, True)
            else part.comparison.missing(self.error, share)
            for part, verdict in zip(self.findings, part_verdicts(self.findings, self.error), strict=True)
            if part.essential and verdict in OPEN_VERDICTS
        ]
        note = f"{self.uncorrected} without correction, but open after the correction for the whole ledger"
        notes = [note] if self.uncorrected not in OPEN_VERDICTS else []
        return [*notes, *dict.fromkeys(text for text in wanting if text)]

    def row(self) -> dict[str, Any]:
        """A row of the table of claims."""
        texts = {name: getattr(self.claim, name) for name in ("source", "statement", "rule")}
        verdicts = {"protocol": self.protocol, "verdict": self.verdict, "uncorrected": self.uncorrected}
        return {"claim": self.claim.id, **verdicts, **texts, "evidence": "\n".join(self.evidence)}

    def to_dict(self) -> dict[str, Any]:
        """The entry for JSON."""
        parts = [
            {"verdict": verdict, "uncorrected": part.verdict, "essential": part.essential, "evidence": part.evidence}
            for part, verdict in zip(self.findings, part_verdicts(self.findings, self.error), strict=True)
        ]
        return {
            **{name: getattr(self.claim, name) for name in ("id", "source", "statement", "rule")},
            "protocol": self.protocol,
            "verdict": self.verdict,
            "uncorrected": self.uncorrected,
            "with_learning": self.extremes and dict(zip(("worst", "best"), self.extremes, strict=True)),
            "evidence": self.evidence,
            "parts": parts,
            "missing": self.missing,
            "elsewhere": [asdict(alternative) for alternative in self.alternatives],
        }


def judge(claims: Sequence[Claim[Results]], results: Results, protocols: Sequence[Protocol]) -> list[LedgerEntry]:
    """Every claim under every protocol, as one ledger."""
    by_protocol = {protocol: results.for_protocol(protocol) for protocol in protocols}
    return _judge_ledger([(claim, each, by_protocol[each]) for claim in claims for each in protocols])


def judge_all(claims: Sequence[Claim[Data]], data: Data) -> list[LedgerEntry]:
    """Every claim, without protocols, as one ledger."""
    return _judge_ledger([(claim, None, data) for claim in claims])


def _judge_ledger(cases: Sequence[tuple[Claim[Data], Protocol | None, Data]]) -> list[LedgerEntry]:
    groups = [findings_of(claim.check, data) for claim, _, data in cases]
    worst, best = (adjust([_extreme_findings(parts, index) for parts in groups]) for index in (0, 1))
    extremes: list[tuple[Verdict, Verdict] | None] = [
        (low[0], high[0]) if any(part.extremes for part in parts) else None
        for parts, low, high in zip(groups, worst, best, strict=True)
    ]
    return [
        LedgerEntry(claim, protocol, verdict, plain, parts, error, _check_alternatives(claim, data), pair)
        for (claim, protocol, data), parts, (verdict, plain, error), pair in zip(
            cases, groups, adjust(groups), extremes, strict=True
        )
    ]


def _extreme_findings(parts: Iterable[Finding], index: int) -> list[Finding]:
    """The parts in the worst (0) or best case (1), if the models that are still learning counted."""
    return [replace(part.extremes[index] if part.extremes else part, essential=part.essential) for part in parts]


def adjust(claim_findings: Sequence[Sequence[Finding]]) -> list[tuple[Verdict, Verdict, float]]:
    """For each claim: the corrected verdict, the uncorrected one, and the error after correction."""
    errors = holm([claim_p_value(parts) for parts in claim_findings])
    return [(combine(parts, error), combine(parts), error) for parts, error in zip(claim_findings, errors, strict=True)]


def _check_alternatives(claim: Claim[Data], data: Data) -> tuple[AlternativeCheck, ...]:
    results = {name: findings_of(check, data) for name, check in claim.elsewhere.items()}
    known = {name: parts for name, parts in results.items() if any(part.has_data for part in parts)}
    return tuple(
        AlternativeCheck(name, verdict, tuple(part.evidence for part in parts))
        for (name, parts), (verdict, *_) in zip(known.items(), adjust(list(known.values())), strict=True)
    )
