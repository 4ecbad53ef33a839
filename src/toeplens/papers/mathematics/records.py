"""Records of the mathematical experiments, and how a statement about all instances is judged."""

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

Record = Mapping[str, Any]  # one experiment with one seed, JSON-serialisable
Records = Mapping[str, Sequence[Record]]  # by experiment name, one record per seed

ROUNDING = 1e-9  # relative tolerance
# how a statement about all instances is decided
UNIVERSAL = (
    "A statement about all instances fails with one counterexample beyond rounding, known or found by a seeded search. "
    "It holds if the search found none. A search is not a proof; the rule says if there is a proof."
)


def universal(what: str, *, tried: int, violations: int, worst: str) -> Finding:
    """A statement about all instances, by `UNIVERSAL`.

    Arguments
        what        the statement
        tried       number of tested instances
        violations  number of instances that contradict it beyond rounding
        worst       description of the strongest counterexample, or of the nearest instance
    """
    if tried == 0:
        return Finding("undecided", f"{what}: no instance was tested")
    if violations:
        return Finding("fails", f"{what}: contradicted by {violations} of {tried} instances; {worst}")
    return Finding("holds", f"{what}: no counterexample among {tried} instances; {worst}")


def short(values: Any) -> Any:
    """Values rounded to six digits, as plain lists and numbers."""
    return [short(value) for value in values] if np.ndim(values) else float(f"{values:.6g}") + 0.0


def relative_error(rest: Float[np.ndarray, "..."], whole: Float[np.ndarray, "..."]) -> float:
    """The norm of the remainder, relative to the norm of the whole."""
    return float(np.linalg.norm(rest) / np.linalg.norm(whole))


def generator(seed: int, tries: int) -> np.random.Generator:
    """The random generator of an experiment. Raises `InputError` for fewer than 20 tries."""
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
    """A deterministic property: it holds if every seed's record has it."""
    if not yes:
        return unknown(what, "no record qualifies")
    count = sum(map(bool, yes))
    return Finding("holds" if count == len(yes) else "fails", f"{what}: in {count} of {len(yes)} seeds")


def pooled(what: str, runs: Sequence[Record], name: str, words: str) -> Finding:
    """A statement about all instances, from all seeds' tallies of one ``name``; ``words`` precede the worst margin."""
    missing = next((run for run in runs if name not in run["tallies"]), None)
    if missing is not None:
        raise InputError(f"records: the record of seed {missing['seed']} is damaged: it has no tally {name!r}.")
    tallies = [run["tallies"][name] for run in runs]
    worst = max((each["worst"] for each in tallies), default=float("nan"))
    tried, violations = (sum(each[key] for each in tallies) for key in ("tried", "violations"))
    return universal(what, tried=tried, violations=violations, worst=f"{words} {worst:.3g}")


@dataclass(frozen=True)
class ClaimsOn:
    """Makes claims on one experiment's records, from a source, a name, a statement, a rule and tallies.

    A claim's ``parts`` are essential, as are those that must be ``refuted``; ``supporting`` ones are not.

    Arguments
        record   name of the experiment
        tallies  by name, the statement of each and the words before its worst margin
        rule     common start of the claims' rules
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
