"""The page of a grid study: which encoding is best, does it hold on longer sequences, and what do its heads follow?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isfinite, log10
from typing import Any

import numpy as np
from markupsafe import Markup

from toeplens.engine import FACTORS
from toeplens.ground.words import fixed, listed, percent, signed
from toeplens.report import language
from toeplens.report.charts import curves, intervals, names, number, plane, tooltip
from toeplens.report.models import (
    Chart,
    Parts,
    Rows,
    accuracy_text,
    best_of,
    by_task,
    drawn,
    encoding_styles,
    figure,
    language_tasks,
    models,
    panels,
    scatter,
    section,
    seed_means,
    tally,
    task_styles,
    told,
)
from toeplens.report.page import Ledger, Page, ledger, run_table
from toeplens.report.tables import DASH, Cell, Table, code, make_table
from toeplens.report.theme import style
from toeplens.studies import ENOUGH, RULE, CellResult
from toeplens.studies.grid import FIGURES, Column, Grid, Row, cells
from toeplens.studies.grid import measured as heads
from toeplens.studies.grid.language import LONG, bits, lost
from toeplens.studies.kit.results import SKILLED, skill
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
    text = language.parts(state) if spoken else {}
    accuracy = [] if only else figure("accuracy", "Accuracy by task and encoding", accuracy_chart(state), _ACCURACY)
    picture, *more = [*accuracy, *text.pop("picture", [])] or [None]
    scans, effects = _scans(state), figure("bands", "Effect of freezing each frequency", bands_chart(state), _BANDS)
    use = figure("centre", "Frequency use and positional share", centre_chart(state), _CENTRE)
    frequencies = [each for each in (scans, effects, use) if each]
    best: Parts = [] if only else [best_table(state)]
    sections = [
        *section(
            "How well does it model text?" if only else "How accurate is each encoding?",
            "performance",
            [*more, *best, *text.pop("loss", [])],
            {} if only else {"Accuracy of every encoding, with baselines": [_MATRIX, matrix_table(state)]},
        ),
        *section(
            "Does it hold on longer sequences?",
            "longer",
            [*text.pop("longer", []), *([] if only else _longer(state))],
            {**text.pop("longer details", {}), **({} if only else _correlates(state))},
        ),
        *text.pop("behaviours", []),
        *section(
            "What do the heads follow?",
            "heads",
            [*figure("plane", "Mean shares", plane_chart(state), _PLANE), _heads_text(state), *text.pop("heads", [])],
            {
                "Every head": figure("heads", "Shares of every head", heads_chart(state), _HEADS),
                **text.pop("heads details", {}),
                "During training": figure("training", "The most important head", training_chart(state), _TRAINING),
                **({"Frequencies": [*scans, *effects, *use]} if spoken else {}),
                "Encodings that are not shown": [_without(state)],
            },
        ),
        *section(
            "Which frequencies does it use?",
            "frequencies",
            [] if spoken or not frequencies else frequencies[0],
            {} if spoken else {each[0].title: each for each in frequencies[1:]},
        ),
        *section("What does it cost?", "cost", [_COSTS, costs_table(state)] if state.results.cells else []),
        *section(
            "Which claims hold?" if state.entries else "How was it run?",
            "claims",
            [_claims_text(state), Ledger(ledger(state.entries))] if state.entries else [],
            {
                "How verdicts are made": [RULE] if state.entries else [],
                **text.pop("missing", {}),
                "How it was run": [str(state.environment.get("setups") or ""), run_table(state, "models")],
                "Settings": [Markup('<pre style="white-space:pre-wrap">{}</pre>').format(state.spec.to_yaml())],
                f"All {state.total} models": [models_table(state, text=only)],
            },
        ),
    ]
    return Page(
        "study", state.spec.title, _question(state, spoken), answer(state), picture, sections,
        _notes(state), _warnings(state),
    )  # fmt: skip


# ---- the first screen ------------------------------------------------------------------------------------------------


def _question(state: Grid, spoken: Sequence[str]) -> str:
    tasks, encodings = list(state.spec.tasks), list(encoding_styles(state.spec).values())
    if len(encodings) == 1:
        return f"How well does {encodings[0].title} do on {_count(len(tasks), 'task')}?"
    if list(spoken) == tasks:
        return "Which encoding models text best, and does it hold on longer texts?"
    what = state.spec.title_of(tasks[0]) if len(tasks) == 1 else f"these {len(tasks)} tasks"
    return f"Which encoding is best at {what}?"


def answer(state: Grid) -> str:
    """The best encodings by task, with intervals over seeds, and how many claims are open."""
    spoken = [state.spec.title_of(task) for task in language_tasks(state.spec)]
    parts = language.answers(state)
    found = {task: each for task, each in by_task(state, lambda cell: cell.accuracy).items() if task not in spoken}
    if not found and not parts:
        return "No model is finished yet."
    if len(found) > _NAMED:
        alone = [
            f"{each[0].title} on {task} ({accuracy_text(each[0].mean)})"
            for task, each in found.items()
            if len(each) > 1 and len(best_of(each)) == 1
        ]
        parts.append(f"Best, or tied with the best: {tally(found)}.")
        parts.append(f"Best alone: {listed(alone)}." if alone else "On no task is one encoding better than all others.")
    elif found:
        parts.append(f"By test accuracy: {'; '.join(_winner(task, each) for task, each in found.items())}.")
    seeds = state.spec.seeds
    few = "With one seed this is only indicative."
    return " ".join([*parts, f"Brackets and ties: 95% intervals over {seeds} seeds." if seeds > 1 else few])


def _winner(task: str, found: Sequence[Any]) -> str:
    best = best_of(found)
    value = accuracy_text(found[0].mean)
    ties = f", tied with {listed(best[1:])}" if len(best) > 1 else ""
    return f"{best[0]} on {task} ({value}{ties})"


def _claims_text(state: Grid) -> str:
    counts = Counter(entry.verdict for entry in state.entries)
    holds, fails = counts["holds"] + counts["holds in part"], counts["fails"]
    part = f" ({counts['holds in part']} in part)" if counts["holds in part"] else ""
    still = sum(counts[verdict] for verdict in OPEN)
    return f"Of {_count(len(state.entries), 'claim')}, {holds} hold{part}, {fails} fail and {still} are open."


def _notes(state: Grid) -> list[str]:
    few = f"With {_count(state.spec.seeds, 'seed')} per cell, verdicts are only indicative: they need {ENOUGH}."
    claims = f"{_claims_text(state)} " if state.entries else ""
    return [state.spec.about, (claims + few if state.spec.seeds < ENOUGH else claims).strip()]


def _warnings(state: Grid) -> list[str]:
    found = []
    if not state.complete:
        share = f"{100 * state.share:.3g}% of the steps"
        found.append(f"Not complete: {state.finished} of {state.total} models are finished ({share}).")
    titles = {column.label: column.title for column in state.spec.columns()}
    gone = [
        f"{titles[cell.key.label]}, {state.spec.title_of(cell.key.task)}, seed {cell.key.seed}"
        for cell in state.results.cells
        if cell.status == "diverged"
    ]
    if gone:
        more = f"; and {len(gone) - 8} more, see the table of models" if len(gone) > 8 else ""
        found.append(f"{_count(len(gone), 'run')} diverged and have no accuracy: {'; '.join(gone[:8])}{more}.")
    return found


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# ---- accuracy --------------------------------------------------------------------------------------------------------

_ACCURACY = (
    "Mean test accuracy with its 95% interval over seeds (Student’s t, for a standard deviation of at least 0.5 points); "
    "one seed has no interval."
)
_MATRIX = (
    "Test accuracy in per cent, mean over seeds, with the lowest and highest seed. The colour shows skill: accuracy "
    "above that of guessing from the length alone, relative to the maximum possible gain. “Still learning”: models "
    "whose accuracy was still changing when training ended. A dash: not finished; empty: not part of the study."
)


def accuracy_chart(state: Grid) -> Chart:
    """Mean accuracy of each encoding on each task, with its interval over seeds."""
    rows = seed_means(({**row, "value": cell.accuracy} for cell, row in models(state)), grain=GRAIN)
    if not rows:
        return None
    for row in rows:
        row |= {"low": max(0.0, row["low"]), "high": min(1.0, row["high"])}
    looks, places = (
        drawn(encoding_styles(state.spec).values(), rows),
        [state.spec.title_of(t) for t in state.spec.tasks],
    )
    pitch = max(5, min(11, _ROOM // (len(places) * len(looks))))
    tips = tooltip(series="Encoding", task="Task", value="Accuracy|.1%", low="From|.1%", high="To|.1%", seeds="Seeds")
    value = number("value", "test accuracy", zero=False, format=".0%")
    return intervals(rows, value, names("task", places), looks, tips=tips, pitch=pitch)


def best_table(state: Grid) -> Table:
    """Per task: the best encoding, those that equal it, and the best of the others."""
    rows = []
    for task, found in by_task(state, lambda cell: cell.accuracy).items():
        best = best_of(found)
        other = next((each for each in found if each.title not in best), None)
        rows.append(
            [
                task,
                Cell(found[0].title, (f"or {listed(best[1:])}" if len(best) > 1 else "",), style="min-width:13em"),
                accuracy_text(found[0].mean),
                other.title if other else DASH,
                accuracy_text(other.mean) if other else DASH,
            ]
        )
    note = (
        "Test accuracy in per cent with 95% intervals over seeds. Or: encodings whose difference from the best has an "
        "interval that includes 0 (95% for all encodings of the task together, Bonferroni)."
    )
    columns = ["Task", "Best", Cell("Accuracy", right=True), "Best of the others", Cell("Accuracy", right=True)]
    return make_table("Best encoding by task", columns, rows, right=(2, 4), note=note, css="small")


def matrix_table(state: Grid) -> Table:
    """Mean test accuracy of each task and encoding, with baselines; scans are left out."""
    looks, tasks = encoding_styles(state.spec), {column.label: column.tasks for column in state.spec.columns()}
    found = {(row.task, row.label): row for row in state.matrix()}
    rows = []
    for task in state.spec.tasks:
        mine = [row for (of, _), row in found.items() if of == task]
        most = max(mine, key=lambda row: row.seeds - row.diverged, default=None)
        guesses = [percent(each, sign=False) for each in ((most.chance, most.length_chance) if most else (None, None))]
        rule = Cell(small=(DASH,), right=True)  # the best one, from the encoding with the most finished models
        if most and most.rule is not None and most.rule_accuracy is not None:
            rule = _tinted(most.rule_accuracy, skill(most.rule_accuracy, most.length_chance), most.rule)
        each = [
            _entry(found.get((task, label)), state.spec.seeds) if task in tasks[label] else Cell() for label in looks
        ]
        rows.append([state.spec.title_of(task), *each, *guesses, rule])
    columns = [Cell(one.title, right=True, sign=one) for one in looks.values()]
    baselines = [Cell(text, right=True) for text in ("Constant guess", "Length only", "Simple rule")]
    name = "Test accuracy by task and encoding"
    return make_table(name, ["Task", *columns, *baselines], rows, right=range(1, len(looks) + 4), css="small")


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


# ---- longer sequences ------------------------------------------------------------------------------------------------

_LENGTHS = (
    "Skill on test sequences of the training length and longer, mean over seeds. Skill is the accuracy above that of "
    "guessing from the length alone, relative to the maximum possible gain: 100% means all correct."
)
_RELATIONS = (
    "Spearman’s rank correlation between a property of the heads and the share of skill that remains on longer "
    "sequences, over models with skill, with ranks within each task. Lines: 95% interval by a jackknife over families "
    "of encodings (those in which position enters in the same way); none with fewer than four families. Correlation "
    "does not imply causation."
)
_PROPERTIES = {
    "deposit": "largest drop from one head",
    "positional": "positional share",
    "symbolic": "symbolic share",
    "interaction": "interaction share",
}


def _longer(state: Grid) -> Parts:
    found = by_task(state, lambda cell: heads.skill_at(cell, heads.LONGER))
    text = ""
    if found:
        each = f"Of {_count(len(found), 'task')} with results at {heads.LONGER:g} times the training length"
        text = f"{each}, among the best in skill are {tally(found)}."
    return [*figure("lengths", "Skill by sequence length", lengths_chart(state), _LENGTHS), text, _not_evaluated(state)]


def lengths_chart(state: Grid) -> Chart:
    """Skill by the length of the test sequences, a panel per task."""
    rows = seed_means(
        {**row, "factor": round(length.factor, 4), "value": heads.skill_at(cell, length.factor)}
        for cell, row in models(state)
        for length in _rows(cell)
        if length.accuracy is not None
    )
    if not rows:
        return None
    x = number("factor", "length / training length", kind="log", values=[1, 1.5, 2, 3, 4], domain=[1, 4])
    low = min(0.0, *(row["value"] for row in rows))
    y = number("value", "skill", format=".0%", domain=[low, 1], tickCount=4)
    tips = tooltip(series="Encoding", factor="Length|.3~g", value="Skill|.1%", low="From|.1%", high="To|.1%")
    return panels(curves(rows, x, y, drawn(encoding_styles(state.spec).values(), rows), tips=tips), rows, "task")


def _rows(cell: CellResult) -> Sequence[Any]:
    found = cell.measure("extrapolation")
    return () if found is None else found.rows


def _not_evaluated(state: Grid) -> str:
    """Lengths without results, on which tasks, and why."""
    reasons: dict[tuple[float, str], list[str]] = {}
    for cell, row in models(state):
        for length in _rows(cell):
            if length.accuracy is None:
                reasons.setdefault((length.factor, length.why or "reason not recorded."), []).append(row["task"])
    each = [
        f"{listed(dict.fromkeys(tasks))} at {factor:.3g} times the training length: {why}"
        for (factor, why), tasks in sorted(reasons.items())
    ]
    return f"Not evaluated: {' '.join(each)}" if each else ""


def _correlates(state: Grid) -> dict[str, Parts]:
    chart = figure("relations", "Correlates of length extrapolation", relations_chart(state), _RELATIONS)
    return {"What goes with it in the heads?": [*chart, relations_table(state)]} if state.relations else {}


def relations_chart(state: Grid) -> Chart:
    """Correlation of each property of the heads with the remaining skill, by length."""
    found = [each for each in state.relations if each.task is None and each.value is not None]
    rows = [
        {
            "property": _PROPERTIES[each.figure],
            "series": f"{each.factor:g}× the training length",
            "value": each.value,
            "low": each.value if each.low is None else each.low,
            "high": each.value if each.high is None else each.high,
            "models": len(each.points),
        }
        for each in found
    ]
    if not rows:
        return None
    looks = [style(f"{factor:g}× the training length", index=n) for n, factor in enumerate(FACTORS[1:])]
    tips = tooltip(property="Property", series="Length", value="Correlation|.2f", low="From|.2f", high="To|.2f")
    value = number("value", "correlation with the remaining skill", domain=[-1, 1])
    order = names("property", _PROPERTIES.values())
    return intervals(rows, value, order, drawn(looks, rows), tips=tips, levels={"": 0.0})


def relations_table(state: Grid) -> Table:
    """Every correlation, over all tasks and of each task."""
    order = list(FIGURES)
    rows = [
        [
            FIGURES[each.figure][0],
            "all" if each.task is None else state.spec.title_of(each.task),
            f"{each.factor:g}×",
            signed(each.value),
            DASH if each.low is None else f"{signed(each.low)} to {signed(each.high)}",
            str(len(each.points)),
            str(each.encodings),
        ]
        for each in sorted(state.relations, key=lambda each: (each.task is not None, order.index(each.figure)))
    ]
    columns = ["Property of the heads", "Tasks", "Length", "Correlation", "95% interval", "Models", "Encodings"]
    note = (
        "A dash: fewer than four encodings, or no variation; without interval: fewer than four families of encodings."
    )
    name = "Correlations with the skill remaining on longer sequences"
    return make_table(name, columns, rows, right=range(2, 7), note=note, css="small")


# ---- heads -----------------------------------------------------------------------------------------------------------

_PLANE = (
    f"Shares of the variance of a head’s logits explained by the position of keys (positional), by their content "
    f"(symbolic), and only by both together (the rest). A mark per encoding: mean over heads, weighted by the effect "
    f"of ablating them on the loss, and over seeds, for models with at least {SKILLED:.0%} skill."
)
_HEADS = (
    "A mark per head of the models with skill; larger marks lose more accuracy when the head is ablated. Heads without "
    "such an effect often look symbolic: the shares describe logits, not function."
)
_TRAINING = (
    "The head whose ablation increases the loss most after training, at every checkpoint, with the accuracy of the "
    "model on the probing examples. Mean over seeds, each with its own head; bands show the range."
)


def plane_chart(state: Grid) -> Chart:
    """Weighted shares of the heads of each encoding, a panel per task."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for share in ("positional", "symbolic"):
        for each in seed_means({**r, "value": heads.carried(cell, share)} for cell, r in models(state, skilled=True)):
            row = rows.setdefault((each["task"], each["series"]), {"task": each["task"], "series": each["series"]})
            row |= {share: each["value"], f"{share} of seeds": f"{fixed(each['low'])} to {fixed(each['high'])}"}
    found = list(rows.values())
    if not found:
        return None
    tips = tooltip(series="Encoding", task="Task", positional="Positional|.2f", symbolic="Symbolic|.2f")
    tips += tooltip(**{"positional of seeds": "Positional, seeds", "symbolic of seeds": "Symbolic, seeds"})
    chart = plane(found, drawn(encoding_styles(state.spec).values(), found), tips=tips)
    return panels(chart, found, "task", height=170)


