"""The parts of a grid study's page for language models: loss by length and position, needles, copies, heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np

from toeplens.report.charts import PERCENT, alt, heatmap, interval_chart, nominal, numeric, ref_lines, tooltip
from toeplens.report.grid_data import (
    TEXTS,
    Chart,
    Rows,
    best_of,
    figure,
    interval_text,
    language_tasks,
    line_panels,
    models,
    panels,
    rankings,
    scatter,
    seed_means,
    style_map,
)
from toeplens.report.tables import Table, TableCell, make_table
from toeplens.report.theme import style
from toeplens.studies import CellResult
from toeplens.studies.grid import GridStudy, language
from toeplens.studies.grid.language import LONG_FACTOR, MAX_HEADS, bits_per_byte, is_language, position_shares
from toeplens.utils.formatting import fmt, fmt_signed, join_list, percent

_LONG = f"{LONG_FACTOR:g} training lengths"
_MIN_CONTEXT = 8  # with so little context all encodings are similar


def page_parts(state: GridStudy) -> dict[str, Any]:
    """Figures, tables and texts of language models, by the place where the page shows them."""
    tradeoffs, extension = tradeoffs_table(state), extension_table(state)
    copies = figure("copies", copies_chart(state))
    return {
        "picture": figure("loss", loss_chart(state)),
        "loss": [TEXTS["prices"], tradeoffs] if tradeoffs.body else [],
        "longer": [*figure("bits", bits_chart(state)), _size_note(state), *figure("positions", positions_chart(state))],
        "extension": [TEXTS["extension"], extension] if extension.body else [],
        "behaviours": [*figure("needles", needles_chart(state)), _chance(state), *copies],
        "heads": figure("kinds", kinds_chart(state)),
        "effects": figure("position-share", effects_chart(state)),
    }


def answer_sentences(state: GridStudy) -> list[str]:
    """Per language task: the encoding with the lowest loss at the training length, and on longer texts."""
    sentences, tasks = [], list(map(state.spec.title_of, language_tasks(state.spec)))
    near, far = (rankings(state, metric, lower=True, grain=0.0) for metric in (bits_per_byte, _end_loss))
    for task in [title for title in tasks if title in near]:
        best, prefix = near[task], f"{task}: " if len(tasks) > 1 else ""
        ties = f"; no clear difference to {join_list(best_of(best)[1:])}" if len(best_of(best)) > 1 else ""
        loss = f"{interval_text(best[0].mean)} bits per byte{ties}."
        sentences.append(f"{prefix}{best[0].title} has the lowest loss at the training length, {loss}")
        if task in far:
            first, last = far[task][0], far[task][-1]
            text = f"At the end of texts of {_LONG}: {first.title} ({interval_text(first.mean)})"
            sentences.append(
                f"{text}; {last.title} is worst ({fmt(last.mean.value, 3)})." if last != first else f"{text}."
            )
    return sentences


def _end_loss(cell: CellResult) -> float:
    """Bits per byte at the end of texts of `LONG_FACTOR` training lengths."""
    row = cell.measure("bits").at_factor(LONG_FACTOR) if is_language(cell) else None
    return float("nan") if row is None or row.end is None else row.end.value


def _text_models(state: GridStudy, *measures: str) -> Iterator[tuple[CellResult, dict[str, Any]]]:
    """The evaluated language models that have all of the measures."""
    for cell, row in models(state):
        if is_language(cell) and all(cell.measure(name) is not None for name in measures):
            yield cell, row


def _panel(state: GridStudy, row: dict[str, Any], name: str) -> str:
    """The name of a panel, with the task if there are several language tasks."""
    return f"{row['task']}: {name}" if len(language_tasks(state.spec)) > 1 else name


def loss_chart(state: GridStudy) -> Chart:
    """Bits per byte of each encoding at the training length and on longer texts, with intervals over seeds."""
    views: dict[str, Callable[[CellResult], float]] = {"At the training length": bits_per_byte}
    views[f"End of texts of {_LONG}"] = _end_loss
    rows = seed_means(
        (
            {"panel": _panel(state, row, name), "encoding": row["series"], "series": "mean", "value": metric(cell)}
            for name, metric in views.items()
            for cell, row in _text_models(state)
        ),
        grain=0.0,
    )
    if not rows:
        return None
    tips = tooltip(encoding="Encoding", value="Bits per byte|.3f", low="From|.3f", high="To|.3f", seeds="Seeds")
    order = [row["encoding"] for row in sorted(rows, key=lambda row: (row["panel"] != rows[0]["panel"], row["value"]))]
    x, y = numeric("value", "bits per byte", zero=False, tickCount=5), nominal("encoding", order)
    chart = interval_chart(rows, x, y, [style("mean", "rope")], tips=tips)
    return panels(chart, rows, "panel", 2, 24 * len(set(order)), ["x"])


def tradeoffs_table(state: GridStudy) -> Table:
    """Benefits and costs of each encoding, best first, with n-gram baselines."""
    styles, all_rows = style_map(state.spec), language.language_rows(state.spec, state.results)
    rows: list[list[str | TableCell]] = []
    for task in dict.fromkeys(row.task for row in all_rows):
        task_rows = [row for row in all_rows if row.task == task]
        fastest = min((row.seconds for row in task_rows if row.seconds), default=None)
        name = f"{state.spec.title_of(task)}: " if len({row.task for row in all_rows}) > 1 else ""
        ngrams: dict[str, list[float]] = {}
        for row in task_rows:
            cells = [c for c in state.results.cells_of(task, row.label) if c.status == "complete" and is_language(c)]
            for order, value in (pair for cell in cells for pair in cell.measure("bits").ngrams.items()):
                ngrams.setdefault(order, []).append(value)
            loss = TableCell(fmt(row.bits, 3), (_range(cells, bits_per_byte),), right=True)
            far = TableCell(fmt_signed(row.lost, 3), (_range(cells, language.bits_increase),), right=True)
            relative = fmt(row.seconds / fastest if row.seconds and fastest else None)
            line = [percent(row.needle), percent(row.needle_long), fmt(row.copied, 2), percent(row.deposit)]
            first = TableCell(name + row.title, marker=styles.get(row.label))
            rows.append([first, loss, far, *line, f"{row.parameters:,}", relative])
        for order in sorted(ngrams, key=int):
            first = TableCell(f"{name}{int(order) + 1}-gram model", row_css="guess")
            rows.append([first, fmt(float(np.mean(ngrams[order])), 3), *[""] * 7])
    long = f"{LONG_FACTOR:g}×"
    columns = ["Bits per byte", f"Loss at {long}", "Needles at 1×", f"Needles at {long}", "Copy gain"]
    columns += ["Position in one head", "Parameters", "Relative time"]
    heads = ["Encoding", *(TableCell(text, right=True) for text in columns)]
    note = "Mean over seeds, best first. Small print: lowest and highest seed."
    return make_table("Benefits and costs of encodings", heads, rows, right=range(1, 9), note=note, css="small")


def _range(cells: Sequence[CellResult], metric: Callable[[CellResult], float]) -> str:
    values = [value for cell in cells if isfinite(value := metric(cell))]
    return f"{fmt(min(values), 3)} to {fmt(max(values), 3)}".replace(" ", "\u00a0") if len(values) > 1 else ""


def _length_axis(rows: Rows, title: str) -> dict[str, Any]:
    ticks = sorted({row["factor"] for row in rows}) or [1.0]
    return numeric("factor", title, kind="log", values=ticks, domain=[ticks[0], ticks[-1]], format="~g")


def bits_chart(state: GridStudy) -> Chart:
    """Bits per byte by length of the text, a panel per way to evaluate."""
    rows = seed_means(
        {**row, "panel": _panel(state, row, name), "factor": length.factor, "value": estimate.value}
        for field, name in (("end", "End of the text"), ("whole", "Whole text"), ("sliding", "Sliding window"))
        for cell, row in _text_models(state)
        for length in cell.measure("bits").lengths
        if (estimate := getattr(length, field)) is not None
    )
    x = _length_axis(rows, "length / training length")
    y = numeric("value", "bits per byte", kind="log", values=[1, 1.5, 2, 2.5, 3, 4, 5, 6, 8])
    return line_panels(rows, style_map(state.spec).values(), x, y, "panel", 3, 300)


def _size_note(state: GridStudy) -> str:
    """The number of texts and documents."""
    rows = [row for cell, _ in _text_models(state) for row in cell.measure("bits").lengths if row.texts]
    if not rows:
        return ""
    largest = max(rows, key=lambda row: row.texts)
    warning = " With so few documents, rely on differences between encodings rather than on absolute values."
    text = f"{largest.texts} texts from {largest.documents} documents, the same for all encodings."
    return text + (warning if largest.documents < 10 else "")


def positions_chart(state: GridStudy) -> Chart:
    """The loss per token by position, in bins of doubling width; a line per encoding."""
    rows = seed_means(
        {**row, "position": (first + 1 + end) / 2, "value": estimate.value}
        for cell, row in _text_models(state)
        for (first, end), estimate in zip(
            pairwise(cell.measure("bits").edges.tolist()), cell.measure("bits").positions, strict=True
        )
        if first >= _MIN_CONTEXT
    )
    x = numeric("position", "position of the token", kind="log", format=",", tickCount=6)
    y = numeric("value", "bits per token", zero=False)
    chart = line_panels(rows, style_map(state.spec).values(), x, y, "task", 2, 260)
    trained = {row.length for cell, _ in _text_models(state) for row in cell.measure("bits").lengths if row.factor == 1}
    if chart is None or len(language_tasks(state.spec)) > 1 or not trained:
        return chart
    return alt.layer(ref_lines({"training length": min(trained)}, vertical=True), chart).properties(height=300)


def extension_table(state: GridStudy) -> Table:
    """Context extension: a row per encoding and method, a column per length, without and with tuning."""
    groups: dict[tuple[str, int, str], dict[float, list[Any]]] = {}
    for name in ("extension", "extension-tuned"):
        for cell, row in _text_models(state, name):
            record = cell.measure(name)
            for each in record.rows:
                key = (_panel(state, row, row["series"]), record.steps, TEXTS["methods"].get(each.method, each.method))
                groups.setdefault(key, {}).setdefault(each.factor, []).append(each)
    factors = sorted({factor for each in groups.values() for factor in each})
    rows: list[list[str | TableCell]] = []
    for (title, steps, method), each in sorted(groups.items(), key=lambda pair: pair[0][:2]):
        settings = dict.fromkeys(row.set for rows in each.values() for row in rows if row.set)
        values = [_method_cell(each.get(factor, [])) for factor in factors]
        rows.append([title, TableCell(method, ("; ".join(settings),)), str(steps), *values])
    columns = ["Encoding", "Change", "Tuning steps", *(TableCell(f"{at:g}×", right=True) for at in factors)]
    return make_table("Context extension", columns, rows, css="small")


def _method_cell(rows: Sequence[Any]) -> TableCell:
    """A method at a length: bits per byte, difference, and whether its interval excludes 0 in every seed."""
    losses, gains = [row.bits.value for row in rows if row.bits], [row.gain for row in rows if row.gain]
    text = fmt(float(np.mean(losses)) if losses else None, 3)
    if not gains or all(row.method == "none" and not row.tuned for row in rows):
        return TableCell(text, right=True)
    gain = fmt_signed(float(np.mean([ci.value for ci in gains])), 3)
    for word, css, sign in (("helps", "tint more", 1), ("harms", "tint less", -1)):
        if all(None not in (ci.low, ci.high) and max(sign * ci.low, sign * ci.high) < 0 for ci in gains):
            return TableCell(text, (gain, word), right=True, css=css, style="--size:26%")
    return TableCell(text, (gain,), right=True)


def needles_chart(state: GridStudy) -> Chart:
    """Accuracy on needles by depth and length, a panel per encoding."""
    rows = seed_means(
        {"panel": _panel(state, row, row["series"]), "factor": n.factor, "depth": n.depth, "value": n.accuracy.value}
        for cell, row in _text_models(state, "needles")
        for n in cell.measure("needles").rows
        if n.accuracy is not None
    )
    if not rows:
        return None
    tips = tooltip(panel="Encoding", factor="Length|~g", depth="Depth|.0%", value="Accuracy|.1%", seeds="Seeds")
    x, y = (nominal(name, sorted({row[name] for row in rows}), title) for name, title in _NEEDLE_AXES.items())
    y["axis"] = {"format": ".0%"}
    chart = heatmap(rows, x, y, "value", title="accuracy", domain=(0, 1), tips=tips, form=".0%")
    return panels(chart, rows, "panel", 4, 22 * len({row["depth"] for row in rows}))


_NEEDLE_AXES = {"factor": "length / training length", "depth": "depth"}


def _chance(state: GridStudy) -> str:
    chances = [cell.measure("needles").guess for cell, _ in _text_models(state, "needles")]
    return f"Chance for a needle, among the letters in use: {percent(chances[0])}." if chances else ""


def copies_chart(state: GridStudy) -> Chart:
    """Gain and accuracy at the second of two equal spans of text, by their distance."""
    rows = seed_means(
        {**row, "panel": _panel(state, row, name), "factor": copy.factor, "value": estimate.value}
        for field, name in (("gain", "Gain (bits per token)"), ("accuracy", "Accuracy"))
        for cell, row in _text_models(state, "copying")
        for copy in cell.measure("copying").rows
        if (estimate := getattr(copy, field)) is not None
    )
    x, y = _length_axis(rows, "distance / training length"), numeric("value", "", zero=False)
    return line_panels(rows, style_map(state.spec).values(), x, y, "panel", 2, 240, free=["y"])


_HEAD_TYPES = (  # the attention of a head type, its title, and the share it is plotted against
    ("previous", "Previous token, positional share", "positional"),
    ("induction", "Token after an earlier copy, symbolic share", "symbolic"),
)


def kinds_chart(state: GridStudy) -> Chart:
    """Each head's attention of a type against its share, a panel per type."""
    rows = []
    for weight, title, share in _HEAD_TYPES:
        for cell, row in _text_models(state, "patterns", "behaviour"):
            weights, shares = getattr(cell.measure("patterns"), weight), getattr(cell.measure("behaviour"), share)
            top = set(np.argsort(-weights, axis=None, kind="stable")[:MAX_HEADS].tolist())
            labels = {"panel": _panel(state, row, title), "series": row["series"]}
            for flat_index, index in enumerate(np.ndindex(weights.shape)):
                if isfinite(shares[index]):
                    head = f"seed {cell.key.seed}, layer {index[0] + 1}, head {index[1] + 1}"
                    numbers = {"attention": float(weights[index]), "share": float(shares[index])}
                    rows.append({**labels, "head": head, **numbers, "size": 1.0 if flat_index in top else 0.2})
    x, y = (numeric(name, name, domain=[0, 1.02], tickCount=5) for name in ("attention", "share"))
    return scatter(rows, style_map(state.spec).values(), x, y, 280, attention="Attention|.2f", share="Share|.2f")


def effects_chart(state: GridStudy) -> Chart:
    """Each head's share of the effects of removing position, sorted in each layer; a panel per encoding."""
    rows = seed_means(
        {"panel": _panel(state, row, row["series"]), "layer": i[0] + 1, "rank": i[1] + 1, "value": float(ranks[i])}
        for cell, row in _text_models(state)
        if (shares := position_shares(cell)) is not None
        for ranks in [-np.sort(-shares, axis=1)]
        for i in np.ndindex(ranks.shape)
    )
    if not rows:
        return None
    tips = tooltip(panel="Encoding", layer="Layer", rank="Rank", value=f"Mean|{PERCENT}", low=f"From|{PERCENT}")
    x, y = (nominal(name, [], title) | {"sort": "ascending"} for name, title in _EFFECT_AXES.items())
    domain = (0, max(row["value"] for row in rows))
    chart = heatmap(rows, x, y, "value", title="share of the effects", domain=domain, tips=tips, form=".0%")
    return panels(chart, rows, "panel", 4, 22 * max(row["layer"] for row in rows))


_EFFECT_AXES = {"rank": "head, sorted by share", "layer": "layer"}
