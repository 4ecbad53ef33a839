"""The page of a probe: behaviours of a model, intact and with changed attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toeplens.lens import Estimate
from toeplens.report.charts import facet_grid, heatmap, interval_chart, line_chart, nominal, numeric, tooltip
from toeplens.report.page import Figure, Page, Section
from toeplens.report.tables import Table, TableCell, make_table, settings_table
from toeplens.report.theme import style
from toeplens.studies.kit.probe_items import BY_WORDS
from toeplens.studies.probing import DESCRIPTIONS, MIN_RETRIEVAL, ProbeRecord
from toeplens.studies.probing.probe import mean_text, title_of
from toeplens.utils.formatting import fmt

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
        *list_sections(record),
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
_LISTS = (
    "Share of questions for which the right word is the most likely one of its list, after three solved "
    "examples, with 95% intervals over questions. Of the changed model if there is one. Chance is one in the number of "
    "words."
)
_RETRIEVAL = (
    "Retrieval score of each head of the intact model: the share of the number’s tokens for which it attends most to "
    "that token in the needle (Wu et al. 2024)."
)
_LOSS = (
    "For counting (five numbers), order (six words) and words of lists the loss is computed among the choices; chance "
    "is 1.61, 1.79, and the logarithm of the number of words. Accuracy: the answer is the most likely one, for needles "
    "all of its tokens; for text and copying the share of correct tokens."
)


def _answer(record: ProbeRecord) -> str:
    """The behaviour that changes most, or for an intact model its accuracies."""
    summaries = list(record.overview())
    if record.changes:
        changed = [summary for summary in summaries if summary.more_nats is not None]
        worst = max(changed, key=lambda summary: summary.more_nats.value if summary.more_nats else 0.0)
        clear = sum(summary.more_nats is not None and summary.more_nats.low > 0 for summary in changed)
        return (
            f"The largest increase of the loss is that of “{worst.title}”: {mean_text(worst.more_nats, 2, least=None)} "
            f"nats per token. {clear} of {len(changed)} behaviours get worse beyond their 95% interval."
        )
    texts = "; ".join(f"{s.title.lower()} {mean_text(s.right, 2, most=1)}" for s in summaries)
    return f"Accuracy with 95% intervals: {texts}."


def behaviours_chart(record: ProbeRecord) -> Any:
    """Loss of each behaviour with its interval, intact and changed."""
    rows = []
    for summary in record.overview():
        for series, nats in ((_INTACT, summary.nats), (_CHANGED, summary.changed_nats if record.changes else None)):
            if nats is not None:
                rows.append({"behaviour": summary.title, "series": series.title, **_columns(nats)})
    styles = [_INTACT, _CHANGED] if record.changes else [_INTACT]
    titles = [row["behaviour"] for row in rows]
    return interval_chart(rows, numeric("value", "nats per token"), nominal("behaviour", titles), styles)


def position_chart(record: ProbeRecord) -> Any:
    """Loss by position of the predicted token, intact and changed."""
    rows = []
    for summary in record.summaries("loss", "start"):
        for series, nats in ((_INTACT, summary.nats), (_CHANGED, summary.changed_nats if record.changes else None)):
            if nats is not None:
                rows.append({"start": (summary.start or 0) + 1, "series": series.title, **_columns(nats)})
    starts = [row["start"] for row in rows]
    x = numeric("start", "position of the predicted token (start of bin)", kind="log", values=starts)
    styles = [_INTACT, _CHANGED] if record.changes else [_INTACT]
    return line_chart(rows, x, numeric("value", "nats per token"), styles, low="low", high="high")


def _gain(record: ProbeRecord) -> str:
    summaries = list(record.summaries("loss", "start"))
    first, last = summaries[0].nats.value, summaries[-1].nats.value
    texts = [f"intact, {fmt(first, 2)} nats in the first bin and {fmt(last, 2)} in the last"]
    if record.changes and summaries[0].changed_nats and summaries[-1].changed_nats:
        first, last = summaries[0].changed_nats.value, summaries[-1].changed_nats.value
        texts.append(f"changed, {fmt(first, 2)} and {fmt(last, 2)}")
    return f"Loss by position: {'; '.join(texts)}."


def needle_sections(record: ProbeRecord) -> list[Section]:
    """Loss on a needle by depth and length, for the intact and the changed model."""
    rows = []
    for summary in record.summaries("needle", "length", "depth"):
        pairs = [("Intact model", summary.nats, summary.right)]
        if record.changes and summary.changed_nats and summary.changed_right:
            pairs.append(("Changed model", summary.changed_nats, summary.changed_right))
        cell = {"length": summary.length, "depth": summary.depth}
        rows += [{"model": kind, **cell, **_columns(nats), "right": hits.value} for kind, nats, hits in pairs]
    if not rows:
        return []
    depths, lengths = (sorted({row[name] for row in rows}) for name in ("depth", "length"))
    chart = heatmap(
        rows,
        nominal("length", lengths, "length of the text in tokens"),
        {**nominal("depth", depths, "depth of the needle"), "axis": {"format": ".0%"}},
        "value",
        title="nats per token",
        domain=(0, max(1e-3, *(row["value"] for row in rows))),
        tips=tooltip(model="Model", length="Tokens", depth="Depth|.0%", value="Nats|.2f", right="Accuracy|.0%"),
    )
    chart = facet_grid(chart, "model", ["Intact model", "Changed model"], columns=2)
    absent = record.summaries("no needle", "length")
    baseline = ", ".join(f"{fmt(summary.nats.value, 2)} ({summary.length} tokens)" for summary in absent)
    texts = []
    for kind in dict.fromkeys(row["model"] for row in rows):
        hits = [row["right"] for row in rows if row["model"] == kind]
        texts.append(f"{kind}: all five digits are predicted correctly in {sum(hits) / len(hits):.0%} of the texts.")
    text = " ".join(texts) + (f" Loss without the sentence: {baseline}." if baseline else "")
    return [Section("Does it find a needle in a text?", [Figure("needles", "Needles", chart, _NEEDLES), text])]


def list_sections(record: ProbeRecord) -> list[Section]:
    """Accuracy of words by number and by key, by the length of the list; of the changed model if there is one."""
    rows = []
    for behaviour in BY_WORDS:
        for summary in record.summaries(behaviour, "length"):
            right = summary.changed_right or summary.right
            rows.append({"series": title_of(behaviour), "words": summary.length, **_columns(right)})
    if not rows:
        return []
    x = numeric("words", "words in the list", kind="log", values=[row["words"] for row in rows])
    styles = [style(title_of(BY_WORDS[0]), "rope"), style(title_of(BY_WORDS[1]), "nope")]
    y = numeric("value", "accuracy", domain=(0, 1))
    chart = line_chart(rows, x, y, styles, low="low", high="high")
    title = "Does it find a word by its number or by its key?"
    return [Section(title, [Figure("lists", "Words of lists", chart, _LISTS)])]


def retrieval_sections(record: ProbeRecord) -> list[Section]:
    """Retrieval score of each head."""
    if not record.heads:
        return []
    rows = [
        {"layer": head.layer + 1, "head": head.head + 1, "score": head.score, "mass": head.mass}
        for head in record.heads
    ]
    tips = tooltip(layer="Layer", head="Head", score="Retrieval score|.2f", mass="Attention on the token|.2f")
    x, y = nominal("head", range(1, 1 + max(r["head"] for r in rows)), "head"), nominal("layer", [], "layer")
    chart = heatmap(rows, x, y | {"sort": "ascending"}, "score", title="retrieval score", domain=(0, 1), tips=tips)
    top = max(record.heads, key=lambda head: head.score)
    count = sum(head.score >= MIN_RETRIEVAL for head in record.heads)
    text = (
        f"{count} of {len(record.heads)} heads have a score of at least {MIN_RETRIEVAL}. The largest is "
        f"{fmt(top.score)} (L{top.layer + 1} H{top.head + 1})."
    )
    return [Section("Which heads retrieve?", [Figure("retrieval", "Retrieval heads", chart, _RETRIEVAL), text])]


def behaviours_table(record: ProbeRecord) -> Table:
    """Loss and accuracy per behaviour, also of the changed model if there is one."""
    rows = []
    for summary in record.overview():
        name = TableCell(summary.title, (DESCRIPTIONS[summary.behaviour],))
        row: list[str | TableCell] = [name, str(summary.count)]
        row += [mean_text(summary.nats, 2), mean_text(summary.right, 2, most=1)]
        if record.changes:
            row += [mean_text(summary.changed_nats, 2), mean_text(summary.changed_right, 2, most=1)]
            row.append(mean_text(summary.more_nats, 2, least=None))
        rows.append(row)
    columns = ["Behaviour", "Items", "Loss (nats per token)", "Accuracy"]
    columns += ["Loss, changed", "Accuracy, changed", "Difference in loss"] if record.changes else []
    note = "Loss in nats per token and accuracy, with 95% intervals. Items: predicted tokens or questions."
    return make_table("Behaviours", columns, rows, right=range(1, 7), note=note, css="numbers small")


def _columns(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": max(0.0, estimate.low), "high": estimate.high}
