"""The page of a bench: how fast our programs are beside others, on one machine."""

from __future__ import annotations

from pathlib import Path

from toeplens.report.kit.blocks import Block, Panel, View, numbered
from toeplens.report.kit.canvas import Canvas
from toeplens.report.kit.colours import BLUE
from toeplens.report.kit.page import render_page, write_report
from toeplens.studies.benching import BenchRecord

_TITLES = {
    "training": "A training step",
    "ablation": "Every head knocked out",
    "profile": "The Toeplitz share of a head",
}


def write_bench(record: BenchRecord, directory: Path) -> Path:
    """Write the bench's page to ``report.html`` in ``directory``, whole or not at all; returns its path."""
    return write_report(directory, render_bench(record))


def render_bench(record: BenchRecord) -> str:
    """The bench as one self-contained HTML document; the same record gives the same document."""
    return render_page(
        "report/benching/page.html.j2", numbered([ratios(record)]), command="bench", record=record, titles=_TITLES
    )


def ratios(record: BenchRecord) -> Block:
    """How many times as long each other program takes as ours, as bars."""
    bars = [
        (f"{contest.work.split(':')[0]} · {timed.name}", contest.ratio(timed), contest)
        for contest in record.contests
        for timed in contest.timed
        if not timed.ours
    ]
    canvas = Canvas(90 + 26 * len(bars), left=260)
    names = [name for name, _, _ in bars]
    values = [value for _, value, _ in bars]
    told = [f"{_TITLES[contest.kind]}, {name}: {value:.2f} times our time" for name, value, contest in bars]
    hover = "%{hovertext}<extra></extra>"
    canvas.marks(values, names, {"color": BLUE, "size": 9}, hover, hovertext=told)
    canvas.line_at(1.0, vertical=True)
    ticks = [0.5, 1, 2, 5, 10, 20, 50]
    canvas.x("times as long as ours", type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    canvas.y("", autorange="reversed")
    text = f"From {min(values):.2f} to {max(values):.2f} times our time." if values else ""
    caption = "Time of each program over that of toeplens, the median over rounds in which all took their turn."
    return Block("ratios", "Beside others", caption, [View.of([Panel("Ratios", canvas.figure(), text)])], "full")
