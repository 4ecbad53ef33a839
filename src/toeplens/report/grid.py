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
from toeplens.ground.words import fixed, listed, percent
from toeplens.report import language
from toeplens.report.charts import intervals, names, number, plane, tooltip
from toeplens.report.models import (
    TEXTS,
    Chart,
    Parts,
    Rows,
    Standing,
    accuracy_text,
    best_of,
    by_task,
    drawn,
    encodings,
    figure,
    language_tasks,
    lines,
    mean_text,
    models,
    panels,
    scatter,
    section,
    seed_means,
    tally,
    task_styles,
)
from toeplens.report.page import Ledger, Page, ledger, progress_rows, run_table
from toeplens.report.tables import DASH, Cell, Table, code, make_table
from toeplens.report.theme import style
from toeplens.studies import ENOUGH, RULE, CellResult
from toeplens.studies.grid import Column, Grid, Row, cells
from toeplens.studies.grid import measured as heads
from toeplens.studies.grid.language import LONG, bits, lost
from toeplens.studies.kit.results import skill
from toeplens.studies.kit.verdicts import GRAIN, OPEN

_NAMED = 4  # tasks up to which the answer names the best encoding of each
_ROOM = 620  # pixels for the picture
_DEEPEST = 55  # strongest tint of a cell in per cent, so that text stays readable
_SHARES = ("positional", "symbolic", "interaction")
_SHARE: dict[str, Any] = {"domain": [0, 1], "format": ".0%", "tickCount": 5}


def grid_page(state: Grid) -> Page:
    """The page of a grid study."""
    spoken = language_tasks(state.spec)
    only = spoken == list(state.spec.tasks)
    text = language.parts(state) if spoken else dict[str, Any]()
    accuracy = [] if only else figure("accuracy", accuracy_chart(state))
    picture, *more = [*accuracy, *text.get("picture", [])] or [None]
    scans, bands, use = scan_figures(state), figure("bands", bands_chart(state)), figure("centre", centre_chart(state))
    shown, *rest = [each for each in (scans, bands, use) if each] or [[]]
    frequencies = {each[0].title: each for each in rest}
    sections = [
        *section(
            "How well does it model text?" if only else "How accurate is each encoding?",
            "performance",
            [*more, *([] if only else [best_table(state)]), *text.get("loss", [])],
            {} if only else {"Accuracy of every encoding, with baselines": [TEXTS["matrix"], matrix_table(state)]},
        ),
        *section(
            "Does it hold on longer sequences?",
            "longer",
            [*text.get("longer", []), *figure("lengths", lengths_chart(state)), _longer_text(state)],
            {
                "Context extension after training": text.get("extension", []),
                "What goes with it in the heads?": figure("relations", relations_chart(state)),
            },
        ),
        *section("Does it find and copy what it has read?", "behaviours", text.get("behaviours", [])),
        *section(
            "What do the heads follow?",
            "heads",
            [*figure("plane", plane_chart(state)), _heads_text(state), *text.get("heads", [])],
            {
                "Every head": figure("heads", heads_chart(state)),
                "Where position acts": text.get("effects", []),
                "During training": figure("training", training_chart(state)),
                "Frequencies": [*scans, *bands, *use] if spoken else [],
            },
        ),
        *([] if spoken else section("Which frequencies does it use?", "frequencies", shown, frequencies)),
        *section("What does it cost?", "cost", [TEXTS["costs"], costs_table(state)] if state.finished else []),
        *section(
            "Which claims hold?" if state.entries else "How was it run?",
            "claims",
            [_claims_text(state), Ledger(ledger(state.entries))] if state.entries else [],
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
                f"All {state.total} models": [models_table(state, text=only)],
            },
        ),
    ]
    first = (state.spec.title, _question(state, spoken), answer(state), picture)
    return Page("study", *first, sections, _notes(state), _warnings(state))


def _question(state: Grid, spoken: Sequence[str]) -> str:
    tasks, titles = list(state.spec.tasks), [each.title for each in encodings(state.spec).values()]
    if len(titles) == 1:
        return f"How well does {titles[0]} do on {_count(len(tasks), 'task')}?"
    if list(spoken) == tasks:
        return "Which encoding models text best, and does it hold on longer texts?"
    return f"Which encoding is best at {state.spec.title_of(tasks[0]) if len(tasks) == 1 else f'{len(tasks)} tasks'}?"


