"""The page of an audit: the map, the table and the figures of all heads of a model, and what was proved."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from toeplens.report.auditing.bands import by_band
from toeplens.report.auditing.maps import distances, frequencies
from toeplens.report.auditing.marks import interval_told, layer_effects, plane
from toeplens.report.kit.blocks import numbered
from toeplens.report.kit.page import render_page, write_report
from toeplens.studies.auditing import words
from toeplens.studies.auditing.audit import Audit
from toeplens.studies.auditing.record import LayerRecord
from toeplens.studies.auditing.sheets import columns, content, digits_of, scales_of, sheet, values_of
from toeplens.studies.auditing.words import model

_MAKERS = (plane, frequencies, distances, layer_effects, by_band)
_FIRST = 2  # number of the first of these figures: the map is the first of all
_WORDS = 400  # tokens of the first sequence that are shown
PREFERRED = ("effect", "positional", "distance")  # columns that colour the map at first, if known


def write_audit(audit: Audit, directory: Path, parquet: bytes | None = None) -> Path:
    """Write the audit's page to ``report.html`` in ``directory``, whole or not at all; returns its path."""
    return write_report(directory, render_audit(audit, parquet))


def render_audit(audit: Audit, parquet: bytes | None = None) -> str:
    """The audit as one self-contained HTML document; the same record gives the same document.

    ``parquet``: the table of heads as a Parquet file, to be downloaded from the page; without it the page offers CSV.
    """
    found = numbered((make(audit) for make in _MAKERS), _FIRST)
    values = values_of(audit)
    shown = columns(values)
    one = sheet(model(audit), audit, values, scales_of(values), {column["name"]: column["digits"] for column in shown})
    return render_page(
        "report/auditing/page.html.j2",
        found,
        command="audit",
        audit=audit,
        words=words,
        model=model(audit),
        columns=shown,
        chosen=chosen(shown),
        sheet=one,
        all_layers=sorted({layer.layer for layer in audit.layers}),
        unknown=words.unknown(audit),
        logits=any(layer.logit is not None for layer in audit.layers),
        names=words.Names.of(audit),
        digits=digits_of("effect", values),
        interval=interval_told,
        sees=sees,
        tokens=audit.words[:_WORDS],
        content=content(shown, [one]),
        parquet=None if parquet is None else base64.b64encode(parquet).decode(),
        file=file_name(model(audit)),
    )


def chosen(shown: list[dict[str, Any]]) -> str:
    """The column that colours a map at first; empty where there is none."""
    names = [column["name"] for column in shown]
    return next((name for name in (*PREFERRED, *names) if name in names), "")


def file_name(name: str) -> str:
    """A name for downloads: letters, digits, dots and dashes of the model's."""
    kept = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in name)
    return kept.strip("-.")[-80:] or "audit"


def sees(layer: LayerRecord) -> str:
    """Which keys a query sees."""
    if layer.chunk is not None:
        return f"itself and those before in its chunk of {layer.chunk}"
    if layer.window is not None and not layer.causal:
        return f"itself and {layer.window - 1} on either side"
    if layer.window is not None:
        return f"itself and {layer.window - 1} before"
    others = "those that a mask leaves" if "mask" in layer.position else "all keys"
    return "itself and all before" if layer.causal else others
