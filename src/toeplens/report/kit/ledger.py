"""The ledger of claims, as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toeplens.studies import Entry


@dataclass(frozen=True)
class ClaimRow:
    """A claim, with its entry under each protocol."""

    id: str
    statement: str
    source: str
    rule: str
    entries: list[Entry]


def claim_rows(entries: Sequence[Entry]) -> list[ClaimRow]:
    """The ledger, a row a claim, in the study's order."""
    by_claim: dict[str, list[Entry]] = {}
    for entry in entries:
        by_claim.setdefault(entry.claim.id, []).append(entry)
    return [
        ClaimRow(id, found[0].claim.statement, found[0].claim.source, found[0].claim.rule, found)
        for id, found in by_claim.items()
    ]