def answer(state: Grid) -> str:
    """The best encodings by task, with intervals over seeds."""
    spoken, parts = list(map(state.spec.title_of, language_tasks(state.spec))), language.answers(state)
    every = {task: each for task, each in by_task(state, lambda cell: cell.accuracy).items() if task not in spoken}
    learned = {row["task"] for cell, row in models(state) if cell.skilled}
    found = {task: each for task, each in every.items() if task in learned}
    if not every and not parts:
        return "No model is finished yet."
    if unlearned := [task for task in every if task not in learned]:
        parts.append(f"No encoding learns {listed(unlearned)}.")
    if len(found) > _NAMED:
        alone = {task: each for task, each in found.items() if len(each) > 1 and len(best_of(each)) == 1}
        single = listed(_winner(task, each) for task, each in alone.items())
        parts.append(f"Best, or tied with the best: {tally(found)}.")
        parts.append(f"Best alone: {single}." if alone else "On no task is one encoding better than all others.")
    elif found:
        parts.append(f"By test accuracy: {'; '.join(_winner(task, each) for task, each in found.items())}.")
    if state.spec.seeds > 1:
        parts.append(f"Brackets and ties: 95% intervals over {state.spec.seeds} seeds.")
    if state.spec.seeds < ENOUGH:
        parts.append(f"With {_count(state.spec.seeds, 'seed')} this is only indicative.")
    return " ".join(parts)


def _winner(task: str, found: Sequence[Standing]) -> str:
    ties = f", tied with {listed(best_of(found)[1:])}" if len(best_of(found)) > 1 else ""
    return f"{found[0].title} on {task} ({accuracy_text(found[0].mean)}{ties})"


def _claims_text(state: Grid) -> str:
    counts = Counter(entry.verdict for entry in state.entries)
    part, still = counts["holds in part"], sum(counts[verdict] for verdict in OPEN)
    holds = f"{counts['holds'] + part} hold" + (f" ({part} in part)" if part else "")
    return f"Of {_count(len(state.entries), 'claim')}, {holds}, {counts['fails']} fail and {still} are open."


def _notes(state: Grid) -> list[str]:
    few = f"With {_count(state.spec.seeds, 'seed')} per cell, verdicts are only indicative: they need {ENOUGH}."
    claims = [_claims_text(state)] if state.entries else []
    return [state.spec.about, " ".join([*claims, *([few] if state.spec.seeds < ENOUGH else [])])]


