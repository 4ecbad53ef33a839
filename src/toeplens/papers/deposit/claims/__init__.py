"""The papers' empirical claims that this study can decide.

The rules were written before `desk` was trained. docs/decisions/06-amended-rules.md lists later amendments.
"""

from __future__ import annotations

from collections.abc import Sequence

from toeplens.papers.deposit.claims import accuracy, heads, mechanism
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.results import Results

# the ledger of a reproduction
CLAIMS: tuple[Claim[Results], ...] = (*accuracy.CLAIMS, *heads.CLAIMS, *mechanism.CLAIMS, *heads.SWEEP)


def claims_of(parts: Sequence[str]) -> tuple[Claim[Results], ...]:
    """The claims that these parts of the study can decide."""
    return tuple(claim for claim in CLAIMS if claim.part in parts)


__all__ = ["CLAIMS", "claims_of"]
