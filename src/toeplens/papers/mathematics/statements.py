"""Experiments on the papers' mathematics, how statements about all instances are judged, and the claims on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.random import Generator, Philox

from toeplens.studies.kit.claims import Claim, claim_of, read_claims
from toeplens.studies.kit.verdicts import Finding, opposite
from toeplens.utils import invalid

Record = dict[str, Any]  # one experiment with one seed, JSON-serialisable
Records = Mapping[str, Sequence[Record]]  # by experiment name, one record per seed
Sizes = Sequence[int]
RecordCheck = Callable[[Records], list[Finding]]  # judges one part of a claim
Margins = defaultdict[str, list[float]]  # by statement: how much each instance contradicts it, negative where it agrees

ROUNDING = 1e-9  # relative tolerance
# how a statement about all instances is decided
UNIVERSAL = (
    "A statement about all instances fails with one counterexample beyond rounding, known or found by a seeded search. "
    "It holds if the search found none. A search is not a proof; the rule says if there is a proof."
)

DATA = read_claims(Path(__file__).with_name("statements.yaml"))


def universal_finding(statement: str, *, tried: int, violations: int, worst: str) -> Finding:
    """A statement about all instances, by `UNIVERSAL`: how many were tested, how many contradict it, and the words
    for the strongest counterexample or the nearest instance."""
    if tried == 0:
        return Finding("undecided", f"{statement}: no instance was tested")
    if violations:
        return Finding("fails", f"{statement}: contradicted by {violations} of {tried} instances; {worst}")
    return Finding("holds", f"{statement}: no counterexample among {tried} instances; {worst}")


def round_values(values: Any) -> Any:
    """Values rounded to six digits, as plain lists and numbers."""
    return [round_values(value) for value in values] if np.ndim(values) else float(f"{values:.6g}") + 0.0


def relative_error(residual: Float[np.ndarray, "..."], reference: Float[np.ndarray, "..."]) -> float:
    """The norm of the remainder, relative to the norm of the whole."""
    return float(np.linalg.norm(residual) / np.linalg.norm(reference))


@dataclass(frozen=True)
class Experiment:
    """An experiment: ``run`` makes a record from a seed and, by name, numbers of instances and sizes.

    ``parts`` judge its records; statements.yaml combines them to claims.
    """

    name: str
    run: Callable[..., Record]
    checks: Mapping[str, RecordCheck]


def statements_of(experiment: str) -> dict[str, dict[str, Any]]:
    """The statements of statements.yaml on an experiment's records, by name."""
    return DATA["experiments"][experiment]["statements"]


def counterexample_search(measure: Callable[..., Record | None]) -> Experiment:
    """An experiment that looks for counterexamples to the statements of its name in statements.yaml, its parts.

    Its records hold ``tallies`` by statement and what ``measure`` returns. It gets a random generator, margins that it
    adds to, and by name the number of ``tries`` (random instances of each kind, 20 or more) and sizes.
    """
    name = measure.__name__
    statements = statements_of(name)

    def run(seed: int, **sizes: Any) -> Record:
        if sizes.get("tries", 20) < 20:
            raise invalid("tries", "be at least 20", sizes["tries"])
        margins: Margins = defaultdict(list)
        extra = measure(Generator(Philox(seed)), margins, **sizes) or {}
        tallies = {key: tally(margins[key], item.get("at_most", ROUNDING)) for key, item in statements.items()}
        return {"seed": seed, "tallies": tallies, **extra}

    def judge_statement(statement: str, records: Records) -> list[Finding]:
        tallies = [record["tallies"][statement] for record in records[name]]
        worst = max((item["worst"] for item in tallies), default=float("nan"))
        tried, violations = (sum(item[key] for item in tallies) for key in ("tried", "violations"))
        words = f"{statements[statement]['worst']} {worst:.3g}"
        return [universal_finding(statements[statement]["says"], tried=tried, violations=violations, worst=words)]

    return Experiment(name, run, {statement: partial(judge_statement, statement) for statement in statements})


def tally(margins: Sequence[float] | Float[np.ndarray, "..."], at_most: float = ROUNDING) -> Record:
    """Instances ``tried``, ``violations`` (a margin above ``at_most``, or NaN) and the ``worst`` margin."""
    values = np.asarray(margins, dtype=float).ravel()
    return {"tried": len(values), "violations": int((~(values <= at_most)).sum()), "worst": round_values(values.max())}


def load_claims(experiments: Sequence[Experiment]) -> tuple[Claim[Records], ...]:
    """The claims of statements.yaml, in its order: a test whose name starts with "not" has to fail."""
    words = {"universal": UNIVERSAL, **DATA["words"]}

    def negated(part: RecordCheck, records: Records) -> list[Finding]:
        return [replace(opposite(finding), evidence=f"not: {finding.evidence}") for finding in part(records)]

    checks = {
        entry.name: {**entry.checks, **{f"not {n}": partial(negated, p) for n, p in entry.checks.items()}}
        for entry in experiments
    }
    claims = ((claim, checks[name]) for name, entry in DATA["experiments"].items() for claim in entry["claims"])
    return tuple(claim_of(claim, parts, words) for claim, parts in claims)