def _warnings(state: Grid) -> list[str]:
    found = []
    if not state.complete:
        share = f"{100 * state.share:.3g}% of the steps"
        found.append(f"Not complete: {state.finished} of {state.total} models are finished ({share}).")
    titles = {column.label: column.title for column in state.spec.columns()}
    gone = [cell.key for cell in state.results.cells if cell.status == "diverged"]
    if gone:
        each = "; ".join(f"{titles[k.label]}, {state.spec.title_of(k.task)}, seed {k.seed}" for k in gone[:8])
        more = f"; and {len(gone) - 8} more, see the table of models" if len(gone) > 8 else ""
        found.append(f"{_count(len(gone), 'run')} diverged and have no accuracy: {each}{more}.")
    return found


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def accuracy_chart(state: Grid) -> Chart:
    """Mean accuracy of each encoding on each task, with its interval over seeds."""
    rows = seed_means(({**row, "value": cell.accuracy} for cell, row in models(state)), grain=GRAIN)
    if not rows:
        return None
    for row in rows:
        row |= {"low": max(0.0, row["low"]), "high": min(1.0, row["high"])}
    tasks, looks = list(map(state.spec.title_of, state.spec.tasks)), drawn(encodings(state.spec).values(), rows)
    pitch = max(5, min(11, _ROOM // (len(tasks) * len(looks))))
    tips = tooltip(series="Encoding", task="Task", value="Accuracy|.1%", low="From|.1%", high="To|.1%", seeds="Seeds")
    value = number("value", "test accuracy", zero=False, format=".0%")
    return intervals(rows, value, names("task", tasks), looks, tips=tips, pitch=pitch)


def best_table(state: Grid) -> Table:
    """Per task: the best encoding, those that tie with it, and the best of the others."""
    rows: list[list[str | Cell]] = []
    for task, found in by_task(state, lambda cell: cell.accuracy).items():
        ties = (f"or {listed(best_of(found)[1:])}",) if len(best_of(found)) > 1 else ()
        other = [[each.title, accuracy_text(each.mean)] for each in found if not each.tied] or [[DASH, DASH]]
        best = Cell(found[0].title, ties, style="min-width:13em")
        rows.append([task, best, accuracy_text(found[0].mean), *other[0]])
    columns = ["Task", "Best", Cell("Accuracy", right=True), "Best of the others", Cell("Accuracy", right=True)]
    return make_table("Best encoding by task", columns, rows, right=(2, 4), note=TEXTS["best"], css="small")


def matrix_table(state: Grid) -> Table:
    """Mean test accuracy of each task and encoding, with baselines; scans are left out."""
    looks, tasks = encodings(state.spec), {column.label: column.tasks for column in state.spec.columns()}
    found = {(row.task, row.label): row for row in state.matrix()}
    rows = []
    for task in state.spec.tasks:
        mine = [row for (of, _), row in found.items() if of == task]
        most = max(mine, key=lambda row: row.seeds - row.diverged, default=None)
        guesses = [percent(each, sign=False) for each in ((most.chance, most.length_chance) if most else (None, None))]
        rule = Cell(small=(DASH,), right=True)  # the best one, from the encoding with the most finished models
        if most and most.rule is not None and most.rule_accuracy is not None:
            rule = _tinted(most.rule_accuracy, skill(most.rule_accuracy, most.length_chance), most.rule)
        each = [_entry(found.get((task, one)), state.spec.seeds) if task in tasks[one] else Cell() for one in looks]
        rows.append([state.spec.title_of(task), *each, *guesses, rule])
    columns = [Cell(one.title, right=True, sign=one) for one in looks.values()]
    columns += [Cell(text, right=True) for text in ("Constant guess", "Length only", "Simple rule")]
    name = "Test accuracy by task and encoding"
    return make_table(name, ["Task", *columns], rows, right=range(1, len(looks) + 4), css="small")


def _entry(row: Row | None, planned: int) -> Cell:
    if row is None:
        return Cell(small=(DASH,), right=True)
    count = row.seeds - row.diverged
    if not count:
        return Cell(small=("diverged" if row.seeds == 1 else f"all {row.seeds} diverged",), right=True)
    notes = [f"{row.diverged} diverged"] if row.diverged else []
    notes += [f"{row.learning}/{count} still learning"] if row.learning else []
    notes += [f"{row.seeds}/{planned} seeds"] if row.seeds < planned else []
    ends = "–".join(percent(end, sign=False).replace("100.0", "100") for end in (row.lowest, row.highest))
    return _tinted(row.accuracy, row.skill, ends if count > 1 else "", ", ".join(notes))


def _tinted(accuracy: float | None, skill: float | None, *small: str) -> Cell:
    """An accuracy, coloured by skill."""
    css = "" if skill is None else f"tint {'less' if skill < 0 else 'more'}"
    depth = 0 if skill is None else _DEEPEST * min(1.0, abs(skill))
    return Cell(percent(accuracy, sign=False), small, right=True, css=css, style=f"--size:{depth:.0f}%")


def lengths_chart(state: Grid) -> Chart:
    """Skill by the length of the test sequences, a panel per task."""
    rows = seed_means(
        {**row, "factor": round(length.factor, 4), "value": heads.skill_at(cell, length.factor)}
        for cell, row in models(state)
        for length in getattr(cell.measure("extrapolation"), "rows", ())
        if length.accuracy is not None
    )
    low = min([0.0, *(row["value"] for row in rows)])
    x = number("factor", "length / training length", kind="log", values=[1, 1.5, 2, 3, 4], domain=[1, 4])
    y = number("value", "skill", format=".0%", domain=[low, 1], tickCount=4)
    return lines(rows, encodings(state.spec).values(), x, y, "task", 4, 140, band=False)


def _longer_text(state: Grid) -> str:
    found = by_task(state, lambda cell: heads.skill_at(cell, heads.LONGER))
    at = f"At {heads.LONGER:g} times the training length"
    return f"{at}, the highest skill, or tied with it, have {tally(found)}." if found else ""


def relations_chart(state: Grid) -> Chart:
    """Correlation of each property of the heads with the remaining skill, by length."""
    rows = [
        {
            "property": TEXTS["properties"][each.figure],
            "series": f"{each.factor:g}× the training length",
            "value": each.value,
            "low": each.value if each.low is None else each.low,
            "high": each.value if each.high is None else each.high,
            "models": len(each.points),
        }
        for each in state.relations
        if each.task is None and each.value is not None
    ]
    if not rows:
        return None
    looks = [style(f"{factor:g}× the training length", index=n) for n, factor in enumerate(FACTORS[1:])]
    tips = tooltip(property="Property", series="Length", value="Correlation|.2f", low="From|.2f", high="To|.2f")
    value = number("value", "correlation with the remaining skill", domain=[-1, 1])
    order = names("property", TEXTS["properties"].values())
    return intervals(rows, value, order, drawn(looks, rows), tips=[*tips, *tooltip(models="Models")], levels={"": 0.0})


def plane_chart(state: Grid) -> Chart:
    """Weighted shares of the heads of each encoding, a panel per task."""
    places: dict[tuple[str, str], dict[str, Any]] = {}
    for share in ("positional", "symbolic"):
        for each in seed_means({**r, "value": heads.carried(cell, share)} for cell, r in models(state, skilled=True)):
            row = places.setdefault((each["task"], each["series"]), {"task": each["task"], "series": each["series"]})
            row |= {share: each["value"], f"{share}_seeds": f"{fixed(each['low'])} to {fixed(each['high'])}"}
    if not (rows := list(places.values())):
        return None
    tips = tooltip(series="Encoding", task="Task", positional="Positional|.2f", symbolic="Symbolic|.2f")
    tips += tooltip(positional_seeds="Positional, seeds", symbolic_seeds="Symbolic, seeds")
    return panels(plane(rows, drawn(encodings(state.spec).values(), rows), tips=tips), rows, "task", 4, 170)


def _heads_text(state: Grid) -> str:
    """The tasks on which heads are most positional and most symbolic."""
    parts = []
    for share in ("positional", "symbolic"):
        rows = ({"task": r["task"], "value": heads.carried(c, share)} for c, r in models(state, skilled=True))
        if len(means := seed_means(rows)) > 1:
            most = max(means, key=lambda row: row["value"])
            parts.append(f"most {share} on {most['task']} ({fixed(most['value'])})")
    return f"Mean share over models: heads are {' and '.join(parts)}." if parts else ""


def _every_head(state: Grid, *measures: str, scans: bool = False) -> Iterator[tuple[Any, ...]]:
    """Each head of the models with skill: its row, its place, and these measures."""
    for cell, row in models(state, skilled=True, scans=scans):
        found, lost = [cell.measure(name) for name in measures], heads.drops(cell)
        if lost is None or any(each is None for each in found):
            continue
        for at in np.ndindex(lost.shape):
            head = f"seed {cell.key.seed}, layer {at[0] + 1}, head {at[1] + 1}"
            yield {**row, "head": head, "size": float(lost[at])}, at, *found


def heads_chart(state: Grid) -> Chart:
    """Every head of the models with skill, a panel per task."""
    rows = [
        {**row, "positional": float(found.positional[at]), "symbolic": float(found.symbolic[at])}
        for row, at, found in _every_head(state, "behaviour")
        if isfinite(found.positional[at])
    ]
    if not rows:
        return None
    tips = tooltip(series="Encoding", head="Head", positional="Positional|.2f", symbolic="Symbolic|.2f")
    tips += tooltip(size="Accuracy drop when ablated|.1%")
    chart = plane(rows, drawn(encodings(state.spec).values(), rows), tips=tips, size="size")
    return panels(chart, rows, "task", 3, 200)


def training_chart(state: Grid) -> Chart:
    """Shares of the finally most important head and the accuracy during training, by task and encoding."""
    looks = {"accuracy": style("accuracy", "nope"), **{n: style(f"{n} share", index=i) for i, n in enumerate(_SHARES)}}
    rows = seed_means(
        {"panel": f"{row['task']}, {row['series']}", "series": looks[name].title, "step": step, "value": value}
        for cell, row in models(state)
        for name in looks
        for step, value in followed(cell, name)
    )
    x, y = number("step", "optimizer steps", tickCount=4), number("value", "share", **_SHARE)
    return lines(rows, looks.values(), x, y, "panel", 3, 110, points=False)


def followed(cell: CellResult, name: str) -> list[tuple[int, float]]:
    """Step and value of the accuracy, or of a share of the head with the largest ablation effect after training.

    Shares are empty for a model without skill or without significant heads, and if the encoding has no such shares.
    """
    rows = [row for row in cell.watched if row.get("accuracy") is not None]
    if name == "accuracy":
        return [(int(row["step"]), float(row["accuracy"])) for row in rows]
    lost = heads.costs(cell)
    if lost is None or not cell.skilled or not lost.any():
        return []
    at = np.unravel_index(int(lost.argmax()), lost.shape)
    return [(int(row["step"]), float(heads.array(row[name])[at])) for row in rows if row.get(name) is not None]


_UNITS = {"frequencies": "rad per position"}  # of scanned options
_DECADES = 2  # wider scans have a logarithmic axis


def scan_figures(state: Grid) -> Parts:
    """A figure per scanned option: accuracy and weighted shares of the heads by its value, a line per task."""
    by_scan: dict[str, list[Column]] = {}
    for column in state.spec.columns():
        by_scan.setdefault(column.scan, []).append(column)
    made: Parts = []
    for label in by_scan.keys() - {""}:
        part, option = state.spec.encodings[label], next(iter(state.spec.encodings[label].scan))
        values = {column.title: float(column.value or 0) for column in by_scan[label]}
        low, high = min(values.values()), max(values.values())
        wide = {"kind": "log"} if low > 0 and log10(high / low) > _DECADES else {}
        x = number("at", _UNITS.get(option, option), tickCount=5, **(wide or {"zero": False}))
        rows = _scan_rows(state, values)
        chart = lines(rows, task_styles(state.spec), x, number("value", "", **_SHARE), "panel", 3, 200)
        name = f"-{label}" if len(by_scan) > 2 else ""
        made += figure("scan", chart, name, f"{part.title or label}, by {option}")
    return made


def _scan_rows(state: Grid, values: dict[str, float]) -> Rows:
    found = []
    for name in ("Test accuracy", "Positional share", "Symbolic share"):
        for cell, row in models(state, scans=True):
            if row["series"] in values and (cell.skilled or name == "Test accuracy"):
                value = cell.accuracy if name == "Test accuracy" else heads.carried(cell, name.split()[0].lower())
                found.append({"panel": name, "series": row["task"], "at": values[row["series"]], "value": value})
    return seed_means(found)


def bands_chart(state: Grid) -> Chart:
    """The effect of freezing each frequency, a panel per encoding."""
    rows = seed_means(
        {"encoding": row["series"], "series": row["task"], "frequency": frequency, "value": value}
        for cell, row in models(state, skilled=True)
        for frequency, value in worth(cell).items()
    )
    x, y = number("frequency", "rad per position", kind="log", tickCount=4, format="~g"), number("value", "nats")
    return lines(rows, task_styles(state.spec), x, y, "encoding", 3, 170, free=["y"])


def worth(cell: CellResult) -> dict[float, float]:
    """Loss increase in nats per frequency above 0, summed over the heads that have it; empty if not measured."""
    lost, use = cell.measure("bands"), cell.measure("frequency")
    if lost is None or use is None:
        return {}
    drops, frequencies = np.asarray(lost.drops), np.asarray(use.frequencies)
    known = np.isfinite(drops) & (frequencies > 0)
    return {float(each): float(drops[known & (frequencies == each)].sum()) for each in np.unique(frequencies[known])}


def centre_chart(state: Grid) -> Chart:
    """Each head of a rotary encoding: centre of its frequency use against its positional share."""
    rows = [
        {
            **row,
            "panel": "Scans, one value per model" if scans else "Encodings with several frequencies",
            "series": row["task"],
            "encoding": row["series"],
            "centre": float(use.centre[at]),
            "share": float(shares.positional[at]),
        }
        for scans in (False, True)
        for row, at, use, shares in _every_head(state, "frequency", "behaviour", scans=scans)
        if isfinite(use.centre[at]) and isfinite(shares.positional[at])
    ]
    x = number("centre", "centre of frequency use (octaves)", zero=False, tickCount=8)
    tips = {"encoding": "Encoding", "centre": "Octaves|.2f", "share": "Positional|.2f", "size": "Accuracy drop|.1%"}
    return scatter(rows, task_styles(state.spec), x, number("share", "positional share", **_SHARE), 260, **tips)


def costs_table(state: Grid) -> Table:
    """Cost and Toeplitz share of each encoding, means over tasks; scans are left out."""
    looks, found = encodings(state.spec), state.matrix()
    first = {row.task: row.train_seconds for row in found if row.label == next(iter(looks), None)}
    rows: list[list[str | Cell]] = []
    for label, one in looks.items():
        mine = [row for row in found if row.label == label and row.seeds > row.diverged]
        if not mine:
            continue
        sizes = sorted({row.parameters for row in mine})
        logs = [np.log(row.train_seconds / o) for row in mine if row.train_seconds and (o := first.get(row.task))]
        count, size = sum(row.seeds - row.diverged for row in mine), [f"{each:,}" for each in sizes]
        relative = f"{np.exp(np.mean(logs)):.2f}" if logs else DASH
        seconds, share = [row.train_seconds for row in mine], [row.toeplitz for row in mine]
        rows.append([Cell(one.title, sign=one), str(count), "–".join(dict.fromkeys((size[0], size[-1])))])
        rows[-1] += [mean_text(seconds, 1), relative, mean_text(share, 1, 100)]
    columns = ["Encoding", "Models", "Parameters", "Training time (s)", "Relative time", "Toeplitz share (%)"]
    return make_table("Cost by encoding", columns, rows, right=range(1, 6))


def models_table(state: Grid, *, text: bool) -> Table:
    """Every model of the grid, including scans; ``text`` adds bits per byte."""
    done = {cell.key: cell for cell in state.results.cells}
    titles = {column.label: column.title for column in state.spec.columns()}
    rows: list[list[str | Cell]] = []
    for place in cells(state.spec):
        key, found = place.key, done.get(place.key)
        values: list[float | None] = [None] * 4
        if found is not None:
            carried = [heads.carried(found, share) if found.skilled else None for share in ("positional", "symbolic")]
            values = [found.accuracy, found.skill, *carried]
        line = [titles[key.label], state.spec.title_of(key.task), str(key.seed), found.status if found else "missing"]
        line += [fixed(found and of(found), 3) for of in (bits, lost)] if text else []
        rows.append([*line, *(percent(each, sign=False) for each in values), code(f"runs/{place.job.spec.name}")])
    shown = ["Bits per byte", f"Loss at {LONG:g}×", "Next-token accuracy, %"] if text else ["Test, %"]
    shown += ["Skill, %", "Positional, %", "Symbolic, %"]
    columns = ["Encoding", "Task", "Seed", "Status", *shown, "Run"]
    return make_table("Models", columns, rows, right={2, *range(4, 4 + len(shown))}, css="small")


_GIVEN = re.compile(r"'[^']*' was given; |, got '[^']*'")  # the encoding's name, which the row has already


def missing_tables(state: Grid) -> list[Table]:
    """Missing measures of the finished models, their tasks and encodings, and the reasons; none if nothing is."""
    found: dict[tuple[str, str], tuple[dict[str, None], dict[str, None], dict[float, None]]] = {}
    every = {row["series"] for _, row in models(state)}
    for cell, row in models(state):
        for name, factor, why in _reasons(cell):
            places = found.setdefault((name, _GIVEN.sub("", why)), ({}, {}, {}))
            for place, value in zip(places, (row["task"], row["series"], factor), strict=True):
                place |= {} if value is None else {value: None}
    rows = [
        [
            name + (f" at {listed(f'{at:.3g}' for at in sorted(at))} × the training length" if at else ""),
            "all" if len(titles) == len(every) > 1 else listed(titles),
            listed(tasks),
            why,
        ]
        for (name, why), (tasks, titles, at) in found.items()
    ]
    columns = ["Measure", "Encodings", "Tasks", "Reason"]
    return [make_table("Missing measures", columns, rows, css="small")] if rows else []


def _reasons(cell: CellResult) -> Iterator[tuple[str, float | None, str]]:
    """Missing measures, their length (None: all), and the reason."""
    for name, content in cell.measures.items():
        if set(content) == {"why"}:
            yield name, None, content["why"]
        for row in getattr(found := cell.measure(name), "rows", getattr(found, "lengths", ())):
            if getattr(row, "why", ""):
                method = f", {row.method}" if name.startswith("extension") else ""
                yield name + method, row.factor, row.why
