"""The page of an encoding's card: kernel, attention by distance, properties, cost and conformance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from latex2mathml.converter import convert
from markupsafe import Markup

from toeplens.encodings.conformance import CHECKS
from toeplens.report.charts import alt, chart_data, color_shape, heatmap, line_chart, nominal, numeric, tooltip
from toeplens.report.page import SCRIPT, Figure, Page, Section, vega_script
from toeplens.report.tables import Table, TableCell, make_table
from toeplens.report.theme import style, styles
from toeplens.studies.card import Card, real_curves
from toeplens.utils import InputError, write_text
from toeplens.utils.files import is_leftover, make_directory, read_yaml
from toeplens.utils.outputs import check_output_file, write_page

COMMAND, INDEX = "card", "index.html"
COUPLING_TEXTS: dict[str, str] = read_yaml(Path(__file__).with_name("card.yaml"))["where"]
_WINDOW = 128  # largest distance of a kernel's chart
_ATTENTION = "At initialisation, for similar contents: mean over heads, and their range. 1 is uniform attention."
_RESOLUTION = (
    "Resolution: the smallest distance (input vectors: position) that cannot be distinguished from the next one after "
    "rounding to the dtype. Code that computes positions in the dtype itself fails at 256 (bfloat16), 2,048 (float16) "
    "or 16,777,216 (float32) at the latest. Times and memory: attention of one layer on the machine that made this "
    "page; fastest of several runs."
)


def write_cards(cards: Sequence[Card], directory: Path) -> Path:
    """Write all cards as ``NAME.html`` and their table as ``index.html``, with one shared drawing program."""
    check_cards_directory([card.name for card in cards], directory)
    path = write_page(directory / INDEX, cards_page(cards).html(script=SCRIPT), COMMAND)
    write_text(directory / SCRIPT, vega_script())
    for card in cards:
        write_page(directory / f"{card.name}.html", card_page(card, back=INDEX).html(script=SCRIPT), COMMAND)
    return path


def check_cards_directory(names: Sequence[str], directory: Path) -> None:
    """Raises `InputError` if the directory holds anything other than earlier cards."""
    make_directory(directory)
    if not (directory / INDEX).exists() and any(not is_leftover(path) for path in directory.iterdir()):
        raise InputError(f"out: {directory} contains files that are not cards. Choose an empty or new directory.")
    for page in (INDEX, *(f"{name}.html" for name in names)):
        check_output_file(directory / page, COMMAND)


def card_page(card: Card, *, back: str = "") -> Page:
    """The page of a card; ``back`` is a link to the other cards."""
    about, _, more = card.about.partition("\n\n")
    near, far = (float(card.profile[:, index].mean()) for index in (0, -1))
    attention = Figure("attention", "Attention by distance", attention_chart(card), _ATTENTION)
    kernels = _kernel_figures(card)
    sections = [Section("How does it change attention?", [attention])] if kernels else []
    details = [Section(item.title, [item]) for item in kernels[1:]]
    sections = [Section(item.title, item.parts, details) for item in sections]
    options = ", ".join(f"{name}={value}" for name, value in card.options.items()) or "none"
    return Page(
        COMMAND,
        f"{card.name}: a positional encoding",
        f"What does {card.name} do?",
        f"{' '.join(about.split())} Similar keys get {near:.2f} times their share of uniform attention at distance 0, "
        f"{far:.2f} times at the largest. A training step takes {card.cost.step:.2f} times as long as without it.",
        kernels[0] if kernels else attention,
        [
            *sections,
            Section(
                "What are its properties and its cost?",
                [properties_table(card), _RESOLUTION],
                [Section("Options", [f"{options}.", more.replace("``", "")])],
                id="properties",
            ),
            Section("Does it conform?", [conformance_table(card)], id="conformance"),
        ],
        [*([Markup('<a href="{}">All encodings</a>').format(back)] if back else []), *_kernel_notes(card)],
        [] if card.report.passed else ["It fails the conformance checks below."],
    )


def _kernel_notes(card: Card) -> list[str]:
    """Why there is no kernel or no symbol."""
    if card.kernel is None and card.measured.toeplitz:
        return ["Distances have several coordinates, so kernel and symbol are not shown."]
    if card.kernel is None:
        return ["It has no kernel that only depends on distance, so kernel and symbol are not shown."]
    if card.symbol is None:
        return ["The kernel is infinite at some distances, so it has no symbol."]
    return [] if card.symbol.any() else ["The kernel is odd or 0, so its symbol is 0 up to rounding."]


def _head_curves(rows: np.ndarray, xs: np.ndarray, x: dict[str, Any], y: dict[str, Any]) -> Any:
    """A curve per head, or one for all heads."""
    titles = [f"head {head}" for head in range(1, len(rows) + 1)] if len(rows) > 1 else ["all heads"]
    rows_by_head = [
        {"series": title, "x": float(position), "value": float(value)}
        for title, row in zip(titles, rows, strict=True)
        for position, value in zip(xs, row, strict=True)
    ]
    return line_chart(rows_by_head, x, y, styles((title, title) for title in titles).values(), points=False)


def _kernel_figures(card: Card) -> list[Figure]:
    """The kernel by distance, by frequency for a rotation, and its symbol, as far as there are any."""
    if card.kernel is None:
        return []
    near = np.abs(card.offsets) <= min(_WINDOW, card.sizes["max_len"] - 1)
    rotation = card.kernel.ndim == 3
    chart = _head_curves(
        real_curves(card.kernel)[:, near],
        card.offsets[near],
        numeric("x", "distance i − j"),
        numeric("value", "kernel"),
    )
    caption = "Real part, mean over frequencies, at initialisation." if rotation else "At initialisation."
    figures = [Figure("kernel", "Kernel by distance", chart, caption)]
    if card.symbol is not None and card.symbol.any() and card.angles is not None:
        half = card.angles > 0
        x = numeric("x", "φ (rad per token)", kind="log", format="~g", tickCount=5)
        y = numeric("value", "symbol", kind="symlog", tickCount=5)
        caption = f"Fourier series of the kernel, smoothed over {card.sizes['max_len']} positions."
        figures.append(Figure("symbol", "Symbol", _head_curves(card.symbol[:, half], card.angles[half], x, y), caption))
    return figures


def _bin_by_distance(card: Card, bins: int) -> list[tuple[float, np.ndarray]]:
    """Attention by head in bins of distance that grow geometrically: mean distance + 1, values."""
    length = card.profile.shape[1]
    starts = np.unique(np.geomspace(1, length, bins).astype(int)) - 1
    blocks = np.split(np.arange(length), starts[1:])
    return [(float(block.mean() + 1), card.profile[:, block].mean(1)) for block in blocks]


def attention_chart(card: Card) -> Any:
    """Attention by distance, relative to uniform attention."""
    rows = [
        {"series": "attention", "x": x, "value": values.mean(), "low": values.min(), "high": values.max()}
        for x, values in _bin_by_distance(card, 60)
    ]
    x, y = numeric("x", "distance + 1", kind="log", domain=[1, rows[-1]["x"]]), numeric("value", "attention / uniform")
    return line_chart(rows, x, y, [style("attention")], low="low", high="high", points=False, levels={"uniform": 1})


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"


def _resolutions(card: Card) -> dict[str, str]:
    limits = card.resolution or {}
    return {dtype: "no limit" if distance is None else f"{distance:,}" for dtype, distance in limits.items()}


def properties_table(card: Card) -> Table:
    """Formula, source and measured properties; a property that is not as declared says so."""
    where = "; ".join(f"{item}: {COUPLING_TEXTS[item]}" for item in sorted(card.measured.couplings))
    facts = [
        ("Position enters as", card.declared.couplings, card.measured.couplings, where),
        ("Depends on content", card.declared.data_dependent, card.measured.data_dependent, ""),
        ("Depends only on distance (Toeplitz)", card.declared.toeplitz, card.measured.toeplitz, ""),
    ]
    rows: list[list[str | TableCell]] = []
    if card.formula:
        rows.append(["Formula", TableCell(card.formula, html=Markup(convert(card.formula)))])
    rows.append(["Source", card.citation])
    for title, declared, measured, note in facts:
        texts = [_yes_no(item) if isinstance(item, bool) else ", ".join(sorted(item)) for item in (measured, declared)]
        mismatch = () if declared == measured else (f"declared: {texts[1]}",)
        rows.append([title, TableCell(texts[0], (note, *mismatch))])
    limits = "; ".join(f"{dtype}: {text}" for dtype, text in _resolutions(card).items())
    rows.append(["Resolution", limits or "not available: the encoding has no fixed table of values"])
    cost, shared = card.cost, "shared by all layers" if card.cost.shared else "per layer"
    rows.append(["Time", f"forward {cost.forward:.2f}, training step {cost.step:.2f} (no encoding: 1)"])
    rows.append(["Peak memory", f"training step {cost.peak:.2f} (no encoding: 1)"])
    rows.append(["Learned parameters", f"{cost.parameters:,} {shared}" if cost.parameters else "none"])
    return make_table("Properties", [], rows, css="facts")


def conformance_table(card: Card) -> Table:
    """Each check of the conformance suite, with its result."""
    rows = [
        [row.check, (CHECKS[row.check].__doc__ or "").replace("`", ""), "ok" if row.passed else "fails", row.detail]
        for row in card.report.results
    ]
    return make_table("Conformance", ["Check", "What is checked", "Result", "Measured"], rows, css="")


def cards_page(cards: Sequence[Card]) -> Page:
    """The page of all cards: cost, attention by distance, and a table with a link to each."""
    toeplitz = sum(card.measured.toeplitz for card in cards)
    content = sum(card.measured.data_dependent for card in cards)
    slowest = max(cards, key=lambda card: card.cost.step)
    return Page(
        COMMAND,
        "Positional encodings: all cards",
        f"What do {len(cards)} positional encodings do, and what do they cost?",
        f"{toeplitz} depend only on distance (Toeplitz), {content} depend on content. The slowest is {slowest.name}: a "
        f"training step takes {slowest.cost.step:.2f} times as long as without encoding.",
        Figure("cost", "Cost", cost_chart(cards), "Time and memory of a training step, relative to no encoding."),
        [
            Section("Which encodings are there?", [cards_table(cards)], id="encodings"),
            Section(
                "How do they change attention?", [Figure("profiles", "Attention by distance", profiles_chart(cards))]
            ),
        ],
    )


def cost_chart(cards: Sequence[Card]) -> Any:
    """Time against memory of a training step, a mark per encoding."""
    rows = [
        {
            "series": ", ".join(sorted(card.measured.couplings)),
            "name": card.name,
            "step": card.cost.step,
            "peak": card.cost.peak,
        }
        for card in cards
    ]
    kinds = sorted({row["series"] for row in rows})
    x, y = (
        numeric(name, title, zero=False)
        for name, title in (("step", "time of a training step"), ("peak", "peak memory"))
    )
    marks = alt.Chart(chart_data(rows)).mark_point(size=70).encode(x=alt.X(**x), y=alt.Y(**y))
    tips = tooltip(name="Encoding", series="Position enters as", step="Time|.2f", peak="Memory|.2f")
    kind_styles = styles((kind, kind) for kind in kinds).values()
    marks = marks.encode(tooltip=tips, **color_shape("series", kind_styles, title="position enters as"))
    return marks.properties(height=320)


def profiles_chart(cards: Sequence[Card]) -> Any:
    """Attention by distance of all encodings; more than uniform attention is warm, less is cool."""
    rows = []
    for card in cards:
        means = [(round(x), float(values.mean())) for x, values in _bin_by_distance(card, 12)]
        rows += [
            {"name": card.name, "at": x, "ratio": v, "log": float(np.log2(max(v, 0.05))), "blank": ""} for x, v in means
        ]
    x, y = nominal("at", sorted({row["at"] for row in rows}), "distance + 1"), nominal("name", [c.name for c in cards])
    tips = tooltip(name="Encoding", at="Distance + 1", ratio="Attention / uniform|.2f")
    title = "log2 of attention / uniform"
    return heatmap(rows, x, y, "log", title=title, domain=(-3, 3), tips=tips, form=".0f", size=14, marks="blank")


def cards_table(cards: Sequence[Card]) -> Table:
    """A row per encoding, with a link to its card."""
    rows: list[list[str | TableCell]] = []
    for card in cards:
        name = TableCell(card.name, html=Markup('<a href="{0}.html">{0}</a>').format(card.name))
        couplings = sorted(card.measured.couplings)
        row = [_yes_no(card.measured.data_dependent), _yes_no(card.measured.toeplitz)]
        row += [f"{card.cost.step:.2f}", f"{card.cost.peak:.2f}", f"{card.cost.parameters:,}"]
        row += [_resolutions(card).get("bfloat16", "–"), _yes_no(card.report.passed), card.citation]
        rows.append([name, ", ".join(couplings), *row])
    columns = ["Encoding", "Enters as", "Uses content", "Toeplitz", "Step time", "Peak memory", "Parameters"]
    columns += ["bfloat16 resolution", "Conforms", "Source"]
    note = "Step time and peak memory are relative to no encoding, for the attention of one layer."
    return make_table("All encodings", columns, rows, right=range(4, 8), note=note, css="numbers small sortable")
