"""Claims that a grid study may be judged by: sets of them, by the entry point ``toeplens.claims``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from toeplens.ground import choose
from toeplens.studies.grid.relations import Relation
from toeplens.studies.grid.spec import GridSpec
from toeplens.studies.kit.claims import Claim, Entry, judge_all
from toeplens.studies.kit.results import CellResult, Results


@dataclass(frozen=True)
class Evidence:
    """What claims on a grid study are judged on."""

    spec: GridSpec
    results: Results
    relations: Sequence[Relation]

    def skilled(self, task: str, label: str) -> list[CellResult]:
        """The cells of a task and encoding that learned enough."""
        return [cell for cell in self.results.of(task, label) if cell.skilled]


def judged(data: Evidence) -> list[Entry]:
    """The claims that the study asks for, with their verdicts; none where it asks for none."""
    if not data.spec.claims:
        return []
    sets = entry_points(group="toeplens.claims")
    claims: Sequence[Claim[Evidence]] = sets[choose("claims", data.spec.claims, sets.names)].load()
    return judge_all(claims, data)
