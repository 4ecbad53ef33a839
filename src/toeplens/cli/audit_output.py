"""What the commands on pretrained models print: progress, tables of heads and layers, notes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from toeplens import report
from toeplens.cli.console import err, out, print_json, say, table
from toeplens.engine import Workers
from toeplens.ground.words import duration, fixed, spans
from toeplens.studies.auditing import Audit, LayerRecord
from toeplens.studies.auditing.many import Audited, Request, audit_many
from toeplens.studies.auditing.words import Names, done
from toeplens.studies.probing import ABOUT, ProbeRecord
from toeplens.studies.probing.record import interval, title_of

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


class PieceProgress(AuditProgress):
    """The same, with a line for each finished piece of a study."""

    def finished(self, name: str, at: int, count: int) -> None:
        """Print a finished piece."""
        for task in self.tasks.values():
            self.bar.remove_task(task)
        self.tasks, self.began = {}, {}
        say(f"[{at}/{count}] {name}", aside=True)


def audit_tables(found: Audit) -> list[Table]:
    """Tables of the heads with the largest effect (or positional share), of the layers and of their effects."""
    known = any(head.effect is not None for head in found.heads)
    by = "effect" if known else "positional"
    ordered = sorted(found.heads, key=lambda head: -np.inf if getattr(head, by) is None else -getattr(head, by))
    columns = {"positional": "pos.", "symbolic": "symb.", "interaction": "int.", "toeplitz": "Toep."}
    columns |= {"previous": "prev.", "first": "first", "induction": "ind."}
    columns |= {"effect": "eff."} if known else {}
    names = Names.of(found)
    heads = table("Heads with the largest effect" if known else "Most positional heads", "head", *columns.values())
    for head in [head for head in ordered if getattr(head, by) is not None][:_LISTED]:
        heads.add_row(names.short(head), *(_short(getattr(head, name), name) for name in columns))
    heads.caption = (
        "Shares of the logits' variance: pos. positional, symb. symbolic, int. interaction; Toep.: Toeplitz share of "
        "their energy. Mean attention: prev. previous token, first token, ind. induction."
    )
    layers = table("Layers", "layers", "heads", "position", "window", "proof error")
    rows: dict[tuple[object, ...], list[LayerRecord]] = {}  # layers whose printed rows are equal
    for one in found.layers:
        key = (one.side, one.kind, one.heads, one.key_heads, _position(one), _window(one))
        rows.setdefault(key, []).append(one)
    for alike in rows.values():
        first, proof = alike[0], max(max(each.outputs, each.weights or 0.0) for each in alike)
        count = str(first.heads) if first.heads == first.key_heads else f"{first.heads} on {first.key_heads} KV"
        numbers = spans(each.layer + 1 for each in alike)
        layers.add_row(f"{names.place(first)}L{numbers}", count, _position(first), _window(first), f"{proof:.1e}")
    return [heads, layers, *([_deposits(found)] if known else []), *([_bands(found)] if found.bands else [])]


def _bands(found: Audit) -> Table:
    """Effect of freezing each band of each layer's frequencies; columns as in the layer with the most bands."""
    names = Names.of(found)
    rows = {names.short_layer(layer): found.bands_of(layer) for layer in found.layers}
    widest = max(rows.values(), key=len)
    made = table(
        "Loss increase when a band of frequencies is frozen, by pairs",
        "layer",
        *(f"{band.first + 1}-{band.last + 1}" for band in widest),
    )
    for layer, bands in rows.items():
        if bands:
            made.add_row(layer, *(_short(band.effect, "effect") for band in bands), *["–"] * (len(widest) - len(bands)))
    return made


