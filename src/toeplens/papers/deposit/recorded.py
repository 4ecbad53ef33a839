"""What the recorded studies found, for those who run a smaller one (`tools/tables.py` writes the file)."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

from toeplens.studies import Verdict

Found = tuple[str, str, Verdict]  # the record's scale, its seeds in words, what it found


@cache
def recorded() -> dict[tuple[str, str], tuple[Found, ...]]:
    """Verdicts of the records by claim and protocol, the most telling record first."""
    text = resources.files("toeplens.papers.deposit").joinpath("recorded.json").read_text(encoding="utf-8")
    found: dict[tuple[str, str], tuple[Found, ...]] = {}
    for scale, record in json.loads(text).items():
        for claim, protocol, verdict in record["verdicts"]:
            found[claim, protocol] = (*found.get((claim, protocol), ()), (scale, record["seeds"], verdict))
    return found
