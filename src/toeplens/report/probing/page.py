"""The page of a probe: behaviours of a model, intact and with changed attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from toeplens.ground.words import fixed
from toeplens.lens import Estimate
from toeplens.report.kit.blocks import Block, Panel, Ramp, Sign, Texts, View, numbered
from toeplens.report.kit.canvas import FEW, Canvas, heat, plain
from toeplens.report.kit.colours import BLUE, ORANGE
from toeplens.report.kit.page import Page, write_report
from toeplens.report.kit.tables import Cell, Table, make_table, settings_table
from toeplens.studies.probing import ABOUT, RETRIEVES, ProbeRecord
from toeplens.studies.probing.probe import interval, title_of

_TEXTS = Texts(Path(__file__).with_name("texts.yaml"))
_LEAST = 1e-3


def write_probe(record: ProbeRecord, directory: Path) -> Path:
    """Write the probe's page to ``report.html`` in ``directory``, whole or not at all; returns its path."""
    return write_report(directory, render_probe(record))


def render_probe(record: ProbeRecord) -> str:
    """The probe as one self-contained HTML document; the same record gives the same document."""
    return probe_page(record).html()


def probe_page(record: ProbeRecord) -> Page:
    """The figures and tables of a probe."""
    return Page(
        "report/probing/page.html.j2",
        numbered(make(record) for make in (by_position, needles, retrievers)),
        {"behaviours": behaviours_table(record), "settings": settings_table(sorted(record.about.items()))},
        {
            "command": "probe",
            "record": record,
            "model": "/".join(Path(record.about.get("model") or "a model").parts[-2:]),
        },
    )


def behaviours_table(record: ProbeRecord, *, changed: bool = True) -> Table:
    """Loss and accuracy per behaviour, with ``changed`` also for the changed model."""
    changed = changed and bool(record.changes)
    rows = []
    for each in (one for behaviour in ABOUT for one in record.summaries(behaviour)):
        row: list[str | Cell] = [Cell(title_of(each.behaviour), (ABOUT[each.behaviour],)), str(each.count)]
        row += [interval(each.nats, 2), interval(each.right, 2, most=1)]
        if changed:
            row += [interval(each.changed_nats, 2), interval(each.changed_right, 2, most=1)]
            row.append(interval(each.more_nats, 2, least=None))
        rows.append(row)
    names = ["Behaviour", "Items", "Loss (nats per token)", "Accuracy"]
    names += ["Loss, changed", "Accuracy, changed", "Difference in loss"] * changed
    note = "Loss in nats per token and accuracy, with 95% intervals. Small print: predicted tokens."
    return make_table("Behaviours", names, rows, right=range(1, 7), note=note, css="numbers small")


# ---- figures ---------------------------------------------------------------------------------------------------------


def by_position(record: ProbeRecord) -> Block:
    """Loss by position, intact and changed."""
    found = list(record.summaries("loss", "start"))
    canvas, text = Canvas(320, left=52), ""
    lines = [("intact", "Intact", BLUE, [each.nats for each in found])]
    if record.changes:
        lines.append(("changed", "Changed", ORANGE, [each.changed_nats for each in found if each.changed_nats]))
    xs = [each.start or 0 for each in found]
    for key, title, tint, values in lines:
        means = [each.value for each in values]
        low, high = zip(*[_ends(each) for each in values], strict=True)
        canvas.band(xs, plain(low), plain(high), tint, 0.14, key)
        canvas.lines(xs, plain(means), tint, f"{title}, from %{{x}}: %{{y:.3f}}<extra></extra>", marker={}, meta=key)
        text += f"{title}: {fixed(means[0])} nats in the first bin, {fixed(means[-1])} in the last. "
    canvas.x("position of the predicted token (start of bin)", type="log", tickvals=xs, ticktext=xs)
    canvas.y("nats per token", range=[0, max(m for *_, each in lines for m in (e.value for e in each)) * 1.15])
    signs = [Sign(key, title, tint, "●") for key, title, tint, _ in lines] if record.changes else []
    return _TEXTS.block("loss", [View.of([Panel("Loss", canvas.figure(), text)])], "full", legend=signs)


