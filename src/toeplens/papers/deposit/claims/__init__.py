"""The papers' empirical claims that this study can decide.

The rules were written before `desk` was trained. docs/decisions/06-amended-rules.md lists later amendments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from toeplens.papers.deposit.claims import checks, mechanism
from toeplens.papers.deposit.claims.checks import DATA, ProtocolTest
from toeplens.papers.deposit.measures import CHECKPOINT_MEASURES, END
from toeplens.studies.kit.claims import Claim, checks_of, claim_of
from toeplens.studies.kit.results import Results

_CHECKS = {**checks.CHECKS, **mechanism.CHECKS}
_CHECKPOINT_TEXTS = {"end": "at the end", "able": "at 90% accuracy", "plateau": "at the plateau"} | {
    moment: f"at {moment} the plateau's steps" for moment in ("twice", "four times", "eight times")
}


def _claim(entry: Mapping[str, Any]) -> Claim[Results]:
    """A claim; one with a measure is judged at the end of training by it, and by `CHECKPOINT_MEASURES` to compare."""
    if "measure" not in entry:
        return claim_of(entry, _CHECKS, DATA["words"], ProtocolTest)
    criterion = (END, entry["measure"])
    alternatives = {
        f"{_CHECKPOINT_TEXTS[other[0]]}, by {other[1]}": checks_of(entry, _CHECKS, ProtocolTest, criterion=other)
        for other in CHECKPOINT_MEASURES
        if other != criterion
    }
    return replace(claim_of(entry, _CHECKS, DATA["words"], ProtocolTest, criterion=criterion), elsewhere=alternatives)


# the ledger of a reproduction
CLAIMS: tuple[Claim[Results], ...] = tuple(map(_claim, DATA["claims"]))


def claims_of(parts: Sequence[str]) -> tuple[Claim[Results], ...]:
    """The claims that these parts of the study can decide."""
    return tuple(claim for claim in CLAIMS if claim.part in parts)


__all__ = ["CLAIMS", "claims_of"]
