"""What studies and measurements print: tables, verdicts, progress."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.table import Table

from toeplens.cli.console import brief, fitted, out, print_in_full, print_page, say, table
from toeplens.engine import Extrapolation
from toeplens.ground.words import fixed, percent, signed, significant
from toeplens.lens import HeadAblation, HeadSets, deposit
from toeplens.lens.ablation import UNCHECKED
from toeplens.papers.deposit import Row
from toeplens.studies import Entry
from toeplens.studies.decomposition import Origins, RunStructure
from toeplens.studies.grid import Grid, language
from toeplens.studies.grid.language import LanguageRow
from toeplens.studies.kit.study import State
from toeplens.studies.kit.verdicts import verdict_text

_EFFECTS = {  # metric: its effect, factor of the unit, decimals
    "accuracy": ("Accuracy drop (percentage points)", 100, 1),
    "loss": ("Loss increase (nats)", 1, 3),
    "kl": ("KL divergence from the intact model (nats)", 1, 3),
}
_WAYS = {
    "zero": "when the head is zero-ablated",
    "mean": "when the head is mean-ablated",
    "resample": "when the head is resample-ablated",
    "position": "when the head's position is ablated",
}
_ROOM = 30  # columns needed to print statements
_COLOURS = {
    "holds": "green",
    "holds in part": "yellow",
    "fails": "red",
    "leans to hold": "dim green",
    "leans to fail": "dim red",
    "undecided": "dim",
}

per_cent = partial(percent, sign=False)


def print_study(state: State, page: Path, tables: Sequence[Table] = (), *, as_json: bool) -> None:
    """Print a study's tables, claims, progress and page; or the same as JSON."""
    if not as_json:
        for each in tables:
            out.print(each)
        if state.entries:
            print_claims(state.entries)
        if not state.complete:
            say(f"{state.progress}. Run the same command to resume.")
    about = {"finished": state.finished, "total": state.total, **state.summary()}
    print_page(page, as_json=as_json, **about, claims=[entry.to_dict() for entry in state.entries])


def print_claims(entries: Sequence[Entry], *, full: bool = False) -> None:
    """Print the ledger: one line per claim, one column per protocol; ``full`` adds statement, rule and source."""
    protocols = list(dict.fromkeys(entry.protocol for entry in entries))
    heads = ["verdict" if protocol is None else f"{protocol} protocol" for protocol in protocols]
    claims = list(dict.fromkeys(entry.claim for entry in entries))
    pills = {
        (each.claim.id, each.protocol): f"[{_COLOURS[each.verdict]}]{verdict_text(each.verdict)}[/]" for each in entries
    }
    rows = [[pills.get((claim.id, protocol), "–") for protocol in protocols] for claim in claims]
    if full:
        for claim, row in zip(claims, rows, strict=True):
            about = {name: escape(getattr(claim, name)) for name in ("statement", "rule", "source")}
            print_in_full([(claim.id, dict(zip(heads, row, strict=True)) | about)])
        return
    used = max(len(claim.id) for claim in claims) + sum(len(head) + 3 for head in heads) + 8
    stated = out.width - used >= _ROOM
    made = brief("claim", *heads, "statement") if stated else table(None, "claim", *heads)
    for claim, row in zip(claims, rows, strict=True):
        made.add_row(claim.id, *row, *([escape(claim.statement)] if stated else []))
    out.print(made)
    say("Rules and sources: toeplens claims DIR --full")


def accuracy_tables(rows: Sequence[Row]) -> list[Table]:
    """Accuracy by encoding, the paper's and ours: one table per protocol and task."""
    columns = ("encoding", "paper", "ours", "range over seeds", "largest head drop (points)", "head")
    tables: dict[tuple[str, str], Table] = {}
    for row in rows:
        heading = f"{row.task}, {row.protocol} protocol: test accuracy in % (chance {per_cent(row.chance)})"
        tables.setdefault((row.protocol, row.task), table(heading, *columns)).add_row(
            row.title,
            fixed(row.paper, 1),
            per_cent(row.accuracy) + (f" ({row.diverged} diverged)" if row.diverged else ""),
            f"{per_cent(row.lowest)}–{per_cent(row.highest)}" if row.seeds > 1 else "one seed",
            per_cent(row.largest_drop),
            "–" if row.where is None else row.where.replace("layer ", "L").replace(" head ", " H"),
        )
    return list(tables.values())


