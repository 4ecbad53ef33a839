"""Audits of models: every attention head's numbers, proved on the audited tokens."""

from toeplens.studies.auditing.record import COLUMNS, Audit, HeadRecord, LayerRecord
from toeplens.studies.auditing.run import audit

__all__ = ["COLUMNS", "Audit", "HeadRecord", "LayerRecord", "audit"]
