"""What the commands on pretrained models print: tables of heads, layers and models, notes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from toeplens import report
from toeplens.cli.console import echo, print_json, print_table
from toeplens.cli.progress import ProgressBars
from toeplens.studies.auditing.record import Audit, LayerRecord
from toeplens.studies.auditing.sentences import HeadNames
from toeplens.studies.auditing.study import Data, audit_in
from toeplens.studies.kit.options import AuditOptions
from toeplens.studies.probing.probe import ProbeRecord, mean_text
from toeplens.utils.formatting import fmt, fmt_duration, format_ranges

if TYPE_CHECKING:
    from toeplens.engine import Workers
    from toeplens.studies.auditing.many_models import ModelOutcome

_MAX_HEADS = 12  # heads printed
_MAX_WEIGHTS = 4  # weights named in a note
_ROTATION = re.compile(r"rotation of \d+ pairs, (\d+) of (\d+) dimensions \((\w+)\)")
_PRINTED_COLUMNS = {
    "pos.": "positional",
    "symb.": "symbolic",
    "int.": "interaction",
    "Toep.": "toeplitz",
    "prev.": "previous",
    "first": "first",
    "ind.": "induction",
}


def print_audit(audit: Audit) -> None:
    """Print the heads with the largest effect (or positional share), the layers, and notes."""
    has_effects = any(head.effect is not None for head in audit.heads)
    key = "effect" if has_effects else "positional"
    names, columns = HeadNames.of_audits(audit), _PRINTED_COLUMNS | ({"eff.": "effect"} if has_effects else {})
    ordered = sorted((row for row in audit.heads if getattr(row, key) is not None), key=lambda row: -getattr(row, key))
    heads = [
        [names.short(head), *(_cell_text(getattr(head, name), name) for name in columns.values())]
        for head in ordered[:_MAX_HEADS]
    ]
    print_table(
        "Heads with the largest effect" if has_effects else "Most positional heads",
        ["head", *columns],
        heads,
        caption="Shares of the logits' variance: pos. positional, symb. symbolic, int. interaction; Toep.: Toeplitz "
        "share of their energy. Mean attention: prev. previous token, first token, ind. induction.",
    )
    layers: dict[tuple[str, ...], list[LayerRecord]] = {}  # layers whose printed rows are equal
    for layer in audit.layers:
        count = str(layer.heads) if layer.heads == layer.key_heads else f"{layer.heads} on {layer.key_heads} KV"
        position = _ROTATION.sub(r"rotates \1/\2 (\3)", layer.position)
        layers.setdefault((names.prefix(layer), count, position, _window(layer)), []).append(layer)
    rows = []
    for (prefix, *texts), same_layers in layers.items():
        error = max(max(row.outputs, row.weights or 0.0) for row in same_layers)
        rows.append([f"{prefix}L{format_ranges(row.layer + 1 for row in same_layers)}", *texts, f"{error:.1e}"])
    print_table("Layers", ["layers", "heads", "position", "window", "proof error"], rows)
    for line in audit_notes(audit):
        echo(line)


def print_probe(record: ProbeRecord) -> None:
    """Print loss and accuracy per behaviour; for a changed model also the increase in nats."""
    rows = []
    for summary in record.overview():
        nats, accuracy = mean_text(summary.nats, 2), mean_text(summary.right, 2, most=1)
        row = [summary.title.lower(), str(summary.count), nats, accuracy]
        if record.changes:
            row += [mean_text(summary.changed_nats, 2), mean_text(summary.more_nats, 2, least=None)]
        rows.append(row)
    columns = ("predicted", "count", "nats per token", "accuracy", *(("changed", "increase") if record.changes else ()))
    print_table("Loss and accuracy (95% intervals)", columns, rows)


def model_notes(about: Mapping[str, Any]) -> Iterator[str]:
    """Notes on weights missing from the checkpoint, weights that the model does not use, and the tokenizer."""

    def list_weights(weights: Sequence[str]) -> str:
        return f"{len(weights)} ({', '.join(weights[:_MAX_WEIGHTS])}{', ...' if len(weights) > _MAX_WEIGHTS else ''})"

    if missing := about.get("random_weights"):
        warning = "later results do not describe a trained model"
        yield f"random weights, missing from the checkpoint: {list_weights(missing)}; {warning}"
    if unused := about.get("unused_weights"):
        yield f"unused weights of the checkpoint: {list_weights(unused)}"
    if bos := about.get("unused_bos"):
        yield f"text: the tokenizer has a beginning-of-text token, {bos}, but does not add it to sequences"


def audit_notes(audit: Audit) -> Iterator[str]:
    """Notes on an audit, one line each."""
    yield from model_notes(audit.about)
    if "no_effects" in audit.about:
        yield f"no effects: {audit.about['no_effects']}"
    elif audit.check is not None:
        yield f"estimated effects: {audit.check.summary}"
    if audit.effect is not None and "intervals" in audit.about:
        yield f"intervals are 95%, {audit.about['intervals']}"
    if "race" in audit.about:
        yield audit.about["race"]
    yield f"relative difference between the captured and the plain forward pass: {audit.max_difference:.1e}"


def _window(layer: LayerRecord) -> str:
    """How far back a layer's queries attend."""
    if layer.chunk is not None:
        return f"in {layer.chunk}s"
    return "–" if layer.window is None else f"{layer.window}" if layer.causal else f"±{layer.window - 1}"


