"""The page of a probe: what a model can do, and what of it is left after a change of its attention."""

from __future__ import annotations

from pathlib import Path

from toeplens.report.kit.blocks import numbered
from toeplens.report.kit.page import render_page, write_report
from toeplens.report.probing.figures import by_position, needles, retrievers
from toeplens.studies.probing import ABOUT, ProbeRecord
from toeplens.studies.probing.words import interval, title_of

_MAKERS = (by_position, needles, retrievers)


def write_probe(record: ProbeRecord, directory: Path) -> Path:
    """Write the probe's page to ``report.html`` in ``directory``, whole or not at all; returns its path."""
    return write_report(directory, render_probe(record))


def render_probe(record: ProbeRecord) -> str:
    """The probe as one self-contained HTML document; the same record gives the same document."""
    return render_page(
        "report/probing/page.html.j2",
        numbered(make(record) for make in _MAKERS),
        command="probe",
        record=record,
        summaries=[each for behaviour in ABOUT for each in record.summaries(behaviour)],
        about=ABOUT,
        title=title_of,
        interval=interval,
        model="/".join(Path(record.about.get("model") or "a model").parts[-2:]),
    )
