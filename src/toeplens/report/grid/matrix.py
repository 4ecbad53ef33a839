"""A grid study's tables: accuracies, costs of each encoding, and all models."""

from __future__ import annotations

import numpy as np

from toeplens.ground.words import fixed, percent
from toeplens.report.grid.look import Spread, encoding_looks
from toeplens.report.kit.tables import DASH, Cell, Table, code, make_table
from toeplens.studies.grid import Grid, Row, cells
from toeplens.studies.grid import language as of_language
from toeplens.studies.grid import measured as heads
from toeplens.studies.kit.results import skill

_DEEPEST = 55  # strongest tint of a cell in per cent, so that text stays readable


def matrix(state: Grid) -> Table:
    """Mean test accuracy of each task and encoding, with baselines; scans are left out."""
    looks = encoding_looks(state.spec)
    tasks = {column.label: column.tasks for column in state.spec.columns()}
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
        rows.append([state.spec.title_of(task), *each, Cell(guesses[0], right=True, css="edge"), guesses[1], rule])
    names = [
        Cell(one.title, right=True, sign=one, css="edge" if i == 0 else "") for i, one in enumerate(looks.values())
    ]
    rules = [Cell("Constant guess", right=True, css="edge"), Cell("Length only", right=True)]
    groups = [Cell("Encoding", across=len(looks), css="group")] if looks else []
    return make_table(
        "Test accuracy by task and encoding",
        [*names, *rules, Cell("Simple rule", right=True)],
        rows,
        groups=[Cell("Task", down=2), *groups, Cell("Baselines", across=3, css="group")],
        right=range(1, len(looks) + 4),
        note="Percent, mean over seeds. Small print: lowest and highest seed.",
        css="numbers matrix",
    )


def _entry(row: Row | None, planned: int) -> Cell:
    if row is None:
        return Cell(small=(DASH,), right=True)
    count = row.seeds - row.diverged
    if not count:
        return Cell(small=("diverged" if row.seeds == 1 else f"all {row.seeds} diverged",), right=True)
    notes = [f"{row.diverged} diverged"] if row.diverged else []
    if row.learning:
        notes.append(f"{row.learning}/{count} still learning")
    if row.seeds < planned:
        notes.append(f"{row.seeds}/{planned} seeds")
    ends = (percent(end, sign=False).replace("100.0", "100") for end in (row.lowest, row.highest))  # columns are narrow
    return _tinted(row.accuracy, row.skill, "–".join(ends) if count > 1 else "", ", ".join(notes))


def _tinted(accuracy: float | None, skill: float | None, *small: str) -> Cell:
    """An accuracy, coloured by skill."""
    css = "" if skill is None else f"tint {'less' if skill < 0 else 'more'}"
    depth = 0 if skill is None else _DEEPEST * min(1.0, abs(skill))
    return Cell(percent(accuracy, sign=False), small, right=True, css=css, style=f"--size:{depth:.0f}%")


def costs(state: Grid) -> Table:
    """Cost and Toeplitz share of each encoding, means over tasks; scans are left out."""
    looks, found = encoding_looks(state.spec), state.matrix()
    first = {row.task: row.train_seconds for row in found if row.label == next(iter(looks), None)}
    lines = []
    for label, one in looks.items():
        rows = [row for row in found if row.label == label and row.seeds > row.diverged]
        if not rows:
            continue
        sizes = [row.parameters for row in rows]
        logs = [np.log(row.train_seconds / o) for row in rows if row.train_seconds and (o := first.get(row.task))]
        lines.append(
            [
                Cell(one.title, sign=one),
                str(sum(row.seeds - row.diverged for row in rows)),
                f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,}–{max(sizes):,}",
                Spread.of(row.train_seconds for row in rows).told(1),
                f"{np.exp(np.mean(logs)):.2f}" if logs else DASH,
                Spread.of(row.toeplitz for row in rows).told(1, percent=True),
            ]
        )
    over = f"Time relative to {next(iter(looks.values())).title}" if looks else "Time"
    return make_table(
        "Cost by encoding",
        ["Encoding", "Models", "Parameters", "Training time (s)", over, "Toeplitz share"],
        lines,
        right=range(1, 6),
        note="Mean over tasks; lowest and highest task in brackets.",
    )


def models(state: Grid, *, language: bool) -> Table:
    """Every model of the grid, including scans; ``language`` adds bits per byte."""
    done = {cell.key: cell for cell in state.results.cells}
    titles = {column.label: column.title for column in state.spec.columns()}
    lines = []
    for place in cells(state.spec):
        found, bits = done.get(place.key), []
        carried: list[float | None] = [None, None]
        if found is not None and found.skilled:
            carried = [heads.carried(found, share) for share in ("positional", "symbolic")]
        if language:
            known = found if found is not None and of_language.is_language(found) else None
            bits = [fixed(known and of(known), 3) for of in (of_language.bits, of_language.lost)]
        shares = [found.accuracy, found.skill, *carried] if found is not None else [None] * 4
        lines.append(
            [
                titles[place.key.label],
                state.spec.title_of(place.key.task),
                str(place.key.seed),
                found.status if found else "not finished",
                *bits,
                *(percent(share, sign=False) for share in shares),
                code(f"runs/{place.job.spec.name}"),
            ]
        )
    shown = (
        ["Bits\nper byte", f"Loss at\n{of_language.LONG:g}×", "Next-token\naccuracy, %"] if language else ["Test, %"]
    )
    shown += ["Skill, %", "Positional\nshare, %", "Symbolic\nshare, %"]
    right = {2, *range(4, 4 + len(shown))}
    return make_table(
        "Models", ["Encoding", "Task", "Seed", "Status", *shown, "Run"], lines, right=right, css="numbers small"
    )