def _cell_text(value: float | None, name: str) -> str:
    if name != "effect":
        return fmt(value)
    return f"{value:.0e}" if value and abs(value) < 0.0005 else fmt(value, 3)


def audit_one(model: str, directory: Path, data: Data, options: AuditOptions, *, as_json: bool) -> None:
    """Audit one model, and print its tables and notes."""
    advice = "--effects none skips them."
    if options.first is None and (not isinstance(data, dict) or len(data) < 2):
        advice = "--first 10 finds only the 10 largest effects; --effects none skips them."
    with ProgressBars(advice=advice) as progress:
        show: Any = {"on_progress": progress, "on_estimate": lambda line: echo(line, stderr=True)}
        audit = audit_in(directory, model, data, options, report.write_report, **show)
    page = directory / report.PAGE
    if as_json:
        print_json({**audit.summary(), "page": str(page)})
    else:
        print_audit(audit)
        echo(f"page: {page}")


def audit_all(
    models: Sequence[str], directory: Path, data: Data, options: AuditOptions, workers: Workers, *, as_json: bool
) -> None:
    """Audit models, print a line for each, and exit with an error code if one failed."""
    from toeplens.studies.auditing.many_models import audit_many

    numbers = itertools.count(1)

    def print_outcome(outcome: ModelOutcome, new: bool) -> None:
        message, seconds = f"{outcome.heads} heads", outcome.about.get("seconds")
        if outcome.reason is not None:
            message = "failed"
        elif not new:
            message += ", already done"
        elif seconds is not None:
            message += f" in {fmt_duration(max(1.0, seconds))}"
        progress.finish(f"[{next(numbers)}/{len(models)}] {outcome.name}: {message}", f"{outcome.name}: ")

    with ProgressBars() as progress:
        audits = audit_many(
            models,
            directory,
            data,
            options,
            workers=workers,
            write=report.write_report,
            on_progress=lambda name, task, done, total: progress(f"{name}: {task}", done, total),
            on_done=print_outcome,
        )
    pages = {outcome.name: str(directory / outcome.name / report.PAGE) for outcome in audits.succeeded}
    if as_json:
        print_json({**audits.to_dict(), "pages": pages})
    elif pages:
        _print_models(audits.succeeded)
        for outcome in audits.succeeded:
            reason = outcome.about.get("no_effects")
            for line in (*model_notes(outcome.about), *([] if reason is None else [f"no effects: {reason}"])):
                echo(f"{outcome.name}: {line}")
        echo(f"pages: {directory / '*' / report.PAGE}")
    for outcome in audits.failed:
        echo(f"error: {outcome.name}: {outcome.reason}", stderr=True)
    if audits.code:
        raise typer.Exit(audits.code)


def _print_models(rows: Sequence[ModelOutcome]) -> None:
    columns = ("model", "layers", "heads", "pos.", "loss", "effect", "of", "proof")
    cells = []
    for row in rows:
        numbers = fmt(row.positional, 2), fmt(row.baseline, 3), fmt(row.effect, 3), row.head or "–"
        error = max(row.difference or 0.0, row.max_difference or 0.0)
        cells.append((row.name, str(row.layers), str(row.heads), *numbers, f"{error:.1e}"))
    print_table("Audits (mean positional share, largest effect)", columns, cells)
