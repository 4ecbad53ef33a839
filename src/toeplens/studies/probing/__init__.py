"""Probes of language models: behaviours of the intact model and with changed attention."""

from toeplens.studies.kit.changes import ChangeSpec, changes_text, parse_change, parse_numbers, resolve_changes
from toeplens.studies.kit.options import ProbeSizes
from toeplens.studies.kit.probe_items import DESCRIPTIONS, MIN_RETRIEVAL, HeadRetrieval, ProbeKind
from toeplens.studies.probing.probe import (
    RECORD,
    ItemRecord,
    ModelProbe,
    ProbeRecord,
    ProbeSummary,
    open_probe,
    probe,
    save_probe,
)

__all__ = [
    "DESCRIPTIONS",
    "MIN_RETRIEVAL",
    "RECORD",
    "ChangeSpec",
    "HeadRetrieval",
    "ItemRecord",
    "ModelProbe",
    "ProbeKind",
    "ProbeRecord",
    "ProbeSizes",
    "ProbeSummary",
    "changes_text",
    "open_probe",
    "parse_change",
    "parse_numbers",
    "probe",
    "resolve_changes",
    "save_probe",
]
