"""The page of a probe: behaviours of a model, intact and with changed attention."""

from __future__ import annotations

from pathlib import Path

from toeplens.report.kit.blocks import numbered
from toeplens.report.kit.page import Page, write_report
from toeplens.report.kit.tables import Cell, Table, make_table, settings_table
from toeplens.report.probing.figures import by_position, needles, retrievers
from toeplens.studies.probing import ABOUT, ProbeRecord
from toeplens.studies.probing.record import interval, title_of

_MAKERS = (by_position, needles, retrievers)


def write_probe(record: ProbeRecord, directory: Path) -> Path:
    """Write the probe's page to ``report.html`` in ``directory``, whole or not at all; returns its path."""
    return write_report(directory, render_probe(record))


def render_probe(record: ProbeRecord) -> str:
    """The probe as one self-contained HTML document; the same record gives the same document."""
    return probe_page(record).html()


def probe_page(record: ProbeRecord) -> Page:
    """The figures and tables of a probe."""
    return Page(
        "report/probing/page.html.j2",
        numbered(make(record) for make in _MAKERS),
        {"behaviours": behaviours_table(record), "settings": settings_table(sorted(record.about.items()))},
        {
            "command": "probe",
            "record": record,
            "model": "/".join(Path(record.about.get("model") or "a model").parts[-2:]),
        },
    )


def behaviours_table(record: ProbeRecord, *, changed: bool = True) -> Table:
    """Loss and accuracy per behaviour, with ``changed`` also for the changed model."""
    changed = changed and bool(record.changes)
    rows = []
    for each in (one for behaviour in ABOUT for one in record.summaries(behaviour)):
        row: list[str | Cell] = [Cell(title_of(each.behaviour), (ABOUT[each.behaviour],)), str(each.count)]
        row += [interval(each.nats, 2), interval(each.right, 2, most=1)]
        if changed:
            row += [interval(each.changed_nats, 2), interval(each.changed_right, 2, most=1)]
            row.append(interval(each.more_nats, 2, least=None))
        rows.append(row)
    names = ["Behaviour", "Items", "Loss (nats per token)", "Accuracy"]
    names += ["Loss, changed", "Accuracy, changed", "Difference in loss"] * changed
    note = "Loss in nats per token and accuracy, with 95% intervals. Small print: predicted tokens."
    return make_table("Behaviours", names, rows, right=range(1, 7), note=note, css="numbers small")
