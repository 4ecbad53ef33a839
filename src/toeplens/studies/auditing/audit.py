"""An audit: its record, and how a notebook shows it."""

from __future__ import annotations

from dataclasses import dataclass

from toeplens.studies.auditing.notebook import notebook_html
from toeplens.studies.auditing.record import AuditRecord


@dataclass(frozen=True)
class Audit(AuditRecord):
    """What `audit` gives; a notebook shows it as maps of heads."""

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return notebook_html(self)
