"""Probes of language models: behaviours of the intact model and with changed attention."""

from toeplens.studies.kit.changes import Wish, changes_of, numbers, read_change, told
from toeplens.studies.kit.options import Asked
from toeplens.studies.kit.questions import ABOUT, RETRIEVES, Behaviour, HeadRetrieval
from toeplens.studies.probing.probe import (
    RECORD,
    ItemRecord,
    ProbeRecord,
    Probing,
    Summary,
    open_probe,
    probe,
    save_probe,
)

__all__ = [
    "ABOUT",
    "RECORD",
    "RETRIEVES",
    "Asked",
    "Behaviour",
    "HeadRetrieval",
    "ItemRecord",
    "ProbeRecord",
    "Probing",
    "Summary",
    "Wish",
    "changes_of",
    "numbers",
    "open_probe",
    "probe",
    "read_change",
    "save_probe",
    "told",
]
