"""The ledger: every claim has a statement, a rule fixed before the data, and a function from results to a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from toeplens.model import Protocol
from toeplens.studies.kit.results import Results
from toeplens.studies.kit.verdicts import (
    LEVEL,
    OPEN,
    Finding,
    Verdict,
    chance,
    combine,
    holm,
    sharing,
    supporting,
    told_of,
)

Data = TypeVar("Data")


@dataclass(frozen=True)
class Claim(Generic[Data]):
    """A statement of the papers, as an executable check.

    id         short name
    source     paper and section
    statement  the claim
    rule       the decision rule, fixed before the data
    check      returns the findings on the parts, from a study's data (of one protocol, if there are protocols)
    part       the part of the study that the claim needs, if the study has parts
    elsewhere  alternative checks by name; shown with the verdict, which does not depend on them
    """

    id: str
    source: str
    statement: str
    rule: str
    check: Callable[[Data], Sequence[Finding]]
    part: str = ""
    elsewhere: Mapping[str, Callable[[Data], Sequence[Finding]]] = field(default_factory=dict, hash=False)

    @property
    def ours(self) -> bool:
        """Whether it is our own question and not a statement of a paper."""
        return self.source.startswith("ours")


@dataclass(frozen=True)
class Aside:
    """The result of an alternative check.

    verdict  corrected for all alternative checks of the claim
    """

    name: str
    verdict: Verdict
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
        parts = [part for part in self.findings if part.essential]
        share = self.error / sharing(parts)
        told = zip(self.findings, told_of(self.findings, self.error), strict=True)
        still = [part for part, verdict in told if part.essential and verdict in OPEN]
        wanting = [  # with the error of each part after correction
            part.wanting
            if part.comparison is None or part.holds is None or part.sides != (True, True)
            else part.comparison.wanting(self.error, share)
            for part in still
        ]
        alone = f"{self.plain} without correction, but open after the correction for the whole ledger"
        return [*([alone] if self.plain not in OPEN else []), *dict.fromkeys(each for each in wanting if each)]

    def to_dict(self) -> dict[str, Any]:
        """The entry for JSON."""
        told = [
            {"verdict": verdict, "plain": part.verdict, "essential": part.essential, "evidence": part.evidence}
            for part, verdict in zip(self.findings, told_of(self.findings, self.error), strict=True)
        ]
        return {
            "id": self.claim.id,
            "source": self.claim.source,
            "statement": self.claim.statement,
            "rule": self.claim.rule,
            "protocol": self.protocol,
            "verdict": self.verdict,
            "plain": self.plain,
            "evidence": self.evidence,
            "parts": told,
            "wanting": self.wanting,
            "elsewhere": [asdict(aside) for aside in self.asides],
        }


def every(*checks: Callable[[Data], Sequence[Finding]]) -> Callable[[Data], list[Finding]]:
    """A check that combines several checks."""
    return lambda data: [finding for check in checks for finding in check(data)]


def as_support(check: Callable[[Data], Sequence[Finding]]) -> Callable[[Data], list[Finding]]:
    """The check with its findings as supporting parts."""
    return lambda data: [supporting(finding) for finding in check(data)]


def judge(claims: Sequence[Claim[Results]], results: Results, protocols: Sequence[Protocol]) -> list[Entry]:
    """Every claim under every protocol, as one ledger."""
    under = {protocol: results.under(protocol) for protocol in protocols}
    return _ledger([(claim, each, under[each]) for claim in claims for each in protocols])


def judge_all(claims: Sequence[Claim[Data]], data: Data) -> list[Entry]:
    """Every claim, without protocols, as one ledger."""
    return _ledger([(claim, None, data) for claim in claims])


def _ledger(asked: Sequence[tuple[Claim[Data], Protocol | None, Data]]) -> list[Entry]:
    found = [tuple(claim.check(data)) for claim, _, data in asked]
    return [
        Entry(claim, protocol, verdict, plain, findings, error, _asides(claim, data))
        for (claim, protocol, data), findings, (verdict, plain, error) in zip(asked, found, settle(found), strict=True)
    ]


def settle(found: Sequence[Sequence[Finding]]) -> list[tuple[Verdict, Verdict, float]]:
    """For each claim: the corrected verdict, the uncorrected one, and the error after correction."""
    errors = holm([chance(findings) for findings in found])
    return [(combine(parts, error), combine(parts), error) for parts, error in zip(found, errors, strict=True)]


def _asides(claim: Claim[Data], data: Data) -> tuple[Aside, ...]:
    found = {name: list(check(data)) for name, check in claim.elsewhere.items()}
    seen = {name: findings for name, findings in found.items() if any(part.known for part in findings)}
    verdicts: list[Verdict] = [verdict for verdict, _, _ in settle(list(seen.values()))]
    return tuple(
        Aside(name, verdict, tuple(part.evidence for part in findings))
        for (name, findings), verdict in zip(seen.items(), verdicts, strict=True)
    )
