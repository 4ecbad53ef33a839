"""A pretrained model's study from its record, and its verdicts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from toeplens.ground.records import Record
from toeplens.papers.positional_symbolic.pretrained.claims import CLAIMS
from toeplens.papers.positional_symbolic.pretrained.plan import Plan
from toeplens.papers.positional_symbolic.pretrained.state import Pretrained
from toeplens.studies.auditing.record import AuditRecord
from toeplens.studies.kit.claims import judge_all
from toeplens.studies.kit.recorded import Kept
from toeplens.studies.probing import ProbeRecord


@dataclass(frozen=True, kw_only=True)
class _Pieces(Record):
    audits: dict[str, AuditRecord]
    probes: dict[str, ProbeRecord]


def judged(state: Pretrained) -> Pretrained:
    """The same with the verdicts on its claims."""
    return replace(state, entries=judge_all(CLAIMS, state))


def reread(kept: Kept, plan: Plan) -> Pretrained:
    """A study as its results.json tells it; its claims are judged as rules are now."""
    found = _Pieces.from_dict(kept.content, kept.path)
    return judged(Pretrained(**kept.head, plan=plan, audits=found.audits, probes=found.probes))