def _heads_text(state: Grid) -> str:
    """The tasks on which heads are most positional and most symbolic."""
    told = []
    for share in ("positional", "symbolic"):
        values: dict[str, list[float]] = {}
        for cell, row in models(state, skilled=True):
            if isfinite(value := heads.carried(cell, share)):
                values.setdefault(row["task"], []).append(value)
        if len(values) > 1:
            means = {task: float(np.mean(each)) for task, each in values.items()}
            task = max(means, key=lambda each: means[each])
            told.append(f"most {share} on {task} ({fixed(means[task])})")
    return f"Mean share over encodings: heads are {' and '.join(told)}." if told else ""


def heads_chart(state: Grid) -> Chart:
    """Every head of the models with skill, a panel per task."""
    rows = [
        {**row, **each, "head": f"seed {cell.key.seed}, layer {at[0] + 1}, head {at[1] + 1}", "drop": float(lost[at])}
        for cell, row in models(state, skilled=True)
        if (found := cell.measure("behaviour")) is not None and (lost := heads.drops(cell)) is not None
        for at in np.ndindex(lost.shape)
        if isfinite((each := _shares_at(found, at))["positional"]) and isfinite(each["symbolic"])
    ]
    if not rows:
        return None
    tips = tooltip(series="Encoding", head="Head", positional="Positional|.2f", symbolic="Symbolic|.2f")
    tips += tooltip(drop="Accuracy drop when ablated|.1%")
    chart = plane(rows, drawn(encoding_styles(state.spec).values(), rows), tips=tips, size="drop")
    return panels(chart, rows, "task", height=200, columns=3)


