"""Pages as data: a question, its answer, one picture, then sections. `Page.html` makes one self-contained HTML file.

Charts are Vega-Lite. Vega comes with vl-convert and is part of the page: no network is needed.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import sha256
from importlib.resources import files
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from toeplens.report.charts import describe, with_light_theme
from toeplens.report.tables import Table, TableCell, code, make_table
from toeplens.report.theme import vega_config
from toeplens.studies.kit.results import CellKey
from toeplens.studies.kit.verdicts import verdict_text
from toeplens.utils import InputError, choose, write_text
from toeplens.utils.formatting import fmt_duration, plural
from toeplens.version import __version__

if TYPE_CHECKING:
    from toeplens.studies import LedgerEntry

PAGE = "report.html"  # the name of a study's page in its directory
FORMAT = 2  # page format; increased if pages are read or built differently
SCRIPT = "vega.js"  # the drawing program of pages that share it


@dataclass(frozen=True)
class Figure:
    """A chart with its caption.

    Arguments
        id        its name in `Page.charts`, in links and in files
        title     what it shows, in a few words
        chart     an Altair chart
        caption   units, intervals, how to read it
        alt_text  text alternative (default: made from the chart's data)
    """

    id: str
    title: str
    chart: Any
    caption: str = ""
    alt_text: str = ""

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The chart as Vega-Lite, without its configuration."""
        content = self.chart.to_dict(validate=False)
        return {name: item for name, item in content.items() if name not in ("config", "$schema")}

    @property
    def alternative(self) -> str:
        """Text alternative."""
        return self.alt_text or describe(self.spec)


@dataclass(frozen=True)
class Section:
    """A section of a page: a question, a chart, an answer in a sentence or two, and what is folded below it.

    Arguments
        title    the question, or the title of what is folded
        parts    figures, tables and texts (``Markup`` is not escaped), in order
        details  folded parts, each with its title
        id       name in links (default: of the first figure)
    """

    title: str
    parts: Sequence[Figure | Table | Ledger | str]
    details: Sequence[Section] = ()
    id: str = ""

    @property
    def name(self) -> str:
        """The name in links."""
        return self.id or next((part.id for part in self.parts if isinstance(part, Figure)), "")

    def all_parts(self) -> Iterator[Figure | Table | Ledger | str]:
        """Its parts and those of its details."""
        yield from self.parts
        for section in self.details:
            yield from section.all_parts()


@dataclass(frozen=True)
class Ledger:
    """Claims with their verdicts, one line each; rules and evidence are folded.

    Arguments
        claims     the entries of each claim, one per protocol
        protocols  titles of the protocols, by name
        published  verdicts of published records by claim and protocol: name, seeds, verdict
        item_name  what a line is called
    """

    claims: Sequence[Sequence[LedgerEntry]]
    protocols: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[Any, Sequence[tuple[str, str, str]]] = field(default_factory=dict)
    item_name: str = "Claim"

    @property
    def is_sensitive(self) -> bool:
        """Whether any verdict depends on models that are still learning."""
        return any(entry.is_sensitive for entries in self.claims for entry in entries)

    @property
    def table(self) -> Table:
        """The claims with their verdicts, for export."""
        rows = [
            [entries[0].claim.statement, entries[0].claim.source, *(verdict_text(entry.verdict) for entry in entries)]
            for entries in self.claims
        ]
        names = [self.item_name, "Source", *(list(self.protocols.values()) or ["Verdict"])]
        return make_table(f"{self.item_name}s ledger", names, rows)


@dataclass(frozen=True)
class Page:
    """A page before it is rendered.

    Arguments
        command   the toeplens command that makes it
        title     title of the browser's window
        question  what it answers, as the heading
        answer    one or two sentences with numbers and their uncertainty
        picture   the chart that shows the answer, if there is one
        sections  at most six
        notes     short remarks below the picture: what is incomplete, what one seed can say
        warnings  remarks that a reader must not miss
    """

    command: str
    title: str
    question: str
    answer: str
    picture: Figure | None
    sections: Sequence[Section]
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()

    @property
    def figures(self) -> list[Figure]:
        """All figures in order, the picture first."""
        figures = [part for section in self.sections for part in section.all_parts() if isinstance(part, Figure)]
        return [*([self.picture] if self.picture else []), *figures]

    @property
    def tables(self) -> list[Table]:
        """All tables in order."""
        parts = [part for section in self.sections for part in section.all_parts()]
        tables = [part.table if isinstance(part, Ledger) else part for part in parts]
        return [part for part in tables if isinstance(part, Table)]

    def charts(self) -> Charts:
        """The Altair charts by name."""
        return Charts({fig.id: with_light_theme(fig.chart) for fig in self.figures})

    def html(self, *, script: str = "") -> str:
        """The page as one HTML document. Deterministic.

        script  path of a separate drawing program, for several pages (default: embedded in the page)
        """
        try:
            specs = json.dumps({fig.id: fig.spec for fig in self.figures}, separators=(",", ":"), allow_nan=False)
        except ValueError:  # sums of what a damaged record holds
            raise InputError("report: the record is damaged: a figure has values that are not finite.") from None
        themes = json.dumps({"light": vega_config(), "dark": vega_config(dark=True)}, separators=(",", ":"))
        facts = {"specs": pack(specs), "themes": pack(themes), "script": script, "figures": bool(self.figures)}
        return jinja_environment().get_template("report/page.html.j2").render(page=self, **facts)


class Charts(dict[str, Any]):
    """Altair charts by name; an unknown name raises `InputError` with those there are."""

    def __missing__(self, name: str) -> Any:
        return self[choose("charts", name, self)]


def write_report(directory: Path, page: Page) -> Path:
    """Write a page atomically to ``report.html`` in its directory; returns the path."""
    path = Path(directory) / PAGE
    write_text(path, page.html())
    return path


def entries_by_claim(entries: Iterable[LedgerEntry]) -> list[list[LedgerEntry]]:
    """The entries of each claim, one per protocol, in the study's order."""
    by_claim: dict[str, list[LedgerEntry]] = {}
    for entry in entries:
        by_claim.setdefault(entry.claim.id, []).append(entry)
    return list(by_claim.values())


_MACHINE_FACTS = {
    "execution": "Execution",
    "processor": "Processor",
    "cores": "Cores",
    "threads": "Threads per process",
    "gpu": "GPU",
    "platform": "System",
    "python": "Python",
    "torch": "PyTorch",
    "numpy": "NumPy",
    "toeplens": "toeplens",
}


def run_table(facts: Mapping[str, Any], rows: Iterable[list[str | TableCell]] = (), omit: Iterable[str] = ()) -> Table:
    """A study's command, other rows, and its machine and software, those to ``omit`` left out."""
    machine: list[list[str | TableCell]] = [
        [text, str(facts.get(key) or ("none" if key == "gpu" else "not recorded"))]
        for key, text in _MACHINE_FACTS.items()
        if key not in omit
    ]
    command: list[str | TableCell] = ["Command", code(facts.get("command") or "not recorded")]
    return make_table("How it was run", [], [command, *rows, *machine], css="facts")


def progress_rows(state: Any, unit: str, more: Sequence[tuple[str, str]] = ()) -> list[list[str | TableCell]]:
    """A study's directory, ``more``, its progress in ``unit``, and its time, for `run_table`."""
    seconds = state.environment.get("seconds")
    template = Markup("<code>{}</code> (the same numbers as JSON: <code>results.json</code>, <code>claims.json</code>)")
    location = f"{state.directory} (the same numbers as JSON: results.json, claims.json)"
    time_text = f"{fmt_duration(seconds)} in total" if seconds else "not recorded"
    if state.trained_seconds:
        time_text += f"; sum of the models' training times: {fmt_duration(state.trained_seconds)}"
    share = f"{floor(1000 * state.share) / 10}% of the training steps"
    return [
        ["Directory", TableCell(location, html=template.format(state.directory))],
        *([name, text] for name, text in more),
        ["Finished", f"{state.finished} of {state.total} {unit}, {share}"],
        ["Time", time_text],
    ]


def progress_warnings(state: Any, unit: str, name_of: Callable[[CellKey], str]) -> list[str]:
    """What of a study is not finished, in ``unit``, and which runs diverged."""
    warnings = []
    if not state.is_complete:
        share = f"{100 * state.share:.3g}% of the steps"
        warnings.append(f"Not complete: {state.finished} of {state.total} {unit} are finished ({share}).")
    if diverged := [cell.key for cell in state.results.cells if cell.status == "diverged"]:
        more = f"; and {len(diverged) - 8} more, see the table of models" if len(diverged) > 8 else ""
        runs = f"{plural(len(diverged), 'run')} diverged (infinite or NaN loss; no accuracy)"
        warnings.append(f"{runs}: {'; '.join(map(name_of, diverged[:8]))}{more}.")
    return warnings


@cache
def jinja_environment() -> Environment:
    """The Jinja environment: templates by path below ``toeplens/``, with shared globals and filters."""
    loader = PackageLoader("toeplens", "")
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.globals |= {"asset": asset, "policy": policy, "program": packed_vega}
    env.globals |= {"made_by": f"format {FORMAT}, {__version__}", "kind_of": lambda part: type(part).__name__}
    env.filters |= {"verdict_text": verdict_text, "paragraph": lambda text: Markup("<p>{}</p>").format(text)}
    return env


def asset(file: str) -> Markup:
    """The content of a style sheet or script, by path below ``toeplens/``, escaped for a script element."""
    return Markup(_inline((files("toeplens") / file).read_text(encoding="utf-8")))


def policy() -> Markup:
    """The page's Content-Security-Policy: only its own scripts, by hash, and no requests."""
    allowed = " ".join(_hash(script) for script in (asset("report/page.js"), vega_script()))
    return Markup(
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
        "; base-uri 'none'; form-action 'none'"
    )


@cache
def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(script.encode()).digest()).decode()}'"


def _inline(script: str) -> str:
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def pack(text: str) -> str:
    """``text`` compressed, as base64. Deterministic."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


@cache
def vega_script() -> str:
    """Vega, Vega-Lite and vega-embed as one script."""
    return vl_convert.javascript_bundle(None)  # type: ignore[arg-type]


@cache
def packed_vega() -> str:
    """`vega_script`, packed."""
    return pack(vega_script())
