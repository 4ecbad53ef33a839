"""The page of an encoding's card: formula, kernel, symbol, properties, resolution and cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from latex2mathml.converter import convert
from markupsafe import Markup

from toeplens.encodings.conformance import CHECKS
from toeplens.ground import InputError, write_text
from toeplens.ground.files import is_leftover, make_directory, read_yaml
from toeplens.ground.outputs import free, write_page
from toeplens.report.kit.blocks import Block, Panel, View
from toeplens.report.kit.canvas import Canvas, by_sign, plain
from toeplens.report.kit.colours import BLUE, spectrum
from toeplens.report.kit.page import plotly, render_page
from toeplens.studies.card import Card, flat

COMMAND = "card"
INDEX, PLOTLY = "index.html", "plotly.js"
WHERE: dict[str, str] = read_yaml(Path(__file__).with_name("card.yaml"))["where"]


def write_card(card: Card, path: Path) -> Path:
    """Write one card as a self-contained HTML page, replacing only an earlier card."""
    return write_page(path, render_card(card), COMMAND)


def write_cards(cards: Sequence[Card], directory: Path) -> Path:
    """Write all cards as ``NAME.html`` and their table as ``index.html``, with one shared copy of plotly."""
    free_for_cards([card.name for card in cards], directory)
    index = render_page("report/cards.html.j2", None, command=COMMAND, cards=cards, where=WHERE, little=_little)
    path = write_page(directory / INDEX, index, COMMAND)
    write_text(directory / PLOTLY, plotly())
    for card in cards:
        write_page(directory / f"{card.name}.html", render_card(card, plotly_file=PLOTLY, back=INDEX), COMMAND)
    return path


def free_for_cards(names: Sequence[str], directory: Path) -> None:
    """Raises `InputError` if the directory holds anything other than earlier cards."""
    make_directory(directory)
    if not (directory / INDEX).exists() and any(not is_leftover(path) for path in directory.iterdir()):
        raise InputError(f"out: {directory} contains files that are not cards. Choose an empty or new directory.")
    for page in (INDEX, *(f"{name}.html" for name in names)):
        free(directory / page, COMMAND)


def render_card(card: Card, *, plotly_file: str = "", back: str = "") -> str:
    """The card as one HTML document; ``plotly_file``: external copy of plotly, ``back``: link to the other cards."""
    about, *more = card.about.split("\n\n", 1)
    block = Block("plots", "Effect of distance", "", [View.of(_panels(card))])
    return render_page(
        "report/card.html.j2",
        {block.id: block},
        plotly_file=plotly_file,
        command=COMMAND,
        card=card,
        checks={name: (run.__doc__ or "").replace("`", "") for name, run in CHECKS.items()},
        formula=Markup(convert(card.formula, display="block")) if card.formula else "",
        about=about,
        more=more[0].replace("``", "") if more else "",
        where=WHERE,
        back=back,
    )


def _panels(card: Card) -> list[Panel]:
    attention = _attention(card)
    if card.kernel is None:
        return [attention]
    rotation, window = card.kernel.ndim == 3, np.abs(card.offsets) <= min(128, card.sizes["max_len"] - 1)
    canvas = Canvas(250)
    xs = card.offsets[window].tolist()
    for row, tint, name in _each_head(flat(card.kernel)):
        canvas.lines(xs, plain(row[window]), tint, "%{x}: %{y:.4g}", width=1.4, name=name)
    canvas.x("distance i − j")
    canvas.y("")
    canvas.line_at(0, vertical=True, dash="dot")
    kind = "real part" if rotation else "one curve per head" if len(card.kernel) > 1 else "one curve for all heads"
    title = "Kernel by distance, mean over frequencies" if rotation else "Kernel by distance"
    first = [Panel(title, canvas.figure(), f"At initialisation; {kind}.")]
    if rotation:
        first.append(_bands(card, card.kernel[0]))
    if card.symbol is None or not card.symbol.any():  # the kernel is infinite at some distances, or is odd
        return [*first, attention]
    assert card.angles is not None
    words = f"Fourier series of the kernel, smoothed over {card.sizes['max_len']} positions; dotted where negative."
    canvas, half = Canvas(250), card.angles > 0
    floor = 1e-6 * max(float(np.abs(card.symbol).max()), 1e-300)
    for row, tint, name in _each_head(card.symbol):
        for dash, sign, values in by_sign(row[half], floor):
            hover = f"%{{x:.3f}}: {sign}%{{y:.4g}}"
            canvas.lines(plain(card.angles[half]), values, tint, hover, width=1.2, dash=dash, name=name)
    canvas.x("φ (rad per token)", type="log")
    canvas.y("", type="log", exponentformat="power", dtick=1)
    return [*first, attention, Panel("Symbol", canvas.figure(), words)]


def _attention(card: Card) -> Panel:
    canvas, distances, mean = Canvas(250), np.arange(card.profile.shape[1]) + 1, card.profile
    steps = np.unique(np.geomspace(1, len(distances), 60).astype(int)) - 1
    blocks = [slice(a, b) for a, b in itertools.pairwise([*steps.tolist(), len(distances)])]
    smooth = np.stack([mean[:, block].mean(1) for block in blocks], axis=1)
    xs = [float(distances[block].mean()) for block in blocks]
    canvas.band(xs, plain(smooth.min(0)), plain(smooth.max(0)), BLUE, 0.15, "")
    canvas.lines(xs, plain(smooth.mean(0)), BLUE, "%{x:.0f}: %{y:.3g}<extra></extra>")
    canvas.x("distance + 1", type="log")
    canvas.y("", rangemode="tozero")
    canvas.line_at(1)
    near, far = mean[:, 0].mean(), mean[:, -1].mean()
    words = (
        f"Mean attention for similar contents, relative to uniform attention (1). {near:.2f} at distance 0, {far:.2f} "
        "at the largest distance."
    )
    return Panel("Attention by distance", canvas.figure(), words)


def _each_head(rows: np.ndarray) -> Iterator[tuple[np.ndarray, str, str]]:
    """Values, colour and name of each head, or of all heads together."""
    names = [f"head {head}" for head in range(1, len(rows) + 1)] if len(rows) > 1 else ["all heads"]
    return zip(rows, spectrum(len(rows)), names, strict=True)


def _bands(card: Card, kernel: np.ndarray) -> Panel:
    canvas, near = Canvas(250), (card.offsets >= 0) & (card.offsets <= 128)
    shown = np.real(kernel[:, near])
    canvas.heat(
        [plain(row) for row in shown],
        card.offsets[near].tolist(),
        list(range(len(shown))),
        max(float(np.abs(shown).max()), 1e-9),
        "distance %{x}, frequency %{y}: %{z:.3f}<extra></extra>",
    )
    canvas.x("distance i − j")
    canvas.y("frequency", autorange="reversed")
    return Panel("Kernel by frequency, real part", canvas.figure(), "Rows are frequencies, from high to low.")


def _little(card: Card) -> Markup:
    """Attention by distance as a sparkline."""
    mean = card.profile.mean(0)
    steps = np.unique(np.geomspace(1, len(mean), 40).astype(int)) - 1
    values = np.log2(np.clip(mean[steps], 0.05, 20))
    xs = np.log(steps + 1) / np.log(len(mean)) * 90 + 3
    ys = 14 - values * 2.8
    path = " ".join(f"{'M' if i == 0 else 'L'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(zip(xs, ys, strict=True)))
    return Markup(
        '<svg viewBox="0 0 96 28" width="96" height="28" role="img" aria-label="attention by distance">'
        '<path d="M0 14H96" stroke="currentColor" stroke-width=".5" stroke-dasharray="2 2" opacity=".5"/>'
        f'<path d="{path}" fill="none" stroke="{BLUE}" stroke-width="1.6"/></svg>'
    )