def _shares_at(found: Any, at: tuple[int, ...]) -> dict[str, float]:
    return {name: float(getattr(found, name)[at]) for name in ("positional", "symbolic")}


def _without(state: Grid) -> str:
    """Encodings without marks among the heads, and why."""
    missing = []
    for label, one in encoding_styles(state.spec).items():
        cells = [cell for cell in state.results.cells if cell.key.label == label and cell.status == "complete"]
        skilled = [cell for cell in cells if cell.skilled]
        if any(cell.measure("behaviour") is not None and heads.drops(cell) is not None for cell in skilled):
            continue
        reasons = list(dict.fromkeys(why for cell in cells if (why := cell.reason("behaviour"))))
        if not cells:
            why = "no model is finished"
        elif reasons:
            why = " ".join(reasons)
        elif "behaviour" not in state.spec.measures:
            why = "the study does not include the measure behaviour"
        else:
            why = f"no model has at least {SKILLED:.0%} skill" if not skilled else "not measured"
        missing.append(f"{one.title}: {why.rstrip('.')}.")
    return " ".join(missing)


def training_chart(state: Grid) -> Chart:
    """Shares of the finally most important head and the accuracy during training, by task and encoding."""
    lines = {"accuracy": style("accuracy", "nope"), **{n: style(f"{n} share", index=i) for i, n in enumerate(_SHARES)}}
    rows = seed_means(
        {"panel": f"{row['task']}, {row['series']}", "series": lines[name].title, "step": step, "value": value}
        for cell, row in models(state)
        for name in lines
        for step, value in followed(cell, name)
    )
    if not rows:
        return None
    x, y = number("step", "optimizer steps", tickCount=4), number("value", "", **_SHARE)
    tips = tooltip(series="Line", step="Step|,", value="Mean|.2f", low="From|.2f", high="To|.2f")
    chart = curves(rows, x, y, drawn(lines.values(), rows), low="low", high="high", points=False, tips=tips)
    return panels(chart, rows, "panel", height=110)


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


