"""What the commands on pretrained models print: progress, tables of heads and layers, notes."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from toeplens import report
from toeplens.cli.console import err, out, print_json, say, table
from toeplens.ground.words import duration, fixed, spans
from toeplens.studies.auditing.record import LayerRecord
from toeplens.studies.auditing.result import Audit
from toeplens.studies.auditing.study import Data, audit_in
from toeplens.studies.auditing.words import Names, done, top_head
from toeplens.studies.kit.options import AuditOptions
from toeplens.studies.kit.questions import ABOUT
from toeplens.studies.probing.probe import ProbeRecord, interval, title_of

if TYPE_CHECKING:
    from toeplens.engine import Workers
    from toeplens.studies.auditing.many import Audited

_LISTED = 12  # heads printed
_NAMED = 4  # weights named in a note
_EVERY = 20.0  # seconds between two lines without a terminal
_SURE = 0.5  # seconds before the remaining time is estimated
_TOO_LONG = 180.0  # seconds of effects after which a faster option is suggested
_ROTATION = re.compile(r"rotation of \d+ pairs, (\d+) of (\d+) dimensions \((\w+)\)")


class AuditProgress:
    """Progress bars over an audit's layers and heads; plain lines if there is no terminal."""

    def __init__(self, shorter: str = "") -> None:
        """``shorter`` is the advice printed once if effects take long."""
        self.shorter = shorter
        columns = TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        left = TextColumn("{task.fields[left]}")
        self.bar = Progress(*columns, left, console=err, disable=not err.is_terminal)
        self.tasks: dict[str, TaskID] = {}
        self.began: dict[str, tuple[float, int]] = {}
        self.said: dict[str, float] = {}

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Update the number of layers or heads that are done."""
        now = time.monotonic()
        began, first = self.began.setdefault(what, (now, done))
        if what not in self.tasks:
            self.tasks[what] = self.bar.add_task(what, total=total, left="")
        left = ""
        if first < done < total and now - began > _SURE:
            seconds = (now - began) / (done - first) * (total - done)
            left = f"about {duration(max(1.0, seconds))} left"
            if what == "heads" and seconds > _TOO_LONG and self.shorter:
                say(f"{what}: about {duration(seconds)} left; {self.shorter}", aside=True)
                self.shorter = ""
        self.bar.update(self.tasks[what], completed=done, total=total)
        if left or done >= total:
            self.bar.update(self.tasks[what], left=left)
        if left and not err.is_terminal and now - self.said.get(what, -_EVERY) >= _EVERY:
            self.said[what] = now
            say(f"{what}: {done} of {total}, {left}", aside=True)

    def finish(self, line: str, prefix: str = "") -> None:
        """Remove the bars whose names begin with ``prefix``, and print a line."""
        for what in [what for what in self.tasks if what.startswith(prefix)]:
            self.bar.remove_task(self.tasks.pop(what))
            del self.began[what]
        say(line, aside=True)


def audit_tables(found: Audit) -> list[Table]:
    """Tables of the heads with the largest effect (or positional share), of the layers and of their effects."""
    known = any(head.effect is not None for head in found.heads)
    by = "effect" if known else "positional"
    columns = {"positional": "pos.", "symbolic": "symb.", "interaction": "int.", "toeplitz": "Toep."}
    columns |= {"previous": "prev.", "first": "first", "induction": "ind."}
    columns |= {"effect": "eff."} if known else {}
    names = Names.of(found)
    ordered = sorted(
        (each for each in found.heads if getattr(each, by) is not None), key=lambda each: -getattr(each, by)
    )
    title = "Heads with the largest effect" if known else "Most positional heads"
    cells = [
        (names.short(head), *(_short(getattr(head, name), name) for name in columns)) for head in ordered[:_LISTED]
    ]
    heads = table(title, "head", *columns.values(), rows=cells)
    heads.caption = (
        "Shares of the logits' variance: pos. positional, symb. symbolic, int. interaction; Toep.: Toeplitz share of "
        "their energy. Mean attention: prev. previous token, first token, ind. induction."
    )
    layers = table("Layers", "layers", "heads", "position", "window", "proof error")
    rows: dict[tuple[str, ...], list[LayerRecord]] = {}  # layers whose printed rows are equal
    for one in found.layers:
        count = str(one.heads) if one.heads == one.key_heads else f"{one.heads} on {one.key_heads} KV"
        position = _ROTATION.sub(r"rotates \1/\2 (\3)", one.position)
        rows.setdefault((names.place(one), count, position, _window(one)), []).append(one)
    for (place, *texts), alike in rows.items():
        proof = max(max(each.outputs, each.weights or 0.0) for each in alike)
        layers.add_row(f"{place}L{spans(each.layer + 1 for each in alike)}", *texts, f"{proof:.1e}")
    return [heads, layers, *([_deposits(found)] if known else []), *([_bands(found)] if found.bands else [])]


def _bands(found: Audit) -> Table:
    """Effect of freezing each band of each layer's frequencies; columns as in the layer with the most bands."""
    names = Names.of(found)
    layers = {names.short_layer(layer): found.bands_of(layer) for layer in found.layers}
    columns = [f"{band.first + 1}-{band.last + 1}" for band in max(layers.values(), key=len)]
    rows = [(layer, *(_short(band.effect, "effect") for band in bands)) for layer, bands in layers.items() if bands]
    cells = [(*row, *["–"] * (len(columns) + 1 - len(row))) for row in rows]
    return table("Loss increase when a band of frequencies is frozen, by pairs", "layer", *columns, rows=cells)


