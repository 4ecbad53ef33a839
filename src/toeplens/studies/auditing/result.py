"""The result of an audit: its view in notebooks, and its directory with JSON, Parquet and CSV files."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import floor, log2, log10
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup
from pyarrow import csv, parquet

from toeplens.ground import InputError, read_json, write_bytes, write_json
from toeplens.ground.files import make_directory
from toeplens.ground.words import or_none
from toeplens.studies.auditing.record import COLUMNS, PARTS, SOURCES, AuditRecord, Number
from toeplens.studies.auditing.words import Names, Place, audited, model, place_title, power, proved, told, worst
from toeplens.studies.kit.changes import VERSIONS

NUMBERS = tuple(name for name in COLUMNS if name not in ("side", "kind", "layer", "head"))
EFFECTS = ("effect", "effect_low", "effect_high")
_DIGITS = {"distance": 1, "half_distance": 1, "centre": 2, "dead": 0}
_SHARE = 3  # decimals of shares
Values = dict[str, list[Number]]


@dataclass(frozen=True)
class Scale:
    """The colour scale of a column, between the values at its two ends."""

    low: float
    high: float
    signed: bool  # from -high to high, with 0 in the middle
    logarithmic: bool = False  # colours follow log2(1 + value)

    @classmethod
    def of(cls, values: Iterable[Number], signed: bool = False, logarithmic: bool = False, least: float = 0) -> Scale:
        """From 0 to the largest value; from the smallest value if it is over half the largest, or if all are negative.

        ``least``: minimum width of the scale, so that rounding differences do not fill it
        """
        known = [value for value in values if value is not None]
        low, high = min(known, default=0.0), max(known, default=0.0)
        if signed or low < 0 < high:
            end = max(abs(low), abs(high), least)
            return cls(-end, end, True)
        if low == high or 0 <= low <= high / 2:
            low, high = min(0.0, low), max(0.0, high)
        if high - low < least:
            high = low + least
        return cls(low, high, False, logarithmic)

    def tone(self, value: Number) -> Number:
        """From 0 (background colour) to 1 (warm end) or -1 (cool end); None if unknown."""
        if value is None:
            return None
        low, high, at = (log2(1 + x) if self.logarithmic else x for x in (self.low, self.high, value))
        low = 0.0 if self.signed else low
        return round((at - low) / (high - low), 3) if high > low else 0.0

    def ends(self, digits: int) -> dict[str, Any]:
        """The labels of the legend."""
        return {"low": told(self.low, digits), "high": told(self.high, digits), "half": not self.signed}


def title(column: str) -> str:
    """A column's name with spaces."""
    return column.replace("_", " ")


def values_of(audit: AuditRecord) -> Values:
    """The columns with at least one known value."""
    table = audit.table()
    found = {name: [None if v is None else or_none(v) for v in table[name]] for name in NUMBERS}
    return {name: column for name, column in found.items() if any(value is not None for value in column)}


def digits_of(column: str, *audits: Values) -> int:
    """Decimals of a column; for effects, enough to show three significant digits of the largest."""
    if column not in EFFECTS:
        return _DIGITS.get(column, _SHARE)
    size = max((abs(v) for values in audits for v in values.get("effect", []) if v is not None), default=0.0)
    return min(12, max(0, 2 - floor(log10(size)))) if size else _SHARE


def least_of(column: str) -> float:
    """The smallest difference that a column's decimals show; 0 for effects."""
    return 0.0 if column in EFFECTS else 10.0 ** -digits_of(column)


def scales_of(*audits: Values) -> dict[str, Scale]:
    """One scale per column, shared by all audits; effects have 0 in the middle."""
    found = {name: [value for values in audits for value in values.get(name, [])] for name in NUMBERS}
    return {
        name: Scale.of(values, signed=name in EFFECTS, logarithmic=name.endswith("distance"), least=least_of(name))
        for name, values in found.items()
        if values
    }


def sheet(
    name: str, audit: AuditRecord, values: Values, scales: dict[str, Scale], digits: dict[str, int]
) -> dict[str, Any]:
    """The content of a map and its table: the place of each head, its values, and the tone of each value.

    Titles count from 1; the layer and head indices next to them count from 0, as in the downloaded tables.
    """
    names, places = Names.of(audit), []
    for side, kind in names.places:
        own = [one for one in audit.layers if (one.side, one.kind) == (side, kind)]
        shape = {"layers": [one.layer for one in own], "heads": max(one.heads for one in own)}
        places.append({"side": side, "kind": kind, "title": place_title((side, kind)), **shape})
    return {
        "name": name,
        "places": places,
        "titles": [names.short(head) for head in audit.heads],
        "place": [names.places.index((head.side, head.kind)) for head in audit.heads],
        "layer": [head.layer for head in audit.heads],
        "head": [head.head for head in audit.heads],
        "values": values,
        "tones": {column: [scales[column].tone(value) for value in numbers] for column, numbers in values.items()},
        "ends": {column: scales[column].ends(digits[column]) for column in values},
    }


def columns(*audits: Values) -> list[dict[str, Any]]:
    """The columns with at least one known value, in order."""
    known = [name for name in NUMBERS if any(name in values for values in audits)]
    about = {name: {"about": COLUMNS[name], "source": SOURCES.get(name, "")} for name in known}
    return [{"name": name, "title": title(name), **about[name], "digits": digits_of(name, *audits)} for name in known]


def changes(first: Values, second: Values) -> Values:
    """Second minus first, in the columns that both have; None if either is unknown."""
    both = {name: zip(first[name], second[name], strict=True) for name in NUMBERS if name in first and name in second}
    return {
        name: [None if a is None or b is None else or_none(b - a) for a, b in pairs] for name, pairs in both.items()
    }


