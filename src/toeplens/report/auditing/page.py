"""The page of an audit: map, table and figures of all heads of a model, and the proof."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from toeplens.ground.words import fixed, percent
from toeplens.report.auditing.figures import (
    by_band,
    distances,
    frequencies,
    head_map,
    interval_told,
    layer_effects,
    plane,
)
from toeplens.report.kit.blocks import numbered
from toeplens.report.kit.page import Page, write_report
from toeplens.report.kit.tables import DASH, Cell, Table, code, make_table, settings_table
from toeplens.studies.auditing import words
from toeplens.studies.auditing.record import LayerRecord
from toeplens.studies.auditing.result import Audit, columns, content, digits_of, scales_of, sheet, values_of
from toeplens.studies.auditing.words import model

_MAKERS = (plane, frequencies, distances, layer_effects, by_band)
_FIRST = 2  # number of the first of these figures; the map is Figure 1
_WORDS = 400  # tokens of the first sequence that are shown
PREFERRED = ("effect", "positional", "distance")  # columns that colour the map initially, if known


def write_audit(audit: Audit, directory: Path, parquet: bytes | None = None) -> Path:
    """Write the audit's page to ``report.html`` in ``directory``, whole or not at all; returns its path."""
    return write_report(directory, render_audit(audit, parquet))


def render_audit(audit: Audit, parquet: bytes | None = None) -> str:
    """The audit as one self-contained HTML document; the same record gives the same document.

    ``parquet``: the table of heads as a Parquet file, for download; without it the page only offers CSV.
    """
    return audit_page(audit, parquet).html()


def audit_page(audit: Audit, parquet: bytes | None = None) -> Page:
    """The figures and tables of an audit; see `render_audit`."""
    values = values_of(audit)
    shown, digits = columns(values), digits_of("effect", values)
    one = sheet(model(audit), audit, values, scales_of(values), {column["name"]: column["digits"] for column in shown})
    unknown = words.unknown(audit)
    tables = {
        "heads": _heads_table(one, shown),
        "deposits": _deposits_table(audit, digits),
        "layers": _layers_table(audit, with_shares=bool(unknown)),
        "settings": settings_table(audit.about.items()),
    }
    return Page(
        "report/auditing/page.html.j2",
        numbered((make(audit) for make in _MAKERS), _FIRST),
        {name: table for name, table in tables.items() if table.body},
        {
            "command": "audit",
            "audit": audit,
            "words": words,
            "model": model(audit),
            "columns": shown,
            "chosen": chosen(shown),
            "sheet": one,
            "all_layers": sorted({layer.layer for layer in audit.layers}),
            "unknown": unknown,
            "logits": any(layer.logit is not None for layer in audit.layers),
            "tokens": audit.words[:_WORDS],
            "content": content(shown, [one]),
            "parquet": None if parquet is None else base64.b64encode(parquet).decode(),
            "file": file_name(model(audit)),
        },
        [head_map(one, column) for column in shown],
    )


def _heads_table(one: dict[str, Any], shown: list[dict[str, Any]]) -> Table:
    """All heads, as the page's script shows them; layers and heads are counted from 1."""
    rows = [
        [title, str(layer + 1), str(head + 1), *(fixed(one["values"][c["name"]][at], c["digits"]) for c in shown)]
        for at, (title, layer, head) in enumerate(zip(one["titles"], one["layer"], one["head"], strict=True))
    ]
    names = ["head", "layer", "index in layer", *(column["title"] for column in shown)]
    return make_table("All heads", names, rows, right=range(1, len(names)))


def _deposits_table(audit: Audit, digits: int) -> Table:
    """How the effects of each layer are distributed over its heads."""
    names, told, rows = words.Names.of(audit), words.told, []
    for layer in audit.layers if audit.effect else ():
        found, name = layer.deposit, names.short_layer(layer)
        if not found:
            continue
        top = words.top_head(audit, layer) if found.get("top_share") is not None else None
        row = [name, told(found.get("helps"), digits), told(found.get("harms"), digits)]
        row += [f"head {top.head + 1}" if top else DASH, told(top.effect if top else None, digits)]
        row += [(interval_told(top, digits) if top else "") or DASH, percent(found.get("top_share"))]
        row += [f"{told(found.get('effective_heads'), 1)} of {layer.heads}", told(found.get("gini"), 2)]
        rows.append([*row, told(found.get("lead"), digits)])
    shown = ["Positive", "Negative", "Largest", "Effect", "Interval", "Share", "Effective heads", "Gini", "Lead"]
    right = (1, 2, *range(4, 10))
    return make_table("Deposit by layer", ["Layer", *shown], rows, right=right, css="numbers small")


def _layers_table(audit: Audit, *, with_shares: bool) -> Table:
    """Every attention call, and how much the recomputed values differ from the model's own."""
    names, power, rows = words.Names.of(audit), words.power, []
    logits = any(layer.logit is not None for layer in audit.layers)
    for layer in audit.layers:
        over = f" over {layer.key_heads}" if layer.key_heads != layer.heads else ""
        cap = "" if layer.softcap is None else f", capped at {layer.softcap:g}"
        row: list[str | Cell] = [names.short_layer(layer), code(layer.module), f"{layer.heads}{over}"]
        row += [str(layer.head_dim), f"{layer.scale:.4g}{cap}", Cell(sees(layer)), Cell(layer.position)]
        row += [power(layer.weights), power(layer.outputs), power(layer.tolerance)]
        row += [words.size(layer.logit)] * logits + [Cell(layer.unknown or "known")] * with_shares
        rows.append(row)
    shown = ["Layer", "Module", "Heads", "Width", "Scale", "Visible keys", "Position", "Weights", "Outputs", "Rounding"]
    shown += ["Largest logit"] * logits + ["Shares"] * with_shares
    right = (2, 3, 4, 7, 8, 9, *([10] if logits else []))
    return make_table("Layers", shown, rows, right=right, css="numbers small layers")


def chosen(shown: list[dict[str, Any]]) -> str:
    """The column that colours the map initially; empty if there is none."""
    names = [column["name"] for column in shown]
    return next((name for name in (*PREFERRED, *names) if name in names), "")


def file_name(name: str) -> str:
    """A file name for downloads: the model's name with only letters, digits, dots and dashes."""
    kept = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in name)
    return kept.strip("-.")[-80:] or "audit"


def sees(layer: LayerRecord) -> str:
    """The keys that a query can attend to."""
    if layer.chunk is not None:
        return f"itself and earlier keys in its chunk of {layer.chunk}"
    if layer.window is not None and not layer.causal:
        return f"itself and {layer.window - 1} keys on either side"
    if layer.window is not None:
        return f"itself and {layer.window - 1} earlier keys"
    others = "keys that are not masked" if "mask" in layer.position else "all keys"
    return "itself and all earlier keys" if layer.causal else others
