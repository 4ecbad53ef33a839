"""The parts of a grid study's page for language models: loss by length and position, needles, copies, heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np

from toeplens.ground.words import fixed, listed, percent, signed
from toeplens.report.charts import PERCENT, alt, heat, intervals, names, number, reference, tooltip
from toeplens.report.models import (
    TEXTS,
    Chart,
    Rows,
    best_of,
    by_task,
    encodings,
    figure,
    interval_text,
    language_tasks,
    lines,
    models,
    panels,
    scatter,
    seed_means,
)
from toeplens.report.tables import Cell, Table, make_table
from toeplens.report.theme import style
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid, language
from toeplens.studies.grid.language import LONG, TOP, bits, is_language, position_shares

_FAR = f"{LONG:g} training lengths"
_LATER = 8  # with so little context all encodings are similar


def parts(state: Grid) -> dict[str, Any]:
    """Figures, tables and texts of language models, by the place where the page shows them."""
    prices, extended = prices_table(state), extension_table(state)
    return {
        "picture": figure("loss", loss_chart(state)),
        "loss": [TEXTS["prices"], prices] if prices.body else [],
        "longer": [*figure("bits", bits_chart(state)), _counted(state), *figure("positions", positions_chart(state))],
        "extension": [TEXTS["extension"], extended] if extended.body else [],
        "behaviours": [*figure("needles", needles_chart(state)), _guess(state), *figure("copies", copies_chart(state))],
        "heads": figure("kinds", kinds_chart(state)),
        "effects": figure("position-share", effects_chart(state)),
    }


def answers(state: Grid) -> list[str]:
    """Per language task: the encoding with the lowest loss at the training length, and on longer texts."""
    made, tasks = [], list(map(state.spec.title_of, language_tasks(state.spec)))
    near, far = (by_task(state, of, lower=True, grain=0.0) for of in (bits, _end))
    for task in [each for each in tasks if each in near]:
        best, several = near[task], f"{task}: " if len(tasks) > 1 else ""
        ties = f"; no clear difference to {listed(best_of(best)[1:])}" if len(best_of(best)) > 1 else ""
        loss = f"{interval_text(best[0].mean)} bits per byte{ties}."
        made.append(f"{several}{best[0].title} has the lowest loss at the training length, {loss}")
        if task in far:
            first, last = far[task][0], far[task][-1]
            text = f"At the end of texts of {_FAR}: {first.title} ({interval_text(first.mean)})"
            made.append(
                f"{text}; {last.title} is worst ({fixed(last.mean.value, 3)})." if last != first else f"{text}."
            )
    return made


def _end(cell: CellResult) -> float:
    """Bits per byte at the end of texts of `LONG` training lengths."""
    row = cell.measure("bits").at(LONG) if is_language(cell) else None
    return float("nan") if row is None or row.end is None else row.end.value


def _evaluated(state: Grid, *measures: str) -> Iterator[tuple[CellResult, dict[str, Any]]]:
    """The evaluated language models that have all of the measures."""
    for cell, row in models(state):
        if is_language(cell) and all(cell.measure(name) is not None for name in measures):
            yield cell, row


def _view(state: Grid, row: dict[str, Any], name: str) -> str:
    """The name of a panel, with the task if there are several language tasks."""
    return f"{row['task']}: {name}" if len(language_tasks(state.spec)) > 1 else name


# ---- loss ------------------------------------------------------------------------------------------------------------


def loss_chart(state: Grid) -> Chart:
    """Bits per byte of each encoding at the training length and on longer texts, with intervals over seeds."""
    views: dict[str, Callable[[CellResult], float]] = {"At the training length": bits, f"End of texts of {_FAR}": _end}
    rows = seed_means(
        (
            {"panel": _view(state, row, name), "encoding": row["series"], "series": "mean", "value": of(cell)}
            for name, of in views.items()
            for cell, row in _evaluated(state)
        ),
        grain=0.0,
    )
    if not rows:
        return None
    tips = tooltip(encoding="Encoding", value="Bits per byte|.3f", low="From|.3f", high="To|.3f", seeds="Seeds")
    order = [row["encoding"] for row in sorted(rows, key=lambda row: (row["panel"] != rows[0]["panel"], row["value"]))]
    x, y = number("value", "bits per byte", zero=False, tickCount=5), names("encoding", order)
    chart = intervals(rows, x, y, [style("mean", "rope")], tips=tips)
    return panels(chart, rows, "panel", 2, 24 * len(set(order)), ["x"])


def prices_table(state: Grid) -> Table:
    """Benefits and costs of each encoding, best first, with n-gram baselines."""
    looks, every = encodings(state.spec), language.language_rows(state.spec, state.results)
    rows: list[list[str | Cell]] = []
    for task in dict.fromkeys(row.task for row in every):
        mine = [row for row in every if row.task == task]
        fastest = min((row.seconds for row in mine if row.seconds), default=None)
        name = f"{state.spec.title_of(task)}: " if len({row.task for row in every}) > 1 else ""
        counted: dict[str, list[float]] = {}
        for row in mine:
            cells = [c for c in state.results.of(task, row.label) if c.status == "complete" and is_language(c)]
            for order, value in (pair for cell in cells for pair in cell.measure("bits").ngrams.items()):
                counted.setdefault(order, []).append(value)
            loss = Cell(fixed(row.bits, 3), (_range(cells, bits),), right=True)
            far = Cell(signed(row.lost, 3), (_range(cells, language.lost),), right=True)
            relative = fixed(row.seconds / fastest if row.seconds and fastest else None)
            line = [percent(row.needle), percent(row.needle_long), fixed(row.copied, 2), percent(row.deposit)]
            first = Cell(name + row.title, sign=looks.get(row.label))
            rows.append([first, loss, far, *line, f"{row.parameters:,}", relative])
        for order in sorted(counted, key=int):
            first = Cell(f"{name}{int(order) + 1}-gram model", row_css="guess")
            rows.append([first, fixed(float(np.mean(counted[order])), 3), *[""] * 7])
    columns = ["Bits per byte", f"Loss at {LONG:g}×", "Needles at 1×", f"Needles at {LONG:g}×", "Copy gain"]
    columns += ["Position in one head", "Parameters", "Relative time"]
    heads = ["Encoding", *(Cell(text, right=True) for text in columns)]
    note = "Mean over seeds, best first. Small print: lowest and highest seed."
    return make_table("Benefits and costs of encodings", heads, rows, right=range(1, 9), note=note, css="small")


def _range(cells: Sequence[CellResult], of: Callable[[CellResult], float]) -> str:
    found = [value for cell in cells if isfinite(value := of(cell))]
    return f"{fixed(min(found), 3)} to {fixed(max(found), 3)}".replace(" ", "\u00a0") if len(found) > 1 else ""


# ---- longer texts ----------------------------------------------------------------------------------------------------


def _length_axis(rows: Rows, title: str) -> dict[str, Any]:
    ticks = sorted({row["factor"] for row in rows}) or [1.0]
    return number("factor", title, kind="log", values=ticks, domain=[ticks[0], ticks[-1]], format="~g")


def bits_chart(state: Grid) -> Chart:
    """Bits per byte by length of the text, a panel per way to evaluate."""
    rows = seed_means(
        {**row, "panel": _view(state, row, name), "factor": length.factor, "value": found.value}
        for part, name in (("end", "End of the text"), ("whole", "Whole text"), ("sliding", "Sliding window"))
        for cell, row in _evaluated(state)
        for length in cell.measure("bits").lengths
        if (found := getattr(length, part)) is not None
    )
    x = _length_axis(rows, "length / training length")
    y = number("value", "bits per byte", kind="log", values=[1, 1.5, 2, 2.5, 3, 4, 5, 6, 8])
    return lines(rows, encodings(state.spec).values(), x, y, "panel", 3, 300)


def _counted(state: Grid) -> str:
    """The number of texts and documents."""
    rows = [row for cell, _ in _evaluated(state) for row in cell.measure("bits").lengths if row.texts]
    if not rows:
        return ""
    most = max(rows, key=lambda row: row.texts)
    few = " With so few documents, rely on differences between encodings rather than on absolute values."
    counted = f"{most.texts} texts from {most.documents} documents, the same for all encodings."
    return counted + (few if most.documents < 10 else "")


def positions_chart(state: Grid) -> Chart:
    """The loss per token by position, in bins of doubling width; a line per encoding."""
    rows = seed_means(
        {**row, "position": (first + 1 + end) / 2, "value": found.value}
        for cell, row in _evaluated(state)
        for (first, end), found in zip(
            pairwise(cell.measure("bits").edges.tolist()), cell.measure("bits").positions, strict=True
        )
        if first >= _LATER
    )
    x = number("position", "position of the token", kind="log", format=",", tickCount=6)
    y = number("value", "bits per token", zero=False)
    chart = lines(rows, encodings(state.spec).values(), x, y, "task", 2, 260)
    trained = {row.length for cell, _ in _evaluated(state) for row in cell.measure("bits").lengths if row.factor == 1}
    if chart is None or len(language_tasks(state.spec)) > 1 or not trained:
        return chart
    return alt.layer(reference({"training length": min(trained)}, vertical=True), chart).properties(height=300)


def extension_table(state: Grid) -> Table:
    """Context extension: a row per encoding and method, a column per length, without and with tuning."""
    found: dict[tuple[str, int, str], dict[float, list[Any]]] = {}
    for name in ("extension", "extension-tuned"):
        for cell, row in _evaluated(state, name):
            made = cell.measure(name)
            for each in made.rows:
                place = (_view(state, row, row["series"]), made.steps, TEXTS["methods"].get(each.method, each.method))
                found.setdefault(place, {}).setdefault(each.factor, []).append(each)
    factors = sorted({factor for each in found.values() for factor in each})
    rows: list[list[str | Cell]] = []
    for (title, steps, method), each in sorted(found.items(), key=lambda pair: pair[0][:2]):
        settings = dict.fromkeys(row.set for rows in each.values() for row in rows if row.set)
        values = [_way(each.get(factor, [])) for factor in factors]
        rows.append([title, Cell(method, ("; ".join(settings),)), str(steps), *values])
    columns = ["Encoding", "Change", "Tuning steps", *(Cell(f"{at:g}×", right=True) for at in factors)]
    return make_table("Context extension", columns, rows, css="small")


def _way(rows: Sequence[Any]) -> Cell:
    """A method at a length: bits per byte, difference, and whether its interval excludes 0 in every seed."""
    known, gains = [row.bits.value for row in rows if row.bits], [row.gain for row in rows if row.gain]
    text = fixed(float(np.mean(known)) if known else None, 3)
    if not gains or all(row.method == "none" and not row.tuned for row in rows):
        return Cell(text, right=True)
    gain = signed(float(np.mean([one.value for one in gains])), 3)
    for word, css, sign in (("helps", "tint more", 1), ("harms", "tint less", -1)):
        if all(None not in (one.low, one.high) and max(sign * one.low, sign * one.high) < 0 for one in gains):
            return Cell(text, (gain, word), right=True, css=css, style="--size:26%")
    return Cell(text, (gain,), right=True)


# ---- needles and copies ----------------------------------------------------------------------------------------------


def needles_chart(state: Grid) -> Chart:
    """Accuracy on needles by depth and length, a panel per encoding."""
    rows = seed_means(
        {"panel": _view(state, row, row["series"]), "factor": n.factor, "depth": n.depth, "value": n.accuracy.value}
        for cell, row in _evaluated(state, "needles")
        for n in cell.measure("needles").rows
        if n.accuracy is not None
    )
    if not rows:
        return None
    tips = tooltip(panel="Encoding", factor="Length|~g", depth="Depth|.0%", value="Accuracy|.1%", seeds="Seeds")
    x, y = (names(name, sorted({row[name] for row in rows}), title) for name, title in _NEEDLES.items())
    y["axis"] = {"format": ".0%"}
    chart = heat(rows, x, y, "value", title="accuracy", domain=(0, 1), tips=tips, form=".0%")
    return panels(chart, rows, "panel", 4, 22 * len({row["depth"] for row in rows}))


_NEEDLES = {"factor": "length / training length", "depth": "depth"}


def _guess(state: Grid) -> str:
    found = [cell.measure("needles").guess for cell, _ in _evaluated(state, "needles")]
    return f"Chance for a needle, among the letters in use: {percent(found[0])}." if found else ""


def copies_chart(state: Grid) -> Chart:
    """Gain and accuracy at the second of two equal spans of text, by their distance."""
    rows = seed_means(
        {**row, "panel": _view(state, row, name), "factor": each.factor, "value": found.value}
        for part, name in (("gain", "Gain (bits per token)"), ("accuracy", "Accuracy"))
        for cell, row in _evaluated(state, "copying")
        for each in cell.measure("copying").rows
        if (found := getattr(each, part)) is not None
    )
    x, y = _length_axis(rows, "distance / training length"), number("value", "", zero=False)
    return lines(rows, encodings(state.spec).values(), x, y, "panel", 2, 240, free=["y"])


# ---- heads -----------------------------------------------------------------------------------------------------------

_OF_KIND = (  # the attention of a head type, its title, and the share it is plotted against
    ("previous", "Previous token, positional share", "positional"),
    ("induction", "Token after an earlier copy, symbolic share", "symbolic"),
)


def kinds_chart(state: Grid) -> Chart:
    """Each head's attention of a type against its share, a panel per type."""
    rows = []
    for weight, title, share in _OF_KIND:
        for cell, row in _evaluated(state, "patterns", "behaviour"):
            weights, shares = getattr(cell.measure("patterns"), weight), getattr(cell.measure("behaviour"), share)
            top = set(np.argsort(-weights, axis=None, kind="stable")[:TOP].tolist())
            about = {"panel": _view(state, row, title), "series": row["series"]}
            for place, at in enumerate(np.ndindex(weights.shape)):
                if isfinite(shares[at]):
                    head = f"seed {cell.key.seed}, layer {at[0] + 1}, head {at[1] + 1}"
                    numbers = {"attention": float(weights[at]), "share": float(shares[at])}
                    rows.append({**about, "head": head, **numbers, "size": 1.0 if place in top else 0.2})
    x, y = (number(name, name, domain=[0, 1.02], tickCount=5) for name in ("attention", "share"))
    return scatter(rows, encodings(state.spec).values(), x, y, 280, attention="Attention|.2f", share="Share|.2f")


def effects_chart(state: Grid) -> Chart:
    """Each head's share of the effects of removing position, sorted in each layer; a panel per encoding."""
    rows = seed_means(
        {"panel": _view(state, row, row["series"]), "layer": at[0] + 1, "rank": at[1] + 1, "value": float(ranks[at])}
        for cell, row in _evaluated(state)
        if (found := position_shares(cell)) is not None
        for ranks in [-np.sort(-found, axis=1)]
        for at in np.ndindex(ranks.shape)
    )
    if not rows:
        return None
    tips = tooltip(panel="Encoding", layer="Layer", rank="Rank", value=f"Mean|{PERCENT}", low=f"From|{PERCENT}")
    x, y = (names(name, [], title) | {"sort": "ascending"} for name, title in _EFFECTS.items())
    domain = (0, max(row["value"] for row in rows))
    chart = heat(rows, x, y, "value", title="share of the effects", domain=domain, tips=tips, form=".0%")
    return panels(chart, rows, "panel", 4, 22 * max(row["layer"] for row in rows))


_EFFECTS = {"rank": "head, sorted by share", "layer": "layer"}
