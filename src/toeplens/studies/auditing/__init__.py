"""Audits of models: measures of every attention head, proved on the audited tokens."""

from toeplens.studies.auditing.audit import RECORD, Audit, csv_of, open_audit, parquet_of, save
from toeplens.studies.auditing.inputs import read_text, read_tokens
from toeplens.studies.auditing.kept import PARTS
from toeplens.studies.auditing.own import is_run
from toeplens.studies.auditing.record import COLUMNS, HeadRecord, LayerRecord, NoSuchHead, NoSuchLayer, NotThere
from toeplens.studies.auditing.study import audit, check_run_options

__all__ = [
    "COLUMNS",
    "PARTS",
    "RECORD",
    "Audit",
    "HeadRecord",
    "LayerRecord",
    "NoSuchHead",
    "NoSuchLayer",
    "NotThere",
    "audit",
    "check_run_options",
    "csv_of",
    "is_run",
    "open_audit",
    "parquet_of",
    "read_text",
    "read_tokens",
    "save",
]
