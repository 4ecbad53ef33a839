"""What an experiment on the mathematics leaves behind, and how a statement about all instances is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toeplens.studies.verdicts import Finding

Record = Mapping[str, Any]  # one experiment under one seed: plain numbers, strings and lists, so that JSON can hold it
Records = Mapping[str, Sequence[Record]]  # by experiment's name, one record a seed

UNIVERSAL = (
    "A statement about all instances fails with one counterexample beyond rounding, found by a seeded search or known "
    "beforehand; it holds if the search, of the stated size, found none (a search proves nothing: where there is a "
    "proof, the statement says so)."
)


def universal(what: str, *, tried: int, violations: int, worst: str) -> Finding:
    """A statement about all instances, by `UNIVERSAL`.

    Arguments
        what        the statement
        tried       instances looked at
        violations  how many of them contradict it beyond rounding
        worst       the strongest counterexample, or how near the nearest came, in words
    """
    if tried == 0:
        return Finding("undecided", f"{what}: no instance was tried")
    if violations:
        return Finding("fails", f"{what}: contradicted by {violations} of {tried} instances; {worst}")
    return Finding("holds", f"{what}: no counterexample among {tried} instances; {worst}")