def _deposits(found: Audit) -> Table:
    """Each layer's helpful and harmful effects, and how concentrated the helpful ones are."""
    names, rows = Names.of(found), []
    for layer in found.layers:
        top, share = top_head(found, layer), layer.deposit.get("top_share")
        largest = ["–", "–", "–"]
        if top is not None and share is not None:
            effective = fixed(layer.deposit.get("effective_heads") or 0, 1)
            largest = [f"H{top.head + 1}", f"{fixed(100 * share, 0)}%", effective]
        effects = (_short(layer.deposit.get(name), "effect") for name in ("helps", "harms"))
        rows.append([names.short_layer(layer), *effects, *largest])
    columns = ("layer", "helpful", "harmful", "largest", "its share", "eff. heads")
    return table(f"Effect of {done(found)} heads by layer (–: within noise)", *columns, rows=rows)


def probe_table(found: ProbeRecord) -> Table:
    """Loss and accuracy per behaviour; for a changed model also the increase in nats."""
    rows = []
    for behaviour in ABOUT:
        for each in found.summaries(behaviour):
            row = [
                title_of(behaviour).lower(),
                str(each.count),
                interval(each.nats, 2),
                interval(each.right, 2, most=1),
            ]
            if found.changes:
                row += [interval(each.changed_nats, 2), interval(each.more_nats, 2, least=None)]
            rows.append(row)
    columns = ("predicted", "count", "nats per token", "accuracy", *(("changed", "increase") if found.changes else ()))
    return table("Loss and accuracy (95% intervals)", *columns, rows=rows)


def weight_notes(about: Mapping[str, Any]) -> Iterator[str]:
    """Notes on weights missing from the checkpoint and on weights that the model does not use."""

    def named(weights: Sequence[str]) -> str:
        return f"{len(weights)} ({', '.join(weights[:_NAMED])}{', ...' if len(weights) > _NAMED else ''})"

    if random := about.get("random_weights"):
        then = "later results do not describe a trained model"
        yield f"random weights, missing from the checkpoint: {named(random)}; {then}"
    if unused := about.get("unused_weights"):
        yield f"unused weights of the checkpoint: {named(unused)}"


