"""What of language models could not be measured, and why: each reason once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toeplens.engine.language import AtLength, Bits, Copied, Copying, Extension, Needle, Needles
from toeplens.ground.words import listed
from toeplens.report.grid.language.cells import every, looks_of, record, times
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid

_NAMES = {
    "bits": "longer texts",
    "needles": "needles",
    "copying": "copies",
    "extension": "extension as trained",
    "extension-tuned": "extension after a tuning",
    "patterns": "kinds of heads",
    "position-loss": "loss without a head’s position",
}
_GIVEN = re.compile(r"'[^']*' was given; ")  # the encoding's own name, which is told beside the reason


@dataclass(frozen=True)
class Reason:
    """Why something is missing: what, of which encodings."""

    what: str
    whose: str
    why: str


def reasons(state: Grid) -> list[Reason]:
    """All reasons that the measured language models give, each with what it is told of."""
    made = []
    for task, cells in every(state):
        found: dict[str, tuple[dict[str, list[float]], list[str]]] = {}
        for one in looks_of(state, cells):
            for cell in cells[one.key]:
                for name, factor, why in _told(cell):
                    places, names = found.setdefault(_GIVEN.sub("", why), ({}, []))
                    at = places.setdefault(name, [])
                    at += [factor] if factor is not None and factor not in at else []
                    names += [one.title] if one.title not in names else []
        for why, (places, names) in found.items():
            whose = "all encodings" if len(names) == len(cells) > 1 else listed(names)
            made.append(Reason(listed(_placed(*place) for place in places.items()), _of(task, whose), why))
    return made


def _of(task: str, whose: str) -> str:
    return f"{task}, {whose}" if task else whose


def _placed(name: str, factors: Sequence[float]) -> str:
    if not factors:
        return name
    return f"{name} at {listed(times(factor) for factor in sorted(factors))} × the length"


def _told(cell: CellResult) -> Iterator[tuple[str, float | None, str]]:
    """What is missing, at which length (None: at all), and why."""
    for name, content in cell.measures.items():
        if set(content) == {"why"}:
            yield _NAMES.get(name, f"the measure {name}"), None, content["why"]
    for name, found in (("bits", _lengths(cell)), ("needles", _planted(cell)), ("copying", _copied(cell))):
        for row in found:
            if row.why:
                yield _NAMES[name], row.factor, row.why
    for name in ("extension", "extension-tuned"):
        made = record(cell, name, Extension)
        for row in made.rows if made else ():
            if row.why:
                yield f"{_NAMES[name]}, {row.method}", row.factor, row.why


def _lengths(cell: CellResult) -> Sequence[AtLength]:
    found = record(cell, "bits", Bits)
    return found.lengths if found else ()


def _planted(cell: CellResult) -> Sequence[Needle]:
    found = record(cell, "needles", Needles)
    return found.rows if found else ()


def _copied(cell: CellResult) -> Sequence[Copied]:
    found = record(cell, "copying", Copying)
    return found.rows if found else ()