# ---- frequencies -----------------------------------------------------------------------------------------------------

_UNITS = {"frequencies": "rad per position"}  # of scanned options
_DECADES = 2  # wider scans have a logarithmic axis
_SCAN = (
    "Models that differ only in one option, mean over seeds; bands show the range. Shares of the heads are weighted by "
    f"the effect of ablating them, for models with at least {SKILLED:.0%} skill."
)
_BANDS = (
    "Increase of the cross-entropy when one frequency of one head is frozen, summed over heads and layers. Mean over "
    "models with skill, bands show the range over seeds. Each panel has its own scale; frequencies of 0 are left out."
)
_CENTRE = (
    "Heads with rotation, of models with skill: mean log₂ frequency, weighted by the share of the logits’ variance in "
    "each frequency. 0 octaves are 1 rad per position, −1 octave is half of that. Larger marks lose more accuracy when "
    "ablated."
)


def _scans(state: Grid) -> Parts:
    """A figure per scanned option, and where the accuracy is highest."""
    by_scan: dict[str, list[Column]] = {}
    for column in state.spec.columns():
        if column.scan:
            by_scan.setdefault(column.scan, []).append(column)
    made: Parts = []
    for label, columns in by_scan.items():
        part = state.spec.encodings[label]
        option, rows = next(iter(part.scan)), scan_rows(state, columns)
        title = f"{part.title or label}, by {option}"
        made += figure("scan" if len(by_scan) == 1 else f"scan-{label}", title, scan_chart(state, rows, option), _SCAN)
        best = {
            row["series"]: row for row in sorted(rows, key=lambda row: row["value"]) if row["panel"] == "Test accuracy"
        }
        told = [f"{row['at']:g} on {task} ({percent(row['value'])})" for task, row in sorted(best.items())]
        made += [f"{title}: the accuracy is highest at {listed(told)}."] if told else []
    return made