def matrix_tables(state: Grid) -> list[Table]:
    """Bits per byte of language models; accuracy by task and encoding otherwise. Scans are only on the page."""
    columns = [column for column in state.spec.columns() if not column.scan]
    places = {(row.task, row.label): row for row in state.matrix()}
    spoken: dict[str, list[LanguageRow]] = {}  # per language task, its measured encodings, best first
    for row in language.language_rows(state.spec, state.results):
        spoken.setdefault(row.task, []).append(row)
    lines = []
    for task in state.spec.tasks:
        rows = [places.get((task, column.label)) for column in columns]
        if any(rows) and task not in spoken:
            guess = max(row.length_chance for row in rows if row)
            scores = ["–" if row is None else per_cent(row.accuracy) + "*" * bool(row.learning) for row in rows]
            lines.append([escape(state.spec.title_of(task)), per_cent(guess), *scores])
    heads = ["task", "length-only", *(escape(column.label) for column in columns)]
    tables = [each for task, rows in spoken.items() for each in _language_tables(state, task, rows)]
    if lines or not spoken:
        tables += fitted("Test accuracy (%), mean over seeds", heads, lines)
        if any(row.learning for row in state.matrix()):
            tables[-1].caption = "* some models were still learning when training ended"
    return tables


def _language_tables(state: Grid, task: str, rows: Sequence[LanguageRow]) -> list[Table]:
    """Bits per byte, increase on longer texts, needles; n-gram baselines in the caption."""
    long = f"at {language.LONG:g}×"
    heads = ["encoding", "bits per byte", "over seeds", f"increase {long}", "needles (%)", f"needles {long} (%)"]
    lines = [
        [
            escape(row.title),
            fixed(row.bits, 3),
            f"{fixed(row.lowest, 3)}–{fixed(row.highest, 3)}" if row.seeds > 1 else "one seed",
            signed(row.lost, 3),
            per_cent(row.needle),
            per_cent(row.needle_long),
        ]
        for row in rows
    ]
    tables = fitted(
        f"{escape(state.spec.title_of(task))}: bits per byte at the training length, best first", heads, lines
    )
    bits = next(
        cell.measure("bits") for cell in state.results.cells if cell.key.task == task and language.is_language(cell)
    )
    counted = ", ".join(f"{value:.3f} (context {order})" for order, value in sorted(bits.ngrams.items()))
    if counted:
        tables[0].caption = f"n-gram baselines by context length: {counted}"
    return tables


def ablation_tables(ablation: HeadAblation) -> list[Table]:
    """Effect of each head with its interval and, for accuracy, each layer's deposit."""
    heads = ablation.drops.shape[1]
    effect, factor, digits = _EFFECTS[ablation.metric]
    title, check = f"{effect} {_WAYS[ablation.intervention]}, with 95% interval", ablation.check
    if ablation.method == "attribution":
        title += ", first order" if check and check.holds else ": first-order estimates, not effects"
    lines = []
    for layer, rows in enumerate(zip(ablation.drops, ablation.low, ablation.high, strict=True), start=1):
        cells = [[fixed(factor * x, digits) for x in row] for row in rows]
        lines.append([str(layer), *(f"{x} [dim]{low}..{high}[/]" for x, low, high in zip(*cells, strict=True))])
    drops = fitted(title, ["layer", *(f"head {h + 1}" for h in range(heads))], lines)
    if ablation.method == "attribution":
        drops[-1].caption = check.words if check else UNCHECKED
    if ablation.metric != "accuracy":
        return drops
    kinds = []
    for layer, row in enumerate(deposit(ablation), start=1):
        figures = (row.peak, row.second, row.top_share, row.effective_heads, row.gini)
        kinds.append([str(layer), row.kind, *map(fixed, figures)])
    columns = ("layer", "kind", "peak", "second", "top share", "effective heads", "Gini")
    return [*drops, table("Deposit: how the drops are spread over the heads of a layer", *columns, rows=kinds)]


