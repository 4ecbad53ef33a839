"""Rendering of a page as one self-contained HTML file.

The plotly script and the figures are base64-encoded gzip. The browser unpacks them first, synchronously, so a loaded
page is complete (docs/decisions/04-studies-and-pages.md).
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from toeplens.ground import InputError, write_text
from toeplens.ground.files import read_yaml
from toeplens.ground.words import duration, fixed, percent, points, signed
from toeplens.report.kit.blocks import Block
from toeplens.report.kit.colours import HEAT
from toeplens.report.kit.tables import Cell, Table, code, make_table
from toeplens.studies.kit.verdicts import verdict_text
from toeplens.version import __version__

if TYPE_CHECKING:
    from toeplens.studies import Entry

PAGE = "report.html"  # the name of a study's page in its directory
FORMAT = 1  # page format; increased if pages are read or built differently
MADE_BY = f"format {FORMAT}, toeplens {__version__}"  # in the head of every page
_VENDORED = "report/kit/vendored"
PLOTLY, PAKO = f"{_VENDORED}/plotly-cartesian.min.js.gz", f"{_VENDORED}/pako_inflate.min.js"  # tools/page_programs.py


@dataclass(frozen=True)
class Page:
    """A page before it is rendered: its figures and tables, which `toeplens figures` and `tables` also write.

    template  see `render_page`
    blocks    its figures by id
    tables    by their names in the template, in page order
    facts     other variables of the template
    drawn     figures that the page's own script draws
    """

    template: str
    blocks: Mapping[str, Block]
    tables: Mapping[str, Table]
    facts: Mapping[str, Any]
    drawn: Sequence[Block] = field(default=())

    def html(self) -> str:
        """The page as one HTML document."""
        return render_page(self.template, self.blocks, tables=self.tables, **self.facts)


def render_page(template: str, blocks: Mapping[str, Block] | None, *, plotly_file: str = "", **facts: Any) -> str:
    """Render a page as one HTML document. Deterministic.

    Arguments
        template     its path below ``toeplens/``; extends ``report/kit/base.html.j2``
        blocks       its figures by id; None for a page without plots
        plotly_file  path of a separate plotly script (default: embedded in the page)
        facts        variables of the template
    """
    facts |= {"figures": None, "plotly_file": plotly_file}
    if blocks is not None:
        figures = {place: panel.figure for block in blocks.values() for place, panel in block.places}
        facts |= {"blocks": blocks, "figures": pack(plots_json(figures)), "unpacker": PAKO}
        facts["plotly"] = "" if plotly_file else packed_plotly()
    return environment().get_template(template).render(facts)


def write_report(directory: Path, page: Page | str) -> Path:
    """Write a study's page atomically to ``report.html`` in its directory; returns the path."""
    path = Path(directory) / PAGE
    write_text(path, page if isinstance(page, str) else page.html())
    return path


def ledger(entries: Iterable[Entry]) -> list[list[Entry]]:
    """The entries of each claim, one per protocol, in the study's order."""
    by_claim: dict[str, list[Entry]] = {}
    for entry in entries:
        by_claim.setdefault(entry.claim.id, []).append(entry)
    return list(by_claim.values())


def ledger_table(
    claims: Iterable[Sequence[Entry]],
    what: str = "Claim",
    protocols: Iterable[str] = (),
    recorded: Mapping[Any, Sequence[tuple[str, str, str]]] | None = None,
) -> Table:
    """A ledger's claims with a verdict under each protocol, as the ``ledger`` macro shows them."""

    def verdict(entry: Entry) -> Cell:
        beside = (recorded or {}).get((entry.claim.id, entry.protocol), ())[:1]
        shown = tuple(f"{name}, {seeds}: {verdict_text(found)}" for name, seeds, found in beside)
        return Cell(verdict_text(entry.verdict), shown)

    rows = [[each[0].claim.statement, each[0].claim.source, *map(verdict, each)] for each in claims]
    return make_table(f"{what}s ledger", [what, "Source", *(list(protocols) or ["Verdict"])], rows)