def scan_rows(state: Grid, columns: Sequence[Column]) -> Rows:
    """Accuracy and weighted shares by value of the option and task."""
    values = {column.title: float(column.value or 0) for column in columns}
    found = []
    for cell, row in models(state, scans=True):
        if row["series"] in values:
            at = {"at": values[row["series"]], "series": row["task"]}
            found.append({**at, "panel": "Test accuracy", "value": cell.accuracy})
            for share in ("positional", "symbolic") if cell.skilled else ():
                found.append({**at, "panel": f"{share} share".capitalize(), "value": heads.carried(cell, share)})
    return sorted(seed_means(found), key=lambda row: row["panel"] != "Test accuracy")


def scan_chart(state: Grid, rows: Rows, option: str) -> Chart:
    """Accuracy and weighted shares of the heads against a scanned option, a line per task."""
    if not rows:
        return None
    values = sorted({row["at"] for row in rows})
    wide = values[0] > 0 and log10(values[-1] / values[0]) > _DECADES
    x = number("at", _UNITS.get(option, option), tickCount=5, **({"kind": "log"} if wide else {"zero": False}))
    tips = tooltip(series="Task", at="Value|~g", value="Mean|.1%", low="From|.1%", high="To|.1%", seeds="Seeds")
    looks = drawn(task_styles(state.spec), rows)
    chart = curves(rows, x, number("value", "", **_SHARE), looks, low="low", high="high", tips=tips)
    return panels(chart, rows, "panel", columns=3, height=200)