def needles(record: ProbeRecord) -> Block:
    """Needles by depth and length, one map for the intact and one for the changed model."""
    found = list(record.summaries("needle", "length", "depth"))
    if not found:
        return Block("needles", "", "", [])
    lengths = sorted({each.length or 0 for each in found})
    depths = sorted({each.depth or 0.0 for each in found})
    absent = {each.length: each for each in record.summaries("no needle", "length")}
    pairs = [("Intact model", [each.nats for each in found], [each.right for each in found])]
    if record.changes:
        after = [(each.changed_nats, each.changed_right) for each in found if each.changed_nats and each.changed_right]
        pairs.append(("Changed model", [nats for nats, _ in after], [right for _, right in after]))
    limit = max([_LEAST, *(each.value for _, nats, _ in pairs for each in nats)])
    panels = []
    for title, nats, rights in pairs:
        table, hover, numbers = np.full((len(depths), len(lengths)), np.nan), [], []
        at = {(each.depth, each.length): i for i, each in enumerate(found)}
        for row, depth in zip(table, depths, strict=True):
            which = [at[depth, length] for length in lengths]
            row[:] = [nats[i].value for i in which]
            said = [f"{fixed(x.value)} nats [{', '.join(map(fixed, _ends(x)))}]" for x in (nats[i] for i in which)]
            shares = [f"accuracy {rights[i].value:.0%}" for i in which]
            hover.append([f"{100 * depth:.0f}%, {nat}, {share}" for nat, share in zip(said, shares, strict=True)])
            numbers.append([fixed(nats[i].value, 2) for i in which])
        columns = [f"{length} tokens" for length in lengths]
        rows = [f"{100 * depth:.0f}%" for depth in depths]
        figure = heat(
            table,
            rows,
            columns,
            limit,
            ticks=(range(len(columns)), columns),
            title="length of the text (rows: depth of the needle)",
            hover=hover,
            numbers=numbers if len(columns) <= FEW else None,
        )
        share = float(np.mean([each.value for each in rights]))
        panels.append(Panel(title, figure, f"All five digits are predicted correctly in {share:.0%} of the texts."))
    without = ", ".join(f"{fixed(each.nats.value, 2)} ({length} tokens)" for length, each in absent.items())
    ramp = Ramp("0 nats", f"{fixed(limit, 2)} nats", half=True)
    return _TEXTS.block("needles", [View.of(panels)], "wide", words={"without": without}, ramp=ramp)


def retrievers(record: ProbeRecord) -> Block:
    """Retrieval score of each head."""
    if not record.heads:
        return Block("retrieval", "", "", [])
    layers = sorted({each.layer for each in record.heads})
    heads = range(1 + max(each.head for each in record.heads))
    table = np.full((len(layers), len(heads)), np.nan)
    said = [["" for _ in heads] for _ in layers]
    for each in record.heads:
        row = layers.index(each.layer)
        table[row, each.head] = each.score
        said[row][each.head] = (
            f"L{each.layer + 1} H{each.head + 1}: score {fixed(each.score)}, attention on the token {fixed(each.mass)}"
        )
    columns = [f"H{head + 1}" for head in heads]
    rows = [f"L{layer + 1}" for layer in layers]
    figure = heat(table, rows, columns, 1.0, ticks=(range(len(columns)), columns), title="heads", hover=said)
    top = max(record.heads, key=lambda each: each.score)
    many = sum(each.score >= RETRIEVES for each in record.heads)
    text = (
        f"Retrieval heads (score of at least {RETRIEVES}): {many} of {len(record.heads)}. The largest score is "
        f"{fixed(top.score)} (layer {top.layer + 1} head {top.head + 1})."
    )
    panel = Panel("Retrieval score of each head", figure, text)
    return _TEXTS.block("retrieval", [View.of([panel])], "full", ramp=Ramp("0", "1", half=True))


def _ends(each: Estimate) -> tuple[float, float]:
    return max(0.0, each.low), each.high
