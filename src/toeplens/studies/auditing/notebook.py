"""An audit in a notebook: a few lines and small maps, without scripts, on any ground."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from toeplens.studies.auditing.record import AuditRecord, HeadRecord
from toeplens.studies.auditing.sheets import Scale, Values, digits_of, scales_of, title, values_of
from toeplens.studies.auditing.words import Names, Place, audited, model, place_title, power, proved, told, worst

_MAPS = {"positional": "#2f6fe0", "symbolic": "#de7a00", "effect": "#d2453d"}
_LESS = "#2f6fe0"  # of effects below zero
_COLUMNS = ("effect", "positional", "symbolic", "distance", "previous", "first", "induction")
_MOST = 5
_WIDE = 190  # pixels of a map, if its cells are not too large
_CELL = (3, 12)  # pixels of a cell, at least and at most
_TABLE = "border-collapse:collapse;color:inherit;font:inherit;font-variant-numeric:tabular-nums"
_CELLS = "text-align:right;padding:1px 8px"


def notebook_html(audit: AuditRecord) -> str:
    """The audit as a piece of HTML with styles of its own: title, proof, small maps, the heads that matter most."""
    names, values = Names.of(audit), values_of(audit)
    scales = scales_of(values)
    shown = {name: tint for name, tint in _MAPS.items() if name in scales}
    parts = [
        Markup("<div><b>{}</b> · {} heads in {} attention calls · {}</div>").format(
            model(audit), len(audit.heads), len(audit.layers), audited(audit)
        ),
        Markup('<div style="opacity:.75">{}</div>').format(_proof(audit)),
        Markup('<div style="display:flex;flex-wrap:wrap;gap:10px 22px;margin:6px 0">'),
        *(
            _map(audit, place, name, tint, scales[name], digits_of(name, values))
            for place in names.places
            for name, tint in shown.items()
        ),
        Markup("</div>"),
        _most(audit, names, values),
    ]
    return f'<div style="font:13px/1.45 system-ui,sans-serif;overflow-x:auto">{"".join(parts)}</div>'


def _proof(audit: AuditRecord) -> str:
    verdict = "proved" if proved(audit) else "NOT proved"
    loss = "" if audit.baseline is None else f"; loss {told(audit.baseline)} nats a token"
    return (
        f"{verdict}: weights and outputs differ from the model’s own by at most {power(worst(audit))}, the captured "
        f"pass from a plain one by {power(audit.whole)}{loss}"
    )


def _map(audit: AuditRecord, place: Place, name: str, tint: str, scale: Scale, digits: int) -> Markup:
    """Layers down, heads across, as an inline picture; what is not known is an outline."""
    names = Names.of(audit)
    layers = [one.layer for one in audit.layers if (one.side, one.kind) == place]
    heads = [one for one in audit.heads if (one.side, one.kind) == place]
    across = max((one.head for one in heads), default=0) + 1
    size = min(_CELL[1], max(_CELL[0], _WIDE // across))
    row = {layer: at for at, layer in enumerate(layers)}
    where = f", {place_title(place).lower()}" if len(names.places) > 1 else ""
    cells = Markup("").join(
        _cell(head, head.head * size, row[head.layer] * size, size, name, tint, scale, digits, names) for head in heads
    )
    width, height = across * size, len(layers) * size
    return Markup(
        '<div><div style="opacity:.75">{}{} ({} to {})</div>'
        '<svg width="{}" height="{}" role="img" aria-label="{}">{}</svg></div>'
    ).format(
        title(name),
        where,
        told(scale.low, digits),
        told(scale.high, digits),
        width,
        height,
        f"{title(name)}{where}: {len(layers)} layers down, {across} heads across",
        cells,
    )


def _cell(
    head: HeadRecord, x: int, y: int, size: int, name: str, tint: str, scale: Scale, digits: int, names: Names
) -> Markup:
    value = getattr(head, name)
    tone = scale.tone(value)
    paint = (
        Markup('fill="none" stroke="#888" stroke-width=".4"')
        if tone is None
        else Markup('fill="{}" fill-opacity="{}"').format(
            _LESS if tone < 0 else tint, round(0.05 + 0.95 * abs(tone), 2)
        )
    )
    side = size - (1 if size > _CELL[0] else 0)
    return Markup('<rect x="{}" y="{}" width="{}" height="{}" {}><title>{}: {}</title></rect>').format(
        x, y, side, side, paint, names.short(head), told(value, digits)
    )


def _most(audit: AuditRecord, names: Names, values: Values) -> Markup:
    """The heads with the largest effects; without effects, the most positional ones."""
    by = "effect" if any(head.effect is not None for head in audit.heads) else "positional"
    known = [head for head in audit.heads if getattr(head, by) is not None]
    if not known:
        return Markup("")
    top = sorted(known, key=lambda head: -getattr(head, by))[:_MOST]
    digits = {name: digits_of(name, values) for name in _COLUMNS if name in values}
    head = Markup("").join(Markup('<th style="{}">{}</th>').format(_CELLS, title(name)) for name in ("head", *digits))
    rows = Markup("").join(
        Markup("<tr>{}</tr>").format(Markup("").join(_line(names.short(one), one, digits))) for one in top
    )
    words = "The heads that matter most" if by == "effect" else "The most positional heads"
    return Markup('<div>{}</div><table style="{}"><tr>{}</tr>{}</table>').format(words, _TABLE, head, rows)


def _line(name: str, head: HeadRecord, digits: dict[str, int]) -> Iterator[Markup]:
    for text in (name, *(told(getattr(head, column), decimals) for column, decimals in digits.items())):
        yield Markup('<td style="{}">{}</td>').format(_CELLS, text)
