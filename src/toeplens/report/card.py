"""The page of an encoding's card: kernel, attention by distance, properties, cost and conformance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from latex2mathml.converter import convert
from markupsafe import Markup

from toeplens.encodings.conformance import CHECKS
from toeplens.ground import InputError, write_text
from toeplens.ground.files import is_leftover, make_directory, read_yaml
from toeplens.ground.outputs import free, write_page
from toeplens.report.charts import alt, curves, data, heat, looks, names, number, tooltip
from toeplens.report.page import SCRIPT, Figure, Page, Section, drawing_program
from toeplens.report.tables import Cell, Table, make_table
from toeplens.report.theme import style, styles
from toeplens.studies.card import Card, flat

COMMAND, INDEX = "card", "index.html"
WHERE: dict[str, str] = read_yaml(Path(__file__).with_name("card.yaml"))["where"]
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
    free_for_cards([card.name for card in cards], directory)
    path = write_page(directory / INDEX, cards_page(cards).html(script=SCRIPT), COMMAND)
    write_text(directory / SCRIPT, drawing_program())
    for card in cards:
        write_page(directory / f"{card.name}.html", card_page(card, back=INDEX).html(script=SCRIPT), COMMAND)
    return path


def free_for_cards(names: Sequence[str], directory: Path) -> None:
    """Raises `InputError` if the directory holds anything other than earlier cards."""
    make_directory(directory)
    if not (directory / INDEX).exists() and any(not is_leftover(path) for path in directory.iterdir()):
        raise InputError(f"out: {directory} contains files that are not cards. Choose an empty or new directory.")
    for page in (INDEX, *(f"{name}.html" for name in names)):
        free(directory / page, COMMAND)


def card_page(card: Card, *, back: str = "") -> Page:
    """The page of a card; ``back`` is a link to the other cards."""
    about, _, more = card.about.partition("\n\n")
    near, far = (float(card.profile[:, at].mean()) for at in (0, -1))
    attention = Figure("attention", "Attention by distance", attention_chart(card), _ATTENTION)
    kernels = _kernels(card)
    sections = [Section("How does it change attention?", [attention])] if kernels else []
    details = [Section(each.title, [each]) for each in kernels[1:]]
    sections = [Section(each.title, each.parts, details) for each in sections]
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
        [*([Markup('<a href="{}">All encodings</a>').format(back)] if back else []), *_no_kernel(card)],
        [] if card.report.passed else ["It fails the conformance checks below."],
    )


def _no_kernel(card: Card) -> list[str]:
    """Why there is no kernel or no symbol."""
    if card.kernel is None and card.measured.toeplitz:
        return ["Distances have several coordinates, so kernel and symbol are not shown."]
    if card.kernel is None:
        return ["It has no kernel that only depends on distance, so kernel and symbol are not shown."]
    if card.symbol is None:
        return ["The kernel is infinite at some distances, so it has no symbol."]
    return [] if card.symbol.any() else ["The kernel is odd or 0, so its symbol is 0 up to rounding."]


# ---- charts ----------------------------------------------------------------------------------------------------------


def _by_head(rows: np.ndarray, xs: np.ndarray, x: dict[str, Any], y: dict[str, Any]) -> Any:
    """A curve per head, or one for all heads."""
    titles = [f"head {head}" for head in range(1, len(rows) + 1)] if len(rows) > 1 else ["all heads"]
    made = [
        {"series": title, "x": float(at), "value": float(value)}
        for title, row in zip(titles, rows, strict=True)
        for at, value in zip(xs, row, strict=True)
    ]
    return curves(made, x, y, styles((title, title) for title in titles).values(), points=False)


def _kernels(card: Card) -> list[Figure]:
    """The kernel by distance, by frequency for a rotation, and its symbol, as far as there are any."""
    if card.kernel is None:
        return []
    near = np.abs(card.offsets) <= min(_WINDOW, card.sizes["max_len"] - 1)
    rotation = card.kernel.ndim == 3
    chart = _by_head(
        flat(card.kernel)[:, near], card.offsets[near], number("x", "distance i − j"), number("value", "kernel")
    )
    caption = "Real part, mean over frequencies, at initialisation." if rotation else "At initialisation."
    found = [Figure("kernel", "Kernel by distance", chart, caption)]
    if card.symbol is not None and card.symbol.any() and card.angles is not None:
        half = card.angles > 0
        x = number("x", "φ (rad per token)", kind="log", format="~g", tickCount=5)
        y = number("value", "symbol", kind="symlog", tickCount=5)
        caption = f"Fourier series of the kernel, smoothed over {card.sizes['max_len']} positions."
        found.append(Figure("symbol", "Symbol", _by_head(card.symbol[:, half], card.angles[half], x, y), caption))
    return found


def _binned(card: Card, bins: int) -> list[tuple[float, np.ndarray]]:
    """Attention by head in bins of distance that grow geometrically: mean distance + 1, values."""
    length = card.profile.shape[1]
    starts = np.unique(np.geomspace(1, length, bins).astype(int)) - 1
    blocks = np.split(np.arange(length), starts[1:])
    return [(float(block.mean() + 1), card.profile[:, block].mean(1)) for block in blocks]


def attention_chart(card: Card) -> Any:
    """Attention by distance, relative to uniform attention."""
    rows = [
        {"series": "attention", "x": x, "value": values.mean(), "low": values.min(), "high": values.max()}
        for x, values in _binned(card, 60)
    ]
    x, y = number("x", "distance + 1", kind="log", domain=[1, rows[-1]["x"]]), number("value", "attention / uniform")
    return curves(rows, x, y, [style("attention")], low="low", high="high", points=False, levels={"uniform": 1})


# ---- tables ----------------------------------------------------------------------------------------------------------


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _resolutions(card: Card) -> dict[str, str]:
    found = card.resolution or {}
    return {dtype: "no limit" if distance is None else f"{distance:,}" for dtype, distance in found.items()}


def properties_table(card: Card) -> Table:
    """Formula, source and measured properties; a property that is not as declared says so."""
    where = "; ".join(f"{each}: {WHERE[each]}" for each in sorted(card.measured.couplings))
    facts = [
        ("Position enters as", card.declared.couplings, card.measured.couplings, where),
        ("Depends on content", card.declared.data_dependent, card.measured.data_dependent, ""),
        ("Depends only on distance (Toeplitz)", card.declared.toeplitz, card.measured.toeplitz, ""),
    ]
    rows: list[list[str | Cell]] = []
    if card.formula:
        rows.append(["Formula", Cell(card.formula, html=Markup(convert(card.formula)))])
    rows.append(["Source", card.citation])
    for title, declared, measured, note in facts:
        said = [_yes(each) if isinstance(each, bool) else ", ".join(sorted(each)) for each in (measured, declared)]
        wrong = () if declared == measured else (f"declared: {said[1]}",)
        rows.append([title, Cell(said[0], (note, *wrong))])
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
        [each.check, (CHECKS[each.check].__doc__ or "").replace("`", ""), "ok" if each.passed else "fails", each.seen]
        for each in card.report.findings
    ]
    return make_table("Conformance", ["Check", "What is checked", "Result", "Measured"], rows, css="")


# ---- all cards -------------------------------------------------------------------------------------------------------


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
        number(name, title, zero=False)
        for name, title in (("step", "time of a training step"), ("peak", "peak memory"))
    )
    marks = alt.Chart(data(rows)).mark_point(size=70).encode(x=alt.X(**x), y=alt.Y(**y))
    tips = tooltip(name="Encoding", series="Position enters as", step="Time|.2f", peak="Memory|.2f")
    found = styles((kind, kind) for kind in kinds).values()
    return marks.encode(tooltip=tips, **looks("series", found, title="position enters as")).properties(height=320)


def profiles_chart(cards: Sequence[Card]) -> Any:
    """Attention by distance of all encodings; more than uniform attention is warm, less is cool."""
    rows = []
    for card in cards:
        means = [(round(x), float(values.mean())) for x, values in _binned(card, 12)]
        rows += [
            {"name": card.name, "at": x, "ratio": v, "log": float(np.log2(max(v, 0.05))), "blank": ""} for x, v in means
        ]
    x, y = names("at", sorted({row["at"] for row in rows}), "distance + 1"), names("name", [c.name for c in cards])
    tips = tooltip(name="Encoding", at="Distance + 1", ratio="Attention / uniform|.2f")
    title = "log2 of attention / uniform"
    return heat(rows, x, y, "log", title=title, domain=(-3, 3), tips=tips, form=".0f", size=14, marks="blank")


def cards_table(cards: Sequence[Card]) -> Table:
    """A row per encoding, with a link to its card."""
    rows: list[list[str | Cell]] = []
    for card in cards:
        name = Cell(card.name, html=Markup('<a href="{0}.html">{0}</a>').format(card.name))
        couplings = sorted(card.measured.couplings)
        row = [_yes(card.measured.data_dependent), _yes(card.measured.toeplitz)]
        row += [f"{card.cost.step:.2f}", f"{card.cost.peak:.2f}", f"{card.cost.parameters:,}"]
        row += [_resolutions(card).get("bfloat16", "–"), _yes(card.report.passed), card.citation]
        rows.append([name, ", ".join(couplings), *row])
    columns = ["Encoding", "Enters as", "Uses content", "Toeplitz", "Step time", "Peak memory", "Parameters"]
    columns += ["bfloat16 resolution", "Conforms", "Source"]
    note = "Step time and peak memory are relative to no encoding, for the attention of one layer."
    return make_table("All encodings", columns, rows, right=range(4, 8), note=note, css="numbers small sortable")
