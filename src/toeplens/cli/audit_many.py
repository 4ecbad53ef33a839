"""What `toeplens audit` prints of several models: how far each is, a line for each, and what failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from toeplens import report
from toeplens.cli.audit_output import AuditProgress, weight_notes
from toeplens.cli.console import err, out, print_json, say, table
from toeplens.engine import Workers
from toeplens.ground.words import duration, fixed
from toeplens.studies.auditing.many import Audited, Request, audit_many


def audit_all(models: Sequence[str], directory: Path, request: Request, workers: Workers, *, as_json: bool) -> None:
    """Audit models, print a line of each, and raise what failed as an exit code."""
    with ManyProgress(len(models)) as progress:
        found = audit_many(
            models,
            directory,
            request,
            workers=workers,
            write=report.write_audit,
            on_progress=progress.of,
            on_done=progress.finished,
        )
    pages = {each.name: str(directory / each.name / report.PAGE) for each in found.done}
    if as_json:
        print_json({**found.to_dict(), "pages": pages})
    elif pages:
        out.print(many_table(found.done))
        for each in found.done:
            for line in notes(each):
                say(f"{each.name}: {line}")
        say(f"pages: {directory / '*' / report.PAGE}")
    for each in found.failed:
        err.print(f"error: {each.name}: {each.why}", highlight=False, markup=False, soft_wrap=True)
    if found.code:
        raise typer.Exit(found.code)


class ManyProgress(AuditProgress):
    """Live bars over what is done of each model, with a line for each that is finished."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.done = count, 0

    def of(self, name: str, what: str, done: int, total: int) -> None:
        """Take note of how many layers or heads of a model are done."""
        self(f"{name}: {what}", done, total)

    def finished(self, found: Audited, new: bool) -> None:
        """Take note of what became of a model."""
        self.done += 1
        for what in [what for what in self.tasks if what.startswith(f"{found.name}: ")]:
            self.bar.remove_task(self.tasks.pop(what))
        told = "failed" if found.why is not None else f"{found.heads} heads"
        if found.why is None:
            seconds = found.about.get("seconds")
            told += ", as it was" if not new else "" if seconds is None else f" in {duration(max(1.0, seconds))}"
        say(f"[{self.done}/{self.count}] {found.name}: {told}", aside=True)


def many_table(rows: Sequence[Audited]) -> Table:
    """A line a model: its heads, how positional they are, which matters most, and the proof."""
    columns = ("layers", "heads", "pos.", "loss", "effect", "of", "proof")
    made = table("Audits (mean positional share, largest effect)", "model", *columns)
    for each in rows:
        made.add_row(
            escape(each.name),
            str(each.layers),
            str(each.heads),
            fixed(each.positional, 2),
            fixed(each.baseline, 3),
            fixed(each.effect, 3),
            each.head or "–",
            f"{max(each.difference or 0.0, each.whole or 0.0):.1e}",
        )
    return made


def notes(each: Audited) -> list[str]:
    """What has to be known of an audit beside its line."""
    why = each.about.get("no_effects")
    return [*weight_notes(each.about), *([] if why is None else [f"no effects: {why}"])]
