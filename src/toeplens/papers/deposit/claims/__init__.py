"""The papers' empirical claims that this study can decide.

The rules were written before `desk` was trained. docs/decisions/06-amended-rules.md lists later amendments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from toeplens.papers.deposit.claims import checks, mechanism
from toeplens.papers.deposit.claims.checks import DATA, Test
from toeplens.papers.deposit.measured import END, LOOKS
from toeplens.studies.kit.claims import Claim, checks_of, claim_of
from toeplens.studies.kit.results import Results

_KNOWN = {**checks.KNOWN, **mechanism.KNOWN}
_MOMENTS = {"end": "at the end", "able": "at 90% accuracy", "plateau": "at the plateau"} | {
    moment: f"at {moment} the plateau's steps" for moment in ("twice", "four times", "eight times")
}


def _claim(entry: Mapping[str, Any]) -> Claim[Results]:
    """A claim; one with a measure is judged at the end of training by it, and for comparison at all of `LOOKS`."""
    if "measure" not in entry:
        return claim_of(entry, _KNOWN, DATA["words"], Test)
    own = (END, entry["measure"])
    ways = {f"{_MOMENTS[at[0]]}, by {at[1]}": checks_of(entry, _KNOWN, Test, at=at) for at in LOOKS if at != own}
    return replace(claim_of(entry, _KNOWN, DATA["words"], Test, at=own), elsewhere=ways)


# the ledger of a reproduction
CLAIMS: tuple[Claim[Results], ...] = tuple(map(_claim, DATA["claims"]))


def claims_of(parts: Sequence[str]) -> tuple[Claim[Results], ...]:
    """The claims that these parts of the study can decide."""
    return tuple(claim for claim in CLAIMS if claim.part in parts)


__all__ = ["CLAIMS", "claims_of"]
