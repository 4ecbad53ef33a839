"""What an experiment on the mathematics leaves behind, and how a statement about all instances is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from toeplens.ground import InputError, invalid
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.verdicts import Finding, opposite, unknown
from toeplens.studies.kit.verdicts import supporting as as_supporting

Record = Mapping[str, Any]  # one experiment under one seed: plain numbers, strings and lists, so that JSON can hold it
Records = Mapping[str, Sequence[Record]]  # by experiment's name, one record a seed

ROUNDING = 1e-9  # relative: a smaller difference is none
# how a statement about all instances is decided
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


def short(values: Any) -> Any:
    """Six digits, as plain lists and numbers."""
    return [short(value) for value in values] if np.ndim(values) else float(f"{values:.6g}") + 0.0


def relative_error(rest: Float[np.ndarray, "..."], whole: Float[np.ndarray, "..."]) -> float:
    """The norm of what is left over, in units of the norm of all."""
    return float(np.linalg.norm(rest) / np.linalg.norm(whole))


def generator(seed: int, tries: int) -> np.random.Generator:
    """The random numbers of an experiment; fewer than 20 tries raise `InputError`."""
    if tries < 20:
        raise invalid("tries", "be at least 20", tries)
    return np.random.Generator(np.random.Philox(seed))


def tally(margins: Sequence[float] | np.ndarray, *, beyond: float = ROUNDING) -> dict[str, Any]:
    """Instances ``tried``, ``violations`` (a margin above ``beyond``; NaN counts as one) and the ``worst`` margin.

    A margin is the amount by which an instance contradicts a statement, negative where it agrees with room to spare.
    """
    margins = np.asarray(margins, dtype=float).ravel()
    return {"tried": len(margins), "violations": int((~(margins <= beyond)).sum()), "worst": short(margins.max())}


def in_all(what: str, yes: Sequence[bool]) -> Finding:
    """A property that nothing is left to chance in: it holds if every seed's record shows it."""
    if not yes:
        return unknown(what, "no record that counts")
    count = sum(map(bool, yes))
    return Finding("holds" if count == len(yes) else "fails", f"{what}: in {count} of {len(yes)} seeds")


def pooled(what: str, runs: Sequence[Record], name: str, words: str) -> Finding:
    """A statement about all instances, by all seeds' tallies of one ``name``; ``words`` go before the worst margin."""
    missing = next((run for run in runs if name not in run["tallies"]), None)
    if missing is not None:
        raise InputError(f"records: the record of seed {missing['seed']} is damaged: it has no tally {name!r}.")
    tallies = [run["tallies"][name] for run in runs]
    worst = max((each["worst"] for each in tallies), default=float("nan"))
    tried, violations = (sum(each[key] for each in tallies) for key in ("tried", "violations"))
    return universal(what, tried=tried, violations=violations, worst=f"{words} {worst:.3g}")


@dataclass(frozen=True)
class ClaimsOn:
    """Makes claims on one experiment's records, from a source, a name, what it says, its rule and its tallies.

    A claim's ``parts`` are essential and so are those that it says are ``refuted``; it does not fall with the
    ``supporting`` ones.

    Arguments
        record   name of the experiment
        tallies  by name, what each says, and the words before its worst margin
        rule     of all the claims; each has its own after it
    """

    record: str
    tallies: Mapping[str, tuple[str, str]]
    rule: str = ""

    def __call__(
        self,
        source: str,
        name: str,
        says: str,
        more: str,
        parts: Sequence[str],
        *,
        supporting: Sequence[str] = (),
        refuted: Sequence[str] = (),
    ) -> Claim[Records]:
        def check(records: Records) -> list[Finding]:
            def found(part: str) -> Finding:
                return pooled(self.tallies[part][0], records[self.record], part, self.tallies[part][1])

            turned = [replace(opposite(each), evidence=f"not: {each.evidence}") for each in map(found, refuted)]
            return [*map(found, parts), *turned, *map(as_supporting, map(found, supporting))]

        return Claim(name, source, says, f"{self.rule} {more} {UNIVERSAL}".lstrip(), check)
