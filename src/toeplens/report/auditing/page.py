"""The page of an audit: the map, the table and the figures of all heads of a model, and what was proved."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toeplens.report.auditing.distance import distances
from toeplens.report.auditing.effects import deposit_rows, layer_effects
from toeplens.report.auditing.frequencies import frequencies
from toeplens.report.auditing.plane import plane
from toeplens.report.kit.blocks import numbered
from toeplens.report.kit.page import render_page, write_report
from toeplens.studies.auditing import words
from toeplens.studies.auditing.audit import Audit
from toeplens.studies.auditing.record import LayerRecord
from toeplens.studies.auditing.sheets import columns, content, scales_of, sheet, values_of
from toeplens.studies.auditing.words import model

_MAKERS = (plane, frequencies, distances, layer_effects)
_FIRST = 2  # number of the first of these figures: the map is the first of all
_WORDS = 400  # tokens of the first sequence that are shown
PREFERRED = ("effect", "positional", "distance")  # columns that colour the map at first, if known


@dataclass(frozen=True)
class LayerRow:
    """An attention call's line in the table of layers, as words."""

    title: str
    module: str
    heads: str
    width: int
    scale: str
    sees: str
    position: str
    weights: str
    outputs: str
    tolerance: str
    unknown: str


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
        deposits=deposit_rows(audit) if audit.effect else [],
        layers=layer_rows(audit),
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


def layer_rows(audit: Audit) -> list[LayerRow]:
    """The attention calls in the order of the pass."""
    names = words.Names.of(audit)
    return [
        LayerRow(
            title=names.short_layer(layer),
            module=layer.module,
            heads=str(layer.heads) if layer.key_heads == layer.heads else f"{layer.heads} over {layer.key_heads}",
            width=layer.head_dim,
            scale=f"{layer.scale:.4g}" + ("" if layer.softcap is None else f", capped at {layer.softcap:g}"),
            sees=sees(layer),
            position=layer.position,
            weights=words.power(layer.weights),
            outputs=words.power(layer.outputs),
            tolerance=words.power(layer.tolerance),
            unknown=layer.unknown or "",
        )
        for layer in audit.layers
    ]


def sees(layer: LayerRecord) -> str:
    """Which keys a query sees."""
    if layer.window is not None and not layer.causal:
        return f"{layer.window} keys at most"
    if layer.window is not None:
        return f"itself and {layer.window - 1} before"
    others = "those that a mask leaves" if "mask" in layer.position else "all keys"
    return "itself and all before" if layer.causal else others
