"""The ledger: every claim is data, a rule written before its data, and a function from results to a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from toeplens.model import Protocol
from toeplens.studies.kit.results import Results
from toeplens.studies.kit.verdicts import Finding, Verdict, combine

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
    """

    id: str
    source: str
    statement: str
    rule: str
    check: Callable[[Data], Sequence[Finding]]
    part: str = ""


@dataclass(frozen=True)
class Entry:
    """A claim's verdict with its evidence, under one protocol, or None where protocols play no part."""

    claim: Claim
    protocol: Protocol | None
    verdict: Verdict
    evidence: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain text, for JSON."""
        return {
            "id": self.claim.id,
            "source": self.claim.source,
            "statement": self.claim.statement,
            "rule": self.claim.rule,
            "protocol": self.protocol,
            "verdict": self.verdict,
            "evidence": self.evidence,
        }


def every(*checks: Callable[[Data], Sequence[Finding]]) -> Callable[[Data], list[Finding]]:
    """A check of all that several checks look at."""
    return lambda data: [finding for check in checks for finding in check(data)]


def judge(claims: Sequence[Claim[Results]], results: Results, protocols: Sequence[Protocol]) -> list[Entry]:
    """Every claim under every protocol."""
    return [_entry(claim, results.under(protocol), protocol) for claim in claims for protocol in protocols]


def judge_all(claims: Sequence[Claim[Data]], data: Data) -> list[Entry]:
    """Every claim, where there are no protocols."""
    return [_entry(claim, data, None) for claim in claims]


def _entry(claim: Claim[Data], data: Data, protocol: Protocol | None) -> Entry:
    findings = list(claim.check(data))
    return Entry(claim, protocol, combine(findings), [finding.evidence for finding in findings])
