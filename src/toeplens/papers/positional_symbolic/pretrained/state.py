"""What is there of a pretrained model's study: its plan and the pieces that are finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from toeplens.papers.positional_symbolic.pretrained.heads import Heads
from toeplens.papers.positional_symbolic.pretrained.plan import Plan
from toeplens.studies.auditing.record import AuditRecord
from toeplens.studies.kit.study import State
from toeplens.studies.probing import ProbeRecord


@dataclass(frozen=True, kw_only=True)
class Pretrained(State):
    """The state of the study.

    audits, probes  the pieces that are finished, by name
    """

    plan: Plan
    audits: Mapping[str, AuditRecord]
    probes: Mapping[str, ProbeRecord]

    def asked(self) -> dict[str, Any]:
        """The plan."""
        return asdict(self.plan)

    def found(self) -> dict[str, Any]:
        """The pieces."""
        return {
            "audits": {name: each.to_dict() for name, each in self.audits.items()},
            "probes": {name: each.to_dict() for name, each in self.probes.items()},
        }

    def frames(self) -> dict[str, Callable[[], pa.Table]]:
        """Heads of all its audits, with the audit's name before what an audit's table has; and claims."""
        return {"heads": self._heads} | super().frames()

    def _heads(self) -> pa.Table:
        named = [
            each.frame().add_column(0, "audit", pa.array([name] * len(each.heads), pa.string()))
            for name, each in self.audits.items()
        ]
        return pa.concat_tables(named) if named else pa.table({"audit": pa.array([], pa.string())})

    def heads(self, kind: str) -> Heads | None:
        """What was measured of each head on each of the texts (``text``), of random weights or shuffled texts."""
        found = [self.audits.get(f"{kind}-{number}") for number in range(len(self.plan.places))]
        audits = [each for each in found if each is not None]
        return Heads.of(audits) if len(audits) == len(found) else None
