"""Audits of models: measures of every attention head, proved on the audited tokens."""

from toeplens.studies.auditing.inputs import read_text, read_tokens
from toeplens.studies.auditing.record import COLUMNS, PARTS, Audit, HeadRecord, LayerRecord
from toeplens.studies.auditing.result import RECORD, open_audit, parquet_of, save_audit
from toeplens.studies.auditing.study import audit
from toeplens.studies.kit.options import AuditOptions

__all__ = [
    "COLUMNS",
    "PARTS",
    "RECORD",
    "Audit",
    "AuditOptions",
    "HeadRecord",
    "LayerRecord",
    "audit",
    "open_audit",
    "parquet_of",
    "read_text",
    "read_tokens",
    "save_audit",
]