def content(shown: list[dict[str, Any]], sheets: Sequence[dict[str, Any]]) -> Markup:
    """The content as JSON that is safe inside a script element."""
    dumps = partial(json.dumps, separators=(",", ":"), allow_nan=False)
    return htmlsafe_json_dumps({"order": list(COLUMNS), "columns": shown, "sheets": list(sheets)}, dumps=dumps)


RECORD = "audit.json"  # file name of the record
PARQUET, CSV = "heads.parquet", "heads.csv"


@dataclass(frozen=True)
class Audit(AuditRecord):
    """The result of `audit`; notebooks show it as maps of heads."""

    def _repr_html_(self) -> str:
        return notebook_html(self)


def finished(effects: AuditRecord, about: dict[str, Any], *, seed: int, started: float, **more: Any) -> Audit:
    """The finished audit, with seed, versions and seconds added to its ``about``.

    ``started`` is the start time, from `time.monotonic`.
    """
    seconds = round(time.monotonic() - started, 1)
    more["about"] = {**about, "seed": seed, **effects.about, **VERSIONS, "seconds": seconds}
    return Audit(**vars(replace(effects, **more)))


def save(audit: Audit, directory: Path) -> Path:
    """Write the record and its tables atomically, replacing an earlier audit. Returns the directory.

    The saved progress of an unfinished audit is removed.
    """
    make_directory(directory)
    write_bytes(directory / PARQUET, parquet_of(audit))
    stream = io.BytesIO()
    csv.write_csv(audit.frame(), stream)  # empty if unknown
    write_bytes(directory / CSV, stream.getvalue())
    write_json(directory / RECORD, audit.to_dict())
    shutil.rmtree(directory / PARTS, ignore_errors=True)
    return directory


def open_audit(directory: Path | str) -> Audit:
    """The audit in a directory. Raises `InputError` if there is none or if it is damaged."""
    path = Path(directory) / RECORD
    if not path.is_file():
        raise InputError(f"audit must be the directory of an audit, but {directory} contains no {RECORD}.")
    return Audit.from_dict(read_json(path), path)


def parquet_of(audit: Audit) -> bytes:
    """The table of heads (`COLUMNS`) as a Parquet file; null if unknown."""
    stream = io.BytesIO()
    parquet.write_table(audit.frame(), stream)
    return stream.getvalue()


# ---- in a notebook: a few lines and small maps, without scripts ------------------------------------------------------

_MAPS = {"positional": "#2f6fe0", "symbolic": "#de7a00", "effect": "#d2453d"}
_LESS = "#2f6fe0"  # effects below zero
_COLUMNS = ("effect", "positional", "symbolic", "distance", "previous", "first", "induction")
_MOST = 5
_WIDE = 190  # width of a map in pixels
_CELL = (3, 12)  # smallest and largest size of a cell in pixels


def notebook_html(audit: AuditRecord) -> str:
    """The audit as HTML with inline styles: title, proof, small maps, and the most important heads."""
    names, values = Names.of(audit), values_of(audit)
    scales, by = scales_of(values), "effect" if any(head.effect is not None for head in audit.heads) else "positional"
    known = sorted((head for head in audit.heads if getattr(head, by) is not None), key=lambda head: -getattr(head, by))
    digits = {name: digits_of(name, values) for name in _COLUMNS if name in values}
    return _notebook().render(
        audit=audit,
        model=model(audit),
        audited=audited(audit),
        proved=proved(audit),
        worst=power(worst(audit)),
        whole=power(audit.whole),
        told=told,
        maps=[_map(audit, place, name, scales[name]) for place in names.places for name in _MAPS if name in scales],
        words="Most important heads" if by == "effect" else "Most positional heads",
        columns=["head", *map(title, digits)],
        rows=[
            [names.short(head), *(told(getattr(head, name), count) for name, count in digits.items())]
            for head in known[:_MOST]
        ],
    )


@cache
def _notebook() -> Template:
    text = Path(__file__).with_name("notebook.html.j2").read_text(encoding="utf-8")
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)


def _map(audit: AuditRecord, place: Place, name: str, scale: Scale) -> dict[str, Any]:
    """Layers as rows, heads as columns; unknown values are outlines."""
    names, digits = Names.of(audit), digits_of(name, values_of(audit))
    layers = [one.layer for one in audit.layers if (one.side, one.kind) == place]
    heads = [one for one in audit.heads if (one.side, one.kind) == place]
    across = max((one.head for one in heads), default=0) + 1
    size = min(_CELL[1], max(_CELL[0], _WIDE // across))
    where = f", {place_title(place).lower()}" if len(names.places) > 1 else ""
    cells = []
    for head in heads:
        tone, text = scale.tone(getattr(head, name)), f"{names.short(head)}: {told(getattr(head, name), digits)}"
        colour = None if tone is None else _LESS if tone < 0 else _MAPS[name]
        opacity = round(0.05 + 0.95 * abs(tone or 0.0), 2)
        cells.append((head.head * size, layers.index(head.layer) * size, colour, opacity, text))
    return {
        "title": f"{title(name)}{where}",
        "ends": f"({told(scale.low, digits)} to {told(scale.high, digits)})",
        "about": f"{title(name)}{where}: {len(layers)} layers (rows), {across} heads (columns)",
        "width": across * size,
        "height": len(layers) * size,
        "side": size - (1 if size > _CELL[0] else 0),
        "cells": cells,
    }
