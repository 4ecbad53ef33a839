"""Audits of models: every attention head's numbers, proved on the audited tokens."""

from toeplens.studies.auditing.record import COLUMNS, Audit, HeadRecord, LayerRecord
from toeplens.studies.auditing.run import audit
from toeplens.studies.auditing.store import RECORD, csv_of, open_audit, parquet_of, save
from toeplens.studies.auditing.texts import read_text, read_tokens

__all__ = [
    "COLUMNS",
    "RECORD",
    "Audit",
    "HeadRecord",
    "LayerRecord",
    "audit",
    "csv_of",
    "open_audit",
    "parquet_of",
    "read_text",
    "read_tokens",
    "save",
]
