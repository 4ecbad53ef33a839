"""The page of a probe: behaviours of a model, intact and with changed attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toeplens.ground.words import fixed
from toeplens.lens import Estimate
from toeplens.report.charts import curves, grid, heat, intervals, names, number, tooltip
from toeplens.report.page import Figure, Page, Section
from toeplens.report.tables import Cell, Table, make_table, settings_table
from toeplens.report.theme import style
from toeplens.studies.probing import ABOUT, RETRIEVES, ProbeRecord
from toeplens.studies.probing.probe import interval, title_of

_INTACT, _CHANGED = style("Intact", "rope"), style("Changed", "mla")


def probe_page(record: ProbeRecord) -> Page:
    """The page of a probe."""
    model = "/".join(Path(record.about.get("model") or "a model").parts[-2:])
    changes = "; ".join(record.changes)
    sections = [
        Section(
            "Does it use earlier text?",
            [Figure("position", "Loss by position", position_chart(record), _POSITION), _gain(record)],
        ),
        *needle_sections(record),
        *retrieval_sections(record),
        Section(
            "All numbers",
            [behaviours_table(record), _LOSS],
            [Section("Settings", [settings_table(sorted(record.about.items()))])],
            id="numbers",
        ),
    ]
    return Page(
        "probe",
        f"{model}: probe",
        f"What does {model} lose when its attention is changed?" if changes else f"What can {model} do with position?",
        _answer(record),
        Figure("behaviours", "Loss by behaviour", behaviours_chart(record), _BEHAVIOURS),
        sections,
        [f"Changed: {changes}."] if changes else [],
    )


_BEHAVIOURS = "Mean −log p of the answer, in nats per token, with 95% intervals over texts or questions."
_POSITION = (
    "Mean −log p of the next token, by the number of tokens before it, in bins of doubling width. Bands are 95% "
    "intervals over texts."
)
_NEEDLES = (
    "One sentence states a five-digit number, and the end of the text asks for it. Cells: mean −log p of the number’s "
    "tokens in nats, by depth of the sentence and length of the text."
)
_RETRIEVAL = (
    "Retrieval score of each head of the intact model: the share of the number’s tokens for which it attends most to "
    "that token in the needle (Wu et al. 2024)."
)
_LOSS = (
    "For counting (five numbers) and order (six words) the loss is computed among the choices; chance is 1.61 and "
    "1.79. Accuracy: the answer is the most likely one, for needles all of its tokens; for text and copying the share "
    "of correct tokens."
)


def _answer(record: ProbeRecord) -> str:
    """The behaviour that changes most, or for an intact model its accuracies."""
    each = [one for behaviour in ABOUT for one in record.summaries(behaviour)]
    if record.changes:
        raised = [one for one in each if one.more_nats is not None]
        most = max(raised, key=lambda one: one.more_nats.value if one.more_nats else 0.0)
        clear = sum(one.more_nats is not None and one.more_nats.low > 0 for one in raised)
        return (
            f"{title_of(most.behaviour)} suffers most: the loss rises by {interval(most.more_nats, 2, least=None)} "
            f"nats per token. {clear} of {len(raised)} behaviours get worse beyond their 95% interval."
        )
    told = "; ".join(f"{title_of(one.behaviour).lower()} {interval(one.right, 2, most=1)}" for one in each)
    return f"Accuracy with 95% intervals: {told}."


def behaviours_chart(record: ProbeRecord) -> Any:
    """Loss of each behaviour with its interval, intact and changed."""
    rows = []
    for behaviour in ABOUT:
        for each in record.summaries(behaviour):
            for look, nats in ((_INTACT, each.nats), (_CHANGED, each.changed_nats if record.changes else None)):
                if nats is not None:
                    rows.append({"behaviour": title_of(behaviour), "series": look.title, **_ends(nats)})
    looks = [_INTACT, _CHANGED] if record.changes else [_INTACT]
    titles = [row["behaviour"] for row in rows]
    return intervals(rows, number("value", "nats per token"), names("behaviour", titles), looks)


def position_chart(record: ProbeRecord) -> Any:
    """Loss by position of the predicted token, intact and changed."""
    rows = []
    for each in record.summaries("loss", "start"):
        for look, nats in ((_INTACT, each.nats), (_CHANGED, each.changed_nats if record.changes else None)):
            if nats is not None:
                rows.append({"start": (each.start or 0) + 1, "series": look.title, **_ends(nats)})
    x = number("start", "position of the predicted token (start of bin)", kind="log", values=[r["start"] for r in rows])
    looks = [_INTACT, _CHANGED] if record.changes else [_INTACT]
    return curves(rows, x, number("value", "nats per token"), looks, low="low", high="high")


def _gain(record: ProbeRecord) -> str:
    found = list(record.summaries("loss", "start"))
    first, last = found[0].nats.value, found[-1].nats.value
    told = [f"intact, {fixed(first, 2)} nats in the first bin and {fixed(last, 2)} in the last"]
    if record.changes and found[0].changed_nats and found[-1].changed_nats:
        first, last = found[0].changed_nats.value, found[-1].changed_nats.value
        told.append(f"changed, {fixed(first, 2)} and {fixed(last, 2)}")
    return f"Loss by position: {'; '.join(told)}."


def needle_sections(record: ProbeRecord) -> list[Section]:
    """Loss on a needle by depth and length, for the intact and the changed model."""
    rows = []
    for each in record.summaries("needle", "length", "depth"):
        pairs = [("Intact model", each.nats, each.right)]
        if record.changes and each.changed_nats and each.changed_right:
            pairs.append(("Changed model", each.changed_nats, each.changed_right))
        place = {"length": each.length, "depth": each.depth}
        rows += [{"model": who, **place, **_ends(nats), "right": right.value} for who, nats, right in pairs]
    if not rows:
        return []
    depths, lengths = (sorted({row[name] for row in rows}) for name in ("depth", "length"))
    chart = heat(
        rows,
        names("length", lengths, "length of the text in tokens"),
        {**names("depth", depths, "depth of the needle"), "axis": {"format": ".0%"}},
        "value",
        title="nats per token",
        domain=(0, max(1e-3, *(row["value"] for row in rows))),
        tips=tooltip(model="Model", length="Tokens", depth="Depth|.0%", value="Nats|.2f", right="Accuracy|.0%"),
    )
    chart = grid(chart, "model", ["Intact model", "Changed model"], columns=2)
    absent = record.summaries("no needle", "length")
    without = ", ".join(f"{fixed(each.nats.value, 2)} ({each.length} tokens)" for each in absent)
    told = []
    for who in dict.fromkeys(row["model"] for row in rows):
        right = [row["right"] for row in rows if row["model"] == who]
        told.append(f"{who}: all five digits are predicted correctly in {sum(right) / len(right):.0%} of the texts.")
    text = " ".join(told) + (f" Loss without the sentence: {without}." if without else "")
    return [Section("Does it find a needle in a text?", [Figure("needles", "Needles", chart, _NEEDLES), text])]


def retrieval_sections(record: ProbeRecord) -> list[Section]:
    """Retrieval score of each head."""
    if not record.heads:
        return []
    rows = [
        {"layer": each.layer + 1, "head": each.head + 1, "score": each.score, "mass": each.mass}
        for each in record.heads
    ]
    tips = tooltip(layer="Layer", head="Head", score="Retrieval score|.2f", mass="Attention on the token|.2f")
    x, y = names("head", range(1, 1 + max(r["head"] for r in rows)), "head"), names("layer", [], "layer")
    chart = heat(rows, x, y | {"sort": "ascending"}, "score", title="retrieval score", domain=(0, 1), tips=tips)
    top = max(record.heads, key=lambda each: each.score)
    many = sum(each.score >= RETRIEVES for each in record.heads)
    text = (
        f"{many} of {len(record.heads)} heads have a score of at least {RETRIEVES}. The largest is {fixed(top.score)} "
        f"(L{top.layer + 1} H{top.head + 1})."
    )
    return [Section("Which heads retrieve?", [Figure("retrieval", "Retrieval heads", chart, _RETRIEVAL), text])]


def behaviours_table(record: ProbeRecord) -> Table:
    """Loss and accuracy per behaviour, also of the changed model if there is one."""
    rows = []
    for each in (one for behaviour in ABOUT for one in record.summaries(behaviour)):
        row: list[str | Cell] = [Cell(title_of(each.behaviour), (ABOUT[each.behaviour],)), str(each.count)]
        row += [interval(each.nats, 2), interval(each.right, 2, most=1)]
        if record.changes:
            row += [interval(each.changed_nats, 2), interval(each.changed_right, 2, most=1)]
            row.append(interval(each.more_nats, 2, least=None))
        rows.append(row)
    columns = ["Behaviour", "Items", "Loss (nats per token)", "Accuracy"]
    columns += ["Loss, changed", "Accuracy, changed", "Difference in loss"] if record.changes else []
    note = "Loss in nats per token and accuracy, with 95% intervals. Items: predicted tokens or questions."
    return make_table("Behaviours", columns, rows, right=range(1, 7), note=note, css="numbers small")


def _ends(each: Estimate) -> dict[str, float]:
    return {"value": each.value, "low": max(0.0, each.low), "high": each.high}