def audit_notes(found: Audit) -> Iterator[str]:
    """Notes on an audit, one line each."""
    yield from weight_notes(found.about)
    if bos := found.about.get("unused_bos"):
        yield f"text: the tokenizer has a beginning-of-text token, {bos}, but does not add it to sequences"
    if "no_effects" in found.about:
        yield f"no effects: {found.about['no_effects']}"
    elif found.check is not None:
        yield f"estimated effects: {found.check.words}"
    if found.effect is not None and "intervals" in found.about:
        yield f"intervals are 95%, {found.about['intervals']}"
    if "race" in found.about:
        yield found.about["race"]
    yield f"relative difference between the captured and the plain forward pass: {found.whole:.1e}"


def _window(layer: LayerRecord) -> str:
    """How far back a layer's queries attend."""
    if layer.chunk is not None:
        return f"in {layer.chunk}s"
    return "–" if layer.window is None else f"{layer.window}" if layer.causal else f"±{layer.window - 1}"


def _short(value: float | None, name: str) -> str:
    if value is None or name != "effect" or value == 0 or abs(value) >= 0.0005:
        return fixed(value, 3 if name == "effect" else 2)
    return f"{value:.0e}"


def audit_one(model: str, directory: Path, data: Data, options: AuditOptions, *, as_json: bool) -> None:
    """Audit one model, and print its tables and notes."""
    shorter = "--effects none skips them."
    if options.first is None and (not isinstance(data, dict) or len(data) < 2):
        shorter = "--first 10 finds only the 10 largest effects; --effects none skips them."
    with AuditProgress(shorter) as progress:
        found = audit_in(directory, model, data, options, report.write_report, on_progress=progress)
    page = directory / report.PAGE
    if as_json:
        print_json({**found.summary(), "page": str(page)})
        return
    for each in audit_tables(found):
        out.print(each)
    for line in audit_notes(found):
        say(line)
    say(f"page: {page}")


# ---- several models ----------------------------------------------------------------------------------------------


def audit_all(
    models: Sequence[str], directory: Path, data: Data, options: AuditOptions, workers: Workers, *, as_json: bool
) -> None:
    """Audit models, print a line for each, and exit with an error code if one failed."""
    from toeplens.studies.auditing.many import audit_many

    numbers = itertools.count(1)

    def finished(each: Audited, new: bool) -> None:
        told, seconds = f"{each.heads} heads", each.about.get("seconds")
        if each.why is not None:
            told = "failed"
        elif not new:
            told += ", already done"
        elif seconds is not None:
            told += f" in {duration(max(1.0, seconds))}"
        progress.finish(f"[{next(numbers)}/{len(models)}] {each.name}: {told}", f"{each.name}: ")

    with AuditProgress() as progress:
        found = audit_many(
            models,
            directory,
            data,
            options,
            workers=workers,
            write=report.write_report,
            on_progress=lambda name, what, done, total: progress(f"{name}: {what}", done, total),
            on_done=finished,
        )
    pages = {each.name: str(directory / each.name / report.PAGE) for each in found.done}
    if as_json:
        print_json({**found.to_dict(), "pages": pages})
    elif pages:
        out.print(many_table(found.done))
        for each in found.done:
            why = each.about.get("no_effects")
            for line in (*weight_notes(each.about), *([] if why is None else [f"no effects: {why}"])):
                say(f"{each.name}: {line}")
        say(f"pages: {directory / '*' / report.PAGE}")
    for each in found.failed:
        err.print(f"error: {each.name}: {each.why}", highlight=False, markup=False, soft_wrap=True)
    if found.code:
        raise typer.Exit(found.code)


def many_table(rows: Sequence[Audited]) -> Table:
    """One line per model: heads, mean positional share, largest effect, proof error."""
    columns = ("model", "layers", "heads", "pos.", "loss", "effect", "of", "proof")
    cells = []
    for each in rows:
        sizes = escape(each.name), str(each.layers), str(each.heads)
        figures = fixed(each.positional, 2), fixed(each.baseline, 3), fixed(each.effect, 3)
        cells.append((*sizes, *figures, each.head or "–", f"{max(each.difference or 0.0, each.whole or 0.0):.1e}"))
    return table("Audits (mean positional share, largest effect)", *columns, rows=cells)