def sets_table(sets: HeadSets) -> Table:
    """Accuracy against the number of heads ablated in the whole model."""
    rows = []
    for size in np.flatnonzero(~np.isnan(sets.greedy)):
        row = (sets.greedy[size], sets.importance[size], sets.random[:, size].mean(), sets.random[:, size].min())
        rows.append((str(size), *map(per_cent, row)))
    columns = ("heads ablated", "greedy order", "by single effect", "random, mean", "random, lowest")
    return table("Accuracy as more heads are ablated (%)", *columns, rows=rows)


def extrapolation_tables(found: Extrapolation) -> list[Table]:
    """Accuracy by sequence length, with the baselines' accuracy."""
    columns = ("tokens", "times training", "accuracy", "95% interval", "chance", "length-only", "best simple rule")
    rows = []
    for row in found.rows:
        figures = ["–"] * 5
        if row.accuracy is not None and row.low is not None and row.high is not None:
            rule, best = max(row.baselines.items(), key=lambda item: item[1])
            guesses = (per_cent(row.chance or 0.0), per_cent(row.length_chance or 0.0), f"{per_cent(best)} ({rule})")
            figures = [per_cent(row.accuracy), f"{per_cent(row.low)} to {per_cent(row.high)}", *guesses]
        rows.append([str(row.length), f"{row.factor:g}", *figures])
    return fitted(f"Accuracy beyond the training length of {found.trained_length} tokens (%)", columns, rows)


def structure_table(structure: RunStructure) -> Table:
    """Each head's kind and shares of logit variance, and how Toeplitz its logits are."""
    columns = ("head", "kind", "position", "content", "coupled", "Toeplitz share", "explained by distance")
    rows = []
    for layer in structure.layers:
        for head, (share, explained) in enumerate(zip(layer.toeplitz, layer.explained, strict=True)):
            kinds = ["–"] * 4
            if layer.parts is not None:
                kinds = [layer.parts.named[head], *map(fixed, layer.parts.kinds["softmax"][head])]
            rows.append((f"L{layer.layer + 1} H{head + 1}", *kinds, fixed(share), fixed(explained)))
    title = "Decomposition of each head's logits (shares of variance, row means removed)"
    return table(title, *columns, rows=rows)


def decay_tables(structure: RunStructure) -> list[Table]:
    """Best-fitting decay of each head's mean logit with distance, and its kernel's spectrum if known."""
    columns = ("head", "best form", "R²", "half distance (tokens)", "parameters", "symbol", "eigenvalues")
    rows = []
    for layer in structure.layers:
        for head, decay in enumerate(layer.decays):
            told = ["–"] * 6
            if decay is not None:
                figures = [f"{name} {significant(value)}" for name, value in decay.parameters.items()]
                told[:4] = [decay.form, fixed(decay.r2, 3), significant(decay.half_distance), ", ".join(figures)]
            if layer.ends:
                ends = layer.ends[head]
                told[4] = f"{significant(ends.symbol_low)} to {significant(ends.symbol_high)}"
                told[5] = f"{significant(ends.lowest)} to {significant(ends.highest)}"
            rows.append([f"L{layer.layer + 1} H{head + 1}", *told])
    title = "Decay of each head's mean logit with distance; range of its position kernel's symbol and eigenvalues"
    return fitted(title, columns, rows)


def origins_table(found: Origins) -> Table:
    """Relevance: parts of the predicted classes' logits, mean over sequences and in % of the mean logit."""
    rows = [
        (name.replace("_", ", "), significant(value), per_cent(value / found.logit if found.logit else None))
        for name, value in found.parts.items()
    ]
    title = f"Relevance of the predicted logits (mean {significant(found.logit)})"
    return table(title, "part", "logit", "share (%)", rows=rows)
