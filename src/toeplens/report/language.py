"""The parts of a grid study's page for language models: loss by length and position, needles, copies, heads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np

from toeplens.ground.words import fixed, listed, percent, signed
from toeplens.report.charts import PERCENT, alt, curves, heat, intervals, names, number, reference, tooltip
from toeplens.report.models import (
    Chart,
    Parts,
    Rows,
    best_of,
    by_task,
    drawn,
    encoding_styles,
    figure,
    interval_text,
    language_tasks,
    models,
    panels,
    scatter,
    section,
    seed_means,
)
from toeplens.report.tables import Cell, Table, make_table
from toeplens.report.theme import style
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid, language
from toeplens.studies.grid.language import LONG, TOP, bits, is_language, position_shares

_FAR = f"{LONG:g} training lengths"
_LATER = 8  # with so little context all encodings are similar
_ROOM = 0.15  # upper end of the close-up: bits above the worst encoding at the training length
_LOSS = (
    "Bits per byte on held-out documents: at the training length, and at the end of texts that are longer than in "
    "training. Mean with its 95% interval over seeds; lower is better. One seed has no interval."
)
_BITS = (
    "Bits per byte on the last half training length of the texts, the same tokens at every length, so a rising line "
    "shows the harm of a longer context. Mean over seeds, bands show the range over seeds (not over documents). Lines "
    "that leave the plot rise further; they are shown in full under “Other ways to evaluate”."
)
_WAYS = (
    "End of the text: as above, in full. Increase: due to the text before the last training length. Whole "
    "text: all tokens, which differ between lengths. Sliding window: of the training length, moved by half of it."
)
_POSITIONS = (
    "Loss of a token by its position in the longest evaluated texts, in bins of doubling width. A falling line means "
    "that more context helps; a rise beyond the training length (dashed) shows where the encoding fails. Mean over "
    "seeds, bands show the range. An encoding with a smaller maximum length reads only the ends of the texts."
)
_NEEDLES = (
    "A random key and its value are inserted into a text, and the key is repeated at the end. Cells: accuracy on the "
    "value’s tokens, mean over seeds, by length of the text and depth of the needle (100%: just before the question). "
    "Each cell has few needles, so single cells are noisy."
)
_COPIES = (
    "A span of one document is inserted twice into another text. Gain: bits per token saved at the second copy, "
    "compared with a different span in place of the first; accuracy: correctly predicted tokens. Distances beyond 1 "
    "were never seen in training. Mean over seeds, bands show the range."
)
_KINDS = (
    "A mark per head and seed. Attention on the previous token (on test texts) against the positional share, and on "
    f"the token after an earlier copy (induction, on random tokens repeated once) against the symbolic share. Large "
    f"marks: the {TOP} heads of a model with the most such attention, which the claims are about."
)
_POSITION = (
    "Position is removed from one head at a time (rotation frozen, bias made uniform). Cells: the head’s share of the "
    "sum of all loss increases; heads without a significant effect count as 0. Mean over seeds, each with the heads of "
    "a layer sorted by their share. Heads can replace each other, so a head with a small share may still matter."
)
_WITHOUT = (
    "Loss increase in 10⁻³ nats per token when one head is zero-ablated, on the test texts. Mean over seeds, each with "
    "the heads of a layer sorted by their effect."
)
_PRICES = (
    f"Loss at {LONG:g}×: increase in bits per byte at the end of a text of {_FAR} if the model reads all of it instead "
    "of only the last training length; negative if the longer context helps. Position in one head: the largest share "
    "of one head when the effects of removing position from each head are added up. Copy gain: bits per token saved by "
    "an earlier copy. n-gram models are fitted on the training text and evaluated on the same texts. Time is wall time."
)


def parts(state: Grid) -> dict[str, Any]:
    """Figures, tables and texts of language models, by the place where the page shows them."""
    lookup: Parts = [
        *figure("needles", "Needles by depth and length", needles_chart(state), _NEEDLES),
        _guess(state),
        *figure("copies", "Copying by distance", copies_chart(state), _COPIES),
    ]
    effects = _effects(state, position_shares, PERCENT)
    lost = _effects(state, lambda cell: None if cell.by_loss is None else 1000 * cell.by_loss.drops, ".0f")
    extended, lacking, prices = extension_table(state), missing_table(state), prices_table(state)
    return {
        "picture": figure("loss", "Loss by encoding", loss_chart(state), _LOSS),
        "loss": [_PRICES, prices] if prices.body else [],
        "longer": [
            *figure("bits", "Loss at the end of longer texts", bits_chart(state), _BITS),
            _counted(state),
            *figure("positions", "Loss by position", positions_chart(state), _POSITIONS),
        ],
        "longer details": {
            "Other ways to evaluate": figure("evaluations", "Loss by length", evaluations_chart(state), _WAYS),
            "Context extension after training": [_EXTENSION, extended] if extended.body else [],
        },
        "behaviours": section("Does it find and copy what it has read?", "behaviours", lookup),
        "heads": figure("kinds", "Head types", kinds_chart(state), _KINDS),
        "heads details": {
            "Where position acts": [
                *figure("position-share", "Effect of removing position from each head", effects, _POSITION),
                _effectless(state),
            ],
            "Effect of each head": figure("without", "Ablation effect of each head", lost, _WITHOUT),
        },
        "missing": {"Missing measures": [lacking] if lacking.body else []},
    }


def answers(state: Grid) -> list[str]:
    """Per language task: the encoding with the lowest loss at the training length, and on longer texts."""
    made = []
    near, far = (by_task(state, of, lower=True, grain=0.0) for of in (bits, _end))
    for task in map(state.spec.title_of, language_tasks(state.spec)):
        if task not in near:
            continue
        best, several = near[task], f"{task}: " if len(language_tasks(state.spec)) > 1 else ""
        ties = f"; {listed(best_of(best)[1:])} cannot be told apart from it" if len(best_of(best)) > 1 else ""
        text = f"{several}{best[0].title} has the lowest loss at the training length, "
        text += f"{interval_text(best[0].mean, 3)} bits per byte{ties}."
        if task in far:
            first, last = far[task][0], far[task][-1]
            text += f" At the end of texts of {_FAR} it is {first.title} ({interval_text(first.mean, 3)})"
            text += f"; {last.title} is worst ({fixed(last.mean.value, 3)})." if last is not first else "."
        made.append(text)
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


def _times(factor: float) -> str:
    return {0.25: "¼", 0.5: "½"}.get(factor, f"{factor:g}")


# ---- loss ------------------------------------------------------------------------------------------------------------


def loss_chart(state: Grid) -> Chart:
    """Bits per byte of each encoding at the training length and on longer texts, with intervals over seeds."""
    views = {"At the training length": bits, f"End of texts of {_FAR}": _end}
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
    x = number("value", "bits per byte", zero=False, tickCount=5)
    chart = intervals(rows, x, names("encoding", order), [style("mean", "rope")], tips=tips)
    return panels(chart, rows, "panel", columns=2, height=24 * len(set(order)), free=["x"])


def prices_table(state: Grid) -> Table:
    """Benefits and costs of each encoding, best first, with n-gram baselines."""
    looks, rows = encoding_styles(state.spec), language.language_rows(state.spec, state.results)
    several = len({row.task for row in rows}) > 1
    lines: list[list[str | Cell]] = []
    for task in dict.fromkeys(row.task for row in rows):
        mine = [row for row in rows if row.task == task]
        fastest = min((row.seconds for row in mine if row.seconds), default=None)
        cells = {row.label: [c for c in state.results.of(task, row.label) if c.status == "complete"] for row in mine}
        name = f"{state.spec.title_of(task)}: " if several else ""
        for row in mine:
            lines.append(
                [
                    Cell(f"{name}{row.title}", sign=looks.get(row.label)),
                    Cell(fixed(row.bits, 3), (_range(cells[row.label], bits),)),
                    Cell(signed(row.lost, 3), (_range(cells[row.label], language.lost),)),
                    percent(row.needle),
                    percent(row.needle_long),
                    fixed(row.copied, 2),
                    percent(row.deposit),
                    f"{row.parameters:,}",
                    fixed(row.seconds / fastest if row.seconds and fastest else None),
                ]
            )
        measured = [found for each in cells.values() for cell in each if (found := cell.measure("bits"))]
        for order in sorted({order for found in measured for order in found.ngrams}, key=int):
            value = float(np.mean([found.ngrams[order] for found in measured if order in found.ngrams]))
            lines.append([Cell(f"{name}{int(order) + 1}-gram model", row_css="guess"), fixed(value, 3), *[""] * 7])
    columns = ["Encoding", "Bits per byte", f"Loss at {LONG:g}×", "Needles at 1×", f"Needles at {LONG:g}×", "Copy gain"]
    columns += ["Position in one head", "Parameters", "Relative time"]
    right = range(1, 9)
    lines = [[line[0], *(_right(each) for each in line[1:])] for line in lines]
    heads = [Cell(text, right=place in right) for place, text in enumerate(columns)]
    note = "Mean over seeds, best first. Small print: lowest and highest seed."
    return make_table("Benefits and costs of encodings", heads, lines, note=note, css="small")


def _right(cell: str | Cell) -> Cell:
    return Cell(cell.text, cell.small, right=True) if isinstance(cell, Cell) else Cell(cell, right=True)


def _range(cells: Sequence[CellResult], of: Callable[[CellResult], float]) -> str:
    found = [value for cell in cells if is_language(cell) and isfinite(value := of(cell))]
    return f"{fixed(min(found), 3)}\u00a0to\u00a0{fixed(max(found), 3)}" if len(found) > 1 else ""


# ---- longer texts ----------------------------------------------------------------------------------------------------


def _by_length(state: Grid, ways: dict[str, str]) -> Rows:
    return seed_means(
        {**row, "panel": _view(state, row, name), "factor": length.factor, "value": found.value}
        for part, name in ways.items()
        for cell, row in _evaluated(state)
        for length in cell.measure("bits").lengths
        if (found := getattr(length, part)) is not None
    )


def _length_axis(rows: Rows, title: str = "length / training length") -> dict[str, Any]:
    ticks = sorted({row["factor"] for row in rows})
    return number("factor", title, kind="log", values=ticks, domain=[ticks[0], ticks[-1]], format="~g")


_TIPS = {"series": "Encoding", "value": "Mean|.3f", "low": "From|.3f", "high": "To|.3f", "seeds": "Seeds"}


def bits_chart(state: Grid) -> Chart:
    """Bits per byte at the end of texts by their length: a close-up of the lower part."""
    rows = _by_length(state, {"end": "End of the text"})
    if not rows:
        return None
    looks, values = drawn(encoding_styles(state.spec).values(), rows), [row["value"] for row in rows]
    first = min(row["factor"] for row in rows)
    top = min(max(values), max(row["value"] for row in rows if row["factor"] == first) + _ROOM)
    room = 0.06 * (top - min(values)) or 0.1
    y = number("value", "bits per byte", domain=[min(values) - room, top + room], zero=False)
    tips = tooltip(factor="Times the training length|.2~g", **_TIPS)
    chart = curves(rows, _length_axis(rows), y, looks, low="low", high="high", tips=tips)
    return panels(chart.properties(height=300), rows, "task", columns=2, height=260)


def evaluations_chart(state: Grid) -> Chart:
    """The loss by length in four evaluations."""
    ways = {"end": "End of the text", "gain": "Increase", "whole": "Whole text", "sliding": "Sliding window"}
    rows = _by_length(state, ways)
    if not rows:
        return None
    looks, y = drawn(encoding_styles(state.spec).values(), rows), number("value", "bits per byte", zero=False)
    tips = tooltip(factor="Times the training length|.2~g", **_TIPS)
    chart = curves(rows, _length_axis(rows), y, looks, low="low", high="high", tips=tips)
    return panels(chart, rows, "panel", columns=2, height=220, free=["y"])


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
        {**row, "position": (first + 1 + end) / 2, "bin": f"{first + 1:,}–{end:,}", "value": found.value}
        for cell, row in _evaluated(state)
        for (first, end), found in zip(
            pairwise(cell.measure("bits").edges.tolist()), cell.measure("bits").positions, strict=True
        )
        if first >= _LATER
    )
    if not rows:
        return None
    cell = next(_evaluated(state))[0]
    trained = next((row.length for row in cell.measure("bits").lengths if row.factor == 1), 0)
    ends = [of(row["position"] for row in rows) for of in (min, max)]
    x = number("position", "position of the token", kind="log", domain=ends, format=",", tickCount=6)
    tips = tooltip(bin="Positions", **_TIPS)
    looks, y = drawn(encoding_styles(state.spec).values(), rows), number("value", "bits per token", zero=False)
    chart = curves(rows, x, y, looks, low="low", high="high", tips=tips).properties(height=300)
    if trained and len(language_tasks(state.spec)) == 1:
        chart = alt.layer(reference({"training length": trained}, vertical=True), chart).properties(height=300)
    return panels(chart, rows, "task", columns=2, height=260)


_METHODS = {
    "none": "Unchanged",
    "interpolation": "Position interpolation",
    "ntk": "NTK-aware",
    "dynamic": "Dynamic NTK",
    "yarn": "YaRN",
    "longrope": "LongRoPE",
    "p-rope": "p-RoPE, lowest quarter frozen",
    "rerope": "ReRoPE",
    "self-extend": "Self-Extend",
    "dropped": "Position dropped",
    "scaled": "Scaled logits",
}
_EXTENSION = (
    "The rotation of trained models is changed to extend the context. Cells: bits per byte at the end of longer texts "
    "and, below, the difference from the unchanged model on the same texts (negative is better). Helps, harms: the 95% "
    "interval over documents excludes 0 in every seed; otherwise the number of seeds where it does. Tuning is a few "
    "training steps with the change; compare a tuned change with the tuned unchanged model. Intervals aren’t corrected "
    "for the many comparisons."
)


def extension_table(state: Grid) -> Table:
    """Context extension: a row per encoding and method, a column per length, without and with tuning."""
    found: dict[tuple[str, str, int], dict[float, list[Any]]] = {}
    for name in ("extension", "extension-tuned"):
        for cell, row in _evaluated(state, name):
            made = cell.measure(name)
            for each in made.rows:
                place = (_view(state, row, row["series"]), _METHODS.get(each.method, each.method), made.steps)
                found.setdefault(place, {}).setdefault(each.factor, []).append(each)
    factors = sorted({factor for each in found.values() for factor in each})
    lines = [
        [title, method, str(steps), *(_way(each.get(factor, [])) for factor in factors), _settings(each)]
        for (title, method, steps), each in found.items()
    ]
    columns = ["Encoding", "Change", "Tuning steps", *(Cell(f"{_times(at)}×", right=True) for at in factors)]
    return make_table("Context extension", [*columns, "Settings"], lines, css="small")


def _way(rows: Sequence[Any]) -> Cell:
    """A method at a length: bits per byte, difference, and whether its interval excludes 0 in every seed."""
    known = [row.bits.value for row in rows if row.bits]
    text = fixed(float(np.mean(known)) if known else None, 3)
    gains = [row.gain for row in rows if row.gain]
    if not known or not gains or all(row.method == "none" and not row.tuned for row in rows):
        return Cell(text, right=True)
    helps = sum(one.high is not None and one.high < 0 for one in gains)
    harms = sum(one.low is not None and one.low > 0 for one in gains)
    gain = signed(float(np.mean([one.value for one in gains])), 3)
    if len(gains) in (helps, harms):
        css = f"tint {'more' if helps else 'less'}"
        return Cell(text, (gain, "helps" if helps else "harms"), right=True, css=css, style="--size:26%")
    some = f"{helps + harms} of {len(gains)} seeds" if helps or harms else ""
    return Cell(text, (gain, some), right=True)


def _settings(found: dict[float, list[Any]]) -> str:
    return "; ".join(dict.fromkeys(row.set for rows in found.values() for row in rows if row.set))


# ---- needles and copies ----------------------------------------------------------------------------------------------


def needles_chart(state: Grid) -> Chart:
    """Accuracy on needles by depth and length, a panel per encoding."""
    rows = seed_means(
        {
            "panel": _view(state, row, row["series"]),
            "factor": f"{_times(each.factor)}×",
            "depth": f"{each.depth:.0%}",
            "order": (each.factor, each.depth),
            "value": each.accuracy.value if each.accuracy else float("nan"),
        }
        for cell, row in _evaluated(state, "needles")
        for each in cell.measure("needles").rows
    )
    if not rows:
        return None
    places = [row.pop("order") for row in rows]
    factors, depths = (sorted({each[at] for each in places}) for at in (0, 1))
    tips = tooltip(
        panel="Encoding", factor="Length", depth="Depth", value="Accuracy|.1%", low="From|.1%", high="To|.1%"
    )
    x = names("factor", [f"{_times(factor)}×" for factor in factors], "length / training length")
    y = names("depth", [f"{depth:.0%}" for depth in depths], "depth")
    chart = heat(rows, x, y, "value", title="accuracy", domain=(0, 1), tips=tips, form=".0%")
    return panels(chart, rows, "panel", height=22 * len(depths))


def _guess(state: Grid) -> str:
    cell = next((cell for cell, _ in _evaluated(state, "needles")), None)
    return (
        "" if cell is None else f"Chance among the letters in use: accuracy {percent(cell.measure('needles').guess)}."
    )


def copies_chart(state: Grid) -> Chart:
    """Gain and accuracy at the second of two equal spans of text, by their distance."""
    rows = seed_means(
        {**row, "panel": _view(state, row, name), "factor": each.factor, "value": found.value}
        for part, name in (("gain", "Gain (bits per token)"), ("accuracy", "Accuracy"))
        for cell, row in _evaluated(state, "copying")
        for each in cell.measure("copying").rows
        if (found := getattr(each, part)) is not None
    )
    if not rows:
        return None
    tips = tooltip(factor="Distance|.2~g", **_TIPS)
    looks = drawn(encoding_styles(state.spec).values(), rows)
    x, y = _length_axis(rows, "distance / training length"), number("value", "", zero=False)
    chart = curves(rows, x, y, looks, low="low", high="high", tips=tips)
    return panels(chart, rows, "panel", columns=2, height=240, free=["y"])


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
            for place, at in enumerate(np.ndindex(weights.shape)):
                if isfinite(shares[at]):
                    head = f"seed {cell.key.seed}, layer {at[0] + 1}, head {at[1] + 1}"
                    about = {"panel": _view(state, row, title), "series": row["series"], "head": head}
                    size = 1.0 if place in top else 0.2
                    rows.append({**about, "attention": float(weights[at]), "share": float(shares[at]), "size": size})
    if not rows:
        return None
    x, y = (number(name, title, domain=[0, 1.02], tickCount=5) for name, title in (("attention",) * 2, ("share",) * 2))
    tips = tooltip(series="Encoding", head="Head", attention="Attention|.2f", share="Share|.2f")
    chart = scatter(rows, x, y, drawn(encoding_styles(state.spec).values(), rows), tips)
    return panels(chart, rows, "panel", columns=2, height=280)


def _effects(state: Grid, of: Callable[[CellResult], Any], form: str) -> Chart:
    """Heads of each layer sorted by an effect, mean over seeds; a panel per encoding."""
    rows = seed_means(
        {"panel": _view(state, row, row["series"]), "layer": at[0] + 1, "rank": at[1] + 1, "value": float(ranks[at])}
        for cell, row in _evaluated(state)
        if (found := of(cell)) is not None
        for ranks in [-np.sort(-found, axis=1)]
        for at in np.ndindex(ranks.shape)
    )
    if not rows:
        return None
    top, low = max(row["value"] for row in rows), min(0.0, *(row["value"] for row in rows))
    tips = tooltip(panel="Encoding", layer="Layer", rank="Rank", value=f"Mean|{form}", low=f"From|{form}")
    x, y = (
        {**names(name, [], title), "sort": "ascending"} for name, title in (("rank", "head, sorted"), ("layer", ""))
    )
    domain = (-top, top) if low < 0 else (0, top or 1.0)
    chart = heat(rows, x, y, "value", title="effect", domain=domain, tips=tips, form=form.replace(".1%", ".0%"))
    return panels(chart, rows, "panel", height=22 * max(row["layer"] for row in rows))


def _effectless(state: Grid) -> str:
    """Encodings without any effect of removing position."""
    found: dict[str, list[bool]] = {}
    for cell, row in _evaluated(state):
        found.setdefault(row["series"], []).append(position_shares(cell) is not None)
    titles = [title for title, each in found.items() if not any(each)]
    return f"Not shown, without any effect: {listed(titles)}." if titles else ""


# ---- what is missing -------------------------------------------------------------------------------------------------

_NAMES = {
    "bits": "longer texts",
    "needles": "needles",
    "copying": "copies",
    "extension": "context extension without tuning",
    "extension-tuned": "context extension after tuning",
    "patterns": "head types",
    "position-loss": "effect of removing position from a head",
}
_GIVEN = re.compile(r"'[^']*' was given; |, got '[^']*'")  # the encoding's name, which the row has already


def missing_table(state: Grid) -> Table:
    """Missing measures of the evaluated language models, their encodings, and the reasons."""
    found: dict[tuple[str, str, str], tuple[list[float], list[str]]] = {}
    evaluated: dict[str, set[str]] = {}
    for cell, row in _evaluated(state):
        evaluated.setdefault(row["task"], set()).add(row["series"])
        for name, factor, why in _reasons(cell):
            factors, titles = found.setdefault((row["task"], name, _GIVEN.sub("", why)), ([], []))
            factors += [factor] if factor is not None and factor not in factors else []
            titles += [row["series"]] if row["series"] not in titles else []
    lines = []
    for (task, name, why), (factors, titles) in found.items():
        at = f" at {listed(map(_times, sorted(factors)))} × the training length" if factors else ""
        whose = "all encodings" if len(titles) == len(evaluated[task]) > 1 else listed(titles)
        lines.append([f"{name}{at}", f"{task}, {whose}" if len(evaluated) > 1 else whose, why])
    return make_table("Missing measures", ["Measure", "Encodings", "Reason"], lines, css="small")


def _reasons(cell: CellResult) -> Iterator[tuple[str, float | None, str]]:
    """Missing measures, their length (None: all), and the reason."""
    for name, content in cell.measures.items():
        if set(content) == {"why"}:
            yield _NAMES.get(name, f"the measure {name}"), None, content["why"]
    for name in ("bits", "needles", "copying", "extension", "extension-tuned"):
        found = cell.measure(name)
        for row in (found.lengths if name == "bits" else found.rows) if found else ():
            if row.why:
                method = f", {row.method}" if name.startswith("extension") else ""
                yield _NAMES[name] + method, row.factor, row.why