_SURROUNDINGS: dict[str, str] = read_yaml(Path(__file__).with_name("page.yaml"))["surroundings"]


def machine_rows(recorded: Mapping[str, Any], without: Iterable[str] = ()) -> list[list[str | Cell]]:
    """The machine and software of a study, one row per fact."""
    return [
        [text, str(recorded.get(key) or ("none" if key == "gpu" else "not recorded"))]
        for key, text in _SURROUNDINGS.items()
        if key not in without
    ]


def surroundings(state: Any, what: str, more: Sequence[tuple[str, str]] = ()) -> Table:
    """A study's command, progress (in units of ``what``), machine and software."""
    command, seconds = (state.environment.get(key) for key in ("command", "seconds"))
    place = Markup("<code>{}</code> (the same numbers as JSON: <code>results.json</code>, <code>claims.json</code>)")
    there = f"{state.directory} (the same numbers as JSON: results.json, claims.json)"
    took = f"{duration(seconds)} in total" if seconds else "not recorded"
    if state.trained_seconds:
        took += f"; sum of the models' training times: {duration(state.trained_seconds)}"
    share = f"{floor(1000 * state.share) / 10}% of the training steps"
    rows: list[list[str | Cell]] = [
        ["Command", code(command or "not recorded")],
        ["Directory", Cell(there, html=place.format(state.directory))],
        *([name, text] for name, text in more),
        ["Finished", f"{state.finished} of {state.total} {what}, {share}"],
        ["Time", took],
        *machine_rows(state.environment),
    ]
    return make_table("How it was run", [], rows, css="facts")


@cache
def environment() -> Environment:
    """The Jinja environment: templates by path below ``toeplens/``, with shared globals and filters."""
    loader = PackageLoader("toeplens", "")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.globals |= {"heat": HEAT, "asset": asset, "policy": policy, "made_by": MADE_BY}
    made.filters |= {filter.__name__: filter for filter in (duration, fixed, percent, points, signed, verdict_text)}
    return made


def asset(file: str) -> Markup:
    """The content of a style sheet or script, by path below ``toeplens/``."""
    return Markup(inline((files("toeplens") / file).read_text(encoding="utf-8")))


def policy(programs: Iterable[str], *, draws: bool) -> Markup:
    """The page's Content-Security-Policy: only these scripts, by hash, and no requests.

    draws  whether the unpacked plotly script is allowed too
    """
    allowed = [_hash(asset(program)) for program in programs] + ([_hash(plotly())] if draws else [])
    return Markup(
        f"default-src 'none'; script-src {' '.join(allowed)}; style-src 'unsafe-inline'; img-src data: blob:"
        "; base-uri 'none'; form-action 'none'"
    )


@cache
def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(script.encode()).digest()).decode()}'"


def inline(script: str) -> str:
    """A script escaped for embedding in a script element."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def pack(text: str) -> str:
    """``text`` compressed, as base64. Deterministic."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


@cache
def packed_plotly() -> str:
    """The plotly script, packed."""
    return base64.b64encode((files("toeplens") / PLOTLY).read_bytes()).decode()


def plotly() -> str:
    """The plotly script, as a separate file for several pages."""
    return gzip.decompress((files("toeplens") / PLOTLY).read_bytes()).decode()


def plots_json(figures: dict[str, go.Figure]) -> str:
    """Plots by element id, as JSON. Raises `InputError` for numbers that are not finite."""
    plots = {place: figure.to_plotly_json() for place, figure in figures.items()}
    try:
        return json.dumps(plots, separators=(",", ":"), allow_nan=False, default=list)
    except ValueError:  # sums of what a damaged record holds
        raise InputError("report: the record is damaged: a figure has values that are not finite.") from None
