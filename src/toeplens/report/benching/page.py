"""The page of a bench: how fast our programs are beside others, on one machine."""

from __future__ import annotations

from pathlib import Path

from toeplens.report.kit.blocks import Block, Panel, View, numbered
from toeplens.report.kit.canvas import Canvas
from toeplens.report.kit.colours import BLUE, ORANGE
from toeplens.report.kit.page import render_page, write_report
from toeplens.studies.benching import BenchRecord

_TITLES = {
    "training": "A training step",
    "ablation": "Every head knocked out",
    "profile": "The Toeplitz share of a head",
    "audit": "Every head read",
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
    """How many times as long each other program takes as ours: as it is, and with work equal to theirs."""
    peers = [
        (f"{contest.work.split(':')[0]} · {timed.name}", contest, timed)
        for contest in record.contests
        for timed in contest.timed
        if not timed.ours
    ]
    canvas = Canvas(90 + 26 * len(peers), left=260)
    hover = "%{hovertext}<extra></extra>"
    rows = [
        (name, contest.ratio(timed, own), f"{_TITLES[contest.kind]}, {name}", own)
        for name, contest, timed in peers
        for own in (contest.timed[0], contest.equal)
        if own is not None
    ]
    for work, marker in (("asked", {"color": BLUE, "size": 9}), ("equal", {"color": ORANGE, "size": 9})):
        some = [
            (name, value, f"{told}: {value:.2f} times {own.name}")
            for name, value, told, own in rows
            if own.work == work
        ]
        names, values, said = ([each[column] for each in some] for column in range(3))
        canvas.marks(values, names, marker, hover, hovertext=said)
    canvas.line_at(1.0, vertical=True)
    ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50]
    canvas.x("times as long as ours", type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    canvas.y("", autorange="reversed")
    every = [value for _, value, _, _ in rows]
    text = f"From {min(every):.2f} to {max(every):.2f} times our time." if every else ""
    caption = (
        "Time of each program over that of toeplens, the median over rounds in which all took their turn. Blue: "
        "toeplens as it is. Orange: with work equal to the other's, or nearer to it, where toeplens does less or more."
    )
    return Block("ratios", "Beside others", caption, [View.of([Panel("Ratios", canvas.figure(), text)])], "full")
