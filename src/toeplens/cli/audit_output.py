"""What the commands on pretrained models print: tables of heads, layers and models, notes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from toeplens import report
from toeplens.cli.console import print_json, print_table, say
from toeplens.cli.progress import ProgressBars
from toeplens.ground.words import duration, fixed, spans
from toeplens.studies.auditing.record import LayerRecord
from toeplens.studies.auditing.result import Audit
from toeplens.studies.auditing.study import Data, audit_in
from toeplens.studies.auditing.words import Names
from toeplens.studies.kit.options import AuditOptions
from toeplens.studies.kit.questions import ABOUT
from toeplens.studies.probing.probe import ProbeRecord, interval, title_of

if TYPE_CHECKING:
    from toeplens.engine import Workers
    from toeplens.studies.auditing.many import Audited

_LISTED = 12  # heads printed
_NAMED = 4  # weights named in a note
_ROTATION = re.compile(r"rotation of \d+ pairs, (\d+) of (\d+) dimensions \((\w+)\)")
_COLUMNS = {
    "pos.": "positional",
    "symb.": "symbolic",
    "int.": "interaction",
    "Toep.": "toeplitz",
    "prev.": "previous",
    "first": "first",
    "ind.": "induction",
}


def print_audit(found: Audit) -> None:
    """Print the heads with the largest effect (or positional share), the layers, and notes."""
    known = any(head.effect is not None for head in found.heads)
    by = "effect" if known else "positional"
    names, columns = Names.of(found), _COLUMNS | ({"eff.": "effect"} if known else {})
    ordered = sorted(
        (each for each in found.heads if getattr(each, by) is not None), key=lambda each: -getattr(each, by)
    )
    heads = [
        [names.short(head), *(_short(getattr(head, name), name) for name in columns.values())]
        for head in ordered[:_LISTED]
    ]
    print_table(
        "Heads with the largest effect" if known else "Most positional heads",
        ["head", *columns],
        heads,
        caption="Shares of the logits' variance: pos. positional, symb. symbolic, int. interaction; Toep.: Toeplitz "
        "share of their energy. Mean attention: prev. previous token, first token, ind. induction.",
    )
    layers: dict[tuple[str, ...], list[LayerRecord]] = {}  # layers whose printed rows are equal
    for one in found.layers:
        count = str(one.heads) if one.heads == one.key_heads else f"{one.heads} on {one.key_heads} KV"
        position = _ROTATION.sub(r"rotates \1/\2 (\3)", one.position)
        layers.setdefault((names.place(one), count, position, _window(one)), []).append(one)
    rows = []
    for (place, *texts), alike in layers.items():
        proof = max(max(each.outputs, each.weights or 0.0) for each in alike)
        rows.append([f"{place}L{spans(each.layer + 1 for each in alike)}", *texts, f"{proof:.1e}"])
    print_table("Layers", ["layers", "heads", "position", "window", "proof error"], rows)
    for line in audit_notes(found):
        say(line)


def print_probe(found: ProbeRecord) -> None:
    """Print loss and accuracy per behaviour; for a changed model also the increase in nats."""
    rows = []
    for each in (each for behaviour in ABOUT for each in found.summaries(behaviour)):
        nats, accuracy = interval(each.nats, 2), interval(each.right, 2, most=1)
        row = [title_of(each.behaviour).lower(), str(each.count), nats, accuracy]
        if found.changes:
            row += [interval(each.changed_nats, 2), interval(each.more_nats, 2, least=None)]
        rows.append(row)
    columns = ("predicted", "count", "nats per token", "accuracy", *(("changed", "increase") if found.changes else ()))
    print_table("Loss and accuracy (95% intervals)", columns, rows)


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
    if name != "effect":
        return fixed(value)
    return f"{value:.0e}" if value and abs(value) < 0.0005 else fixed(value, 3)


def audit_one(model: str, directory: Path, data: Data, options: AuditOptions, *, as_json: bool) -> None:
    """Audit one model, and print its tables and notes."""
    advice = "--effects none skips them."
    if options.first is None and (not isinstance(data, dict) or len(data) < 2):
        advice = "--first 10 finds only the 10 largest effects; --effects none skips them."
    with ProgressBars(advice=advice) as progress:
        found = audit_in(directory, model, data, options, report.write_report, on_progress=progress)
    page = directory / report.PAGE
    if as_json:
        print_json({**found.summary(), "page": str(page)})
    else:
        print_audit(found)
        say(f"page: {page}")


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

    with ProgressBars() as progress:
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
        _print_models(found.done)
        for each in found.done:
            why = each.about.get("no_effects")
            for line in (*weight_notes(each.about), *([] if why is None else [f"no effects: {why}"])):
                say(f"{each.name}: {line}")
        say(f"pages: {directory / '*' / report.PAGE}")
    for each in found.failed:
        say(f"error: {each.name}: {each.why}", aside=True)
    if found.code:
        raise typer.Exit(found.code)


def _print_models(rows: Sequence[Audited]) -> None:
    columns = ("model", "layers", "heads", "pos.", "loss", "effect", "of", "proof")
    cells = []
    for each in rows:
        figures = fixed(each.positional, 2), fixed(each.baseline, 3), fixed(each.effect, 3), each.head or "–"
        proof = max(each.difference or 0.0, each.whole or 0.0)
        cells.append((each.name, str(each.layers), str(each.heads), *figures, f"{proof:.1e}"))
    print_table("Audits (mean positional share, largest effect)", columns, cells)
