"""A recorded study in results/, with its table and its ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from toeplens.studies import CellResult, Results
from toeplens.studies.grid import GridSpec, grid_spec
from toeplens.studies.kit.study import read_record
from toeplens.training import PRESETS

RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class RecordedStudy:
    """A study's record."""

    content: Mapping[str, Any]

    @cached_property
    def results(self) -> Results:
        return Results(CellResult.from_dict(cell) for cell in self.content["cells"])

    @cached_property
    def spec(self) -> GridSpec:
        """What a grid study was asked."""
        return grid_spec(yaml.safe_load(self.content["spec"]))

    def titles_under(self, protocol: str, task: str) -> dict[str, str]:
        """The whole encodings of a reproduction's table, not those on some heads."""
        rows = (row for row in self.content["table"] if (row["protocol"], row["task"]) == (protocol, task))
        return {row["label"]: row["title"] for row in rows if not row["label"].startswith("partial-")}

    @cached_property
    def seeds(self) -> tuple[int, int]:
        """How many models the smallest and the largest of its cells have."""
        places = Counter((cell.key.protocol, cell.key.task, cell.key.label) for cell in self.results.cells)
        return min(places.values()), max(places.values())

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Fields of the models that were trained."""
        return self.spec.model if "spec" in self.content else PRESETS[self.content["scale"]].model


@cache
def record(name: str) -> RecordedStudy:
    """A record of results/."""
    return RecordedStudy(read_record(RESULTS / name / "results.json.xz").content)
