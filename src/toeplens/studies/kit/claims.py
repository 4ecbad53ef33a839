"""The ledger: every claim is data, a rule written before its data, and a function from results to a verdict."""

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
    source     which paper and section
    statement  what it says
    rule       what would decide it, fixed before the data
    check      the findings on its parts, from a study's data (of one protocol, where there are protocols)
    part       which part of the study it needs, where a study has parts
    elsewhere  the same asked in other ways, by their names: shown beside the verdict, which does not depend on them
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
        """Whether it is a question of our own and no statement of a paper."""
        return self.source.startswith("ours")


@dataclass(frozen=True)
class Aside:
    """What another way of asking gives.

    verdict  corrected for all the ways in which the claim was asked beside its own
    """

    name: str
    verdict: Verdict
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A claim's verdict with its evidence, under one protocol, or None where protocols play no part.

    verdict   corrected for all comparisons of the ledger
    plain     without that correction
    findings  the parts
    error     the two-sided error that the correction leaves to the claim
    asides    what other ways of asking give, of those that there is something to see in
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
        """A sentence a part; supporting parts say so."""
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
        wanting = [  # with the errors that the ledger leaves to each
            part.wanting
            if part.comparison is None or part.holds is None or part.sides != (True, True)
            else part.comparison.wanting(self.error, share)
            for part in still
        ]
        alone = f"{self.plain} without the correction for the whole ledger, but not with it"
        return [*([alone] if self.plain not in OPEN else []), *dict.fromkeys(each for each in wanting if each)]

    def to_dict(self) -> dict[str, Any]:
        """Plain text, for JSON."""
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
    """A check of all that several checks look at."""
    return lambda data: [finding for check in checks for finding in check(data)]


def as_support(check: Callable[[Data], Sequence[Finding]]) -> Callable[[Data], list[Finding]]:
    """The same check as supporting parts."""
    return lambda data: [supporting(finding) for finding in check(data)]


def judge(claims: Sequence[Claim[Results]], results: Results, protocols: Sequence[Protocol]) -> list[Entry]:
    """Every claim under every protocol, as one ledger."""
    under = {protocol: results.under(protocol) for protocol in protocols}
    return _ledger([(claim, each, under[each]) for claim in claims for each in protocols])


def judge_all(claims: Sequence[Claim[Data]], data: Data) -> list[Entry]:
    """Every claim, where there are no protocols, as one ledger."""
    return _ledger([(claim, None, data) for claim in claims])


def _ledger(asked: Sequence[tuple[Claim[Data], Protocol | None, Data]]) -> list[Entry]:
    found = [tuple(claim.check(data)) for claim, _, data in asked]
    return [
        Entry(claim, protocol, verdict, plain, findings, error, _asides(claim, data))
        for (claim, protocol, data), findings, (verdict, plain, error) in zip(asked, found, settle(found), strict=True)
    ]


def settle(found: Sequence[Sequence[Finding]]) -> list[tuple[Verdict, Verdict, float]]:
    """Of each claim of a ledger, from its parts: the corrected verdict, the plain one, and the error left to it."""
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
