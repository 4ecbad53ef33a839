"""The page of a grid study: which encoding is best, does it hold on longer sequences, and what do its heads follow?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite, log10
from typing import Any

import numpy as np
from markupsafe import Markup

from toeplens.engine import FACTORS
from toeplens.report import language
from toeplens.report.charts import interval_chart, nominal, numeric, share_plane, tooltip
from toeplens.report.grid_data import (
    TEXTS,
    Chart,
    EncodingRank,
    Parts,
    Rows,
    accuracy_text,
    best_of,
    figure,
    language_tasks,
    line_panels,
    mean_text,
    models,
    panels,
    rankings,
    scatter,
    section,
    seed_means,
    style_map,
    styles_in,
    tally,
    task_styles,
)
from toeplens.report.page import Ledger, Page, entries_by_claim, progress_rows, progress_warnings, run_table
from toeplens.report.tables import DASH, Table, TableCell, code, make_table
from toeplens.report.theme import style
from toeplens.studies import MIN_SEEDS, RULE, CellResult
from toeplens.studies.grid import EncodingColumn, GridRow, GridStudy, grid_cells
from toeplens.studies.grid import measures as heads
from toeplens.studies.grid.language import LONG_FACTOR, bits_increase, bits_per_byte
from toeplens.studies.kit.results import skill
from toeplens.studies.kit.verdicts import GRAIN, OPEN_VERDICTS
from toeplens.utils.formatting import fmt, join_list, percent, plural

_MAX_NAMED_TASKS = 4  # tasks up to which the answer names the best encoding of each
_PICTURE_HEIGHT = 620  # pixels for the picture
_MAX_TINT = 55  # strongest tint of a cell in per cent, so that text stays readable
_SHARES = ("positional", "symbolic", "interaction")
_SHARE_AXIS: dict[str, Any] = {"domain": [0, 1], "format": ".0%", "tickCount": 5}


def grid_page(state: GridStudy) -> Page:
    """The page of a grid study."""
    text_tasks = language_tasks(state.spec)
    only_text = text_tasks == list(state.spec.tasks)
    text_parts = language.page_parts(state) if text_tasks else dict[str, Any]()
    accuracy = [] if only_text else figure("accuracy", accuracy_chart(state))
    picture, *more = [*accuracy, *text_parts.get("picture", [])] or [None]
    scans, bands, use = scan_figures(state), figure("bands", bands_chart(state)), figure("centre", centre_chart(state))
    main_figures, *others = [group for group in (scans, bands, use) if group] or [[]]
    frequencies = {group[0].title: group for group in others}
    sections = [
        *section(
            "How well does it model text?" if only_text else "How accurate is each encoding?",
            "performance",
            [*more, *([] if only_text else [best_table(state)]), *text_parts.get("loss", [])],
            {}
            if only_text
            else {
                "Accuracy of every encoding, with baselines": [TEXTS["matrix"], matrix_table(state)],
                "Accuracy by group of examples": group_figures(state),
            },
        ),
        *section(
            "Does it hold on longer sequences?",
            "longer",
            [*text_parts.get("longer", []), *figure("lengths", lengths_chart(state)), _longer_text(state)],
            {
                "Context extension after training": text_parts.get("extension", []),
                "What goes with it in the heads?": figure("relations", relations_chart(state)),
            },
        ),
        *section("Does it find and copy what it has read?", "behaviours", text_parts.get("behaviours", [])),
        *section(
            "What do the heads follow?",
            "heads",
            [*figure("plane", plane_chart(state)), _heads_text(state), *text_parts.get("heads", [])],
            {
                "Every head": figure("heads", heads_chart(state)),
                "Where position acts": text_parts.get("effects", []),
                "During training": figure("training", training_chart(state)),
                "Frequencies": [*scans, *bands, *use] if text_tasks else [],
            },
        ),
        *([] if text_tasks else section("Which frequencies does it use?", "frequencies", main_figures, frequencies)),
        *section("What does it cost?", "cost", [TEXTS["costs"], costs_table(state)] if state.finished else []),
        *section(
            "Which claims hold?" if state.entries else "How was it run?",
            "claims",
            [_claims_text(state), Ledger(entries_by_claim(state.entries))] if state.entries else [],
            {
                "How verdicts are made": [RULE] if state.entries else [],
                "Missing measures": missing_tables(state),
                "How it was run": [
                    state.environment.get("setups"),
                    run_table(state.environment, progress_rows(state, "models")),
                ],
                "Settings": [
                    Markup('<pre style="white-space:pre-wrap;overflow-wrap:anywhere">{}</pre>').format(
                        state.spec.to_yaml()
                    )
                ],
                f"All {state.total} models": [models_table(state, text=only_text)],
            },
        ),
    ]
    first = (state.spec.title, _question(state, text_tasks), answer_text(state), picture)
    return Page("study", *first, sections, _notes(state), _warnings(state))


def _question(state: GridStudy, text_tasks: Sequence[str]) -> str:
    tasks, titles = list(state.spec.tasks), [encoding.title for encoding in style_map(state.spec).values()]
    if len(titles) == 1:
        return f"How well does {titles[0]} do on {plural(len(tasks), 'task')}?"
    if list(text_tasks) == tasks:
        return "Which encoding models text best, and does it hold on longer texts?"
    return f"Which encoding is best at {state.spec.title_of(tasks[0]) if len(tasks) == 1 else f'{len(tasks)} tasks'}?"


def answer_text(state: GridStudy) -> str:
    """The best encodings by task, with intervals over seeds."""
    texts, parts = list(map(state.spec.title_of, language_tasks(state.spec))), language.answer_sentences(state)
    all_ranks = rankings(state, lambda cell: cell.accuracy)
    all_ranks = {task: ranks for task, ranks in all_ranks.items() if task not in texts}
    learned = {row["task"] for cell, row in models(state) if cell.is_skilled}
    ranked = {task: ranks for task, ranks in all_ranks.items() if task in learned}
    if not all_ranks and not parts:
        return "No model is finished yet."
    if unlearned := [task for task in all_ranks if task not in learned]:
        parts.append(f"No encoding learns {join_list(unlearned)}.")
    if len(ranked) > _MAX_NAMED_TASKS:
        sole = {task: ranks for task, ranks in ranked.items() if len(ranks) > 1 and len(best_of(ranks)) == 1}
        winners = join_list(_winner_text(task, ranks) for task, ranks in sole.items())
        parts.append(f"Best, or tied with the best: {tally(ranked)}.")
        parts.append(f"Best alone: {winners}." if sole else "On no task is one encoding better than all others.")
    elif ranked:
        parts.append(f"By test accuracy: {'; '.join(_winner_text(task, ranks) for task, ranks in ranked.items())}.")
    if state.spec.seeds > 1:
        parts.append(f"Brackets and ties: 95% intervals over {state.spec.seeds} seeds.")
    if state.spec.seeds < MIN_SEEDS:
        parts.append(f"With {plural(state.spec.seeds, 'seed')} this is only indicative.")
    return " ".join(parts)


def _winner_text(task: str, ranking: Sequence[EncodingRank]) -> str:
    ties = f", tied with {join_list(best_of(ranking)[1:])}" if len(best_of(ranking)) > 1 else ""
    return f"{ranking[0].title} on {task} ({accuracy_text(ranking[0].mean)}{ties})"


def _claims_text(state: GridStudy) -> str:
    counts = Counter(entry.verdict for entry in state.entries)
    partly, undecided = counts["holds in part"], sum(counts[verdict] for verdict in OPEN_VERDICTS)
    holds = f"{counts['holds'] + partly} hold" + (f" ({partly} in part)" if partly else "")
    return f"Of {plural(len(state.entries), 'claim')}, {holds}, {counts['fails']} fail and {undecided} are open."


def _notes(state: GridStudy) -> list[str]:
    few = f"With {plural(state.spec.seeds, 'seed')} per cell, verdicts are only indicative: they need {MIN_SEEDS}."
    claims = [_claims_text(state)] if state.entries else []
    return [state.spec.about, " ".join([*claims, *([few] if state.spec.seeds < MIN_SEEDS else [])])]


def _warnings(state: GridStudy) -> list[str]:
    titles = {column.label: column.title for column in state.spec.columns()}
    return progress_warnings(
        state, "models", lambda k: f"{titles[k.label]}, {state.spec.title_of(k.task)}, seed {k.seed}"
    )


def accuracy_chart(state: GridStudy) -> Chart:
    """Mean accuracy of each encoding on each task, with its interval over seeds."""
    rows = seed_means(({**row, "value": cell.accuracy} for cell, row in models(state)), grain=GRAIN)
    if not rows:
        return None
    for row in rows:
        row |= {"low": max(0.0, row["low"]), "high": min(1.0, row["high"])}
    tasks, styles = list(map(state.spec.title_of, state.spec.tasks)), styles_in(style_map(state.spec).values(), rows)
    pitch = max(5, min(11, _PICTURE_HEIGHT // (len(tasks) * len(styles))))
    tips = tooltip(series="Encoding", task="Task", value="Accuracy|.1%", low="From|.1%", high="To|.1%", seeds="Seeds")
    value = numeric("value", "test accuracy", zero=False, format=".0%")
    return interval_chart(rows, value, nominal("task", tasks), styles, tips=tips, pitch=pitch)


def best_table(state: GridStudy) -> Table:
    """Per task: the best encoding, those that tie with it, and the best of the others."""
    rows: list[list[str | TableCell]] = []
    for task, ranking in rankings(state, lambda cell: cell.accuracy).items():
        ties = (f"or {join_list(best_of(ranking)[1:])}",) if len(best_of(ranking)) > 1 else ()
        others = [[entry.title, accuracy_text(entry.mean)] for entry in ranking if not entry.is_tied] or [[DASH, DASH]]
        best = TableCell(ranking[0].title, ties, style="min-width:13em")
        rows.append([task, best, accuracy_text(ranking[0].mean), *others[0]])
    accuracy = TableCell("Accuracy", right=True)
    columns = ["Task", "Best", accuracy, "Best of the others", accuracy]
    return make_table("Best encoding by task", columns, rows, right=(2, 4), note=TEXTS["best"], css="small")


def matrix_table(state: GridStudy) -> Table:
    """Mean test accuracy of each task and encoding, with baselines; scans are left out."""
    styles, tasks = style_map(state.spec), {column.label: column.tasks for column in state.spec.columns()}
    matrix = {(row.task, row.label): row for row in state.matrix()}
    rows = []
    for task in state.spec.tasks:
        task_rows = [row for (row_task, _), row in matrix.items() if row_task == task]
        base = max(task_rows, key=lambda row: row.seeds - row.diverged, default=None)
        guesses = [percent(each, sign=False) for each in ((base.chance, base.length_chance) if base else (None, None))]
        rule = TableCell(small=(DASH,), right=True)  # the best one, from the encoding with the most finished models
        if base and base.rule is not None and base.rule_accuracy is not None:
            rule = _tinted_cell(base.rule_accuracy, skill(base.rule_accuracy, base.length_chance), base.rule)
        seeds = state.spec.seeds
        each = [_cell(matrix.get((task, key)), seeds) if task in tasks[key] else TableCell() for key in styles]
        rows.append([state.spec.title_of(task), *each, *guesses, rule])
    columns = [TableCell(one.title, right=True, marker=one) for one in styles.values()]
    columns += [TableCell(text, right=True) for text in ("Constant guess", "Length only", "Simple rule")]
    name = "Test accuracy by task and encoding"
    return make_table(name, ["Task", *columns], rows, right=range(1, len(styles) + 4), css="small")


def _cell(row: GridRow | None, planned: int) -> TableCell:
    if row is None:
        return TableCell(small=(DASH,), right=True)
    count = row.seeds - row.diverged
    if not count:
        return TableCell(small=("diverged" if row.seeds == 1 else f"all {row.seeds} diverged",), right=True)
    notes = [f"{row.diverged} diverged"] if row.diverged else []
    notes += [f"{row.learning}/{count} still learning"] if row.learning else []
    notes += [f"{row.seeds}/{planned} seeds"] if row.seeds < planned else []
    ends = "–".join(percent(end, sign=False).replace("100.0", "100") for end in (row.lowest, row.highest))
    return _tinted_cell(row.accuracy, row.skill, ends if count > 1 else "", ", ".join(notes))


def _tinted_cell(accuracy: float | None, skill: float | None, *small: str) -> TableCell:
    """An accuracy, coloured by skill."""
    css = "" if skill is None else f"tint {'less' if skill < 0 else 'more'}"
    depth = 0 if skill is None else _MAX_TINT * min(1.0, abs(skill))
    return TableCell(percent(accuracy, sign=False), small, right=True, css=css, style=f"--size:{depth:.0f}%")


def lengths_chart(state: GridStudy) -> Chart:
    """Skill by the length of the test sequences, a panel per task."""
    rows = seed_means(
        {**row, "factor": round(length.factor, 4), "value": heads.skill_at(cell, length.factor)}
        for cell, row in models(state)
        for length in getattr(cell.measure("extrapolation"), "rows", ())
        if length.accuracy is not None
    )
    low = min([0.0, *(row["value"] for row in rows)])
    x = numeric("factor", "length / training length", kind="log", values=[1, 1.5, 2, 3, 4], domain=[1, 4])
    y = numeric("value", "skill", format=".0%", domain=[low, 1], tickCount=4)
    return line_panels(rows, style_map(state.spec).values(), x, y, "task", 4, 140, band=False)


def group_figures(state: GridStudy) -> Parts:
    """Accuracy by group of examples (`Task.groups`), during training and by length, a panel per task and encoding."""
    training, lengths = Rows(), Rows()
    for cell, row in models(state):
        row["panel"] = f"{row['task']}, {row['series']}"
        for probed in cell.probe_rows:
            for name, value in (probed.get("groups") or {}).items():
                training.append({"panel": row["panel"], "series": name, "step": probed["step"], "value": value})
        for result in getattr(cell.measure("extrapolation"), "rows", ()):
            for name, value in result.groups.items():
                lengths.append({"panel": row["panel"], "series": name, "length": result.length, "value": value})
    styles = [style(name, index=n) for n, name in enumerate(dict.fromkeys(row["series"] for row in training + lengths))]
    y = numeric("value", "accuracy", format=".0%", domain=[0, 1], tickCount=4)
    axes = {"step": numeric("step", "optimizer steps", tickCount=4), "length": numeric("length", "tokens", tickCount=4)}
    return [
        part
        for name, rows in (("step", training), ("length", lengths))
        for part in figure(f"groups-{name}", line_panels(seed_means(rows), styles, axes[name], y, "panel", 3, 110))
    ]


def _longer_text(state: GridStudy) -> str:
    ranked = rankings(state, lambda cell: heads.skill_at(cell, heads.LONGER_FACTOR))
    prefix = f"At {heads.LONGER_FACTOR:g} times the training length"
    return f"{prefix}, the highest skill, or tied with it, have {tally(ranked)}." if ranked else ""


def relations_chart(state: GridStudy) -> Chart:
    """Correlation of each property of the heads with the remaining skill, by length."""
    rows = [
        {
            "property": TEXTS["properties"][relation.figure],
            "series": f"{relation.factor:g}× the training length",
            "value": relation.value,
            "low": relation.value if relation.low is None else relation.low,
            "high": relation.value if relation.high is None else relation.high,
            "models": len(relation.points),
        }
        for relation in state.relations
        if relation.task is None and relation.value is not None
    ]
    if not rows:
        return None
    styles = [style(f"{factor:g}× the training length", index=n) for n, factor in enumerate(FACTORS[1:])]
    tips = tooltip(property="Property", series="Length", value="Correlation|.2f", low="From|.2f", high="To|.2f")
    value = numeric("value", "correlation with the remaining skill", domain=[-1, 1])
    order = nominal("property", TEXTS["properties"].values())
    tips = [*tips, *tooltip(models="Models")]
    return interval_chart(rows, value, order, styles_in(styles, rows), tips=tips, levels={"": 0.0})


def plane_chart(state: GridStudy) -> Chart:
    """Weighted shares of the heads of each encoding, a panel per task."""
    points: dict[tuple[str, str], dict[str, Any]] = {}
    for share in ("positional", "symbolic"):
        skilled = models(state, skilled=True)
        for mean in seed_means({**row, "value": heads.weighted_share(cell, share)} for cell, row in skilled):
            row = points.setdefault((mean["task"], mean["series"]), {"task": mean["task"], "series": mean["series"]})
            row |= {share: mean["value"], f"{share}_seeds": f"{fmt(mean['low'])} to {fmt(mean['high'])}"}
    if not (rows := list(points.values())):
        return None
    tips = tooltip(series="Encoding", task="Task", positional="Positional|.2f", symbolic="Symbolic|.2f")
    tips += tooltip(positional_seeds="Positional, seeds", symbolic_seeds="Symbolic, seeds")
    return panels(share_plane(rows, styles_in(style_map(state.spec).values(), rows), tips=tips), rows, "task", 4, 170)


def _heads_text(state: GridStudy) -> str:
    """The tasks on which heads are most positional and most symbolic."""
    parts = []
    for share in ("positional", "symbolic"):
        rows = ({"task": r["task"], "value": heads.weighted_share(c, share)} for c, r in models(state, skilled=True))
        if len(means := seed_means(rows)) > 1:
            top = max(means, key=lambda row: row["value"])
            parts.append(f"most {share} on {top['task']} ({fmt(top['value'])})")
    return f"Mean share over models: heads are {' and '.join(parts)}." if parts else ""


def _head_rows(state: GridStudy, *measures: str, scans: bool = False) -> Iterator[tuple[Any, ...]]:
    """Each head of the models with skill: its row, its place, and these measures."""
    for cell, row in models(state, skilled=True, scans=scans):
        results, drops = [cell.measure(name) for name in measures], heads.accuracy_drops(cell)
        if drops is None or any(result is None for result in results):
            continue
        for index in np.ndindex(drops.shape):
            head = f"seed {cell.key.seed}, layer {index[0] + 1}, head {index[1] + 1}"
            yield {**row, "head": head, "size": float(drops[index])}, index, *results


def heads_chart(state: GridStudy) -> Chart:
    """Every head of the models with skill, a panel per task."""
    rows = [
        {**row, "positional": float(behaviour.positional[index]), "symbolic": float(behaviour.symbolic[index])}
        for row, index, behaviour in _head_rows(state, "behaviour")
        if isfinite(behaviour.positional[index])
    ]
    if not rows:
        return None
    tips = tooltip(series="Encoding", head="Head", positional="Positional|.2f", symbolic="Symbolic|.2f")
    tips += tooltip(size="Accuracy drop when ablated|.1%")
    chart = share_plane(rows, styles_in(style_map(state.spec).values(), rows), tips=tips, size="size")
    return panels(chart, rows, "task", 3, 200)


def training_chart(state: GridStudy) -> Chart:
    """Shares of the finally most important head and the accuracy during training, by task and encoding."""
    styles = {"accuracy": style("accuracy", "nope"), **{n: style(f"{n} share", index=i) for i, n in enumerate(_SHARES)}}
    rows = seed_means(
        {"panel": f"{row['task']}, {row['series']}", "series": styles[name].title, "step": step, "value": value}
        for cell, row in models(state)
        for name in styles
        for step, value in training_curve(cell, name)
    )
    x, y = numeric("step", "optimizer steps", tickCount=4), numeric("value", "share", **_SHARE_AXIS)
    return line_panels(rows, styles.values(), x, y, "panel", 3, 110, points=False)


def training_curve(cell: CellResult, name: str) -> list[tuple[int, float]]:
    """Step and value of the accuracy, or of a share of the head with the largest ablation effect after training.

    Shares are empty for a model without skill or without significant heads, and if the encoding has no such shares.
    """
    rows = [row for row in cell.probe_rows if row.get("accuracy") is not None]
    if name == "accuracy":
        return [(int(row["step"]), float(row["accuracy"])) for row in rows]
    effects = heads.loss_effects(cell)
    if effects is None or not cell.is_skilled or not effects.any():
        return []
    index = np.unravel_index(int(effects.argmax()), effects.shape)
    return [(int(row["step"]), float(heads.array(row[name])[index])) for row in rows if row.get(name) is not None]


_UNITS = {"frequencies": "rad per position"}  # of scanned options
_LINEAR_DECADES = 2  # wider scans have a logarithmic axis


def scan_figures(state: GridStudy) -> Parts:
    """A figure per scanned option: accuracy and weighted shares of the heads by its value, a line per task."""
    by_scan: dict[str, list[EncodingColumn]] = {}
    for column in state.spec.columns():
        by_scan.setdefault(column.scan, []).append(column)
    figures: Parts = []
    for label in by_scan.keys() - {""}:
        part, option = state.spec.encodings[label], next(iter(state.spec.encodings[label].scan))
        values = {column.title: float(column.value or 0) for column in by_scan[label]}
        low, high = min(values.values()), max(values.values())
        log_axis = {"kind": "log"} if low > 0 and log10(high / low) > _LINEAR_DECADES else {}
        x = numeric("at", _UNITS.get(option, option), tickCount=5, **(log_axis or {"zero": False}))
        rows = _scan_rows(state, values)
        chart = line_panels(rows, task_styles(state.spec), x, numeric("value", "", **_SHARE_AXIS), "panel", 3, 200)
        name = f"-{label}" if len(by_scan) > 2 else ""
        figures += figure("scan", chart, name, f"{part.title or label}, by {option}")
    return figures


def _scan_rows(state: GridStudy, values: dict[str, float]) -> Rows:
    rows = []
    for name in ("Test accuracy", "Positional share", "Symbolic share"):
        for cell, row in models(state, scans=True):
            if row["series"] in values and (cell.is_skilled or name == "Test accuracy"):
                share = name.split()[0].lower()
                value = cell.accuracy if name == "Test accuracy" else heads.weighted_share(cell, share)
                rows.append({"panel": name, "series": row["task"], "at": values[row["series"]], "value": value})
    return seed_means(rows)


def bands_chart(state: GridStudy) -> Chart:
    """The effect of freezing each frequency, a panel per encoding."""
    rows = seed_means(
        {"encoding": row["series"], "series": row["task"], "frequency": frequency, "value": value}
        for cell, row in models(state, skilled=True)
        for frequency, value in frequency_effects(cell).items()
    )
    x, y = numeric("frequency", "rad per position", kind="log", tickCount=4, format="~g"), numeric("value", "nats")
    return line_panels(rows, task_styles(state.spec), x, y, "encoding", 3, 170, free=["y"])


def frequency_effects(cell: CellResult) -> dict[float, float]:
    """Loss increase in nats per frequency above 0, summed over the heads that have it; empty if not measured."""
    ablation, use = cell.measure("bands"), cell.measure("frequency")
    if ablation is None or use is None:
        return {}
    drops, frequencies = np.asarray(ablation.drops), np.asarray(use.frequencies)
    mask = np.isfinite(drops) & (frequencies > 0)
    return {float(f): float(drops[mask & (frequencies == f)].sum()) for f in np.unique(frequencies[mask])}


def centre_chart(state: GridStudy) -> Chart:
    """Each head of a rotary encoding: centre of its frequency use against its positional share."""
    rows = [
        {
            **row,
            "panel": "Scans, one value per model" if scans else "Encodings with several frequencies",
            "series": row["task"],
            "encoding": row["series"],
            "centre": float(use.centre[index]),
            "share": float(shares.positional[index]),
        }
        for scans in (False, True)
        for row, index, use, shares in _head_rows(state, "frequency", "behaviour", scans=scans)
        if isfinite(use.centre[index]) and isfinite(shares.positional[index])
    ]
    x = numeric("centre", "centre of frequency use (octaves)", zero=False, tickCount=8)
    tips = {"encoding": "Encoding", "centre": "Octaves|.2f", "share": "Positional|.2f", "size": "Accuracy drop|.1%"}
    return scatter(rows, task_styles(state.spec), x, numeric("share", "positional share", **_SHARE_AXIS), 260, **tips)


def costs_table(state: GridStudy) -> Table:
    """Cost and Toeplitz share of each encoding, means over tasks; scans are left out."""
    styles, matrix = style_map(state.spec), state.matrix()
    first = {row.task: row.train_seconds for row in matrix if row.label == next(iter(styles), None)}
    rows: list[list[str | TableCell]] = []
    for label, series in styles.items():
        group = [row for row in matrix if row.label == label and row.seeds > row.diverged]
        if not group:
            continue
        sizes = sorted({row.parameters for row in group})
        logs = [np.log(row.train_seconds / t) for row in group if row.train_seconds and (t := first.get(row.task))]
        count, size = sum(row.seeds - row.diverged for row in group), [f"{number:,}" for number in sizes]
        relative = f"{np.exp(np.mean(logs)):.2f}" if logs else DASH
        seconds, share = [row.train_seconds for row in group], [row.toeplitz for row in group]
        rows.append([TableCell(series.title, marker=series), str(count), "–".join(dict.fromkeys((size[0], size[-1])))])
        rows[-1] += [mean_text(seconds, 1), relative, mean_text(share, 1, 100)]
    columns = ["Encoding", "Models", "Parameters", "Training time (s)", "Relative time", "Toeplitz share (%)"]
    return make_table("Cost by encoding", columns, rows, right=range(1, 6))


def models_table(state: GridStudy, *, text: bool) -> Table:
    """Every model of the grid, including scans; ``text`` adds bits per byte."""
    results = {cell.key: cell for cell in state.results.cells}
    titles = {column.label: column.title for column in state.spec.columns()}
    rows: list[list[str | TableCell]] = []
    for planned in grid_cells(state.spec):
        key, result = planned.key, results.get(planned.key)
        values: list[float | None] = [None] * 4
        if result is not None:
            shares = ("positional", "symbolic") if result.is_skilled else ()
            carried = [heads.weighted_share(result, share) for share in shares] or [None, None]
            values = [result.accuracy, result.skill, *carried]
        line = [titles[key.label], state.spec.title_of(key.task), str(key.seed), result.status if result else "missing"]
        line += [fmt(result and metric(result), 3) for metric in (bits_per_byte, bits_increase)] if text else []
        rows.append([*line, *(percent(value, sign=False) for value in values), code(f"runs/{planned.job.spec.name}")])
    shown = ["Bits per byte", f"Loss at {LONG_FACTOR:g}×", "Next-token accuracy, %"] if text else ["Test, %"]
    shown += ["Skill, %", "Positional, %", "Symbolic, %"]
    columns = ["Encoding", "Task", "Seed", "Status", *shown, "Run"]
    return make_table("Models", columns, rows, right={2, *range(4, 4 + len(shown))}, css="small")


_ENCODING_NAME = re.compile(r"'[^']*' was given; |, got '[^']*'")  # the encoding's name, which the row has already


def missing_tables(state: GridStudy) -> list[Table]:
    """Missing measures of the finished models, their tasks and encodings, and the reasons; none if nothing is."""
    groups: dict[tuple[str, str], tuple[dict[str, None], dict[str, None], dict[float, None]]] = {}
    all_titles = {row["series"] for _, row in models(state)}
    for cell, row in models(state):
        for name, factor, reason in _missing_measures(cell):
            columns_of = groups.setdefault((name, _ENCODING_NAME.sub("", reason)), ({}, {}, {}))
            for names, value in zip(columns_of, (row["task"], row["series"], factor), strict=True):
                names |= {} if value is None else {value: None}
    rows = [
        [
            name + (f" at {join_list(f'{at:.3g}' for at in sorted(at))} × the training length" if at else ""),
            "all" if len(titles) == len(all_titles) > 1 else join_list(titles),
            join_list(tasks),
            reason,
        ]
        for (name, reason), (tasks, titles, at) in groups.items()
    ]
    columns = ["Measure", "Encodings", "Tasks", "Reason"]
    return [make_table("Missing measures", columns, rows, css="small")] if rows else []


def _missing_measures(cell: CellResult) -> Iterator[tuple[str, float | None, str]]:
    """Missing measures, their length (None: all), and the reason."""
    for name in cell.measures:
        if reason := cell.reason(name):
            yield name, None, reason
        for row in getattr(record := cell.measure(name), "rows", getattr(record, "lengths", ())):
            if getattr(row, "reason", ""):
                method = f", {row.method}" if name.startswith("extension") else ""
                yield name + method, row.factor, row.reason