def bands_chart(state: Grid) -> Chart:
    """The effect of freezing each frequency, a panel per encoding."""
    rows = seed_means(
        {"encoding": row["series"], "series": row["task"], "frequency": frequency, "value": value}
        for cell, row in models(state, skilled=True)
        for frequency, value in worth(cell).items()
    )
    if not rows:
        return None
    x = number("frequency", "rad per position", kind="log", tickCount=4, format="~g")
    tips = tooltip(series="Task", frequency="Frequency|.3~g", value="Mean|.2f", low="From|.2f", high="To|.2f")
    looks = drawn(task_styles(state.spec), rows)
    chart = curves(rows, x, number("value", "nats", tickCount=4), looks, low="low", high="high", tips=tips)
    return panels(chart, rows, "encoding", columns=3, height=170, free=["y"])


def worth(cell: CellResult) -> dict[float, float]:
    """Loss increase in nats per frequency above 0, summed over the heads that have it; empty if not measured."""
    lost, use = cell.measure("bands"), cell.measure("frequency")
    total: dict[float, float] = {}
    if lost is None or use is None:
        return total
    for drops, frequencies in zip(lost.drops, use.frequencies, strict=True):
        for head, turning in zip(drops, frequencies, strict=True):
            for drop, frequency in zip(head, turning, strict=True):
                if frequency > 0 and np.isfinite(drop):
                    total[frequency] = total.get(frequency, 0.0) + drop
    return total