def _deposits(found: Audit) -> Table:
    """Each layer's helpful and harmful effects, and how concentrated the helpful ones are."""
    title = f"Effect of {done(found)} heads by layer (–: within noise)"
    names = Names.of(found)
    made = table(title, "layer", "helpful", "harmful", "largest", "its share", "eff. heads")
    for layer in found.layers:
        top = max(found.of(layer), key=lambda head: head.effect or 0.0, default=None)
        share = layer.deposit.get("top_share")
        made.add_row(
            names.short_layer(layer),
            *(_short(layer.deposit.get(name), "effect") for name in ("helps", "harms")),
            "–" if top is None or share is None else f"H{top.head + 1}",
            "–" if share is None else f"{fixed(100 * share, 0)}%",
            "–" if share is None else fixed(layer.deposit.get("effective_heads") or 0, 1),
        )
    return made


def probe_table(found: ProbeRecord) -> Table:
    """Loss and accuracy per behaviour; for a changed model also the increase in nats."""
    columns = ("nats per token", "accuracy", *(("changed", "increase") if found.changes else ()))
    made = table("Loss and accuracy (95% intervals)", "predicted", "count", *columns)
    for behaviour in ABOUT:
        for each in found.summaries(behaviour):
            row = [title_of(behaviour).lower(), str(each.count)]
            row += [interval(each.nats, 2), interval(each.right, 2, most=1)]
            if found.changes:
                row += [interval(each.changed_nats, 2), interval(each.more_nats, 2, least=None)]
            made.add_row(*row)
    return made


def weight_notes(about: Mapping[str, Any]) -> Iterator[str]:
    """Notes on weights missing from the checkpoint and on weights that the model does not use."""
    for name, what in (
        (
            "random_weights",
            "random weights, missing from the checkpoint: {} ({}); later results do not describe a trained model",
        ),
        ("unused_weights", "unused weights of the checkpoint: {} ({})"),
    ):
        if weights := about.get(name):
            more = ", ..." if len(weights) > _NAMED else ""
            yield what.format(len(weights), ", ".join(weights[:_NAMED]) + more)


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


def _position(layer: LayerRecord) -> str:
    """How a layer encodes position, in short; a rotation by the number of dimensions that it rotates."""
    return _ROTATION.sub(r"rotates \1/\2 (\3)", layer.position).replace(" of the pairs switched off", " pairs off")


def _window(layer: LayerRecord) -> str:
    """How far back a layer's queries attend."""
    if layer.chunk is not None:
        return f"in {layer.chunk}s"
    return "–" if layer.window is None else f"{layer.window}" if layer.causal else f"±{layer.window - 1}"


def _short(value: float | None, name: str) -> str:
    if value is None or name != "effect" or value == 0 or abs(value) >= 0.0005:
        return fixed(value, 3 if name == "effect" else 2)
    return f"{value:.0e}"


# ---- several models ----------------------------------------------------------------------------------------------


def audit_all(models: Sequence[str], directory: Path, request: Request, workers: Workers, *, as_json: bool) -> None:
    """Audit models, print a line for each, and exit with an error code if one failed."""
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
    """Progress bars over several models, with a line for each finished model."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.done = count, 0

    def of(self, name: str, what: str, done: int, total: int) -> None:
        """Update a model's number of finished layers or heads."""
        self(f"{name}: {what}", done, total)

    def finished(self, found: Audited, new: bool) -> None:
        """Print a finished or failed model."""
        self.done += 1
        for what in [what for what in self.tasks if what.startswith(f"{found.name}: ")]:
            self.bar.remove_task(self.tasks.pop(what))
        told = "failed" if found.why is not None else f"{found.heads} heads"
        if found.why is None:
            seconds = found.about.get("seconds")
            told += ", already done" if not new else "" if seconds is None else f" in {duration(max(1.0, seconds))}"
        say(f"[{self.done}/{self.count}] {found.name}: {told}", aside=True)


def many_table(rows: Sequence[Audited]) -> Table:
    """One line per model: heads, mean positional share, largest effect, proof error."""
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
    """Notes on one of several audits."""
    why = each.about.get("no_effects")
    return [*weight_notes(each.about), *([] if why is None else [f"no effects: {why}"])]
