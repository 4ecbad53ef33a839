"""Ways to a longer context after training, compared on the same texts: a table an encoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from toeplens.engine.language import Extended, Extension
from toeplens.ground.words import fixed, listed, signed
from toeplens.report.grid.language.cells import every, looks_of, record, times, viewed
from toeplens.report.grid.look import Spread
from toeplens.report.kit.plane import Look
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid

_METHODS = {  # in words, with where it is from
    "none": "As it was trained",
    "interpolation": "Position interpolation",
    "ntk": "NTK-aware",
    "dynamic": "Dynamic NTK",
    "yarn": "YaRN",
    "longrope": "LongRoPE",
    "p-rope": "p-RoPE, lowest quarter stopped",
    "rerope": "ReRoPE",
    "self-extend": "Self-Extend",
    "dropped": "Position dropped",
    "scaled": "All logits by a factor",
}
_KINDS = ("extension", "extension-tuned")


@dataclass(frozen=True)
class Entry:
    """A method at a length, means over seeds.

    bits  bits a byte; a dash where there are none
    gain  against the model as it was trained; empty for that itself
    sure  whether the gain's interval over documents leaves 0, in every seed
    note  in how many seeds it does, where in some only
    side  ``more`` where it helps for sure, ``less`` where it harms; else empty
    """

    bits: str = "–"
    gain: str = ""
    sure: bool = False
    note: str = ""
    side: str = ""


@dataclass(frozen=True)
class Half:
    """One side of a table: all methods as they are, or after a tuning."""

    title: str
    factors: list[str]


@dataclass(frozen=True)
class ExtensionTable:
    """An encoding's methods.

    halves    as trained, and after a tuning where there was one
    rows      of each method, its title and entries, side by side
    settings  what methods were set to, in sentences
    texts     how many the numbers are of
    """

    look: Look
    title: str
    target: str
    halves: list[Half]
    rows: list[tuple[str, list[Entry]]]
    settings: list[str]
    texts: int

    @property
    def edges(self) -> list[int]:
        """The entries with which a side begins."""
        return [sum(len(half.factors) for half in self.halves[:at]) for at in range(len(self.halves))]


def extensions(state: Grid) -> list[ExtensionTable]:
    """A table for each encoding for which there are such ways; the others say why not among the reasons."""
    found = []
    for task, cells in every(state):
        for one in looks_of(state, cells):
            halves = [[r for cell in cells[one.key] if (r := record(cell, name, Extension))] for name in _KINDS]
            if any(halves):
                found.append(_table(one, viewed(task, one.title), cells[one.key], [half for half in halves if half]))
    return found


def _table(one: Look, title: str, cells: Sequence[CellResult], halves: Sequence[Sequence[Extension]]) -> ExtensionTable:
    rows = [row for half in halves for each in half for row in each.rows]
    methods = list(dict.fromkeys(row.method for row in rows))
    heads, places = [], []
    for half in halves:
        factors = sorted({row.factor for each in half for row in each.rows})
        steps = max(each.steps for each in half)
        heads.append(
            Half(f"After {steps} steps of tuning" if steps else "Without training", [times(at) for at in factors])
        )
        places += [(half, factor) for factor in factors]
    table = [
        (
            _METHODS.get(method, method),
            [
                _entry([row for each in half for row in each.rows if (row.method, row.factor) == (method, at)])
                for half, at in places
            ],
        )
        for method in methods
    ]
    first = halves[0][0]
    return ExtensionTable(one, title, f"{first.target}", heads, table, _settings(cells), max(row.texts for row in rows))


def _entry(rows: Sequence[Extended]) -> Entry:
    bits = Spread.of(row.bits.value if row.bits else None for row in rows)
    if not bits.count:
        return Entry()
    if all(row.method == "none" and not row.tuned for row in rows):
        return Entry(fixed(bits.mean, 3))
    gains = [row.gain for row in rows if row.gain]
    gain = Spread.of(one.value for one in gains)
    helps = sum(one.high is not None and one.high < 0 for one in gains)
    harms = sum(one.low is not None and one.low > 0 for one in gains)
    sure = bool(gains) and len(gains) in (helps, harms)
    told = f"{helps + harms} of {len(gains)} seeds" if (helps or harms) and not sure else ""
    side = ("more" if helps else "less") if sure else ""
    return Entry(fixed(bits.mean, 3), signed(gain.mean, 3), sure, told, side)


# ---- what methods were set to ----------------------------------------------------------------------------------------


def _settings(cells: Sequence[CellResult]) -> list[str]:
    """What was searched for each model, in words, seeds with the same outcome together."""
    found: dict[str, list[int]] = {}
    for cell in cells:
        record_ = record(cell, "extension", Extension)
        for row in record_.rows if record_ else ():
            if row.set:
                seeds = found.setdefault(_said(row.method, row.set), [])
                seeds += [cell.key.seed] if cell.key.seed not in seeds else []
    several = len({seed for seeds in found.values() for seed in seeds}) > 1
    return [
        f"{_whose(seeds)}: {words}" if several else f"{words[:1].upper()}{words[1:]}" for words, seeds in found.items()
    ]


def _whose(seeds: Iterable[int]) -> str:
    names = [str(seed) for seed in sorted(seeds)]
    return f"Seed{'s' if len(names) > 1 else ''} {listed(names)}"


def _said(method: str, told: str) -> str:
    """A method's setting as a sentence; LongRoPE's factors from the fastest pair to the slowest."""
    title = _METHODS.get(method, method)
    kind, _, rest = told.partition(" ")
    try:
        factors = [float(part) for part in rest.split(",")]
    except ValueError:
        return f"{title}: {told}."
    if method == "longrope" and kind == "factors":
        each = ", ".join(fixed(factor) for factor in factors)
        ends = f"its fastest pair {_slowed(factors[0])}, its slowest {_slowed(factors[-1])}"
        return f"{title}’s search leaves {ends}; factors from the fastest to the slowest: {each}."
    if method == "scaled" and kind == "factor":
        (factor,) = factors
        same = "leaves all logits as they are" if factor == 1 else f"multiplies all logits by {factor:g}"
        return f"the search {same}."
    return f"{title}: {told}."


def _slowed(factor: float) -> str:
    return "as it was" if abs(factor - 1) < 0.005 else f"{fixed(factor, 1)} times slower"