def centre_chart(state: Grid) -> Chart:
    """Each head of a rotary encoding: centre of its frequency use against its positional share."""
    rows = [
        {
            "panel": "Scans, one value per model" if scans else "Encodings with several frequencies",
            "series": row["task"],
            "head": f"{row['series']}, seed {cell.key.seed}, layer {at[0] + 1}, head {at[1] + 1}",
            "centre": float(use.centre[at]),
            "share": float(shares.positional[at]),
            "size": float(lost[at]),
        }
        for scans in (False, True)
        for cell, row in models(state, skilled=True, scans=scans)
        if (use := cell.measure("frequency")) and (shares := cell.measure("behaviour"))
        if (lost := heads.drops(cell)) is not None
        for at in np.ndindex(lost.shape)
        if isfinite(use.centre[at]) and isfinite(shares.positional[at])
    ]
    if not rows:
        return None
    x, y = (
        number("centre", "centre of frequency use (octaves)", zero=False),
        number("share", "positional share", **_SHARE),
    )
    tips = tooltip(series="Task", head="Head", centre="Octaves|.2f", share="Positional|.2f", size="Accuracy drop|.1%")
    chart = scatter(rows, x, y, drawn(task_styles(state.spec), rows), tips)
    return panels(chart, rows, "panel", columns=2, height=260)


# ---- cost and models -------------------------------------------------------------------------------------------------

_COSTS = (
    "Means over tasks of the finished models, with the lowest and highest task in brackets. Seconds are wall time and "
    "include the load of other processes. Relative time: geometric mean of the ratio to the first encoding over common "
    "tasks. Toeplitz share: the share of the logits’ energy that remains when each diagonal is replaced by its mean."
)


def costs_table(state: Grid) -> Table:
    """Cost and Toeplitz share of each encoding, means over tasks; scans are left out."""
    looks, found = encoding_styles(state.spec), state.matrix()
    first = {row.task: row.train_seconds for row in found if row.label == next(iter(looks), None)}
    lines = []
    for label, one in looks.items():
        rows = [row for row in found if row.label == label and row.seeds > row.diverged]
        if rows:
            sizes = sorted({row.parameters for row in rows})
            logs = [np.log(row.train_seconds / o) for row in rows if row.train_seconds and (o := first.get(row.task))]
            lines.append(
                [
                    Cell(one.title, sign=one),
                    str(sum(row.seeds - row.diverged for row in rows)),
                    "–".join(f"{size:,}" for size in dict.fromkeys((sizes[0], sizes[-1]))),
                    told((row.train_seconds for row in rows), 1),
                    f"{np.exp(np.mean(logs)):.2f}" if logs else DASH,
                    told((row.toeplitz for row in rows), 1, 100),
                ]
            )
    columns = ["Encoding", "Models", "Parameters", "Training time (s)", "Relative time", "Toeplitz share (%)"]
    return make_table("Cost by encoding", columns, lines, right=range(1, 6))


def models_table(state: Grid, *, text: bool) -> Table:
    """Every model of the grid, including scans; ``text`` adds bits per byte."""
    done = {cell.key: cell for cell in state.results.cells}
    titles = {column.label: column.title for column in state.spec.columns()}
    lines = []
    for place in cells(state.spec):
        found = done.get(place.key)
        values: list[float | None] = [None] * 4
        if found is not None:
            carried = [heads.carried(found, share) if found.skilled else None for share in ("positional", "symbolic")]
            values = [found.accuracy, found.skill, *carried]
        lines.append(
            [
                titles[place.key.label],
                state.spec.title_of(place.key.task),
                str(place.key.seed),
                found.status if found else "not finished",
                *([fixed(found and of(found), 3) for of in (bits, lost)] if text else []),
                *(percent(value, sign=False) for value in values),
                code(f"runs/{place.job.spec.name}"),
            ]
        )
    shown = ["Bits per byte", f"Loss at {LONG:g}×", "Next-token accuracy, %"] if text else ["Test, %"]
    shown += ["Skill, %", "Positional, %", "Symbolic, %"]
    columns = ["Encoding", "Task", "Seed", "Status", *shown, "Run"]
    return make_table("Models", columns, lines, right={2, *range(4, 4 + len(shown))}, css="small")
